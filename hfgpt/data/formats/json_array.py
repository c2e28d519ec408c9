"""JSON files that hold one array of objects. See `borders` for how they are split into units."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.borders import one_unit, pieces, read_unit, split_at_rows
from hfgpt.data.heads import no_column
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit

LAYOUT = "array"
LONGEST_ELEMENT_CHARACTERS = 512 * 2**20
_OPENING, _BEFORE_ELEMENT = re.compile(r"\ufeff?\s*\["), re.compile(r"[\s,]*")
_scan = json.JSONDecoder(strict=False).raw_decode  # a raw line end in a string does not lose the rest of the file
# An error this close to the end of what was read may come from the end, except in a string, which begins anywhere.
_NEAR_END = 16


def is_array(data: bytes) -> bool:
    return re.match(rb"\s*\[\s*(\{|\]\s*$)", data.removeprefix(codecs.BOM_UTF8)) is not None


def find_units(file: str, text_bytes: int, sample: bytes, text_column: str) -> list[Unit]:
    columns: dict[str, None] = {}
    with contextlib.suppress(BadFile):  # a sample may end anywhere
        for element, _, _ in _elements(file, [sample], 0, True):
            columns |= dict.fromkeys(element if isinstance(element, dict) else ())
    if columns and text_column not in columns:
        raise no_column(file, text_column, list(columns))
    if units := one_unit(file, text_bytes, LAYOUT):
        return units
    with open_file(file, read_ahead=True) as handle:
        return split_at_rows(file, (end for _, _, end in _elements(file, pieces(handle), 0, True)), LAYOUT)


def read_rows(unit: Unit) -> Iterator[tuple[Any, bool]]:
    """Yield the elements of a unit, and whether each is valid UTF-8."""
    for element, is_utf8, _ in _elements(unit.file, [read_unit(unit)], unit.start, unit.stop < 0):
        yield element, is_utf8


def _elements(file: str, parts: Iterable[bytes], start: int, to_end: bool) -> Iterator[tuple[Any, bool, int]]:
    """Yield each element of an array, whether it is valid UTF-8, and the byte at which it ends.

    `parts`: the bytes of the file from `start` on, where an element or the array begins; to the end if `to_end`.
    """
    window = _Window(parts, start)
    if start == 0:
        window.skip(_OPENING)
    while True:
        window.skip(_BEFORE_ELEMENT)
        if window.at == len(window.text):
            if window.read_on(1):
                continue
            if to_end:
                where = f"is cut off after byte {window.byte:,}; download it again"
                raise BadFile(f"dataset: {file}: its JSON array {where}")
            return
        if window.text[window.at] == "]":
            return
        try:
            element, end = _scan(window.text, window.at)
        except (ValueError, RecursionError) as error:
            is_near_end = getattr(error, "pos", 0) >= len(window.text) - _NEAR_END or "Unterminated" in str(error)
            wanted = 2 * (len(window.text) - window.at)
            if is_near_end and wanted < LONGEST_ELEMENT_CHARACTERS and window.read_on(wanted):
                continue
            where = f"is broken in the element at byte {window.byte:,}"
            fix = "download it again, or repair it, for example with jq"
            raise BadFile(f"dataset: {file}: its JSON array {where}; {fix}") from None
        if end == len(window.text) and window.read_on(end - window.at + 1):  # a number may continue
            continue
        is_utf8 = window.move(end)
        yield element, is_utf8, window.byte


class _Window:
    """The part of a text in memory. `at`: the next character, and `byte`: where it is in the file."""

    def __init__(self, parts: Iterable[bytes], start: int) -> None:
        self._parts = iter(parts)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.at, self.byte = "", 0, start
        self.read_on(1)

    def read_on(self, characters: int) -> bool:
        """Keep what is from `at` on, and read until there are this many characters. Returns whether any were added."""
        found = [self.text[self.at :]]
        have = kept = len(found[0])
        while have < characters and (part := next(self._parts, None)) is not None:
            found.append(self._decoder.decode(part))
            have += len(found[-1])
        self.text, self.at = "".join(found), 0
        return have > kept

    def move(self, end: int) -> bool:
        """Move to a character. Returns whether what lies before it is UTF-8."""
        passed, self.at = self.text[self.at : end], end
        try:
            self.byte += len(passed.encode())
        except UnicodeEncodeError:  # characters that stand for other bytes
            self.byte += len(passed.encode("utf-8", "surrogateescape"))
            return False
        return True

    def skip(self, pattern: re.Pattern[str]) -> None:
        if found := pattern.match(self.text, self.at):
            self.move(found.end())
