"""On a signal a run ends its step, saves, and names how to continue, wherever the signal comes from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from running import ALONE, FORKED, LAUNCH, ROOT, TWO, Run

from hfgpt.checkpointing.checkpoint import find_damage
from hfgpt.distributed.stop_signals import SAME_SIGNAL_SECONDS


def recipes_of(run) -> list[psutil.Process]:
    """What the launcher has started; the recipe's workers are one generation further."""
    children = psutil.Process(run.process.pid).children()
    children = [child for child in children if "quickstart.py" in " ".join(child.cmdline())]
    return sorted(children, key=lambda child: int(child.environ().get("RANK", 0)))


def wait_for_end(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def check_stopped(run, *names: str) -> int:
    """The run ended by itself, recorded one of `names`, and saved its last step. Returns that step."""
    last = run.records()[-1]
    assert last["event"] == "end" and last["fault"] in names
    assert (run.folder / "checkpoint-latest").resolve().name == f"checkpoint-{last['step']}"
    assert len(run.ledger()) == last["step"]
    return last["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_one_signal_saves_and_names_how_to_continue(start, name, code):
    run = start(ALONE)
    run.process.send_signal(signal.Signals[name])
    stderr = run.end()
    assert run.process.returncode == code
    step = check_stopped(run, name)
    assert stderr.strip().splitlines()[-1] == (
        f"error: {name}; ended after step {step}; continue with --resume_from_checkpoint latest"
    )
    again = start(FORKED, "--resume_from_checkpoint", "latest", "--max_steps", str(step + 4))
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
    # A launcher passes its signal on to one after the other, and the step may end between the two.
    expected = {"one process": ["process 1 of 2: SIGTERM"]}
    check_stopped(run, *expected.get(who, ["SIGTERM", "process 0 of 2: SIGTERM", "process 1 of 2: SIGTERM"]))


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path):
    script = "import time; from hfgpt.distributed.stop_signals import StopSignals\n"
    script += "with StopSignals() as s:\n print('ready', flush=True)\n"
    script += " while True:\n  time.sleep(0.05)\n  print(s.received, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # at once: the same wish, passed on by a launcher
    time.sleep(SAME_SIGNAL_SECONDS + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 143 and str(signal.SIGINT) in output


SLOW_EVALUATION = """
import time
from pathlib import Path
from transformers import TrainerCallback
from hfgpt import PretrainConfig, Pretrainer, run_recipe

class Slow(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def slow(model, _):
            if not model.training:
                Path(args.output_dir, "evaluates").touch()
                time.sleep(0.2)

        model.register_forward_pre_hook(slow)

run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [Slow()]).train())
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [FORKED, TWO], ids=["alone", "one of two"])
def test_a_signal_interrupts_an_evaluation(start, tmp_path, document_folder, launcher):
    recipe = tmp_path / "quickstart.py"
    recipe.write_text(SLOW_EVALUATION)
    flags = ["--eval_steps", "5", "--per_device_eval_batch_size", "1", "--max_steps", "5", "--save_steps", "3"]
    run = start(launcher, *flags, recipe=recipe)
    run.wait_for(lambda: (run.folder / "evaluates").exists())  # which takes half a minute
    (run.process if launcher is FORKED else recipes_of(run)[1]).send_signal(signal.SIGTERM)
    run.end()
    assert check_stopped(run, "SIGTERM") == 5
    assert not run.records("eval_loss")  # it was not waited for
    if launcher is FORKED:
        flags += ["--dataset", str(document_folder), "--resume_from_checkpoint", "latest"]
        again = Run(FORKED, run.folder, *flags)
        again.end()
        Run(FORKED, run.folder, *flags).end()
        assert [record["step"] for record in again.records("eval_loss")] == [5]  # it is made up for, once
        assert again.process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named_by_the_other_and_the_run_resumes(start, rank):
    run = start(TWO, "--save_steps", "5", "--tokens_per_step", "512")
    run.wait_for(lambda: (run.folder / "checkpoint-latest").exists())
    victim = recipes_of(run)[rank]
    victim.kill()
    stderr = run.end()
    [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert line == (
        f"error: process {rank} of 2 (pid {victim.pid}) has ended; continue with --resume_from_checkpoint latest"
    )
    step = int((run.folder / "checkpoint-latest").resolve().name.split("-")[1])
    assert find_damage(run.folder / f"checkpoint-{step}") is None
    flags = ["--resume_from_checkpoint", "latest", "--tokens_per_step", "512", "--max_steps", str(step + 20)]
    again = start(FORKED, *flags)
    again.end()
    steps = [record["step"] for record in again.records("loss")]
    assert again.process.returncode == 0 and steps == list(range(1, step + 21))


@pytest.mark.slow
def test_a_second_signal_during_a_save_leaves_the_whole_checkpoint_before(start, tmp_path):
    recipe = tmp_path / "quickstart.py"
    slow_disk = "import time\nfrom hfgpt.checkpointing import checkpoint\nsync = checkpoint.sync\n"
    slow_disk += "checkpoint.sync = lambda path: (time.sleep(1), sync(path))\n"
    recipe.write_text(slow_disk + (ROOT / "recipes" / "quickstart.py").read_text().replace("from __future__", "# "))
    run = start(FORKED, "--save_steps", "3", recipe=recipe)
    run.wait_for(lambda: (run.folder / "checkpoint-latest").exists())
    before = (run.folder / "checkpoint-latest").resolve()
    run.process.send_signal(signal.SIGTERM)
    time.sleep(SAME_SIGNAL_SECONDS + 0.5)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert list(run.folder.glob(".checkpoint-*.tmp"))  # it did not wait for the save, which takes long
    assert run.process.returncode == 143
    latest = (run.folder / "checkpoint-latest").resolve()
    assert latest.name >= before.name and find_damage(latest) is None


@pytest.mark.slow
def test_nothing_is_left_of_a_run_whose_launcher_is_killed_before_the_first_step(tmp_path, document_folder):
    run = Run(LAUNCH, tmp_path / "run", "--dataset", str(document_folder))
    run.wait_for(lambda: recipes_of(run))
    [recipe] = recipes_of(run)
    time.sleep(1.5)  # its libraries are loading
    run.process.kill()
    run.process.wait()
    wait_for_end(recipe)
