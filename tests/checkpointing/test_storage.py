"""Storage that fails: what is whole stays, what is broken is named, training goes on as long as it may."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from running import FORKED, Run, records, trained

from hfgpt.checkpointing.checkpoint import find_damage


def allow_file_size(run, size: int) -> None:
    """A file of the run can grow to `size` bytes from here on, as if the disk ended there."""
    import resource  # of Unix

    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_failed_save_is_reported_and_made_up_for(start):
    run = start(FORKED, "--save_steps", "20", "--max_failed_saves", "1000")
    run.wait_for(lambda: (run.folder / "checkpoint-latest").exists())
    allow_file_size(run, 2000)  # neither a checkpoint nor a line of metrics fits
    run.wait_for(lambda: re.search("checkpoint of step .* could not be written", run.errors.read_text()))
    assert find_damage((run.folder / "checkpoint-latest").resolve()) is None
    allow_file_size(run, -1)  # no limit
    run.wait_for_steps(25)
    run.process.send_signal(signal.SIGTERM)
    assert "metrics.jsonl cannot be written (File too large)" in run.end()
    events = [record["event"] for record in run.records("event")]
    assert events[:2] == ["start", "save"] and "save_failed" in events
    steps = [record["step"] for record in run.records("loss")]
    assert steps == list(range(1, steps[-1] + 1)) and [line["step"] for line in run.ledger()] == steps
    assert find_damage((run.folder / "checkpoint-latest").resolve()) is None


@pytest.mark.slow
def test_saves_that_keep_failing_end_the_run_and_leave_the_last_complete_one(start):
    run = start(FORKED, "--save_steps", "10", "--max_failed_saves", "2")
    run.wait_for(lambda: (run.folder / "checkpoint-latest").exists())
    before = (run.folder / "checkpoint-latest").resolve()
    allow_file_size(run, 8000)
    assert "checkpoints could not be written 2 times in a row" in run.end().splitlines()[-1]
    assert run.process.returncode == 1
    assert (run.folder / "checkpoint-latest").resolve().name >= before.name
    assert find_damage((run.folder / "checkpoint-latest").resolve()) is None
    assert not list(run.folder.glob(".checkpoint-*"))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of half a megabyte, and what makes it larger."""
    disk, folder = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    folder.symlink_to(disk)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted here")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_run_outlasts_a_full_disk(small_disk, document_folder):
    folder, enlarge = small_disk
    flags = ["--dataset", str(document_folder), "--save_steps", "5", "--max_failed_saves", "100000"]
    run = Run(FORKED, folder, *flags)
    try:
        run.wait_for(lambda: run.errors.read_text().count("could not be written") >= 2)
        assert "No space left on device" in run.errors.read_text()
        assert find_damage((run.folder / "checkpoint-latest").resolve()) is None
        enlarge()
        newest = (run.folder / "checkpoint-latest").resolve()
        run.wait_for(lambda: (run.folder / "checkpoint-latest").resolve() != newest)
        run.process.send_signal(signal.SIGTERM)
        run.end()
    finally:
        run.process.kill()
    last = run.records()[-1]["step"]
    assert [record["step"] for record in run.records("loss")] == list(range(1, last + 1))
    assert [line["step"] for line in run.ledger()] == list(range(1, last + 1))
    assert (run.folder / "checkpoint-latest").resolve().name == f"checkpoint-{last}"
    assert all(find_damage(path) is None for path in run.folder.glob("checkpoint-[0-9]*"))
    assert not list(run.folder.glob(".checkpoint-*"))


def test_a_clock_that_jumps_changes_nothing(config, monkeypatch):
    """Newest is the highest step, whatever times files bear; seconds of training come from another clock."""
    real, jumps = time.time, itertools.cycle([0, 1e7, -1e7])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    first = trained(config(save_total_limit=2))
    for n, folder in enumerate(first.folder.checkpoints()):
        os.utime(folder, (n * 1e6, n * 1e6))  # the newest has the oldest date
    resumed = trained(config(resume_from_checkpoint="latest", max_steps=9, save_total_limit=2))
    assert resumed.resumed.folder.name == "checkpoint-6"
    assert [path.name for path in resumed.folder.checkpoints()] == ["checkpoint-9", "checkpoint-8"]
    seconds = [record["wall_seconds"] for record in records(resumed)]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 1e6


@pytest.mark.slow
def test_a_folder_that_a_run_is_using_is_refused_until_it_ends(start, document_folder):
    run = start(FORKED)
    before = (run.folder / "run.json").read_bytes()
    flags = ["--dataset", str(document_folder), "--resume_from_checkpoint", "latest", "--max_steps", "2000000"]
    second = Run(FORKED, run.folder, *flags)
    assert f"another run is using it (process {run.process.pid} on" in second.end() and second.process.returncode == 2
    assert (run.folder / "run.json").read_bytes() == before
    run.process.kill()
    run.process.wait()
    third = Run(FORKED, run.folder, "--dataset", str(document_folder), "--resume_from_checkpoint", "latest")
    third.wait_for_steps(1)
    third.process.kill()
