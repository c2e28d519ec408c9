"""`hfgpt sweep`: its grid, runs that stop and go on, the table, the best point and its noise, laws over sizes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from accelerate.state import AcceleratorState, GradientState
from running import ROOT, lines
from test_cli import command

from hfgpt import UserError
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.cli import sweep
from hfgpt.comparing.scaling import fit_scaling
from hfgpt.comparing.short_values import shorten
from hfgpt.comparing.sweep import SweptRun, summarize_sweep
from hfgpt.comparing.sweep_report import as_text, build_sweep_plots, write_sweep
from hfgpt.settings.grid import LONGEST_NAME, label, read_grid, split

RECIPE = """
from hfgpt import PretrainConfig, Pretrainer, run_recipe
CONFIG = dict(
    model=dict(n_layer=1, n_head=1, n_embd=16, n_positions=16), dataset={text!r}, tokenizer="char", sequence_length=16,
    per_device_train_batch_size=4, max_steps=5, logging_steps=1, eval_steps=1, eval_tokens=200, torch_compile=False,
    mixed_precision="no", mfu_peak_tflops=1.0, report=False,
)
def main():
    Pretrainer(PretrainConfig.from_cli(CONFIG)).train()
if __name__ == "__main__":
    run_recipe(main)
"""
GRID = ["--learning_rate", "1e-3,3e-2", "--seed", "1,2"]
NAMES = [f"learning_rate={rate},seed={seed}" for rate in ("0.001", "0.03") for seed in (1, 2)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    text = "".join(f"{n * n % 97} words, line {n}: the {n % 13}th of {n // 7}.\n" for n in range(600))
    (folder / "text.txt").write_text(text)
    (folder / "recipe.py").write_text(RECIPE.format(text=str(folder / "text.txt")))
    return folder / "recipe.py"


def launch_here(command, log, signals):
    """As `sweep.launch`, in this process."""
    launched.append(command)
    for state in (AcceleratorState, GradientState):
        state._reset_state(**({"reset_partial_state": True} if state is AcceleratorState else {}))
    before, sys.argv = sys.argv, command[1:]
    try:
        with open(log, "a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            runpy.run_path(command[1], run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    return 0


launched: list[list[str]] = []


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `hfgpt sweep` with its points in this process; returns exit code, stdout and stderr."""
    monkeypatch.setattr(sweep, "launch", launch_here)
    launched.clear()
    return lambda *arguments: command(monkeypatch, capsys, "sweep", *map(str, arguments))


@pytest.fixture(scope="module")
def swept(recipe):
    """A finished sweep of two learning rates and two seeds, and what it printed as JSON."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(open(recipe.parent / "out", "w+")) as out:
        patch.setattr(sweep, "launch", launch_here)
        patch.setattr(
            sys, "argv", ["hfgpt", "sweep", str(recipe), *GRID, "--json", "--output_dir", f"{recipe.parent}/s"]
        )
        from hfgpt import cli

        cli.main()
    out.seek(0)
    return recipe.parent / "s", json.loads(out.read())


def test_values_split_at_commas_outside_of_brackets_and_quotes():
    assert split("1e-3, 3e-3") == ["1e-3", "3e-3"]
    assert split('{"a": 1, "b": [2, 3]},gpt2-125m') == ['{"a": 1, "b": [2, 3]}', "gpt2-125m"]
    assert split("[{dataset: a, weight: 1}]") == ["[{dataset: a, weight: 1}]"]
    assert split("'a,b.txt',c.txt") == ["a,b.txt", "c.txt"]
    assert split("it's.txt,that's.txt") == ["it's.txt", "that's.txt"]
    assert split('{"a": "},"},2') == ['{"a": "},"}', "2"]
    assert split("1,,2") == ["1", "", "2"]


def test_points_are_named_by_their_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.txt").touch()
    models = 'gpt2-40m,{size: gpt2-40m, n_layer: 3},{"n_layer": 2, "n_head": 2, "n_embd": 32}'
    flags = [
        "--model",
        models,
        "--learning_rate=1e-3,0.001,1e-5",
        "--report_to",
        "wandb,trackio",
        "--dataset",
        "a,b.txt",
    ]
    points, notes = read_grid(flags)
    assert len(points) == 6 and len({point.name for point in points}) == 6
    assert points[0].name == "learning_rate=0.001,model=gpt2-40m" and "learning_rate=1e-05" in points[1].name
    assert points[-1].flags == [
        "--report_to=wandb,trackio", "--dataset=a,b.txt", '--model={"n_layer": 2, "n_head": 2, "n_embd": 32}',
        "--learning_rate=1e-5",
    ]  # fmt: skip
    assert notes == ["report_to=wandb,trackio: a list itself, the same in all points; not swept"]
    for value in ("a/b", "a-b", "A-b", "a:b", "x" * 300, "é", "..", "con.", 'q"?', {"n_layer": 1}, {"n_layer": 2}):
        assert re.fullmatch(r"[a-z0-9_.+-]{1,40}(?<!\.)", label(value))
    assert len({label(value) for value in ("a/b", "a-b", "A-b", "A/b", "a_b")}) == 5
    models = "gpt2-40m,{size: gpt2-40m},{n_layer: 2, n_embd: 24},{n_embd: 24, n_layer: '2'}"
    for key, values in ("model", models), ("tokens_per_step", "64,[[0, 64]],[[0, 64], [1e3, 128]],[[0,64],[1000,128]]"):
        assert len(read_grid([f"--{key}", values])[0]) == 2  # the same under two spellings
    names = [point.name for point in read_grid(["--tokenizer", ",".join("x" * n for n in range(25, 29)), *GRID])[0]]
    long = ["--eval_steps=1,2", "--adam_beta1=0.91,0.92", "--per_device_train_batch_size=1,2", "--sample_steps=10,20"]
    names += [point.name for point in read_grid([*GRID, *long])[0]]
    assert len(set(names)) == len(names) and max(map(len, names)) == LONGEST_NAME


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--seed", "1,,2"], "seed: needs a value; commas must have one on both sides"),
        (["--seed", "1,2", "--learning_rate", "1,x,-2"], "learning_rate=x: must be a number; learning_rate=-2.0: must"),
        (["--model", "gpt2-40m,gpt2-41m"], "model=gpt2-41m: no such size; did you mean gpt2-40m?"),
        (["--model", '{"n_layer": 2,'], "model={\"n_layer\": 2,: must be"),
        (["--learning_rat", "1,2"], "--learning_rat: no such setting; did you mean --learning_rate?"),
        (["--max_steps", "2,4", "--max_tokens", "256"], "max_steps and max_tokens are both given; keep one"),
        (["--seed", "1,2", "--push_to_hub"], "push_to_hub=true: a sweep pushes nothing"),
        (["--seed", "1,2", "--resume_from_checkpoint", "best"], "resume_from_checkpoint: an unfinished point"),
        (["--seed", "1,2", "--config_file", "no.yaml"], "config_file=no.yaml: there is no such file"),
        (["--seed", "1,2", "--config", "no.yaml"], "config=no.yaml: No such file"),
        (["--seed", ",".join(map(str, range(1001)))], "the grid has more than 1,000 points"),
        (["--seed", "1,2", "--table_only"], "holds no run of this grid; leave out --table_only"),
        (["--seed", "1,2", "more"], "more: not a flag"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_nothing_is_written(flags, line, recipe, run, tmp_path):
    code, out, err = run(recipe, *flags, "--output_dir", tmp_path / "s")
    assert (code, out) == (2, "") and line in err and err.startswith("error: ") and err.count("\n") == 1
    assert not launched and not (tmp_path / "s").exists()
    assert "RECIPE=no.py: there is no such file" in run("no.py", "--seed", "1,2")[2]


def test_the_table_has_the_values_of_the_runs(swept):
    folder, found = swept
    assert [point["name"] for point in found["points"]] == NAMES
    for point in found["points"]:
        records, evaluations = lines(folder / point["name"]), lines(folder / point["name"], "eval_loss")
        assert point["loss"] == point["eval_loss"] == evaluations[-1]["eval_loss"]
        assert point["eval_bits_per_byte"] == evaluations[-1]["eval_bits_per_byte"]
        assert point["tokens_per_second"] == np.median([record["tokens_per_second"] for record in records])
        assert point["tokens"] == 5 * 4 * 16 and point["state"] == "finished" and point["error"] is None
    assert (folder / "sweep_learning_rate.png").read_bytes().startswith(b"\x89PNG")
    page = ElementTree.fromstring((folder / "sweep.html").read_text(encoding="utf-8"))  # well-formed
    text = " ".join(page.itertext())
    assert found["verdict"] in text and "Evaluation loss against learning_rate" in text
    assert sum("evaluation loss at learning_rate 0.0" in title.text for title in page.iter("title")) == 2


def test_best_point_and_noise_over_seeds(swept):
    _, found = swept
    losses = np.array([point["loss"] for point in found["points"]]).reshape(2, 2)
    means, stds = losses.mean(axis=1), losses.std(axis=1, ddof=1)
    best, worse = np.argsort(means)
    first = found["groups"][0]
    assert first["settings"] == {"learning_rate": [0.001, 0.03][best]} == found["best"]["settings"]
    assert np.allclose([first["value"], first["std"], first["count"]], [means[best], stds[best], 2])
    assert first["noise"] == pytest.approx(12.706 * stds[best] / np.sqrt(2))
    a, b = stds[best] ** 2 / 2, stds[worse] ** 2 / 2
    freedom = (a + b) ** 2 / (a**2 + b**2)  # between 1 and 2
    band = max(np.interp(freedom, [1, 2], [12.706, 4.303]) * np.sqrt(a + b), 0.001 * means[best])
    assert found["gap"]["band"] == pytest.approx(band)
    assert found["gap"]["beyond_noise"] == (means[worse] - means[best] > band)
    assert f"{means[best]:.4f}, mean of 2 seeds" in found["verdict"]
    text = as_text(found).splitlines()
    assert text[2].split()[:2] == [str([0.001, 0.03][best]), f"{means[best]:.4f}"]
    (plot,) = build_sweep_plots(found)
    assert plot.describe_place(plot.x[0]) == "learning_rate 0.001"
    assert np.allclose(plot.curves[0].trend, means) and len(plot.curves[0].noise) == 2


def test_averages_rank_if_they_are_stated_and_otherwise_are_noted(recipe, run, tmp_path):
    of_average = "eval_loss_ema"
    for flags, metric in (
        (["--ema_decay", "0.5,0.9"], "eval_loss"),
        (["--ema_decay", "0.5,0.9", "--metric_for_best_model", of_average], of_average),
        (["--average_last", "0.4,0.9"], of_average),
    ):
        _, out, _ = run(recipe, *flags, "--json", "--output_dir", tmp_path / flags[0] / metric)
        result = json.loads(out)
        assert result["metric"] == metric
        ends = {point["path"]: lines(Path(point["path"]), metric)[-1][metric] for point in result["points"]}
        assert [point["loss"] for point in result["points"]] == list(ends.values())
        assert result["groups"][0]["value"] == min(ends.values())
        assert ("not of their averages" in result["notes"][0]) == (metric == "eval_loss")
        assert "--seed 1,2,3" in result["notes"][-1]
        assert f"note: {result['notes'][-1]}" in " ".join(as_text(result).split())
    assert len(set(ends.values())) == 2


def test_finished_points_are_found_and_others_refused(swept, recipe, run):
    folder, found = swept
    there = ["--output_dir", folder]
    code, out, err = run(recipe, *GRID, "--json", *there)
    assert code == 0 and json.loads(out) == found and not launched and err.count("finished before") == 4
    code, out, err = run(recipe, *GRID, "--max_steps", "4", *there)
    assert code == 2 and err.count("\n") == 1 and "was run with other settings (max_steps: not set, now 4)" in err
    (folder / "tokens_per_step=64").touch()
    code, _, err = run(recipe, "--tokens_per_step", "64,128", *there)
    assert code == 2 and "tokens_per_step=64 is not a folder" in err and err.count("\n") == 1
    code, out, err = run(recipe, *GRID, "--min_learning_rate", "none", *there)
    assert code == 2 and "(min_learning_rate: not set, now None)" in err
    (other := recipe.with_name("other.py")).write_text(recipe.read_text() + "\n")
    assert "the recipe" in run(other, *GRID, *there)[2] and not launched
    record = folder / NAMES[0] / sweep.RECORD
    text = record.read_text()
    record.write_text(text[:-20])
    assert "sweep.json is missing or damaged" in run(recipe, *GRID, *there)[2]
    record.write_text(text)
    code, out, err = run(recipe, "--learning_rate", "0.03,1e-3", "--seed", "2,3", "--table_only", "--json", *there)
    assert code == 0 and [p["state"] for p in json.loads(out)["points"]] == ["finished", "not run"] * 2


def test_a_point_of_another_grid_is_found_and_one_point_has_no_best(swept, recipe, run):
    folder, found = swept
    code, out, _ = run(recipe, "--seed", "1", "--learning_rate", "0.001", "--json", "--output_dir", folder)
    result = json.loads(out)
    assert (code, launched, result["points"]) == (0, [], found["points"][:1]) and "noise" in result["notes"][-1]
    assert (result["best"], result["gap"], result["why_no_best"]) == (None, None, "there is only one point")
    _, out, _ = run(recipe, "--seed", "2,1", "--learning_rate", "1e-3", "--json", "--output_dir", folder)
    result = json.loads(out)
    assert not launched and [point["name"] for point in result["points"]] == NAMES[1::-1]
    assert result["groups"][0]["std"] == next(
        g["std"] for g in found["groups"] if g["settings"]["learning_rate"] < 0.01
    )
    assert read_grid([])[0][0].name == "recipe"


def test_a_failed_point_is_recorded_and_the_others_run(recipe, run, tmp_path):
    flags = [recipe, "--tokens_per_step", "64,100,65", "--max_steps", "2", "--output_dir", tmp_path]
    code, out, err = run(*flags, "--max_failures", "1")
    assert code == 1 and len(launched) == 2 and "1 point of 3 failed: tokens_per_step=100: exit code 2:" in err
    code, out, err = run(*flags)
    assert code == 1 and len(launched) == 4
    assert "2 points of 3 failed" in err.splitlines()[-1] and "; and 1 more, see above; the same" in err
    assert re.search(r"64 +\d.* finished", out) and re.search(r"100 +- .* failed", out)
    assert "tokens_per_step=100: 1 run failed: exit code 2: " in out and "parameters" not in out
    stored = json.loads((tmp_path / "tokens_per_step=100" / sweep.RECORD).read_text())
    assert stored["exit_code"] == 2 and "tokens_per_step=100 is not a multiple" in stored["error"]


def test_the_cause_of_a_failure_is_that_of_the_newest_run(tmp_path):
    log = tmp_path / "log"
    log.write_text(before := "error: an earlier one\n")
    log.write_text(f"{before}Traceback\nImportError: no x\nlauncher.ChildFailedError:\n=====\n")
    assert sweep._last_line(log, len(before)) == "ImportError: no x"
    assert sweep._last_line(log, 0) == "an earlier one"


def test_a_point_that_another_sweep_has_finished_meanwhile_is_finished(recipe, run, tmp_path, monkeypatch):
    def launch(command, log, signals):
        code = launch_here(command, log, signals)  # of the other sweep, which took the folder first
        with open(log, "a") as file:
            print("error: output_dir=x: another run is using it (process 7); choose another folder", file=file)
        return code or 2

    monkeypatch.setattr(sweep, "launch", launch)
    code, out, err = run(recipe, "--seed", "1,2", "--max_steps", "2", "--output_dir", tmp_path)
    assert code == 0 and err.count("finished by another sweep") == 2 and "failed" not in out
    assert "error" not in json.loads((tmp_path / "seed=1" / sweep.RECORD).read_text())


def past(folder, name, values, **options):
    from test_compare import write_run

    written = write_run(folder / name, **options)
    (written / "checkpoint-400").mkdir()
    return SweptRun(name, values, written)


def test_losses_that_cannot_be_compared_give_no_best_point(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "comparing"))
    good = past(tmp_path, "a", {"seed": 1, "learning_rate": 1.0})
    bad = past(tmp_path, "b", {"seed": 2, "learning_rate": 1.0}, seed=2)
    other = past(tmp_path, "c", {"seed": 1, "learning_rate": 2.0}, scale=1.1)
    metrics = bad.folder / "metrics.jsonl"
    rows = metrics.read_text().splitlines()
    last = max(i for i, line in enumerate(rows) if "eval_loss" in line)
    rows[last] = json.dumps(json.loads(rows[last]) | {"eval_loss": None})
    metrics.write_text("\n".join(rows) + "\n")
    found = summarize_sweep([good, SweptRun("b", bad.values, bad.folder), other])
    assert found["best"]["settings"] == {"learning_rate": 2.0}  # a seed that diverged does not make 1.0 the best
    assert found["groups"][1]["value"] is None and "\nlearning_rate=1.0: the loss of b is not finite" in as_text(found)
    tokenizers = [good, past(tmp_path, "d", {"seed": 1, "learning_rate": 3.0}, tokenizer="t2")]
    assert summarize_sweep(tokenizers)["metric"] == "eval_bits_per_byte"
    one, two = (past(tmp_path, f"e{n}", {"n": n}, scale=n, eval_every=200) for n in (1, 2))
    found = summarize_sweep([one, two])
    assert found["gap"]["beyond_noise"] is None and "--seed 1,2,3" in found["verdict"]
    running = past(tmp_path, "f", {"n": 3}, scale=0.5, ended=False)
    assert summarize_sweep([one, two, running])["best"]["settings"] == {"n": 1}


def test_values_are_short_and_differ():
    assert [*shorten([1e-3, None, True, "muon"]).values()] == ["0.001", "null", "true", "muon"]
    models = [{"n_head": 1, "n_layer": 2}, {"n_head": 1, "n_layer": 3, "n_embd": 32}, "gpt2-40m"]
    assert [*shorten(models).values()] == ["{n_layer:2}", "{n_layer:3, n_embd:32}", "gpt2-40m"]
    folder = "/a/very/long/path/to/some/texts"
    paths = [f"{folder}/{name}/train.txt" for name in ("a", "b", "a/b", "0.71", "0.72")]
    assert [*shorten(paths).values()] == [f"...{name}..." for name in ("a", "b", "a/b", "0.71", "0.72")]
    odd = [{"a": 1}, {"a": "1"}, "x" * 99 + "a" + "x" * 99, "x" * 99 + "b" + "x" * 99, [[0, 1]], [[0, 1], [2, 3]]]
    assert len({*shorten(odd).values()}) == len(odd)


def test_the_table_fits_the_terminal_and_csv_has_all(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "comparing"))
    models = [{"n_layer": 2, "n_head": 2, "n_embd": width, "n_positions": 128} for width in (32, 64, 96)]
    rate, path = "embedding_learning_rate", "a/long/path/" * 9
    points = [
        past(tmp_path, f"p{n}-{seed}", {"model": model, rate: 0.1, "tokenizer": f"{path}{n}", "seed": seed},
             model=model, scale=1 - n / 10, seed=seed, config={"weight_decay": 0.1 * (n == 2)})
        for n, model in enumerate(models) for seed in (1, 2)
    ]  # fmt: skip
    result = summarize_sweep(points)
    for width in (80, 120):
        text = as_text(result, width)
        assert max(map(len, text.splitlines())) <= width
        rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("{n_embd:")}
        assert rows.keys() == {"{n_embd:32}", "{n_embd:64}", "{n_embd:96}"}  # each on one line
        assert ("tokens/s" in text.split("best:")[0], "left out" in text) == (width > 80, width == 80)
    assert any("weight_decay (0.0, 0.1)" in note for note in result["notes"])
    write_sweep(tmp_path, points, result)
    table = pd.read_csv(tmp_path / "sweep.csv")
    assert [json.loads(model) for model in table["model"]] == [point.values["model"] for point in points]
    assert table["loss"].tolist() == [point["loss"] for point in result["points"]]


def test_a_seed_that_failed_leaves_no_mean_of_the_others(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "comparing"))
    good = past(tmp_path, "a", {"seed": 1})
    failed = SweptRun("b", {"seed": 2}, tmp_path / "b", "exit code 1: loss or gradient was not finite")
    (group,) = summarize_sweep([good, failed])["groups"]
    assert group["value"] is None
    assert group["why_not"] == "1 run failed: exit code 1: loss or gradient was not finite"
    (group,) = summarize_sweep([past(tmp_path, "c", {"seed": 1}, eval_every=200)])["groups"]
    assert group["noise"] is None and "too few losses" in group["why_no_noise"]


def sizes(noise=0.0, count=5, tokens=1e6, seeds=1):
    random = np.random.default_rng(3)
    found = []
    for n in np.geomspace(1e5, 1e7, count):
        losses = 1.7 + 40 / n**0.3 + noise * random.standard_normal(seeds)
        std = float(losses.std(ddof=1)) if seeds > 1 else None
        found.append({"parameters": n, "flops": 6 * n * tokens, "tokens": tokens, "loss": float(losses.mean()),
                      "std": std, "count": seeds})  # fmt: skip
    return found


def test_the_law_over_sizes_is_found_within_its_band():
    law = fit_scaling(sizes())["parameters"]
    assert [law["E"], law["A"], law["alpha"]] == pytest.approx([1.7, 40, 0.3], rel=0.02)
    for seeds in (1, 3):
        law = fit_scaling(sizes(noise=0.005, seeds=seeds))["parameters"]
        for name, true in (("E", 1.7), ("A", 40), ("alpha", 0.3)):
            low, high = law["bands"][name]
            assert low < true < high and low < law[name] < high
        low, high = law["ahead"]["band"]
        assert low < 1.7 + 40 / law["ahead"]["parameters"] ** 0.3 < high
    points = [{**point, "loss": 30 * point["flops"] ** -0.05} for point in sizes()]
    law = fit_scaling(points)["compute"]
    assert [law["a"], law["b"]] == pytest.approx([30, 0.05])


def test_the_plot_of_a_law_has_its_line_and_names_it():
    points = [{**point, "noise": 0.01} for point in sizes(noise=0.005, seeds=3)]
    law = fit_scaling(points)
    result = {"groups": [{"settings": {}, "value": 1.0}], "metric": "eval_loss", "scaling": law}
    by_parameters, by_compute = build_sweep_plots(result)
    for plot, of, name in (by_parameters, law["parameters"], "alpha"), (by_compute, law["compute"], "b"):
        dots, line, low, high = plot.curves
        where = [of[name], *of["bands"][name]]
        assert "{} = {:.3g} ({:.3g} to {:.3g})".format(name, *where) in line.name
        assert (low.trend < line.trend).all() and (line.trend < high.trend).all()
        assert dots.trend.tolist() == [point["loss"] for point in points] and dots.records.empty
        fitted = np.interp(dots.trend.index, line.trend.index, line.trend)
        assert np.allclose(fitted, of["points"]["fitted"], rtol=2e-3)
    assert by_parameters.describe_place(6.0) == "1M parameters without positions"


def test_a_law_that_cannot_be_right_is_null_with_a_reason():
    def why_not(points):
        found = fit_scaling(points)
        assert found["parameters"] is None
        return found["why_not"]["parameters"]

    assert "3 sizes with a loss; it takes 4" in why_not(sizes(count=3))
    assert "which also moves the loss" in why_not([*sizes(), *sizes(tokens=2e6)])
    assert "does not fall" in why_not([{**point, "loss": n} for n, point in enumerate(sizes(), start=2)])
    assert "too large" in why_not(sizes(noise=1.0, seeds=2)) or "does not fall" in why_not(sizes(noise=1.0, seeds=2))


@pytest.mark.slow
@pytest.mark.unix_only
def test_a_sweep_goes_on_after_ctrl_c_and_kill(recipe, tmp_path):
    """Ctrl-C saves the point that runs; `kill -9` of the sweep ends it too; each time the same command goes on."""
    start = [
        sys.executable,
        "-m",
        "hfgpt.cli",
        "sweep",
        str(recipe),
        "--learning_rate",
        "1e-3,2e-3",
        "--save_steps",
        "5",
    ]
    start += ["--max_steps", "30", "--eval_steps", "10", "--output_dir", str(tmp_path)]
    slow = recipe.with_name("slow.py")
    callback = "class Slow(TrainerCallback):\n    def on_step_end(self, *a, **k): time.sleep(0.05)\n"
    text = recipe.read_text().replace(
        "def main", f"import time\nfrom transformers import TrainerCallback\n{callback}def main"
    )
    slow.write_text(text.replace("(CONFIG)).train", "(CONFIG), [Slow()]).train"))
    start[4] = str(slow)
    first, second = (tmp_path / f"learning_rate=0.00{n}" for n in (1, 2))

    def until(folder, step, number):
        process = subprocess.Popen(start, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            end = time.monotonic() + 300
            while not any(record["step"] >= step for record in RunFolder(folder).records()):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(number)
            return process.wait(60), process.stderr.read().splitlines()
        finally:
            process.kill()

    code, err = until(first, 8, signal.SIGINT)
    assert code == 130 and "stopped at point 1 of 2" in err[-1] and err[-1].endswith("run the same command to continue")
    saved = max(int(path.name.split("-")[1]) for path in first.glob("checkpoint-[0-9]*"))
    assert saved >= 8
    assert until(second, 8, signal.SIGKILL)[0] == -signal.SIGKILL
    done = subprocess.run([*start, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "learning_rate=0.001: finished before" in done.stderr
    for folder, point in zip((first, second), json.loads(done.stdout)["points"], strict=True):
        events = [record["event"] for record in lines(folder, "event")]
        assert "resume" in events and events[-1] == "end"
        assert [record["step"] for record in lines(folder, "loss")] == list(range(1, 31))
        assert point["loss"] == lines(folder, "eval_loss")[-1]["eval_loss"]


def test_a_grid_needs_a_value_for_each_flag():
    with pytest.raises(UserError, match="seed: needs a value"):
        read_grid(["--seed", "--learning_rate", "1,2"])
