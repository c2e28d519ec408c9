"""Rows without a usable document: what to do about them, and notes for the plan if most rows are such."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hfgpt.data.encoding import LOSSES
from hfgpt.data.source import Source, read_documents
from hfgpt.data.units import IN_MEMORY_BYTES, Row
from hfgpt.errors import UserError

# Reasons that say nothing about the rows themselves.
NOT_OF_ROWS = (*LOSSES, "in_validation", "bad_file")
# What to do about rows that no document can be read from, by reason; the most frequent one counts.
FIXES = {
    "invalid_utf8": "they are not UTF-8: convert them, for example with iconv -f LATIN1 -t UTF-8",
    "no_text_column": "choose another text_column",
    "not_text": "text_column has other values than text: choose another one, or write them as strings",
    "not_an_object": "give JSON objects",
    "malformed": "write them again, as the format requires",
    "bad_file": "see the warnings",
}


def fix_of(skipped: Counter[str]) -> str | None:
    """Return what to do about most of the rows without a document, if it is known."""
    return FIXES.get(next(iter(dict(skipped.most_common(1))), ""))


def no_documents(text: str, skipped: Counter[str]) -> UserError:
    why = f"; {fix_of(skipped) or 'give other text'}"
    skips = f" (skipped: {dict(skipped)})" if skipped else ", as it has no rows"
    return UserError(f"{text}: contains no usable document{skips}{why}")


def note_unusable(usable: int, skipped: Counter[str], what: str) -> list[str]:
    """Return a note for the plan if most of the rows that were read are unusable, and why."""
    reasons = {reason: count for reason, count in skipped.most_common() if reason not in NOT_OF_ROWS}
    if (unusable := sum(reasons.values())) <= usable:
        return []
    counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    return [f"note: {unusable:,} of the {unusable + usable:,} rows of {what} read so far are unusable: {counts}"]


def note_on_text(source: Source, documents: list[Row] | None, skipped: Counter[str]) -> list[str]:
    """Return a note for the plan if most rows of a text are unusable: of a local stream, judge by its first unit."""
    read = len(documents or ())
    if documents is None:
        head = source.units_of(source.units[0])[:1] if source.is_local and source.units else []
        if any(unit.size_bytes > IN_MEMORY_BYTES for unit in head):
            return []
        skipped = Counter()
        read = sum(1 for _ in read_documents(dataclasses.replace(source, by_file=False), head, skipped))
    return note_unusable(read, skipped, "the text")
