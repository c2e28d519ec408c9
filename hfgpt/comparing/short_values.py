"""Short texts for the values of a setting, such as models and long paths, that still tell them apart."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

LONGEST = 28
_WORDS = re.compile(r"[\w.+-]+|[^\w.+-]")


def as_key(value: Any) -> str:
    """Return a value of a setting as JSON, equal for equal values."""
    return json.dumps(value, sort_keys=True)


def shorten(values: Sequence[Any]) -> dict[str, str]:
    """Return a text for each value, by its `as_key`; different values have different texts.

    Mappings are without the fields that all share, and other long texts without the words that all begin or end with.
    """
    distinct = {as_key(value): value for value in values}
    mappings = [value for value in distinct.values() if isinstance(value, dict)]
    texts = [_as_text(value, mappings) for value in distinct.values()]
    if len({*texts}) < len(texts):  # "1" and 1 in a mapping
        texts = list(distinct)
    for shorter in (_without_common_words, _without_middle):
        long = [text for text in texts if len(text) > LONGEST and not text.startswith("{")]
        found = [dict(zip(long, shorter(long), strict=True)).get(text, text) for text in texts]
        if len({*found}) == len(texts):
            texts = found
    return dict(zip(distinct, texts, strict=True))


def _as_text(value: Any, mappings: Sequence[dict[str, Any]]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        differing = {key: item for key, item in value.items() if any(item != of.get(key, of) for of in mappings)}
        value = differing or value
    return json.dumps(value, separators=(", ", ":"), ensure_ascii=False).replace('"', "")


def _without_common_words(texts: list[str]) -> list[str]:
    """Leave out the words that all texts begin or end with, but keep one of each."""
    found = [_WORDS.findall(text) for text in texts]
    if len(found) < 2:
        return texts
    before = min(_in_common(found), min(map(len, found)) - 1)
    found = [words[before:] for words in found]
    after = min(_in_common([words[::-1] for words in found]), min(map(len, found)) - 1)
    found = [words[: len(words) - after] for words in found]
    start, end = "..." if before else "", "..." if after else ""
    return [f"{start}{''.join(words)}{end}" for words in found]


def _in_common(found: list[list[str]]) -> int:
    """Return with how many equal words all begin."""
    return len([*takewhile(lambda words: len({*words}) == 1, zip(*found, strict=False))])


def _without_middle(texts: list[str]) -> list[str]:
    half = (LONGEST - 3) // 2
    return [text if " " in text else f"{text[:half]}...{text[-half:]}" for text in texts]  # at spaces it can wrap
