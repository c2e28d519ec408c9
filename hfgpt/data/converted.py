"""Parquet that the Hub made of a dataset whose own files are not read: the branch `refs/convert/parquet`."""

from __future__ import annotations

import re
from pathlib import Path

from hfgpt.data.kinds import KNOWN, describe_other_kind, file_kind
from hfgpt.data.remote import NOT_ON_HUB, hub_files, read_with_retries
from hfgpt.errors import RunError, UserError

BRANCH = "refs/convert/parquet"
_NO_DATASET = f"{NOT_ON_HUB}|cannot be reached"
_FILE = re.compile(r"(?P<name>[^/]+)/(?P<part>partial-)?(?P<split>[^/]+)/\d+\.parquet")


def readable_hub_files(
    dataset: str, name: str | None, split: str, revision: str | None, patience_seconds: float
) -> tuple[list[str], str]:
    """Like `hub_files`; of a set without readable files, return the converted ones, and as commit `BRANCH@commit`.

    Such a commit may be given as revision. Raises UserError if there is neither.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE  # imported late: takes seconds

    if revision and revision.startswith(BRANCH):
        if found := _converted_files(dataset, name, split, revision, patience_seconds):
            return found
        raise UserError(f"dataset_revision={revision}: {dataset} has no such parquet; leave it out")
    try:
        files, commit = hub_files(dataset, name, split, revision, patience_seconds)
        if any(map(file_kind, files)):
            return files, commit
        first = Path(files[0]).name
        what = f"no {KNOWN} file in split {split}; {first} is {describe_other_kind(first)}"
        problem = UserError(f"dataset={dataset}: {what}")
    except UserError as error:
        problem = error
    is_about_files = not (str(problem).startswith("dataset_split=") or re.search(_NO_DATASET, str(problem)))
    if revision is None and is_about_files and not HF_HUB_OFFLINE:
        if found := _converted_files(dataset, name, split, BRANCH, patience_seconds):
            return found
        raise UserError(f"{problem} (nor has the Hub converted it to parquet)") from problem
    raise problem


def _converted_files(
    dataset: str, name: str | None, split: str, revision: str, patience_seconds: float
) -> tuple[list[str], str] | None:
    from huggingface_hub import HfApi  # imported late: takes seconds

    def find() -> tuple[list[str], str]:
        commit = str(HfApi().dataset_info(dataset, revision=revision.partition("@")[2] or BRANCH).sha)
        tree = HfApi().list_repo_tree(dataset, recursive=True, revision=commit, repo_type="dataset")
        return [entry.path for entry in tree], commit

    try:
        paths, commit = read_with_retries(find, f"{BRANCH} of {dataset}", patience_seconds)
    except RunError:
        raise
    except Exception:  # no such dataset, branch or permission: each has its own type
        return None
    found = [match for match in map(_FILE.fullmatch, sorted(paths)) if match]
    names = sorted({match["name"] for match in found})
    if name is None:
        if not names:
            return None
        if len(names) > 1 and "default" not in names:
            raise UserError(f"dataset_name: {dataset} has several configurations; choose one of {', '.join(names)}")
        name = names[0] if len(names) == 1 else "default"
    of_name = [match for match in found if match["name"] == name]
    if not of_name:
        return None
    splits = sorted({match["split"] for match in of_name})
    if split not in splits:
        raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(splits)}")
    files = [f"hf://datasets/{dataset}@{commit}/{match[0]}" for match in of_name if match["split"] == split]
    return files, f"{BRANCH}@{commit}"


def describe_commit(commit: str, files: list[str]) -> str:
    """Return a commit in words, for the description of a text."""
    if not commit.startswith(BRANCH):
        return f"at commit {commit[:8]}"
    part = ", only a part of it" if any("/partial-" in file for file in files) else ""
    return f"as parquet that the Hub made of it{part}, at commit {commit.rpartition('@')[2][:8]}"
