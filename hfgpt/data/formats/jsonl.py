"""JSON: one object per line or an array of objects, with the text under one of their keys."""

from __future__ import annotations

import codecs
import json
from itertools import chain
from pathlib import Path
from typing import Any

from hfgpt.data.formats import json_array
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
INVALID = Unusable("invalid_utf8")


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    if find_damage(file, head.data, head.is_whole, text_column):
        # A few bad lines are not enough to reject a file.
        sample = read_lines(Unit(file, 0, SAMPLE_BYTES))
        damage = find_damage(file, sample, True, text_column)
        if isinstance(damage, BadFile):
            raise damage
        if damage:
            return json_array.find_units(file, head.text_bytes, sample, text_column)
    return split_into_spans(file, head.text_bytes)


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    if unit.layout == json_array.LAYOUT:
        return [pick(row, text_column) if is_utf8 else INVALID for row, is_utf8 in json_array.read_rows(unit)]
    return [_read_line(line, text_column) for line in read_lines(unit).split(b"\n") if line.strip()]


def pick(row: Any, text_column: str) -> Any:
    """Return the text of a parsed row, or an `Unusable`."""
    try:
        return row[text_column]
    except (KeyError, TypeError, ValueError) as error:
        return Unusable(REASONS.get(type(error), "malformed"))


def _read_line(line: bytes, text_column: str) -> Any:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return Unusable(REASONS.get(type(error), "malformed"))
    return pick(row, text_column)


def find_damage(file: str, data: bytes, is_whole: bool, text_column: str | None) -> BadFile | str | None:
    """Return an error if a file that begins with `data` has no objects with `text_column` (None: any).

    Else None for JSON lines, and `json_array.LAYOUT` for an array.
    """
    data = data.removeprefix(codecs.BOM_UTF8).lstrip()
    lines = [line for line in (data if is_whole else data.rpartition(b"\n")[0]).split(b"\n") if line.strip()]
    objects = [value for value in map(_parse, lines) if isinstance(value, dict)]
    columns = list(dict.fromkeys(chain.from_iterable(objects)))
    if 2 * len(objects) < len(lines) or not lines:
        jq = f"{Path(file).name} > lines-{Path(file).stem}.jsonl"
        if json_array.is_array(data):
            return json_array.LAYOUT
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
