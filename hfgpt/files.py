"""Local files: names as users give them, text of files that may be anything, and files written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

WINDOWS = os.name == "nt"
# What a tokenizer may consist of, as `save_pretrained` of transformers 4 and 5 writes it.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
INVALID_NAME = 123  # Windows' code for a name that no file can have, such as a glob
# Windows neither renames nor replaces a file that is open elsewhere. Virus scanners and indexers close it soon.
OPEN_ELSEWHERE_SECONDS = 2.0 if WINDOWS else 0.0


def local_path(text: str) -> str:
    """Expand `~` and `$NAME` as a shell does. Raises ValueError with the reason if the result cannot be a path.

    A file whose name really contains these characters is found under that name.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the name is not in UTF-8; rename it") from None
    if not text or "\0" in text:
        raise ValueError(f"{'a zero byte in the name' if text else 'it is empty'}; give a path")
    found = text
    if not os.path.lexists(text):
        found = os.path.expanduser(os.path.expandvars(text))
        if unset := re.search(r"\$\{?([A-Za-z_]\w*)", found):
            raise ValueError(f"the environment has no variable {unset[1]}; set it, or write the path out")
        if found.startswith("~"):
            raise ValueError("there is no home folder with that name; write the path out")
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if getattr(error, "winerror", None) != INVALID_NAME:
            raise ValueError(f"{error.strerror}; give another path") from None
    return found


def read_text_file(path: Path) -> str:
    """Read a regular file (a pipe might never end). Raises OSError, or ValueError if it is not UTF-8."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_text(encoding="utf-8")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all: under a temporary name, synced to disk, and renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # it might be a link to somewhere else
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace(temporary, path)
    except OSError:
        remove(temporary)  # the disk may be full
        raise


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target`, in place of a file or link of that name, or of nothing."""

    def call() -> None:
        try:
            os.replace(source, target)
        except PermissionError:
            if not target.is_symlink():
                raise
            target.unlink()  # Windows does not replace a link to a folder
            os.replace(source, target)

    _wait_for_other_programs(call)


def rename(source: Path, target: Path) -> Path:
    """Rename a file or folder to a name that is free, and return that."""
    _wait_for_other_programs(lambda: os.rename(source, target))
    return target


def _wait_for_other_programs(call: Callable[[], None]) -> None:
    """Call, and again for OPEN_ELSEWHERE_SECONDS while permission is denied."""
    until = time.monotonic() + OPEN_ELSEWHERE_SECONDS
    while True:
        try:
            return call()
        except PermissionError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def remove(path: Path) -> None:
    """Delete a file, a link (not its target), or a folder with its content; errors are ignored."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs no file open for reading
    except PermissionError:
        if is_folder:
            return  # Windows opens none
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
