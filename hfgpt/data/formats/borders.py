"""Files whose rows cannot be found from the middle of the file: CSV, JSON arrays, tar archives.

A small file is one unit. A larger one is read once when it is opened, to find where rows begin; its units then begin
and end at rows, and can be read alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.spans import GZIP_SPAN_BYTES, read_rest
from hfgpt.data.kinds import compression
from hfgpt.data.units import Unit

SPAN_BYTES = 4 * 2**20
PIECE_BYTES = 2**20


def one_unit(file: str, text_bytes: int, layout: str) -> list[Unit] | None:
    """Return a file as a single unit, or None if it is too large for that."""
    if text_bytes > span_bytes(file):
        return None
    return [Unit(file, size_bytes=text_bytes, layout=layout)]


def split_at_rows(file: str, starts: Iterable[int], layout: str, first: int = 0) -> list[Unit]:
    """Split a file into units that begin at rows. `starts`: where each row begins, and the end of the last one."""
    borders, end, size = [first], first, span_bytes(file)
    for end in starts:
        if end - borders[-1] >= size:
            borders.append(end)
    if borders[-1] != end:
        borders.append(end)
    pairs = itertools.pairwise(borders)
    return [Unit(file, start, stop, size_bytes=stop - start, layout=layout) for start, stop in pairs]


def span_bytes(file: str) -> int:
    return GZIP_SPAN_BYTES if compression(file) else SPAN_BYTES


def read_unit(unit: Unit) -> bytes:
    with open_file(unit.file) as handle:
        handle.seek(unit.start)
        return read_rest(unit.file, handle) if unit.stop < 0 else handle.read(unit.stop - unit.start)


def pieces(handle: Any) -> Iterator[bytes]:
    """Yield the content of a file in pieces of bounded size."""
    while piece := handle.read(PIECE_BYTES):
        yield piece
