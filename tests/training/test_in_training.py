"""What is watched while training: both splits, the best checkpoint, early stop, samples."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from forked import FORK, completed
from running import ROOT, StopAt, prepared, records, seconds_of_three_steps, trained
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from hfgpt.errors import RunError, UserError
from hfgpt.evaluation.loss import evaluate_tokens
from hfgpt.training.callbacks import SampleCallback


@pytest.mark.parametrize("streaming", [False, True])
def test_both_splits_are_evaluated_where_asked(config, streaming, document_folder):
    options = {"dataset": str(document_folder), "tokenizer": "bpe-300", "streaming": streaming, "eval_steps": 3}
    options |= {"dataloader_num_workers": 0}
    both = trained(config("both", eval_train=True, **options))
    data = both.data
    assert len(data.train_sample) == len(data.validation)
    model, accelerator = both.step.parallel_model, both.machine.accelerator
    again = evaluate_tokens(model, data.train_sample, accelerator=accelerator, sequence_length=16, batch_size=8)
    told = records(both, "eval_loss")
    assert [record["step"] for record in told] == [3, 6]
    assert told[-1]["train_eval_loss"] == pytest.approx(again["eval_loss"], rel=1e-6)
    held_out, seen = (data.tokenizer.decode(part) for part in (data.validation[:200], data.train_sample[:200]))
    assert seen[:60] not in held_out and "says" in seen
    one = trained(config("one", **options))
    assert "train_eval_loss" not in records(one, "eval_loss")[0] and one.data.train_sample is None
    assert records(one, "eval_loss")[-1]["eval_loss"] == told[-1]["eval_loss"]


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations give these losses, one after another."""

    def script(*losses):
        left = iter(losses)

        def evaluated(*_, **__):
            return {"eval_loss": next(left), "eval_bits_per_byte": None, "eval_tokens": 9, "eval_seconds": 0.1}

        monkeypatch.setattr("hfgpt.training.evaluating.evaluate_tokens", evaluated)

    return script


def names(run) -> list[str]:
    return sorted(path.name for path in run.folder.checkpoints())


def best(run) -> str:
    return (run.folder.path / "checkpoint-best").resolve().name


def test_the_best_checkpoint_is_saved_kept_and_named(config, scripted):
    scripted(3.0, 2.0, 2.5, 2.2, 2.1, 2.3)
    run = trained(config(eval_steps=1, save_steps=0, save_best=True, save_total_limit=2))
    assert names(run) == ["checkpoint-2", "checkpoint-6"] and best(run) == "checkpoint-2"
    assert [r["checkpoint"].split("-")[1] for r in records(run, "checkpoint")] == ["1", "2", "6"]


def test_without_save_best_the_best_of_those_saved_is_kept(config, scripted):
    scripted(3.0, 2.0, 2.5, 2.2, 2.1, 2.3)
    run = trained(config(eval_steps=1, save_steps=1, save_total_limit=2))
    assert names(run) == ["checkpoint-2", "checkpoint-6"] and best(run) == "checkpoint-2"


@pytest.mark.parametrize(("metric", "step"), [("eval_loss", 4), ("eval_loss_ema", 6)])
def test_the_best_is_that_of_the_weights_or_of_their_average(config, scripted, metric, step):
    scripted(3.0, float("inf"), 2.0, 2.5, 2.1, 1.9)  # of the weights and the average in turn
    run = trained(config(eval_steps=2, ema_decay=0.5, metric_for_best_model=metric))
    assert run.progress.best_step == step and best(run) == f"checkpoint-{step}"


def test_a_loss_that_is_not_finite_is_never_the_best(config, scripted):
    scripted(float("nan"), 5.0, float("nan"))
    run = trained(config(eval_steps=2, save_steps=0, save_best=True))
    assert names(run) == ["checkpoint-4", "checkpoint-6"] and best(run) == "checkpoint-4"


def test_a_loss_as_large_as_it_likes_is_saved_and_gone_on_from(config, scripted):
    scripted(50.0, 60.0)  # perplexities beyond any whole number of 64 bits
    trained(config(eval_steps=6))
    again = trained(config(eval_steps=6, max_steps=8, resume_from_checkpoint="latest"))
    assert again.progress.step == 8 and best(again) == "checkpoint-6"


def test_a_run_whose_last_checkpoint_fails_ends_with_an_error(config, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    settings = config(save_steps=0)
    monkeypatch.setattr("hfgpt.checkpointing.saver.write_checkpoint", full)
    with pytest.raises(RunError, match=r"checkpoint of step 6 could not be written; no checkpoint has been written"):
        trained(settings)


@pytest.mark.parametrize("by_flag", [True, False])
def test_patience_ends_the_run_early_with_a_checkpoint(config, scripted, capsys, by_flag):
    scripted(3.0, 2.0, 2.5, 2.6, 1.0)
    flag, callbacks = ({"early_stopping_patience": 2}, []) if by_flag else ({}, [EarlyStoppingCallback(2)])
    run = trained(config(eval_steps=1, save_steps=0, **flag), *callbacks)
    assert run.progress.step == 4 and names(run) == ["checkpoint-4"]
    assert records(run, "event")[-1]["event"] == "end" and records(run, "event")[-1]["fault"] is None
    assert "Stopped at step 4 of 6: no better loss in 2 evaluations" in capsys.readouterr().out


def test_patience_counts_on_over_a_resume(config, scripted):
    settings = {"eval_steps": 1, "save_steps": 1, "early_stopping_patience": 3}
    scripted(2.0, 2.5, 2.6, 9.0)
    with pytest.raises(KeyboardInterrupt):
        trained(config(**settings), StopAt(4))
    scripted(2.7, 1.0)
    assert trained(config(resume_from_checkpoint="latest", **settings)).progress.step == 4


def test_samples_are_printed_and_change_nothing(config, capsys):
    dropout = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
    plain = trained(config("plain", model=dropout))
    assert "sample at" not in capsys.readouterr().out
    told = trained(config("told", model=dropout, sample_steps=3, sample_prompt="the line "))
    out = capsys.readouterr().out
    assert "sample at step 3: the line " in out and "sample at step 6: the line " in out
    assert [r["loss"] for r in records(told)] == [r["loss"] for r in records(plain)]
    weights = [load_file(run.folder.checkpoint(6) / "model.safetensors") for run in (plain, told)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_prompt_that_cannot_be_is_refused_before_anything_is_written(config, tmp_path):
    with pytest.raises(UserError, match="'#'"):
        trained(config(sample_steps=3, sample_prompt="#1"))
    assert not (tmp_path / "run").exists()


def test_samples_are_outside_the_clock(config):
    now = [0.0]

    class Slow(SampleCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with self.around():
                now[0] += 1000.0

    assert seconds_of_three_steps(prepared(config(), Slow(1)), now) == 6.0


def test_what_needs_an_evaluation_is_refused_without_one(config):
    with pytest.raises(UserError) as refused:
        config(eval_steps=0, eval_train=True, early_stopping_patience=1, save_best=True)
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "eval_train", "early_stopping_patience", "save_best",
    ]  # fmt: skip
    with pytest.raises(UserError, match="sample_steps=-1"):
        config(sample_steps=-1)


@pytest.mark.slow
def test_two_processes_that_share_the_model_watch_as_one_does(tmp_path, document_folder):
    told = {}
    for name in ("cpu", "multi_gpu_fsdp2"):
        flags = ["--dataset", str(document_folder), "--tokenizer", "bpe-300", "--sequence_length", "32"]
        flags += ["--model", '{"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}', "--max_steps", "4"]
        flags += ["--tokens_per_step", "256", "--per_device_train_batch_size", "4", "--torch_compile", "false"]
        flags += ["--eval_steps", "2", "--eval_train", "true", "--sample_steps", "4", "--sample_prompt", "document"]
        flags += ["--save_best", "true", "--mixed_precision", "no", "--mfu_peak_tflops", "1"]
        flags += ["--output_dir", str(tmp_path / name)]
        command = [
            FORK,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(ROOT / "accelerate_configs" / f"{name}.yaml"),
        ]
        command += ["--num_processes", "2"] if name != "cpu" else []
        command += [str(ROOT / "recipes" / "quickstart.py"), *flags]
        done = completed(command, {**os.environ, "ACCELERATE_USE_CPU": "true"}, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        evaluations = [record for record in map(json.loads, lines) if "eval_loss" in record]
        sample = [line for line in done.stdout.splitlines() if line.startswith("sample at step 4")]
        told[name] = np.array([[r["eval_loss"], r["train_eval_loss"]] for r in evaluations]), sample
    assert np.allclose(told["cpu"][0], told["multi_gpu_fsdp2"][0], rtol=1e-5)
    assert told["cpu"][1] == told["multi_gpu_fsdp2"][1] and len(told["cpu"][1]) == 1
