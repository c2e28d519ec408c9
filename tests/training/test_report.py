"""The report.html that a run writes: at each save and at the end, and never a reason for the run to end."""

from __future__ import annotations

import json
import logging
import re

import pytest
from running import StopAt, records, trained
from transformers import TrainerCallback

from hfgpt import Pretrainer, SampleCallback
from hfgpt.comparing import page


class ReadAtSave(TrainerCallback):
    """Keeps the report as it is when a checkpoint has been written."""

    def __init__(self):
        self.pages = []

    def on_save(self, args, state, control, **kwargs):
        with open(f"{args.output_dir}/report.html") as file:
            self.pages.append(file.read())


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise ValueError("no <luck>")


def test_a_run_writes_its_report_at_each_save_and_at_the_end(config):
    seen = ReadAtSave()
    run = trained(config(eval_steps=3, save_steps=2, max_steps=6), seen)
    assert len(seen.pages) == 3 and all("in progress, or killed" in page for page in seen.pages)
    assert re.search("step [24] of 6", seen.pages[0])  # the checkpoint may take until the next save
    page, last = run.folder.report.read_text(), records(run, "eval_loss")[-1]
    assert '<p class="state">finished</p>' in page
    for value in (f"{last['eval_loss']:.4f}", f"{last['eval_bits_per_byte']:.4f}", "6 steps"):
        assert value in page
    assert not list(run.folder.path.glob(".report*"))


def test_samples_are_recorded_and_shown(config):
    run = trained(config(sample_steps=3, sample_prompt="1"), SampleCallback(4, ["2", "3"], max_new_tokens=5))
    found = [(record["step"], record["prompt"]) for record in records(run, "event") if record["event"] == "sample"]
    assert found == [(3, "1"), (4, "2"), (4, "3"), (6, "1")]
    newest = [record["text"] for record in records(run, "event") if record["event"] == "sample"][-1]
    assert newest and "<blockquote" in run.folder.report.read_text()
    counted = {"step", "num_input_tokens_seen", "wall_seconds", "time", "event", "prompt", "text"}
    assert all(set(record) == counted for record in records(run, "event") if record["event"] == "sample")


def test_samples_of_the_trained_model_are_recorded_once_and_shown(config):
    pretrainer = Pretrainer(config())
    pretrainer.train()
    for _ in range(2):
        pretrainer.record_samples(["Once", "If"], [" upon <a>", " so"])
    samples = [record for record in records(pretrainer.run, "event") if record["event"] == "sample"]
    assert [(one["step"], one["prompt"], one["text"]) for one in samples] == [
        (6, "Once", " upon <a>"),
        (6, "If", " so"),
    ]
    page = pretrainer.run.folder.report.read_text()
    assert "<b>Once</b> upon &lt;a&gt;" in page and '<p class="state">finished</p>' in page


def test_no_report_is_written_where_none_is_wanted(config):
    run = trained(config(report=False))
    assert not run.folder.report.exists()


def test_a_report_that_cannot_be_written_is_one_warning(config, tmp_path, caplog, monkeypatch):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    run = trained(config(eval_steps=3))
    assert run.is_complete and len(run.folder.checkpoints()) == 3 and run.folder.report.is_dir()
    (warning,) = (r.getMessage() for r in caplog.records if "report.html" in r.getMessage())
    assert "Is a directory" in warning and "\n" not in warning and "training continues without it" in warning
    caplog.clear()
    monkeypatch.setattr(page, "as_page", lambda report: 1 / 0)
    run = trained(config("other"))
    assert run.is_complete and not run.folder.report.exists()
    assert (
        len([r for r in caplog.records if r.levelno >= logging.WARNING and "division by zero" in r.getMessage()]) == 1
    )


def test_the_report_of_a_run_that_failed_names_the_cause(config, tmp_path):
    with pytest.raises(ValueError):
        Pretrainer(config(), [Fails()]).train()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "ended: ValueError: no &lt;luck&gt;" in page


def test_the_report_of_a_resumed_run_shows_all_of_it(config, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Pretrainer(config(), [StopAt(5)]).train()
    assert "in progress, or killed" in (tmp_path / "run" / "report.html").read_text()
    run = trained(config(resume_from_checkpoint="latest"))
    page = run.folder.report.read_text()
    assert "resume at step 4: checkpoint checkpoint-4" in page and "finished" in page
    first = json.loads((run.folder.metrics).read_text().splitlines()[1])["loss"]
    assert f"{first:.4f}" in page
