"""Parquet files: a unit is a row group."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hfgpt.data.file_access import open_file
from hfgpt.data.heads import FileHead, no_column
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit, Unusable

HAS_COLUMNS, UNIT_START = True, "row_group"  # see `Format`
# Footers are cached up to this total size, as stored; while they all fit, each is fetched only once.
FOOTER_CACHE_BYTES = 128 * 2**20
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    metadata = _read_footer(file)
    schema = metadata.schema.to_arrow_schema()
    if schema.names.count(text_column) != 1:
        raise no_column(file, text_column, schema.names)
    kind = schema.field(text_column).type
    if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
        raise BadFile(
            f"text_column={text_column}: contains {kind}, not text, in {file}; choose a text column{or_tokens(kind)}"
        )
    leaf = metadata.schema.names.index(text_column) if text_column in metadata.schema.names else 0
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        Unit(file, number, rows=group.num_rows, size_bytes=group.column(leaf).total_uncompressed_size)
        for number, group in enumerate(groups)
        if group.num_rows
    ]


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    return _read_column(unit, text_column).cast(pa.large_binary()).to_pylist()  # Arrow does not check that it is UTF-8


def find_token_units(file: str, head: FileHead, tokens_column: str) -> list[Unit]:
    """Like `find_units`, for a column of lists of token ids, of which a unit may have any number of documents."""
    metadata = _read_footer(file)
    check_token_column(file, metadata.schema.to_arrow_schema(), tokens_column)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        Unit(file, number, size_bytes=group.total_byte_size) for number, group in enumerate(groups) if group.num_rows
    ]


def read_tokens(unit: Unit, tokens_column: str) -> list[Any]:
    """Return the ids in each row of a unit, or an `Unusable`."""
    return split_token_lists(unit.file, _read_column(unit, tokens_column))


def check_token_column(file: str, schema: Any, tokens_column: str) -> None:
    """Raise BadFile if an Arrow schema has no column of lists of integers of that name."""
    if schema.names.count(tokens_column) != 1:
        raise BadFile(str(no_column(file, tokens_column, schema.names)).replace("text_column", "tokens_column", 1))
    kind = schema.field(tokens_column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not (is_list and pa.types.is_integer(kind.value_type)):
        raise BadFile(f"tokens_column={tokens_column}: contains {kind}, not lists of integers, in {file}")


def split_token_lists(file: str, column: Any) -> list[Any]:
    """Return the ids in each row of an Arrow column of lists, or an `Unusable`."""
    rows: list[Any] = []
    for chunk in column.cast(pa.large_list(column.type.value_type)).chunks:
        if chunk.values.null_count:
            raise BadFile(f"dataset: {file} has null among its token ids; write it again")
        ids, borders = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        rows += [ids[start:stop] for start, stop in itertools.pairwise(borders.tolist())]
    return [Unusable("null") if null else row for row, null in zip(rows, column.is_null().to_pylist(), strict=True)]


def _read_column(unit: Unit, column: str) -> Any:
    with open_file(unit.file) as handle:
        reader = pq.ParquetFile(handle, metadata=_read_footer(unit.file))
        return reader.read_row_group(unit.start, columns=[column], use_threads=False)[0]


def or_tokens(kind: Any) -> str:
    """Return the end of a message about a column of this type: that it may hold tokens, if it looks so."""
    return ", or give it as tokens_column" if pa.types.is_nested(kind) and "int" in str(kind) else ""


class _FooterCache:
    """A thread-safe LRU cache of footers, up to `FOOTER_CACHE_BYTES` in total."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._footers: dict[Any, Any] = {}  # the most recently used is at the end
        self._bytes = 0

    def get(self, key: Any) -> Any:
        with self._lock:
            if (footer := self._footers.pop(key, None)) is not None:
                self._footers[key] = footer
            return footer

    def put(self, key: Any, footer: Any) -> None:
        with self._lock:
            if self._footers.setdefault(key, footer) is footer:
                self._bytes += footer.serialized_size
            while self._bytes > FOOTER_CACHE_BYTES and len(self._footers) > 1:
                self._bytes -= self._footers.pop(next(iter(self._footers))).serialized_size


_footers = _FooterCache()


def _read_footer(file: str) -> Any:
    """Return the metadata of a file, fetched once and cached."""
    # A local file may be overwritten; a Hub file has its commit in its name.
    status = None if "://" in file else os.stat(file)
    key = (file, status and (status.st_size, status.st_mtime_ns))
    if (footer := _footers.get(key)) is None:
        with open_file(file) as handle:
            footer = pq.read_metadata(handle)
        _footers.put(key, footer)
    return footer
