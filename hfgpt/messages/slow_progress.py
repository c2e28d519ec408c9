"""Show the progress of slow work on stderr: a bar on a terminal, occasional lines in a file, nothing for fast work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from hfgpt.messages.formats import duration

T = TypeVar("T")

DELAY_SECONDS = 5.0  # work that takes less is not shown
BAR_SECONDS, LINE_SECONDS = 0.5, 30.0  # between updates of the bar, and between lines in a file


def has_room_for_bar() -> bool:
    """Return whether stderr is a terminal with a size; without a size, as in some containers, tqdm shows nothing."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 0
    except (OSError, ValueError):  # no descriptor, or closed
        return False


class SlowWork:
    """Shows the progress of the work inside this context, on the main process only.

        with SlowWork("tokenizing", "documents", len(documents)) as work:
            for document in work.count(documents):
                ...

    A thread does the display, so counting costs nothing, and work without steps shows its elapsed time.

    unit: what is counted, in the plural. total: how many there are, if known.
    """

    def __init__(
        self, what: str, unit: str = "", total: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.what, self.unit, self.total, self.clock = what, unit, total, clock
        self.done = 0
        self._bar: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`; each counts as done when the next one is requested."""
        for item in items:
            yield item
            self.done += 1

    def __enter__(self) -> SlowWork:
        self.began = self.clock()
        if os.environ.get("RANK", "0") == "0":
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def _watch(self) -> None:
        pause = DELAY_SECONDS
        while not self._ended.wait(pause):
            if has_room_for_bar():
                self._show_bar()
                pause = BAR_SECONDS
            else:
                print(self.line(), file=sys.stderr, flush=True)
                pause = LINE_SECONDS

    def _show_bar(self) -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped] # takes time to import; as transformers imports it

        if self._bar is None:
            form = {} if self.unit else {"bar_format": "{desc}: {elapsed}"}
            options = {"unit": f" {self.unit}", "leave": False, "dynamic_ncols": True, **form}
            self._bar = tqdm(desc=self.what, total=self.total, file=sys.stderr, **options)
            self._bar.start_t = self.began
        self._bar.n = self.done
        self._bar.refresh()

    def line(self) -> str:
        """Format the progress so far: `tokenizing: 300 of 1,200 documents, 0:00:35 so far, 0:01:45 left`."""
        seconds, done = self.clock() - self.began, self.done
        counted = [f"{done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"] if self.unit else []
        left = [f"{duration(seconds / done * (self.total - done))} left"] if self.total and done else []
        return f"{self.what}: {', '.join([*counted, f'{duration(seconds)} so far', *left])}"
