"""The micro-batch that fits: running out of memory changes no result, and the fastest one is measured."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch
from forked import completed
from running import DISTRIBUTED, FORKED_TWO, StopAt, hashes, lines, records, same_weights, trained
from tampering import sealed
from transformers import TrainerCallback

from hfgpt.errors import RunError, UserError
from hfgpt.settings.batch import Batch
from hfgpt.training import batch_size
from hfgpt.training.batch_size import choose_candidates, find_fastest_split, time_splits


class Small(TrainerCallback):
    """A device that has room for micro-batches of `rows` at most, as far as the model can tell."""

    def __init__(self, rows: int = 4) -> None:
        self.rows = rows

    def on_init_end(self, args, state, control, model=None, **kwargs):
        plain = model.forward

        def forward(*args, input_ids, **options):
            if len(input_ids) > self.rows and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("no room")
            return plain(*args, input_ids=input_ids, **options)

        model.forward = forward


def run(config, *callbacks, name="run", **settings):
    step = {"tokens_per_step": 256, "gradient_accumulation_steps": None, "max_steps": 4}
    return trained(config(name, eval_steps=2, **step, **settings), *callbacks)


def test_running_out_of_memory_gives_the_run_of_the_smaller_micro_batch_bit_for_bit(config):
    """With dropout too: the step starts again, with the same random numbers."""
    dropout = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 16, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    settings = {"model": dropout}
    small = run(config, name="small", per_device_train_batch_size=4, **settings)
    large = run(config, Small(), name="large", per_device_train_batch_size=16, **settings)
    assert hashes(small) == hashes(large) and same_weights(small, large)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [line[key] for line in records(large, key)] == [line[key] for line in records(small, key)]
    retries = [line for line in records(large, "event") if line["event"] == "oom_retry"]
    assert [(line["for_step"], line["micro_batch_before"], line["micro_batch"]) for line in retries] == [
        (1, 16, 8),
        (1, 8, 4),
    ]
    assert [line["accumulation"] for line in retries] == [2, 4]
    assert large.step.batch == Batch(4, 16, 4, 1)


def test_one_sequence_that_does_not_fit_ends_the_run_and_names_the_fix(config):
    with pytest.raises(RunError, match="out of memory in step 1 with micro-batches of one sequence; use a smaller"):
        run(config, Small(rows=0), per_device_train_batch_size=2)


def test_a_run_that_is_resumed_keeps_to_what_fitted(config):
    first = run(config, Small(), per_device_train_batch_size=16)
    again = trained(dataclasses.replace(first.config, max_steps=5, resume_from_checkpoint="latest"))
    assert again.step.batch == first.step.batch == again.plan.batch == Batch(4, 16, 4, 1)
    assert any("ran out of memory with more" in line for line in again.plan.lines())
    other = trained(dataclasses.replace(again.config, max_steps=6, per_device_train_batch_size=8))
    assert other.step.batch == Batch(8, 16, 2, 1)  # what is stated anew counts


class Finds:
    """In place of the measurement, whose result depends on what else the machine does: one size after another."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)

    def __call__(self, step, *_):
        size = self.sizes.pop(0)
        return next(cut for cut in step.batch.splits() if cut.micro_batch == size), f"micro-batch: {size}"


@pytest.mark.parametrize("callbacks", [[], [Small()]])
def test_a_micro_batch_found_by_measurement_is_kept_over_a_resume(config, monkeypatch, callbacks):
    """Also the smaller one that was left after memory ran out."""
    auto = {"per_device_train_batch_size": "auto"}
    monkeypatch.setattr("hfgpt.training.batch_size.find_fastest_split", Finds(8, 8, 16))
    whole = run(config, *callbacks, name="whole", **auto)
    cut = {"tokens_per_step": 256, "gradient_accumulation_steps": None, "max_steps": 4, "eval_steps": 2, **auto}
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut", **cut), *callbacks, StopAt(3))
    resumed = trained(config("cut", resume_from_checkpoint="latest", **cut))
    expected = Batch(4, 16, 4, 1) if callbacks else Batch(8, 16, 2, 1)
    assert resumed.step.batch == whole.step.batch == expected
    assert same_weights(whole, resumed) and hashes(whole) == hashes(resumed)
    assert resumed.plan.batch == resumed.step.batch and resumed.plan.compile == whole.plan.compile
    assert f"micro-batch: {whole.step.batch.micro_batch}, as before in this run" in resumed.plan.text
    other = {**cut, "tokens_per_step": 512, "max_steps": 5, "accept_changed_text": True}
    larger = trained(config("cut", resume_from_checkpoint="latest", **other))
    assert larger.step.batch == Batch(16, 16, 2, 1)  # another step is measured again


def test_a_micro_batch_found_for_other_processes_is_measured_again(config, monkeypatch):
    monkeypatch.setattr("hfgpt.training.batch_size.find_fastest_split", Finds(8, 4))
    first = run(config, per_device_train_batch_size="auto")
    state = first.folder.checkpoint(4) / "training_state" / "trainer_state.json"
    trainer = json.loads(state.read_text())
    trainer["choices"]["processes"] = 2
    state.write_text(json.dumps(trainer))
    sealed(first.folder.checkpoint(4))
    again = trained(dataclasses.replace(first.config, max_steps=5, resume_from_checkpoint="latest"))
    assert again.step.batch.micro_batch == 4
    [event] = [line for line in records(again, "event") if line["event"] == "resume"]
    assert event["changed_settings"]["processes"] == {"from": 2, "to": 1}


def test_memory_that_runs_out_elsewhere_names_the_fix(config, monkeypatch):
    def step(*args, **options):
        raise torch.OutOfMemoryError("no room for the moments")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(RunError, match=r"out of memory with micro-batches of 2 .no room.*use a smaller --per_device"):
        run(config, per_device_train_batch_size=2)


def test_half_of_a_micro_batch_that_has_none_is_the_next_smaller_one():
    assert Batch(9, 16, 2, 1).halved() == Batch(3, 16, 6, 1)
    assert Batch(7, 16, 1, 1).halved() == Batch(1, 16, 7, 1)
    assert Batch(1, 16, 8, 1).halved() is None


ON_ONE = """
import os
import torch
from hfgpt import PretrainConfig, Pretrainer, run_recipe
from test_batch_size import Small

small = Small(rows=2 if os.environ["RANK"] == "1" else 1000)
run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [small]).train())
"""


@pytest.mark.slow
def test_memory_that_runs_out_on_one_process_is_handled_by_all(tmp_path, document_folder):
    (tmp_path / "recipe.py").write_text(ON_ONE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    for name, size in (("two", "2"), ("eight", "8")):  # the larger one without accumulation
        flags = ["--dataset", str(document_folder), *DISTRIBUTED, "--output_dir", str(tmp_path / name)]
        flags += ["--max_steps", "3", "--per_device_train_batch_size", size]
        command = [*FORKED_TWO, str(tmp_path / "recipe.py"), *flags]
        done = completed(command, environment, timeout=100)
        assert done.returncode == 0, done.stderr
    two, eight = tmp_path / "two", tmp_path / "eight"
    assert (two / "ledger.jsonl").read_text() == (eight / "ledger.jsonl").read_text()
    assert [line["loss"] for line in lines(two)] == [line["loss"] for line in lines(eight)]
    retries = [line for line in lines(eight, "event") if line["event"] == "oom_retry"]
    assert [(retry["micro_batch"], retry["accumulation"]) for retry in retries] == [(4, 2), (2, 4)]


def a_step(batch: Batch) -> SimpleNamespace:
    """As much of a TrainStep as the search needs."""
    return SimpleNamespace(
        batch=batch,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        ranks=SimpleNamespace(gather=lambda value: [value]),
        optimizer=SimpleNamespace(zero_grad=lambda: None, state={}),
        parameters=[],
    )


def test_the_fastest_split_is_found_by_measurement_not_by_size(monkeypatch):
    """A device on which 4 rows take hardly more than 1, 8 take long, and 16 do not fit."""
    now, limit = 0.0, 16

    def try_micro_batch(step, split):
        nonlocal now
        if split.micro_batch >= limit:
            raise torch.OutOfMemoryError
        now += {1: 1.0, 2: 1.1, 4: 1.2, 8: 4.0}[split.micro_batch]

    monkeypatch.setattr(batch_size.time, "perf_counter", lambda: now)
    monkeypatch.setattr(batch_size, "try_micro_batch", try_micro_batch)
    step = a_step(Batch(1, 10, 16, 1))
    timings = time_splits(step, step.batch.splits(), lambda split: try_micro_batch(step, split))
    assert {split.micro_batch: timing.seconds for split, timing in timings.items()} == {
        size: pytest.approx(seconds) for size, seconds in ((1, 1.0), (2, 1.1), (4, 1.2), (8, 4.0))
    }
    monkeypatch.setattr(batch_size, "CANDIDATES", 5)
    best, line = find_fastest_split(step, lambda split: 0)
    assert best == Batch(4, 10, 4, 1)
    assert line == "micro-batch: tokens/s by size, measured: 1: 10, 2: 18, 4: 33, 8: 20, 16: does not fit"
    limit = 1
    with pytest.raises(UserError, match="none of 1, 2, 4, 8, 16 fits"):
        find_fastest_split(step, lambda split: 0)


def test_candidates_are_the_largest_that_fit_and_halves_of_them():
    batch = Batch(1, 10, 48, 1)

    def sizes(available, beyond=False):
        found = choose_candidates(batch, lambda split: split.micro_batch, available, beyond)
        return [split.micro_batch for split in found]

    assert sizes(13) == [1, 3, 6, 12] and sizes(1000) == [6, 12, 24, 48] and sizes(1) == [1]
    assert sizes(13, beyond=True) == [2, 4, 8, 16] and sizes(48, beyond=True) == [6, 12, 24, 48]
    with pytest.raises(UserError, match="one sequence of 10 tokens needs"):
        sizes(0)


@pytest.mark.slow
def test_auto_trains_the_stated_step(config):
    """Whatever is found: the text and, but for rounding, the losses are those of any other cut."""
    found = run(config, name="found", per_device_train_batch_size="auto")
    stated = run(config, name="stated", per_device_train_batch_size=2)
    assert found.step.batch.tokens_per_step == 256 and found.step.batch in stated.step.batch.splits()
    assert hashes(found) == hashes(stated)
    losses = [[line["loss"] for line in records(one)] for one in (found, stated)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert any(line.startswith("micro-batch: tokens/s by size, measured: ") for line in found.plan.text)


def test_auto_needs_the_step_stated(config):
    for wrong in ({"gradient_accumulation_steps": None}, {"tokens_per_step": 256}):
        with pytest.raises(UserError, match="per_device_train_batch_size=auto: needs tokens_per_step"):
            config(per_device_train_batch_size="auto", **wrong)
    assert config(per_device_train_batch_size="auto", tokens_per_step=256, gradient_accumulation_steps=None)


def test_the_plan_is_that_of_what_was_found(config, monkeypatch):
    monkeypatch.setattr(
        "hfgpt.training.batch_size.find_fastest_split", lambda *_: (Batch(4, 16, 4, 1), "micro-batch: found")
    )
    found = run(config, per_device_train_batch_size="auto", torch_compile="auto")
    assert not found.plan.compile.enabled  # 4 steps, which might be 64 forward passes
    assert found.plan.setting.micro_batch == 4 and found.plan.batch == found.step.batch == Batch(4, 16, 4, 1)
