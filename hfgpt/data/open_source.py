"""Open text: local files, datasets on the Hub, or the documentation that every Python includes."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import xxhash

from hfgpt.data import embedded
from hfgpt.data.file_hashes import hash_files, is_earlier_hash
from hfgpt.data.find_files import FoundFiles, find_local, find_on_hub, refuse_meaningless_settings
from hfgpt.data.formats import given, inspect_file
from hfgpt.data.formats.tokens.column import TokenColumn, find_column_units
from hfgpt.data.formats.tokens.opening import open_token_files, refuse_token_settings
from hfgpt.data.kinds import file_kind
from hfgpt.data.opening import open_files
from hfgpt.data.source import Source
from hfgpt.data.units import IN_MEMORY_BYTES

logger = logging.getLogger(__name__)

START_PATIENCE_SECONDS = 120.0


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
