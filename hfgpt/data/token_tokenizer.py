"""Which tokenizer belongs to tokens that are ready: the one that is stated, or that their files name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hfgpt.config import PretrainConfig
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.source import Source, text_hash
from hfgpt.data.units import Row
from hfgpt.errors import UserError

LLM_C = "llm.c"  # a layout of GPT-2's tokens only


def choose_tokenizer(config: PretrainConfig, sources: Mapping[str, Source]) -> PretrainConfig:
    """Return the settings with the tokenizer of the tokens among the sources (of a mixture, by name).

    Raises UserError if none is stated, nor named by the files, or if sources name different ones.
    """
    named: dict[str, tuple[str, str]] = {}  # by what identifies a tokenizer: a source, and the name
    for name, source in sources.items():
        if not source.has_tokens:
            continue
        what = f"source {name}" if name else f"dataset={config.dataset}"
        if config.is_stated("tokenizer") or config.init_from is not None or config.source_tokenizers:
            refuse_trained(config.tokenizer, f"{what} contains tokens")
            return config
        made_with = source.made_with.name or ("gpt2" if source.fingerprint["tokens"] == LLM_C else None)
        if made_with is None:
            why = "whose files do not name their tokenizer"
            if damaged := source.made_with.unreadable:
                why = f"but {damaged}, which names their tokenizer, cannot be read"
            fix = "set --tokenizer to the one that they were made with"
            raise UserError(f"tokenizer: {what} contains tokens, {why}; {fix}")
        named.setdefault(source.made_with.fingerprint or made_with, (what, made_with))
    if len(named) > 1:
        found = " and ".join(f"{what} was made with {made_with}" for what, made_with in named.values())
        raise UserError(f"tokenizer: {found}; a mixture has one, so set --tokenizer if they are the same")
    for _, made_with in named.values():
        return config.with_facts(tokenizer=made_with)
    return config


def refuse_trained(name: str, why: str) -> None:
    """Raise UserError for a tokenizer that would be trained on the text."""
    if name == "char" or name.startswith("bpe-"):
        raise UserError(f"tokenizer={name}: {why}; give the folder or Hub id of the tokenizer that made them")


def vocabulary_of(encoder: Encoder, name: str, source: Source | None = None) -> Vocabulary:
    """Return what an encoder says about ids. Raises UserError if the tokens of `source` are those of another one."""
    if source and source.made_with.fingerprint not in (None, encoder.fingerprint):
        made_with = source.made_with.name or "another one"
        ids = f" (highest id {highest:,}, not {encoder.rows - 1:,})" if (highest := _highest_id(made_with)) else ""
        raise UserError(f"tokenizer={name}: the tokens were made with {made_with}{ids}; give that one")
    return Vocabulary(encoder.separator_id, encoder.rows, name)


def _highest_id(name: str) -> int | None:
    """Return the highest id of a tokenizer, if its file is here."""
    file = Path(name) / "tokenizer.json"
    return max(Tokenizer.from_file(str(file)).get_vocab().values()) if file.is_file() else None


def notes_on(source: Source, what: str, encoder: Encoder, name: str) -> list[str]:
    """Return notes for the plan if files of tokens name another tokenizer than `name`, or can no longer be read."""
    made_with, fingerprint, unreadable = source.made_with
    notes = [f"note: {unreadable} cannot be read; it names the tokenizer of the tokens"] if unreadable else []
    same = {path for path in (made_with, name) if path is not None}
    same = {os.path.realpath(path) if os.path.exists(path) else path.removeprefix("openai-community/") for path in same}
    if made_with is not None and len(same) > 1 and fingerprint != encoder.fingerprint:
        notes.append(f"note: the files of {what} name {made_with} as their tokenizer; --tokenizer {name} is used")
    return notes


def hashes_of_copies(rows: Sequence[Row], encoder: Encoder, tokenizer: Any) -> frozenset[int]:
    """Return the hashes that texts have as tokens, and those that tokens have as text."""
    as_tokens = encoder.tokens([row for row in rows if isinstance(row, str)])
    as_text = [tokenizer.decode(row) for row in rows if isinstance(row, np.ndarray)]
    return frozenset(map(text_hash, [np.array(ids, np.int32) for ids in as_tokens] + as_text))
