"""The tokenizer of a run: given, or loaded as soon as tokens that are ready need it, or else trained on the text."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import cast

from transformers import PreTrainedTokenizerFast

from hfgpt.config import PretrainConfig
from hfgpt.data.encoding import Encoder, make_repeatable
from hfgpt.data.remote import check_hub, model_files
from hfgpt.data.source import Source
from hfgpt.data.token_tokenizer import choose_tokenizer, hashes_of_copies, notes_on, refuse_trained, vocabulary_of
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.data.units import Row
from hfgpt.errors import UserError
from hfgpt.files import has_tokenizer
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.model.configuration_gpt2 import model_fields
from hfgpt.settings.field_types import AUTO


class RunTokenizer:
    """The tokenizer of a run, for all of its texts. `config`: the settings, with the name that tokens give as theirs.

    Raises UserError if the sources have tokens and it is not known which tokenizer made them.
    """

    def __init__(
        self, config: PretrainConfig, sources: Mapping[str, Source], given: PreTrainedTokenizerFast | None
    ) -> None:
        self.config = config if given else choose_tokenizer(config, sources)
        self._usual = None if self.config is config else config.tokenizer  # that tokens have replaced by theirs
        self._loaded = given
        self._notes: list[str] = []

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def load(self, texts: Iterable[Row] = ()) -> PreTrainedTokenizerFast:
        """Return the tokenizer; the first time, load it, or train it on `texts`."""
        if self._loaded is None:
            try:
                self._loaded = _load(self.config, texts)
            except UserError as error:
                if self._usual is None:
                    raise
                fix = "state the right one with --tokenizer PATH, or as `tokenizer:` of that source of a mixture"
                usual = f" in place of the recipe's {self._usual}" if self._usual != AUTO else ""
                raise UserError(f"{error}; the tokens name this tokenizer{usual}: {fix}") from error
        return self._loaded

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The encoder of the tokenizer, which must have been trained before, if it is one that is."""
        tokenizer, name = self.load(), self.config.tokenizer
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        if missing := [token for token in self.config.reserved if token not in special]:
            raise UserError(
                f"reserved_tokens={self.config.reserved_tokens}: tokenizer={name} has no special token {missing[0]}, "
                "and only a new bpe-N reserves some; leave it out, or give a tokenizer that has it"
            )
        encoder = Encoder(make_repeatable(tokenizer))
        if self.config.document_masking and encoder.separator_id is None:
            raise UserError(f"document_masking: tokenizer={name} puts no end-of-text between documents")
        if encoder.separator_is_text:
            raise UserError(
                f"tokenizer={name}: its end-of-text (eos) is {tokenizer.eos_token!r}, a character of ordinary "
                "text, which would end documents; give it an eos_token that is not in the text"
            )
        return encoder

    def readable(self, source: Source, what: str) -> Source:
        """Return a source that can be read: one of text as it is, one of tokens with what their ids may be."""
        if not source.has_tokens:
            return source
        if not self.is_loaded:
            refuse_trained(self.config.tokenizer, f"{what} contains tokens")
        name = self.config.tokenizer
        readable = source.with_vocabulary(vocabulary_of(self.encoder, name, source))
        named = str(self.config.init_from) if name == AUTO else name
        self._notes += [note for note in notes_on(source, what, self.encoder, named) if note not in self._notes]
        return readable

    def hashes_of_copies(self, rows: Iterable[Row], as_tokens: bool) -> frozenset[int]:
        """Return the hashes that texts among `rows` have as tokens, or else those that tokens have as text."""
        others = [row for row in rows if isinstance(row, str) == as_tokens]
        return hashes_of_copies(others, self.encoder, self.load()) if others else frozenset()

    def describe(self) -> list[str]:
        """Return lines for the plan."""
        tokenizer, rows = self.load(), self.encoder.rows
        named = "of init_from" if self.config.tokenizer == AUTO else self.config.tokenizer
        highest = f" with ids up to {rows - 1:,}" if rows > len(tokenizer) else ""
        return [f"tokenizer: {named}, {len(tokenizer):,} entries{highest}", *self._notes]


def _load(config: PretrainConfig, texts: Iterable[Row]) -> PreTrainedTokenizerFast:
    name = config.tokenizer
    if name == AUTO and config.init_from is not None:
        files = model_files(config.init_from)
        if not has_tokenizer(files):
            hint = "gpt2 for nanoGPT's 50,304 rows, char for its character models"
            raise UserError(f"init_from={config.init_from}: has no tokenizer of its own; set --tokenizer ({hint})")
        name = str(files)
    is_trained = name == "char" or name.startswith("bpe-")
    if not (is_trained or os.path.exists(name)):
        check_hub(f"tokenizer={name}", name)
    what, unit = ("training", "documents") if is_trained else ("loading", "")
    n_positions = model_fields(config.model).get("n_positions", 1024)
    with SlowWork(f"{what} the tokenizer {name}", unit) as work:
        counted = cast(Iterable[str], work.count(texts))  # a tokenizer is not trained on tokens
        return load_tokenizer(name, lambda: counted, n_positions, config.reserved)
