"""Which tokenizer belongs to tokens that are ready: the one that is stated, or that their files name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hfgpt.config import PretrainConfig
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.sources import Source, text_hash
from hfgpt.data.units import Row
from hfgpt.errors import UserError

LLM_C = "llm.c"  # a layout of GPT-2's tokens only


def choose_tokenizer(config: PretrainConfig, source: Source) -> PretrainConfig:
    """Return the settings with the tokenizer of tokens. Raises UserError if none is stated or named by the files."""
    if config.is_stated("tokenizer") or config.init_from is not None:
        refuse_trained(config.tokenizer, f"dataset={config.dataset} contains tokens")
        return config
    if source.made_with.name is not None:
        return config.with_facts(tokenizer=source.made_with.name)
    if source.fingerprint["tokens"] == LLM_C:
        return config.with_facts(tokenizer="gpt2")
    what = f"dataset={config.dataset} contains tokens, whose files do not name their tokenizer"
    raise UserError(f"tokenizer: {what}; set --tokenizer to the one that they were made with")


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


def hashes_of_copies(source: Source, rows: Sequence[Row], encoder: Encoder, tokenizer: Any) -> frozenset[int]:
    """Return the hashes that texts have as tokens, if `source` has tokens, else those that tokens have as text."""
    if source.has_tokens:
        texts = [row for row in rows if isinstance(row, str)]
        return frozenset(text_hash(np.array(ids, np.int32)) for ids in encoder.tokens(texts))
    return frozenset(text_hash(tokenizer.decode(row)) for row in rows if isinstance(row, np.ndarray))
