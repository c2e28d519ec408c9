"""SIGTERM, SIGINT and SIGHUP as a request to stop, so that the step in flight ends and is saved first."""

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

from hfgpt.distributed.launcher import stop_with_launcher
from hfgpt.errors import RunError

# Ctrl-C reaches the launcher and its children; the launcher passes it on to them a moment later.
SAME_SIGNAL_SECONDS = 2.0


class Interrupted(BaseException):
    """A signal came inside `StopSignals.interruptible`. Not an `Exception`, which libraries catch and ignore."""


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a process to stop. SIGHUP, for a closed terminal, is one unless it is ignored (nohup)."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


class StopSignals:
    """A context that stores the first signal in `received`. A second one ends the process at once."""

    def __init__(self, except_for: Sequence[signal.Signals] = ()) -> None:
        """except_for: signals that keep their handlers."""
        self.except_for = except_for
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._is_interruptible = False

    def __enter__(self) -> StopSignals:
        self._handlers: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            numbers = [number for number in stop_signals() if number not in self.except_for]
            self._handlers = {number: signal.signal(number, self._handle) for number in numbers}
            stop_with_launcher()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def to_error(self) -> RunError | None:
        """The error that ends the run because of the signal received, if one was."""
        return RunError(self.received.name, 128 + self.received) if self.received else None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work inside can be abandoned: a signal raises `Interrupted` there."""
        self._is_interruptible = True
        try:
            if self.received:
                raise Interrupted
            yield
            if self.received:  # and the code inside has caught what was raised
                raise Interrupted
        finally:
            self._is_interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork, which its own parent ends
            if number == signal.SIGTERM:
                os._exit(128 + number)
        elif self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            if self._is_interruptible:
                self._is_interruptible = False
                raise Interrupted
        elif time.monotonic() - self._received_at > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """A signal inside ends the process with one line and its exit code, unless it has another handler.

    For imports, which take seconds, before a recipe begins.
    """
    handlers: dict[signal.Signals, Any] = {}
    pid = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            print(f"error: {signal.Signals(number).name} before the first step", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1"):
        for number in stop_signals():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                handlers[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is end:  # an import may have set another one
                signal.signal(number, handler)
