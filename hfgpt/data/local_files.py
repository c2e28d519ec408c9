"""Which files a local path, folder or glob stands for."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hfgpt.data.formats import KNOWN, file_kind, other_kind, saved_to_disk
from hfgpt.errors import UserError

# Facts about the files beside them, in a format of their own.
LEFT_OUT = {"dataset_infos.json"}
MOST_NAMED = 3


def local_files(dataset: str) -> tuple[list[str], list[str]] | None:
    """Absolute names of the files that `dataset` stands for, sorted, each file once, and what was left out, in words;
    None for a Hub id.

    A folder stands for all files below it. Links are followed, but not in circles; hidden files do not count.
    """
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    if path.exists() or glob.has_magic(dataset):
        pattern = os.path.join(glob.escape(str(path)), "**", "*") if path.is_dir() else glob.escape(str(path))
        return _of_kinds(dataset, list(_glob(pattern if path.exists() else str(path))))
    if path.is_symlink():
        raise UserError(f"dataset={dataset}: is a link to what is not there; mend it")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and file_kind(dataset) is None:
        return None
    raise no_such(dataset)


def no_such(dataset: str) -> UserError:
    """The error for a path that is not there, with a near one."""
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    names = [other.name for other in path.parent.glob("*") if file_kind(other.name) or other.is_dir()]
    near = difflib.get_close_matches(path.name, names)
    near = [name for name in near if difflib.get_close_matches(path.stem, [Path(name).stem])]  # not the suffix alone
    hint = f"did you mean {Path(dataset).with_name(near[0])}?" if near else "check the path"
    return UserError(f"dataset={dataset}: no such file or folder; {hint}")


def _of_kinds(dataset: str, found: list[str]) -> tuple[list[str], list[str]]:
    # A dangling link counts as the file that it should be, and is named when that is read.
    files = [file for file in found if os.path.isfile(file) or not os.path.exists(file)]
    if folder := saved_to_disk(files):
        fix = f"datasets.load_from_disk('{folder}').to_parquet('text.parquet') writes what is"
        raise UserError(f"dataset={dataset}: {folder} is of datasets.save_to_disk, which is not read; {fix}")
    others = [file for file in files if not file_kind(file) or (Path(file).name in LEFT_OUT and len(files) > 1)]
    once: dict[object, str] = {}
    usable = sorted(set(files).difference(others))
    for file in sorted(usable, key=lambda file: (os.path.realpath(file) != file, file)):  # files before links to them
        once.setdefault(_identity(file), file)
    notes = []
    if others:
        names = ", ".join(sorted({_shown(os.path.basename(file)) for file in others})[:MOST_NAMED])
        more = ", ..." if len(others) > MOST_NAMED else ""
        notes.append(f"{len(others):,} file{'s' * (len(others) > 1)} of other kinds left out: {names}{more}")
    if again := len(usable) - len(once):
        notes.append(f"{again:,} further name{'s' * (again > 1)} of files left out")
    if once:
        return sorted(once.values()), notes
    if not files:
        path = os.path.expanduser(dataset)
        what = "an empty folder" if os.path.isdir(path) else "no file" if not found else "folders alone"
        is_or = "is" if os.path.isdir(path) else "matches"
        raise UserError(f"dataset={dataset}: {is_or} {what}; give {KNOWN} files")
    first = f"{_shown(os.path.basename(files[0]))} is {other_kind(files[0])}"
    among = f" among {len(files):,} files" if len(files) > 1 else ""
    raise UserError(f"dataset={dataset}: no {KNOWN} file{among}: {first}")


def _shown(name: str) -> str:
    return " ".join(name.encode("utf-8", "replace").decode().splitlines())


def _identity(file: str) -> object:
    """Equal for two names of one file."""
    try:
        status = os.stat(file)
    except OSError:  # a dangling link
        return file
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(file)


def _glob(pattern: str) -> Iterator[str]:
    """`glob.glob` with `**` for all folders below, which follows links but never in a circle."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    rest = os.path.join(*(parts[at + 1 :] or ["*"]))
    for base in glob.glob(os.sep.join(parts[:at]) + os.sep):
        for folder in _folders(base):
            yield from _glob(os.path.join(glob.escape(folder), rest))


def _folders(base: str) -> Iterator[str]:
    """`base` and the folders below it, each once, without hidden ones and links to a folder that holds the link."""
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise UserError(f"dataset: {error.filename} cannot be read ({error.strerror}); mend that and start again")

    for folder, below, _ in os.walk(base, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        yield folder
        links = {name: os.path.realpath(os.path.join(folder, name)) for name in below}
        inside = [name for name in below if not (real + os.sep).startswith(links[name].rstrip(os.sep) + os.sep)]
        # Links last, so that a folder is known by its own name.
        below[:] = sorted(
            (name for name in inside if not name.startswith(".")),
            key=lambda name: (os.path.islink(os.path.join(folder, name)), name),
        )
