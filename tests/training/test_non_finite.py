"""Steps that are not finite: left out on all processes, and traced to their text."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from forked import completed
from running import FORKED_TWO, ROOT, TINY, PoisonMicroBatch, hashes, records, trained
from safetensors.torch import load_file
from transformers import TrainerCallback

from hfgpt import Pretrainer
from hfgpt.data.loader import iterate
from hfgpt.errors import RunError


@pytest.mark.parametrize("bad_steps", [{3}, {2, 3}])
def test_a_step_that_is_not_finite_is_left_out(config, bad_steps):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.before = {name: value.clone() for name, value in model.state_dict().items()}
            # Only backward is poisoned, so that the loss alone would not tell.
            hook = (lambda gradient: gradient * float("nan")) if state.global_step + 1 in bad_steps else None
            self.handle = model.transformer.ln_f.weight.register_hook(hook) if hook else None

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if self.handle:
                self.handle.remove()
                assert all(torch.equal(value, self.before[name]) for name, value in model.state_dict().items())

    run = trained(config(), Poison())
    skipped = records(run, "reason")
    assert [line["step"] for line in skipped] == sorted(bad_steps)
    assert all(line["event"] == "skip_step" for line in skipped)
    assert all(parameter.isfinite().all() for parameter in run.step.model.parameters())
    assert len(hashes(run)) == 6  # the text goes on


def test_a_run_that_stays_not_finite_stops_with_its_last_good_checkpoint(config, monkeypatch):
    monkeypatch.setattr("hfgpt.training.non_finite.MAX_SKIPPED_STEPS", 2)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * float("inf"))

    pretrainer = Pretrainer(config(), [Poison()])
    with pytest.raises(RuntimeError, match="2 steps in a row, up to step 4"):
        pretrainer.train()
    assert [path.name for path in pretrainer.run.folder.checkpoints()] == ["checkpoint-2"]
    weights = load_file(pretrainer.run.folder.path / "checkpoint-latest" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_the_documents_of_a_bad_micro_batch_are_named(config, document_folder):
    options = {"dataset": str(document_folder), "streaming": True, "tokenizer": "bpe-300", "logging_steps": 3}
    options |= {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    run = trained(config(**options), PoisonMicroBatch(step=3, micro_batch=1))
    [record] = records(run, "documents")
    assert record["step"] == 3 and record["event"] == "skip_step" and record["ranks"] == [0]
    decode = run.data.tokenizer.decode
    batch = next(islice(iterate(run.data.train, None), 2, None))
    rows = ["".join(decode(row[:-1])) for row in batch.blocks[4:8]]
    assert record["documents"]
    for document in record["documents"]:
        lines = Path(document["file"]).read_text().splitlines()
        text = json.loads(lines[document["row"]])["text"]
        assert document["text"] in text if document["goes_on"] else text.startswith(document["text"])
        assert any(document["text"][:10] in row for row in rows)
    begun = sum(row.count("<|endoftext|>") for row in rows)
    assert begun <= len(record["documents"]) <= begun + 4


def test_the_beginnings_of_bad_rows_are_told_of_text_in_memory(config):
    run = trained(config(), PoisonMicroBatch(step=2, micro_batch=0))
    [record] = records(run, "documents")
    batch = next(islice(iterate(run.data.train, None), 1, None))
    expected = [run.data.tokenizer.decode(row) for row in batch.blocks[:8]]
    assert record["documents"] == [{"row_of_step": row, "text": text} for row, text in enumerate(expected)]


RECIPE = """
import sys
sys.path.insert(0, "{tests}")
from hfgpt import PretrainConfig, Pretrainer, run_recipe
from running import PoisonMicroBatch

run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [PoisonMicroBatch(3, 0, rank=1)]).train())
"""


@pytest.mark.slow
def test_processes_leave_out_a_step_together_and_name_the_one_it_came_from(tmp_path, document_folder):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(tests=ROOT / "tests"))
    command = [*FORKED_TWO, str(recipe), "--output_dir", str(tmp_path / "run"), "--dataset", str(document_folder)]
    command += [*TINY, "--streaming", "true", "--max_steps", "5", "--tokens_per_step", "512"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = completed(command, environment, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Skipped step 3" in done.stderr and "on process 1" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [record] = [line for line in lines if line.get("event") == "skip_step"]
    assert record["step"] == 3 and record["ranks"] == [1] and record["documents"]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    weights = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize("limit", [1, 2])
def test_a_model_that_breaks_keeps_its_last_good_checkpoint(config, limit):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 7:
                model.transformer.wte.weight.data *= 1e30

    pretrainer = Pretrainer(config(max_steps=30, save_steps=3, save_total_limit=limit), [Break()])
    with pytest.raises(RunError, match="10 steps in a row, up to step 17"):
        pretrainer.train()
    assert pretrainer.run.folder.checkpoints()[0].name == "checkpoint-6"
    assert "10 steps in a row" in records(pretrainer.run, "fault")[-1]["fault"]
    assert trained(config(max_steps=9, resume_from_checkpoint="latest")).non_finite.skipped_in_a_row == 0


def test_a_save_that_falls_into_a_bad_step_is_made_up_for(config):
    run = trained(config(max_steps=7, save_steps=3), PoisonMicroBatch(step=3, micro_batch=0))
    assert [path.name for path in run.folder.checkpoints()] == ["checkpoint-7", "checkpoint-6", "checkpoint-4"]
