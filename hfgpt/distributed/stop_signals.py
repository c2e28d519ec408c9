"""SIGTERM, SIGINT and SIGHUP as a wish to stop: the step in flight ends and is saved first."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hfgpt.distributed.launcher import follow_launcher
from hfgpt.errors import RunError

# A launcher passes a signal on that the terminal has sent to its children too, and dies of it a moment later.
SAME_SIGNAL_SECONDS = 2.0


class Interrupted(BaseException):
    """A signal came while the process only waited. No `Exception`, which libraries catch and go on."""


def stop_signals() -> list[signal.Signals]:
    """Those that ask the process to stop: SIGHUP, of a terminal that closes, unless it is ignored (nohup)."""
    wanted = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    return wanted


class StopSignals:
    """A context in which the first signal is noted in `received` and a second one ends the process at once."""

    def __init__(self, besides: Sequence[signal.Signals] = ()) -> None:
        """`besides`: signals that are left as they are."""
        self.besides = besides
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._waiting = False

    def __enter__(self) -> StopSignals:
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            wanted = [number for number in stop_signals() if number not in self.besides]
            self._before = {number: signal.signal(number, self._handle) for number in wanted}
            follow_launcher()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def fault(self) -> RunError | None:
        """The signal received, if any, as what ends the run."""
        return RunError(self.received.name, 128 + self.received) if self.received else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside may be broken off: a signal raises `Interrupted` there."""
        self._waiting = True
        try:
            if self.received:
                raise Interrupted
            yield
            if self.received:  # and what was raised has been caught on the way
                raise Interrupted
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork of it, which its own parent ends
            if number == signal.SIGTERM:
                os._exit(128 + number)
        elif self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
            if self._waiting:
                self._waiting = False
                raise Interrupted
        elif time.monotonic() - self._since > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A signal inside ends the process with its exit code and one line, where nobody has another use for it.

    For imports, which take seconds, before a recipe has begun.
    """
    before: dict[signal.Signals, Any] = {}
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            print(f"error: {signal.Signals(number).name} before the first step", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1"):
        for number in stop_signals():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:  # an import may have set another one
                signal.signal(number, handler)
