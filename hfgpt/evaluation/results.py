"""What was measured of a checkpoint after it was written: records in the folder of its run, for its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.checkpoint import MANIFEST, file_facts
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.checkpointing.training_state import STATE, read_state
from hfgpt.errors import UserError
from hfgpt.files import read_text_file

WEIGHTS = "model.safetensors"
# What each task's record must hold, as its card tells it.
TASKS = {
    "text": ("dataset", "loss", "scored_tokens"),
    "hellaswag": ("dataset", "accuracy_norm", "accuracy", "examples"),
}


def record_evaluation(folder: str | Path, task: str, found: Mapping[str, Any]) -> Path:
    """Record what was measured of a checkpoint of a run; the file that it stands in.

    task: "text" or "hellaswag". found: what its evaluation returned: figures, and `dataset` with, where it is of the
    Hub, `dataset_name`, `dataset_split` and `dataset_revision`. A text's figures are those of `evaluation.figures` and
    `scored_tokens`. The record keeps the hash of the weights: it is never taken for another checkpoint's of that name.

    Raises UserError for a folder that is no checkpoint of a run, or not what was written, and where it cannot write.
    """
    if missing := [key for key in TASKS.get(task, ("task",)) if key not in found]:
        raise UserError(f"task={task}: found has no {', '.join(missing)}; tasks are {', '.join(TASKS)}")
    about = check_recordable(folder)
    run = RunFolder(Path(folder).resolve().parent)
    run.record_evaluation(**{**found, **about, "task": task})
    return run.evaluations


def check_recordable(folder: str | Path) -> dict[str, Any]:
    """What a record says of its checkpoint: name, step, hash of its weights. Raises UserError where it cannot be."""
    where, folder = f"checkpoint {folder}", Path(folder).resolve()
    run = RunFolder(folder.parent, writes=False)
    if (weights := _weights(folder)) is None or (trainer := _trainer(folder, run)) is None:
        raise UserError(f"{where}: not a checkpoint in the folder of its run, where a record could be kept")
    if file_facts(folder / WEIGHTS)["xxh3_128"] != weights:
        raise UserError(f"{where}: {WEIGHTS} is not what {MANIFEST} says; take another checkpoint")
    return {"checkpoint": folder.name, "step": trainer["step"], "weights": weights}


def recorded_evaluations(folder: str | Path) -> list[dict[str, Any]]:
    """The records of these very weights, oldest first; of one task and dataset the newest alone."""
    folder = Path(folder).resolve()
    run = RunFolder(folder.parent, writes=False)
    if (weights := _weights(folder)) is None or _trainer(folder, run) is None:
        return []
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in run.evaluation_records():
        needed = TASKS.get(str(record.get("task")))
        if record.get("weights") == weights and needed and all(record.get(key) is not None for key in needed):
            key = tuple(record.get(name) for name in ("task", "dataset", "dataset_name", "dataset_split"))
            newest.pop(key, None)
            newest[key] = record
    return list(newest.values())


def _weights(folder: Path) -> str | None:
    """The hash of the weights by the folder's manifest; None where that does not tell."""
    try:
        return str(json.loads(read_text_file(folder / MANIFEST))["files"][WEIGHTS]["xxh3_128"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _trainer(folder: Path, run: RunFolder) -> dict[str, Any] | None:
    """The trainer state of a checkpoint that stands in the folder of its run, else None."""
    if not (folder / STATE).is_dir():
        return None
    state = read_state(folder, "trainer_state")
    return state if run.run_id() == state["run_id"] else None
