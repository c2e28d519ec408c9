"""Checkpoint folders: whole or absent, the newest whole one found, damage named."""

from __future__ import annotations

import logging
import os

import pytest

from hfgpt.checkpoint import MANIFEST, fault, find_checkpoint, write_checkpoint
from hfgpt.errors import UserError
from hfgpt.run_folder import RunFolder


def fill(folder):
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder / "training_state" / "data_state.json").write_text("{}")


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for step in (10, 20):
        write_checkpoint(run, step, fill, keep=None)
    return run


def test_newest_whole_checkpoint_is_found_and_linked(run):
    assert find_checkpoint(run, "latest") == run.checkpoint(20)
    assert (run.path / "checkpoint-latest").resolve() == run.checkpoint(20).resolve()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 500), "500 bytes instead of 1000"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 1000), "damaged"),
        (lambda folder: (folder / "training_state" / "data_state.json").unlink(), "data_state.json is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "unreadable"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"../../etc": {}}}'), "outside"),
    ],
)
def test_a_broken_newest_one_is_named_and_passed_over(run, caplog, damage, named):
    damage(run.checkpoint(20))
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(run, "latest") == run.checkpoint(10)
    assert "checkpoint-20" in caplog.text and named in caplog.text
    with pytest.raises(UserError, match=named):
        find_checkpoint(run, str(run.checkpoint(20)))


def test_a_write_that_fails_leaves_no_folder_of_the_final_name(run):
    def fails(folder):
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(run, 30, fails, keep=1)
    assert find_checkpoint(run, "latest") == run.checkpoint(20)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-20", "checkpoint-10"]


def test_only_the_newest_are_kept(run):
    write_checkpoint(run, 30, fill, keep=2)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-30", "checkpoint-20"]
    assert fault(run.checkpoint(30)) is None


def test_an_existing_run_is_not_overwritten(run, tmp_path):
    with pytest.raises(UserError, match="already holds a run"):
        find_checkpoint(run, "never")
    with pytest.raises(UserError, match="checkpoint-20, checkpoint-10"):
        find_checkpoint(run, str(run.checkpoint(99)))
    other = RunFolder(tmp_path / "other")
    assert find_checkpoint(other, "never") is None and find_checkpoint(other, "latest") is None
    assert find_checkpoint(other, str(run.checkpoint(10))) == run.checkpoint(10)
    other.path.mkdir()
    write_checkpoint(other, 5, fill, keep=None)
    with pytest.raises(UserError, match="already holds a run other than"):
        find_checkpoint(other, str(run.checkpoint(10)))


def test_records_after_the_resumed_step_are_dropped(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.start({"a": 1})
    for step in range(1, 6):
        run.record(step=step, loss=float("nan") if step == 2 else 1.0)
        run.record_text(step=step, batch_hash="0")
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "lo')  # cut short by a kill
    run.rewind(3)
    lines = run.metrics.read_text().splitlines()
    assert len(lines) == 3 and '"loss": null' in lines[1]
    assert len(run.ledger.read_text().splitlines()) == 3
