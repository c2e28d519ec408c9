"""Tokens that are ready: files of token ids instead of text, and columns of ids.

layouts.py     the layout of a file, by its content
reading.py     documents of token files
column.py      documents of a column of lists of ids
opening.py     the files of a set: which is which, which one continues another, which are validation
"""

from __future__ import annotations

from typing import Any

from hfgpt.data.heads import FileHead
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit

HAS_COLUMNS, UNIT_START = False, "from"  # see `Format`


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    raise BadFile(f"dataset: {file} contains token ids, not text; give only files of text, or only token files")


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    raise BadFile(f"dataset: {unit.file} contains token ids, not text; give only files of text, or only token files")
