"""The run folder: its file names, its records, and the lock that keeps a second run out of it.

    output_dir/
      run.json              written at start: config, model, plan, versions, device, data fingerprint, run_id
      metrics.jsonl         a line per training, evaluation and event record
      ledger.jsonl          a line per step: which text it was trained on
      evaluations.jsonl     later evaluations of its checkpoints
      abandoned.jsonl       records of steps that a rollback has dropped from metrics.jsonl
      report.html           its curves and values as a page; never read back
      traceback.txt         of a crash; traceback-process-1.txt of another process
      .lock                 held by the process that trains here
      checkpoint-1000/      a Hub model folder, and also a point to resume from
        config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json  README.md
        training_state/     optimizer.safetensors  trainer_state.json  data_state.json; of a run that averages its
                            weights also average.safetensors, or raw_weights.safetensors if the model is the average
        manifest.json       size and hash of each file; written last
      checkpoint-latest     link to the newest checkpoint (a text file with its name where links are not allowed)
      checkpoint-best       link to the one with the lowest evaluation loss (or metric_for_best_model)
      .checkpoint-1000.tmp  a checkpoint while it is written
      .checkpoint-hub-*     a checkpoint while it is downloaded
      abandoned-*           later checkpoints, set aside when the run went back to an earlier one

`checkpoint.py` writes and finds checkpoints, `rewind.py` returns the folder to one, `state.py` knows their tensors,
`read_training_state.py` reads their JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from hfgpt.checkpointing import lock
from hfgpt.checkpointing.read_records import read_records, rollbacks_of, with_time
from hfgpt.errors import UserError
from hfgpt.files import read_text_file, remove, rename, write_whole

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"^checkpoint-(\d{1,18})$")
LOCK = ".lock"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


class RunFolder:
    """`output_dir`: run.json, metrics.jsonl, ledger.jsonl, evaluations.jsonl and the checkpoints of one run.

    Only the main process writes; on other processes (`writes=False`) records are dropped.
    """

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.run_json = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.abandoned = self.path / "abandoned.jsonl"
        self.report = self.path / "report.html"
        self.held: set[Path] = set()  # checkpoints that must not be deleted now
        self.room: Path | None = None  # a folder for a checkpoint that is downloaded
        self._made: list[Path] = []  # the folders that were made for it
        self._lock: Any = None
        self._unwritten: dict[Path, list[str]] = {self.metrics: [], self.ledger: []}

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint folders, newest (highest step) first, complete or not."""
        if not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if CHECKPOINT.match(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: -int(path.name.split("-")[1]))

    def holds_run(self) -> bool:
        return self.metrics.exists() or self.run_json.exists() or bool(self.checkpoints())

    def facts(self) -> dict[str, Any]:
        """Return the content of run.json; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            facts = json.loads(read_text_file(self.run_json))
            return facts if isinstance(facts, dict) else {}
        return {}

    def run_id(self) -> str | None:
        """Return the run's id, which is also in each of its checkpoints; None without a run.json."""
        return self.facts().get("run_id")

    def records(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl; each has a step."""
        return read_records(self.metrics)

    def text_records(self) -> list[dict[str, Any]]:
        """Return the records of ledger.jsonl; each has a step."""
        return read_records(self.ledger)

    def evaluation_records(self) -> list[dict[str, Any]]:
        """Return the records of evaluations.jsonl, oldest first; each has a step."""
        return read_records(self.evaluations)

    def evaluation(self, step: int) -> dict[str, Any]:
        """Return the evaluation record of a step; empty if there is none."""
        found = [record for record in self.records() if record["step"] == step and record.get("eval_loss") is not None]
        return found[-1] if found else {}

    def check_writable(self) -> None:
        """Raise UserError if the folder cannot be created or written to; leaves nothing behind."""
        place = self.path.absolute()
        longest = place / ".checkpoint-999999999.tmp" / "training_state" / "optimizer.safetensors"
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(longest)  # OSError if the name is too long
        except OSError as error:
            raise self._not_writable(error.strerror) from None
        existing = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            raise self._not_writable(f"{existing} is not a folder, or not writable")
        if existing != place:  # some file systems, such as /proc, refuse although the permissions allow it
            try:
                os.rmdir(tempfile.mkdtemp(prefix=".hfgpt-", dir=existing))
            except OSError as error:
                raise self._not_writable(f"no folder can be created in {existing} ({error.strerror})") from None

    def _not_writable(self, problem: str | None) -> UserError:
        return UserError(f"output_dir={self.path}: {problem}; choose a writable folder")

    def check_free(self) -> None:
        """Raise UserError if another process trains in the folder; writes nothing."""
        if (self.path / LOCK).exists():
            self._hold(shared=True)
            self.close()

    def claim(self) -> None:
        """Create the folder and lock it until `close` or the process ends. Raises UserError like `check_free`."""
        if self.writes:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._not_writable(error.strerror) from None
            self._hold()
            with contextlib.suppress(OSError):  # on a full disk the message of a second run names no process
                os.ftruncate(self._lock.fileno(), 0)
                os.write(self._lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())

    def make_room(self) -> Path:
        """Make a folder for a checkpoint to download. `close` removes it, and so does the start of the run."""
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.room = Path(tempfile.mkdtemp(prefix=".checkpoint-hub-", dir=self.path))
        except OSError as error:
            raise self._not_writable(error.strerror) from None
        return self.room

    def close(self) -> None:
        """Release the lock, and remove a download that was not used."""
        if self.room is not None:
            remove(self.room)
            for path in self._made:
                with contextlib.suppress(OSError):  # the run has begun there
                    path.rmdir()
            self.room = None
        if self._lock is not None:
            lock.release(self._lock)
            self._lock = None

    def _hold(self, shared: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            self._lock = os.fdopen(os.open(self.path / LOCK, flags, 0o666), "ab+", buffering=0)
        except OSError as error:
            raise UserError(
                f"output_dir={self.path}: {LOCK} cannot be written ({error.strerror}); check its permissions, or "
                "delete it if no run is using this folder"
            ) from None
        try:
            lock.acquire(self._lock, shared)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().decode() or "another process"
            self.close()
            raise UserError(
                f"output_dir={self.path}: another run is using it ({holder}); choose another folder, or stop that run"
            ) from None
        except OSError as error:  # not every file system has locks
            logger.warning("%s cannot be locked (%s): do not start a second run in it", self.path, error.strerror)

    def start(self, facts: dict[str, Any]) -> None:
        """Create the folder and write run.json. Raises UserError if that fails."""
        if self.writes:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                write_json(self.run_json, facts)
            except OSError as error:
                raise self._not_writable(error.strerror) from None

    def keep_traceback(self, error: BaseException, rank: int) -> Path | None:
        """Write the traceback of a crash, on any process; None if that fails."""
        path = self.path / (f"traceback-process-{rank}.txt" if rank else "traceback.txt")
        try:
            write_whole(path, "".join(traceback.format_exception(error)).encode(errors="replace"))
        except OSError:
            return None
        return path

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl. NaN and infinity become null."""
        self._append(self.metrics, with_time(values))

    def record_text(self, **values: Any) -> None:
        """Add a line to ledger.jsonl: which text a step was trained on."""
        self._append(self.ledger, values)

    def record_evaluation(self, **values: Any) -> None:
        """Add a line to evaluations.jsonl, even while the run is training. Raises UserError if it cannot be written."""
        line = (json.dumps(with_time(values), ensure_ascii=False) + "\n").encode()
        try:
            with open(self.evaluations, "ab+", buffering=0) as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # the previous write was interrupted
                file.write(line)  # a single write, which appends wherever the file was read
        except OSError as error:
            raise UserError(
                f"{self.evaluations}: cannot be written ({error.strerror}), so nothing was recorded; make it "
                "writable and evaluate again"
            ) from None

    def write_report(self, page: str) -> None:
        """Write report.html, whole or not at all. Raises OSError if that fails."""
        if self.writes:
            write_whole(self.report, page.encode(errors="replace"))

    def rollback_at(self, step: int) -> dict[str, Any] | None:
        """Return the newest rollback to a step, from its line in the ledger; None if there was none.

        Raises UserError if it is malformed, because the text would then be another.
        """
        lines = [line for line in self.text_records() if line["step"] == step]
        try:
            rollbacks = rollbacks_of(lines[-1]) if lines else []
        except ValueError:
            raise UserError(
                f"{self.ledger}: the rollback to step {step} cannot be read; restore the file from a copy, or resume "
                "from an earlier checkpoint"
            ) from None
        return rollbacks[-1] if rollbacks else None

    def drop_unwritten(self, step: int) -> None:
        """Forget lines of steps after `step` that could not be written yet."""
        for lines in self._unwritten.values():
            lines[:] = [line for line in lines if json.loads(line)["step"] <= step]

    def copy_records(self, other: Path) -> None:
        """Copy the records of the run in `other`, which continues here."""
        for path in (self.metrics, self.ledger):
            if (source := other / path.name).is_file() and not path.exists():
                write_whole(path, source.read_bytes())

    def abandon(self, folder: Path) -> Path:
        """Rename a folder, so that it no longer counts as a checkpoint, and return its new name."""
        return rename(folder, folder.with_name(f"abandoned-{time.time_ns()}-{folder.name}"))

    def _append(self, path: Path, values: dict[str, Any]) -> None:
        """Append a line; if the disk is full, keep it for the next call, because training need not stop for that."""
        if not self.writes:
            return
        lines = self._unwritten[path]
        lines.append(json.dumps(values, ensure_ascii=False, default=str) + "\n")
        try:
            with open(path, "ab", buffering=0) as file:
                start = file.tell()
                text = "".join(lines).encode(errors="backslashreplace")
                if file.write(text) < len(text):
                    file.truncate(start)  # leave no partial line
                    return
            lines.clear()
        except OSError as error:
            if len(lines) == 1:
                logger.warning("%s cannot be written (%s); its lines are kept and written later", path, error.strerror)
