"""Files of lines: a unit is a span of bytes, and contains the lines that begin in the span."""

from __future__ import annotations

import codecs
import itertools
from typing import Any

from hfgpt.data.compression import GZIP
from hfgpt.data.file_access import open_file
from hfgpt.data.kinds import BadFile, compression
from hfgpt.data.units import Unit

SPAN_BYTES = 2 * 2**20
# Reaching a span of a compressed file means decompressing everything before it, so these are larger.
GZIP_SPAN_BYTES = 32 * 2**20
# The most that is read at once of a file that does not state how much it unpacks to.
LARGEST_REST_BYTES = 512 * 2**20


def split_into_spans(file: str, size_bytes: int) -> list[Unit]:
    """Split a file of `size_bytes` (uncompressed) into units."""
    if not compression(file):
        borders = [*range(0, size_bytes, SPAN_BYTES), size_bytes]
        return [Unit(file, start, stop, size_bytes=stop - start) for start, stop in itertools.pairwise(borders)]
    starts = range(0, max(1, size_bytes), GZIP_SPAN_BYTES)
    units = [Unit(file, start, start + GZIP_SPAN_BYTES, size_bytes=GZIP_SPAN_BYTES) for start in starts]
    # A gzip file states its size only modulo 2^32, and others not at all, so the last unit takes all that is left.
    units[-1] = units[-1]._replace(stop=-1, size_bytes=size_bytes - starts[-1])
    return units


def read_lines(unit: Unit) -> bytes:
    """Return the lines that begin in the unit, without byte order mark."""
    start = max(unit.start - 1, 0)  # a line that begins at `start` follows a line end just before it
    with open_file(unit.file) as handle:
        handle.seek(start)
        data = read_rest(unit.file, handle) if unit.stop < 0 else handle.read(unit.stop - start)
        if unit.start:
            _, _, data = data.partition(b"\n")
        parts = [data]
        while parts[-1] and not parts[-1].endswith(b"\n"):  # the rest of the last line
            line, line_end, _ = handle.read(2**16).partition(b"\n")
            parts.append(line + line_end)
    return b"".join(parts).removeprefix(codecs.BOM_UTF8)


def read_rest(file: str, handle: Any) -> bytes:
    """Return all that is left of a file. Raises BadFile if a compressed file holds far more than it seems to."""
    if compression(file) in (None, GZIP):
        return handle.read()
    data = handle.read(LARGEST_REST_BYTES + 1)
    if len(data) > LARGEST_REST_BYTES:
        raise BadFile(f"dataset: {file} unpacks to far more than its beginning suggests; unpack it, or split it")
    return data


def read_text(unit: Unit, longest_line: int) -> bytes:
    """Return the lines that begin in the unit, like `read_lines`, but split long lines.

    A line that continues for `longest_line` bytes after the end of the unit is split there, between two characters.
    """
    start = max(unit.start - 1, 0)
    with open_file(unit.file) as handle:
        handle.seek(start)
        data = read_rest(unit.file, handle) if unit.stop < 0 else handle.read(unit.stop - start + longest_line)
    begin = _find_border(data, unit.start - start, longest_line) if unit.start else 0
    end = len(data) if unit.stop < 0 else _find_border(data, unit.stop - start, longest_line)
    return data[begin:end].removeprefix(codecs.BOM_UTF8)


def _find_border(data: bytes, at: int, longest_line: int) -> int:
    """Return where the first line from `at` on begins, else the first character if `longest_line` bytes have none."""
    window = data[at - 1 : at - 1 + longest_line]
    if (line_end := window.find(b"\n")) >= 0:
        return at + line_end
    if len(window) < longest_line:  # the end of the file
        return len(data)
    return at + next((i for i, byte in enumerate(data[at : at + 4]) if byte & 0xC0 != 0x80), 0)
