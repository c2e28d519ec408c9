"""Folders that `datasets` wrote with `save_to_disk`: a set, or one folder for each split of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hfgpt.errors import UserError, message

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def saved_splits(dataset: str) -> list[str]:
    """Return the names of the splits of a saved `DatasetDict`; none for anything else."""
    path = Path(dataset).expanduser() / SPLITS
    return list(_read(path)["splits"]) if path.is_file() else []


def find_saved_files(dataset: str, split: str) -> tuple[list[str], list[str]] | None:
    """Return the files of a saved set in their order, and notes for its description; None if this is no such folder.

    Other Arrow files in the folder, which `datasets` keeps as a cache, are not part of the set.
    """
    folder, notes = Path(dataset).expanduser().absolute(), list[str]()
    if splits := saved_splits(dataset):
        if split not in splits:
            raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(splits)}")
        folder, notes = folder / split, [f"split {split}"]
    if not ((folder / STATE).is_file() and (folder / INFO).is_file()):
        if splits:
            raise UserError(f"dataset={dataset}: {folder} has no {STATE} and {INFO}; save it again")
        return None
    files = [folder / entry["filename"] for entry in _read(folder / STATE)["_data_files"]]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"dataset={dataset}: {STATE} lists {missing[0]}, which is not there; copy the whole folder")
    if not files:
        raise UserError(f"dataset={dataset}: {STATE} lists no files, so it has no rows; save it again")
    return list(map(str, files)), notes


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = content["splits" if path.name == SPLITS else "_data_files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"dataset: {path} cannot be read ({message(error)}); save the set again") from error
    return content
