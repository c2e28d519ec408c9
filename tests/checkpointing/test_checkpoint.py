"""Checkpoint folders: complete or absent, the newest complete one found, damage named."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from functools import partial
from math import nan
from pathlib import Path

import pytest
from running import lines, records, trained
from safetensors.torch import load_file, save_file
from tampering import sealed

from hfgpt import PretrainConfig
from hfgpt.checkpointing.audit import audit
from hfgpt.checkpointing.checkpoint import MANIFEST, REQUIRED, find_checkpoint, find_damage, link, write_checkpoint
from hfgpt.checkpointing.rewind import rewind_records
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.data.loader import iterate
from hfgpt.data.stream import is_hash_of, is_of_blocks
from hfgpt.errors import UserError
from hfgpt.evaluation.loading import load_checkpoint
from hfgpt.links import BEST

OLD = Path(__file__).parent.parent / "data" / "documents_run"


def fill(folder, run_id="this", eval_loss=None):
    for name in REQUIRED:
        (folder / name).write_bytes(b"w" * 1000)
    (folder / "model.safetensors").chmod(0o600)  # as safetensors makes it
    step = int("".join(filter(str.isdigit, folder.name)))
    state = {"run_id": run_id, "step": step, "num_input_tokens_seen": 1, "wall_seconds": 1.0, "config": {}}
    state |= {"schedule": {"curve_steps": 9, "since": 0, "at": 0, "pace": 1}, "skipped_rows": {}}
    state |= {"evaluation": None, "evaluation_step": 0, "gradient_scaler": None}
    if eval_loss is not None:
        evaluation = {"eval_loss": eval_loss, "eval_perplexity": 9.0, "eval_tokens": 9}
        state |= {"evaluation": evaluation, "evaluation_step": step}
    (folder / "training_state" / "trainer_state.json").write_text(json.dumps(state))


def name_in_manifest(folder, name):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: {"size": 1, "xxh3_128": ""}, **manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for step in (10, 20):
        write_checkpoint(run, step, fill, keep=None)
    return run


def test_newest_complete_checkpoint_is_found_and_linked(run):
    assert find_checkpoint(run, "latest") == run.checkpoint(20)
    assert (run.path / "checkpoint-latest").resolve() == run.checkpoint(20).resolve()
    modes = {path.stat().st_mode for path in run.checkpoint(20).rglob("*") if path.is_file()}
    assert len(modes) == 1  # readable for all who may read the others


def test_a_checkpoint_of_the_run_is_found_by_each_of_its_names(run):
    link(run, BEST, run.checkpoint(10))
    for wanted, step in (
        *(("best", 10), ("checkpoint-best", 10), ("checkpoint-10", 10), (str(run.checkpoint(10)), 10)),
        *(("checkpoint-latest", 20), (str(run.path / "checkpoint-latest"), 20), ("latest", 20)),
    ):
        assert find_checkpoint(run, wanted).resolve() == run.checkpoint(step).resolve()
        assert find_checkpoint(run, wanted).name == f"checkpoint-{step}"
    for wanted in ("none", None, "never"):
        setting = PretrainConfig(max_steps=1, resume_from_checkpoint=wanted).resume_from_checkpoint
        with pytest.raises(UserError, match="already holds a run"):
            find_checkpoint(run, setting)
    with pytest.raises(UserError, match=r"no such folder; checkpoints in .*: checkpoint-20, checkpoint-10"):
        find_checkpoint(run, "checkpoint-30")


def test_a_latest_that_is_a_folder_is_set_aside(run):
    (run.path / "checkpoint-latest").unlink()
    shutil.copytree(run.checkpoint(20), run.path / "checkpoint-latest")
    write_checkpoint(run, 30, fill, keep=None)
    assert (run.path / "checkpoint-latest").resolve() == run.checkpoint(30).resolve()
    assert len(list(run.path.glob("abandoned-*-checkpoint-latest"))) == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 500), "500 bytes instead of 1000"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 1000), "damaged"),
        (lambda folder: (folder / "training_state" / "data_state.json").unlink(), "data_state.json is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "unreadable"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {}}'), "does not list config.json"),
        (lambda folder: name_in_manifest(folder, "../../etc"), "outside"),
    ],
)
def test_a_damaged_newest_one_is_named_and_skipped(run, caplog, damage, named):
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
    assert find_damage(run.checkpoint(30)) is None


def test_the_best_is_kept_beside_the_newest_and_another_run_is_left_alone(run):
    write_checkpoint(run, 25, lambda folder: fill(folder, run_id="another"), keep=None)
    for step, loss in ((30, 2.0), (40, 1.0), (50, 3.0), (60, None)):
        write_checkpoint(run, step, partial(fill, eval_loss=loss), keep=2)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-60", "checkpoint-40", "checkpoint-25"]
    write_checkpoint(run, 70, fill, keep=1)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-70", "checkpoint-25"]


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
    run.record(step=3, event="note", text="a line\u2028separator")
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 6, "lo\xff\xc3')  # cut short by a kill
    rewind_records(run, 3)
    lines = run.metrics.read_text().splitlines()
    assert len(lines) == 5 and '"loss": null' in lines[1]  # the separator splits the note for splitlines alone
    assert len(run.ledger.read_text().splitlines()) == 3


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


PICKLES = ["pytorch_model.bin", "training_state/optimizer.pt", "training_state/random_states_0.pkl", "optimizer.bin"]


def test_a_planted_pickle_is_not_read(config, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    trained(config(max_steps=4))
    folder = tmp_path / "run" / "checkpoint-4"
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    assert trained(config(resume_from_checkpoint="latest")).progress.step == 6
    sealed(folder)
    load_checkpoint(folder)
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        sealed(folder)
        with pytest.raises(UserError, match="cannot be read"):
            trained(config("other", resume_from_checkpoint=str(folder)))
        (folder / name).write_bytes(before)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(folder)
    assert not (tmp_path / "exploded").exists()
    assert pickle.loads(pickle.dumps(Bomb())) is None and (tmp_path / "exploded").exists()  # the bomb does go off


def edit(name, change):
    def apply(folder):
        path = folder / "training_state" / f"{name}.json"
        state = json.loads(path.read_text())
        path.write_text(json.dumps(change(state)))

    return apply


def other_tensors(folder, name, change):
    tensors = change(load_file(folder / name))
    save_file(tensors, folder / name)


def not_finite(tensors):
    return {name: value * nan for name, value in tensors.items()}


def in_half(tensors):
    return {name: value.half() for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (edit("trainer_state", lambda state: []), "trainer_state.json is not valid for this version"),
        (edit("trainer_state", lambda state: {**state, "step": "4"}), r"\(step\)"),
        (edit("trainer_state", lambda state: {**state, "schedule": {"curve_steps": "x"}}), "schedule"),
        (edit("trainer_state", lambda state: {**state, "evaluation": {"eval_loss": 1}}), "evaluation"),
        (edit("trainer_state", lambda state: {**state, "config": {}}), "optim=adamw: .* was saved with optim=None"),
        (edit("trainer_state", lambda state: {**state, "wall_seconds": float("nan")}), "wall_seconds"),
        (edit("trainer_state", lambda state: {**state, "skipped_rows": {"null": [1]}}), "skipped_rows"),
        (edit("trainer_state", lambda state: {**state, "step": True}), r"\(step\)"),
        (
            partial(other_tensors, name="model.safetensors", change=lambda t: {k: v * nan for k, v in t.items()}),
            "contains NaN",
        ),
        (
            partial(other_tensors, name="model.safetensors", change=lambda t: {k: v.half() for k, v in t.items()}),
            "differ",
        ),
        (edit("data_state", lambda state: {**state, "position": {"epoch": -1, "block": 0}}), "position"),
        (edit("data_state", lambda state: {**state, "position": {"streams": [[0, 0]]}}), "position"),
        (lambda folder: (folder / "config.json").write_text("{}"), "a different model"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read"),
        (partial(other_tensors, name="model.safetensors", change=lambda t: {}), "parameters differ"),
        (
            partial(
                other_tensors,
                name="training_state/optimizer.safetensors",
                change=lambda tensors: {
                    name: value[:1].clone() if value.dim() else value for name, value in tensors.items()
                },
            ),
            "another optimizer",
        ),
    ],
)
def test_a_complete_folder_with_wrong_content_is_refused(config, tmp_path, damage, named):
    trained(config(max_steps=4, save_steps=0))
    folder = tmp_path / "run" / "checkpoint-4"
    damage(folder)
    sealed(folder)
    with pytest.raises(UserError, match=named):
        trained(config("other", resume_from_checkpoint=str(folder)))
    assert not (tmp_path / "other").exists()


def test_copies_named_as_later_checkpoints_are_not_used(config, tmp_path, caplog):
    trained(config(max_steps=4))
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "checkpoint-50")
    (tmp_path / "run" / ("checkpoint-" + "9" * 240)).mkdir()
    deep = tmp_path / "run" / "checkpoint-60"
    deep.mkdir()
    (deep / MANIFEST).write_text("[" * 200_000)
    resumed = trained(config(resume_from_checkpoint="latest"))
    assert resumed.resumed.folder.name == "checkpoint-4"
    assert "checkpoint-50 is skipped (it is a copy of checkpoint-2); trying the previous checkpoint" in caplog.text
    assert "checkpoint-60 is skipped (manifest.json is unreadable" in caplog.text


@pytest.mark.unix_only
def test_links_in_the_run_folder_lead_to_no_file_outside(config, tmp_path):
    trained(config(max_steps=4))
    (tmp_path / "victim").write_text("mine")
    for name in (
        ".metrics.jsonl.tmp",
        ".ledger.jsonl.tmp",
        ".run.json.tmp",
        ".checkpoint-6.tmp",
        ".checkpoint-2.removed",
    ):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    assert trained(config(resume_from_checkpoint="latest", save_total_limit=1)).progress.step == 6
    assert (tmp_path / "victim").read_text() == "mine"
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=r"\.lock cannot be written"):
        trained(config(resume_from_checkpoint="latest", max_steps=8))
    assert (tmp_path / "victim").read_text() == "mine"


def test_an_evaluation_that_is_not_finite_is_not_the_best(config, monkeypatch):
    losses = iter([5.0, 3.0, 4.0, nan, 9.0])
    rest = {"eval_bits_per_byte": None, "eval_tokens": 9, "eval_seconds": 1.0}
    monkeypatch.setattr(
        "hfgpt.training.evaluating.evaluate_tokens", lambda *_, **__: {"eval_loss": next(losses), **rest}
    )
    run = trained(config(max_steps=10, eval_steps=2, save_steps=2, save_total_limit=2)).folder
    assert [path.name for path in run.checkpoints()] == ["checkpoint-10", "checkpoint-4"]


def test_a_run_that_continues_in_another_folder_copies_its_records(config, tmp_path):
    whole = trained(config("whole"))
    moved = trained(config("second", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4")))
    assert (tmp_path / "second" / "ledger.jsonl").read_text() == whole.folder.ledger.read_text()
    assert [line["loss"] for line in records(moved)] == [line["loss"] for line in records(whole)]


def test_checkpoints_of_another_run_are_not_taken_for_this_runs(config, tmp_path, caplog):
    trained(config("stranger", max_steps=8, seed=5))
    trained(config(max_steps=4))
    shutil.copytree(tmp_path / "stranger" / "checkpoint-8", tmp_path / "run" / "checkpoint-8")
    resumed = trained(config(resume_from_checkpoint="latest", max_steps=10, save_total_limit=1))
    assert "checkpoint-8 is skipped (it belongs to another run)" in caplog.text
    assert resumed.resumed.folder.name == "checkpoint-4"


def test_a_link_that_cannot_be_moved_keeps_its_checkpoint(run, monkeypatch, caplog):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    monkeypatch.setattr("hfgpt.links.write_whole", refuse)
    write_checkpoint(run, 30, fill, keep=1)
    assert "checkpoint-latest could not be set to checkpoint-30" in caplog.text
    assert find_checkpoint(run, "latest") == run.checkpoint(30)
    assert find_damage((run.path / "checkpoint-latest").resolve()) is None  # an older one, which is kept


def test_an_unfinished_checkpoint_of_a_killed_run_is_deleted(config, tmp_path):
    trained(config(max_steps=4))
    rest = tmp_path / "run" / ".checkpoint-5.tmp"
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(b"half")
    trained(config(resume_from_checkpoint="latest"))
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


def test_a_run_of_an_earlier_version_resumes_as_it_would_have_continued(config, document_folder, tmp_path, monkeypatch):
    """`documents_run` was written before the library moved into packages, on the text of the fixture, to its step 8."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD, "run")
    recorded = json.loads((OLD / "run.json").read_text())
    stated = {key: value for key, value in recorded["config"].items() if key not in ("output_dir", "run_name")}
    resumed = trained(config("run", **{**stated, "resume_from_checkpoint": "latest"}))
    assert resumed.resumed.folder.name == "checkpoint-4" and resumed.progress.run_id == recorded["run_id"]
    ledgers = (OLD / "ledger.jsonl", resumed.folder.ledger)
    old, now = ([json.loads(line) for line in path.read_text().splitlines()] for path in ledgers)
    assert now[:4] == old[:4] and [line["position"] for line in now] == [line["position"] for line in old]
    for line, batch in zip(old, iterate(resumed.data.train, None), strict=False):  # a hash of all tokens at once
        assert is_hash_of(line["batch_hash"], batch.blocks) and not is_of_blocks(line["batch_hash"])
    assert all(is_of_blocks(line["batch_hash"]) for line in now[4:])
    assert audit(resumed.folder.path)["problems"] == []
    for key in ("loss", "eval_loss"):
        assert [line[key] for line in records(resumed, key)] == pytest.approx([line[key] for line in lines(OLD, key)])
