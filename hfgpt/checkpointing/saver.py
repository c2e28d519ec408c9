"""Write checkpoints while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hfgpt.checkpointing.checkpoint import write_checkpoint
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.errors import RunError


class Saver:
    """Writes one checkpoint at a time in a thread: `start` begins one, `collect` returns its outcome."""

    def __init__(self, run: RunFolder, keep: int | None, max_failures: int, saved_step: int | None = None) -> None:
        """saved_step: step of the newest checkpoint, if there is one."""
        self.run, self.keep, self.max_failures, self.saved_step = run, keep, max_failures, saved_step
        self.failures = 0  # in a row
        self.is_postponed = False  # a checkpoint is due, but the latest loss was not finite
        self._thread: threading.Thread | None = None
        self._outcome: Path | Exception | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the checkpoint that is being written, however the run ends."""
        if self._thread is not None:
            self._thread.join()

    def start(self, step: int, write: Callable[[Path], None], rotate: bool = True) -> None:
        """Start writing a checkpoint; the previous one must have been collected."""

        def work() -> None:
            try:
                self._outcome = write_checkpoint(self.run, step, write, self.keep if rotate else None)
            except Exception as error:
                self._outcome = error

        assert self._thread is None, "the last checkpoint was not collected"  # noqa: S101
        self._thread = threading.Thread(target=work, name=f"checkpoint-{step}")
        self._thread.start()

    def collect(self, wait: bool = False) -> Path | Exception | None:
        """Return, once, the folder of the last checkpoint, or the exception that made it fail.

        None if there is none, or if it is still being written and `wait` is false. Raises RunError once `max_failures`
        checkpoints in a row have failed.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        outcome, self._thread, self._outcome = self._outcome, None, None
        self.failures = self.failures + 1 if isinstance(outcome, Exception) else 0
        if self.failures >= self.max_failures:
            newest = next((path.name for path in self.run.checkpoints()), "none")
            raise RunError(
                f"checkpoints could not be written {self.failures} times in a row in {self.run.path} (newest there: "
                f"{newest}; limit: max_failed_saves): {outcome}"
            )
        return outcome
