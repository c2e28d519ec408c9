"""A tokenizer as llama.cpp's own: the fields of a GGUF file, or one line that says why its ids would differ there.

llama.cpp does not read tokenizer.json. Of a byte-level BPE it takes vocabulary and merges, and knows by name how text
is split into words before. Its tables of characters end with Unicode 15, so that words with newer ones may differ.
Special tokens within a text stay text, as in training, if it is called with `parse_special` false.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerFast

from hfgpt.data import tokenizer_model as rules
from hfgpt.errors import UserError
from hfgpt.model.configuration_gpt2 import model_rows, special_ids

# Kinds of tokens, as in llama.h.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp's names of what splits text into words, in `llm_tokenizer_bpe` of llama-vocab.cpp.
NAMES = {(GPT2_WORDS,): "gpt-2", (r"\p{N}", GPT2_WORDS): "smollm"}


def tokenizer_fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the fields of a GGUF file that describe the tokenizer. Raises UserError if llama.cpp has no equal one."""
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["content"] for token in specification["added_tokens"] if token["special"]}
    special |= set(tokenizer.all_special_tokens)
    characters = rules.find_characters(specification, special)
    if characters is not None and not special:
        fields = _character_fields(characters, model_rows(tokenizer))
    elif (problem := _find_difference(specification, tokenizer)) is None:
        fields = _byte_level_fields(specification, tokenizer, special)
    else:
        raise UserError(
            f"tokenizer: {problem}, so its ids would differ in llama.cpp, which has GPT-2's byte-level BPE (gpt2, "
            "bpe-N) and single characters (char); export a folder"
        )
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | _chat_fields(tokenizer)


def _character_fields(characters: dict[str, int], rows: int) -> dict[str, Any]:
    """Characters as tokens of RWKV's kind, which has neither merges nor special tokens, and takes the longest match.

    All other kinds end a text at one of the first ids, which are characters here.
    """
    tokens = _unused_names(characters, rows)
    for character, i in characters.items():
        plain = character.isascii() and character.isprintable() and character != "\\"
        tokens[i] = character if plain else "".join(f"\\x{byte:02x}" for byte in character.encode())
    kinds = [NORMAL if i in characters.values() else UNUSED for i in range(rows)]
    return {"model": "rwkv", "tokens": tokens, "token_type": kinds, "add_bos_token": False, "add_eos_token": False}


def _find_difference(specification: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return what llama.cpp's byte-level BPE would do in another way; None if nothing."""
    model, added = specification["model"], [token["content"] for token in specification["added_tokens"]]
    if not rules.has_all_bytes(specification):
        return f"it is {model['type']}, not a byte-level BPE with all 256 bytes"
    if specification["normalizer"] is not None:
        return f"it changes text first ({specification['normalizer']['type']})"
    if _words_name(specification) is None:
        return "it splits text into words in a way of its own"
    if model.get("ignore_merges"):
        return "it takes whole words without their merges (ignore_merges)"
    if [step["type"] for step in rules.steps(specification["decoder"])] != ["ByteLevel"]:
        return "its ids are not decoded as bytes"
    for token in specification["added_tokens"]:
        if changes := [key for key in ("lstrip", "rstrip", "single_word") if token[key]]:
            return f"its token {token['content']!r} has {' and '.join(changes)}"
    starts = {token[:size]: token for token in added for size in range(1, len(token))}
    for token in added:  # of two that overlap, the first wins here, the longest there
        for size in range(1, len(token)):
            if (other := starts.get(token[size:], token)) != token:
                return f"its tokens {token!r} and {other!r} can overlap"
    if tokenizer.eos_token_id is None:
        return "it has no end-of-text token (eos), for which llama.cpp would take the token 11"
    return None if _ends_added(tokenizer) is not None else "it adds tokens of its own to a text"


def _words_name(specification: dict[str, Any]) -> str | None:
    """Return llama.cpp's name for the way in which text is split into words; None if it has none."""
    *splits, last = rules.steps(specification["pre_tokenizer"])
    patterns: list[Any] = []
    for step in splits:
        if step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"].get("Regex"))
        else:
            return None
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    return NAMES.get((*patterns, GPT2_WORDS) if last["use_regex"] else (*patterns,))


def _ends_added(tokenizer: PreTrainedTokenizerFast) -> tuple[bool, bool] | None:
    """Return whether the tokenizer adds bos before a text and eos after it; None if it adds something else."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    bos, eos = special_ids(tokenizer)["bos_token_id"], tokenizer.eos_token_id
    for has_bos in (False, True):
        for has_eos in (False, True):
            if tokenizer("a").input_ids == [*[bos] * has_bos, *plain, *[eos] * has_eos]:
                return has_bos, has_eos
    return None


def _byte_level_fields(
    specification: dict[str, Any], tokenizer: PreTrainedTokenizerFast, special: set[str]
) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab()
    rules.refuse_shared_ids(vocabulary)
    tokens = _unused_names(vocabulary, model_rows(tokenizer))
    kinds = [UNUSED] * len(tokens)
    added = {token["content"] for token in specification["added_tokens"]}
    for token, i in vocabulary.items():
        tokens[i] = token
        kinds[i] = CONTROL if token in special else USER_DEFINED if token in added else NORMAL
    merges = rules.without_special_text(specification["model"], special)["merges"]
    ids = {**special_ids(tokenizer), "padding_token_id": tokenizer.pad_token_id}
    add_bos, add_eos = _ends_added(tokenizer) or (False, False)
    fields = {
        "model": "gpt2",
        "pre": _words_name(specification),
        "tokens": tokens,
        "token_type": kinds,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        **{key: ids[key] for key in ("bos_token_id", "eos_token_id", "padding_token_id") if ids[key] is not None},
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    if unused := [i for i, kind in enumerate(kinds) if kind == UNUSED]:
        fields["suppress_tokens"] = unused  # never drawn, as in `hfgpt generate`
    return fields


def _unused_names(vocabulary: dict[str, int], rows: int) -> list[str]:
    """Return a name for each id that no token of the vocabulary has: llama.cpp requires all to differ."""
    ends = "_" * max((len(token) for token in vocabulary if token.startswith("[unused")), default=0)
    return [f"[unused{i}{ends}]" for i in range(rows)]


def _chat_fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # by name, as some tokenizers have several
        template = template.get("default")
    return {"tokenizer.chat_template": template} if isinstance(template, str) and template else {}
