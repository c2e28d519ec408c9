"""Resume points on the Hub: checkpoints that can be public, and how a run continues from one on another machine.

last-checkpoint/  or  checkpoint-1000/
  manifest.json ...     the files of the checkpoint, without settings that name files or text of the user
  records/              ledger.jsonl, and metrics.jsonl with its numbers only
resume.json             which of these folders is the newest, its step and run_id
"""

from __future__ import annotations

import json
import re
import tempfile
import typing
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from hfgpt.checkpointing.checkpoint import MANIFEST, content_facts, file_facts, find_damage
from hfgpt.checkpointing.read_records import is_count
from hfgpt.checkpointing.read_training_state import STATE, read_state
from hfgpt.checkpointing.run_folder import RunFolder, write_json
from hfgpt.config import PretrainConfig
from hfgpt.data.position import FILE
from hfgpt.errors import UserError, first_line
from hfgpt.files import read_text_file, remove, rename
from hfgpt.hub.client import full_name, retry_hub
from hfgpt.hub.model_card import HUB_MODEL
from hfgpt.messages.slow_progress import SlowWork

LAST, POINTER, RECORDS = "last-checkpoint", "resume.json", "records"
FOLDER = re.compile(rf"{LAST}|checkpoint-\d{{1,18}}")
TRIES_OF_A_DAMAGED_FILE = 3
# Text in a record of metrics.jsonl that may be public.
PUBLIC_TEXT = ("event", "peak_source", "weights")
OF_HUB_DATASET = ("dataset", "dataset_name", "dataset_split", "dataset_revision")


class DamagedPoint(UserError):
    """A resume point on the Hub that is not whole."""


class Place(NamedTuple):
    """What `--resume_from_checkpoint` names on the Hub."""

    repo_id: str
    folder: str | None = None
    revision: str | None = None

    @property
    def is_exact(self) -> bool:
        return bool(self.folder or self.revision)


class Point(NamedTuple):
    """A resume point at a commit. `step` and `run_id` are unknown if its folder was given."""

    name: str
    commit: str
    folder: str
    step: int | None = None
    run_id: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.commit[:12]} on the Hub"


def resume_folder(strategy: str, checkpoint: Path) -> str | None:
    """Return the folder in the repository that keeps a whole checkpoint; None if `hub_strategy` keeps none."""
    return {"checkpoint": LAST, "all_checkpoints": checkpoint.name}.get(strategy)


def point_files(checkpoint: Path, run: RunFolder, folder: str) -> dict[str, Path | bytes]:
    """Return the files of a resume point, by name in the repository, whose folder for it is `folder`."""
    trainer, data = read_state(checkpoint, "trainer_state"), read_state(checkpoint, "data_state")
    lines = [json.dumps(public_record(record)) for record in run.records() if record["step"] <= trainer["step"]]
    ledger = run.ledger.read_bytes() if run.ledger.exists() else b""
    made = {
        f"{STATE}/trainer_state.json": _as_json(_public_trainer(trainer, data["fingerprint"])),
        f"{STATE}/data_state.json": _as_json(_public_data(data)),
        f"{RECORDS}/{run.metrics.name}": "".join(f"{line}\n" for line in lines).encode(),
        f"{RECORDS}/{run.ledger.name}": ledger[: ledger.rfind(b"\n") + 1],  # the resumed run drops later steps
    }
    facts = json.loads(read_text_file(checkpoint / MANIFEST))["files"]
    files: dict[str, Path | bytes] = {name: made.get(name, checkpoint / name) for name in {**facts, **made}}
    facts |= {name: content_facts(content) for name, content in made.items()}
    files[MANIFEST] = _as_json({"files": facts})
    pointer = {"folder": folder, "step": trainer["step"], "run_id": trainer["run_id"]}
    return {**{f"{folder}/{name}": content for name, content in files.items()}, POINTER: _as_json(pointer)}


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def public_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of metrics.jsonl without text: samples, documents, paths and causes of failures."""
    return {key: value for key, value in record.items() if key in PUBLIC_TEXT or not _has_text(value)}


def _has_text(value: Any) -> bool:
    """Return whether there is text in a value, or as a key, which may name anything."""
    if isinstance(value, dict):
        return any(map(_has_text, [*value, *value.values()]))
    return any(map(_has_text, value)) if isinstance(value, list | tuple) else isinstance(value, str)


def _public_trainer(trainer: dict[str, Any], fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return trainer_state.json without settings, and states of callbacks, that contain text of the user."""
    hints = typing.get_type_hints(PretrainConfig)
    choices = {"model", *(key for key, hint in hints.items() if _is_choice(hint))}
    choices |= {*OF_HUB_DATASET} if "dataset.commit" in fingerprint else set()

    def is_public(key: str, value: Any) -> bool:
        if key in choices or not _has_text(value):
            return True
        if key == "init_from":
            return HUB_MODEL.fullmatch(value) is not None
        return (key == "tokenizer" and not Path(value).is_absolute()) or (key, value) == ("dataset", "embedded")

    def is_public_state(state: dict[str, Any]) -> bool:
        values = [*state["attributes"].values(), *json.loads(state["args"] or "{}").values()]
        return not any(map(_has_text, values))

    states = {name: [*filter(is_public_state, states)] for name, states in trainer.get("callbacks", {}).items()}
    config = {key: value for key, value in trainer["config"].items() if is_public(key, value)}
    return {**trainer, "config": config, "callbacks": states}


def _is_choice(hint: Any) -> bool:
    return typing.get_origin(hint) is Literal or any(map(_is_choice, typing.get_args(hint)))


def _public_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return data_state.json without the names of files; one hash of all remains."""
    return {**data, "fingerprint": {key: value for key, value in data["fingerprint"].items() if FILE not in key}}


def find_point(api: HfApi, place: Place) -> Point | None:
    """Return the resume point at a place, or None if there is none. Raises the client's error for a refusal."""
    name = full_name(api, place.repo_id)
    try:
        info = api.model_info(name, revision=place.revision)
    except RepositoryNotFoundError as error:  # also for 401: it may be there, and private
        if error.response.status_code == 404:
            return None
        raise
    commit, files = str(info.sha), {file.rfilename for file in info.siblings or ()}
    if place.folder:
        return Point(name, commit, place.folder) if f"{place.folder}/{MANIFEST}" in files else None
    if POINTER not in files:
        return None
    with tempfile.TemporaryDirectory() as temporary:
        path = api.hf_hub_download(name, POINTER, revision=commit, local_dir=temporary)
        return _read_pointer(Path(path), name, commit)


def _read_pointer(path: Path, name: str, commit: str) -> Point:
    try:
        content = json.loads(read_text_file(path))
        if FOLDER.fullmatch(content["folder"]) and is_count(content["step"]) and isinstance(content["run_id"], str):
            return Point(name, commit, content["folder"], content["step"], content["run_id"])
        wrong = "a wrong value"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = first_line(error)
    raise DamagedPoint(f"{name}@{commit[:12]}: {POINTER} on the Hub is not valid ({wrong}); resume from {name}/{LAST}")


def fetch(api: HfApi, point: Point, config: PretrainConfig, run: RunFolder) -> Path:
    """Download a resume point into a temporary folder of the run, verify it by its manifest, and return it.

    It is then like a checkpoint of another run folder, with that run's records beside it. Settings that are not public
    get the values of `config`. Raises DamagedPoint if it is damaged or incomplete.
    """
    room = run.make_room()
    folder = room / point.folder

    def download(name: str, size: int = 0) -> Path:
        get = partial(api.hf_hub_download, point.name, f"{point.folder}/{name}", revision=point.commit, local_dir=room)
        return Path(retry_hub(get, size))

    with SlowWork(f"downloading {point}"):
        for name, facts in _listed_files(download(MANIFEST), point).items():
            for _ in range(TRIES_OF_A_DAMAGED_FILE):
                path = download(name, facts["size"])
                if file_facts(path) == facts:
                    break
                path.rename(damaged := path.with_name(f"{path.name}.damaged"))
            else:
                damaged.replace(path)
    if damage := find_damage(folder):
        raise DamagedPoint(f"{point}: {point.folder}: {damage}; name an earlier commit: {point.name}@REVISION")
    return _completed(folder, point, config, run)


def _listed_files(manifest: Path, point: Point) -> dict[str, dict[str, Any]]:
    """Return size and hash of each file in a manifest. Raises DamagedPoint if it cannot be ours."""
    try:
        files = json.loads(read_text_file(manifest))["files"]
        for name, facts in files.items():
            if ".." in PurePosixPath(name).parts or re.search(r"^/|[\\:]", name) or not is_count(facts["size"]):
                raise ValueError(f"{name} is not the name of a file of ours")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedPoint(f"{point}: {point.folder}/{MANIFEST} is not valid ({first_line(error)})") from None
    return files


def _completed(folder: Path, point: Point, config: PretrainConfig, run: RunFolder) -> Path:
    """Make a whole checkpoint of a downloaded resume point, under its final name, with its records beside it."""
    trainer, state = read_state(folder, "trainer_state"), f"{STATE}/trainer_state.json"
    given = {"config": {**config.to_dict(), **trainer["config"]}, "origin": f"{point.name}@{point.commit}"}
    write_json(folder / state, {**trainer, **given})
    for name in (run.metrics.name, run.ledger.name):
        if (folder / RECORDS / name).is_file():
            rename(folder / RECORDS / name, folder.parent / name)
    remove(folder / RECORDS)
    files = json.loads(read_text_file(folder / MANIFEST))["files"]
    files = {name: facts for name, facts in files.items() if not name.startswith(f"{RECORDS}/")}
    write_json(folder / MANIFEST, {"files": {**files, state: file_facts(folder / state)}})
    final = folder.with_name(f"checkpoint-{trainer['step']}")
    return folder if folder == final else rename(folder, final)
