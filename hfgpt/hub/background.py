"""Push the saves of a run to the Hub while it trains: in a thread, one at a time, the newest that waits next."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from hfgpt.checkpointing.checkpoint import MANIFEST
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.config import PretrainConfig
from hfgpt.data.remote import PUSHING
from hfgpt.files import read_text_file
from hfgpt.hub.client import cause_of, check_access, commit_files, full_name, longest_seconds, retry_hub
from hfgpt.hub.model_card import address_card
from hfgpt.hub.push import CARD, model_files
from hfgpt.hub.resume_point import point_files, resume_folder

STOP_SECONDS = 60.0  # to wait for pushes after a signal or a failure: machines are taken away about then


class Pushed(NamedTuple):
    """A push that has ended: the URL of its commit, or why it failed."""

    checkpoint: Path
    url: str | None
    reason: str | None = None


class Push(threading.Thread):
    """Sends one checkpoint. A daemon, so that it never holds up the end of the process."""

    def __init__(self, checkpoint: Path, send: Callable[[Path, Push], str], limit_seconds: float) -> None:
        super().__init__(name=f"{PUSHING}{checkpoint.name}", daemon=True)
        self.checkpoint, self._send = checkpoint, send
        self.until = time.monotonic() + limit_seconds
        self.is_given_up = False
        self.outcome: Pushed | None = None

    def run(self) -> None:
        try:
            self.outcome = Pushed(self.checkpoint, self._send(self.checkpoint, self))
        except Exception as error:
            self.outcome = Pushed(self.checkpoint, None, str(error))


class SavePusher:
    """Pushes checkpoints of a run. The training thread calls it, and makes no request to the Hub.

    A checkpoint that is being pushed, or waits for it, is in `run.held`, so that rotation does not delete it.
    """

    def __init__(self, config: PretrainConfig, run: RunFolder) -> None:
        self.config, self.run = config, run
        self.name = ""  # of the repository, with the user's
        self.waiting: Path | None = None
        self._push: Push | None = None
        disable_progress_bars()  # they would mix with the lines of the run
        _keep_quiet()

    def offer(self, checkpoint: Path) -> None:
        """Push this save next, instead of one that still waits."""
        self.drop_waiting()
        self.waiting = checkpoint
        self.run.held.add(checkpoint)
        if self._push is None:
            self._start()

    def drop_waiting(self) -> None:
        if self.waiting is not None:
            self.run.held.discard(self.waiting)
            self.waiting = None

    def collect(self) -> Pushed | None:
        """Return, once, how a push has ended, and start the next. None if none has ended since."""
        push = self._push
        if push is None or (push.is_alive() and time.monotonic() < push.until):
            return None
        outcome = push.outcome or Pushed(push.checkpoint, None, "the Hub did not answer in time")
        push.is_given_up = True
        self._push = None
        if push.checkpoint != self.waiting:
            self.run.held.discard(push.checkpoint)
        if self.waiting is not None:
            self._start()
        return outcome

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until the push in progress has ended. Returns whether there is one to collect."""
        if self._push is not None:
            self._push.join(max(0.0, min(seconds, self._push.until - time.monotonic())))
            return not self._push.is_alive() or time.monotonic() >= self._push.until
        return False

    def give_up(self) -> list[Pushed]:
        """Let go of what is still being pushed, and of the save that waits; return them as failed."""
        failed = [Pushed(self.waiting, None, "the run ended before")] if self.waiting else []
        self.drop_waiting()
        if self._push is not None:
            self._push.until = 0.0
        return [*filter(None, [self.collect()]), *failed]

    @property
    def repo_id(self) -> str:
        return self.config.hub_repo_id()

    @property
    def is_busy(self) -> bool:
        return self._push is not None

    def _start(self) -> None:
        assert self.waiting is not None  # noqa: S101
        checkpoint, self.waiting = self.waiting, None
        size = sum(path.stat().st_size for path in checkpoint.rglob("*"))
        self._push = Push(checkpoint, self._send, longest_seconds(size))
        self._push.start()

    def _send(self, checkpoint: Path, push: Push) -> str:
        """Make the commit for a save; returns its URL. Raises RuntimeError with the cause in one line."""
        config, repo_id = self.config, self.repo_id
        token = None

        def send(files: dict[str, Path | bytes]) -> str:
            if push.is_given_up:  # a newer save may be there by now
                raise RuntimeError("given up")
            title = f"{checkpoint.name} of a run with hfgpt"
            return str(commit_files(api, self.name, files, title, config.hub_private_repo, replaced=folder).commit_url)

        try:
            token = check_access(repo_id)
            api = HfApi(token=token)
            self.name = self.name or retry_hub(lambda: full_name(api, repo_id))
            folder = resume_folder(config.hub_strategy, checkpoint)
            files = save_files(checkpoint, self.name) | (point_files(checkpoint, self.run, folder) if folder else {})
            size = sum(path.stat().st_size for path in files.values() if isinstance(path, Path))
            return retry_hub(lambda: send(files), size)
        except Exception as error:
            raise RuntimeError(cause_of(error, repo_id, token)) from error


def save_files(checkpoint: Path, name: str) -> dict[str, Path | bytes]:
    """Return the model's files in a checkpoint, with the card that it was saved with."""
    listed = json.loads(read_text_file(checkpoint / MANIFEST))["files"]
    card = address_card((checkpoint / CARD).read_text(encoding="utf-8"), name, None)
    return {**model_files(checkpoint, listed), CARD: card.encode()}


class _NotOfPushes(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.threadName).startswith(PUSHING)


def _keep_quiet() -> None:
    """Keep the Hub client from logging what happens in a push, which is reported in one line anyway."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        if not any(isinstance(one, _NotOfPushes) for one in handler.filters):
            handler.addFilter(_NotOfPushes())
