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
from hfgpt.data.heads import hint_of_ids, no_column
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit

LAYOUT = "array"
LONGEST_ELEMENT_CHARACTERS = 512 * 2**20
_OPENING, _SPACE = re.compile(r"\ufeff?\s*\["), re.compile(r"\s*")
_scan = json.JSONDecoder(strict=False).raw_decode  # a raw line end in a string does not lose the rest of the file
# An error this close to the end of what was read may come from the end, except in a string, which begins anywhere.
_NEAR_END = 16


def is_array(data: bytes) -> bool:
    return re.match(rb"\s*\[\s*(\{|\])", data.removeprefix(codecs.BOM_UTF8)) is not None


def find_units(file: str, text_bytes: int, sample: bytes, text_column: str) -> list[Unit]:
    columns: dict[str, Any] = {}
    with contextlib.suppress(BadFile):  # a sample may end anywhere
        for element, _, _ in _elements(file, [sample], 0, True):
            columns |= element if isinstance(element, dict) else {}
    if columns and text_column not in columns:
        raise no_column(file, text_column, list(columns), hint_of_ids(columns))
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
    is_first = start == 0
    if is_first:
        window.skip(_OPENING)
    while (begin := window.peek()) and begin != "]":
        if not is_first:
            if begin != ",":
                raise _broken(file, f"has no comma at byte {window.byte:,}")
            window.move(window.at + 1)
            window.peek()
        element, end = _scan_element(file, window)
        is_first = False
        yield element, window.move(end), window.byte
    if to_end:
        if not begin:
            raise BadFile(f"dataset: {file}: its JSON array is cut off after byte {window.byte:,}; download it again")
        window.move(window.at + 1)
        if window.peek():
            raise _broken(file, f"ends before byte {window.byte:,}, but the file does not")


def _scan_element(file: str, window: _Window) -> tuple[Any, int]:
    """Return the element at which the window is, and where it ends."""
    while True:
        try:
            element, end = _scan(window.text, window.at)
        except (ValueError, RecursionError) as error:
            is_near_end = getattr(error, "pos", 0) >= len(window.text) - _NEAR_END or "Unterminated" in str(error)
            wanted = 2 * (len(window.text) - window.at)
            if is_near_end and wanted < LONGEST_ELEMENT_CHARACTERS and window.read_on(wanted):
                continue
            raise _broken(file, f"is broken in the element at byte {window.byte:,}") from None
        if end < len(window.text) or not window.read_on(end - window.at + 1):  # else a number may continue
            return element, end


def _broken(file: str, where: str) -> BadFile:
    return BadFile(f"dataset: {file}: its JSON array {where}; download it again, or repair it, for example with jq")


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

    def peek(self) -> str:
        """Move over white space, and return the next character; "" at the end."""
        self.skip(_SPACE)
        while self.at == len(self.text) and self.read_on(1):
            self.skip(_SPACE)
        return self.text[self.at : self.at + 1]

    def skip(self, pattern: re.Pattern[str]) -> None:
        if found := pattern.match(self.text, self.at):
            self.move(found.end())
