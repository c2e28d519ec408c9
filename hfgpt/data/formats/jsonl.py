"""JSON: one object per line or an array of objects, with the text under one of their keys."""

from __future__ import annotations

import codecs
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from hfgpt.data.compression import NAMES
from hfgpt.data.formats import json_array
from hfgpt.data.formats.spans import read_lines, split_into_spans
from hfgpt.data.heads import FileHead, hint_of_ids, no_column
from hfgpt.data.kinds import BadFile, compression
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
    is_long = not head.is_whole and b"\n" not in head.data.lstrip()
    if is_long or find_damage(file, head.data, head.is_whole, text_column):
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
        if json_array.is_array(data):
            return json_array.LAYOUT
        if re.match(rb'\[\s*"', data) and (len(lines) == 1 or _parse(lines[0]) is None):
            what, rows = "is a JSON array of strings, not of objects", f".[] | {{{text_column or 'text'}: .}}"
            return BadFile(f"dataset: {file} {what}; write one object per line, for example: {_jq(file, rows)}")
        if len(lines) > 1 and data.startswith(b"{") and not lines[0].rstrip().endswith(b"}"):
            found = re.match(rb'\{\s*"([^"\\]+)"\s*:\s*\[', data)
            what, rows = (
                "contains a JSON object that spans several lines",
                f'."{found[1].decode()}"[]' if found else ".",
            )
            return BadFile(f"dataset: {file} {what}; write one object per line, for example: {_jq(file, rows)}")
        if lines and not objects:
            shown = ascii(lines[0][:40].decode("utf-8", "replace"))
            which = f"none of its first {len(lines):,} lines is" if len(lines) > 1 else "its line is not"
            what, fix = f"{which} a JSON object ({shown})", "one object per line, or one array of objects"
            if re.match(rb"\[\s*[\[\w-]", data) and (len(lines) == 1 or _parse(lines[0]) is None):
                what = f"its JSON array does not contain objects ({shown})"
            return BadFile(f"dataset: {file}: {what}; give {fix}, in UTF-8")
    if columns and text_column is not None:
        rows_of = _rows_of(objects[0]) if len(objects) == len(lines) == 1 else {}
        if text_column not in columns:
            return no_column(file, text_column, columns, _hint(file, text_column, objects[0], rows_of))
        if text_column in rows_of:
            what = f"is one JSON object with {len(rows_of[text_column]):,} rows under {text_column}"
            rows = f'."{text_column}"[] | {{{text_column}: .}}'
            return BadFile(f"dataset: {file} {what}; write one object per line, for example: {_jq(file, rows)}")
    return None


def _rows_of(value: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the columns or lists of rows of a whole table in one object."""
    lists = {key: [*of.values()] if isinstance(of, dict) else of for key, of in value.items()}
    return {key: of for key, of in lists.items() if isinstance(of, list) and of and isinstance(of[0], (dict, str))}


def _hint(file: str, text_column: str, row: dict[str, Any], rows_of: dict[str, list[Any]]) -> str:
    """Return where the text may be instead."""
    for key, rows in rows_of.items():
        each = "" if isinstance(rows[0], dict) else f" | {{{text_column}: .}}"
        how = _jq(file, f'."{key}"[]{each}')
        return f'; "{key}" holds {len(rows):,} rows: write one per line, for example: {how}'
    return hint_of_ids(row)


def _jq(file: str, rows: str) -> str:
    quoted, path, packed = rows if rows == "." else f"'{rows}'", Path(file), compression(file)
    if packed:
        return f"{NAMES[packed]} -dc {path.name} | jq -c {quoted} > lines-{path.with_suffix('').stem}.jsonl"
    return f"jq -c {quoted} {path.name} > lines-{path.stem}.jsonl"


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
