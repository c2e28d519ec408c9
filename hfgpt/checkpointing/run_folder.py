"""The run folder: the one place that knows its file names, and the records in it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from hfgpt.errors import UserError
from hfgpt.files import read_text_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"^checkpoint-(\d{1,18})$")
LATEST, BEST = "checkpoint-latest", "checkpoint-best"
LOCK = ".lock"


def write_json(path: Path, content: Any) -> None:
    _replace(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all: written aside, then renamed over `path`."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # it might be a link to somewhere else
    try:
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        remove(aside)  # the room it takes is needed
        raise


def remove(path: Path) -> None:
    """A file, a link alone, or a folder with all in it; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def is_count(value: Any) -> bool:
    """Whether a value from a file is a whole number of steps, tokens or the like."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            found += [record] if is_count(record["step"]) else []
    return found


def _timed(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a record, with null for numbers that JSON does not have, and the time."""
    values = {k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in values.items()}  # of a callback
    values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return {**values, "time": time.time()}


class RunFolder:
    """`output_dir`: run.json, metrics.jsonl, ledger.jsonl, evaluations.jsonl and the checkpoints of one run.

    evaluations.jsonl holds what was measured of its checkpoints from outside, at any time; the run itself neither reads
    nor changes it. Only the main process writes; elsewhere (`writes=False`) every record is dropped.
    """

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.run_json = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.traceback = self.path / "traceback.txt"
        self._lock: Any = None
        self._unwritten: dict[Path, list[str]] = {self.metrics: [], self.ledger: []}

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, newest (highest step) first, whole or not."""
        if not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if CHECKPOINT.match(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: -int(path.name.split("-")[1]))

    def holds_run(self) -> bool:
        return self.metrics.exists() or self.run_json.exists() or bool(self.checkpoints())

    def facts(self) -> dict[str, Any]:
        """Content of run.json; empty where there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            facts = json.loads(read_text_file(self.run_json))
            return facts if isinstance(facts, dict) else {}
        return {}

    def run_id(self) -> str | None:
        """The run's own name, by which its checkpoints know it; None where there is no run.json."""
        return self.facts().get("run_id")

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl; each has a step."""
        return _whole_lines(self.metrics)

    def evaluation_records(self) -> list[dict[str, Any]]:
        """The whole lines of evaluations.jsonl, oldest first; each has a step."""
        return _whole_lines(self.evaluations)

    def evaluation(self, step: int) -> dict[str, Any]:
        """The evaluation record of a step, empty if there is none."""
        found = [record for record in self.records() if record["step"] == step and record.get("eval_loss") is not None]
        return found[-1] if found else {}

    def check_writable(self) -> None:
        """Raise UserError where the folder cannot be made or written, before anything is."""
        fault: str | None = None
        try:
            place, longest = self.path.absolute(), self.path / ".checkpoint-999999999.tmp" / "training_state"
            str(place).encode()  # records name it
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(longest.absolute() / "optimizer.safetensors")  # may be too long a name
            while not fault and not place.exists():
                fault = f"{place} is a link to nowhere" if place.is_symlink() else None
                place = place.parent
            if not fault and not place.is_dir():
                fault = f"{place} is not a folder"
            elif not fault and not os.access(place, os.W_OK | os.X_OK):
                fault = f"{place} cannot be written"
        except UnicodeEncodeError:
            fault = "its name is not valid text"
        except (OSError, ValueError) as error:
            fault = getattr(error, "strerror", None) or str(error)
        if fault:
            raise self._not_writable(fault)

    def check_free(self) -> None:
        """Raise UserError where another process is at work in the folder; writes nothing."""
        if fcntl is not None and (self.path / LOCK).exists():
            self._hold(fcntl.LOCK_SH)
            self.close()

    def claim(self) -> None:
        """Hold the folder, which is made, until `close` or the process ends. Raises UserError like `check_free`."""
        if fcntl is not None and self.writes:
            self._make()
            self._hold(fcntl.LOCK_EX)
            with contextlib.suppress(OSError):  # a full disk: who holds it is not named then
                os.ftruncate(self._lock.fileno(), 0)
                os.write(self._lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _hold(self, kind: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            self._lock = os.fdopen(os.open(self.path / LOCK, flags, 0o666), "ab+", buffering=0)
        except OSError as error:
            raise UserError(f"output_dir={self.path}: {LOCK} cannot be written ({error.strerror}); remove it") from None
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().decode() or "another process"
            self.close()
            raise UserError(
                f"output_dir={self.path}: a run is at work in it ({holder}); name another one, or end that run first"
            ) from None
        except OSError as error:  # not every file system has locks
            logger.warning("%s cannot be locked (%s): start no second run in it", self.path, error.strerror)

    def start(self, facts: dict[str, Any]) -> None:
        """Make the folder and write run.json. Raises UserError where that cannot be."""
        if not self.writes:
            return
        self._make()
        try:
            write_json(self.run_json, facts)
        except OSError as error:
            raise self._not_writable(error.strerror) from None

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._not_writable(error.strerror) from None

    def _not_writable(self, fault: str | None) -> UserError:
        return UserError(f"output_dir={self.path}: {fault}; name a folder that can be written")

    def keep_traceback(self, error: BaseException, rank: int) -> Path | None:
        """Write the traceback of what ended the run into its folder, of any process; None where that cannot be."""
        path = self.traceback if rank == 0 else self.traceback.with_stem(f"{self.traceback.stem}-process-{rank}")
        try:
            _replace(path, "".join(traceback.format_exception(error)).encode(errors="replace"))
        except OSError:
            return None
        return path

    def record(self, **values: Any) -> None:
        """One line of metrics.jsonl. Numbers that JSON does not have (NaN, infinity) become null."""
        self._append(self.metrics, _timed(values))

    def record_evaluation(self, **values: Any) -> None:
        """One line of evaluations.jsonl, also while a run is at work. Raises UserError where it cannot be written."""
        line = (json.dumps(_timed(values), ensure_ascii=False) + "\n").encode()
        try:
            with open(self.evaluations, "ab+", buffering=0) as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # one before was cut short
                file.write(line)  # at the end in one go, wherever the file is read
        except OSError as error:
            raise UserError(f"{self.evaluations}: cannot be written ({error.strerror}); nothing was recorded") from None

    def record_text(self, **values: Any) -> None:
        """One line of ledger.jsonl: what text went into a step."""
        self._append(self.ledger, values)

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, which a resumed run makes again, and a line cut short.

        Checkpoints of later steps belong to the course that was left: they are renamed, so that none of them is
        taken for the newest. What a killed process left of a checkpoint is removed.
        """
        for rest in self.path.glob(".checkpoint-*") if self.writes else []:
            remove(rest)
        for folder in self.checkpoints() if self.writes else []:
            if int(folder.name.split("-")[1]) > step:
                self.abandon(folder)
        for path in (self.metrics, self.ledger):
            if not self.writes or not path.exists():
                continue
            kept = []
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
            _replace(path, b"".join(kept))

    def take_records(self, other: Path) -> None:
        """Begin with the records of the run in `other`, which goes on here."""
        for path in (self.metrics, self.ledger):
            if (there := other / path.name).is_file() and not path.exists():
                _replace(path, there.read_bytes())

    def abandon(self, folder: Path) -> None:
        """Keep a folder under a name that is not taken for a checkpoint."""
        folder.rename(folder.with_name(f"abandoned-{time.time_ns()}-{folder.name}"))

    def _append(self, path: Path, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        lines = self._unwritten[path]
        lines.append(json.dumps(values, ensure_ascii=False, default=str) + "\n")
        try:
            with open(path, "ab", buffering=0) as file:
                start = file.tell()
                text = "".join(lines).encode(errors="backslashreplace")  # which JSON reads as the same
                if file.write(text) < len(text):
                    file.truncate(start)  # no half line: what follows must stand on a line of its own
                    return
            lines.clear()
        except OSError as error:  # a full disk, say: training need not end for that
            if len(lines) == 1:
                logger.warning("%s cannot be written (%s); its lines are kept until it can", path, error.strerror)
