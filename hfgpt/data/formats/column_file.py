"""A parquet file in memory with one column of one row group, from the bytes of that column in another file.

Its footer, in Thrift's compact protocol, has just what is required to read it:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa

MAGIC = b"PAR1"
CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "BROTLI": 4, "ZSTD": 6, "LZ4": 7}
UNKNOWN = -1
TYPES = {"BOOLEAN": 0, "INT32": 1, "INT64": 2, "FLOAT": 4, "DOUBLE": 5, "BYTE_ARRAY": 6}
REQUIRED, OPTIONAL, REPEATED, LIST = 0, 1, 2, 3
# Thrift's numbers of types.
I32, I64, BINARY, A_LIST, STRUCT = 5, 6, 8, 9, 12


class Chunk(NamedTuple):
    """A column in a row group: its rows, and its bytes in the file. `data_page`: where data pages begin in these."""

    rows: int
    start: int
    stored_bytes: int
    text_bytes: int
    values: int
    data_page: int
    codec: int


class Leaf(NamedTuple):
    """What holds the values of a column."""

    path: str
    physical_type: str


def is_simple(field: pa.Field, leaf: Leaf) -> bool:
    """Return whether `column_file` can be used: for plain values, and for lists of these in the usual three levels."""
    if leaf.physical_type not in TYPES:
        return False
    if not _is_list(field.type):
        return leaf.path == field.name
    levels = leaf.path.removeprefix(f"{field.name}.").split(".")
    return len(levels) == 2 and not pa.types.is_nested(field.type.value_field.type)


def column_file(field: pa.Field, leaf: Leaf, chunk: Chunk, data: bytes, created_by: str) -> bytes:
    """Return the file. `data`: the bytes of the column, or more."""
    kind, path = TYPES[leaf.physical_type], [field.name]
    elements = [_element(field.name, _optional(field), kind=kind)]
    if _is_list(field.type):
        path = [field.name, "list", "element"]
        groups = [_element(path[0], _optional(field), children=1, is_list=True), _element("list", REPEATED, children=1)]
        elements = [*groups, _element(path[-1], _optional(field.type.value_field), kind=kind)]
    column = _struct(
        (1, I32, _integer(kind)),
        (2, A_LIST, _list(I32, [_integer(0)])),
        (3, A_LIST, _list(BINARY, map(_binary, path))),
        (4, I32, _integer(chunk.codec)),
        (5, I64, _integer(chunk.values)),
        (6, I64, _integer(chunk.text_bytes)),
        (7, I64, _integer(chunk.stored_bytes)),
        (9, I64, _integer(len(MAGIC) + chunk.data_page)),
        *([(11, I64, _integer(len(MAGIC)))] if chunk.data_page else []),
    )
    group = _struct(
        (1, A_LIST, _list(STRUCT, [_struct((2, I64, _integer(len(MAGIC))), (3, STRUCT, column))])),
        (2, I64, _integer(chunk.text_bytes)),
        (3, I64, _integer(chunk.rows)),
    )
    footer = _struct(
        (1, I32, _integer(1)),
        (2, A_LIST, _list(STRUCT, [_element("schema", None, children=1), *elements])),
        (3, I64, _integer(chunk.rows)),
        (4, A_LIST, _list(STRUCT, [group])),
        (6, BINARY, _binary(created_by)),
    )
    return b"".join([MAGIC, data, footer, len(footer).to_bytes(4, "little"), MAGIC])


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _optional(field: pa.Field) -> int:
    return OPTIONAL if field.nullable else REQUIRED


def _element(
    name: str, repetition: int | None, kind: int | None = None, children: int = 0, is_list: bool = False
) -> bytes:
    return _struct(
        *([(1, I32, _integer(kind))] if kind is not None else []),
        *([(3, I32, _integer(repetition))] if repetition is not None else []),
        (4, BINARY, _binary(name)),
        *([(5, I32, _integer(children))] if children else []),
        *([(6, I32, _integer(LIST))] if is_list else []),
    )


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """Each field has a number, a type and its encoded value."""
    parts, last = [], 0
    for number, kind, value in fields:
        parts += [bytes([(number - last) << 4 | kind]), value]
        last = number
    return b"".join(parts) + b"\0"


def _list(kind: int, values: Any) -> bytes:
    values = list(values)
    return bytes([len(values) << 4 | kind]) + b"".join(values)


def _binary(text: str) -> bytes:
    return _varint(len(text.encode())) + text.encode()


def _integer(value: int) -> bytes:
    return _varint(value << 1)  # zigzag; none is negative


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
