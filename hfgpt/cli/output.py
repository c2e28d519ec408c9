"""Format the output of commands: a JSON object, or one fact per line."""

from __future__ import annotations

import json
import sys
from typing import Any

from hfgpt.errors import RunError
from hfgpt.messages.formats import rounded


def as_json(facts: dict[str, Any]) -> str:
    """Return indented JSON, with null for infinity and NaN, which JSON lacks."""
    return json.dumps(json.loads(json.dumps(facts), parse_constant=lambda _: None), indent=2)


def as_json_line(facts: dict[str, Any]) -> str:
    """Return JSON on one line, in characters that standard output has: others would be replaced."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(facts, ensure_ascii=not is_utf8)


def as_lines(facts: dict[str, Any], unknown: str = "unknown") -> str:
    """Return one line per fact; `unknown` stands for None."""
    shown = {key: unknown if value is None else "none" if value in ([], {}) else value for key, value in facts.items()}
    shown = {key: rounded(value, 6) if isinstance(value, float) else value for key, value in shown.items()}
    return "\n".join(f"{key.replace('_', ' '):22} {value}" for key, value in shown.items())


def print_check(facts: dict[str, Any], subject: str, is_json: bool) -> None:
    """Print the facts found by a check. Raises RunError if it found problems."""
    print(as_json(facts) if is_json else as_lines(facts, "not checked"))
    if facts["problems"]:
        raise RunError(f"{subject}: {'; '.join(facts['problems'])}")


def silence_transformers() -> None:
    """Turn off progress bars and warnings of transformers."""
    from transformers.utils import logging  # takes a second to import

    logging.disable_progress_bar()
    logging.set_verbosity_error()
