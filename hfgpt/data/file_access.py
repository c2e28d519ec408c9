"""Open local and remote files, and turn their errors into messages for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from hfgpt.data.compression import open_compressed
from hfgpt.data.kinds import BadFile, compression
from hfgpt.data.remote import BROKEN, read_with_retries
from hfgpt.errors import RunError, UserError, message

T = TypeVar("T")

READ_AHEAD_BYTES = 4 * 2**20


@contextlib.contextmanager
def open_file(file: str, uncompressed: bool = True, read_ahead: bool = False) -> Iterator[Any]:
    """Open a local or remote file for reading, by default decompressed.

    Each read of a remote file is one request, unless it is read ahead; a compressed file always is.
    """
    suffix = compression(file) if uncompressed else None
    if "://" not in file:  # a local name may hold what fsspec takes for a list of names (::)
        with open(file, "rb") as raw:
            yield open_compressed(suffix, raw) if suffix else raw
        return
    filesystem, path = url_to_fs(file)
    # Decoders and readers of archives read a few kilobytes at a time.
    ahead = {"block_size": READ_AHEAD_BYTES, "cache_type": "readahead"}
    with filesystem.open(path, "rb", **(ahead if suffix or read_ahead else {"cache_type": "none"})) as remote:
        handle = _CompleteReads(remote)
        yield open_compressed(suffix, handle) if suffix else handle


class _CompleteReads:
    """A remote file that raises OSError for a truncated answer; the client would take it for the end of the file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int | None = -1) -> bytes:
        left = self._file.size - self._file.tell()
        data = self._file.read(-1 if size is None else size)
        if len(data) < (left if size is None or size < 0 else min(size, left)):
            raise OSError("fewer bytes arrived than were requested")
        return data


def read_file(file: str, read: Callable[[], T], patience_seconds: float) -> T:
    """Return what `read` returns for `file`; remote files are read with retries.

    Raises BadFile if the file itself is at fault, UserError if it cannot be opened, RunError if the network fails.
    """
    try:
        return read_with_retries(read, file, patience_seconds) if "://" in file else read()
    except (UserError, RunError):
        raise
    except UnicodeDecodeError as error:
        raise BadFile(f"dataset: {file} is not UTF-8 text ({error}); convert it, for example with iconv") from error
    except (OSError, *BROKEN) as error:
        reason = message(error)
        if "://" not in file and getattr(error, "errno", None) is not None:  # from the system, not from the content
            raise UserError(f"dataset: {file} cannot be read ({reason}); make it readable first") from error
        if getattr(error, "response", None) is not None:
            fix = "check that it exists and that your token can read it"
            raise UserError(f"dataset: {file} cannot be opened ({reason}); {fix}") from error
        raise BadFile(f"dataset: {file} cannot be read ({reason}); download it again, or remove it") from error
