"""Record later evaluations of a checkpoint in its run folder, and read them for the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.checkpoint import MANIFEST, file_facts
from hfgpt.checkpointing.read_training_state import STATE, read_state
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.errors import UserError
from hfgpt.files import read_text_file
from hfgpt.links import follow

WEIGHTS = "model.safetensors"
# Keys in the record of each task that a model card needs.
TASKS = {
    "text": ("dataset", "loss", "scored_tokens"),
    "hellaswag": ("dataset", "accuracy_norm", "accuracy", "examples"),
}


def record_evaluation(folder: str | Path, task: str, found: Mapping[str, Any]) -> Path:
    """Add a line to evaluations.jsonl in the run folder of a checkpoint, and return that file.

    task: "text" or "hellaswag". found: the result of its evaluation. The record contains the hash of the weights, so
    that it is never used for another checkpoint with the same name.

    Raises UserError if `check_recordable` does, or if the file cannot be written.
    """
    identity = check_recordable(folder)
    run = RunFolder(follow(folder).resolve().parent)
    run.record_evaluation(**{**found, **identity, "task": task})
    return run.evaluations


def check_recordable(folder: str | Path) -> dict[str, Any]:
    """Return a checkpoint's name, step, and hash of the weights, to record with an evaluation.

    Raises UserError for a folder that is not a run's checkpoint, and for weights that have changed.
    """
    where, folder = f"checkpoint {folder}", follow(folder).resolve()
    if (identity := _identify(folder)) is None:
        raise UserError(
            f"{where}: not a checkpoint inside a run folder, where results are recorded; leave out --record"
        )
    if file_facts(folder / WEIGHTS)["xxh3_128"] != identity["weights"]:
        raise UserError(f"{where}: {WEIGHTS} does not match {MANIFEST}; use another checkpoint")
    return identity


def read_evaluations(folder: str | Path) -> list[dict[str, Any]]:
    """Return the records of a checkpoint's weights, oldest first; of each task and dataset only the newest."""
    folder = follow(folder).resolve()
    if (identity := _identify(folder)) is None:
        return []
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in RunFolder(folder.parent, writes=False).evaluation_records():
        needed = TASKS.get(str(record.get("task")))
        if record.get("weights") == identity["weights"] and needed and all(record.get(k) is not None for k in needed):
            key = tuple(record.get(name) for name in ("task", "dataset", "dataset_name", "dataset_split"))
            newest.pop(key, None)
            newest[key] = record
    return list(newest.values())


def _identify(folder: Path) -> dict[str, Any] | None:
    """Return name, step and hash of the weights of a checkpoint inside a run folder; None for any other folder."""
    try:
        weights = str(json.loads(read_text_file(folder / MANIFEST))["files"][WEIGHTS]["xxh3_128"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (folder / STATE).is_dir():
        return None
    state = read_state(folder, "trainer_state")
    if RunFolder(folder.parent, writes=False).run_id() != state["run_id"]:
        return None
    return {"checkpoint": folder.name, "step": state["step"], "weights": weights}
