"""Keep a training run going when standard output or standard error cannot be written."""

from __future__ import annotations

import atexit
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hfgpt.errors import RunError
from hfgpt.files import WINDOWS

BROKEN_PIPE = 141  # 128 + SIGPIPE, as for other command line tools
NAMES = ("stdout", "stderr")
# The reason why output was lost, by stream name; recorded once per stream.
lost: dict[str, str] = {}


class SafeStream:
    """A text stream that replaces characters it cannot encode, and drops what it cannot write.

    A command's own output (`must_write`) is not dropped: a closed pipe ends the command quietly, any other failure
    raises RunError.
    """

    def __init__(self, stream: Any, name: str, must_write: bool = False) -> None:
        self._stream, self._name, self._must_write = stream, name, must_write

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: already closed
            self._lose(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:  # closed
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        if self._name not in lost:
            lost[self._name] = reason
            atexit.register(self._discard)
        if self._must_write:
            self._must_write = False  # report it once
            if isinstance(error, BrokenPipeError) or (WINDOWS and getattr(error, "errno", None) == errno.EINVAL):
                raise SystemExit(BROKEN_PIPE)
            raise RunError(f"{self._name} cannot be written: {reason}")

    def _discard(self) -> None:
        """Discard buffered text, so that nothing is written when the interpreter closes the stream."""
        with suppress(OSError, ValueError, AttributeError):
            empty = os.open(os.devnull, os.O_WRONLY)
            os.dup2(empty, self._stream.fileno())


def make_safe(must_write: bool = False) -> None:
    """Replace standard output and standard error with a `SafeStream`, for this process.

    must_write: standard output is the purpose of the process.
    """
    for number, name in enumerate(("stdin", *NAMES)):
        if getattr(sys, name) is None:  # closed by the parent process
            _occupy(number)
            if name in NAMES:
                lost.setdefault(name, "closed")
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for name in NAMES:
        stream = getattr(sys, name)
        if not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream, name, must_write and name == "stdout"))


@contextmanager
def safe() -> Iterator[None]:
    """Call `make_safe` for the code inside.

    A stream that lost output stays replaced afterwards, because Python's final flush would fail on the original.
    """
    before = {name: getattr(sys, name) for name in NAMES}
    make_safe()
    try:
        yield
    finally:
        for name, stream in before.items():
            if name not in lost and isinstance(getattr(sys, name), SafeStream):
                setattr(sys, name, stream)


def _occupy(number: int) -> None:
    """Open a closed standard descriptor on /dev/null, so that no other file gets its number."""
    try:
        os.fstat(number)
    except OSError:
        empty = os.open(os.devnull, os.O_RDWR)
        os.dup2(empty, number)
        if empty != number:
            os.close(empty)
