"""Where text comes from: local files, datasets on the Hub, or the documentation that every Python includes.

A `Source` is a list of units that can be read independently (a row group of a parquet file, a span of a text file), so
they can be read in any order, and resumed anywhere without reading what comes before.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from hfgpt.data import embedded
from hfgpt.data.converted import describe_commit, readable_hub_files
from hfgpt.data.file_access import open_file, read_file
from hfgpt.data.formats import format_of, given, inspect_file
from hfgpt.data.formats.text import choose_piece_characters, split_into_pieces
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.local_files import local_files
from hfgpt.data.saved_datasets import find_saved_files
from hfgpt.data.units import Unit, Unusable
from hfgpt.errors import UserError

logger = logging.getLogger(__name__)

START_PATIENCE_SECONDS = 120.0
# A file's hash covers this many evenly spread samples of this size, or all of a small file.
SAMPLES, SAMPLE_BYTES = 64, 2**20
MAX_NAMED_FILES = 32


@dataclass(frozen=True, eq=False)
class Source:
    """Text as units of rows. It can be pickled, and reading does not change it.

    `exclude`: `text_hash` of documents to skip. `skipped_files`: number of files left out when it was opened. `given`:
    a `datasets.Dataset` that is read instead of files.
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

    def split_for_stream(self) -> Source:
        """Return the same text with txt files split into pieces, because a stream needs many documents."""
        text_units = [unit for unit in self.units if file_kind(unit.file) == "text"]
        size = choose_piece_characters(text_units)
        if size is None:
            return self
        split = [split_into_pieces(unit, size) if file_kind(unit.file) == "text" else [unit] for unit in self.units]
        fingerprint = {**self.fingerprint, "text_pieces": size}
        return dataclasses.replace(self, units=[*chain(*split)], fingerprint=fingerprint)

    def read(self, unit: Unit) -> list[str | Unusable]:
        """Return all rows of a unit, in file order.

        Raises BadFile if the whole file cannot be read, RunError if the network fails for too long.
        """
        try:
            return read_file(unit.file, lambda: self._read_rows(unit), self.patience_seconds)
        except BadFile as error:
            if not self.skip_bad_files:
                raise
            logger.warning("left out: %s", error)
            return [Unusable("bad_file")]

    def _read_rows(self, unit: Unit) -> list[str | Unusable]:
        if self.given is not None:
            rows = given.read_rows(unit, self.text_column, self.given)[: unit.rows]
        else:
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
    for row in chain.from_iterable(map(source.read, units)):
        if isinstance(row, Unusable):
            skipped[row.reason] += 1
        else:
            yield row


def text_hash(text: str) -> int:
    """Return the xxh3_64 hash of the UTF-8 bytes of a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


def open_source(
    dataset: str,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str = "text",
    patience_seconds: float = 900.0,
    skip_bad_files: bool = False,
) -> Source:
    """Open the text called `dataset`: "embedded", a local file, folder (recursively) or glob, or a Hub dataset.

    A folder may be one that `datasets` saved. Of a Hub dataset in other formats, the converted parquet is read.

    A txt file of up to 16 MiB is one document; a larger one is split at line ends into documents of about 64 KiB.
    Reads the head or footer of each file. Waits out network failures for `patience_seconds`.

    Args:
        name, split, revision: select part of a Hub dataset, which is pinned to the commit that they resolve to. Not
            allowed for local text; nor is a `text_column` for text without columns.
        skip_bad_files: leave out broken files instead of raising UserError.

    Raises UserError for text that cannot be found or read.
    """
    if dataset == embedded.NAME:
        _refuse_meaningless_settings(dataset, name, split, revision, text_column)
        return _open_embedded()
    if (of_python := given.find_given(dataset)) is not None:
        _refuse_meaningless_settings(dataset, name, split, revision, "text")
        return _open_given(dataset, of_python, text_column)
    saved = find_saved_files(dataset, split)
    found, fingerprint = saved or local_files(dataset), {}
    if found is not None:
        files, notes = found
        split = "train" if saved and notes else split  # which it has
        has_columns = any(format_of(file).HAS_COLUMNS for file in files)
        _refuse_meaningless_settings(dataset, name, split, revision, "text" if has_columns else text_column)
        label = f"{dataset} ({'; '.join(notes)})" if notes else dataset
    else:
        patience = min(patience_seconds, START_PATIENCE_SECONDS)
        in_split, commit = readable_hub_files(dataset, name, split, revision, patience)
        files = list(filter(file_kind, in_split))
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) {describe_commit(commit, files)}"
    inspected = _inspect_files(files, text_column, patience_seconds, skip_bad_files)
    if found is not None:
        fingerprint = _hash_files(list(inspected))
    size = sum(size for _, size in inspected.values())
    return Source(
        units=[unit for units, _ in inspected.values() for unit in units],
        text_column=text_column,
        size_bytes=size,
        is_local=found is not None,
        fingerprint={**fingerprint, "bytes": size, "text_column": text_column},
        description=f"{label}: {len(inspected):,} file{'s' * (len(inspected) != 1)}, {size / 1e6:,.1f} MB",
        patience_seconds=patience_seconds,
        skip_bad_files=skip_bad_files,
        skipped_files=len(files) - len(inspected),
    )


def _open_embedded() -> Source:
    documents = embedded.embedded_documents()
    data = "\0".join(documents).encode()
    fingerprint = {"dataset": embedded.NAME, "hash": xxhash.xxh3_64_hexdigest(data)}
    description = f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB"
    units = embedded.find_units(embedded.NAME, None, "text")
    return Source(units, "text", len(data), True, fingerprint, description)


def _open_given(name: str, dataset: Any, text_column: str) -> Source:
    units = given.find_units(name, dataset, text_column)
    size = sum(unit.size_bytes for unit in units)
    facts = {"dataset": name, "hash": dataset._fingerprint, "rows": len(dataset), "text_column": text_column}
    description = f"{name}: {len(dataset):,} rows, {size / 1e6:,.1f} MB"
    return Source(units, text_column, size, True, facts, description, given=dataset.select_columns([text_column]))


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


def _inspect_files(
    files: list[str], text_column: str, patience_seconds: float, skip_bad_files: bool
) -> dict[str, tuple[list[Unit], int]]:
    """Return units and size of each file. Bad files are left out if they may be skipped and not all files are bad."""

    def inspect(file: str) -> tuple[list[Unit], int] | BadFile:
        try:
            return read_file(file, lambda: inspect_file(file, text_column), patience_seconds)
        except BadFile as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        results = dict(zip(files, pool.map(inspect, files), strict=True))
    bad = [result for result in results.values() if isinstance(result, BadFile)]
    if bad and (not skip_bad_files or len(bad) == len(files)):
        raise bad[0]
    for error in bad:
        logger.warning("left out: %s", error)
    return {file: result for file, result in results.items() if not isinstance(result, BadFile)}


def _hash_files(files: list[str]) -> dict[str, Any]:
    """Return the number of files and one hash of their names, sizes and content; for few files, also one hash each.

    Names are relative to the common folder.
    """
    root, hashes = os.path.commonpath([os.path.dirname(file) for file in files]), {}
    for file in files:
        content = xxhash.xxh3_64()
        with open_file(file, uncompressed=False) as handle:
            size = handle.seek(0, os.SEEK_END)
            for sample in range(SAMPLES):
                start, stop = size * sample // SAMPLES, size * (sample + 1) // SAMPLES
                handle.seek(max(start, stop - SAMPLE_BYTES))
                content.update(handle.read(stop - handle.tell()))
        hashes[Path(file).relative_to(root).as_posix()] = f"{size} bytes, {content.hexdigest()}"
    named = {f"file {name}": value for name, value in hashes.items()} if len(files) <= MAX_NAMED_FILES else {}
    return {"files": len(files), "hash": xxhash.xxh3_64_hexdigest(str(sorted(hashes.items())).encode()), **named}
