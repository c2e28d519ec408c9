"""A run that is told to stop ends its step, saves, and says how to go on: from whatever side the signal comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from running import ALONE, LAUNCH, TWO

from hfgpt.signals import SAME_SIGNAL_SECONDS


def recipes_of(run) -> list[psutil.Process]:
    """What the launcher has started; the recipe's workers are one generation further."""
    children = psutil.Process(run.process.pid).children()
    return [child for child in children if "quickstart.py" in " ".join(child.cmdline())]


def wait_for_end(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def check_stopped(run, name: str) -> int:
    """The run ended by itself: recorded, and saved at its last step. Returns that step."""
    last = run.records()[-1]
    assert last["event"] == "end" and last["fault"] == name
    assert (run.folder / "checkpoint-latest").resolve().name == f"checkpoint-{last['step']}"
    assert len(run.ledger()) == last["step"]
    return last["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_one_signal_saves_and_says_how_to_go_on(start, name, code):
    run = start(ALONE)
    run.process.send_signal(signal.Signals[name])
    stderr = run.end()
    assert run.process.returncode == code
    step = check_stopped(run, name)
    assert stderr.strip().splitlines()[-1] == (
        f"error: {name}; ended after step {step}; continue with --resume_from_checkpoint latest"
    )
    again = start(ALONE, "--resume_from_checkpoint", "latest", "--max_steps", str(step + 4))
    again.end()
    assert again.process.returncode == 0 and again.records()[-1]["step"] == step + 4


@pytest.mark.slow
def test_a_signal_to_the_launcher_alone_ends_the_run_with_a_checkpoint(start):
    run = start(LAUNCH)
    [recipe] = recipes_of(run)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    wait_for_end(recipe)
    check_stopped(run, "SIGTERM")


@pytest.mark.slow
def test_ctrl_c_reaches_the_launcher_and_the_recipe_and_counts_once(start):
    run = start(LAUNCH)
    [recipe] = recipes_of(run)
    os.killpg(run.process.pid, signal.SIGINT)
    run.end()
    wait_for_end(recipe)
    check_stopped(run, "SIGINT")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one process", "the launcher"])
def test_two_processes_stop_at_one_step(start, who):
    run = start(TWO)
    if who == "one process":
        recipes_of(run)[1].send_signal(signal.SIGTERM)
    else:
        run.process.send_signal(signal.SIGTERM)
    run.end()
    check_stopped(run, "SIGTERM")


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
