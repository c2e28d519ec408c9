"""The average of the weights: what it is, which of the two is saved, and that a resumed run continues it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from running import PoisonMicroBatch, StopAt, prepared, records, same_weights, trained
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from hfgpt.hub.verify import _evaluation
from hfgpt.links import follow
from hfgpt.training.evaluating import evaluate
from hfgpt.training.step import StepResult


class Weights(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self):
        self.of_steps = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.of_steps.append([p.detach().double().numpy().copy() for p in model.parameters()])


@pytest.mark.parametrize(
    ("settings", "shares"),
    [({"ema_decay": 0.6}, {1: 0.6**4, 2: 0.6**3, 3: 0.6**2, 4: 0.6, 6: 1}), ({"average_last": 0.5}, {4: 1, 6: 1})],
)
def test_the_average_is_that_of_the_weights_after_each_step_that_was_not_skipped(config, settings, shares):
    weights = Weights()
    run = trained(config(eval_steps=6, **settings), weights, PoisonMicroBatch(5, 0))
    assert [line["step"] for line in records(run, "reason")] == [5]
    assert run.average.steps == len(shares)
    total = sum(shares.values())
    expected = [
        sum(share * weights.of_steps[step - 1][index] for step, share in shares.items()) / total
        for index in range(len(run.step.parameters))
    ]
    for average, wanted in zip(run.average.tensors, expected, strict=True):
        np.testing.assert_allclose(average.numpy(), wanted, rtol=1e-5, atol=1e-7)
    [record] = records(run, "eval_loss")
    run.average = None
    with torch.no_grad():
        for parameter, wanted in zip(run.step.parameters, expected, strict=True):
            parameter.copy_(torch.from_numpy(wanted))
    assert evaluate(run)["eval_loss"] == pytest.approx(record["eval_loss_ema"], abs=1e-5)
    assert record["eval_perplexity_ema"] == pytest.approx(math.exp(record["eval_loss_ema"]))


@pytest.mark.parametrize("is_better", [True, False])
def test_a_resumed_run_continues_weights_and_average_and_saves_the_better(config, is_better):
    rate = {"learning_rate": 0.1 if is_better else 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    changes = {"ema_decay": 0.8, "eval_steps": 2, "save_total_limit": None, **rate}
    whole = trained(config("whole", **changes))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut", **changes), StopAt(3))
    resumed = trained(config("cut", resume_from_checkpoint="latest", **changes))
    assert same_weights(whole, resumed) and whole.average.steps == resumed.average.steps == 6
    assert all(map(torch.equal, whole.average.tensors, resumed.average.tensors))
    name = "raw_weights" if is_better else "average"
    for step in (2, 6):
        for file in ("model.safetensors", f"training_state/{name}.safetensors"):
            one, other = (run.folder.checkpoint(step) / file for run in (whole, resumed))
            assert one.read_bytes() == other.read_bytes()
    folder, record = whole.folder.checkpoint(6), records(whole, "eval_loss")[-1]
    state = json.loads((folder / "training_state" / "trainer_state.json").read_text())
    assert state["average"] == {"steps": 6, "first_step": 1, "is_model": is_better}
    assert f"training_state/{name}.safetensors" in json.loads((folder / "manifest.json").read_text())["files"]
    losses = [record["eval_loss_ema"], record["eval_loss"]]
    assert (losses[0] < losses[1]) is is_better
    card = (folder / "README.md").read_text()
    assert f"held-out tokens: loss {min(losses):.4f}" in card
    assert "Loss at step 6: {:.4f} of the average, {:.4f} of the newest weights".format(*losses) in card
    assert ("The model is an average" in card) is is_better
    # Stock transformers has the loss that `hfgpt verify` expects, and the raw weights are those of the run.
    model, (expected, _, (ids, labels)) = AutoModelForCausalLM.from_pretrained(folder), _evaluation(folder)
    logits = model(torch.from_numpy(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten().long())
    assert expected == min(losses) and loss.item() == pytest.approx(expected, abs=1e-4)
    raw = load_file(folder / "training_state" / f"{name}.safetensors") if is_better else model.state_dict()
    ours = whole.step.model.state_dict()
    assert all(torch.equal(raw[key], ours[key]) for key in raw)


def results(run, step):
    """The section of a checkpoint's card, in one line."""
    card = run.folder.checkpoint(step).joinpath("README.md").read_text()
    return " ".join(card.partition("## Results")[2].partition("## Training")[0].split())


def test_a_card_says_at_which_step_a_loss_was_measured_and_of_what(config):
    rate = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    changes = {"ema_decay": 0.8, "save_steps": 1, "save_total_limit": None, **rate}
    run = trained(config(eval_steps=6, max_steps=8, **changes))
    assert results(run, 3) == (
        "The model was not evaluated. The model has the newest weights, not an average of those of 3 steps. "
        "The average was not evaluated."
    )
    [first, _] = records(run, "eval_loss")
    assert first["eval_loss_ema"] < first["eval_loss"]
    between, loss = results(run, 7), f"{first['eval_loss_ema']:.4f}"
    measured = f"of step 6, on {first['eval_tokens']:,} held-out tokens: loss {loss} nats"
    assert between.startswith(f"The model of step 7 was not evaluated during the run. The average {measured}")
    assert f"average of the weights of 7 steps. Loss at step 6: {loss} of the average" in between
    # What was measured on other text says nothing of later checkpoints, and is no lower loss than theirs.
    later = config(eval_steps=100, eval_tokens=50, max_steps=10, resume_from_checkpoint="latest", **changes)
    resumed = trained(later)
    assert results(resumed, 9).startswith("The model was not evaluated. The model has the newest weights, not an")
    best = follow(resumed.folder.path / "checkpoint-best").resolve()
    assert resumed.progress.best_step == 10 and best.name == "checkpoint-10"
    assert results(resumed, 10).startswith("On 50 held-out tokens")


class EndAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_a_run_that_ends_before_its_average_begins_says_so(config, capsys):
    run = trained(config(average_last=0.5, eval_steps=6, max_steps=10), EndAfter(4))
    lines = capsys.readouterr().out.splitlines()
    assert "There is no average of the weights: it begins with step 6, and the run ended after step 4." in lines
    [plan] = [line for line in lines if line.startswith("average")]
    assert plan.startswith("average  of the weights after steps 6 to 10, evenly") and "0.0001 GiB" in plan
    assert records(run, "fault")[-1]["average"] == {"steps": 0, "first_step": 6, "is_model": False}
    assert results(run, 4).endswith("Their average, which begins with step 6, has no step yet.")
    # The next run has no step of its own before the first one that it averages.
    later = prepared(config(ema_decay=0.5, eval_steps=6, max_steps=10, resume_from_checkpoint="latest"))
    assert "after steps 5 to 10, exponentially (ema_decay) over about the last 2;" in later.plan.average
    later.folder.close()
    later.average.update(5, StepResult(torch.zeros(()), torch.zeros(()), torch.zeros(1)))
    assert later.average.why_unused({}, 5).startswith("The average of 1 step was not evaluated")


def test_an_average_of_another_kind_starts_at_the_resume(config):
    trained(config(ema_decay=0.8, eval_steps=2, learning_rate=0.1))
    longer = config(average_last=0.5, eval_steps=2, max_steps=8, resume_from_checkpoint="latest")
    assert trained(longer).average.steps == 2
    early = config(ema_decay=0.8, eval_steps=2, max_steps=9, resume_from_checkpoint="latest")
    run = prepared(early)
    assert run.average.steps == 0 and run.progress.evaluation.keys() & {"eval_loss", "eval_loss_ema"} == {"eval_loss"}
    run.folder.close()
    plain = trained(config(eval_steps=2, max_steps=10, resume_from_checkpoint="latest"))
    assert plain.average is None and "eval_loss_ema" not in records(plain, "eval_loss")[-1]
