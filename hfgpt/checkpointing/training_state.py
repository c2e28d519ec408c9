"""The JSON in a checkpoint's `training_state`: its form, and what has changed since it was written."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from hfgpt.errors import UserError
from hfgpt.files import read_text_file

STATE = "training_state"
NUMBER = (int, float)
# What training_state/ holds as JSON: the type of each value, or the same of a dictionary's; in a list: or null.
STATE_FORM: dict[str, dict[str, Any]] = {
    "trainer_state": {
        **{"run_id": str, "step": int, "num_input_tokens_seen": int, "wall_seconds": NUMBER, "config": dict},
        "schedule": {"curve_steps": int, "since": int, "at": NUMBER, "pace": NUMBER},
        "skipped_rows": Counter,
        "evaluation": [{"eval_loss": NUMBER, "eval_perplexity": NUMBER, "eval_tokens": int}],
        **{"evaluation_step": int, "gradient_scaler": (dict, type(None))},
    },
    "data_state": {"fingerprint": dict, "position": dict},
}


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """`trainer_state` or `data_state` of a checkpoint. Raises UserError where it is not as hfgpt writes it."""
    path = folder / STATE / f"{name}.json"
    try:
        state = json.loads(read_text_file(path))
        wrong = _misformed(state, STATE_FORM[name])
    except (OSError, ValueError, RecursionError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        raise UserError(f"{path} is not as this version writes it ({', '.join(wrong)}); take another checkpoint")
    return state


def _misformed(value: Any, form: dict[str, Any]) -> list[str]:
    """Keys of `value` that are missing, or not of the form asked for.

    Numbers are finite and 0 or more, whole ones below 2^63.
    """
    if not isinstance(value, dict):
        return ["not an object"]
    wrong = []
    for key, kind in form.items():
        inner = value.get(key)
        if isinstance(kind, list):
            kind = kind[0] if inner is not None else type(None)
        if isinstance(kind, dict):
            wrong += [f"{key}.{name}" for name in _misformed(inner, kind)]
            continue
        numbers = [inner] if isinstance(inner, int | float) else []
        if kind is Counter and isinstance(inner, dict):
            kind, numbers = dict, [count if isinstance(count, int) else -1 for count in inner.values()]
        is_fine = key in value and isinstance(inner, kind) and not isinstance(inner, bool)
        if not is_fine or not all(0 <= number < (2**63 if isinstance(number, int) else math.inf) for number in numbers):
            wrong.append(key)
    return wrong


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of a resumed run that are not those it was saved with; where it goes does not count."""
    changed = [key for key in now if then.get(key) != now[key]]
    place = ("output_dir", "run_name", "resume_from_checkpoint", "push_to_hub")
    counts = [key for key in changed if key not in place and not key.startswith("hub_")]
    return {key: {"from": then.get(key), "to": now[key]} for key in counts}
