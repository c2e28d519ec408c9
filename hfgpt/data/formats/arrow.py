"""Arrow files, as streams (`datasets`) or with a footer (Feather): a unit is a run of record batches."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.parquet import TEXT_TYPES, check_token_column, no_text_column, or_tokens, split_token_lists
from hfgpt.data.heads import FileHead
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit

HAS_COLUMNS, UNIT_START = True, "from_byte"  # see `Format`
SPAN_BYTES = 4 * 2**20
MAGIC = b"ARROW1\0\0"
# Read at once while looking for messages: the metadata of several if they are small, and else little of their bodies.
LOOK_BYTES, METADATA_BYTES = 256 * 2**10, 4 * 2**10
CACHED_BEGINNINGS = 256
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3


class _Message(NamedTuple):
    kind: int
    start: int
    stop: int
    rows: int


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    units, schema = _find_batches(file)
    if schema.names.count(text_column) != 1:
        raise no_text_column(file, text_column, schema)
    kind = schema.field(text_column).type
    if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
        fix = f"choose a text column{or_tokens(kind)}"
        raise BadFile(f"text_column={text_column}: contains {kind}, not text, in {file}; {fix}")
    return units


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    return read_column(unit, text_column).cast(pa.large_binary()).to_pylist()  # Arrow does not check that it is UTF-8


def find_token_units(file: str, head: FileHead, tokens_column: str) -> list[Unit]:
    """Like `find_units`, for a column of lists of token ids, of which a unit may have any number of documents."""
    units, schema = _find_batches(file)
    check_token_column(file, schema, tokens_column)
    return [unit._replace(rows=None) for unit in units]


def read_tokens(unit: Unit, tokens_column: str) -> list[Any]:
    """Return the ids in each row of a unit, or an `Unusable`."""
    return split_token_lists(unit.file, read_column(unit, tokens_column))


def read_column(unit: Unit, column: str) -> Any:
    """Return a column of a unit. Its layout says which bytes of the file are the schema and dictionaries."""
    read_beginning = _cached_beginning if "://" in unit.file else _read_range  # a local file may be overwritten
    beginning = read_beginning(unit.file, *map(int, unit.layout.split("-")))
    return pa.ipc.open_stream(beginning + _read_range(unit.file, unit.start, unit.stop)).read_all()[column]


def _read_range(file: str, start: int, stop: int) -> bytes:
    with open_file(file) as handle:
        handle.seek(start)
        return handle.read(stop - start)


_cached_beginning = functools.lru_cache(CACHED_BEGINNINGS)(_read_range)


def _find_batches(file: str) -> tuple[list[Unit], Any]:
    """Return the units of a file and its schema. A layout is the place of the schema and dictionaries."""
    with open_file(file) as handle:
        messages = list(_messages(file, handle))
        first = next((n for n, message in enumerate(messages) if message.kind == _RECORDS), len(messages))
        before, batches = messages[:first], messages[first:]
        if not before or before[0].kind != _SCHEMA:
            raise BadFile(f"dataset: {file} is not an Arrow file, or empty; write it again, or remove it")
        if any(message.kind != _RECORDS for message in batches):
            raise BadFile(f"dataset: {file} has dictionaries that change on the way; write it as parquet")
        handle.seek(before[0].start)
        schema = pa.ipc.open_stream(handle.read(before[0].stop - before[0].start)).schema
    layout = f"{before[0].start}-{before[-1].stop}"
    units: list[Unit] = []
    for _, start, stop, rows in batches:
        last = units[-1] if units else None
        if last and last.stop == start and stop - last.start <= SPAN_BYTES:
            both = (last.rows or 0) + rows
            units[-1] = last._replace(stop=stop, rows=both, size_bytes=stop - last.start)
        else:
            units.append(Unit(file, start, stop, rows=rows, size_bytes=stop - start, layout=layout))
    return [unit for unit in units if unit.rows], schema


def _messages(file: str, handle: Any) -> Iterator[_Message]:
    """Yield the messages of a stream, without reading their bodies. A file with a footer contains such a stream."""
    size = handle.seek(0, os.SEEK_END)
    handle.seek(0)
    at, data = 0, handle.read(LOOK_BYTES)
    if data.startswith(MAGIC):
        at, data = len(MAGIC), data[len(MAGIC) :]
        handle.seek(max(0, size - len(MAGIC)))
        if not handle.read(len(MAGIC)).endswith(MAGIC.rstrip(b"\0")):
            raise _cut_off(file, size)
    while at < size:
        if data.startswith(bytes(4)):  # the end of a stream without markers
            return
        if len(data) < 8:
            raise _cut_off(file, at)
        prefix = 8 if data.startswith(b"\xff\xff\xff\xff") else 4  # versions before 0.15 have no marker
        (length,) = struct.unpack_from("<i", data, prefix - 4)
        if length == 0:  # the end of the stream
            return
        if not 0 < length <= size - at:
            raise _cut_off(file, at)
        if len(data) < prefix + length:
            handle.seek(at)
            data = handle.read(max(prefix + length, LOOK_BYTES))
        try:
            kind, body, rows = _read_metadata(data[prefix : prefix + length])
        except struct.error:
            raise _cut_off(file, at) from None
        stop = at + prefix + length + body
        if body < 0 or stop > size:
            raise _cut_off(file, at)
        yield _Message(kind, at, stop, rows)
        at, data = stop, data[stop - at :]
        if len(data) < min(METADATA_BYTES, size - at):
            handle.seek(at)
            data = handle.read(LOOK_BYTES)


def _cut_off(file: str, at: int) -> BadFile:
    return BadFile(f"dataset: {file} is cut off or damaged at byte {at:,}; download it again, or write it again")


def _read_metadata(data: bytes) -> tuple[int, int, int]:
    """Return kind, length of the body, and rows (of a record batch) of a message.

    pyarrow reads a message only with its body. The flatbuffer is a table with the fields version, type of header,
    header, length of the body (Message.fbs); the first field of a record batch is its length.
    """
    message = _Table(data, struct.unpack_from("<I", data)[0])
    kind, body = message.number("<B", 1), message.number("<q", 3)
    place = message.place(2)
    rows = 0
    if kind == _RECORDS and place:
        rows = _Table(data, place + struct.unpack_from("<I", data, place)[0]).number("<q", 0)
    return kind, body, rows


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]

    def place(self, field: int) -> int:
        """Return where a field is, 0 if it has its default value."""
        if 4 + 2 * field >= struct.unpack_from("<H", self._data, self._fields)[0]:
            return 0
        offset = struct.unpack_from("<H", self._data, self._fields + 4 + 2 * field)[0]
        return self._at + offset if offset else 0

    def number(self, kind: str, field: int) -> int:
        place = self.place(field)
        return struct.unpack_from(kind, self._data, place)[0] if place else 0
