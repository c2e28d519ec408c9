"""CSV and TSV: the first row names the columns. See `borders` for how a file is split into units.

A line end may lie inside quotes, so only reading from the beginning tells where a row begins.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.borders import one_unit, read_unit, split_at_rows
from hfgpt.data.heads import HEAD_BYTES, FileHead, no_column
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit, Unusable

HAS_COLUMNS, UNIT_START = True, "from_byte"  # see `Format`
LONGEST_FIELD_CHARACTERS = 256 * 2**20
SEPARATORS = ",;\t|"


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    """A layout is the separator, the number of the text column, and that of all columns."""
    columns, separator = _find_columns(file, head, text_column)
    if not columns:
        return []
    if columns.count(text_column) != 1:
        raise no_column(file, text_column, columns)
    layout = f"{separator}{columns.index(text_column)}/{len(columns)}"
    if units := one_unit(file, head.text_bytes, layout):
        return units
    with open_file(file, read_ahead=True) as handle:
        return split_at_rows(file, (end for _, end, _ in _read(file, handle, separator)), layout)


def _find_columns(file: str, head: FileHead, text_column: str) -> tuple[list[str], str]:
    """Return the names of the columns, and the first separator with which most rows of the head have as many fields.

    Without the text column: the names with the separator that gives the most. Raises BadFile if no separator fits.
    """
    preferred = "\t" + SEPARATORS if ".tsv" in file.lower() else SEPARATORS
    found = {separator: _first_rows(head, separator) for separator in preferred}
    with_column = [separator for separator, (columns, _) in found.items() if text_column in columns]
    for separator in with_column:
        columns, lengths = found[separator]
        if 2 * _fitting(columns, lengths) >= lengths.total():
            return columns, separator
    if not with_column:
        separator = max(found, key=lambda one: len(found[one][0]))
        return found[separator][0], separator
    separator = with_column[0]
    columns, lengths = found[separator]
    fields = {one: of.most_common(1)[0] for one, (_, of) in found.items() if of}  # the usual number, and its rows
    other = max(fields, key=lambda one: (fields[one][0] > 1, fields[one][1]))
    total = lengths.total()
    what = (
        f"its header has {len(columns)} columns separated by {separator!r}, but {total - _fitting(columns, lengths):,}"
    )
    what += f" of the first {total:,} rows do not (with {other!r}, {fields[other][1]:,} have {fields[other][0]} fields)"
    raise BadFile(f"dataset: {file}: {what}; use one separator throughout, or quote fields that contain it")


def _fitting(columns: list[str], lengths: Counter[int]) -> int:
    """Return how many rows have as many fields as the header, which may end with empty names."""
    named = len(columns)
    while named and not columns[named - 1]:
        named -= 1
    return sum(count for number, count in lengths.items() if named <= number <= len(columns))


def _first_rows(head: FileHead, separator: str) -> tuple[list[str], Counter[int]]:
    """Return the first row, and how many of the whole rows after it in the head have how many fields."""
    csv.field_size_limit(LONGEST_FIELD_CHARACTERS)
    text = head.data[:HEAD_BYTES].removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
    rows = list[list[str]]()
    with contextlib.suppress(csv.Error):
        rows.extend(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=separator)))
    is_whole = head.is_whole and len(head.data) <= HEAD_BYTES
    return (rows or [[]])[0], Counter(map(len, rows[1 : None if is_whole else -1]))


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    separator, (column, columns) = unit.layout[0], map(int, unit.layout[1:].split("/"))
    rows = ((row, written) for row, _, written in _read(unit.file, io.BytesIO(read_unit(unit)), separator) if row)
    if unit.start == 0:
        next(rows, None)  # the names of the columns
    return [_pick(row, column, columns, _has_open_quotes(written, separator)) for row, written in rows]


def _has_open_quotes(written: str, separator: str) -> bool:
    """Return whether text follows the end of quotes: they are escaped in another way, or are no quotes of CSV."""
    if '"' not in written:
        return False
    try:
        list(csv.reader(io.StringIO(written, newline=""), delimiter=separator, strict=True))
    except csv.Error:
        return True
    return False


def _pick(row: list[str], column: int, columns: int, is_misread: bool) -> Any:
    if len(row) > columns or is_misread:
        return Unusable("malformed")
    if len(row) <= column:
        return Unusable("no_text_column")
    return row[column].encode("utf-8", "surrogateescape")  # the bytes of the file, which need not be UTF-8


def _read(file: str, handle: Any, separator: str) -> Iterator[tuple[list[str], int, str]]:
    """Yield each row, the byte at which it ends, and how it is written. An empty line is an empty row."""
    csv.field_size_limit(LONGEST_FIELD_CHARACTERS)
    lines: list[str] = []
    end, last = 0, ""
    # Splits at any kind of line end, and keeps it.
    text = io.TextIOWrapper(handle, encoding="utf-8", errors="surrogateescape", newline="")

    def of_row() -> Iterator[str]:
        nonlocal end
        while line := text.readline(LONGEST_FIELD_CHARACTERS):
            if len(line) == LONGEST_FIELD_CHARACTERS:
                raise csv.Error(f"a line is longer than {LONGEST_FIELD_CHARACTERS:,} characters")
            end += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
            line = line if lines or end > len(line) + 3 else line.removeprefix("\ufeff")
            lines.append(line)
            yield line

    try:
        for row in csv.reader(of_row(), delimiter=separator):
            last = "".join(lines)
            lines[:] = []
            yield row, end, last
        if '"' in last:
            _refuse_open_quote(file, last, separator)
    except csv.Error as error:
        fix = "write it again, for example with pandas.DataFrame.to_csv"
        raise BadFile(f"dataset: {file}: the row before byte {end:,} cannot be read ({error}); {fix}") from error
    finally:
        text.detach()


def _refuse_open_quote(file: str, row: str, separator: str) -> None:
    """Raise BadFile if the last row ends inside quotes."""
    try:
        list(csv.reader(io.StringIO(row, newline=""), delimiter=separator, strict=True))
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise BadFile(f"dataset: {file} ends inside quotes, so it is cut off; download it again") from error
