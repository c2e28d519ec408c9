"""Checkpoints: one folder that is both a Hub model folder and the point to resume from.

Safetensors and JSON only. A folder is written aside, synced to disk and renamed, its manifest last, so that a name
`checkpoint-N` always means a whole checkpoint.
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

from hfgpt.checkpointing.run_folder import BEST, LATEST, RunFolder, remove, write_json
from hfgpt.checkpointing.training_state import STATE, read_state
from hfgpt.errors import UserError
from hfgpt.files import read_text_file

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MODEL_FILES = ("config.json", "model.safetensors")
REQUIRED = (
    *(*MODEL_FILES, "tokenizer.json"),
    *(f"{STATE}/optimizer.safetensors", f"{STATE}/trainer_state.json", f"{STATE}/data_state.json"),
)


def write_checkpoint(run: RunFolder, step: int, write: Callable[[Path], None], keep: int | None) -> Path:
    """Let `write` fill a folder, then make it `checkpoint-<step>`, newest of the run; keep `keep` (None: all).

    Of these one is the best by evaluation loss, if there is room for it beside the newest. Raises OSError, and leaves
    what was there as it was, where the folder cannot be written.
    """
    final = run.checkpoint(step)

    def fill(aside: Path) -> None:
        (aside / STATE).mkdir()
        write(aside)
        for path in filter(Path.exists, (run.metrics, run.ledger)):
            _sync(path)  # a checkpoint must not outlive the records

    aside = _written_aside(final, fill)
    if final.exists():  # a broken folder of this step: a whole one would have been resumed
        _remove(final)
    os.rename(aside, final)
    if point(run, LATEST, final):
        rotate(run, final, keep)
    return final


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder, then give it its name, with a manifest: a model on its own, outside of any run.

    Raises UserError where there is something of that name, or the folder cannot be written.
    """
    refuse_existing(final)
    try:
        os.rename(_written_aside(final.absolute(), write), final)
        _sync(final.absolute().parent)
    except OSError as error:
        raise UserError(f"{final}: {error.strerror or error}; name a folder that can be written") from error


def refuse_existing(folder: Path) -> None:
    """Raise UserError where there is something of that name, be it a link to nowhere."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: exists already, and nothing is overwritten; name a new folder")


def _written_aside(final: Path, write: Callable[[Path], None]) -> Path:
    """The folder that is to become `final`, filled by `write`, with its manifest, all on disk."""
    aside = final.with_name(f".{final.name}.tmp")
    _remove(aside)
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        for path in files:
            path.chmod(aside.stat().st_mode & 0o666)  # safetensors makes files for their owner alone
            _sync(path)
        write_json(
            aside / MANIFEST, {"files": {path.relative_to(aside).as_posix(): file_facts(path) for path in files}}
        )
        for folder in (*filter(Path.is_dir, aside.rglob("*")), aside):
            _sync(folder)
    except BaseException:
        _remove(aside)  # the room it takes is needed
        raise
    return aside


def point(run: RunFolder, name: str, folder: Path) -> bool:
    """Make `name` stand for one of the run's checkpoints; whether that could be done."""
    link, place = run.path / f".{name}.tmp", run.path / name
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        if place.is_dir() and not place.is_symlink():  # made by a copy that follows links
            run.abandon(place)
        os.replace(link, place)
        _sync(run.path)
    except OSError as error:  # not every file system has links
        logger.warning("%s could not be made to point at %s: %s", place, folder.name, error)
        return False
    return True


def go_on_from(run: RunFolder, resumed: Path | None, step: int, keep: int | None) -> None:
    """Drop from the run's folder what lies after `step`, at which it goes on from checkpoint `resumed` (None: begins).

    A process may have been killed between naming a checkpoint and the link and rotation, which are made up for.
    """
    own = [folder for folder in run.checkpoints() if resumed and folder.samefile(resumed)]
    if resumed and not own:
        run.take_records(resumed.resolve().parent)
    linked = all([point(run, LATEST, folder) for folder in own])  # first, as later checkpoints lose their names
    run.rewind(step if resumed else -1)
    for folder in own if linked else []:
        rotate(run, folder, keep)


def rotate(run: RunFolder, newest: Path, keep: int | None) -> None:
    """Keep `keep` (None: all) checkpoints of the run that wrote `newest`: that one, the best one, the newest others.

    What is left of them is known as best from then on, if any was evaluated.
    """
    run_id = read_state(newest, "trainer_state")["run_id"]
    losses = {}
    for folder in run.checkpoints():
        try:
            state = read_state(folder, "trainer_state")
        except UserError:
            continue  # not ours to judge
        if state["run_id"] == run_id:
            evaluated = state["evaluation"] and state["evaluation_step"] == state["step"]
            losses[folder] = state["evaluation"]["eval_loss"] if evaluated else math.inf
    best = min(losses, key=lambda folder: losses[folder])
    ranked = sorted(losses, key=lambda folder: (folder != newest, folder != best))  # stable: the others newest first
    best = min(ranked[:keep], key=lambda folder: losses[folder])
    if losses[best] < math.inf:
        point(run, BEST, best)
    for old in ranked[keep:] if keep else []:
        _remove(old)


def _remove(folder: Path) -> None:
    """Under another name first, so that a folder half removed is not taken for a checkpoint."""
    if folder.exists() and not folder.is_symlink():
        going = folder.with_name(f".{folder.name.strip('.')}.removed")
        remove(going)
        folder = folder.rename(going)
    remove(folder)


def fault(folder: Path, required: Sequence[str] = REQUIRED) -> str | None:
    """What is wrong with a checkpoint folder by its manifest, or None when it is whole and has what is `required`."""
    try:
        files = json.loads(read_text_file(folder / MANIFEST))["files"]
        for name in required:
            if name not in files:
                return f"{MANIFEST} does not name {name}"
        for name, facts in files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                return f"{MANIFEST} names a file outside of the folder: {name}"
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {facts['size']}"
            if file_facts(path) != facts:
                return f"{name} is damaged (its hash differs from the one in {MANIFEST})"
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not written to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # links in a circle, too
        return f"{MANIFEST} is unreadable: {error}"
    return None


def find_checkpoint(run: RunFolder, wanted: str) -> Path | None:
    """The checkpoint to resume from: `wanted` is a folder, "latest" (None when there is none) or "never".

    "latest" is the run's newest whole one; broken and foreign ones are named and passed over. Raises UserError for a
    folder that is not a whole checkpoint, and for a run folder that would be overwritten.
    """
    if wanted == "latest":
        for folder in run.checkpoints():
            if (problem := fault(folder) or _foreign(folder, run.run_id())) is None:
                return folder
            logger.warning("%s is not used: %s", folder, problem)
        if run.checkpoints():
            raise UserError(
                f"resume_from_checkpoint=latest: no whole checkpoint in {run.path}; start anew in another output_dir"
            )
        if run.holds_run():
            logger.warning("the run in %s has no checkpoint yet: it starts at step 1 again", run.path)
        return None
    if wanted == "never":
        if run.holds_run():
            raise UserError(
                f"output_dir={run.path} already holds a run; continue it with --resume_from_checkpoint latest, or "
                "name another output_dir"
            )
        return None
    folder = Path(wanted)
    if not folder.is_dir():
        known = ", ".join(path.name for path in run.checkpoints()) or "none"
        raise UserError(f"resume_from_checkpoint={wanted}: no such folder; checkpoints in {run.path}: {known}")
    if problem := fault(folder):
        if (folder / "run.json").exists():
            problem = "it is a run folder, not a checkpoint"
        elif (folder / "config.json").exists() and not (folder / STATE).exists():
            problem = "it holds a model alone, from which --init_from starts a run"
        raise UserError(f"resume_from_checkpoint={wanted}: {problem}; name another one, or use latest")
    if run.holds_run() and folder.resolve().parent != run.path.resolve():
        raise UserError(
            f"output_dir={run.path} already holds a run other than that of resume_from_checkpoint={wanted}; "
            "name another output_dir"
        )
    return folder


def _foreign(folder: Path, run_id: str | None) -> str | None:
    """Why a whole folder is not one of the run's checkpoints, or None."""
    try:
        state = read_state(folder, "trainer_state")
    except UserError as error:
        return str(error)
    if folder.name != f"checkpoint-{state['step']}":
        return f"it is a copy of checkpoint-{state['step']}"
    return None if run_id in (None, state["run_id"]) else "it is of another run"


def file_facts(path: Path) -> dict[str, Any]:
    """Size in bytes and hash, as a manifest has them."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return {"size": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
