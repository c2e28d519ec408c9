"""Text as units of rows, and how its documents are read.

A `Source` is a list of units that can be read independently (a row group of a parquet file, a span of a text file), so
they can be read in any order, and resumed anywhere without reading what comes before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from hfgpt.data.file_access import read_file
from hfgpt.data.formats import given, inspect_file, read_rows
from hfgpt.data.formats.text import choose_piece_characters, split_into_pieces
from hfgpt.data.formats.tokens.column import TokenColumn, find_column_units
from hfgpt.data.formats.tokens.opening import MadeWith
from hfgpt.data.formats.tokens.reading import TokenFiles, Vocabulary
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.permutation import permutation
from hfgpt.data.units import BAD, Row, Unit, Unusable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Source:
    """Text as units of rows. It can be pickled, and reading does not change it.

    `exclude`: `text_hash` of documents to skip. `skipped_files`: number of files left out when it was opened. `given`:
    a `datasets.Dataset` whose text is read instead of files. `tokens`: how token ids are read, if it has these instead
    of text; `made_with`: the tokenizer that they name. `validation`: units that are validation text by their names.
    `by_file`: units are files, whose own units are found when they are read, see `Unit`. `piece_characters`: that of
    their units, for a stream. `training_size`: see `HeldOut.size`.
    """

    units: list[Unit]
    text_column: str
    size_bytes: int
    is_local: bool
    fingerprint: dict[str, Any]
    description: str
    exclude: frozenset[int] = frozenset()
    patience_seconds: float = 900.0
    skip_bad_files: bool = False
    skipped_files: int = 0
    given: Any = None
    tokens: TokenFiles | TokenColumn | None = None
    made_with: MadeWith = MadeWith()
    validation: list[Unit] = field(default_factory=list)
    by_file: bool = False
    piece_characters: int | None = None
    training_size: float | None = None

    @property
    def has_tokens(self) -> bool:
        return self.tokens is not None

    def with_vocabulary(self, vocabulary: Vocabulary) -> Source:
        """Return the same tokens, which can be read only after this. Raises UserError if their ids do not fit."""
        assert self.tokens is not None  # noqa: S101
        return dataclasses.replace(self, tokens=self.tokens.check(vocabulary))

    def split_for_stream(self, piece_characters: int | None = None) -> Source:
        """Return the same text with txt files split into pieces, because a stream needs many documents.

        `piece_characters`: the size of the pieces; by default one that gives enough documents.
        """
        if isinstance(self.tokens, TokenFiles):
            tokens = self.tokens.in_pieces()
            pieces = {"token_pieces": tokens.piece_tokens} if tokens.piece_tokens else {}
            return dataclasses.replace(self, tokens=tokens, fingerprint={**self.fingerprint, **pieces})
        text_units = [unit for unit in self.units if file_kind(unit.file) == "text"]
        size = piece_characters or choose_piece_characters(text_units)
        if size is None:
            return self
        fingerprint = {**self.fingerprint, "text_pieces": size}
        if self.by_file:
            return dataclasses.replace(self, piece_characters=size, fingerprint=fingerprint)
        split = [split_into_pieces(unit, size) if file_kind(unit.file) == "text" else [unit] for unit in self.units]
        return dataclasses.replace(self, units=[*chain(*split)], fingerprint=fingerprint)

    def units_of(self, unit: Unit) -> list[Unit]:
        """Return the parts of a unit that are read one at a time: itself, or with `by_file` the units of the file.

        Reads the head or footer of the file. Raises like `read`.
        """
        if not self.by_file:
            return [unit]
        try:
            inspect = partial(find_column_units if self.has_tokens else inspect_file, unit.file, self.text_column)
            units, _ = read_file(unit.file, inspect, self.patience_seconds)
        except BadFile as error:
            self._leave_out(error)
            return [unit._replace(start=BAD, rows=None)]
        if self.piece_characters and file_kind(unit.file) == "text":
            units = [piece for whole in units for piece in split_into_pieces(whole, self.piece_characters)]
        if unit.stop >= 0:
            units = units[: unit.stop]
        if unit.rows is not None:
            units[-1] = units[-1]._replace(rows=unit.rows, characters=unit.characters)
        return units

    def unit(self, number: int | tuple[int, int]) -> Unit:
        """Return a unit by its number, or with `by_file` by the numbers of the file and of the unit in it."""
        return self.units[number] if isinstance(number, int) else self.units_of(self.units[number[0]])[number[1]]

    def _leave_out(self, error: BadFile) -> None:
        if not self.skip_bad_files:
            raise error
        logger.warning("left out: %s", error)

    def read(self, unit: Unit) -> list[Row | Unusable]:
        """Return all rows of a unit, in file order.

        Raises BadFile if the whole file cannot be read, RunError if the network fails for too long.
        """
        if unit.start == BAD:
            return [Unusable("bad_file")]
        try:
            return read_file(unit.file, lambda: self._read_rows(unit), self.patience_seconds)
        except BadFile as error:
            self._leave_out(error)
            return [Unusable("bad_file")]

    def _read_rows(self, unit: Unit) -> list[Row | Unusable]:
        if self.tokens is not None:
            rows = self.tokens.read(unit)[: unit.rows]
        elif self.given is not None:
            rows = given.read_rows(unit, self.text_column, self.given)[: unit.rows]
        else:
            rows = read_rows(unit, self.text_column)[: unit.rows]
        last = [self._document(row, unit.characters) for row in rows[-1:]]
        return [*(self._document(row) for row in rows[:-1]), *last]

    def _document(self, row: Any, characters: int | None = None) -> Row | Unusable:
        """Return the document in a row (its first `characters`), or an `Unusable` with the reason."""
        if isinstance(row, Unusable):
            return row
        if isinstance(row, np.ndarray):
            row = row[:characters]
            return Unusable("in_validation") if self.exclude and text_hash(row) in self.exclude else row
        try:
            text = row.decode() if isinstance(row, bytes) else row
            if not isinstance(text, str):
                return Unusable("null" if text is None else "not_text")
            text = text[:characters]
            if not text or text.isspace():
                return Unusable("whitespace" if text else "empty")
            return Unusable("in_validation") if text_hash(text) in self.exclude else text
        except UnicodeDecodeError:
            return Unusable("invalid_utf8")
        except UnicodeEncodeError:
            return Unusable("lone_surrogate")


def read_documents(source: Source, units: Iterable[Unit], skipped: Counter[str]) -> Iterator[Row]:
    """Yield the documents of these units; count rows without one in `skipped`, by reason."""
    for row in chain.from_iterable(map(source.read, chain.from_iterable(map(source.units_of, units)))):
        if isinstance(row, Unusable):
            skipped[row.reason] += 1
        else:
            yield row


def read_shuffled(source: Source, seed: int) -> Iterator[Row]:
    """Yield the documents of the units in a fixed random order, so that the first ones are a representative sample."""
    order = permutation(len(source.units), seed).tolist()
    if not source.by_file:
        return read_documents(source, [source.units[i] for i in order], Counter())
    return read_documents(dataclasses.replace(source, by_file=False), _one_of_each_file(source, order, seed), Counter())


def _one_of_each_file(source: Source, order: list[int], seed: int) -> Iterator[Unit]:
    """Yield a random unit of each file, then another one of each file, and so on."""
    opened: list[list[Unit]] = []
    for number in order:
        units = source.units_of(source.units[number])
        opened.append([units[i] for i in permutation(len(units), seed, number)])
        yield from opened[-1][:1]
    for turn in range(1, max(map(len, opened))):
        yield from (units[turn] for units in opened if turn < len(units))


def hashes_of_pieces(source: Source, piece_characters: int, characters: int) -> frozenset[int]:
    """Return the hashes of the first documents, up to so many characters, with txt files split into pieces."""
    hashes, split = set[int](), source.split_for_stream(piece_characters)
    for piece in read_documents(split, split.units, Counter()):
        hashes.add(text_hash(piece))
        characters -= len(piece)
        if characters <= 0:
            break
    return frozenset(hashes)


def text_hash(text: Row) -> int:
    """Return the xxh3_64 hash of the UTF-8 bytes of a text, or of ids as little-endian int32."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else np.ascontiguousarray(text, "<i4").data)
