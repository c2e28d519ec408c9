"""`checkpoint-latest` and `checkpoint-best`: links to a folder beside them, or text files with its name.

They are files where links are not allowed: on Windows without developer mode, on exFAT, on some network drives.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hfgpt.files import replace, write_whole

LATEST, BEST = "checkpoint-latest", "checkpoint-best"
LONGEST_BYTES = 64  # of such a file


def set_link(link: Path, folder: Path) -> None:
    """Let `link` stand for `folder`, which is beside it. Raises OSError if it cannot be written."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(folder.name, target_is_directory=True)
    except OSError:  # links are not allowed
        write_whole(link, f"{folder.name}\n".encode())
    else:
        replace(temporary, link)


def follow(path: str | Path) -> Path:
    """Return the folder that a link in the form of a text file stands for; any other path as it is."""
    path = Path(path)
    if path.name in (LATEST, BEST) and path.is_file():
        with contextlib.suppress(OSError, UnicodeDecodeError), open(path, "rb") as file:
            if found := re.fullmatch(r"(checkpoint-\d+)\s*", file.read(LONGEST_BYTES).decode()):
                return path.with_name(found[1])
    return path
