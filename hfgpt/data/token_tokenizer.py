"""Which tokenizer belongs to tokens that are ready: the one that is stated, or that their files name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
            what = f"{what} contains tokens, whose files do not name their tokenizer"
            raise UserError(f"tokenizer: {what}; set --tokenizer to the one that they were made with")
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
        raise UserError(f"tokenizer={name}: the tokens were made with {made_with}; give that one")
    return Vocabulary(encoder.separator_id, encoder.rows, name)


def hashes_of_copies(rows: Sequence[Row], encoder: Encoder, tokenizer: Any) -> frozenset[int]:
    """Return the hashes that texts have as tokens, and those that tokens have as text."""
    as_tokens = encoder.tokens([row for row in rows if isinstance(row, str)])
    as_text = [tokenizer.decode(row) for row in rows if isinstance(row, np.ndarray)]
    return frozenset(map(text_hash, [np.array(ids, np.int32) for ids in as_tokens] + as_text))
