"""Names of files as users give them, and text of files that may be anything."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path


def local_path(text: str) -> str:
    """Replace `~` and `$NAME` as a shell does. Raises ValueError, which says why, if that cannot name a file.

    A file whose name really has these characters is found by it.
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
            raise ValueError("there is no home folder of that name; write the path out")
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ValueError(f"{error.strerror}; give another path") from None
    return found


def read_text_file(path: Path) -> str:
    """Read a regular file: a pipe might never end. Raises OSError, or ValueError if it is not UTF-8."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_text(encoding="utf-8")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
