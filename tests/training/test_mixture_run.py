"""Runs on mixtures: losses by source, named evaluation, weights that change, the end of a source, and the audit."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from running import FORKED_TWO, MODEL, Run, StopAt, hashes, lines, records, same_weights, trained
from transformers import GPT2LMHeadModel

from hfgpt import Pretrainer
from hfgpt.checkpointing.audit import audit
from hfgpt.comparing.reading import read_folder
from hfgpt.data.loader import iterate
from hfgpt.errors import UserError
from hfgpt.hub.verify import verify
from hfgpt.model import head_loss as head_loss_module
from hfgpt.model.head_loss import head_loss


@pytest.fixture
def mixture(tmp_path, config):
    """Settings of a run on two sources with weights; every argument can be replaced."""
    for name, count in {"wiki": 300, "code": 120}.items():
        texts = [{"text": f"{name} {n} says {n * n % 101} and {n % 7}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

    def build(name="run", weights=(0.7, 0.3), streaming=False, max_epochs=None, **changes):
        sources = [
            {"dataset": str(tmp_path / f"{one}.jsonl"), "weight": w}
            for one, w in zip(("wiki", "code"), weights, strict=False)
        ]
        sources[-1]["max_epochs"] = max_epochs
        return config(name, **{"dataset": sources, "streaming": streaming, **changes})

    return build


@pytest.mark.parametrize("form", ["whole", "torch", "checkpoint"])
def test_losses_of_rows_have_the_gradients_of_their_sum(monkeypatch, form):
    if form == "checkpoint":
        monkeypatch.delattr(head_loss_module.F, "linear_cross_entropy", raising=False)
    rows, T, C, V = 4, 32, 16, 50
    torch.manual_seed(0)
    x, w, target = torch.randn(rows * T, C), torch.randn(V, C), torch.randint(0, V, (rows * T,))
    found = []
    for of_rows in (None, rows):
        own = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        loss = head_loss(*own, target, None if form == "whole" else 48 if form == "checkpoint" else 64, of_rows)
        (loss.sum() / 7).backward()
        found.append((loss.detach(), *(one.grad for one in own)))
    (whole, *gradients), (by_row, *of_rows) = found
    expected = torch.nn.functional.cross_entropy(x @ w.T, target, reduction="none").view(rows, T).sum(1)
    torch.testing.assert_close(by_row, expected)
    torch.testing.assert_close(by_row.sum(), whole)
    assert torch.equal(gradients[0], of_rows[0])
    if form == "torch":  # adds up the gradients of the matrix in another order
        torch.testing.assert_close(gradients[1], of_rows[1])
    else:
        assert torch.equal(gradients[1], of_rows[1])


@pytest.mark.parametrize("streaming", [False, True])
def test_losses_of_sources_are_those_of_stock_gpt2_on_their_blocks(mixture, streaming):
    run = trained(mixture(streaming=streaming, max_steps=1, save_steps=0, learning_rate=1e-9, min_learning_rate=0))
    stock = GPT2LMHeadModel.from_pretrained(run.folder.checkpoint(1))
    batch = next(iterate(run.data.train, None))
    [record] = records(run)
    assert len(set(batch.sources.tolist())) == 2
    for number, name in enumerate(("wiki", "code")):
        blocks = torch.from_numpy(batch.blocks[batch.sources == number]).long()
        with torch.no_grad():
            logits = stock(blocks[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        assert record[f"loss/{name}"] == pytest.approx(expected.item(), rel=2e-5)
        assert record[f"tokens/{name}"] == len(blocks) * 16


def test_logging_of_sources_does_not_change_the_run(mixture):
    every, seldom = trained(mixture("every")), trained(mixture("seldom", logging_steps=4))
    assert same_weights(every, seldom) and hashes(every) == hashes(seldom)
    assert all(record["loss/wiki"] and record["loss/code"] for record in records(every))
    blocks = [json.loads(line)["blocks"] for line in every.folder.ledger.read_text().splitlines()]
    for record, of_step in zip(records(every), blocks, strict=True):  # the loss is their mean, weighted by tokens
        parts = [record[f"loss/{name}"] * count for name, count in of_step.items()]
        assert sum(parts) / sum(of_step.values()) == pytest.approx(record["loss"], abs=1e-6)
    last = records(every)[-1]
    assert last["tokens/wiki"] + last["tokens/code"] == last["num_input_tokens_seen"]


@pytest.mark.parametrize("weights", [(1,), (1, 0)])
def test_a_mixture_of_one_source_is_the_plain_run(mixture, tmp_path, weights):
    mixed = trained(mixture("mixed", weights, eval_steps=3))
    tokenizer = str(mixed.folder.checkpoint(6))
    dataset = str(tmp_path / "wiki.jsonl")
    plain = trained(mixture("plain", dataset=dataset, tokenizer=tokenizer, eval_steps=3, model={**MODEL}))
    assert hashes(mixed) == hashes(plain) and same_weights(mixed, plain)
    for one, other in zip(records(mixed), records(plain), strict=True):
        assert one["loss"] == other["loss"] == one["loss/wiki"]
    ours, theirs = (lines(run.folder.path, "eval_loss") for run in (mixed, plain))
    assert [one["eval_loss/wiki"] for one in ours] == pytest.approx([one["eval_loss"] for one in theirs], abs=0)


def test_a_run_that_was_cut_is_the_whole_run(mixture):
    whole = trained(mixture("whole", streaming=True))
    with pytest.raises(KeyboardInterrupt):
        trained(mixture("cut", streaming=True), StopAt(5))
    again = trained(mixture("cut", streaming=True, resume_from_checkpoint="latest"))
    assert whole.folder.ledger.read_text() == again.folder.ledger.read_text() and same_weights(whole, again)
    ours, theirs = ([record["loss/code"] for record in records(run)] for run in (whole, again))
    assert ours == theirs
    found = audit(again.folder.path)
    assert not found["problems"] and found["sources"]["wiki"].keys() == {"tokens", "documents"}
    lines = again.folder.ledger.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "blocks": {"wiki": 16, "code": 0}})
    again.folder.ledger.write_text("\n".join(lines) + "\n")
    assert any("step 3 has blocks" in problem for problem in audit(again.folder.path)["problems"])


def test_a_changed_weight_counts_from_the_next_step_and_is_recorded(mixture, caplog):
    trained(mixture(weights=(0.5, 0.5), max_steps=4))
    run = trained(mixture(weights=(0.25, 0.75), max_steps=8, resume_from_checkpoint="latest"))
    blocks = [json.loads(line)["blocks"]["wiki"] for line in run.folder.ledger.read_text().splitlines()]
    assert blocks == [8] * 4 + [4] * 4
    [event] = [record for record in lines(run.folder.path, "event") if record["event"] == "resume"]
    assert event["weights"] == [[0, ["1/2", "1/2"]], [4, ["1/4", "3/4"]]]
    assert event["changed_text"] == "weights (25 % wiki, 75 % code from step 5)"
    assert not audit(run.folder.path)["problems"]
    last = trained(mixture(weights=(0.25, 0.75), max_steps=9, resume_from_checkpoint="latest"))
    assert last.data.train.fingerprint["weights"] == event["weights"] and not audit(run.folder.path)["problems"]
    card = (run.folder.checkpoint(8) / "README.md").read_text()
    assert "| source wiki | 50 % of the tokens, then 25 % after 1,024: wiki.jsonl; 768 tokens;" in card
    with pytest.raises(UserError, match="wiki"):
        other = mixture().dataset[1:]
        trained(mixture(dataset=other, max_steps=9, resume_from_checkpoint="latest"))
    renamed = [{**mixture().dataset[0], "name": "text"}, mixture().dataset[1]]
    with pytest.raises(UserError, match=r"names of the sources \(wiki, code then, text, code now\); restore"):
        trained(mixture(dataset=renamed, max_steps=9, resume_from_checkpoint="latest"))


def test_changed_sources_that_are_accepted_begin_again_in_their_next_epoch(mixture, tmp_path):
    trained(mixture(max_steps=4))
    with (tmp_path / "code.jsonl").open("a") as file:
        file.write(json.dumps({"text": "code 1 says 1"}) + "\n")
    again = {"max_steps": 6, "resume_from_checkpoint": "latest"}
    with pytest.raises(UserError, match=r"dataset code: file code\.jsonl changed"):
        trained(mixture(**again))
    run = trained(mixture(**again, accept_changed_text=True))
    position = run.position
    assert (position["step"], position["since"]) == (6, 4) and position["sources"]["wiki"]["epoch"] == 1
    assert sum(position["tokens"].values()) == run.progress.num_input_tokens_seen == 6 * 256


def test_commands_take_a_run_on_a_mixture(mixture):
    run = trained(mixture(streaming=True, eval_steps=6, tokenizer="bpe-300"))
    assert not verify(run.folder.checkpoint(6))["problems"]
    settings = read_folder(run.folder.path).settings
    assert len(settings["text"]) == 16 and settings["held_out"]


def test_the_end_of_a_streamed_source_ends_the_run(mixture, capsys):
    run = trained(mixture(streaming=True, weights=(1, 9), max_epochs=1, max_steps=500, eval_steps=100, save_steps=0))
    step = run.progress.step
    assert 3 < step < 500 and run.folder.checkpoint(step).is_dir() and run.progress.evaluation_step == step
    assert f"Stopped at step {step} of 500: " in capsys.readouterr().out
    assert lines(run.folder.path, "event")[-1]["fault"] is None
    again = trained(
        mixture(streaming=True, weights=(1, 9), max_epochs=1, max_steps=500, resume_from_checkpoint="latest")
    )
    assert again.progress.step == step
    more = {"max_epochs": 2, "max_steps": step + 2, "resume_from_checkpoint": "latest"}
    assert trained(mixture(streaming=True, weights=(1, 9), **more)).progress.step == step + 2
    assert not audit(run.folder.path)["problems"]


def test_a_source_in_memory_that_would_end_is_refused_before_the_run(mixture, tmp_path, capsys):
    with pytest.raises(UserError, match=r"source code: max_epochs=1 leaves .* blocks, but the run needs"):
        Pretrainer(mixture(weights=(1, 9), max_epochs=1, max_steps=50)).train()
    assert not (tmp_path / "run").exists()
    run = trained(mixture(weights=(1, 9), max_epochs=1, max_steps=50, eval_steps=50, on_exhausted="renormalise"))
    blocks = [json.loads(line)["blocks"] for line in run.folder.ledger.read_text().splitlines()]
    ended = next(step for step, one in enumerate(blocks) if one["wiki"] == 16)
    assert all(one["wiki"] == 16 for one in blocks[ended:]) and ended > 3
    found = audit(run.folder.path)
    assert not found["problems"] and found["not_checked"].startswith("documents of text in memory (wiki, code)")
    [event] = [one for one in lines(run.folder.path, "event") if one["event"] == "source_exhausted"]
    assert (event["source"], event["step"], event["max_epochs"]) == ("code", ended + 1, 1)
    assert f"Source code has had its max_epochs=1: without it from step {ended + 1} on" in capsys.readouterr().out
    tokens = {name: 16 * sum(one[name] for one in blocks) for name in ("wiki", "code")}
    plan, card = "\n".join(run.plan.text), (run.folder.checkpoint(50) / "README.md").read_text()
    planned = {name: int(re.search(rf"^{name}: ([\d,]+) tokens", plan, re.M)[1].replace(",", "")) for name in tokens}
    step = int(re.search(r"^code: .* of at most 1, until about step (\d+);", plan, re.M)[1])
    assert abs(step - ended) <= 1 and all(abs(planned[name] - tokens[name]) <= 256 for name in tokens)
    last = next(one for one in reversed(records(run)) if one["loss/code"])
    assert f"wiki.jsonl; {tokens['wiki']:,} tokens; loss {records(run)[-1]['loss/wiki']:.4f} in step 50 |" in card
    words = f"to step {ended}, where its max_epochs ended; loss {last['loss/code']:.4f} in step {last['step']} |"
    assert f"code.jsonl; {tokens['code']:,} tokens; {words}" in card
    evaluation = run.progress.evaluation
    assert f"| held-out text code | loss {evaluation['eval_loss/code']:.4f} nats per token" in card


def test_a_resume_may_move_the_end_of_a_source(mixture):
    settings = {"weights": (1, 9), "max_epochs": 1, "max_steps": 12, "on_exhausted": "renormalise"}
    run = trained(mixture(**settings))
    assert run.position["over"] == ["code"]
    again = {**settings, "max_epochs": 2, "max_steps": 14, "resume_from_checkpoint": "latest"}
    run = trained(mixture(**again))
    blocks = [json.loads(line)["blocks"]["code"] for line in run.folder.ledger.read_text().splitlines()]
    assert blocks[11:] == [0, 15, 14] or blocks[11:] == [0, 14, 15]
    assert not audit(run.folder.path)["problems"] and "last_step" not in run.progress.sources["code"]
    run = trained(mixture("stops", **{**settings, "on_exhausted": "stop", "max_steps": 8}))
    run = trained(mixture("stops", **{**settings, "resume_from_checkpoint": "latest"}))
    assert run.position["over"] == ["code"] and not audit(run.folder.path)["problems"]


def test_named_evaluation_and_the_metric_that_is_best(mixture, tmp_path):
    named = {"wiki": str(tmp_path / "wiki.jsonl"), "code": {"dataset": str(tmp_path / "code.jsonl")}}
    (tmp_path / "train.txt").write_text("".join(f"wiki code {n} says 0123456789 and\n" for n in range(300)))
    settings = {"eval_steps": 1, "max_steps": 6, "learning_rate": 0.3, "warmup_steps": 0, "save_best": True}
    settings |= {"metric_for_best_model": "eval_loss/code", "early_stopping_patience": 2, "save_steps": 0}
    settings |= {"tokenizer": "bpe-300", "eval_tokens": 200}
    run = trained(mixture(dataset=str(tmp_path / "train.txt"), eval_dataset=named, **settings))
    evaluations = lines(run.folder.path, "eval_loss")
    for record in evaluations:
        parts = [record["eval_loss/wiki"], record["eval_loss/code"]]
        assert record["eval_loss"] == pytest.approx(np.mean(parts)) and record["eval_tokens"] == 400
        assert record["eval_perplexity/code"] == pytest.approx(np.exp(parts[1]))
        assert record["eval_bits_per_byte/wiki"] > 0
    losses = [record["eval_loss/code"] for record in evaluations]
    best = int(np.argmin(losses)) + 1
    assert run.progress.best_step == best and run.progress.best_metric == min(losses)
    assert (run.folder.path / "checkpoint-best").resolve().name == f"checkpoint-{best}"
    assert len(losses) == min(best + 2, 6)


@pytest.mark.slow
def test_losses_of_sources_do_not_depend_on_the_processes(tmp_path, mixture):
    dataset = json.dumps(mixture().dataset)
    runs = []
    for processes in (1, 2):
        flags = ["--dataset", dataset, "--tokens_per_step", "512", "--max_steps", "4", "--mixed_precision", "no"]
        runs.append(Run([*FORKED_TWO[:-1], f"--nproc_per_node={processes}"], tmp_path / str(processes), *flags))
    said = [run.end(seconds=200) for run in runs]
    one, two = (run.records("loss") for run in runs)
    assert runs[0].ledger() == runs[1].ledger() and len(one) == len(two) == 4, said
    for key in ("loss/wiki", "loss/code"):
        assert [record[key] for record in one] == pytest.approx([record[key] for record in two], abs=1e-5)
