"""SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGBREAK as a request to stop: the step in flight ends and is saved first."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from hfgpt.distributed.launcher import stop_with_launcher
from hfgpt.errors import RunError

# Ctrl-C reaches the launcher and its children; a moment later the launcher passes it on to them again.
SAME_SIGNAL_SECONDS = 2.0


class Interrupted(BaseException):
    """A signal arrived inside `StopSignals.interruptible`. Not an `Exception`, as libraries may swallow those."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop. SIGHUP, of a closed terminal, is one unless ignored (nohup).

    On Windows SIGBREAK comes from Ctrl-Break, and from a window that is closed.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if hasattr(signal, "SIGBREAK"):
        numbers.append(signal.SIGBREAK)
    return numbers


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Handle these signals with `handler` inside the context. Has no effect outside of the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before: dict[signal.Signals, Any] = {n: signal.signal(n, handler) for n in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) == handler:  # code inside may have set another handler
                signal.signal(number, previous)


class StopSignals:
    """A context that stores the first signal in `received`. A second one ends the process at once.

    A second signal within SAME_SIGNAL_SECONDS of the first is ignored: it may be the same one, passed on again.
    """

    def __init__(self, except_for: Sequence[signal.Signals] = ()) -> None:
        """except_for: signals that keep their current handlers."""
        self.except_for = except_for
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._is_interruptible = False

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        self._stack = ExitStack()
        self._stack.enter_context(handling(self._handle, [n for n in stop_signals() if n not in self.except_for]))
        if threading.current_thread() is threading.main_thread():
            stop_with_launcher()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def to_error(self) -> RunError | None:
        """Return the error that ends the run if a signal was received, else None."""
        return RunError(self.received.name, 128 + self.received) if self.received else None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow the work inside to be interrupted: a signal raises `Interrupted` there."""
        self._is_interruptible = True
        try:
            if self.received:
                raise Interrupted
            yield
            if self.received:  # the code inside has caught the exception
                raise Interrupted
        finally:
            self._is_interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process, which is ended by its own parent
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
    """End the process on a signal inside, with one line and the signal's exit code, unless it has another handler.

    For the imports before a recipe begins, which take seconds.
    """
    pid = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            print(f"error: stopped by {signal.Signals(number).name} before the first step", file=sys.stderr)
        raise SystemExit(128 + number)

    is_interactive = hasattr(sys, "ps1")
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    free = [number for number in stop_signals() if signal.getsignal(number) in defaults and not is_interactive]
    with handling(end, free):
        yield
