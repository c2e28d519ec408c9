"""Load, train and save tokenizers."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfgpt.data.encoding import make_repeatable
from hfgpt.data.remote import quiet_hub
from hfgpt.errors import UserError, message
from hfgpt.links import follow
from hfgpt.model.configuration_gpt2 import model_rows, special_ids
from hfgpt.settings.checks import ALWAYS_RESERVED

# Parallel encoding in this process would make every later fork print a warning, and could hang the child.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

END_OF_TEXT, PAD = ALWAYS_RESERVED
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
BPE_TRAINING_CHARACTERS = 20_000_000
LONGEST_WORD = 2000
ENDLESS = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")


def load_tokenizer(
    name: str, texts: Callable[[], Iterable[str]], model_max_length: int, reserved: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Load or train the tokenizer called `name`, for a model with `model_max_length` positions.

    "char" has one token for each character in `texts()`, in character order, and no special tokens. "bpe-N" is a
    byte-level BPE with N entries, trained on the first 20 M characters of `texts()`, with `<|endoftext|>` as bos, eos
    and pad. Tokens that are `reserved` there are special, and pad is one more. Anything else is a folder or Hub name
    for `AutoTokenizer`. Raises UserError if it is none of these.
    """
    options: dict[str, Any] = {"model_max_length": model_max_length, "clean_up_tokenization_spaces": False}
    if name == "char":
        # A line end follows each document (see Encoder), so it has an id even if no text contains one.
        characters = sorted({"\n", *chain.from_iterable(texts())})
        backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
        backend.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    if name.startswith("bpe-"):
        options |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
        if reserved:  # fine-tuning on chats does not learn pad tokens, but must learn to end a turn
            options["pad_token"], reserved = PAD, (PAD, *reserved)
        return PreTrainedTokenizerFast(tokenizer_object=_train_bpe(name, texts, reserved), **options)
    folder = follow(name)
    files = {path.name for path in folder.glob("*")}
    if "vocab.json" in files and not files & {"tokenizer.json", "tokenizer_config.json", "config.json"}:
        options["tokenizer_type"] = "gpt2"  # this pair of files alone does not name its class
    try:
        with quiet_hub():
            tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else name, **options)
    except Exception as error:  # each broken or missing tokenizer fails in its own way
        raise UserError(
            f"tokenizer={name}: not char or bpe-N, and no tokenizer could be loaded from a folder or Hub "
            f"repository of that name ({message(error)}); give one of these three"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer={name}: {type(tokenizer).__name__} is a slow tokenizer, in Python; only those with a "
            "tokenizer.json are supported; give one of these, char, or bpe-N"
        )
    _check_saved(make_repeatable(tokenizer), name)
    return tokenizer


def _train_bpe(name: str, texts: Callable[[], Iterable[str]], reserved: Sequence[str]) -> Tokenizer:
    size, special = name.removeprefix("bpe-"), [END_OF_TEXT, *reserved]
    least = 256 + len(special)
    if not size.isdecimal() or int(size) < least:
        raise UserError(
            f"tokenizer={name}: bpe-N needs a number of entries of at least {least} (256 bytes and "
            f"{', '.join(special)}); for example bpe-4096"
        )
    bpe = ByteLevelBPETokenizer()
    sample = _first_characters(texts(), BPE_TRAINING_CHARACTERS)
    bpe.train_from_iterator(sample, int(size), min_frequency=0, show_progress=False, special_tokens=special)
    return Tokenizer.from_str(bpe.to_str())


def _first_characters(texts: Iterable[str], limit: int) -> Iterable[str]:
    for text in texts:
        text = text[:limit]
        # Training time grows with the square of a word's length, and nothing this long is a word.
        size = LONGEST_WORD if ENDLESS.search(text) else limit
        yield from (text[start : start + size] for start in range(0, len(text), size))
        limit -= len(text)
        if limit <= 0:
            return


def _check_saved(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Raise UserError if the tokenizer gives other ids after saving and loading: its checkpoints would be unusable."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, folder)
        saved = PreTrainedTokenizerFast.from_pretrained(folder)
    ours, theirs = ({**special_ids(one), "rows": model_rows(one)} for one in (tokenizer, saved))
    changes = [f"{key} is {theirs[key]} instead of {ours[key]}" for key in ours if ours[key] != theirs[key]]
    if changes or tokenizer.get_vocab() != saved.get_vocab():
        raise UserError(
            f"tokenizer={name}: changes when saved and loaded ({', '.join(changes) or 'its vocabulary differs'}); save "
            "it with AutoTokenizer.from_pretrained(..).save_pretrained(..), or use another one"
        )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | os.PathLike[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json, so that stock transformers 4 and 5 both load the same ids.

    Version 5 by itself would name a class that version 4 does not know; `PreTrainedTokenizerFast` is in both, and reads
    tokenizer.json. A batch of prompts is padded on the left, as a model that continues text requires. The special
    tokens are those of `special_ids`.
    """
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    for transient in ("backend", "is_local", "local_files_only"):
        config.pop(transient, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["padding_side"] = "left"
    # In transformers 4 this class also returns token_type_ids, whose embeddings GPT-2 adds to the token embeddings.
    config["model_input_names"] = ["input_ids", "attention_mask"]
    # By content: converting an id to its name may normalize the name, which would then become a new token.
    content = {getattr(tokenizer, f"{name}_id"): getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    for key, i in special_ids(tokenizer).items():
        if i is not None and config.get(name := key.removesuffix("_id")) is None:
            config[name] = content[i]
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", "utf-8", newline="\n")
