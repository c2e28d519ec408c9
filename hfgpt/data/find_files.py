"""Which files a text of some name has: locally, or on the Hub."""

from __future__ import annotations

from typing import Any, NamedTuple

from hfgpt.data import embedded
from hfgpt.data.converted import describe_commit, readable_hub_files
from hfgpt.data.formats import format_of
from hfgpt.data.formats.tokens.opening import choose_kind
from hfgpt.data.kinds import file_kind
from hfgpt.data.local_files import local_files, similar_name
from hfgpt.data.saved_datasets import find_saved_files
from hfgpt.errors import UserError


class FoundFiles(NamedTuple):
    """Files of a text, its name for the plan, what is known of it before they are read, and all files beside them."""

    files: list[str]
    label: str
    fingerprint: dict[str, Any]
    in_split: list[str]


def find_local(
    dataset: str, name: str | None, split: str, revision: str | None, text_column: str, tokens_dtype: str | None
) -> FoundFiles | None:
    """Return local files, or those of a folder that `datasets` saved; None if there are none of that name."""
    saved = find_saved_files(dataset, split)
    if (found := saved or local_files(dataset)) is None:
        return None
    files, notes = choose_kind(*found, tokens_dtype)
    split = "train" if saved and found[1] else split  # which it has
    has_columns = any(format_of(file).HAS_COLUMNS for file in files)
    refuse_meaningless_settings(dataset, name, split, revision, "text" if has_columns else text_column)
    return FoundFiles(files, f"{dataset} ({'; '.join(notes)})" if notes else dataset, {}, [])


def find_on_hub(
    dataset: str, name: str | None, split: str, revision: str | None, tokens_dtype: str | None, patience_seconds: float
) -> FoundFiles:
    try:
        in_split, commit = readable_hub_files(dataset, name, split, revision, patience_seconds)
    except UserError as error:
        if "no such local file" in str(error) and (similar := similar_name(dataset)):
            raise UserError(f"{error}; did you mean {similar}?") from error
        raise
    files, _ = choose_kind(list(filter(file_kind, in_split)), [], tokens_dtype)
    fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
    label = f"{dataset} ({', '.join(filter(None, [name, split]))}) {describe_commit(commit, files)}"
    return FoundFiles(files, label, fingerprint, in_split)


def refuse_meaningless_settings(
    dataset: str, name: str | None, split: str, revision: str | None, text_column: str
) -> None:
    """Raise UserError for Hub dataset settings given for other text, or a column for text without columns."""
    kind = "is this Python's own documentation" if dataset == embedded.NAME else "is local"
    given = {"dataset_name": name, "dataset_split": split if split != "train" else None, "dataset_revision": revision}
    problems = [
        f"{key}={value}: dataset={dataset} {kind} and has none; leave it out" for key, value in given.items() if value
    ]
    if text_column != "text":
        problems.append(f"text_column={text_column}: dataset={dataset} is plain text without columns; leave it out")
    if problems:
        raise UserError(*problems)
