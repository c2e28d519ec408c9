"""Where text comes from: local files, datasets on the Hub, or the documentation that every Python includes.

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
from typing import Any, NamedTuple

import numpy as np
import xxhash

from hfgpt.data import embedded
from hfgpt.data.file_access import read_file
from hfgpt.data.file_hashes import hash_files, is_earlier_hash
from hfgpt.data.find_files import FoundFiles, find_local, find_on_hub, refuse_meaningless_settings
from hfgpt.data.formats import format_of, given, inspect_file
from hfgpt.data.formats.text import choose_piece_characters, split_into_pieces
from hfgpt.data.formats.tokens.column import TokenColumn, find_column_units
from hfgpt.data.formats.tokens.opening import MadeWith, open_token_files, refuse_token_settings
from hfgpt.data.formats.tokens.reading import TokenFiles, Vocabulary
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.opening import open_files
from hfgpt.data.permutation import permutation
from hfgpt.data.units import BAD, IN_MEMORY_BYTES, Row, Unit, Unusable

logger = logging.getLogger(__name__)

START_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, eq=False)
class Source:
    """Text as units of rows. It can be pickled, and reading does not change it.

    `exclude`: `text_hash` of documents to skip. `skipped_files`: number of files left out when it was opened. `given`:
    a `datasets.Dataset` whose text is read instead of files. `tokens`: how token ids are read, if it has these instead
    of text; `made_with`: the tokenizer that they name. `validation`: units that are validation text by their names.
    `by_file`: units are files, whose own units are found when they are read, see `Unit`. `piece_characters`: that of
    their units, for a stream.
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

    @property
    def has_tokens(self) -> bool:
        return self.tokens is not None

    def with_vocabulary(self, vocabulary: Vocabulary) -> Source:
        """Return the same tokens, which can be read only after this. Raises UserError if their ids do not fit."""
        assert self.tokens is not None  # noqa: S101
        return dataclasses.replace(self, tokens=self.tokens.check(vocabulary))

    def split_for_stream(self) -> Source:
        """Return the same text with txt files split into pieces, because a stream needs many documents."""
        if isinstance(self.tokens, TokenFiles):
            tokens = self.tokens.in_pieces()
            pieces = {"token_pieces": tokens.piece_tokens} if tokens.piece_tokens else {}
            return dataclasses.replace(self, tokens=tokens, fingerprint={**self.fingerprint, **pieces})
        text_units = [unit for unit in self.units if file_kind(unit.file) == "text"]
        size = choose_piece_characters(text_units)
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
            rows = format_of(unit.file).read_rows(unit, self.text_column)[: unit.rows]
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


def text_hash(text: Row) -> int:
    """Return the xxh3_64 hash of the UTF-8 bytes of a text, or of ids as little-endian int32."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else np.ascontiguousarray(text, "<i4").data)


class Earlier(NamedTuple):
    """What earlier versions did in another way: the order of many files, and the hashes of local ones."""

    order: bool = False
    hashes: bool = False

    @classmethod
    def of(cls, fingerprint: dict[str, Any] | None) -> Earlier:
        """Return what applies to a run with this fingerprint (None: a new run)."""
        if fingerprint is None:
            return cls()
        return cls("dataset.order" not in fingerprint, is_earlier_hash(fingerprint.get("dataset.hash")))


NOT_EARLIER = Earlier()


def open_source(
    dataset: str,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str = "text",
    patience_seconds: float = 900.0,
    skip_bad_files: bool = False,
    tokens_dtype: str | None = None,
    tokens_column: str | None = None,
    *,
    as_earlier: Earlier = NOT_EARLIER,
) -> Source:
    """Open the text called `dataset`: "embedded", a local file, folder (recursively) or glob, or a Hub dataset.

    A folder may be one that `datasets` saved. Of a Hub dataset in other formats, the converted parquet is read.

    A txt file of up to 16 MiB is one document; a larger one is split at line ends into documents of about 64 KiB.
    Reads the head or footer of each file, or of a large text of many files only those of some, and the others when they
    are first read. Waits out network failures for `patience_seconds`.

    Args:
        name, split, revision: select part of a Hub dataset, which is pinned to the commit that they resolve to. Not
            allowed for local text; nor is a `text_column` for text without columns.
        skip_bad_files: leave out broken files instead of raising UserError.
        tokens_dtype: type of the ids in token files without a header. tokens_column: of lists of ids, instead of text.
        as_earlier: what earlier versions did in another way, for a run that began with one.

    Raises UserError for text that cannot be found or read.
    """
    if dataset == embedded.NAME:
        refuse_meaningless_settings(dataset, name, split, revision, text_column)
        refuse_token_settings(dataset, {"tokens_dtype": tokens_dtype, "tokens_column": tokens_column})
        return _open_embedded()
    if (of_python := given.find_given(dataset)) is not None:
        refuse_meaningless_settings(dataset, name, split, revision, "text")
        refuse_token_settings(dataset, {"tokens_dtype": tokens_dtype})
        return _open_given(dataset, of_python, text_column, tokens_column)
    local = find_local(dataset, name, split, revision, text_column, tokens_dtype)
    is_local, patience = local is not None, min(patience_seconds, START_PATIENCE_SECONDS)
    found = local or find_on_hub(dataset, name, split, revision, tokens_dtype, patience)
    files, label, fingerprint, in_split = found
    options: dict[str, Any] = {"patience_seconds": patience_seconds, "skip_bad_files": skip_bad_files}
    options |= {"text_column": tokens_column or text_column, "is_local": is_local}
    if files and file_kind(files[0]) in (None, "tokens"):
        refuse_token_settings(dataset, {"tokens_column": tokens_column})
        return _open_tokens(files, label, fingerprint, tokens_dtype, {*in_split}, options, as_earlier)
    refuse_token_settings(dataset, {"tokens_dtype": tokens_dtype})
    return _open_rows(found, is_local, options, tokens_column, as_earlier)


def _open_rows(
    found: FoundFiles, is_local: bool, options: dict[str, Any], tokens_column: str | None, as_earlier: Earlier
) -> Source:
    """Open files whose rows are texts, or lists of ids in `tokens_column`."""
    files, label, fingerprint, _ = found
    find = inspect_file if tokens_column is None else find_column_units
    opened = open_files(files, find, options, read_all=as_earlier.order)
    if is_local:
        fingerprint = hash_files(opened.files, opened.size_bytes <= IN_MEMORY_BYTES, as_earlier.hashes)
    order = {"order": "files"} if opened.by_file else {}
    facts = {**fingerprint, "bytes": opened.size_bytes, "text_column": options["text_column"], **order}
    return Source(
        units=opened.units,
        size_bytes=opened.size_bytes,
        fingerprint=_facts_of_column(facts, tokens_column),
        description=_describe_files(
            label, len(opened.files), opened.size_bytes, tokens_column and f"column {tokens_column}"
        ),
        skipped_files=len(files) - len(opened.files),
        tokens=TokenColumn(tokens_column) if tokens_column else None,
        by_file=opened.by_file,
        **options,
    )


def _open_tokens(
    files: list[str],
    label: str,
    fingerprint: dict[str, Any],
    tokens_dtype: str | None,
    listed: set[str],
    options: dict[str, Any],
    as_earlier: Earlier,
) -> Source:
    skip_bad_files = options["skip_bad_files"]
    opened = open_token_files(files, tokens_dtype, options["patience_seconds"], listed, skip_bad_files)
    size = opened.size_bytes
    hashed = fingerprint
    if options["is_local"]:
        hashed = hash_files(opened.hashed_files, size <= IN_MEMORY_BYTES, as_earlier.hashes)
    facts = {"bytes": size, "text_column": options["text_column"], "tokens": opened.layouts}
    count = sum(file.count for file in opened.tokens.files.values())
    return Source(
        units=opened.units,
        size_bytes=size,
        fingerprint={**hashed, **facts},
        description=_describe_files(label, len(opened.tokens.files), size, f"{count:,} tokens, {opened.layouts}"),
        tokens=opened.tokens,
        made_with=opened.made_with,
        validation=opened.validation,
        **options,
    )


def _describe_files(label: str, files: int, size_bytes: int, tokens: str | None) -> str:
    return f"{label}: {files:,} file{'s' * (files != 1)}, {size_bytes / 1e6:,.1f} MB{_ready(tokens)}"


def _ready(tokens: str | None) -> str:
    return f" of ready tokens ({tokens})" if tokens else ""


def _open_embedded() -> Source:
    documents = embedded.embedded_documents()
    data = "\0".join(documents).encode()
    fingerprint = {"dataset": embedded.NAME, "hash": xxhash.xxh3_64_hexdigest(data)}
    description = f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB"
    units = embedded.find_units(embedded.NAME, None, "text")
    return Source(units, "text", len(data), True, fingerprint, description)


def _open_given(name: str, dataset: Any, text_column: str, tokens_column: str | None) -> Source:
    find, column = (given.find_token_units, tokens_column) if tokens_column else (given.find_units, text_column)
    units, rows = find(name, dataset, column), dataset.select_columns([column])
    size = sum(unit.size_bytes for unit in units)
    facts = {"dataset": name, "hash": dataset._fingerprint, "rows": len(dataset), "text_column": text_column}
    description = f"{name}: {len(dataset):,} rows, {size / 1e6:,.1f} MB"
    if tokens_column is None:
        return Source(units, column, size, True, facts, description, given=rows)
    facts, description = _facts_of_column(facts, tokens_column), description + _ready(f"column {tokens_column}")
    return Source(units, column, size, True, facts, description, tokens=TokenColumn(column, given=rows))


def _facts_of_column(facts: dict[str, Any], tokens_column: str | None) -> dict[str, Any]:
    return {**facts, "tokens": f"column {tokens_column}"} if tokens_column else facts
