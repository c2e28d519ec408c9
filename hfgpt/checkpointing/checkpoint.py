"""Checkpoints: folders that are both a Hub model folder and a point to resume from.

A folder is written under a temporary name, its manifest last, synced to disk and renamed, so that a folder called
`checkpoint-N` is always complete. It contains only safetensors and JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from hfgpt.checkpointing.read_training_state import STATE, read_state
from hfgpt.checkpointing.run_folder import RunFolder, write_json
from hfgpt.errors import UserError
from hfgpt.files import read_text_file, remove, rename, sync
from hfgpt.links import BEST, LATEST, follow, set_link

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MODEL_FILES = ("config.json", "model.safetensors")
REQUIRED = (
    *(*MODEL_FILES, "tokenizer.json"),
    *(f"{STATE}/optimizer.safetensors", f"{STATE}/trainer_state.json", f"{STATE}/data_state.json"),
)


def write_checkpoint(run: RunFolder, step: int, write: Callable[[Path], None], keep: int | None) -> Path:
    """Let `write` fill a folder, make it `checkpoint-<step>`, the run's newest, and delete all but `keep` checkpoints.

    Raises OSError, leaving the run's other checkpoints unchanged, if the folder cannot be written.
    """
    final = run.checkpoint(step)

    def fill(folder: Path) -> None:
        (folder / STATE).mkdir()
        write(folder)
        for path in filter(Path.exists, (run.metrics, run.ledger)):
            sync(path)  # the records must reach the disk before the checkpoint

    temporary = _write_temporary(final, fill)
    if final.exists():  # a damaged one, since the run would have resumed from a complete one
        remove_checkpoint(final)
    rename(temporary, final)
    if link(run, LATEST, final):
        rotate(run, final, keep)
    return final


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder outside of any run, add a manifest, and rename it to `final`.

    Raises UserError if a file or folder of that name exists, or if it cannot be written.
    """
    refuse_existing(final)
    try:
        rename(_write_temporary(final.absolute(), write), final)
        sync(final.absolute().parent)
    except OSError as error:
        raise UserError(f"{final}: {error.strerror or error}; choose a writable folder") from error


def refuse_existing(folder: Path) -> None:
    """Raise UserError if a file, folder or link of that name exists."""
    if os.path.lexists(folder):
        raise UserError(f"{folder}: already exists, and nothing is overwritten; choose a new name")


def _write_temporary(final: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary folder for `final`, add its manifest, sync it to disk, and return it."""
    temporary = final.with_name(f".{final.name}.tmp")
    remove_checkpoint(temporary)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        for path in files:
            path.chmod(temporary.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
            sync(path)
        facts = {path.relative_to(temporary).as_posix(): file_facts(path) for path in files}
        write_json(temporary / MANIFEST, {"files": facts})
        for folder in (*filter(Path.is_dir, temporary.rglob("*")), temporary):
            sync(folder)
    except BaseException:
        remove_checkpoint(temporary)  # the disk may be full
        raise
    return temporary


def link(run: RunFolder, name: str, folder: Path) -> bool:
    """Point the link `name` at one of the run's checkpoints. Returns whether that worked."""
    final = run.path / name
    try:
        if final.is_dir() and not final.is_symlink():  # made by a copy of the run that follows links
            run.abandon(final)
        set_link(final, folder)
        sync(run.path)
    except OSError as error:
        logger.warning("%s could not be set to %s: %s", final, folder.name, error)
        return False
    return True


def rotate(run: RunFolder, newest: Path, keep: int | None) -> None:
    """Delete all but `keep` (None: all) checkpoints of the run that wrote `newest`, and link the best of the rest.

    Keeps `newest`, then the one with the lowest `metric_for_best_model` on the present held-out text, then the newest
    of the others.
    """
    of_newest = read_state(newest, "trainer_state")
    run_id, metric = of_newest["run_id"], of_newest["config"].get("metric_for_best_model", "eval_loss")
    since = of_newest["evaluated_since"]
    losses = {}
    for folder in run.checkpoints():
        try:
            state = read_state(folder, "trainer_state")
        except UserError:
            continue  # not written by this run
        if state["run_id"] == run_id:
            is_evaluated = state["evaluation"] and state["evaluation_step"] == state["step"] > since
            value = state["evaluation"].get(metric) if is_evaluated else None
            losses[folder] = math.inf if value is None else value
    best = min(losses, key=lambda folder: losses[folder])
    ranked = sorted(
        losses, key=lambda folder: (folder != newest, folder != best)
    )  # stable sort: the others stay newest first
    best = min(ranked[:keep], key=lambda folder: losses[folder])
    if losses[best] < math.inf:
        link(run, BEST, best)
    for old in ranked[keep:] if keep else []:
        if old in run.held:
            continue  # it is being pushed; a later rotation deletes it
        try:
            remove_checkpoint(old)
        except OSError as error:  # Windows, while another program reads it
            logger.warning("%s could not be deleted (%s); this is tried again after the next save", old, error.strerror)


def remove_checkpoint(folder: Path) -> None:
    """Rename a folder, then delete it, so that a partly deleted one is not taken for a checkpoint."""
    if folder.exists() and not folder.is_symlink():
        renamed = folder.with_name(f".{folder.name.strip('.')}.removed")
        remove(renamed)
        folder = rename(folder, renamed)
    remove(folder)


def find_damage(folder: Path, required: Sequence[str] = REQUIRED) -> str | None:
    """Return what is wrong with a checkpoint folder; None if it matches its manifest and has all `required` files."""
    try:
        files = json.loads(read_text_file(folder / MANIFEST))["files"]
        for name in required:
            if name not in files:
                return f"{MANIFEST} does not list {name}"
        for name, facts in files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                return f"{MANIFEST} lists a file outside of the folder: {name}"
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {facts['size']}"
            if file_facts(path) != facts:
                return f"{name} is damaged (its hash does not match {MANIFEST})"
    except FileNotFoundError:
        return f"{MANIFEST} is missing: the checkpoint is incomplete"
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:  # also raised for circular links
        return f"{MANIFEST} is unreadable: {error}"
    return None


def find_checkpoint(run: RunFolder, wanted: str | None) -> Path | None:
    """Return the checkpoint to resume from, None to start at step 1.

    `wanted`: "never" or None, "latest", "best", the name of a checkpoint of the run, or a folder.

    Raises UserError for a folder that is not a complete checkpoint, and for a run folder that would be overwritten.
    """
    if wanted == "latest":
        return _find_latest(run)
    if wanted in (None, "never"):
        if run.holds_run():
            raise UserError(
                f"output_dir={run.path} already holds a run; continue it with --resume_from_checkpoint latest, or "
                "choose another output_dir"
            )
        return None
    own = follow(run.path / (BEST if wanted == "best" else wanted))
    folder = own if Path(wanted).name == wanted and own.is_dir() else follow(wanted)
    folder = folder.resolve() if folder.name in (LATEST, BEST) else folder
    if not folder.is_dir():
        known = ", ".join(path.name for path in run.checkpoints()) or "none"
        raise UserError(f"resume_from_checkpoint={wanted}: no such folder; checkpoints in {run.path}: {known}")
    if damage := find_damage(folder):
        if (folder / "run.json").exists():
            damage = "it is a run folder, not a checkpoint"
        elif (folder / "config.json").exists() and not (folder / STATE).exists():
            damage = "it contains only a model; to start a run from its weights, use --init_from"
        raise UserError(f"resume_from_checkpoint={wanted}: {damage}; choose another checkpoint, or use latest")
    if run.holds_run() and folder.resolve().parent != run.path.resolve():
        raise UserError(
            f"output_dir={run.path} already holds a run other than that of resume_from_checkpoint={wanted}; "
            "choose another output_dir"
        )
    return folder


def _find_latest(run: RunFolder) -> Path | None:
    """Return the run's newest usable checkpoint, or None. Warns about each newer one that is not."""
    for folder in run.checkpoints():
        if (problem := find_damage(folder) or _find_mismatch(folder, run.run_id())) is None:
            return folder
        logger.warning("%s is skipped (%s); trying the previous checkpoint", folder, problem)
    if run.checkpoints():
        raise UserError(
            f"resume_from_checkpoint=latest: no complete checkpoint in {run.path}; start again in another output_dir"
        )
    if run.holds_run():
        logger.warning("the run in %s has no checkpoint yet; it starts again at step 1", run.path)
    return None


def _find_mismatch(folder: Path, run_id: str | None) -> str | None:
    """Return why a complete checkpoint folder does not belong to the run, or None."""
    try:
        state = read_state(folder, "trainer_state")
    except UserError as error:
        return str(error)
    if folder.name != f"checkpoint-{state['step']}":
        return f"it is a copy of checkpoint-{state['step']}"
    return None if run_id in (None, state["run_id"]) else "it belongs to another run"


def content_facts(content: bytes) -> dict[str, Any]:
    """Return `file_facts` of a file with this content."""
    return {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def file_facts(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the hash of a file, as in a manifest."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return {"size": path.stat().st_size, "xxh3_128": digest.hexdigest()}
