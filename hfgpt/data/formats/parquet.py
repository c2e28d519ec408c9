"""Parquet files: a unit is a row group.

Footers of files with many row groups are large, and a stream has many files open. So only what is needed to read one
column is kept of a footer: eight numbers per row group. From these, `column_file` makes a small file of its own out of
the bytes of a column in a row group, which one request fetches.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.column_file import CODECS, UNKNOWN, Chunk, Leaf, column_file, is_simple
from hfgpt.data.heads import FileHead, no_column, read_head
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit, Unusable

HAS_COLUMNS, UNIT_START = True, "row_group"  # see `Format`
# What is kept of footers takes up to this in total: enough for all files in use, even with 1,000 row groups each.
KEPT_BYTES = 16 * 2**20
# The first guess of how much of the end of a file its footer takes.
TAIL_BYTES = 64 * 2**10
# Old versions of parquet-mr state too small a size of a column, which pyarrow corrects by reading on.
MORE_BYTES = 100
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


class Column(NamedTuple):
    """One column of a file. `chunks`: int64, a row (see `Chunk`) for each row group. `size_bytes`: of the file.

    `leaf`: of the column in the footer; None if only pyarrow can read it, with the whole footer.
    """

    field: pa.Field
    leaf: Leaf | None
    chunks: np.ndarray
    size_bytes: int
    created_by: str


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    return inspect(file, text_column)[0]


def inspect(file: str, text_column: str) -> tuple[list[Unit], int]:
    """Return the units and the size of a file, without reading its head."""
    column = open_column(file, text_column)
    kind = column.field.type
    if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
        raise BadFile(
            f"text_column={text_column}: contains {kind}, not text, in {file}; choose a text column{or_tokens(kind)}"
        )
    return units_of_column(file, column), column.size_bytes


def units_of_column(file: str, column: Column) -> list[Unit]:
    rows, sizes = column.chunks[:, 0].tolist(), column.chunks[:, 3].tolist()
    return [
        Unit(file, number, rows=count, size_bytes=size)
        for number, (count, size) in enumerate(zip(rows, sizes, strict=True))
        if count
    ]


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    # Arrow does not check that a string column is UTF-8.
    return read_column(unit, text_column).cast(pa.large_binary()).to_pylist()


def find_token_units(file: str, tokens_column: str) -> tuple[list[Unit], int]:
    """Like `inspect`, for a column of lists of token ids, of which a unit may have any number of documents."""
    size, footer = _read_footer(file)
    check_token_column(file, _schema(footer), tokens_column)
    column = _find_column(file, tokens_column, footer, size)
    _footers.put(_key(file, tokens_column), column)
    sizes = column.chunks[:, 3].tolist()
    return [Unit(file, i, size_bytes=n) for i, n in enumerate(sizes) if column.chunks[i, 0]], size


def read_tokens(unit: Unit, tokens_column: str) -> list[Any]:
    """Return the ids in each row of a unit, or an `Unusable`."""
    return split_token_lists(unit.file, read_column(unit, tokens_column))


def check_token_column(file: str, schema: Any, tokens_column: str) -> None:
    """Raise BadFile if an Arrow schema has no column of lists of integers of that name."""
    if schema.names.count(tokens_column) != 1:
        raise BadFile(str(no_column(file, tokens_column, schema.names)).replace("text_column", "tokens_column", 1))
    if not _is_of_ids(kind := schema.field(tokens_column).type):
        raise BadFile(f"tokens_column={tokens_column}: contains {kind}, not lists of integers, in {file}")


def no_text_column(file: str, text_column: str, schema: Any) -> BadFile:
    """Return the error for an Arrow schema without this column, with a hint if it has one of token ids."""
    ids = sorted((field.name for field in schema if _is_of_ids(field.type)), key=lambda name: name != "input_ids")
    hint = f"; {ids[0]} has lists of token ids: set tokens_column to {ids[0]}" if ids else ""
    return BadFile(f"{no_column(file, text_column, schema.names)}{hint}")


def _is_of_ids(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def split_token_lists(file: str, column: Any) -> list[Any]:
    """Return the ids in each row of an Arrow column of lists, or an `Unusable`."""
    rows: list[Any] = []
    for chunk in column.cast(pa.large_list(column.type.value_type)).chunks:
        if chunk.values.null_count:
            raise BadFile(f"dataset: {file} has null among its token ids; write it again")
        ids, borders = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        rows += [ids[start:stop] for start, stop in itertools.pairwise(borders.tolist())]
    return [Unusable("null") if null else row for row, null in zip(rows, column.is_null().to_pylist(), strict=True)]


def or_tokens(kind: Any) -> str:
    """Return the end of a message about a column of this type: that it may hold tokens, if it looks so."""
    return ", or give it as tokens_column" if pa.types.is_nested(kind) and "int" in str(kind) else ""


def read_column(unit: Unit, name: str) -> pa.ChunkedArray:
    """Return one column of a row group."""
    column = open_column(unit.file, name)
    if column.leaf is None:
        _, footer = _read_footer(unit.file)
        with open_file(unit.file) as handle:
            reader = pq.ParquetFile(handle, metadata=footer)
            return reader.read_row_group(unit.start, columns=[name], use_threads=False)[0]
    chunk = Chunk(*column.chunks[unit.start].tolist())
    stop = min(chunk.start + chunk.stored_bytes + MORE_BYTES, column.size_bytes)
    with open_file(unit.file) as handle:
        handle.seek(chunk.start)
        data = handle.read(stop - chunk.start)
    whole = column_file(column.field, column.leaf, chunk, data, column.created_by)
    return pq.ParquetFile(pa.BufferReader(whole)).read(use_threads=False)[0]


def open_column(file: str, name: str) -> Column:
    """Return what is needed to read one column of a file. Its footer is fetched once, as long as the file is in use."""
    key = _key(file, name)
    if (column := _footers.get(key)) is None:
        size, footer = _read_footer(file)
        column = _find_column(file, name, footer, size)
        _footers.put(key, column)
    return column


def _key(file: str, column: str) -> object:
    # A local file may be overwritten; a Hub file has its commit in its name.
    status = None if "://" in file else os.stat(file)
    return file, column, status and (status.st_size, status.st_mtime_ns)


def _schema(footer: Any) -> Any:
    # Not footer.schema: the two would refer to each other, and large footers stay in memory.
    return pq.ParquetFile(pa.BufferReader(b""), metadata=footer).schema_arrow


def _find_column(file: str, name: str, footer: Any, size: int) -> Column:
    schema = _schema(footer)
    if schema.names.count(name) != 1:
        raise no_text_column(file, name, schema)
    field, groups = schema.field(name).remove_metadata(), footer.num_row_groups
    chunks, leaf = np.zeros((groups, len(Chunk._fields)), np.int64), None
    if groups:
        first = footer.row_group(0)
        paths = [first.column(i).path_in_schema for i in range(first.num_columns)]
        at = next(i for i, path in enumerate(paths) if path == name or path.startswith(f"{name}."))
        leaf = Leaf(paths[at], first.column(at).physical_type)
    for number in range(groups):
        group = footer.row_group(number)
        part = group.column(at)
        start = min(part.dictionary_page_offset or part.data_page_offset, part.data_page_offset)
        sizes = part.total_compressed_size, part.total_uncompressed_size, part.num_values
        codec = CODECS.get(part.compression, UNKNOWN)
        chunks[number] = (group.num_rows, start, *sizes, part.data_page_offset - start, codec)
    if leaf and not (is_simple(field, leaf) and (chunks[:, -1] != UNKNOWN).all()):
        leaf = None
    return Column(field, leaf, chunks, size, footer.created_by or "")


def _read_footer(file: str) -> tuple[int, Any]:
    """Return the size of a file, and its footer.

    Raises BadFile, or an error of pyarrow, for a file that does not end in one.
    """
    with open_file(file) as handle:
        size = handle.seek(0, os.SEEK_END)
        wanted = _tail.bytes
        for _ in range(2):
            handle.seek(max(0, size - wanted))
            tail = handle.read(min(wanted, size))
            needed = int.from_bytes(tail[-8:-4], "little") + 8
            if len(tail) < 12 or tail[-4:] != b"PAR1" or needed <= len(tail) or needed > size:
                break
            wanted = needed
            _tail.bytes = max(_tail.bytes, needed + needed // 4)  # the other files have such footers too
    try:
        return size, pq.read_metadata(pa.BufferReader(tail[-needed:] if needed <= len(tail) else tail))
    except (pa.ArrowException, OSError):
        read_head(file)  # knows what else the file may be
        raise


class _Tail:
    """How much of the end of a file is fetched to get its footer in one request."""

    bytes = TAIL_BYTES


class _FooterCache:
    """A thread-safe LRU cache of columns, up to `KEPT_BYTES` in total."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._footers: dict[Any, Column] = {}  # the most recently used is at the end
        self._bytes = 0

    def get(self, key: Any) -> Column | None:
        with self._lock:
            if (column := self._footers.pop(key, None)) is not None:
                self._footers[key] = column
            return column

    def put(self, key: Any, column: Column) -> None:
        with self._lock:
            if self._footers.setdefault(key, column) is column:
                self._bytes += column.chunks.nbytes
            while self._bytes > KEPT_BYTES and len(self._footers) > 1:
                self._bytes -= self._footers.pop(next(iter(self._footers))).chunks.nbytes


_footers, _tail = _FooterCache(), _Tail()
