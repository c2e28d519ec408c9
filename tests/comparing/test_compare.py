"""Runs side by side: figures with known answers, verdicts, logs of other scripts, files as they come."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import SHARED
from running import StopAt, trained

from hfgpt import UserError, cli
from hfgpt.comparing import compare, read_runs
from hfgpt.comparing.derive import NANOGPT_PEAK_TFLOPS
from hfgpt.comparing.render import WIDTH, as_markdown, as_text, write_report
from hfgpt.comparing.report import build_report
from hfgpt.comparing.statistics import FLOOR, level, unpaired_gap, window_start
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.flops import parameter_counts
from hfgpt.training.step import TrainStep

LOGS = SHARED / "reference_logs"
RATED = {"peak_tflops": 80.2, "peak_source": "rated: NVIDIA GeForce RTX 4070 Ti bf16 dense"}


def falling(step):
    """A loss curve without noise."""
    return 3.0 + 4.0 / np.sqrt(1 + step)


def write_run(
    folder, *, steps=400, scale=1.0, noise=0.03, seed=0, every=1, eval_every=20, step_seconds=0.5, tokens_per_step=1024,
    tokens="same", text_noise=None, model=None, config=None, tokenizer="t1", bytes_per_token=4.0, precision="no",
    peak=RATED, ended=True, evaluations=True,
):  # fmt: skip
    """A run folder whose losses are `scale` times the same falling curve, with noise."""
    folder.mkdir(parents=True)
    gpt2 = model_config({"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 128, **(model or {})})
    counts = parameter_counts(gpt2)
    facts = {
        "run_id": folder.name,
        "config": {"seed": seed, "max_steps": steps, "learning_rate": 1e-3, **(config or {})},
        "model": {**gpt2.to_dict(), "parameters": counts.total, "parameters_without_positions": counts[1]},
        "plan": {
            "micro_batch": 4, "sequence_length": 128, "accumulation": tokens_per_step // 512, "processes": 1,
            "tokens_per_step": tokens_per_step, "max_steps": steps, "precision": {"name": precision},
            "torch_compile": {"enabled": False},
        },
        "data": {"tokenizer": tokenizer, "held_out.hash": "h1", "dataset.hash": "d1"},
        "device": "NVIDIA GeForce RTX 4070 Ti",
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts))
    own = np.random.default_rng(seed)
    shared = np.random.default_rng(99).normal(size=steps + 1) * (noise if text_noise is None else text_noise)
    lines, ledger = [{"step": 0, "event": "start"}], []
    for step in range(1, steps + 1):
        at = {"step": step, "num_input_tokens_seen": step * tokens_per_step, "wall_seconds": step * step_seconds}
        scatter = shared[step] if tokens == "same" and text_noise is not None else 0.0
        loss = scale * falling(step) + scatter + own.normal() * noise
        if step == 1 or step % every == 0:
            speed = {"step_seconds": step_seconds, "tokens_per_second": tokens_per_step / step_seconds, "mfu": 0.5}
            lines.append({**at, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, **speed, **peak})
        if evaluations and step % eval_every == 0:
            loss = scale * falling(step) + own.normal() * noise / 10
            bits = loss / math.log(2) / bytes_per_token
            lines.append({**at, "eval_loss": loss, "eval_perplexity": math.exp(loss), "eval_bits_per_byte": bits})
        ledger.append({"step": step, "batch_hash": f"{step if tokens == 'same' else f'{tokens}-{step}'}"})
    if ended:
        lines.append({"step": steps, "event": "end", "fault": None})
    for name, rows in (("metrics.jsonl", lines), ("ledger.jsonl", ledger)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compared(*folders, **options):
    runs = read_runs(folders, **options)
    found = compare(runs)
    json.dumps(found, allow_nan=False)
    report = build_report(runs, found)
    assert as_text(report) and as_text(report, verbose=True) and as_markdown(report, {})
    return found


def shown(*folders, verbose=True):
    """The text on the screen."""
    runs = read_runs(folders)
    return as_text(build_report(runs, compare(runs, all_pairs=verbose)), verbose)


def verdicts(*folders, **options):
    return compared(*folders, **options)["pairs"][0]["verdicts"]


def one(lines, *words):
    """The only line that holds all `words`."""
    (line,) = (line for line in lines if all(word in line for word in words))
    return line


def test_better_at_equal_tokens_and_slower_per_token(tmp_path):
    a = write_run(tmp_path / "a", tokens="a", seed=1)
    b = write_run(tmp_path / "b", tokens="b", seed=2, scale=0.98, step_seconds=1.2)
    found = compared(a, b)
    summary = found["pairs"][0]["verdicts"][0]
    assert re.search(r"b is (1\.[89]|2\.[012]) % better at equal tokens; b is 2\.40x slower per token", summary), (
        summary
    )
    assert found["pairs"][0]["same_tokens"] == {"equal": False, "step": 1, "text": "differ from step 1 on"}
    assert one(found["pairs"][0]["verdicts"], "equal wall time").startswith("b is ")
    assert found["equal"]["steps"]["at"] == 400 and found["equal"]["tokens"]["at"] == 400 * 1024
    assert found["equal"]["wall time"]["at"] == 200  # a's end; b is at step 166 there
    there = found["equal"]["wall time"]["runs"]["b"]
    assert there["eval_loss"] == pytest.approx(0.98 * falling(166.7), abs=0.02)
    assert there["perplexity"] == pytest.approx(math.exp(there["loss"]))


def set_speed(run, seconds_of):
    """Rewrite the speed and the time of each step: seconds_of(step) per step."""
    lines, wall = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], {0: 0.0}
    for step in range(1, lines[-1]["step"] + 1):
        wall[step] = wall[step - 1] + seconds_of(step)
    for line in lines:
        line["wall_seconds"] = wall[line["step"]]
        if "loss" in line:
            line["tokens_per_second"] = 1024 / seconds_of(line["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_large_difference_in_speed_is_named_however_speeds_varied(tmp_path):
    """Half of the steps of a run were slow, because the machine did something else."""
    steady = write_run(tmp_path / "steady")
    for name, slow_steps, words in (
        ("mostly_slow", 240, "mostly_slow is 7.00x slower per token"),  # the medians show it
        (
            "partly_slow",
            80,
            "partly_slow is 2.19x slower per token over the whole run",
        ),  # only the whole run shows it: 320 steps at 1, 80 at 7 times
        ("hardly_slow", 4, "no clear difference in speed"),
    ):
        loaded = set_speed(write_run(tmp_path / name), lambda step, slow=slow_steps: 3.5 if step <= slow else 0.5)
        summary, *lines = verdicts(steady, loaded)
        assert summary.startswith(f"same tokens, same result; {words}"), summary
        report = build_report(runs := read_runs([steady, loaded]), compare(runs))
        assert any(line.startswith(words) for line in report.verdicts[0][1].evidence) == (slow_steps > 4)
        assert slow_steps == 4 or any("at equal wall time" in line and "worse" in line for line in lines)


@pytest.mark.parametrize("every", [1, 10])
def test_the_same_curve_with_other_noise_is_within_noise(tmp_path, every):
    a = write_run(tmp_path / "a", tokens="a", seed=3)
    b = write_run(tmp_path / "b", tokens="b", seed=4, every=every)  # logs at other intervals
    summary, *answers = verdicts(a, b)
    assert summary == "no difference beyond noise at equal tokens; no clear difference in speed"
    assert one(answers, "equal steps and tokens and FLOPs").startswith("no difference beyond noise")


def test_the_band_holds_what_it_promises():
    """95 % of the pairs of equal curves lie within the band, with independent noise and with noise that drifts."""
    for memory, most in ((0.0, 0.08), (0.7, 0.16)):
        random, outside = np.random.default_rng(7), 0
        x = np.arange(1.0, 401.0)
        for _ in range(300):
            curves = []
            for _ in range(2):
                noise = random.normal(size=400) * 0.1
                for i in range(1, 400):
                    noise[i] += memory * noise[i - 1]
                curves.append(pd.Series(falling(x) + noise, x))
            outside += bool(unpaired_gap(*curves, window_start(curves, 400.0), 400.0)["beyond_noise"])
        assert outside / 300 < most


def test_the_sharper_loss_decides_and_the_other_may_object(tmp_path):
    """Text learnt by heart: training losses fall, evaluations rise."""
    a, b = write_run(tmp_path / "a", tokens="a"), write_run(tmp_path / "b", tokens="b", seed=1)
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key, factor in (("loss", 0.9), ("eval_loss", 1.05)):
            line |= {key: line[key] * factor} if key in line else {}
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary, *answers = verdicts(a, b)
    assert re.match(r"b is (4\.[789]|5\.[0-3]) % worse at equal tokens, while the training loss says the opp", summary)
    assert one(answers, "by evaluation loss at equal steps", "training loss")


def test_a_level_does_not_depend_on_where_the_points_lie():
    x, few = np.arange(1.0, 101.0), np.arange(10.0, 101.0, 10.0)
    assert level(pd.Series(5 - 0.01 * x, x), 50.0).value == pytest.approx(4.5)
    assert level(pd.Series(5 - 0.01 * few, few), 50.0).value == pytest.approx(4.5)
    assert level(pd.Series(x[:3], x[:3]), 2.0).error is None


def test_pairing_the_same_tokens_is_sharper(tmp_path):
    """The text of a step moves the losses by 0.3; the runs differ by 0.3 %, which only pairing can tell."""
    options = {"noise": 0.003, "text_noise": 0.3}
    a = write_run(tmp_path / "a", seed=1, evaluations=False, **options)
    b = write_run(tmp_path / "b", seed=2, evaluations=False, scale=0.996, **options)
    pair = compared(a, b)["pairs"][0]
    assert pair["gaps"]["tokens"]["paired"] and pair["gaps"]["tokens"]["loss"]["beyond_noise"]
    assert re.search(r"b is 0\.[345]\d % better at equal tokens", pair["verdicts"][0])
    (b / "ledger.jsonl").unlink()
    pair = compared(a, b)["pairs"][0]
    assert not pair["gaps"]["tokens"]["paired"] and pair["gaps"]["tokens"]["loss"]["beyond_noise"] is False
    assert "not known: b has no ledger" in one(pair["verdicts"], "saw the same tokens")


def test_no_difference_below_the_floor(tmp_path):
    a = write_run(tmp_path / "a", noise=0, evaluations=False)
    b = write_run(tmp_path / "b", noise=0, evaluations=False, scale=1 + FLOOR / 2)
    gap = compared(a, b)["pairs"][0]["gaps"]["steps"]["loss"]
    assert gap["beyond_noise"] is False and gap["percent"] == pytest.approx(50 * FLOOR)


def test_same_tokens_up_to_a_step(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    lines = [json.loads(line) for line in (b / "ledger.jsonl").read_text().splitlines()]
    for line in lines[249:]:
        line["batch_hash"] += "x"
    (b / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pair = compared(a, b)["pairs"][0]
    assert pair["same_tokens"]["equal"] is False and pair["same_tokens"]["step"] == 250
    expected = (
        "same tokens up to step 249, others from step 250 on, same result until then: every training loss that both "
    )
    expected += "recorded is equal"
    assert one(pair["verdicts"], "others from step 250") == expected
    assert not pair["gaps"]["tokens"]["paired"]


def test_hashes_of_different_kinds_say_nothing(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    lines = [json.loads(line) for line in (b / "ledger.jsonl").read_text().splitlines()]
    for line in lines[249:]:
        line["batch_hash"] = f"blocks-{line['batch_hash']}"  # the run was continued by a later version
    (b / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    same = compared(a, b)["pairs"][0]["same_tokens"]
    assert same["equal"] is True and same["step"] == 249
    (b / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[249:]))
    same = compared(a, b)["pairs"][0]["same_tokens"]
    assert same["equal"] is None and "an earlier version" in same["text"]


def test_another_step_size_has_no_hash_in_common(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", tokens_per_step=2048)
    pair = compared(a, b)["pairs"][0]
    assert pair["same_tokens"]["equal"] is None and "steps of 1,024 and 2,048 tokens" in pair["same_tokens"]["text"]
    assert pair["gaps"]["tokens"]["at"] == 400 * 1024  # where the shorter one ends
    assert "at the last common step" not in " ".join(pair["verdicts"])


def test_equal_flops_of_two_sizes(tmp_path):
    a, b = write_run(tmp_path / "a", tokens="a"), write_run(tmp_path / "b", tokens="b", model={"n_layer": 4})
    found = compared(a, b)
    small, large = (run["flops_per_token"] for run in found["runs"])
    assert large > small and found["equal"]["FLOPs"]["at"] == pytest.approx(400 * 1024 * small)
    assert found["settings_that_differ"]["model.n_layer"] == {"a": 2, "b": 4}
    # At a's end of FLOPs b is earlier in its steps, and so higher.
    assert found["equal"]["FLOPs"]["runs"]["b"]["loss"] > found["equal"]["FLOPs"]["runs"]["a"]["loss"]


def test_settings_are_compared_as_resolved(tmp_path):
    own = {"embedding_learning_rate": 0.001, "vector_weight_decay": 0}  # those of a run that does not state them
    a = write_run(tmp_path / "a", config={"min_learning_rate": None, "weight_decay": 0.1, **own})
    b = write_run(tmp_path / "b", config={"min_learning_rate": 1e-4, "per_device_eval_batch_size": 4})
    assert compared(a, b)["settings_that_differ"] == {}
    c = write_run(tmp_path / "c", config={"learning_rate": 2e-3}, precision="bf16")
    assert compared(a, c)["settings_that_differ"] == {
        "learning_rate": {"a": 1e-3, "c": 2e-3},
        "min_learning_rate": {"a": 1e-4, "c": 2e-4},
        "mixed_precision": {"a": "no", "c": "bf16"},
    }


def test_another_vocabulary_is_compared_by_bits_per_byte_alone(tmp_path):
    a = write_run(tmp_path / "a", noise=0.001)
    b = write_run(tmp_path / "b", noise=0.001, tokenizer="t2", tokens="b", scale=0.5, bytes_per_token=1.9)
    found = compared(a, b)
    pair = found["pairs"][0]
    assert not pair["loss_per_token_comparable"]
    # Half the loss per token, and 5 % more per byte: 0.5 * 4 / 1.9.
    assert "loss per token is not comparable; b is 5.3 % worse at equal tokens" in pair["verdicts"][0]
    assert not any("evaluation loss" in line or "training loss" in line for line in pair["verdicts"])
    assert "training loss *" in shown(a, b)


def test_another_vocabulary_without_bytes_has_no_verdict(tmp_path):
    a = write_run(tmp_path / "a", evaluations=False)
    b = write_run(tmp_path / "b", tokenizer="t2", evaluations=False, scale=0.5)
    lines = verdicts(a, b)
    assert "no verdict at equal tokens" in lines[0] and not any("better" in line for line in lines)


def test_no_verdict_by_training_loss_where_dropout_differs(tmp_path):
    a = write_run(tmp_path / "a", tokens="a")
    b = write_run(tmp_path / "b", tokens="b", scale=1.1, model={"resid_pdrop": 0.2}, evaluations=False)
    lines = verdicts(a, b)
    assert "no verdict at equal tokens" in lines[0] and one(lines, "training losses give no verdict", "dropout")


def test_mfu_is_given_against_every_peak_that_is_named(tmp_path):
    """The reference row: 124 M parameters, 9.34 s a step: 15.4 % of 312 TFLOP/s and 59.8 % of 80.2."""
    log = tmp_path / "old.txt"
    shape = "n_layer = 12\nn_head = 12\nn_embd = 768\nblock_size = 1024\nbatch_size = 8\n"
    head = f"{shape}tokens per iteration will be: 524,288\ndefaulting to vocab_size of GPT-2 to 50304 (rounded up)\n"
    rows = [f"iter {n}: loss {falling(n + 1):.4f}, time 9340.00ms, mfu 15.40%\n" for n in range(0, 200, 10)]
    log.write_text(head + "number of parameters: 123.69M\n" + "".join(rows))
    new = write_run(tmp_path / "new")
    found = compared(new, log)
    against = {row["peak_tflops"]: row["mfu"]["old"] for row in found["mfu_against"]}
    assert against == {80.2: pytest.approx(0.598, abs=1e-3), NANOGPT_PEAK_TFLOPS: pytest.approx(0.154, abs=1e-3)}
    assert "A100" in found["mfu_against"][1]["peak_source"]
    old = found["runs"][1]
    assert old["flops_per_token"] == 855_383_040 and old["accumulation"] == 64
    assert old["micro_batch_seconds"] == pytest.approx(9.34 / 64)


def test_an_mfu_above_one_is_noted(tmp_path):
    fast, slow = write_run(tmp_path / "fast"), write_run(tmp_path / "slow")
    rewritten = (slow / "metrics.jsonl").read_text().replace('"peak_tflops": 80.2', '"peak_tflops": 0.02')
    (slow / "metrics.jsonl").write_text(rewritten)
    (note,) = (note for note in compared(fast, slow)["notes"] if note.startswith("fast: an MFU above 1"))
    assert "the 0.02 TFLOP/s of slow" in note  # the run whose peak is wrong
    assert not any("MFU above 1" in note for note in compared(fast)["notes"])


def test_the_highest_peak_measured_on_a_device_holds_for_all_its_runs(tmp_path):
    """Other programs only lower what is measured. A healthy run does not get an MFU above 1 from a loaded one."""
    folders = []
    for name, tflops, size in (("a", 0.2, 512), ("b", 0.001, 1024), ("c", 0.15, 512)):
        peak = {"peak_tflops": tflops, "peak_source": f"measured: {size} x {size} float32 matmul on X, 2 threads"}
        folders.append(write_run(tmp_path / name, peak=peak))
    rated = write_run(tmp_path / "rated")
    found = compared(*folders, rated)
    assert [(row["peak_tflops"], row["stated_by"]) for row in found["mfu_against"]] == [
        (0.2, ["a", "b", "c"]),
        (80.2, ["rated"]),
    ]
    assert "highest of 3 measurements, from 0.001 TFLOP/s on" in found["mfu_against"][0]["peak_source"]
    assert not any("MFU" in note for note in found["notes"])
    rows = build_report(runs := read_runs([*folders, rated]), compare(runs)).tables[2].rows
    labels = [row.label for row in rows if row.label.startswith("MFU")]
    assert labels == ["MFU against 0.2 TFLOP/s of a and 2 more [1]", "MFU against 80.2 TFLOP/s of rated [2]"]


def test_flops_of_a_log_follow_from_its_mfu(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("".join(f"iter {n}: loss 3.0, time 9340.00ms, mfu 15.40%\n" for n in range(5)))
    (run,) = read_runs([log], [524_288])
    assert run.flops_per_token == pytest.approx(855e6, rel=0.01)


def test_a_resumed_run_has_each_step_once(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    lines = (b / "metrics.jsonl").read_text().splitlines()
    resume = {"step": 200, "event": "resume", "changed_settings": {"weight_decay": {"from": 0.1, "to": 0.2}}}
    again = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 201)
    until = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 230)
    lines = [*lines[:until], json.dumps(resume), *lines[again:]]
    (b / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_runs([b])[0]
    assert [record["step"] for record in run.training] == list(range(1, 401))
    assert [record["step"] for record in run.evaluations] == list(range(20, 401, 20))
    found = compared(a, b)
    assert "every training loss that both recorded is equal" in one(found["pairs"][0]["verdicts"], "same result:")
    assert found["settings_that_differ"] == {"weight_decay": {"a": 0.1, "b": "0.1; 0.2 from step 200 on"}}
    assert "resume at step 200" in shown(a, b)


def test_a_run_resumed_with_more_steps_was_planned_longer(tmp_path):
    for n, event in enumerate(
        ({"changed_settings": {"max_steps": {"from": 100, "to": 400}}}, {"max_steps": 400, "changed_settings": {}})
    ):
        run = write_run(tmp_path / f"run{n}")
        for path in (run / "run.json", run / "metrics.jsonl"):
            path.write_text(path.read_text().replace('"max_steps": 400', '"max_steps": 100'))
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 400, "event": "resume", **event}) + "\n")
        (found,) = compared(run)["runs"]
        assert (found["steps"], found["planned_steps"]) == (400, 400)


def test_a_micro_batch_that_memory_made_smaller(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    with open(b / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 99, "event": "oom_retry", "micro_batch": 2, "accumulation": 4}) + "\n")
    found = compared(a, b)
    assert found["settings_that_differ"]["per_device_train_batch_size"] == {"a": 4, "b": "4; 2 from step 99 on"}
    assert found["runs"][0]["micro_batch_seconds"] == 0.25 and found["runs"][1]["micro_batch_seconds"] is None


def test_runs_as_they_come(tmp_path):
    """Different lengths, in progress, losses that are not finite, steps left out, broken lines, no run.json."""
    a = write_run(tmp_path / "a", tokens="a")
    b = write_run(tmp_path / "b", tokens="b", steps=300, ended=False)
    (b / "run.json").unlink()
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "loss": None, "mfu": None} if line["step"] > 290 and "loss" in line else line for line in lines]
    lines.append({"step": 295, "event": "skip_step", "reason": "loss nan, gradient norm nan", "documents": []})
    text = "".join(json.dumps(line) + "\n" for line in lines) + '[1]\n{"step": "x"}\n\xff\n{"step": 301, "lo'
    (b / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    found = compared(a, b)
    assert found["equal"]["steps"]["at"] == 300  # an evaluation is there
    assert found["runs"][1]["state"].startswith("in progress") and found["runs"][1]["planned_steps"] is None
    notes = " ".join(found["notes"])
    for part in ("4 broken lines", "run.json is missing", "from step 291", "still is not", "first is step 295"):
        assert part in notes, notes
    assert "at the last common step a was at 75 % of its length" in " ".join(found["pairs"][0]["verdicts"])


def test_empty_records(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (b / name).write_text("")
    found = compared(a, b)
    assert found["equal"] == {} and found["runs"][1]["state"] == "nothing recorded yet"
    assert "b: no training record yet" in found["notes"]
    assert one(found["pairs"][0]["verdicts"], "at equal steps") == "at equal steps: not known of b"
    (a / "run.json").write_text('{"config": 5, "plan": []}')
    (a / "metrics.jsonl").write_text(
        '{"step": 1, "loss": "x", "num_input_tokens_seen": true}\n{"step": 2, "loss": 3}\n'
    )
    compared(a, b)


@pytest.mark.parametrize("odd", ["x", -1, [], {}, None, 1e308, 10**400, float("nan")])
def test_facts_that_are_not_what_they_should_be(tmp_path, odd):
    a, b = write_run(tmp_path / "a", steps=30), write_run(tmp_path / "b", steps=30)
    facts, first = json.loads((b / "run.json").read_text()), (b / "metrics.jsonl").read_text().splitlines()[5]
    for part, key in (
        ("model", "vocab_size"), ("model", "n_layer"), ("model", "parameters"), ("plan", "tokens_per_step"),
        ("plan", "accumulation"), ("plan", "precision"), ("config", "learning_rate"), ("data", "tokenizer"),
    ):  # fmt: skip
        (b / "run.json").write_text(json.dumps({**facts, part: {**facts[part], key: odd}}))
        compared(a, b)
    (b / "metrics.jsonl").write_text(
        "".join(f"{json.dumps({**json.loads(first), key: odd})}\n" for key in ("loss", "mfu"))
    )
    compared(a, b)


def test_real_runs_that_differ_by_micro_batch_and_accumulation(config, tmp_path):
    shape = {"max_steps": 40, "sequence_length": 16, "logging_steps": 1, "eval_steps": 10}
    trained(config("a", per_device_train_batch_size=16, gradient_accumulation_steps=2, **shape))
    trained(config("b", per_device_train_batch_size=8, gradient_accumulation_steps=4, **{**shape, "logging_steps": 3}))
    found = compared(tmp_path / "a", tmp_path / "b")
    pair = found["pairs"][0]
    assert pair["verdicts"][0].startswith("same tokens, same result;")
    assert one(pair["verdicts"], "no difference beyond noise", "equal steps and tokens and FLOPs")
    assert {"per_device_train_batch_size", "gradient_accumulation_steps"} <= found["settings_that_differ"].keys()
    assert (
        "learning_rate" not in found["settings_that_differ"] and "version of torch" not in found["settings_that_differ"]
    )


class DividedTwice(TrainStep):
    """The loss of each micro-batch is divided by the number of micro-batches once more."""

    def __init__(self, *parts, **options):
        super().__init__(*parts, **options)
        self.attention = lambda ids_BT: {"num_items_in_batch": self.batch.tokens_per_step * self.batch.accumulation}


class GradientsScaled(TrainStep):
    """Gradients are a quarter of what they should be, which Adam hides."""

    def __init__(self, *parts, **options):
        super().__init__(*parts, **options)
        for parameter in self.parameters:
            parameter.register_hook(lambda gradient: gradient / 4)


@pytest.mark.parametrize(("bug", "key"), [(DividedTwice, "loss"), (GradientsScaled, "gradient norm")])
def test_a_planted_bug_is_seen(config, monkeypatch, tmp_path, bug, key):
    trained(config("right", max_steps=12))
    monkeypatch.setattr("hfgpt.training.setup.TrainStep", bug)
    trained(config("wrong", max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=4))
    lines = verdicts(tmp_path / "right", tmp_path / "wrong")
    assert lines[0].startswith("same tokens, different result from step 1 on;")
    assert re.search(rf"\({key} [\d.]+ and [\d.]+\)", lines[1])


def test_a_bug_that_begins_later_is_seen(tmp_path):
    """From step 200 on all losses of b are 2 % higher, as after a resume that lost something."""
    a, b = write_run(tmp_path / "a", noise=0.001, seed=1), write_run(tmp_path / "b", noise=0.001, seed=1)
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "loss" in line and line["step"] > 200:
            line["loss"] *= 1.02
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdicts(a, b)[0].startswith("same tokens, different result from step 201 on")


def test_another_learning_rate_on_the_same_tokens(config, tmp_path):
    trained(config("a", max_steps=40))
    trained(config("b", max_steps=40, learning_rate=1e-3))
    lines = verdicts(tmp_path / "a", tmp_path / "b")
    assert lines[0].startswith("same tokens, different result from step 2 on; b is ") and " worse at equal" in lines[0]


def test_another_result_is_seen_in_sparse_logs(tmp_path):
    """Losses that part slowly, each tenth of the run with few records."""
    a = write_run(tmp_path / "a", every=10, steps=700, text_noise=0.05, noise=0.02, seed=1)
    b = write_run(tmp_path / "b", every=10, steps=700, text_noise=0.05, noise=0.02, seed=2)
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    firsts = {json.loads(line)["step"]: json.loads(line) for line in (a / "metrics.jsonl").read_text().splitlines()}
    for line in lines:
        if "loss" in line:
            noise = 0.0 if line["step"] <= 20 else line["loss"] - firsts[line["step"]].get("loss", line["loss"])
            line["loss"] = (
                firsts[line["step"]].get("loss", line["loss"]) * (1 - 1e-4 * max(0, line["step"] - 20)) + noise
            )
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdicts(a, b)[0].startswith("same tokens, different result from step ")


def test_a_real_run_that_was_killed_and_resumed(config, tmp_path):
    trained(config("whole", max_steps=12))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut", max_steps=12), StopAt(7))
    trained(config("cut", max_steps=12, resume_from_checkpoint="latest"))
    found = compared(tmp_path / "whole", tmp_path / "cut")
    assert found["pairs"][0]["verdicts"][0].startswith("same tokens, same result;")
    assert found["runs"][1]["events"]["resume"] == 1 and found["runs"][1]["state"] == "finished"
    seconds = read_runs([tmp_path / "cut"])[0].curve("wall_seconds")
    assert (np.diff(seconds) > 0).all()


def keep_steps(run, training, evaluations):
    """Leave the folder's run the records at these steps alone."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        line for line in lines
        if "event" in line or line["step"] in (evaluations if "eval_loss" in line else training)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


@pytest.mark.parametrize(
    ("training", "evaluations", "steps"),
    [
        ([1, 10, 12, 20, 30, 40, 50, 60], [20, 40, 60], 60),  # ended at 12, where it logged, and went on from there
        ([1, 10, 13, 23, 33, 40, 43, 50, 53, 60], [20, 40, 60], 60),  # a log every 10 steps from where it resumed
        ([1, *range(3, 61, 3)], [15, 30, 45, 60], 60),
        ([1, 10, 20, 30, 40], [20, 40], 47),  # killed, and not resumed
        ([1, 10, 20, 30, 33], [20], 33),
        ([1, 10, 20, 30, 40, 50], [], 50),
    ],
)
def test_rows_of_one_course_that_was_recorded_at_other_steps_agree(tmp_path, training, evaluations, steps):
    a = write_run(tmp_path / "a", steps=60, seed=3)
    b = write_run(tmp_path / "b", steps=60, seed=3)
    keep_steps(a, [1, *range(10, 61, 10)], [20, 40, 60])
    keep_steps(b, training, evaluations)
    found = compared(a, b)
    assert found["pairs"][0]["same_result"] == {
        "same": True,
        "steps": len({1, *range(10, 61, 10)} & {*training}),
        "largest_part": 0.0,
    }
    for axis in ("steps", "tokens", "FLOPs"):
        point, gaps = found["equal"][axis], found["pairs"][0]["gaps"][axis]
        ours, theirs = point["runs"].values()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12), axis
        assert gaps["loss"]["first"] == pytest.approx(ours["loss"]) and gaps["loss"]["percent"] == 0
        if gaps["eval_loss"]:
            assert (gaps["eval_loss"]["first"], gaps["eval_loss"]["second"]) == (ours["eval_loss"], theirs["eval_loss"])
    if steps == 60:
        assert found["runs"][0]["end_loss"] == pytest.approx(found["runs"][1]["end_loss"], rel=1e-12)


def test_evaluations_are_compared_where_both_have_one(tmp_path):
    a, b = write_run(tmp_path / "a", steps=60, seed=3), write_run(tmp_path / "b", steps=60, seed=3)
    keep_steps(a, range(61), [20, 40, 60])
    keep_steps(b, range(48), [20, 40])
    runs = read_runs([a, b])
    found = compare(runs)
    ours, theirs = found["equal"]["steps"]["runs"].values()
    assert found["equal"]["steps"]["at"] == 47 and found["equal"]["steps"]["eval_loss_at"] == 40
    assert ours["eval_loss"] == theirs["eval_loss"] == runs[0].evaluations[1]["eval_loss"]
    assert "at equal steps (47, evaluated at 40)" in shown(a, b)


def test_three_runs_of_which_two_saw_the_same_tokens(tmp_path):
    a, b = write_run(tmp_path / "a", steps=60, seed=3), write_run(tmp_path / "b", steps=60, seed=3)
    other = write_run(tmp_path / "c", steps=60, seed=4, tokens="other")
    keep_steps(b, [1, 10, 12, 20, 30, 40, 50, 60], [20, 40, 60])
    found = compared(a, b, other)
    losses = [figures["loss"] for figures in found["equal"]["steps"]["runs"].values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[2] != losses[0]
    assert [pair["same_tokens"]["equal"] for pair in found["pairs"]] == [True, False]


def test_a_run_against_itself(tmp_path):
    run = write_run(tmp_path / "a")
    found = compared(run, run, tmp_path / "a" / "metrics.jsonl")
    assert [one["name"] for one in found["runs"]] == ["a", "a (2)", "a (3)"] or len(
        {o["name"] for o in found["runs"]}
    ) == 3
    for pair in found["pairs"]:
        assert pair["same_result"]["largest_part"] == 0.0 and "same tokens, same result" in pair["verdicts"][0]
        assert all(gap["loss"]["percent"] == 0 for gap in pair["gaps"].values())


def test_a_run_that_ended_before_its_first_log(tmp_path, config):
    """Killed in its first step: run.json and a start, no record."""
    trained(config("whole"))
    with pytest.raises(KeyboardInterrupt):
        trained(config("killed"), StopAt(1))
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert not [line for line in lines if '"loss"' in line]
    for runs in (("whole", "killed"), ("killed", "whole"), ("killed", "killed")):
        found = compared(*(tmp_path / name for name in runs))
        assert any("no training record yet" in note for note in found["notes"])
        assert found["equal"] == {} and any("not known" in line for line in found["pairs"][0]["verdicts"])


CONSOLE = """\
Overriding config with config/train.py:
# comment, and a setting with one
batch_size = 12   # micro-batch
Overriding: learning_rate = 0.0006
Overriding: compile = False
Overriding: odd = 3
tokens per iteration will be: 1,536
found vocab_size = 65 (inside data/meta.pkl)
number of parameters: 0.80M
num decayed parameter tensors: 18, with 802,944 parameters
num non-decayed parameter tensors: 9, with 1,152 parameters
step 0: train loss 4.1676, val loss 4.1649
iter 0: loss 4.1828, time 9000.00ms, mfu -100.00%
  ITER  10 :  loss 3.5000 ,  time 100.00ms ,  mfu 2.00%
iter 20: loss 3.0000, time 120.00ms, mfu 2.10%
step 20: train loss 2.9, val loss 3.1
step 20 of 40 done
iter 30: loss nan, time 120.00ms, mfu 2.10%
tokens per iteration will be: 1,536
step 20: train loss 2.8000, val loss 3.0500
iter 20: loss 2.9500, time 5000.00ms, mfu -100.00%
[rank0]: iter 30: loss 2.7000, time 110.00ms, mfu 2.00%
iter 40: loss 2.6"""


def test_a_nanogpt_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(CONSOLE)
    (run,) = read_runs([log])
    # `iter N` is update N + 1; the restart made 20 and 30 again; the last line is cut short.
    assert [(r["step"], r["loss"]) for r in run.training] == [(1, 4.1828), (11, 3.5), (21, 2.95), (31, 2.7)]
    assert [(r["step"], r["eval_loss"]) for r in run.evaluations] == [(0, 4.1649), (20, 3.05)]
    assert run.evaluations[1]["train_eval_loss"] == 2.8
    assert [r.get("mfu") for r in run.training] == [None, 0.02, None, 0.02]
    # The clocks of iterations with a start or an evaluation in them do not count: the median of 9, 0.1, 5 and 0.11 s.
    assert [r.get("step_seconds") for r in run.training] == [None, 0.1, None, 0.11]
    assert run.training[1]["num_input_tokens_seen"] == 11 * 1536
    assert run.model["parameters"] == 804_096 and run.model["vocab_size"] == 65
    assert (
        run.settings["learning_rate"] == 6e-4 and run.settings["torch_compile"] is False and "odd" not in run.settings
    )
    assert run.settings["per_device_train_batch_size"] == 12
    assert "the last line is cut short and was skipped" in run.notes


SHAKESPEARE = """\
Overriding config with config/train_shakespeare_char.py:
# train a miniature character-level shakespeare model
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit
eval_iters = 200
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8 // 40
batch_size = 64
block_size = 256 # context of up to 256 previous characters
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3 # with baby networks can afford to go a bit higher
max_iters = 5000
lr_decay_iters = 5000 # make equal to max_iters usually
min_lr = learning_rate / 10 # usually
# device = 'cpu'  # run on cpu only
Overriding: device = cpu
Overriding: dataset = openwebtext
Overriding: compile = False
Overriding: out_dir = runs/a=b #1
tokens per iteration will be: 16,384
found vocab_size = 65 (inside data/shakespeare_char/meta.pkl)
Initializing a new model from scratch
number of parameters: 10.65M
num decayed parameter tensors: 26, with 10,740,096 parameters
num non-decayed parameter tensors: 13, with 4,992 parameters
using fused AdamW: False
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2649, time 31143.11ms, mfu -100.00%
iter 10: loss 3.1462, time 200.00ms, mfu 2.00%
iter 20: loss 2.7322, time 200.00ms, mfu 2.00%
"""


def read_text(tmp_path, text: str | bytes):
    (tmp_path / "log.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    (run,) = read_runs([tmp_path / "log.txt"])
    return run


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("Overriding: device = cuda:0", "device", "cuda:0"),
        ("Overriding: dataset = my-data_2", "dataset", "my-data_2"),
        ("Overriding: dataset = None", "dataset", None),
        ("Overriding: dataset = it's # not = a comment", "dataset", "it's # not = a comment"),
        ("dataset = openwebtext", "dataset", "openwebtext"),
        ("device = 'cuda' # 'cpu', 'cuda:1'; etc.", "device", "cuda"),
        ("weight_decay = 1e-1", "weight_decay", 0.1),
        ("max_iters = 600_000 # total", "max_steps", 600_000),
        ("gradient_accumulation_steps = 5 * 8 # used to simulate", "gradient_accumulation_steps", 40),
        ("min_lr = learning_rate/10", "min_learning_rate", 1e-4),
        ("max_iters = (600 - 100) * 2", "max_steps", 1000),
        ("max_iters = 10 ** 999999999", "max_steps", "10 ** 999999999"),
        ("max_iters = 1 / 0", "max_steps", "1 / 0"),
        ("max_iters = int(os.environ['N']) # of the cluster", "max_steps", "int(os.environ['N'])"),
        ("batch_size = twelve", "per_device_train_batch_size", "twelve"),
        ("block_size = -1", "sequence_length", -1),
    ],
)
def test_settings_are_read_as_a_configurator_prints_them(tmp_path, line, key, value):
    text = SHAKESPEARE.replace("tokens per iteration", f"{line}\ntokens per iteration")
    run = read_text(tmp_path, text)
    assert run.settings[key] == value
    assert not any("not understood" in note for note in run.notes)
    assert compare([run, run])["runs"][0]["end_loss"] is not None


def test_overrides_stand_over_the_configuration_file(tmp_path):
    run = read_text(tmp_path, SHAKESPEARE)
    assert (run.settings["device"], run.settings["dataset"], run.settings["torch_compile"]) == (
        "cpu",
        "openwebtext",
        False,
    )
    assert run.settings["gradient_accumulation_steps"] == 1 and run.settings["min_learning_rate"] == 1e-4
    assert run.settings["eval_steps"] == 250 and run.settings["per_device_train_batch_size"] == 64


def test_settings_changed_at_a_restart_hold_both_values(tmp_path):
    again = "Overriding: learning_rate = 0.0005\nOverriding: device = cpu\nmax_iters = 7, said the text\n"
    text = f"{SHAKESPEARE}{again}tokens per iteration will be: 16,384\niter 30: loss 2.6, time 200.00ms, mfu 2.00%\n"
    run = read_text(tmp_path, text)
    assert run.settings["learning_rate"] == "0.001; 0.0005 from step 22 on"
    assert run.settings["device"] == "cpu" and run.settings["max_steps"] == 5000


GPT2_LOG = """\
defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)
number of parameters: 123.59M
num decayed parameter tensors: 50, with 124,354,560 parameters
num non-decayed parameter tensors: 25, with 19,200 parameters
iter 0: loss 10.9, time 300.00ms, mfu -100.00%
"""
TENSORS = re.compile("num (non-)?decayed.*\n")


@pytest.mark.parametrize(
    ("text", "total", "without", "flops"),
    [
        # 65 x 384 + 6 x (12 x 384^2 + 2 x 384) + 384, and 256 x 384 positions; no biases, as is usual
        (SHAKESPEARE, 10_745_088, 10_646_784, 6 * 10_646_784 + 12 * 6 * 384 * 256),
        (TENSORS.sub("", SHAKESPEARE), 10_745_088, 10_646_784, 6 * 10_646_784 + 12 * 6 * 384 * 256),
        # With biases: 9 x 384 in each layer, and 13 x 384 of norms.
        (
            TENSORS.sub("", SHAKESPEARE).replace("10.65M", "10.67M"),
            10_770_816, 10_672_512, 6 * 10_672_512 + 12 * 6 * 384 * 256,
        ),
        (
            SHAKESPEARE.replace("4,992", "30,720").replace("dropout", "bias = True\ndropout"),
            10_770_816, 10_672_512, 6 * 10_672_512 + 12 * 6 * 384 * 256,
        ),
        # Nothing is printed of the usual sizes: they are known by the exact number.
        (GPT2_LOG, 124_373_760, 123_587_328, 6 * 123_587_328 + 12 * 12 * 768 * 1024),
        (GPT2_LOG.replace("defaulting", "not said"), 124_373_760, 123_587_328, 6 * 123_587_328 + 12 * 12 * 768 * 1024),
        (
            "Overriding: init_from = gpt2\n" + GPT2_LOG.replace("defaulting to vocab_size of GPT-2 to 50304", "")
            .replace("123.59M", "123.65M").replace("124,354,560", "124,318,464").replace("19,200", "121,344"),
            124_439_808, 123_653_376, 6 * 123_653_376 + 12 * 12 * 768 * 1024,
        ),
        # Sizes that are not printed, or do not give the number: the exact one alone, or none.
        (SHAKESPEARE.replace("n_embd = 384\n", ""), 10_745_088, None, None),
        (SHAKESPEARE.replace("n_layer = 6", "n_layer = 7"), 10_745_088, None, None),
        (TENSORS.sub("", SHAKESPEARE).replace("n_embd = 384\n", ""), None, None, None),
    ],
)  # fmt: skip
def test_the_size_in_a_log_is_one_count(tmp_path, text, total, without, flops):
    run = read_text(tmp_path, TIMES.sub("", text) if flops is None else text)
    found = compare([run])["runs"][0]
    assert (found["parameters"], found["parameters_without_positions"]) == (total, without)
    assert found["flops_per_token"] == flops
    assert (flops is None) == any("number of parameters" in note for note in run.notes)


def test_the_processes_of_a_log_follow_from_its_mfu(tmp_path):
    settings = "batch_size = 12\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\n"
    head = f"{settings}tokens per iteration will be: 491,520\n" + GPT2_LOG
    twice = "".join(f"{line}\n" * 8 for line in head.splitlines())  # each process prints its own
    mfu = 491_520 * 854_770_176 / 0.3 / 8 / 312e12
    rows = "".join(f"iter {n}: loss {9 - n / 100:.4f}, time 300.00ms, mfu {100 * mfu:.2f}%\n" for n in range(1, 30))
    run = read_text(tmp_path, twice + rows)
    assert (run.processes, run.plan["accumulation"], run.flops_per_token) == (8, 5, 854_770_176)
    (row,) = compare([run])["mfu_against"]
    assert row["mfu"]["log"] == pytest.approx(mfu, rel=1e-3) and "one of 8 processes" in " ".join(run.notes)
    assert read_text(tmp_path, SHAKESPEARE).processes == 1


def test_a_step_that_a_restart_makes_larger_counts_from_there(tmp_path):
    lines = [f"iter {n}: loss 3.0, time 100.00ms\n" for n in range(10)]
    text = "tokens per iteration will be: 100\n" + "".join(lines[:6])
    run = read_text(tmp_path, f"{text}tokens per iteration will be: 200\n{''.join(lines[6:])}")
    seen = {record["step"]: record["num_input_tokens_seen"] for record in run.training}
    assert (seen[1], seen[6], seen[7], seen[10]) == (100, 600, 800, 1400)
    assert "its step had 100 tokens, and 200 from step 7 on" in run.notes
    run = read_text(tmp_path, f"{text}tokens per iteration will be: 200\n{''.join(lines[4:])}")  # again from 4
    assert run.training[-1]["num_input_tokens_seen"] == 4 * 100 + 6 * 200


TIMES = re.compile(", time .*")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\r"),
        lambda text: "\ufeff" + text,
        lambda text: text.encode("utf-16"),
        lambda text: re.sub("^", "\x1b[36m[rank0]:\x1b[0m ", text, flags=re.M),
        lambda text: re.sub("(loss|step|iter)", "\x1b[1;31m\\1\x1b[0m\x1b[K", text),
        lambda text: re.sub("^(num.*)$", "\\1\n\\1", text, flags=re.M),
        lambda text: re.sub("^(num dec.*)\n(num non.*)$", "\\1\n\\1\n\\2\n\\2", text, flags=re.M),
        lambda text: text.replace("iter 10", "compiling the model... (takes a ~minute)\n[W1129 torch/_dynamo] iter 10"),
        lambda text: text.replace("iter 10", "[2024-01-02 03:04:05,678] [INFO] iter 10"),
        lambda text: text.replace("iter 10", "\u2028\x85 sampled \x0c text\niter 10"),
    ],
)
def test_a_log_is_read_as_terminals_and_launchers_leave_it(tmp_path, change):
    plain, run = read_text(tmp_path, SHAKESPEARE), read_text(tmp_path, change(SHAKESPEARE))
    assert run.training == plain.training and run.evaluations == plain.evaluations
    assert run.flops_per_token == plain.flops_per_token and run.tokens_per_step == plain.tokens_per_step
    assert run.settings == plain.settings


def test_a_log_cut_between_any_two_bytes_is_read(tmp_path):
    log = tmp_path / "log.txt"
    for end in range(len(CONSOLE)):
        log.write_bytes(CONSOLE[:end].encode())
        try:
            compared(log)
        except UserError as error:
            assert "no line of a known training log" in str(error)


def test_tokens_per_step_of_logs_are_stated(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"iter {n}: loss {4 - n / 100:.4f}\n" for n in range(50)))
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    assert "tokens per step are not in the log" in compared(a, b)["notes"][0]
    assert [run.tokens_per_step for run in read_runs([a, b], [100])] == [100, 100]
    assert [run.tokens_per_step for run in read_runs([a, b], [100, 200])] == [100, 200]
    assert compared(a, b, tokens_per_step=[100, 200])["equal"]["tokens"]["at"] == 5000
    for wrong in ([0], [1, 2, 3]):
        with pytest.raises(UserError, match="tokens_per_step"):
            read_runs([a, b], wrong)


def test_logs_of_other_vocabularies_are_known_by_their_first_loss(tmp_path):
    for name, start in (("char", 4.17), ("gpt2", 10.97)):
        rows = (f"iter {n}: loss {1 + (start - 1) / (1 + n):.4f}\n" for n in range(50))
        (tmp_path / f"{name}.txt").write_text("".join(rows))
    lines = verdicts(tmp_path / "char.txt", tmp_path / "gpt2.txt")
    assert "not comparable" in lines[0] and one(lines, "first losses of 4.17 and 10.97")


@pytest.mark.skipif(not LOGS.is_dir(), reason="the reference logs are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "kind", "steps", "evaluation"),
    [
        ("nanogpt_shakespeare_char_reference.txt", "nanoGPT log", 2001, (2000, 1.8857)),
        ("llmc_adamw_gpt2_124M_fineweb10B_9536steps.log", "llm.c log", 9536, (9536, 3.275959)),
        ("llmc_gpt2_124M_fineweb10B_19560steps.log", "llm.c log", 19560, (19560, 3.2722)),
        ("build_nanogpt_gpt2_124M_finewebedu_epoch1.tsv", "table", 19073, (19072, 3.0717)),
    ],
)
def test_each_reference_log_is_read_and_compared(tmp_path, name, kind, steps, evaluation):
    found = compared(LOGS / name, LOGS / name, write_run(tmp_path / "run"), tokens_per_step=[524_288])
    facts = found["runs"][0]
    assert (facts["kind"], facts["steps"]) == (kind, steps)
    assert (facts["eval_step"], facts["eval_loss"]) == evaluation
    assert facts["tokens"] == steps * 524_288
    assert found["pairs"][0]["verdicts"][0].startswith("no difference beyond noise at equal tokens")


@pytest.mark.skipif(not LOGS.is_dir(), reason="the reference logs are not beside this checkout")
def test_reference_logs_against_each_other():
    one_run = LOGS / "llmc_adamw_gpt2_124M_fineweb10B_9536steps.log"
    other = LOGS / "llmc_gpt2_124M_fineweb10B_19560steps.log"
    lines = verdicts(one_run, other, tokens_per_step=[524_288])
    assert "3.8 % worse at equal tokens, if text and tokenizer are the same" in lines[0]
    assert one(lines, "was at 49 % of its length")
    assert "not comparable" in verdicts(one_run, LOGS / "nanogpt_shakespeare_char_reference.txt")[0]


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["hfgpt", "compare", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_the_command(monkeypatch, capsys, tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "long-name-of-a-run-that-goes-on-and-on", tokens="b", scale=0.97)
    c = write_run(tmp_path / "c", config={"dataset": "/data/" + "deep/" * 40})
    for runs in ([a], [a, b], [a, b, c], [a, b, c, "--verbose"]):
        code, out, err = command(monkeypatch, capsys, *runs)
        assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= WIDTH
    assert "against a:" in out and "c against long-name" in out
    (tmp_path / "new").mkdir()
    code, out, err = command(monkeypatch, capsys, a, b, "--json", "--output", tmp_path / "new" / "report.md")
    assert code == 0 and json.loads(out)["pairs"][0]["a"] == "a" and err.startswith("written: ")
    report = (tmp_path / "new" / "report.md").read_text()
    assert (
        report.splitlines()[2].startswith("**long-name-of-a-run-that-goes-on-and-on against a: other tokens") is False
    )
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", report)
    assert pictures == [f"report_{name}.png" for name in ("loss_tokens", "loss_time", "loss_flops", "speed", "mfu")]
    for picture in pictures:
        assert (tmp_path / "new" / picture).read_bytes().startswith(b"\x89PNG")


def test_the_report_of_one_run(tmp_path):
    text = write_markdown(tmp_path / "a.md", write_run(tmp_path / "a"))[-1].read_text()
    for part in (
        "learning\\_rate",
        "tokens/s",
        "MFU against 80.2",
        "evaluation loss",
        "time of training",
        "finished",
        "step 400",
    ):
        assert part in text
    assert "Noise:" not in text


def test_the_title_is_of_no_order(tmp_path):
    text = write_markdown(tmp_path / "r.md", write_run(tmp_path / "a"), write_run(tmp_path / "b"))[-1].read_text()
    assert text.startswith("# a, b\n") and "**b against a: " in text
    assert "run folder" not in text and "averaged from step" in text


def test_without_matplotlib_png_is_one_line_and_nothing_is_written(monkeypatch, capsys, tmp_path):
    a = write_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for name in ("x.png", "x.md"):
        code, out, err = command(monkeypatch, capsys, a, "--output", tmp_path / name)
        assert (code, out) == (2, "") and err.count("\n") == 1 and "pip install matplotlib" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert command(monkeypatch, capsys, a, "--output", tmp_path / "x.html")[0] == 0


def test_png_is_drawn_in_a_shell_of_a_notebook_with_a_backend_that_is_not_here():
    code = "import os; from hfgpt.comparing.png import new_figure; new_figure(); print(os.environ['MPLBACKEND'])"
    backend = "module://matplotlib_inline.backend_inline.not_here"
    environment = {**os.environ, "MPLBACKEND": backend}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == backend


def write_markdown(path, *folders):
    runs = read_runs(folders)
    return write_report(path, build_report(runs, compare(runs), with_plots=True))


def test_plots_of_an_earlier_report_are_removed(tmp_path):
    write_markdown(tmp_path / "r.md", write_run(tmp_path / "a"))
    assert (tmp_path / "r_mfu.png").exists()
    (tmp_path / "log.txt").write_text("iter 0: loss 4.0\niter 1: loss 3.9\n")
    write_markdown(tmp_path / "r.md", tmp_path / "log.txt")
    assert not (tmp_path / "r_mfu.png").exists() and (tmp_path / "r_loss_steps.png").exists()


def test_the_screen_shows_the_verdict_and_three_notes(tmp_path):
    """Everything else is behind --verbose: all rows, notes and events, and every pair of runs."""
    a, b = write_run(tmp_path / "a", tokens="a"), write_run(tmp_path / "b", tokens="b", scale=0.97, tokenizer="t2")
    with open(b / "metrics.jsonl", "a") as file:
        for step in range(5):
            file.write(json.dumps({"step": 390 + step, "event": "skip_step", "reason": "loss nan"}) + "\n")
    (a / "run.json").write_text((a / "run.json").read_text().replace('"h1"', '"h2"'))
    c = write_run(tmp_path / "c", steps=100, tokens="c", model={"resid_pdrop": 0.2})
    short, verbose = shown(a, b, c, verbose=False), shown(a, b, c)
    for section in short[short.index("b against a") :].split("\n\n")[:2]:
        assert section.count("\n  - ") <= 2 + 3 + 1
    assert short.count(" against ") < verbose.count(" against ") and "c against b" not in short
    assert "more with --verbose" in short and "more with --verbose" not in verbose
    for detail in ("skip_step at step 390", "Noise: ", "FLOPs per token", "at equal wall time"):
        assert detail in verbose and detail not in short
    assert all(part in short for part in ("tokens/s", "MFU against", "at equal tokens", "settings that differ"))


def test_wrong_use_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_bytes(b"\x00\xffnothing of a run\n")
    a = write_run(tmp_path / "runs" / "a")
    for arguments, message in (
        ([tmp_path / "none"], "no such folder"),
        ([tmp_path / "empty"], "no run.json or metrics.jsonl"),
        ([tmp_path / "runs"], "give one of those in it: a"),
        ([tmp_path / "notes.txt"], "no line of a known training log"),
        ([a, "--output", tmp_path], "is a folder"),
        ([a, "--output", tmp_path / "x.pdf"], "ends in .md, .html or .png"),
        ([a, "--output", tmp_path / "notes.txt" / "x.md"], "cannot be written"),
        ([a, "--output", tmp_path / "no" / "where" / "x.html"], "there is no folder"),
        ([a, "--tokens_per_step", "many"], "tokens_per_step"),
        ([], "run"),
    ):
        code, out, err = command(monkeypatch, capsys, *arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and message.lower() in err.lower(), err
