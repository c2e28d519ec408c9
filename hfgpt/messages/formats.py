"""Format numbers, durations, lists and values for messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def duration(seconds: float) -> str:
    """Format as `1:02:03` or `5 days, 1:02:03`; anything longer, or not a number, is `over 1000 years`."""
    if not seconds < 1000 * 365.25 * 86400:
        return "over 1000 years"
    return str(timedelta(seconds=round(seconds)))


def about(seconds: float) -> str:
    """Format an estimate in its natural unit: `about 40 seconds`, `about 2 minutes`, `about 26 hours`."""
    for unit, length, longest in (("second", 1, 90), ("minute", 60, 90 * 60), ("hour", 3600, 48 * 3600)):
        if seconds < longest:
            number = max(1, round(seconds / length))
            return f"about {number} {unit}{'s' * (number > 1)}"
    days = seconds / 86400
    return f"about {days:,.0f} days" if days < 365_000 else "over 1000 years"


def counted(number: int, word: str) -> str:
    """Format as `1 document` or `2,000 documents`."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def enumerated(words: Sequence[str], last: str = "and") -> str:
    """Format as `a, b and c`."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def rounded(value: float, digits: int = 3) -> str:
    """Format with this many significant digits, and large numbers without an exponent: `13,000`."""
    near = float(f"{value:.{digits}g}")
    return f"{near:,.0f}" if near >= 10 ** (digits - 1) else f"{near:,.{digits}g}"


def shown(value: Any) -> str:
    """Format any value for a message: one line of at most 200 characters."""
    if value == []:  # a flag without a value; no setting is a list
        return ""
    try:
        text = _SHORT.repr(value) if isinstance(value, dict | list | tuple | set) else str(value)
    except ValueError:  # Python refuses to format numbers of thousands of digits
        text = f"({type(value).__name__})"
    text = text[:1000].encode(errors="backslashreplace").decode()  # command line bytes that are not UTF-8
    return " ".join(text.split())[:200]
