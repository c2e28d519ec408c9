"""The loop against a plain one, against itself cut differently, and against itself interrupted."""

from __future__ import annotations

import copy
import itertools
import json
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from running import MODEL, first_step, prepared, records, same_weights, seconds_of_three_steps, trained
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hfgpt import Pretrainer, UserError
from hfgpt.checkpointing import saver
from hfgpt.training.parameter_groups import parameter_groups
from hfgpt.training.saving import trainer_state

STEP_KEYS = {"step", "num_input_tokens_seen", "time", "wall_seconds", "loss", "learning_rate", "grad_norm"} | {
    *("step_seconds", "tokens_per_second", "mfu", "peak_tflops", "peak_source", "memory_bytes")
}


def step_gradients(config) -> list[torch.Tensor]:
    run = prepared(config)
    run.step.optimizer.step = run.step.optimizer.zero_grad = lambda: None
    first_step(run)
    return [parameter.grad for parameter in run.step.parameters]


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
        run = prepared(config(per_device_train_batch_size=size, tokens_per_step=128, gradient_accumulation_steps=None))
        run.step.optimizer.step = run.step.optimizer.zero_grad = lambda: None
        ids, labels = run.step.to_tensors(next(run.batches).blocks)
        labels = labels.clone()
        for row in range(8):
            labels[row, row + 1 :] = -100  # 1 to 8 targets in a row
        loss, *_ = run.step(ids, labels, 1)
        logits = run.step.model.eval()(ids).logits
        plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().long())
        torch.testing.assert_close(loss, plain, atol=1e-6, rtol=0)
        losses.append(loss)
        gradients.append([parameter.grad for parameter in run.step.parameters])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_our_steps_equal_a_bare_loop_bit_for_bit(config):
    ours = trained(config())
    bare = prepared(config("bare"))  # the same initial weights, the same text
    model = bare.step.model
    optimizer = torch.optim.AdamW(parameter_groups(model, bare.config), betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses = []
    for step in range(1, 7):
        tokens = torch.from_numpy(next(bare.batches).blocks)
        for group in optimizer.param_groups:
            group["lr"] = bare.step.learning_rate(step)
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


def test_evaluation_does_not_disturb_training(config):
    dropout = {**MODEL, "resid_pdrop": 0.1}
    often, never = trained(config("often", model=dropout, eval_steps=1)), trained(config("never", model=dropout))
    assert [line["loss"] for line in records(often)] == [line["loss"] for line in records(never)]
    assert same_weights(often, never)


def test_evaluations_the_end_and_a_resume_compile_nothing_more(config, monkeypatch):  # C49
    graphs, plain = [], torch.nn.Module.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda model, **options: plain(model, backend=backend, **options))
    torch._dynamo.reset()
    run = {"torch_compile": True, "eval_steps": 2, "num_train_epochs": None}
    trained(config(max_steps=5, **run))
    assert len(graphs) == 2  # one for training, one for evaluation
    torch._dynamo.reset()
    trained(config(max_steps=9, resume_from_checkpoint="latest", **run))
    assert len(graphs) == 4  # a new process compiles the same two


def test_checkpoint_is_a_hub_folder_and_holds_no_pickle(config):
    run = trained(config(eval_steps=3))
    folder = run.folder.path / "checkpoint-latest"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("README.md", "training_state", "manifest.json"),
    }
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors", ".md"}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(16)[None]
    torch.testing.assert_close(model.eval()(ids).logits, run.step.model.eval()(ids).logits, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == model.config.n_positions and len(tokenizer) == model.config.vocab_size


def test_records_are_complete_and_rising(config):
    run = trained(config(eval_steps=3, save_steps=4))
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
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
    assert {path.name for path in run.folder.checkpoints()} == {"checkpoint-4", "checkpoint-6"}
    facts = json.loads(run.folder.run_json.read_text())
    assert {"config", "model", "plan", "versions", "device", "git_revision", "data"} <= set(facts)


def test_sizes_far_beyond_the_machine_are_refused_before_the_text_is_read(config):
    for changes in ({"per_device_train_batch_size": 10**8}, {"gradient_accumulation_steps": 10**9}):
        with pytest.raises(UserError, match=r"needs about [\d,]+ GiB, but the device has"):
            Pretrainer(config(dataset="nowhere.txt", **changes)).train()


def test_bf16_keeps_weights_and_moments_in_float32(config):
    exact = [line["loss"] for line in records(trained(config("exact")))]
    AcceleratorState._reset_state()  # one precision a process is Accelerate's rule
    run = trained(config(mixed_precision="bf16"))
    state = run.step.optimizer.state.values()
    assert {parameter.dtype for parameter in run.step.model.parameters()} == {torch.float32}
    assert {moments[key].dtype for moments in state for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    losses = [line["loss"] for line in records(run)]
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
    run = prepared(config(max_steps=None, num_train_epochs=2))
    tokens = 2 * len(run.data.train.tokens)
    assert run.plan.max_steps * run.step.batch.tokens_per_step == pytest.approx(tokens, rel=0.02)


def test_losses_hold_no_graph(config):
    run = trained(config(logging_steps=100))
    assert len(run.non_finite.values) and not run.non_finite.values.requires_grad
    result = first_step(prepared(config("other")))
    assert not any(tensor.requires_grad for tensor in result if tensor is not None)


def test_unknown_trackers_are_refused(config):
    with pytest.raises(UserError, match="report_to=nonsense"):
        Pretrainer(config(report_to="nonsense")).train()


def test_document_masking_trains_on_documents_alone(config, document_folder):
    """The loss of a step is that of its documents one by one, at positions from 0 on."""
    options = {"dataset": str(document_folder), "tokenizer": "bpe-300", "sequence_length": 32, "max_steps": 1}
    model = {**MODEL, "n_positions": 32}
    run = prepared(config(**options, model=model, document_masking=True, dataloader_num_workers=0))
    untrained = copy.deepcopy(run.step.model)
    batch = next(run.batches)
    loss, *_ = run.step(*run.step.to_tensors(batch.blocks), 1)
    separator, total, count = run.data.tokenizer.eos_token_id, 0.0, 0
    for block in torch.from_numpy(batch.blocks).long():
        borders = [0, *((block[1:-1] == separator).nonzero().flatten() + 1).tolist(), len(block) - 1]
        for start, stop in itertools.pairwise(borders):
            logits = untrained(input_ids=block[None, start:stop]).logits[0]
            total += F.cross_entropy(logits, block[start + 1 : stop + 1], reduction="sum").item()
            count += stop - start
    assert count == batch.blocks[:, 1:].size and loss.item() == pytest.approx(total / count, abs=1e-5)
    with pytest.raises(UserError, match="document_masking: tokenizer=char"):
        Pretrainer(config("char", document_masking=True)).train()


def test_a_save_noted_between_steps_leaves_their_times_alone(config):
    done = records(trained(config(save_steps=1, max_steps=30)))
    seconds = [record["step_seconds"] for record in done]
    assert min(seconds) > 0.0005
    assert sum(seconds) == pytest.approx(done[-1]["wall_seconds"], rel=0.05)


def test_a_checkpoint_has_the_seconds_of_training_up_to_its_step(config):
    """Also where no record was made since the one before."""
    run = prepared(config(logging_steps=100))
    seconds_of_three_steps(run, [0.0])
    assert trainer_state(run)["wall_seconds"] == 6.0


def test_a_save_that_ends_between_steps_does_not_swallow_the_next(config):
    class Slow(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            time.sleep(0.2)  # the checkpoint before is written by now

    run = trained(config(save_steps=1), Slow()).folder
    assert [path.name for path in run.checkpoints()] == [f"checkpoint-{step}" for step in range(6, 0, -1)]
    saves = [record["checkpoint"] for record in map(json.loads, run.metrics.open()) if record.get("event") == "save"]
    assert saves == [f"checkpoint-{step}" for step in range(1, 7)]


def test_a_stated_peak_is_what_mfu_is_against(config):
    [*_, last] = records(trained(config(mfu_peak_tflops=2.0, max_steps=3, logging_steps=1)))
    assert last["peak_tflops"] == 2.0 and last["peak_source"] == "given" and last["mfu"] > 0


def test_a_save_is_recorded_with_the_step_of_its_checkpoint(config, monkeypatch):
    """Training goes on while it is written."""
    write = saver.write_checkpoint

    def write_slowly(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(saver, "write_checkpoint", write_slowly)
    saves = records(trained(config(max_steps=40, save_steps=20)), "checkpoint_step")
    assert [(one["checkpoint"], one["checkpoint_step"]) for one in saves] == [
        ("checkpoint-20", 20),
        ("checkpoint-40", 40),
    ]
    assert saves[0]["step"] > 20  # records are in rising order
