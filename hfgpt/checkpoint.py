"""Checkpoints: one folder that is both a Hub model folder and the point to resume from.

Safetensors and JSON only. A folder is written aside, synced to disk and renamed, its manifest last, so that a name
`checkpoint-N` always means a whole checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from transformers import PreTrainedModel

from hfgpt.errors import UserError
from hfgpt.run_folder import LATEST, RunFolder, write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "training_state"
REQUIRED = (
    *("config.json", "model.safetensors", "tokenizer.json"),
    *(f"{STATE}/optimizer.safetensors", f"{STATE}/trainer_state.json", f"{STATE}/data_state.json"),
)
# Fields of the model's configuration that change what it computes.
FUNCTION = (
    *("vocab_size", "n_layer", "n_head", "n_embd", "n_positions", "n_inner", "activation_function"),
    *("layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"),
)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_checkpoint(run: RunFolder, step: int, write: Callable[[Path], None], keep: int | None) -> Path:
    """Let `write` fill a folder, then make it `checkpoint-<step>`, newest of the run; keep the `keep` newest."""
    final = run.checkpoint(step)
    aside = run.path / f".{final.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    (aside / STATE).mkdir(parents=True)
    write(aside)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    for path in files:
        path.chmod(aside.stat().st_mode & 0o666)  # safetensors makes files for their owner alone
        _sync(path)
    write_json(aside / MANIFEST, {"files": {path.relative_to(aside).as_posix(): _facts(path) for path in files}})
    if final.exists():  # a broken folder of this step: a whole one would have been resumed
        shutil.rmtree(final)
    os.rename(aside, final)
    _sync(run.path)
    link, latest = run.path / f".{LATEST}.tmp", run.path / LATEST
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    if latest.is_dir() and not latest.is_symlink():  # made by a copy that follows links
        run.abandon(latest)
    os.replace(link, latest)
    for old in run.checkpoints()[keep:] if keep else []:
        shutil.rmtree(old)
    return final


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder by its manifest, or None when it is whole."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name in REQUIRED:
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
            if _facts(path) != facts:
                return f"{name} is damaged (its hash differs from the one in {MANIFEST})"
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not written to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is unreadable: {error}"
    return None


def find_checkpoint(run: RunFolder, wanted: str) -> Path | None:
    """The checkpoint to resume from: `wanted` is a folder, "latest" (None when there is none) or "never".

    "latest" is the newest whole one; broken ones are named and passed over. Raises UserError for a folder that is
    not a whole checkpoint, and for a run folder that would be overwritten.
    """
    if wanted == "latest":
        for folder in run.checkpoints():
            if (problem := fault(folder)) is None:
                return folder
            logger.warning("%s is not used: %s", folder, problem)
        if run.checkpoints():
            raise UserError(
                f"resume_from_checkpoint=latest: no whole checkpoint in {run.path}; start anew in another output_dir"
            )
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
        raise UserError(f"resume_from_checkpoint={wanted}: {problem}; name another one, or use latest")
    if run.holds_run() and folder.resolve().parent != run.path.resolve():
        raise UserError(
            f"output_dir={run.path} already holds a run other than that of resume_from_checkpoint={wanted}; "
            "name another output_dir"
        )
    return folder


def save_training_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: dict[str, Any], data: dict[str, Any]
) -> None:
    """Optimizer tensors as `<state>.<parameter name>`, the rest as JSON, into `folder`/training_state."""
    state: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE)["state"]
    tensors = {f"{key}.{name}": value for name, values in state.items() for key, value in values.items()}
    save_file(tensors, folder / STATE / "optimizer.safetensors")
    write_json(folder / STATE / "trainer_state.json", trainer)
    write_json(folder / STATE / "data_state.json", data)


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """`trainer_state` or `data_state` of a checkpoint."""
    return json.loads((folder / STATE / f"{name}.json").read_text(encoding="utf-8"))


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of a resumed run that are not those it was saved with; where it is stored does not count."""
    changed = [key for key in now if then.get(key) != now[key]]
    place = ("output_dir", "run_name", "resume_from_checkpoint")
    return {key: {"from": then.get(key), "to": now[key]} for key in changed if key not in place}


def load_model_and_optimizer(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Weights and optimizer state of a checkpoint into `model` and `optimizer`, in place.

    Raises UserError where the checkpoint is of a model that computes another function.
    """
    ours = model.config.to_dict()
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = [f"model.{key}: {saved[key]} there, {ours[key]} here" for key in FUNCTION if saved[key] != ours[key]]
    if changed:
        raise UserError(f"resume_from_checkpoint={folder}: another model; " + "; ".join(changed))
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise UserError(f"{folder / 'model.safetensors'}: parameters differ: {[*missing, *unexpected]}")
    state: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    for key, value in load_file(folder / STATE / "optimizer.safetensors").items():
        kind, name = key.split(".", 1)
        state["state"][name][kind] = value
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def _facts(path: Path) -> dict[str, Any]:
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
