"""Spikes, which are skipped, and rollbacks from what does not end: what they leave, and that a resume is exact."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from running import BrokenText, PoisonMicroBatch, StopAt, hashes, records, rows_of_steps, same_weights, trained
from transformers import TrainerCallback

from hfgpt import Pretrainer
from hfgpt.checkpointing.audit import audit
from hfgpt.comparing.events import event_lines
from hfgpt.comparing.reading import read_folder
from hfgpt.errors import RunError, UserError
from hfgpt.training import rollback
from hfgpt.training.spikes import SpikeWindow, build_spike_window

SKIPS = {"skip_spikes": 8, "max_steps": 12}
ROLLS_BACK = {"rollback_margin": 1, "rollback_steps": 4, "save_steps": 6, "max_steps": 32, "logging_steps": 5}
BROKEN = range(20, 24)  # steps of text


@pytest.fixture(autouse=True)
def short_window(monkeypatch):
    monkeypatch.setattr("hfgpt.training.spikes.WINDOW", 4)


class Weights(TrainerCallback):
    def __init__(self):
        self.after = [None]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append(model.transformer.wte.weight.detach().clone())


def test_a_spike_is_left_out_and_does_not_count_for_later_limits(config):
    weights = Weights()
    run = trained(config(**SKIPS), weights, PoisonMicroBatch(7, 0, factor=30.0), PoisonMicroBatch(9, 1, factor=30.0))
    spikes = records(run, "loss_limit")
    assert [line["step"] for line in spikes] == [7, 9] and all(line["event"] == "skip_step" for line in spikes)
    of_steps = {line["step"]: line for line in records(run, "learning_rate")}
    for line, before in zip(spikes, ([3, 4, 5, 6], [4, 5, 6, 8]), strict=True):
        for key in ("loss", "grad_norm"):
            values = [of_steps[step][key] for step in before]
            limit = np.mean(values) + 8 * np.std(values, ddof=1)
            assert line[f"{key}_limit"] == pytest.approx(limit, rel=1e-4)
            assert line[key] == of_steps[line["step"]][key]
        assert line["loss"] > line["loss_limit"] and line["documents"] and line["reason"].startswith("spike: loss")
    same = [torch.equal(*weights.after[step - 1 : step + 1]) for step in range(2, 13)]
    assert [step for step, is_same in enumerate(same, start=2) if is_same] == [7, 9]
    facts = audit(run.folder.path)
    assert facts["skipped_steps"] == [7, 9] and not facts["problems"]
    assert any("skip_step at step 7: reason spike" in line for line in event_lines(read_folder(run.folder.path)))


def test_a_run_resumed_between_spikes_skips_the_same(config):
    poison = [lambda: PoisonMicroBatch(7, 0, factor=30.0), lambda: PoisonMicroBatch(9, 0, factor=30.0)]
    whole = trained(config("whole", **SKIPS), *(make() for make in poison))
    with pytest.raises(KeyboardInterrupt):
        trained(config("killed", **SKIPS), *(make() for make in poison), StopAt(9))
    resumed = trained(config("killed", resume_from_checkpoint="latest", **SKIPS), *(make() for make in poison))
    assert resumed.resumed.progress.step > 6 and same_weights(whole, resumed)
    assert [{**one, "time": 0, "wall_seconds": 0} for one in records(resumed, "loss_limit")] == [
        {**one, "time": 0, "wall_seconds": 0} for one in records(whole, "loss_limit")
    ]


def test_a_loss_that_keeps_its_new_level_ends_the_run(config):
    class Level(PoisonMicroBatch):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control)
            self.step = max(self.step, self.now)

    pretrainer = Pretrainer(config(**{**SKIPS, "max_steps": 30}), [Level(7, 0, factor=30.0)])
    with pytest.raises(RunError, match=r"a spike or not finite in 10 steps in a row, .* step 16.*larger skip_spikes"):
        pretrainer.train()
    assert pretrainer.run.folder.checkpoints()[0].name == "checkpoint-6"


def test_a_window_has_no_limit_before_it_is_full_and_spikes_are_not_skipped_in_fp16(config):
    window = SpikeWindow(2.0)
    for value in (1.0, 2.0, 4.0, 3.0, 5.0):
        is_skipped = torch.tensor(value == 4)
        assert window.limits().isnan().all() == (len(window.state()) < 4)
        window.add(torch.tensor(value), torch.tensor(2 * value), is_skipped)
    assert window.state() == [[1, 2], [2, 4], [3, 6], [5, 10]]
    again = SpikeWindow(2.0)
    again.restore(window.state())
    assert torch.equal(again.limits(), window.limits())
    np.testing.assert_allclose(window.limits()[0], 2.75 + 2 * np.std([1, 2, 3, 5], ddof=1), rtol=1e-6)
    accelerator = SimpleNamespace(scaler=object(), device="cpu")
    with pytest.raises(UserError, match="skip_spikes=8: not with fp16"):
        build_spike_window(config(skip_spikes=8), accelerator)
    assert build_spike_window(config(skip_spikes=0), accelerator) is None


class KillAfter(TrainerCallback):
    """Ends the process's run after this many steps, however they count, as a kill would."""

    def __init__(self, steps):
        self.left = steps

    def on_step_end(self, args, state, control, **kwargs):
        self.left -= 1
        if not self.left:
            self.end()

    def end(self):
        raise KeyboardInterrupt


def ledger(run):
    return [json.loads(line) for line in run.folder.ledger.read_text().splitlines()]


def without_clock(run):
    """The records of a run, without those of saves, which depend on when a thread ends."""
    clock = ("time", "wall_seconds", "step_seconds", "tokens_per_second", "mfu", "memory_bytes", "eval_seconds")
    records = [one for one in run.folder.records() if one.get("event") not in ("save", "resume", "signal", "end")]
    return [{key: value for key, value in one.items() if key not in clock} for one in records]


@pytest.fixture
def broken(config):
    return rows_of_steps(config("rows"), BROKEN)


def test_a_run_that_diverges_returns_to_a_good_checkpoint_and_passes_over_the_text(config, broken):
    settings = {**ROLLS_BACK, "report_to": "none", "eval_steps": 22, "ema_decay": 0.9, "early_stopping_patience": 2}
    run = trained(config(**settings), BrokenText(broken))
    [event] = records(run, "from_step")
    assert (event["event"], event["step"], event["checkpoint"]) == ("rollback", 18, "checkpoint-18")
    assert (event["from_step"], event["first_bad_step"], event["steps"]) == (23, 20, 5)
    assert event["tokens"] == 5 * run.step.batch.tokens_per_step and event["num_input_tokens_seen"] == 18 * 256
    steps = [line["step"] for line in run.folder.records()]
    assert steps == sorted(steps) and [line["step"] for line in records(run, "learning_rate")][-4:] == [20, 25, 30, 32]
    assert max(line["loss"] for line in records(run)[3:]) < 2  # the broken text is in no record that stays
    assert all(line["tokens_per_second"] > 0 for line in records(run, "learning_rate"))
    abandoned = [json.loads(line) for line in (run.folder.path / "abandoned.jsonl").read_text().splitlines()]
    found = [(line["step"], line["rollback"]) for line in abandoned if {"loss", "eval_loss"} & line.keys()]
    assert found == [(20, 1), (22, 1)]
    lines = ledger(run)
    assert [line["step"] for line in lines] == list(range(1, 33)) and len(set(hashes(run))) == 32
    [noted] = lines[17]["rollbacks"]
    assert noted["position"]["block"] == 23 * 16 and lines[18]["position"]["block"] == 24 * 16
    facts = audit(run.folder.path)
    assert not facts["problems"] and facts["passed_over"]["steps"] == 5 and facts["steps_as_recorded"] == 32
    assert run.average.steps == 32 and run.progress.evaluation_step == 32
    [line] = [line for line in event_lines(read_folder(run.folder.path)) if "rollback" in line]
    assert "rollback at step 18: number 1, checkpoint checkpoint-18, from_step 23" in line
    lines[17]["rollbacks"][0]["steps"] = 4
    run.folder.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit(run.folder.path)["problems"] == ["rollback 1 to step 18 has not passed over the text as recorded"]
    lines[17]["rollbacks"][0]["steps"] = "4"
    run.folder.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"line 18 of ledger.jsonl with a rollback that cannot be read"):
        audit(run.folder.path)
    with pytest.raises(UserError, match="the rollback to step 18 cannot be read"):
        run.folder.rollback_at(18)


def killed_while_writing(monkeypatch, number):
    """Ends the run at write `number` of a rollback: of the abandoned records, the metrics, and the ledger."""
    write, calls = rollback.rewind_run.__globals__["write_whole"], []

    def write_or_die(path, content):
        calls.append(path.name)
        if len(calls) == number:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr("hfgpt.checkpointing.rewind.write_whole", write_or_die)


@pytest.mark.parametrize(
    "where",
    [
        3,  # at the ledger: the rollback is not there yet
        25,  # steps: after the rollback, before its first checkpoint
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param("event", marks=pytest.mark.slow),
        pytest.param("signal", marks=[pytest.mark.slow, pytest.mark.unix_only]),  # the divergence has not been read
        pytest.param(22, marks=pytest.mark.slow),
        pytest.param(34, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_around_a_rollback_resumes_exactly(config, broken, where, monkeypatch):
    settings = {**ROLLS_BACK, "ema_decay": 0.9, "eval_steps": 11, "skip_spikes": 50}
    whole = trained(config("whole", **settings), BrokenText(broken))
    kill = KillAfter(where if where in (22, 25, 34) else 23 if where == "signal" else 1000)
    if where == "signal":
        kill.end = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, RunError)):
        if where == "event":
            patch.setattr(rollback, "record_rollback", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        elif where in (2, 3):
            killed_while_writing(patch, where)
        trained(config("killed", **settings), BrokenText(broken), kill)
    resumed = trained(config("killed", resume_from_checkpoint="latest", **settings), BrokenText(broken))
    assert same_weights(whole, resumed) and all(map(torch.equal, whole.average.tensors, resumed.average.tensors))
    assert ledger(whole) == ledger(resumed) and resumed.progress.rollbacks == 1
    assert without_clock(whole) == without_clock(resumed)
    assert not audit(resumed.folder.path)["problems"]
    name = "training_state/trainer_state.json"
    states = [json.loads((run.folder.checkpoint(32) / name).read_text()) for run in (whole, resumed)]
    same = ("spike_window", "loss_watch", "rollbacks", "passed_over", "skipped_rows", "best_metric", "schedule")
    assert [states[0][key] for key in same] == [states[1][key] for key in same]


def test_after_max_rollbacks_the_run_ends_and_keeps_its_good_checkpoint(config):
    broken = BrokenText(rows_of_steps(config("rows"), range(20, 30)))
    pretrainer = Pretrainer(config(**ROLLS_BACK, max_rollbacks=1), [broken])
    with pytest.raises(RunError, match=r"diverged from step 19 on: .* after 1 rollback; .* max_rollbacks above 1"):
        pretrainer.train()
    run = pretrainer.run
    assert run.folder.checkpoints()[0].name == "checkpoint-18" and len(records(run, "from_step")) == 1
    assert "diverged" in records(run, "fault")[-1]["fault"]
    # With one more, to the same checkpoint, the text has passed over most of what is broken.
    more = config(**ROLLS_BACK, max_rollbacks=2, resume_from_checkpoint="latest")
    run = trained(more, broken)
    assert [line["steps"] for line in ledger(run)[17]["rollbacks"]] == [5, 4] and run.progress.passed_over == 9
    assert not audit(run.folder.path)["problems"]


def test_without_a_good_checkpoint_a_run_that_diverges_ends(config, broken):
    pretrainer = Pretrainer(config(**{**ROLLS_BACK, "save_steps": 19}), [BrokenText(broken)])
    with pytest.raises(RunError, match=r"diverged from step 20 on: .* no whole checkpoint from before; start again"):
        pretrainer.train()
