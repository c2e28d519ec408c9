"""Tokenizers: load or train one, encode documents so that their text never makes a special token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hfgpt.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BPE_TRAINING_CHARACTERS = 20_000_000


def load_tokenizer(name: str, texts: Callable[[], Iterable[str]], model_max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer called `name`, for a model of `model_max_length` positions.

    `"char"` has one token per character of `texts()`, ids in sorted-character order, no special token.
    `"bpe-N"` is a byte-level BPE of N entries trained on the first 20 M characters of `texts()`, with
    `<|endoftext|>` as bos, eos and pad. Anything else is a folder or a Hub name for `AutoTokenizer`.
    Raises `UserError` for a name that is none of these.
    """
    # Parallel encoding in this process would make every later fork warn, and could hang the child.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name == "char":
        backend, specials = _character_backend(texts()), {}
    elif name.startswith("bpe-"):
        backend = _train_bpe(name, texts())
        specials = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    else:
        return _from_pretrained(name, model_max_length)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=model_max_length, clean_up_tokenization_spaces=False, **specials
    )


def _character_backend(texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    # The newline ends each document (see Encoder), so it has an id even where no text holds one.
    vocabulary = {character: i for i, character in enumerate(sorted(characters | {"\n"}))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    return backend


def _train_bpe(name: str, texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    size = name.removeprefix("bpe-")
    if not size.isdecimal() or int(size) < 257:
        raise UserError(
            f"tokenizer={name}: bpe-N needs a number of entries of at least 257 (256 bytes and "
            f"{END_OF_TEXT}); for example bpe-4096"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_characters(texts, BPE_TRAINING_CHARACTERS), trainer)
    return backend


def _first_characters(texts: Iterable[str], limit: int) -> Iterable[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def _from_pretrained(name: str, model_max_length: int) -> PreTrainedTokenizerFast:
    folder = Path(name)
    if not folder.exists() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise UserError(f"tokenizer={name}: no such folder; give char, bpe-N, a tokenizer folder or a Hub name")
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"model_max_length": model_max_length, "clean_up_tokenization_spaces": False}
    if {path.name for path in folder.glob("*")} >= {"vocab.json", "merges.txt"} and not any(
        (folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "config.json")
    ):
        options["tokenizer_type"] = "gpt2"  # the bare pair of files says nothing about its class
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # each broken or missing tokenizer fails in its own way
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"tokenizer={name}: not char, not bpe-N, and no tokenizer could be loaded from a folder or Hub "
            f"repository of that name ({reason}); give one of these three"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer={name}: has no `tokenizers` backend; give one with a tokenizer.json")
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | os.PathLike[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json so that stock transformers 4 and 5 load equal ids.

    transformers 5 alone would name a class that 4 does not know; `PreTrainedTokenizerFast` is in both,
    and reads tokenizer.json as it stands.
    """
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    for transient in ("backend", "is_local", "local_files_only"):
        config.pop(transient, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _specification(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return json.loads(tokenizer.backend_tokenizer.to_str())


def _is_character_level(specification: dict[str, Any]) -> bool:
    model = specification["model"]
    return (
        model["type"] == "BPE"
        and not model["merges"]
        and specification["pre_tokenizer"] is None
        and all(len(token) == 1 for token in model["vocab"])
    )


class Encoder:
    """Turns documents into ids, the separator in front of each; special tokens inside text stay text.

    `separator_id` is the tokenizer's end-of-text id, or None (character level): then a document that does
    not end in a newline gets one, so that documents do not run together. `fingerprint` names the
    vocabulary and rules. Pickles, and encodes in threads and in forked processes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        specification = _specification(tokenizer)
        rules = {key: specification[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        self.fingerprint = xxhash.xxh3_64_hexdigest(json.dumps(rules, sort_keys=True).encode())
        self.separator_id: int | None = tokenizer.eos_token_id
        # The backend itself forgets this flag when pickled, and transformers resets it on its own copy.
        self._backend_json = json.dumps({**specification, "truncation": None, "padding": None})
        self._id_of_codepoint: np.ndarray | None = None
        if _is_character_level(specification):
            vocabulary: dict[str, int] = specification["model"]["vocab"]
            table = np.full(max(map(ord, vocabulary)) + 1, -1, np.int32)
            table[[ord(character) for character in vocabulary]] = list(vocabulary.values())
            self._id_of_codepoint = table
        self._backend: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None}

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One int32 array of ids for each document. Raises `UserError` for an unknown character."""
        if self.separator_id is None:
            texts = [text if text.endswith("\n") else text + "\n" for text in texts]
        encode = self._subwords if self._id_of_codepoint is None else self._characters
        if self.separator_id is None:
            return [encode(text) for text in texts]
        separator = np.array([self.separator_id], np.int32)
        return [np.concatenate((separator, encode(text))) for text in texts]

    def _subwords(self, text: str) -> np.ndarray:
        if self._backend is None:
            from tokenizers import Tokenizer

            backend = Tokenizer.from_str(self._backend_json)
            backend.encode_special_tokens = True
            self._backend = backend
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def _characters(self, text: str) -> np.ndarray:
        assert self._id_of_codepoint is not None
        codepoints = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = codepoints < len(self._id_of_codepoint)
        ids = np.where(known, self._id_of_codepoint[np.where(known, codepoints, 0)], -1)
        if (ids < 0).any():
            character = text[int(np.argmax(ids < 0))]
            raise UserError(
                f"tokenizer: the character {character!r} (U+{ord(character):04X}) is not in the character "
                f"vocabulary of {int((self._id_of_codepoint >= 0).sum())} symbols, and unknown characters are "
                "never dropped; take it out of the text or train with a bpe-N tokenizer"
            )
        return ids


def unknown_characters(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """Characters of `text` that a character tokenizer has no id for, sorted; empty for other tokenizers."""
    specification = _specification(tokenizer)
    if not _is_character_level(specification):
        return []
    return sorted(set(text) - specification["model"]["vocab"].keys())


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> np.ndarray | None:
    """UTF-8 bytes that each id stands for, int32 of shape [len(tokenizer)], special tokens 0.

    Known for byte-level BPE, where each character of a token stands for one byte, and for character
    tokenizers; None for any other.
    """
    specification = _specification(tokenizer)
    byte_level = (specification["decoder"] or {}).get("type") == "ByteLevel"
    if not byte_level and not _is_character_level(specification):
        return None
    vocabulary: dict[str, int] = specification["model"]["vocab"]
    added = specification["added_tokens"]
    lengths = np.zeros(max([*vocabulary.values(), *(token["id"] for token in added)]) + 1, np.int32)
    for token, i in vocabulary.items():
        lengths[i] = len(token) if byte_level else len(token.encode())
    for token in added:
        lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return lengths
