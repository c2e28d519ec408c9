"""Units: the parts of a text that can be read independently."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# A text up to this size is held in memory, and a text file up to this size is one document.
IN_MEMORY_BYTES = 16 * 2**20

Row = str | np.ndarray  # a document: its text, or its token ids without separators


class Unit(NamedTuple):
    """A part of a file that is read at once, without reading what lies before it.

    `start` and `stop` depend on the format: the number of a row group, or a range of bytes (-1: to the end), tokens or
    documents.
    `rows`: number of rows, if known; no more are used. `characters`: how much of the last of these rows is used
    (None: all). `piece_characters`: size of the documents that a txt file is split into, always at line ends: None for
    one document, 0 for about 64 KiB. `size_bytes`: approximate bytes of text. `layout`: what the reader has found out
    about the file, in its own words.

    In a source with `by_file`, a unit is a file with all of its own units, or the first `stop` of them if it is not -1;
    `rows` and `characters` then apply to the last of these, and `size_bytes` is the size of the file.
    """

    file: str
    start: int = 0
    stop: int = -1
    rows: int | None = None
    characters: int | None = None
    piece_characters: int | None = 0
    size_bytes: int = 0
    layout: str = ""


# `Unit.start` of a file that cannot be read and may be left out.
BAD = -1


class Unusable(NamedTuple):
    """A row without a usable document; rows are counted by `reason`."""

    reason: str
