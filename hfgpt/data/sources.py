"""Where text comes from: local files, datasets on the Hub, or the documentation that every Python includes.

A `Source` is a list of units that can be read independently (a row group of a parquet file, a span of a text file), so
they can be read in any order, and resumed anywhere without reading what comes before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from hfgpt.data import embedded
from hfgpt.data.file_access import read_file
from hfgpt.data.file_hashes import hash_files, is_earlier_hash
from hfgpt.data.formats import format_of, inspect_file
from hfgpt.data.formats.text import choose_piece_characters, split_into_pieces
from hfgpt.data.kinds import KNOWN, BadFile, describe_other_kind, file_kind
from hfgpt.data.local_files import local_files
from hfgpt.data.opening import open_files
from hfgpt.data.permutation import permutation
from hfgpt.data.remote import hub_files
from hfgpt.data.units import BAD, IN_MEMORY_BYTES, Unit, Unusable
from hfgpt.errors import UserError
from hfgpt.messages.formats import counted

logger = logging.getLogger(__name__)

START_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, eq=False)
class Source:
    """Text as units of rows. It can be pickled, and reading does not change it.

    `exclude`: `text_hash` of documents to skip. `skipped_files`: number of files left out when it was opened.
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
    by_file: bool = False
    piece_characters: int | None = None

    def split_for_stream(self) -> Source:
        """Return the same text with txt files split into pieces, because a stream needs many documents."""
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
            inspect = partial(inspect_file, unit.file, self.text_column)
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

    def read(self, unit: Unit) -> list[str | Unusable]:
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

    def _read_rows(self, unit: Unit) -> list[str | Unusable]:
        rows = format_of(unit.file).read_rows(unit, self.text_column)[: unit.rows]
        last = [self._document(row, unit.characters) for row in rows[-1:]]
        return [*(self._document(row) for row in rows[:-1]), *last]

    def _document(self, row: Any, characters: int | None = None) -> str | Unusable:
        """Return the document in a row (its first `characters`), or an `Unusable` with the reason."""
        if isinstance(row, Unusable):
            return row
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


def read_documents(source: Source, units: Iterable[Unit], skipped: Counter[str]) -> Iterator[str]:
    """Yield the documents of these units; count rows without one in `skipped`, by reason."""
    for row in chain.from_iterable(map(source.read, chain.from_iterable(map(source.units_of, units)))):
        if isinstance(row, Unusable):
            skipped[row.reason] += 1
        else:
            yield row


def read_shuffled(source: Source, seed: int) -> Iterator[str]:
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


def text_hash(text: str) -> int:
    """Return the xxh3_64 hash of the UTF-8 bytes of a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


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
    *,
    as_earlier: Earlier = NOT_EARLIER,
) -> Source:
    """Open the text called `dataset`: "embedded", a local file, folder (recursively) or glob, or a Hub dataset.

    A txt file of up to 16 MiB is one document; a larger one is split at line ends into documents of about 64 KiB.
    Reads the head or footer of each file, or of a large text with more than FEW_FILES only those of INSPECTED, and the
    others when they are first read. Waits out network failures for `patience_seconds`.

    Args:
        name, split, revision: select part of a Hub dataset, which is pinned to the commit that they resolve to. Not
            allowed for local text; nor is a `text_column` for text without columns.
        skip_bad_files: leave out broken files instead of raising UserError.
        as_earlier: what earlier versions did in another way, for a run that began with one.

    Raises UserError for text that cannot be found or read.
    """
    if dataset == embedded.NAME:
        _refuse_meaningless_settings(dataset, name, split, revision, text_column)
        return _open_embedded()
    found, fingerprint = local_files(dataset), {}
    if found is not None:
        files, notes = found
        has_columns = any(format_of(file).HAS_COLUMNS for file in files)
        _refuse_meaningless_settings(dataset, name, split, revision, "text" if has_columns else text_column)
        label = f"{dataset} ({'; '.join(notes)})" if notes else dataset
    else:
        in_split, commit = hub_files(dataset, name, split, revision, min(patience_seconds, START_PATIENCE_SECONDS))
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) at commit {commit[:8]}"
        if not (files := list(filter(file_kind, in_split))):
            first = Path(in_split[0]).name
            kind = describe_other_kind(first)
            raise UserError(f"dataset={dataset}: no {KNOWN} file in split {split}; {first} is {kind}")
    opened = open_files(files, found is not None, text_column, patience_seconds, skip_bad_files, as_earlier.order)
    if found is not None:
        fingerprint = hash_files(opened.files, opened.size_bytes <= IN_MEMORY_BYTES, as_earlier.hashes)
    order = {"order": "files"} if opened.by_file else {}
    return Source(
        units=opened.units,
        text_column=text_column,
        size_bytes=opened.size_bytes,
        is_local=found is not None,
        fingerprint={**fingerprint, "bytes": opened.size_bytes, "text_column": text_column, **order},
        description=f"{label}: {counted(len(opened.files), 'file')}, {opened.size_bytes / 1e6:,.1f} MB",
        patience_seconds=patience_seconds,
        skip_bad_files=skip_bad_files,
        skipped_files=len(files) - len(opened.files),
        by_file=opened.by_file,
    )


def _open_embedded() -> Source:
    documents = embedded.embedded_documents()
    data = "\0".join(documents).encode()
    fingerprint = {"dataset": embedded.NAME, "hash": xxhash.xxh3_64_hexdigest(data)}
    description = f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB"
    units = embedded.find_units(embedded.NAME, None, "text")
    return Source(units, "text", len(data), True, fingerprint, description)


def _refuse_meaningless_settings(
    dataset: str, name: str | None, split: str, revision: str | None, text_column: str
) -> None:
    """Raise UserError for Hub dataset settings given for other text, or a column for text without columns."""
    kind = "is this Python's own documentation" if dataset == embedded.NAME else "is local"
    given = {"dataset_name": name, "dataset_split": split if split != "train" else None, "dataset_revision": revision}
    problems = [
        f"{key}={value}: dataset={dataset} {kind} and has none; leave it out" for key, value in given.items() if value
    ]
    if text_column != "text":
        problems.append(f"text_column={text_column}: dataset={dataset} is plain text without columns; leave it out")
    if problems:
        raise UserError(*problems)
