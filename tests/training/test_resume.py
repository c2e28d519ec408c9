"""A run that was interrupted, or goes on otherwise than it began, against one that was left alone."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from running import MODEL, StopAt, hashes, records, same_weights, trained
from transformers import AutoModelForCausalLM, TrainerCallback

from hfgpt import Pretrainer, UserError
from hfgpt.errors import RunError


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
    assert resumed.progress.step == 6
    assert same_weights(whole, resumed)
    for key in ("loss", "learning_rate", "grad_norm", "num_input_tokens_seen", "step"):
        assert [line[key] for line in records(whole)] == [line[key] for line in records(resumed)], key
    assert [line["eval_loss"] for line in records(whole, "eval_loss")] == [
        line["eval_loss"] for line in records(resumed, "eval_loss")
    ]
    assert hashes(whole) == hashes(resumed) and len(set(hashes(whole))) == 6


def test_more_steps_after_the_end_keep_the_curve(config, caplog):
    trained(config())
    longer = trained(config(max_steps=8, resume_from_checkpoint="latest"))
    rates = [line["learning_rate"] for line in records(longer)]
    peak = rates.index(max(rates))
    assert len(rates) == 8 and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert "ends at step 6" in caplog.text


def test_a_finished_run_resumes_to_its_result(config):
    first = trained(config(eval_steps=3))
    lines = len(first.folder.metrics.read_text().splitlines())
    again = Pretrainer(config(eval_steps=3, resume_from_checkpoint="latest"))
    assert again.train()["eval_loss"] == records(first, "eval_loss")[-1]["eval_loss"]
    assert len(again.run.folder.metrics.read_text().splitlines()) <= lines + 2


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
    run = trained(config()).folder
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


def test_a_refused_resume_names_every_difference_and_prints_no_change(config, caplog):
    trained(config())
    changes = {"seed": 2, "model": {**MODEL, "n_layer": 3}, "learning_rate": 5e-3}
    with pytest.raises(UserError) as caught:
        trained(config(resume_from_checkpoint="latest", **changes))
    message = str(caught.value)
    assert "seed (" in message and "model.n_layer: 2 there, 3 here" in message and "--init_from" in message
    assert "from here on" not in caplog.text


def test_the_plan_of_a_resumed_run_names_its_checkpoint(config, capsys):
    folder = trained(config()).folder
    (folder.checkpoint(6) / "model.safetensors").write_bytes(b"")
    capsys.readouterr()
    trained(config(resume_from_checkpoint="latest"))
    assert re.search(r"^resume   from .*checkpoint-\d, step \d; skipped: checkpoint-6$", capsys.readouterr().out, re.M)
    trained(config(resume_from_checkpoint="latest"))
    assert "checkpoint-6, step 6; already finished at step 6" in capsys.readouterr().out


def test_fewer_steps_than_the_checkpoint_has_are_refused(config):
    trained(config())
    with pytest.raises(UserError, match=r"max_steps=3: .*checkpoint-6 is at step 6"):
        trained(config(resume_from_checkpoint="latest", max_steps=3))


def test_the_same_step_cut_otherwise_may_resume(config):
    whole = trained(config("whole"))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut"), StopAt(5))
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    resumed = trained(config("cut", resume_from_checkpoint="latest", **changes))
    assert hashes(resumed) == hashes(whole)
    for one, other in zip(records(whole), records(resumed), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)


def test_resuming_from_an_earlier_step_leaves_the_later_course_aside(config, caplog):
    trained(config())
    earlier = str(Path(config().output_dir) / "checkpoint-2")
    again = trained(config(max_steps=5, save_steps=1, save_total_limit=1, resume_from_checkpoint=earlier))
    assert [path.name for path in again.folder.checkpoints()] == ["checkpoint-5"]
    assert (again.folder.path / "checkpoint-latest").resolve().name == "checkpoint-5"
    aside = list(again.folder.path.glob("abandoned-*-checkpoint-*"))
    assert len(aside) == 2 and all(f"is set aside as {path.name}" in caplog.text for path in aside)


def test_an_untied_head_is_saved_and_resumed(config):
    model = {**MODEL, "tie_word_embeddings": False}
    whole = trained(config("whole", model=model))
    trained(config("cut", model=model, max_steps=4, lr_scheduler_type="constant", warmup_steps=0))
    straight = trained(config("straight", model=model, lr_scheduler_type="constant", warmup_steps=0))
    options = {"resume_from_checkpoint": "latest", "lr_scheduler_type": "constant", "warmup_steps": 0}
    assert same_weights(trained(config("cut", model=model, **options)), straight)
    stock, info = AutoModelForCausalLM.from_pretrained(
        whole.folder.path / "checkpoint-latest", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(stock.lm_head.weight, whole.step.model.lm_head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_every_kind_of_run_resumes_bit_for_bit(config, tmp_path, optim, compiled, dropout, accumulation):
    options = {
        "model": {**MODEL, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout},
        "optim": optim,
        "torch_compile": compiled,
        "gradient_accumulation_steps": accumulation,
    }
    torch.compiler.reset()  # after many models it would run the next one uncompiled
    whole = trained(config("whole", **options))
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "cut" / "checkpoint-2")
    resumed = trained(config("cut", resume_from_checkpoint="latest", **options))
    assert [line["loss"] for line in records(resumed)] == [line["loss"] for line in records(whole)][2:]
    assert same_weights(whole, resumed)
    ours, theirs = (run.step.optimizer.state_dict()["state"] for run in (whole, resumed))
    assert ours.keys() == theirs.keys() and len(ours) > 0
    assert all(torch.equal(value, theirs[key][name]) for key in ours for name, value in ours[key].items())


def test_a_stretched_curve_goes_on_where_it_was_and_ends_with_the_run(config, caplog):
    constant_end = {"learning_rate": 1e-2, "min_learning_rate": 1e-3, "max_steps": 8}
    whole = trained(config("whole", **constant_end))
    rates = [line["learning_rate"] for line in records(whole)]
    for count, name in ((12, "longer"), (6, "shorter")):
        with pytest.raises(KeyboardInterrupt):
            trained(config(name, **constant_end), StopAt(5))
        options = {"resume_from_checkpoint": "latest", "lr_schedule_on_resume": "stretch"}
        run = trained(config(name, **{**constant_end, "max_steps": count}, **options))
        assert f"ended at step 8, is stretched to max_steps={count}" in caplog.text
        stretched = [line["learning_rate"] for line in records(run)]
        assert stretched[:4] == rates[:4]
        assert stretched[1:] == sorted(stretched[1:], reverse=True)
        assert stretched[-1] == pytest.approx(1e-3) and len(stretched) == count


def test_a_stretched_curve_is_itself_resumed(config):
    options = {"max_steps": 9, "lr_schedule_on_resume": "stretch", "resume_from_checkpoint": "latest"}
    for name, stops in (("once", []), ("twice", [7])):
        with pytest.raises(KeyboardInterrupt):
            trained(config(name), StopAt(3))
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                trained(config(name, **options), StopAt(stop))
    once, twice = (trained(config(name, **options)) for name in ("once", "twice"))
    assert [line["learning_rate"] for line in records(once)] == [line["learning_rate"] for line in records(twice)]
    assert same_weights(once, twice)


def test_another_optimizer_does_not_take_up_the_state(config):
    trained(config())
    with pytest.raises(UserError, match=r"optim=muon: .* was saved with optim=adamw; set --optim adamw"):
        trained(config(resume_from_checkpoint="latest", optim="muon", max_steps=8))


def test_rows_passed_over_are_counted_on_over_resumes(config, tmp_path):
    texts = [f"document {n} says {n * n % 101}" if n % 3 else None for n in range(400)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"dataset": str(tmp_path / "text.jsonl"), "streaming": True, "tokenizer": "bpe-300", "max_steps": 12}
    whole = trained(config("whole", **options))
    for stop in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            trained(config("cut", resume_from_checkpoint="latest", **options), StopAt(stop))
    resumed = trained(config("cut", resume_from_checkpoint="latest", **options))
    counts = [records(run, "skipped_rows")[-1]["skipped_rows"] for run in (whole, resumed)]
    assert counts[0] == counts[1] and counts[0]["null"] > 100 and counts[0]["eval_null"] > 0


def test_one_process_trains_again_in_another_precision_and_evaluates_between(config):
    """As in a notebook: float32, bf16, float32, with what Accelerate keeps for a process renewed each time."""
    from hfgpt.evaluation.evaluate import evaluate_checkpoint, score_text

    first = trained(config("first", eval_steps=6))
    lower = trained(config("lower", eval_steps=6, mixed_precision="bf16"))
    assert lower.machine.precision.name == lower.machine.accelerator.mixed_precision == "bf16"
    source = {"dataset": first.config.dataset, "name": None, "split": "train", "revision": None, "text_column": "text"}
    checkpoint = str(first.folder.checkpoint(6))
    found = evaluate_checkpoint(checkpoint, lambda subject: score_text(subject, source))
    assert found["precision"] == "float32" and found["loss"] > 0
    again = trained(config("again", eval_steps=6))
    assert same_weights(first, again) and not same_weights(first, lower)
    assert again.machine.accelerator.mixed_precision == "no"
    assert [line["eval_loss"] for line in records(first, "eval_loss")] == [
        line["eval_loss"] for line in records(again, "eval_loss")
    ]


def test_another_number_of_threads_at_resume_is_said_and_recorded(config, caplog):
    before = torch.get_num_threads()
    trained(config())
    try:
        torch.set_num_threads(before - 1 or 2)
        resumed = trained(config(resume_from_checkpoint="latest", max_steps=7))
        used = resumed.plan.choices()["threads"]
    finally:
        torch.set_num_threads(before)
    [record] = records(resumed, "changed_settings")
    expected = {"threads": {"from": before, "to": used}} if used != before else {}
    assert record["changed_settings"] == {"max_steps": {"from": 6, "to": 7}, **expected}


def test_rates_of_groups_are_in_plan_and_records_and_so_is_a_change_of_them(config, capsys):
    own = {"embedding_learning_rate": 3e-2, "vector_learning_rate": 2e-3, "embedding_weight_decay": 0}
    run = trained(config(max_steps=4, **own))
    shown = "matrices 0.01 (weight decay 0.1); embeddings 0.03 (weight decay 0); vectors 0.002 (weight decay 0)"
    assert f"groups   {shown}" in capsys.readouterr().out
    groups = json.loads(run.folder.run_json.read_text())["plan"]["parameter_groups"]
    assert groups["embeddings"] == {"learning_rate": 3e-2, "weight_decay": 0}
    assert groups["vectors"] == {"learning_rate": 2e-3, "weight_decay": 0}
    for line in records(run):
        assert line["embedding_learning_rate"] == pytest.approx(3 * line["learning_rate"])
        assert line["vector_learning_rate"] == pytest.approx(0.2 * line["learning_rate"])
    options = {"max_steps": 6, "resume_from_checkpoint": "latest", "lr_schedule_on_resume": "stretch"}
    resumed = trained(config(**{**own, **options, "embedding_learning_rate": None}))
    [record] = records(resumed, "changed_settings")
    assert record["changed_settings"]["embedding_learning_rate"] == {"from": 3e-2, "to": None}
    assert {"vector_learning_rate", "embedding_weight_decay"}.isdisjoint(record["changed_settings"])
    assert "embedding_learning_rate" not in records(resumed)[-1] and "vector_learning_rate" in records(resumed)[-1]


class SignalAt(TrainerCallback):
    """As a signal that arrives at the end of a step, before its evaluation; at the step of a start: at once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.pretrainer.run.signals.received = signal.SIGTERM

    on_train_begin = on_step_end


@pytest.mark.parametrize("last", [6, 7])
def test_an_evaluation_that_a_signal_broke_off_is_made_up_for(config, last):
    """Stopped in each evaluation, and in those that make up for one: the records of the run left alone."""
    changes = {"eval_steps": 2, "max_steps": last, "save_steps": 3}
    whole = trained(config("whole", **changes))
    for step in (2, 2, 3, 4, 6, 6, last):
        signalled = SignalAt(step)
        run = signalled.pretrainer = Pretrainer(config("cut", resume_from_checkpoint="latest", **changes), [signalled])
        with pytest.raises(RunError, match="SIGTERM; ended after step"):
            run.train()
    resumed = trained(config("cut", resume_from_checkpoint="latest", **changes))
    assert same_weights(whole, resumed)
    kept = [[(line["step"], line["eval_loss"]) for line in records(run, "eval_loss")] for run in (whole, resumed)]
    assert kept[0] == kept[1] and [step for step, _ in kept[0]] == sorted({2, 4, 6, last})
