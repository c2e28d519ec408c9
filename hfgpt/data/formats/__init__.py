"""Readers of file formats.

To add one, write a module with the members of `Format` and enter it in `FORMATS`. A new suffix also goes into `KINDS`
and `KNOWN` in `hfgpt/data/kinds.py` (and out of `OTHER_KINDS`, if it is there); `hfgpt/data/heads.py` checks the first
bytes of every file. `spans.py` splits files of lines, `borders.py` those whose rows only reading from the start finds.

A reader splits a file into units, and a unit into rows. It knows nothing of held-out documents, shuffling, or the order
of a stream; these see only units and rows. There are two exceptions: for a stream, `source.py` splits plain text into
more documents, and for tasks, `rows.py` reads whole rows of json, jsonl and parquet files.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

from hfgpt.data import embedded
from hfgpt.data.compression import has_checksum
from hfgpt.data.file_access import open_file
from hfgpt.data.formats import arrow, csv_rows, given, jsonl, parquet, tar, text, tokens
from hfgpt.data.heads import FileHead, read_head
from hfgpt.data.kinds import BadFile, compression, file_kind
from hfgpt.data.units import Unit, Unusable


class Format(Protocol):
    """What `hfgpt.data` needs of a file format. The modules of this package have these members."""

    HAS_COLUMNS: bool  # whether `text_column` applies
    UNIT_START: str  # what `Unit.start` is called in reports

    def find_units(self, file: str, head: FileHead, text_column: str) -> list[Unit]:
        """Return the independently readable parts of the file, in order. Raises BadFile for an unusable file."""

    def read_rows(self, unit: Unit, text_column: str) -> list[Any]:
        """Return the texts of a unit's rows, as str or as bytes in UTF-8. Row n of a unit is always the same.

        For a row without text: whatever else it holds, or an `Unusable` with the reason.
        """


# Keyed by `file_kind`.
FORMATS: dict[str, Format] = {
    "parquet": parquet,
    "lines": jsonl,
    "text": text,
    "csv": csv_rows,
    "arrow": arrow,
    "tar": tar,
    "tokens": tokens,
}


def format_of(file: str) -> Any:
    """Return the module that reads a file, the embedded text, or what was given in Python."""
    if file in (given.TRAINING, given.EVALUATION):
        return given
    return embedded if file == embedded.NAME else FORMATS[file_kind(file) or "tokens"]  # by content


def inspect_file(file: str, text_column: str) -> tuple[list[Unit], int]:
    """Return a file's units and size in bytes. Raises BadFile if the content does not match the name."""
    if file.encode("utf-8", "replace").decode() != file or len(file.splitlines()) > 1:
        raise BadFile(f"dataset: {file!a}: the name is not a single line of UTF-8; rename it")  # could not be recorded
    if "://" not in file and os.path.islink(file) and not os.path.exists(file):
        raise BadFile(f"dataset: {file} is a link to a missing file; fetch that file, or remove the link")
    if format_of(file) is parquet:  # in one request
        return parquet.inspect(file, text_column)
    head = read_head(file)
    return format_of(file).find_units(file, head, text_column), head.size_bytes


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    """Like `Format.read_rows`. Raises BadFile or EOFError if rows are broken because a compressed file is damaged."""
    rows = format_of(unit.file).read_rows(unit, text_column)
    if compression(unit.file):
        broken = sum(isinstance(row, Unusable) and row.reason in _BROKEN for row in rows)
        if 0 < broken < len(rows):  # all are so for other reasons
            _check_compressed(unit.file)
    return rows


_BROKEN = ("malformed", "invalid_utf8")  # as damage makes them


@functools.lru_cache(1024)
def _check_compressed(file: str) -> None:
    """Read a compressed file to its end, where most have a checksum."""
    suffix = compression(file)
    assert suffix is not None  # noqa: S101
    with open_file(file, uncompressed=False) as handle:
        if not has_checksum(suffix, handle.read(16)):
            fix = "download it again, or if its rows are broken but not its bytes, pack it again with zstd --check"
            raise BadFile(f"dataset: {file} has broken rows, and no checksum that would rule out damage; {fix}")
    with open_file(file) as handle:
        handle.seek(0, os.SEEK_END)
