"""Read and check the JSON files in a checkpoint's `training_state`, and find settings that have changed since."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.read_records import is_count
from hfgpt.errors import UserError
from hfgpt.files import read_text_file

STATE = "training_state"

Check = Callable[[Any], bool]


def _is_amount(value: Any) -> bool:
    return is_count(value) or (isinstance(value, float) and 0 <= value < math.inf)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _has(form: dict[str, Check]) -> Check:
    return lambda value: isinstance(value, dict) and not _wrong_keys(value, form)


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _all(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _wrong_keys(value: dict[str, Any], form: dict[str, Check]) -> list[str]:
    return [key for key, check in form.items() if key not in value or not check(value[key])]


# What each file must contain; the manifest only proves that it is the file that was written.
FORMS: dict[str, dict[str, Check]] = {
    "trainer_state": {
        "run_id": lambda value: isinstance(value, str),
        "step": is_count,
        "num_input_tokens_seen": is_count,
        "wall_seconds": _is_amount,
        "config": _is_object,
        "schedule": _has({"curve_steps": _is_amount, "since": is_count, "at": _is_amount, "pace": _is_amount}),
        "skipped_rows": lambda value: isinstance(value, dict) and all(map(is_count, value.values())),
        "evaluation": _or_null(_has({"eval_loss": _is_amount, "eval_perplexity": _is_amount, "eval_tokens": is_count})),
        "evaluation_step": is_count,
        "gradient_scaler": _or_null(_is_object),
        "average": _or_null(
            _has({"steps": is_count, "first_step": is_count, "is_model": lambda value: isinstance(value, bool)})
        ),
        "evaluated_since": is_count,
        "sized_since": lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_count, value)),
        "spike_window": _or_null(_all(lambda row: _all(_is_amount)(row) and len(row) == 2)),
        "loss_watch": _or_null(
            _has(
                {
                    "skipped_in_a_row": is_count,
                    "divergence": _or_null(
                        _has({"losses": _all(_is_amount), "best": _or_null(_is_amount), "above": is_count})
                    ),
                }
            )
        ),
    },
    "data_state": {"fingerprint": _is_object, "position": _is_object},
}


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Read `trainer_state` or `data_state` of a checkpoint. Raises UserError for a missing key or a wrong value."""
    path = folder / STATE / f"{name}.json"
    try:
        state = json.loads(read_text_file(path))
        if name == "trainer_state" and isinstance(state, dict):
            earlier: dict[str, Any] = {"average": None, "spike_window": None, "loss_watch": None}
            earlier |= {"sized_since": [0, 0], "evaluated_since": 0}
            state = {**earlier, **state}  # as in checkpoints of earlier versions
            if isinstance(state["average"], dict):
                state["average"] = {"first_step": 1, **state["average"]}
        wrong = _wrong_keys(state, FORMS[name]) if isinstance(state, dict) else ["not an object"]
    except (OSError, ValueError, RecursionError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        raise UserError(f"{path} is not valid for this version ({', '.join(wrong)}); use another checkpoint")
    return state


def evaluation_of_model(trainer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest evaluation record in `trainer`, with the metrics of what model.safetensors holds.

    That is the weights or their average, whose metrics are the other record's `_ema` ones.
    """
    record = trainer["evaluation"]
    if not record or not (trainer["average"] or {}).get("is_model"):
        return record
    averages = {key: key.replace("_ema", "", 1) for key in record if key.partition("/")[0].endswith("_ema")}
    return {**record, **{plain: record[key] for key, plain in averages.items()}}


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings that have changed since a checkpoint, ignoring those that only say what is written where."""
    places = ("output_dir", "run_name", "resume_from_checkpoint", "push_to_hub", "report")
    changed = [key for key in now if then.get(key) != now[key] and key not in places and not key.startswith("hub_")]
    return {key: {"from": then.get(key), "to": now[key]} for key in changed}
