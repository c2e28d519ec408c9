"""SIGTERM and SIGINT as a wish to stop: the step in flight ends and is saved first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hfgpt.errors import RunError

# A launcher passes a signal on that the terminal has sent to its children too, and dies of it a moment later.
SAME_SIGNAL_SECONDS = 2.0
# Set by `accelerate launch` and torchrun for what they start.
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")


class Interrupted(Exception):
    """A signal came while the process only waited."""


class StopSignals:
    """A context in which the first signal is noted in `received` and a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._waiting = False

    def __enter__(self) -> StopSignals:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
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
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
            if self._waiting:
                self._waiting = False
                raise Interrupted
        elif time.monotonic() - self._since > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)


def follow_launcher() -> None:
    """On Linux, have a SIGTERM sent to this process when its launcher dies, which would leave it training alone.

    A shell is no launcher: what it starts in the background may outlive it.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return
    if any("accelerate" in part or "torch" in part for part in command[:4]):
        at_parents_end(signal.SIGTERM)
    elif os.getppid() == 1 and not os.environ.keys().isdisjoint(LAUNCHED):
        os.kill(os.getpid(), signal.SIGTERM)  # it has died already


def at_parents_end(number: signal.Signals) -> None:
    """Have a signal sent to this process when its parent ends, however that ends (on Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
