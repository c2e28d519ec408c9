"""Find the files that a local path, folder or glob stands for."""

from __future__ import annotations

import difflib
import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hfgpt.data.formats.tokens.layouts import is_marked
from hfgpt.data.kinds import KNOWN, describe_other_kind, file_kind
from hfgpt.data.token_names import COMPANION
from hfgpt.errors import UserError

# Written by `datasets` to describe the files next to them.
LEFT_OUT = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
MAX_NAMED = 3
OWN_FILES = ("metrics.jsonl", "config.json", "tokens_train_000001.bin")  # as runs and `hfgpt tokenize` write them


def local_files(dataset: str) -> tuple[list[str], list[str]] | None:
    """Return the absolute paths of the files that `dataset` stands for, each once, and notes on files left out.

    Returns None for the name of a Hub dataset. A folder stands for all files below it. Links are followed, but not in
    circles. Hidden files are left out. The prefix of Megatron's .idx and .bin stands for both.
    """
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    if path.is_dir():
        return _choose_files(dataset, list(_glob(os.path.join(glob.escape(str(path)), "**"))))
    if path.exists():
        return _choose_files(dataset, [str(path)])
    if glob.has_magic(dataset):
        return _choose_files(dataset, list(_glob(str(path))))
    if megatron := [f"{path}{suffix}" for suffix in (".idx", ".bin") if os.path.isfile(f"{path}{suffix}")]:
        return _choose_files(dataset, megatron)  # by the prefix of both files, as Megatron itself takes it
    if path.is_symlink():
        raise UserError(f"dataset={dataset}: is a link to a missing file; fix it")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and file_kind(dataset) is None:
        return None
    raise no_such_file(dataset)


def refuse_inside(what: str, folder: str | Path, dataset: str) -> None:
    """Raise UserError if `folder`, called `what`, is where its own files would become part of this local text."""
    base, recursive, rest = os.path.expanduser(dataset).partition("**")
    if recursive and not any(fnmatch.fnmatch(name, os.path.basename(rest) or "*") for name in OWN_FILES):
        return
    if os.path.isdir(base or ".") and Path(folder).resolve().is_relative_to(Path(base).resolve()):
        raise UserError(f"{what}: is inside dataset={dataset}, all of whose files are text; give another folder")


def no_such_file(dataset: str) -> UserError:
    """Return the error for a path that does not exist, suggesting a similar name that does."""
    hint = f"did you mean {similar}?" if (similar := similar_name(dataset)) else "check the path"
    return UserError(f"dataset={dataset}: no such file or folder; {hint}")


def similar_name(dataset: str) -> str | None:
    """Return the path of a file or folder that exists, whose name is similar."""
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    names = [other.name for other in path.parent.glob("*") if file_kind(other.name) or other.is_dir()]
    similar = difflib.get_close_matches(path.name, names)
    similar = [name for name in similar if difflib.get_close_matches(path.stem, [Path(name).stem])]  # not by suffix
    return str(Path(dataset).with_name(similar[0])) if similar else None


def _choose_files(dataset: str, found: list[str]) -> tuple[list[str], list[str]]:
    # A broken link counts as a file, and is reported when the file is read.
    files = [file for file in found if os.path.isfile(file) or not os.path.exists(file)]
    others = [
        file
        for file in files
        if not (file_kind(file) or is_marked(file)) or (Path(file).name in LEFT_OUT and len(files) > 1)
    ]
    usable = sorted(set(files).difference(others))
    others = [file for file in others if not COMPANION.search(file)]
    by_identity: dict[object, str] = {}
    for file in sorted(usable, key=lambda file: (os.path.realpath(file) != file, file)):  # files before links to them
        by_identity.setdefault(_identity(file), file)
    if not files:
        what = "no files" if not found or os.path.isdir(os.path.expanduser(dataset)) else "only folders"
        raise UserError(f"dataset={dataset}: {what}; give {KNOWN} files")
    if not by_identity:
        among = f" among {len(files):,} files" if len(files) > 1 else ""
        first = next((file for file in files if Path(file).name not in LEFT_OUT), files[0])
        what = f"{_one_line(first)} is {describe_other_kind(first)}"
        raise UserError(f"dataset={dataset}: no {KNOWN} file{among}: {what}")
    notes = []
    if others:
        names = ", ".join(sorted({_one_line(file) for file in others})[:MAX_NAMED])
        more = ", ..." if len(others) > MAX_NAMED else ""
        notes.append(f"{len(others):,} file{'s' * (len(others) > 1)} of other kinds left out: {names}{more}")
    if repeated := len(usable) - len(by_identity):
        notes.append(f"{repeated:,} more name{'s' * (repeated > 1)} for the same files left out")
    return sorted(by_identity.values()), notes


def _one_line(file: str) -> str:
    """Return a file's name without its folder, safe to print on one line."""
    return " ".join(os.path.basename(file).encode("utf-8", "replace").decode().splitlines())


def _identity(file: str) -> object:
    """Return a key that is the same for every name of a file."""
    try:
        status = os.stat(file)
    except OSError:  # a broken link
        return file
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(file)


def _glob(pattern: str) -> Iterator[str]:
    """Like `glob.glob`, with `**` for all folders below, following links but never in circles."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    rest = os.path.join(*(parts[at + 1 :] or ["*"]))
    for base in glob.glob(os.sep.join(parts[:at]) + os.sep):
        for folder in _folders_below(base):
            yield from _glob(os.path.join(glob.escape(folder), rest))


def _folders_below(base: str) -> Iterator[str]:
    """Yield `base` and the folders below it, each once, except hidden ones and links to a parent folder."""
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise UserError(f"dataset: {error.filename} cannot be read ({error.strerror}); make it readable first")

    for folder, below, _ in os.walk(base, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        yield folder
        targets = {name: os.path.realpath(os.path.join(folder, name)) for name in below if not name.startswith(".")}
        inside = [name for name, at in targets.items() if not (real + os.sep).startswith(at.rstrip(os.sep) + os.sep)]
        # Links last, so that a folder gets its own name.
        below[:] = sorted(inside, key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
