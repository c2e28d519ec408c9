"""JSON lines: one object per line, with the text under one of its keys."""

from __future__ import annotations

import codecs
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from hfgpt.data.formats.spans import read_lines, split_into_spans
from hfgpt.data.heads import FileHead, no_column
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit, Unusable

HAS_COLUMNS, UNIT_START = True, "from_byte"  # see `Format`
SAMPLE_BYTES = 2**20
REASONS: dict[type[Exception], str] = {
    UnicodeDecodeError: "invalid_utf8",
    KeyError: "no_text_column",
    TypeError: "not_an_object",
}


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    if find_damage(file, head.data, head.is_whole, text_column):
        # A few bad lines are not enough to reject a file.
        sample = read_lines(Unit(file, 0, SAMPLE_BYTES))
        if damage := find_damage(file, sample, True, text_column):
            raise damage
    return split_into_spans(file, head.text_bytes)


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    return [_read_line(line, text_column) for line in read_lines(unit).split(b"\n") if line.strip()]


def _read_line(line: bytes, text_column: str) -> Any:
    try:
        return json.loads(line.decode())[text_column]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        return Unusable(REASONS.get(type(error), "malformed"))


def find_damage(file: str, data: bytes, is_whole: bool, text_column: str | None) -> BadFile | None:
    """Return an error if a file that begins with `data` is not JSON lines with `text_column` (None: any), else None."""
    data = data.removeprefix(codecs.BOM_UTF8).lstrip()
    lines = [line for line in (data if is_whole else data.rpartition(b"\n")[0]).split(b"\n") if line.strip()]
    objects = [value for value in map(_parse, lines) if isinstance(value, dict)]
    columns = list(dict.fromkeys(chain.from_iterable(objects)))
    if 2 * len(objects) < len(lines) or not lines:
        jq = f"{Path(file).name} > lines-{Path(file).stem}.jsonl"
        if re.match(rb"\[\s*\{", data):
            return BadFile(f"dataset: {file} is a JSON array; write one object per line, for example: jq -c '.[]' {jq}")
        if len(lines) > 1 and data.startswith(b"{") and not lines[0].rstrip().endswith(b"}"):
            what = "contains a JSON object that spans several lines"
            return BadFile(f"dataset: {file} {what}; write one object per line, for example: jq -c . {jq}")
        if lines and not objects:
            shown = ascii(lines[0][:40].decode("utf-8", "replace"))
            which = f"none of its first {len(lines):,} lines is" if len(lines) > 1 else "its line is not"
            return BadFile(f"dataset: {file}: {which} a JSON object ({shown}); give one JSON object per line, in UTF-8")
    if columns and text_column is not None and text_column not in columns:
        return no_column(file, text_column, columns)
    return None


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
