"""Paths as users type them, and safe reading of files that may not be text."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path


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
