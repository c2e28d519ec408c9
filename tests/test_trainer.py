"""The loop against a plain one, against itself cut differently, and against itself interrupted."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hfgpt import PretrainConfig, Pretrainer, UserError
from hfgpt.optim import parameter_groups

MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}
STEP_KEYS = {"step", "num_input_tokens_seen", "time", "wall_seconds", "loss", "learning_rate", "grad_norm"} | {
    *("step_seconds", "tokens_per_second", "mfu", "peak_tflops", "peak_source", "memory_bytes")
}


@pytest.fixture
def config(tmp_path, text_file):
    """Settings of a run that takes a second; every argument can be replaced."""

    def build(name: str = "run", **changes) -> PretrainConfig:
        defaults = {
            "model": MODEL,
            "dataset": str(text_file),
            "tokenizer": "char",
            "sequence_length": 16,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_steps": 6,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "logging_steps": 1,
            "eval_steps": 0,
            "save_steps": 2,
            "mixed_precision": "no",
            "torch_compile": False,
        }
        return PretrainConfig(output_dir=str(tmp_path / name), **{**defaults, **changes})

    return build


class StopAt(TrainerCallback):
    """Ends the process's run at a step as a kill would: nothing more is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trained(config, *callbacks) -> Pretrainer:
    pretrainer = Pretrainer(config, callbacks)
    pretrainer.train()
    return pretrainer


def records(pretrainer, key="loss") -> list[dict]:
    lines = [json.loads(line) for line in pretrainer.run.metrics.read_text().splitlines()]
    return [line for line in lines if key in line]


def hashes(pretrainer) -> list[str]:
    return [json.loads(line)["batch_hash"] for line in pretrainer.run.ledger.read_text().splitlines()]


def same_weights(one, other) -> bool:
    ours, theirs = one.raw_model.state_dict(), other.raw_model.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def step_gradients(config) -> list[torch.Tensor]:
    pretrainer = Pretrainer(config)
    pretrainer.setup()
    pretrainer.optimizer.step = lambda: None
    pretrainer.optimizer.zero_grad = lambda: None
    pretrainer.training_step(*pretrainer.to_tensors(next(pretrainer.batches).blocks), step=1)
    return [parameter.grad for parameter in pretrainer.raw_model.parameters()]


def test_gradients_do_not_depend_on_how_the_step_is_cut(config):
    cuts = [
        step_gradients(
            config(per_device_train_batch_size=size, gradient_accumulation_steps=32 // size, max_grad_norm=0)
        )
        for size in (32, 16, 8, 1)
    ]
    for other in cuts[1:]:
        for expected, got in zip(cuts[0], other, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_targets_left_out_weigh_nothing_in_any_cut(config):
    """Two tokens of loss 1.0 and eight of 3.0 are 2.6 on average, not 2.0."""
    losses, gradients = [], []
    for size in (8, 2):
        pretrainer = Pretrainer(
            config(per_device_train_batch_size=size, tokens_per_step=128, gradient_accumulation_steps=None)
        )
        pretrainer.setup()
        pretrainer.optimizer.step = pretrainer.optimizer.zero_grad = lambda: None
        ids, labels = pretrainer.to_tensors(next(pretrainer.batches).blocks)
        labels = labels.clone()
        for row in range(8):
            labels[row, row + 1 :] = -100  # 1 to 8 targets in a row
        loss, _ = pretrainer.training_step(ids, labels, step=1)
        logits = pretrainer.raw_model.eval()(ids).logits
        plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().long())
        torch.testing.assert_close(loss, plain, atol=1e-6, rtol=0)
        losses.append(loss)
        gradients.append([parameter.grad for parameter in pretrainer.raw_model.parameters()])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_our_steps_equal_a_bare_loop_bit_for_bit(config):
    ours = trained(config())
    bare = Pretrainer(config("bare"))
    bare.setup()  # the same initial weights, the same text
    model = bare.raw_model
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses = []
    for step in range(1, 7):
        tokens = torch.from_numpy(next(bare.batches).blocks)
        for group in optimizer.param_groups:
            group["lr"] = bare.learning_rate(step)
        total = torch.zeros(())
        for rows in (slice(0, 8), slice(8, 16)):
            logits = model(input_ids=tokens[rows, :-1]).logits
            targets = tokens[rows, 1:].flatten().long()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / (16 * 16)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    assert [record["loss"] for record in records(ours)] == losses
    assert same_weights(ours, bare)


@pytest.mark.parametrize("kind", ["memory", "documents"])
@pytest.mark.parametrize("killed_at", [1, 3, 4, 5])
def test_resumed_equals_uninterrupted_bit_for_bit(config, document_folder, kind, killed_at):
    changes = {
        "model": {**MODEL, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        "dataset": str(document_folder),
        "streaming": kind == "documents",
        "tokenizer": "bpe-300",
        "eval_steps": 3,
        "eval_tokens": 100,
    }
    whole = trained(config("whole", **changes))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut", **changes), StopAt(killed_at))
    resumed = trained(config("cut", resume_from_checkpoint="latest", **changes))
    assert resumed.state.global_step == 6
    assert same_weights(whole, resumed)
    for key in ("loss", "learning_rate", "grad_norm", "num_input_tokens_seen", "step"):
        assert [line[key] for line in records(whole)] == [line[key] for line in records(resumed)], key
    assert [line["eval_loss"] for line in records(whole, "eval_loss")] == [
        line["eval_loss"] for line in records(resumed, "eval_loss")
    ]
    assert hashes(whole) == hashes(resumed) and len(set(hashes(whole))) == 6


def test_evaluation_does_not_disturb_training(config):
    dropout = {**MODEL, "resid_pdrop": 0.1}
    often, never = trained(config("often", model=dropout, eval_steps=1)), trained(config("never", model=dropout))
    assert [line["loss"] for line in records(often)] == [line["loss"] for line in records(never)]
    assert same_weights(often, never)


def test_checkpoint_is_a_hub_folder_and_holds_no_pickle(config):
    pretrainer = trained(config(eval_steps=3))
    folder = pretrainer.run.path / "checkpoint-latest"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("README.md", "training_state", "manifest.json"),
    }
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors", ".md"}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(16)[None]
    torch.testing.assert_close(model.eval()(ids).logits, pretrainer.raw_model.eval()(ids).logits, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == model.config.n_positions and len(tokenizer) == model.config.vocab_size


def test_records_are_complete_and_rising(config):
    pretrainer = trained(config(eval_steps=3, save_steps=4))
    lines = [json.loads(line) for line in pretrainer.run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) == STEP_KEYS for line in steps)
    assert steps[-1]["num_input_tokens_seen"] == 6 * 8 * 2 * 16
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6]
    for line in evaluations:
        assert line["eval_perplexity"] == pytest.approx(np.exp(line["eval_loss"]))
        assert line["eval_bits_per_byte"] == pytest.approx(line["eval_loss"] / np.log(2), rel=1e-6)  # one byte a token
    assert [line["event"] for line in lines if "event" in line] == ["start", "save", "save", "end"]
    assert {path.name for path in pretrainer.run.checkpoints()} == {"checkpoint-4", "checkpoint-6"}
    run = json.loads(pretrainer.run.run_json.read_text())
    assert {"config", "model", "plan", "versions", "device", "git_revision", "data"} <= set(run)


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

    pretrainer = trained(config(), Poison())
    skipped = records(pretrainer, "reason")
    assert [line["step"] for line in skipped] == sorted(bad_steps)
    assert all(line["event"] == "skip_step" for line in skipped)
    assert all(parameter.isfinite().all() for parameter in pretrainer.raw_model.parameters())
    assert len(hashes(pretrainer)) == 6  # the text goes on


def test_a_run_that_stays_not_finite_stops_with_its_last_good_checkpoint(config, monkeypatch):
    monkeypatch.setattr("hfgpt.guard.MAX_SKIPPED_STEPS", 2)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * float("inf"))

    pretrainer = Pretrainer(config(), [Poison()])
    with pytest.raises(RuntimeError, match="2 steps in a row, up to step 4"):
        pretrainer.train()
    assert [path.name for path in pretrainer.run.checkpoints()] == ["checkpoint-2"]
    weights = load_file(pretrainer.run.path / "checkpoint-latest" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_more_steps_after_the_end_keep_the_curve(config, caplog):
    trained(config())
    longer = trained(config(max_steps=8, resume_from_checkpoint="latest"))
    rates = [line["learning_rate"] for line in records(longer)]
    peak = rates.index(max(rates))
    assert len(rates) == 8 and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert "ends at step 6" in caplog.text


def test_a_finished_run_resumes_to_its_result(config):
    first = trained(config(eval_steps=3))
    lines = len(first.run.metrics.read_text().splitlines())
    again = Pretrainer(config(eval_steps=3, resume_from_checkpoint="latest"))
    assert again.train()["eval_loss"] == records(first, "eval_loss")[-1]["eval_loss"]
    assert len(again.run.metrics.read_text().splitlines()) <= lines + 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"model": {**MODEL, "n_layer": 3}}, "n_layer"),
        ({"sequence_length": 32}, "sequence_length"),
        ({"gradient_accumulation_steps": 4}, "tokens_per_step"),
        ({"tokenizer": "bpe-300"}, "tokenizer"),
    ],
)
def test_resuming_another_run_is_refused_by_name(config, changes, named):
    run = trained(config()).run
    before = run.metrics.read_bytes()
    with pytest.raises(UserError, match=named):
        Pretrainer(config(resume_from_checkpoint="latest", **changes)).train()
    assert run.metrics.read_bytes() == before


def test_settings_changed_at_resume_are_said_and_recorded(config, caplog):
    first = trained(config())
    assert records(first, "changed_settings") == []
    resumed = trained(config(resume_from_checkpoint="latest", max_steps=8, learning_rate=5e-3))
    [record] = records(resumed, "changed_settings")
    assert record["changed_settings"] == {
        "max_steps": {"from": 6, "to": 8},
        "learning_rate": {"from": 1e-2, "to": 5e-3},
    }
    assert "learning_rate is 0.005 from here on; it was 0.01" in caplog.text


def test_fewer_steps_than_the_checkpoint_has_are_refused(config):
    trained(config())
    with pytest.raises(UserError, match=r"max_steps=3: .*checkpoint-6 is at step 6"):
        trained(config(resume_from_checkpoint="latest", max_steps=3))


def test_sizes_far_beyond_the_machine_are_refused_before_the_text_is_read(config):
    for changes in ({"per_device_train_batch_size": 10**8}, {"gradient_accumulation_steps": 10**9}):
        with pytest.raises(UserError, match=r"needs some [\d,]+ GiB, and the device has"):
            Pretrainer(config(dataset="nowhere.txt", **changes)).train()


def test_the_same_step_cut_otherwise_may_resume(config):
    whole = trained(config("whole"))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut"), StopAt(5))
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    resumed = trained(config("cut", resume_from_checkpoint="latest", **changes))
    assert hashes(resumed) == hashes(whole)
    for one, other in zip(records(whole), records(resumed), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)


def test_bf16_keeps_weights_and_moments_in_float32(config):
    exact = [line["loss"] for line in records(trained(config("exact")))]
    AcceleratorState._reset_state()  # one precision a process is Accelerate's rule
    pretrainer = trained(config(mixed_precision="bf16"))
    state = pretrainer.raw_optimizer.state.values()
    assert {parameter.dtype for parameter in pretrainer.raw_model.parameters()} == {torch.float32}
    assert {moments[key].dtype for moments in state for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    losses = [line["loss"] for line in records(pretrainer)]
    assert losses == pytest.approx(exact, abs=0.02) and losses != exact


def test_nothing_is_written_for_a_run_that_cannot_work(config, tmp_path, document_folder):
    (tmp_path / "short.txt").write_text("too short")
    streamed = {"dataset": str(document_folder), "streaming": True, "tokenizer": "bpe-300"}
    for changes, named in (
        ({"dataset": str(tmp_path / "nowhere.txt")}, "nowhere.txt"),
        ({"dataset": str(tmp_path / "short.txt")}, "fewer than one block"),
        ({"tokenizer": str(tmp_path / "nowhere")}, "tokenizer="),
        ({"text_column": "body", "dataset": str(document_folder)}, "text, id"),
        ({"max_steps": None, "num_train_epochs": 1, **streamed}, "--streaming false"),
        ({"mixed_precision": "fp16"}, "fp16"),
    ):
        with pytest.raises(UserError, match=named):
            Pretrainer(config("refused", **changes)).train()
    assert not (tmp_path / "refused").exists()
    with pytest.raises(UserError, match=r"output_dir=.*short.txt"):
        Pretrainer(config("short.txt")).train()


def test_epochs_give_the_length_of_a_run_in_memory(config):
    pretrainer = Pretrainer(config(max_steps=None, num_train_epochs=2))
    pretrainer.setup()
    tokens = 2 * len(pretrainer.data.train.tokens)
    assert pretrainer.max_steps * pretrainer.batch.tokens_per_step == pytest.approx(tokens, rel=0.02)


def test_losses_hold_no_graph(config):
    pretrainer = trained(config(logging_steps=100))
    assert all(not tensor.requires_grad for step in pretrainer.guard.pending for tensor in (step.loss, step.grad_norm))


def test_unknown_trackers_are_refused(config):
    with pytest.raises(UserError, match="report_to=nonsense"):
        Pretrainer(config(report_to="nonsense")).train()


@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one(tmp_path, document_folder):
    """The launcher's own two processes on a CPU, for the loop, the text, and one writer."""
    recipe = Path(__file__).parent.parent / "recipes" / "shakespeare_char.py"
    flags = [
        "--dataset",
        str(document_folder),
        "--streaming",
        "true",
        "--tokenizer",
        "bpe-300",
        "--model",
        json.dumps(MODEL),
    ]
    flags += ["--sequence_length", "16", "--tokens_per_step", "256", "--per_device_train_batch_size", "4"]
    flags += ["--max_steps", "4", "--mixed_precision", "no", "--torch_compile", "false", "--logging_steps", "1"]
    flags += ["--eval_steps", "2", "--eval_tokens", "300"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    for processes in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*launcher, str(recipe), "--output_dir", str(tmp_path / str(processes)), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("eval_loss") == 2  # one process speaks
    one, two = ((tmp_path / str(processes) / "ledger.jsonl").read_text() for processes in (1, 2))
    assert one == two
    texts = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("1", "2")]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    for key in ("loss", "eval_loss", "learning_rate", "num_input_tokens_seen"):
        first, second = ([line[key] for line in run if key in line] for run in lines)
        assert second == pytest.approx(first, abs=1e-5), key
    weights = [load_file(tmp_path / n / "checkpoint-4" / "model.safetensors") for n in ("1", "2")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=0)


def test_resuming_from_an_earlier_step_leaves_the_later_course_aside(config):
    trained(config())
    earlier = str(Path(config().output_dir) / "checkpoint-2")
    again = trained(config(max_steps=5, save_steps=1, save_total_limit=1, resume_from_checkpoint=earlier))
    assert [path.name for path in again.run.checkpoints()] == ["checkpoint-5"]
    assert (again.run.path / "checkpoint-latest").resolve().name == "checkpoint-5"
    assert len(list(again.run.path.glob("abandoned-*-checkpoint-*"))) == 2


def test_document_masking_trains_on_documents_alone(config, document_folder):
    """The loss of a step is that of its documents one by one, at positions from 0 on."""
    options = {"dataset": str(document_folder), "tokenizer": "bpe-300", "sequence_length": 32, "max_steps": 1}
    model = {**MODEL, "n_positions": 32}
    pretrainer = Pretrainer(config(**options, model=model, document_masking=True, dataloader_num_workers=0))
    pretrainer.setup()
    untrained = copy.deepcopy(pretrainer.raw_model)
    batch = next(pretrainer.batches)
    loss, _ = pretrainer.training_step(*pretrainer.to_tensors(batch.blocks), step=1)
    separator, total, count = pretrainer.data.tokenizer.eos_token_id, 0.0, 0
    for block in torch.from_numpy(batch.blocks).long():
        borders = [0, *((block[1:-1] == separator).nonzero().flatten() + 1).tolist(), len(block) - 1]
        for start, stop in itertools.pairwise(borders):
            logits = untrained(input_ids=block[None, start:stop]).logits[0]
            total += F.cross_entropy(logits, block[start + 1 : stop + 1], reduction="sum").item()
            count += stop - start
    assert count == batch.blocks[:, 1:].size and loss.item() == pytest.approx(total / count, abs=1e-5)
    with pytest.raises(UserError, match="document_masking: tokenizer=char"):
        Pretrainer(config("char", document_masking=True)).train()


def test_an_untied_head_is_saved_and_resumed(config):
    model = {**MODEL, "tie_word_embeddings": False}
    whole = trained(config("whole", model=model))
    trained(config("cut", model=model, max_steps=4, lr_scheduler_type="constant", warmup_steps=0))
    straight = trained(config("straight", model=model, lr_scheduler_type="constant", warmup_steps=0))
    options = {"resume_from_checkpoint": "latest", "lr_scheduler_type": "constant", "warmup_steps": 0}
    assert same_weights(trained(config("cut", model=model, **options)), straight)
    stock, info = AutoModelForCausalLM.from_pretrained(whole.run.path / "checkpoint-latest", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(stock.lm_head.weight, whole.raw_model.lm_head.weight)


def test_a_save_noted_between_steps_leaves_their_times_alone(config):
    done = records(trained(config(save_steps=1, max_steps=30)))
    seconds = [record["step_seconds"] for record in done]
    assert min(seconds) > 0.0005
    assert sum(seconds) == pytest.approx(done[-1]["wall_seconds"], rel=0.05)


def test_a_save_that_ends_between_steps_does_not_swallow_the_next(config):
    class Slow(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            time.sleep(0.2)  # the checkpoint before is written by now

    run = trained(config(save_steps=1), Slow()).run
    assert [path.name for path in run.checkpoints()] == [f"checkpoint-{step}" for step in range(6, 0, -1)]
    saves = [record["checkpoint"] for record in map(json.loads, run.metrics.open()) if record.get("event") == "save"]
    assert saves == [f"checkpoint-{step}" for step in range(1, 7)]
