"""Where text comes from: local files, datasets on the Hub, or the documentation that every Python includes.

A `Source` is a list of units that can be read independently (a row group of a parquet file, a span of a text file), so
they can be read in any order, and resumed anywhere without reading what comes before.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hfgpt.data import embedded
from hfgpt.data.converted import describe_commit, readable_hub_files
from hfgpt.data.file_access import open_file, read_file
from hfgpt.data.formats import format_of, given, inspect_file
from hfgpt.data.formats.text import choose_piece_characters, split_into_pieces
from hfgpt.data.formats.tokens.column import TokenColumn, find_column_units
from hfgpt.data.formats.tokens.opening import MadeWith, choose_kind, open_token_files, refuse_token_settings
from hfgpt.data.formats.tokens.reading import TokenFiles, Vocabulary
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.local_files import local_files
from hfgpt.data.saved_datasets import find_saved_files
from hfgpt.data.units import Row, Unit, Unusable
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
    a `datasets.Dataset` whose text is read instead of files. `tokens`: how token ids are read, if it has these instead
    of text; `made_with`: the tokenizer that they name. `validation`: units that are validation text by their names.
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
        split = [split_into_pieces(unit, size) if file_kind(unit.file) == "text" else [unit] for unit in self.units]
        fingerprint = {**self.fingerprint, "text_pieces": size}
        return dataclasses.replace(self, units=[*chain(*split)], fingerprint=fingerprint)

    def read(self, unit: Unit) -> list[Row | Unusable]:
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
    for row in chain.from_iterable(map(source.read, units)):
        if isinstance(row, Unusable):
            skipped[row.reason] += 1
        else:
            yield row


def text_hash(text: Row) -> int:
    """Return the xxh3_64 hash of the UTF-8 bytes of a text, or of ids as little-endian int32."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else np.ascontiguousarray(text, "<i4").data)


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
) -> Source:
    """Open the text called `dataset`: "embedded", a local file, folder (recursively) or glob, or a Hub dataset.

    A folder may be one that `datasets` saved. Of a Hub dataset in other formats, the converted parquet is read.

    A txt file of up to 16 MiB is one document; a larger one is split at line ends into documents of about 64 KiB.
    Reads the head or footer of each file. Waits out network failures for `patience_seconds`.

    Args:
        name, split, revision: select part of a Hub dataset, which is pinned to the commit that they resolve to. Not
            allowed for local text; nor is a `text_column` for text without columns.
        skip_bad_files: leave out broken files instead of raising UserError.
        tokens_dtype: type of the ids in token files without a header. tokens_column: of lists of ids, instead of text.

    Raises UserError for text that cannot be found or read.
    """
    stated_tokens = {"tokens_dtype": tokens_dtype, "tokens_column": tokens_column}
    if dataset == embedded.NAME:
        _refuse_meaningless_settings(dataset, name, split, revision, text_column)
        refuse_token_settings(dataset, stated_tokens)
        return _open_embedded()
    if (of_python := given.find_given(dataset)) is not None:
        _refuse_meaningless_settings(dataset, name, split, revision, "text")
        refuse_token_settings(dataset, {"tokens_dtype": tokens_dtype})
        return _open_given(dataset, of_python, text_column, tokens_column)
    saved = find_saved_files(dataset, split)
    found, fingerprint, in_split = saved or local_files(dataset), {}, list[str]()
    if found is not None:
        files, notes = choose_kind(*found, tokens_dtype)
        split = "train" if saved and found[1] else split  # which it has
        has_columns = any(format_of(file).HAS_COLUMNS for file in files)
        _refuse_meaningless_settings(dataset, name, split, revision, "text" if has_columns else text_column)
        label = f"{dataset} ({'; '.join(notes)})" if notes else dataset
    else:
        patience = min(patience_seconds, START_PATIENCE_SECONDS)
        in_split, commit = readable_hub_files(dataset, name, split, revision, patience)
        files, _ = choose_kind(list(filter(file_kind, in_split)), [], tokens_dtype)
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) {describe_commit(commit, files)}"
    options: dict[str, Any] = {"patience_seconds": patience_seconds, "skip_bad_files": skip_bad_files}
    options |= {"text_column": text_column, "is_local": found is not None}
    if files and file_kind(files[0]) in (None, "tokens"):
        refuse_token_settings(dataset, {"tokens_column": tokens_column})
        return _open_tokens(files, label, fingerprint, tokens_dtype, {*in_split}, options)
    refuse_token_settings(dataset, {"tokens_dtype": tokens_dtype})
    return _open_rows(files, label, fingerprint, tokens_column, options)


def _open_rows(
    files: list[str], label: str, fingerprint: dict[str, Any], tokens_column: str | None, options: dict[str, Any]
) -> Source:
    """Open files of text, or with a column of tokens."""
    text_column, column = options["text_column"], tokens_column or options["text_column"]
    find = find_column_units if tokens_column else inspect_file
    inspected = _inspect_files(files, find, column, options["patience_seconds"], options["skip_bad_files"])
    if options["is_local"]:
        fingerprint = _hash_files(list(inspected))
    size = sum(size for _, size in inspected.values())
    return Source(
        units=[unit for units, _ in inspected.values() for unit in units],
        size_bytes=size,
        fingerprint=_facts_of_column({**fingerprint, "bytes": size, "text_column": text_column}, tokens_column),
        description=_describe_files(label, len(inspected), size, tokens_column and f"column {tokens_column}"),
        skipped_files=len(files) - len(inspected),
        tokens=TokenColumn(tokens_column) if tokens_column else None,
        **{**options, "text_column": column},
    )


def _open_tokens(
    files: list[str],
    label: str,
    fingerprint: dict[str, Any],
    tokens_dtype: str | None,
    listed: set[str],
    options: dict[str, Any],
) -> Source:
    skip_bad_files = options["skip_bad_files"]
    opened = open_token_files(files, tokens_dtype, options["patience_seconds"], listed, skip_bad_files)
    hashed = _hash_files(opened.hashed_files) if options["is_local"] else fingerprint
    size = opened.size_bytes
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
    files: list[str],
    find: Callable[[str, str], tuple[list[Unit], int]],
    column: str,
    patience_seconds: float,
    skip_bad_files: bool,
) -> dict[str, tuple[list[Unit], int]]:
    """Return units and size of each file. Bad files are left out if they may be skipped and not all files are bad."""

    def inspect(file: str) -> tuple[list[Unit], int] | BadFile:
        try:
            return read_file(file, lambda: find(file, column), patience_seconds)
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
