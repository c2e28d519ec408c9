"""A lock on an open file that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any, BinaryIO

fcntl: Any = None
msvcrt: Any = None
with contextlib.suppress(ImportError):
    fcntl = importlib.import_module("fcntl")
with contextlib.suppress(ImportError):
    msvcrt = importlib.import_module("msvcrt")  # of Windows

# Others cannot read what is locked on Windows, so the byte that is locked is beyond the text, which says who holds it.
LOCKED_BYTE = 2**30


def acquire(file: BinaryIO, shared: bool = False) -> None:
    """Lock an open file, without waiting. `shared` locks do not exclude each other, except on Windows.

    Raises BlockingIOError if another process holds the lock, and OSError on a file system without locks. Does nothing
    on a system without locks.
    """
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    elif msvcrt is not None:
        try:
            _lock_byte(file, msvcrt.LK_NBLCK)
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from None


def release(file: BinaryIO) -> None:
    """Unlock and close a file."""
    if fcntl is None and msvcrt is not None:
        with contextlib.suppress(OSError):  # it was not locked
            _lock_byte(file, msvcrt.LK_UNLCK)  # closing alone leaves it locked for a while
    file.close()


def _lock_byte(file: BinaryIO, mode: int) -> None:
    file.seek(LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(file.fileno(), mode, 1)
    file.seek(0)
