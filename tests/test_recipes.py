"""Every recipe as a user launches it, and what a user sees who launches it wrongly."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from forked import FORK, completed
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfgpt.data.tokenization import load_tokenizer, save_tokenizer

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
TINY = '{"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}'


def launch(recipe: str, *flags: str, config: str | None = "cpu", python: str = FORK) -> subprocess.CompletedProcess:
    command = [python, "-m", "accelerate.commands.launch"]
    if config:
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
    command += [str(ROOT / "recipes" / f"{recipe}.py"), *flags]
    return completed(command, {**os.environ, "ACCELERATE_USE_CPU": "true"}, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_runs_two_steps_and_its_checkpoint_loads_elsewhere(recipe, tmp_path, document_folder):
    flags = ["--dataset", str(document_folder), "--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    flags += ["--model", TINY, "--sequence_length", "64", "--eval_tokens", "500", "--logging_steps", "1"]
    flags += ["--per_device_train_batch_size", "4"]
    if recipe.startswith("fineweb"):
        flags += ["--tokenizer", "bpe-300", "--tokens_per_step", "1024", "--streaming", "true"]
    is_quickstart = recipe == "quickstart"  # which is run just as a user starts it
    config, python = (None, sys.executable) if is_quickstart else ("cpu", FORK)
    done = launch(recipe, *flags, config=config, python=python)
    assert done.returncode == 0, done.stderr
    for said in ("x accumulation", "expected", "compile  off", "checkpoint-2", "parameters"):
        assert said in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert any("eval_perplexity" in line for line in lines)
    folder = tmp_path / "run" / "checkpoint-latest"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("document", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).shape[1] > ids.shape[1]


@pytest.mark.slow
def test_a_compiled_run_resumes_bit_for_bit_and_without_the_compiler_nearly_so(tmp_path, text_file):
    flags = ["--dataset", str(text_file), "--model", TINY, "--eval_steps", "2", "--save_steps", "2"]
    flags += ["--logging_steps", "1", "--eval_tokens", "500", "--max_steps", "4", "--mixed_precision", "no"]
    from_step_2 = ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2")]
    losses = {}
    for name, compiled, resume in (
        ("whole", "true", []),
        ("same", "true", from_step_2),
        ("eager", "false", from_step_2),
    ):
        folder = str(tmp_path / name)
        flags_here = ["--torch_compile", compiled, "--output_dir", folder, *resume]
        python = sys.executable if compiled == "true" else FORK
        done = launch("shakespeare_char", *flags, *flags_here, python=python)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses[name] = {line["step"]: line["loss"] for line in lines if "loss" in line}
    weights = [(tmp_path / name / "checkpoint-4" / "model.safetensors").read_bytes() for name in ("whole", "same")]
    assert weights[0] == weights[1]
    assert losses["eager"] == pytest.approx(losses["whole"], abs=1e-6)


def run_here(monkeypatch, recipe: str, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
    return end.value.code


def test_the_quickstart_shows_where_values_and_samples_are(monkeypatch, capfd, tmp_path, document_folder):
    flags = ["--dataset", str(document_folder), "--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    flags += ["--model", TINY, "--sequence_length", "64", "--tokenizer", "bpe-300", "--eval_tokens", "500"]
    flags += ["--torch_compile", "false", "--mfu_peak_tflops", "1"]
    for more, values in (([], "report.html"), (["--report", "false"], "metrics.jsonl")):
        monkeypatch.setattr(sys, "argv", ["quickstart.py", *flags, *more])
        runpy.run_path(str(ROOT / "recipes" / "quickstart.py"), run_name="__main__")
        shown = capfd.readouterr().out
        assert f"curves and values   {tmp_path}/run/{values}\n" in shown
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        (sample,) = (line for line in lines if line.get("event") == "sample")
        assert f"> {sample['prompt']}{sample['text']}\n" in shown and sample["step"] == 2
    assert "<blockquote" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gradient_acumulation_steps", "4"], ["gradient_acumulation_steps", "gradient_accumulation_steps?"]),
        (["--model", '{"n_embd": 30, "n_head": 4}'], ["30", "4"]),
        (["--tokens_per_step", "1000"], ["1000", "768"]),
        (["--dataset", "{tmp}/nowhere.txt"], ["nowhere.txt"]),
        (["--dataset", "{documents}", "--text_column", "body"], ["body", "text, id"]),
        (["--dataset", "{tmp}/short.txt"], ["sequence_length"]),
        (["--dataset", "{tmp}/accent.txt", "--tokenizer", "{tmp}/ascii"], ["é"]),
        (["--learning_rate", "fast"], ["learning_rate=fast"]),
        (["--resume_from_checkpoint", "{tmp}/nowhere"], ["nowhere"]),
    ],
)
def test_wrong_use_is_one_line_and_code_2(monkeypatch, capfd, tmp_path, text_file, document_folder, flags, named):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "accent.txt").write_text("café " * 100)
    save_tokenizer(load_tokenizer("char", lambda: ["caf \n"], 64), tmp_path / "ascii")
    names = {"tmp": tmp_path, "text": text_file, "documents": document_folder}
    flags = [flag if flag.startswith('{"') else flag.format(**names) for flag in flags]
    if "--dataset" not in flags:
        flags += ["--dataset", str(text_file)]
    code = run_here(monkeypatch, "shakespeare_char", *flags, "--output_dir", str(tmp_path / "run"))
    shown = capfd.readouterr().err
    assert code == 2 and len(shown.strip().splitlines()) == 1, shown
    assert shown.startswith("error: ") and all(part in shown for part in named), shown
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wrong_use_from_the_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "fineweb_125m.py"), "--max_step", "3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--max_steps?" in done.stderr
    assert list(tmp_path.iterdir()) == []
