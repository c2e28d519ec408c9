"""Storage that fails: what is whole stays, what is broken is named, training goes on as long as it may."""

from __future__ import annotations

import resource
import signal

import pytest
from running import ALONE

from hfgpt.checkpoint import fault


def allow_file_size(run, size: int) -> None:
    """A file of the run can grow to `size` bytes from here on, as if the disk ended there."""
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_save_that_fails_is_told_and_made_up_for(start):
    run = start(ALONE, "--save_steps", "20", "--max_failed_saves", "1000")
    run.wait_for(lambda: (run.folder / "checkpoint-latest").exists())
    allow_file_size(run, 2000)  # neither a checkpoint nor a line of metrics fits
    run.wait_for(lambda: "a checkpoint could not be written" in run.errors.read_text())
    assert fault((run.folder / "checkpoint-latest").resolve()) is None
    allow_file_size(run, resource.RLIM_INFINITY)
    run.wait_for_steps(25)
    run.process.send_signal(signal.SIGTERM)
    assert "metrics.jsonl cannot be written (File too large)" in run.end()
    assert [record["event"] for record in run.records("event")][:3] == ["start", "save", "save_failed"]
    steps = [record["step"] for record in run.records("loss")]
    assert steps == list(range(1, steps[-1] + 1)) and [line["step"] for line in run.ledger()] == steps
    assert fault((run.folder / "checkpoint-latest").resolve()) is None


@pytest.mark.slow
def test_saves_that_keep_failing_end_the_run_and_leave_the_last_whole_one(start):
    run = start(ALONE, "--save_steps", "10", "--max_failed_saves", "2")
    run.wait_for(lambda: (run.folder / "checkpoint-latest").exists())
    before = (run.folder / "checkpoint-latest").resolve()
    allow_file_size(run, 8000)
    assert "checkpoints could not be written 2 times in a row" in run.end().splitlines()[-1]
    assert run.process.returncode == 1
    assert (run.folder / "checkpoint-latest").resolve().name >= before.name
    assert fault((run.folder / "checkpoint-latest").resolve()) is None
    assert not list(run.folder.glob(".checkpoint-*"))
