"""A run that is told to stop ends its step, saves, and says how to go on: from whatever side the signal comes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hfgpt.signals import SAME_SIGNAL_SECONDS

ROOT = Path(__file__).parent.parent
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    str(ROOT / "accelerate_configs/cpu.yaml"),
]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture
def start(tmp_path, document_folder):
    """Starts a long run by `launcher` and waits for its third step; `records` reads its metrics."""
    started = []

    def start(launcher: list[str], *flags: str) -> subprocess.Popen:
        command = [*launcher, str(ROOT / "recipes" / "quickstart.py"), "--output_dir", str(tmp_path / "run")]
        command += ["--dataset", str(document_folder), "--streaming", "true", "--tokenizer", "bpe-300"]
        command += [
            "--model",
            '{"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}',
            "--sequence_length",
            "32",
        ]
        command += ["--per_device_train_batch_size", "4", "--max_steps", "1000000", "--torch_compile", "false"]
        command += ["--eval_steps", "0", "--logging_steps", "1", *flags]
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        wait_for(lambda: sum("loss" in line for line in records(tmp_path)) >= 3, process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def records(tmp_path) -> list[dict]:
    path = tmp_path / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(condition, process=None, seconds=60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.05)


def recipes_of(process) -> list[psutil.Process]:
    """What the launcher has started; the recipe's workers are one generation further."""
    return [child for child in psutil.Process(process.pid).children() if "quickstart.py" in " ".join(child.cmdline())]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def check_stopped(tmp_path, name: str) -> int:
    """The run ended by itself: recorded, and saved at its last step. Returns that step."""
    last = records(tmp_path)[-1]
    assert last["event"] == "end" and last["fault"] == name
    assert (tmp_path / "run" / "checkpoint-latest").resolve().name == f"checkpoint-{last['step']}"
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == last["step"]
    return last["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_one_signal_saves_and_says_how_to_go_on(start, tmp_path, name, code):
    process = start([sys.executable])
    process.send_signal(signal.Signals[name])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    step = check_stopped(tmp_path, name)
    assert stderr.strip().splitlines()[-1] == (
        f"error: {name} after step {step}; continue with --resume_from_checkpoint latest"
    )
    again = start([sys.executable], "--resume_from_checkpoint", "latest", "--max_steps", str(step + 4))
    assert again.wait(timeout=60) == 0 and records(tmp_path)[-1]["step"] == step + 4


@pytest.mark.slow
def test_a_signal_to_the_launcher_alone_ends_the_run_with_a_checkpoint(start, tmp_path):
    process = start(LAUNCH)
    [recipe] = recipes_of(process)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    wait_for(lambda: has_ended(recipe))
    check_stopped(tmp_path, "SIGTERM")


@pytest.mark.slow
def test_ctrl_c_reaches_the_launcher_and_the_recipe_and_counts_once(start, tmp_path):
    process = start(LAUNCH)
    [recipe] = recipes_of(process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=60)
    wait_for(lambda: has_ended(recipe))
    check_stopped(tmp_path, "SIGINT")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one process", "the launcher"])
def test_two_processes_stop_at_one_step(start, tmp_path, who):
    process = start(TWO)
    if who == "one process":
        recipes_of(process)[1].send_signal(signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    check_stopped(tmp_path, "SIGTERM")


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path):
    script = (
        "import time; from hfgpt.signals import StopSignals\nwith StopSignals() as s:\n print('ready', flush=True)\n"
    )
    script += " while True:\n  time.sleep(0.05)\n  print(s.received, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # at once: the same wish, passed on by a launcher
    time.sleep(SAME_SIGNAL_SECONDS + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 143 and str(signal.SIGINT) in output
