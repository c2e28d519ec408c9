"""The quickstart on an accelerator that is neither a CPU nor CUDA: every tensor must be where the model is."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from fake_accelerator import __file__ as FAKE
from forked import FORK, completed
from running import ROOT, lines
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
MODEL = '{"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "resid_pdrop": 0.0}'
SETTINGS = ["--model", MODEL, "--tokenizer", "bpe-300", "--sequence_length", "32", "--tokens_per_step", "128"]
SETTINGS += ["--per_device_train_batch_size", "2", "--warmup_steps", "2", "--logging_steps", "1", "--save_steps", "10"]
SETTINGS += ["--eval_steps", "10", "--eval_tokens", "512", "--mixed_precision", "no", "--torch_compile", "false"]
SETTINGS += ["--mfu_peak_tflops", "1", "--sample_steps", "10", "--max_steps", "20"]
QUICKSTART = str(ROOT / "recipes" / "quickstart.py")


def run(script: str, *flags: object, fake: bool = True) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    command = [FORK, *([FAKE] if fake else []), script, *map(str, flags)]
    done = completed(command, environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def on_fake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake") / "run"
    done = run(QUICKSTART, *SETTINGS, "--output_dir", folder)
    assert "device   fake; float32" in done.stdout
    return folder


def losses(folder, key="loss"):
    return {line["step"]: line[key] for line in lines(folder, key)}


def test_losses_are_those_of_the_cpu(on_fake, tmp_path):
    run(QUICKSTART, *SETTINGS, "--output_dir", tmp_path / "cpu", fake=False)
    for key in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = losses(on_fake, key), losses(tmp_path / "cpu", key)
        assert len(ours) >= 2 and ours == pytest.approx(theirs, abs=1e-4)
    assert lines(on_fake)[-1]["memory_bytes"] is None  # the device does not count it


def test_its_checkpoint_is_a_plain_one(on_fake):
    folder = on_fake / "checkpoint-20"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The value of the", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_resumed_run_is_as_one_without_interruption(on_fake, tmp_path):
    half = shutil.copytree(on_fake, tmp_path / "half", symlinks=True)
    shutil.rmtree(half / "checkpoint-20")
    run(QUICKSTART, *SETTINGS, "--output_dir", half)
    assert losses(half) == losses(on_fake) and losses(half, "eval_loss") == losses(on_fake, "eval_loss")
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        assert (half / "checkpoint-20" / name).read_bytes() == (on_fake / "checkpoint-20" / name).read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        ["--optim", "adamw", "--document_masking", "true", "--gradient_checkpointing", "true"],
        ["--per_device_train_batch_size", "auto", "--mixed_precision", "bf16"],
        ["--model", MODEL.replace("0.0}", '0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}'), "--optim", "adamw"],
    ],
    ids=["masking", "bf16", "dropout"],
)
def test_other_kinds_of_runs_train(flags, tmp_path):
    run(QUICKSTART, *SETTINGS, "--max_steps", "4", "--eval_steps", "4", *flags, "--output_dir", tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 4


def test_a_fused_optimizer_gives_the_same_losses(on_fake, tmp_path):
    """As on cuda and xpu."""
    script = tmp_path / "fused.py"
    script.write_text(FUSED.format(quickstart=QUICKSTART))
    flags = [*SETTINGS, "--optim", "adamw", "--max_steps", "4", "--eval_steps", "0"]
    run(str(script), *flags, "--output_dir", tmp_path / "fused")
    run(QUICKSTART, *flags, "--output_dir", tmp_path / "plain")
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)


FUSED = """
import runpy
from dataclasses import replace
from hfgpt.training import optimizer
plain = optimizer.device_kind
optimizer.device_kind = lambda device: replace(plain(device), has_fused_skip=True)
runpy.run_path({quickstart!r}, run_name="__main__")
"""


def test_the_commands_run_on_it(on_fake, tmp_path):
    (tmp_path / "hfgpt").write_text("import sys\nfrom hfgpt.cli import main\nsys.exit(main())\n")
    script, checkpoint = str(tmp_path / "hfgpt"), on_fake / "checkpoint-20"
    evaluate = ["evaluate", checkpoint, "--dataset", "embedded", "--eval_tokens", "512", "--json"]
    ours, theirs = (json.loads(run(script, *evaluate, fake=fake).stdout) for fake in (True, False))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert run(script, "generate", checkpoint, "--prompt", "The", "--max_new_tokens", "5").stdout.strip()


def test_the_checks_of_a_device_pass_on_it(tmp_path):
    (tmp_path / "checks.py").write_text(CHECKS)
    results = run(str(tmp_path / "checks.py")).stdout.splitlines()
    assert [line.split(maxsplit=1)[0] for line in results] == ["ok", "skipped", "ok", "skipped"], results


CHECKS = """
from hfgpt.distributed.device import default_device
from hfgpt.planning import device_checks as checks
assert default_device().type == "fake"
for check in (checks.check_step, checks.check_half_precision, checks.check_dropout, checks.check_memory):
    print(check(default_device()).line())
"""
