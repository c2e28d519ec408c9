"""Nothing ends a run that need not, and nothing is lost when it ends."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import hashes, records, same_weights, trained
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

import hfgpt.checkpointing.state
from hfgpt import PretrainConfig, Pretrainer, SampleCallback, run_recipe
from hfgpt.checkpointing.checkpoint import find_damage
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.distributed import launcher as launched
from hfgpt.distributed.launcher import is_launcher, rank_and_world_size
from hfgpt.distributed.stop_signals import Interrupted, StopSignals, exit_on_signal
from hfgpt.errors import RunError, UserError
from hfgpt.messages import safe_output as output
from hfgpt.training.callbacks import log_line
from hfgpt.training.run import TrainingRun
from hfgpt.training.step import TrainStep


@pytest.fixture(autouse=True)
def nothing_lost(monkeypatch):
    monkeypatch.setattr(output, "lost", {})


class Fails(TrainerCallback):
    """Raises in one event, from step `step` on."""

    def __init__(self, event: str, step: int, error: BaseException) -> None:
        setattr(self, event, self.fail)
        self.step, self.error = step, error

    def fail(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            raise self.error


def ended(config, *callbacks) -> tuple[TrainingRun, BaseException]:
    """A run that fails, and what it raised."""
    pretrainer = Pretrainer(config, callbacks)
    with pytest.raises((Exception, SystemExit)) as raised:
        pretrainer.train()
    return pretrainer.run, raised.value


def ending(capsys, main) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of a recipe."""
    with pytest.raises(SystemExit) as end:
        run_recipe(main)
    return end.value.code, capsys.readouterr().err.splitlines()


@pytest.fixture
def whole(config):
    return trained(config("whole", eval_steps=2))


EVENTS = ["on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end"]


@pytest.mark.parametrize("event", EVENTS)
def test_a_fault_of_a_callback_leaves_a_checkpoint_from_which_the_run_is_the_same(config, whole, capsys, event):
    step = 6 if event == "on_train_end" else 4 if event == "on_evaluate" else 3
    pretrainer = Pretrainer(config(eval_steps=2), [Fails(event, step, ValueError("no\nroom"))])
    code, lines = ending(capsys, pretrainer.train)
    run = pretrainer.run
    if event == "on_save":  # whenever the checkpoint has been written, beside training
        step = run.progress.step
    file = run.folder.path / "traceback.txt"
    assert code == 1 and len(lines) == 1 and "in fail" in file.read_text()
    assert lines[0] == (
        f"error: ValueError: no; ended after step {step}; continue with --resume_from_checkpoint latest; traceback in "
        f"{file}"
    )
    assert find_damage(run.folder.checkpoint(step)) is None
    assert records(run, "event")[-1]["fault"] == "ValueError: no\nroom"
    resumed = trained(config(eval_steps=2, resume_from_checkpoint="latest"))
    assert same_weights(resumed, whole) and hashes(resumed) == hashes(whole)
    for key in ("loss", "eval_loss"):
        assert [(line["step"], line[key]) for line in records(resumed, key)] == [
            (line["step"], line[key]) for line in records(whole, key)
        ]


def test_the_traceback_is_on_the_screen_where_it_is_asked_for(config, capsys, monkeypatch):
    monkeypatch.setenv("HFGPT_DEBUG", "1")
    failing = Pretrainer(config(max_steps=2), [Fails("on_log", 1, KeyError("speed"))])
    code, lines = ending(capsys, failing.train)
    assert code == 1 and lines[0].startswith("Traceback") and lines[-1].startswith("error: KeyError: 'speed'; ended")


def test_a_run_ended_by_a_callback_keeps_its_exit_code_and_its_step(config):
    run, error = ended(config(), Fails("on_step_end", 3, SystemExit(7)))
    assert error.code == 7 and find_damage(run.folder.checkpoint(3)) is None


def test_a_model_card_that_fails_costs_no_checkpoint(config, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no card")

    monkeypatch.setattr("hfgpt.training.saving.model_card", fails)
    run, error = ended(config())
    assert "no card" in str(error) and find_damage(run.folder.checkpoint(2)) is None
    assert "no card" in (run.folder.checkpoint(2) / "README.md").read_text()


def test_a_tracker_that_fails_costs_no_step(config, monkeypatch):
    """Trackers are called after all other callbacks."""
    called = CallbackHandler.call_event

    def call_event(self, event, args, state, control, **kwargs):
        result = called(self, event, args, state, control, **kwargs)
        if event == "on_log" and state.global_step == 3:
            raise ConnectionError("tracker")
        return result

    monkeypatch.setattr(CallbackHandler, "call_event", call_event)
    run, _ = ended(config())
    assert find_damage(run.folder.checkpoint(3)) is None and [r["step"] for r in records(run)] == [1, 2, 3]


class ModelFails(TrainerCallback):
    """The model raises in the forward pass number `count`, in training or in evaluation."""

    def __init__(self, count: int, training: bool, error: Exception) -> None:
        self.left, self.training, self.error = count, training, error

    def on_init_end(self, args, state, control, model=None, **kwargs):
        def hook(model, *_):
            self.left -= model.training is self.training
            if self.left == 0:
                raise self.error

        model.register_forward_pre_hook(hook)


def test_a_step_that_fails_half_way_leaves_the_one_before(config, whole):
    """Its second micro-batch raises: the gradient is there, the update is not."""
    run, error = ended(config(eval_steps=2), ModelFails(6, True, ZeroDivisionError("3")))
    assert isinstance(error, ZeroDivisionError)
    assert find_damage(run.folder.checkpoint(2)) is None and not run.folder.checkpoint(3).exists()
    assert same_weights(trained(config(eval_steps=2, resume_from_checkpoint="latest")), whole)


def test_an_update_that_fails_half_way_is_not_saved(config, monkeypatch):
    pretrainer = Pretrainer(config(max_steps=5, save_steps=2))
    step = torch.optim.AdamW.step

    def fails(self, *args):
        if pretrainer.run.progress.step == 3:
            next(pretrainer.run.step.model.parameters()).data.add_(1)
            raise RuntimeError("half")
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(RuntimeError) as raised:
        pretrainer.train()
    assert "step 3 is not saved, because the next step had already begun" in raised.value.end_of_run
    assert [path.name for path in pretrainer.run.folder.checkpoints()] == ["checkpoint-2"]
    assert find_damage(pretrainer.run.folder.checkpoint(2)) is None


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_no_second_fault(config, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    pretrainer = Pretrainer(config(save_steps=2), [Fails("on_step_end", 3, ValueError("first"))])
    write = hfgpt.checkpointing.state.write_files
    monkeypatch.setattr(
        hfgpt.checkpointing.state,
        "write_files",
        lambda *args: (full if pretrainer.run.progress.step == 3 else write)(*args),
    )
    with pytest.raises(ValueError, match="first") as raised:
        pretrainer.train()
    assert "step 3 is not saved (OSError: [Errno 28] No space" in raised.value.end_of_run
    assert "continue with" in raised.value.end_of_run and find_damage(pretrainer.run.folder.checkpoint(2)) is None


def test_a_signal_whose_checkpoint_cannot_be_written_says_so(config, monkeypatch, caplog):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    write = hfgpt.checkpointing.state.write_files

    def full_from_step_3(*args):
        if pretrainer.run.progress.step == 3:
            raise OSError(28, "No space left on device")
        write(*args)

    pretrainer = Pretrainer(config(save_steps=2), [Stop()])
    monkeypatch.setattr(hfgpt.checkpointing.state, "write_files", full_from_step_3)
    with pytest.raises(RunError) as raised:
        pretrainer.train()
    end = "SIGTERM; ended after step 3; step 3 is not saved; continue with --resume_from_checkpoint latest"
    assert str(raised.value) == end and raised.value.exit_code == 143
    assert "The checkpoint of step 3 could not be written ([Errno 28] No space left on device)" in caplog.messages


def test_a_model_is_in_training_mode_again_after_an_evaluation_that_fails(config):
    run, error = ended(config(eval_steps=1), ModelFails(2, False, ValueError("no")))
    assert isinstance(error, ValueError) and str(error) == "no"
    assert run.step.model.training and find_damage(run.folder.checkpoint(1)) is None


NO_MEMORY = [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")]


@pytest.mark.parametrize("error", [*NO_MEMORY, MemoryError()])
def test_memory_that_runs_out_in_evaluation_names_its_batch_size(config, error):
    settings = config(eval_steps=1, per_device_eval_batch_size=4)
    failing = Pretrainer(settings, [ModelFails(2, False, error)])
    with pytest.raises(RunError, match=r"in evaluation with batches of 4 .*--per_device_eval_batch_size; ended"):
        failing.train()
    assert find_damage(failing.run.folder.checkpoint(1)) is None


@pytest.mark.parametrize("error", NO_MEMORY)
def test_memory_that_runs_out_in_sampling_names_it(config, error):
    failing = Pretrainer(config(sample_steps=2, sample_prompt="1"), [ModelFails(3, False, error)])
    with pytest.raises(RunError, match=r"out of memory in sampling .*--sample_steps 0; ended after step 2; continue"):
        failing.train()


def test_a_disk_that_is_full_from_the_start_is_one_line_and_no_run(config, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    settings = config()
    monkeypatch.setattr("hfgpt.checkpointing.run_folder.os.fsync", full)
    code, lines = ending(capsys, Pretrainer(settings).train)
    named = f"error: output_dir={settings.output_dir}: No space left on device; choose a writable folder"
    assert (code, lines) == (2, [named])
    assert [path.name for path in Path(settings.output_dir).iterdir()] == [".lock"]


# Output


def broken_pipe():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def full():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    return open("/dev/full", "w")


@pytest.mark.parametrize("make", [broken_pipe, closed, lambda: None, full])
def test_output_that_cannot_be_written_is_recorded_once_and_training_goes_on(config, monkeypatch, make):
    for name in output.NAMES:
        monkeypatch.setattr(sys, name, make())
    run = trained(config(sample_steps=2, sample_prompt="1"))
    monkeypatch.undo()
    events = [line for line in records(run, "event") if line["event"] == "output_lost"]
    assert "stdout" in [event["stream"] for event in events] and len(events) <= 2
    assert all(event["reason"] for event in events) and records(run)[-1]["step"] == 6


def test_characters_that_the_output_cannot_encode_are_replaced(config, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("Ω says Привет, \U0001f415! " * 400, encoding="utf-8")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    run = trained(config(), SampleCallback(2, ["Ω"]))
    assert b"sample at step 6: ?" in shown.getvalue() and not records(run, "stream")


def test_output_is_as_it_was_after_a_run(config, capsys):
    before = sys.stdout, sys.stderr
    trained(config(max_steps=1))
    assert (sys.stdout, sys.stderr) == before


SHORT = """
import os, sys
from hfgpt.cli.run_recipe import {how}
def main():
    for number in range(20000):
        print("line", number)
{how}(main)
"""


def shell(command: str, how: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHON": sys.executable, "SCRIPT": SHORT.format(how=how)}
    return subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.unix_only
@pytest.mark.parametrize("where", ["| head -1", ">&-", ">&- 2>&- <&-", "> /dev/full", "2>&1 | true"])
def test_a_recipe_whose_output_is_gone_ends_well(where):
    done = shell(f'set -o pipefail; "$PYTHON" -c "$SCRIPT" {where}', "run_recipe")
    assert done.returncode == 0 and not done.stderr


@pytest.mark.unix_only
def test_a_closed_pipe_ends_a_command_quietly_and_a_full_disk_in_one_line():
    done = shell('set -o pipefail; "$PYTHON" -c "$SCRIPT" | head -1', "run_command")
    assert (done.returncode, done.stdout, done.stderr) == (141, "line 0\n", "")
    if os.path.exists("/dev/full"):
        done = shell('"$PYTHON" -c "$SCRIPT" > /dev/full', "run_command")
        assert done.returncode == 1 and done.stderr == "error: stdout cannot be written: No space left on device\n"


@pytest.mark.unix_only
def test_files_do_not_take_the_place_of_a_closed_output(tmp_path):
    script = "import os; from hfgpt.messages import safe_output; safe_output.make_safe()"
    script += "; print(os.open('file', os.O_CREAT))"
    script += "; os.write(2, str(os.open('file', os.O_CREAT)).encode())"
    command = f'cd {tmp_path}; "$PYTHON" -c "{script}" <&- >&-'
    done = subprocess.run(["bash", "-c", command], env={**os.environ, "PYTHON": sys.executable}, capture_output=True)
    assert int(done.stderr) > 2


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0), torch.tensor(2), float("nan"), {"a": 1}, "\udce9", PretrainConfig]
)
def test_what_callbacks_add_to_a_log_can_be_recorded(tmp_path, value):
    run = RunFolder(tmp_path)
    run.record(step=1, value=value, loss=1.0)
    [record] = run.records()
    assert record["loss"] == 1.0 and record["value"] in (2, None, {"a": 1}, "\udce9", str(PretrainConfig))


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan")])
def test_an_estimate_beyond_all_clocks_ends_nothing(seconds):
    state = TrainerState(max_steps=10**9)
    assert log_line(state, {"step_seconds": seconds}).endswith("ETA over 1000 years")
    assert log_line(state, {"step_seconds": 1e-6}).endswith("ETA 0:16:40")


# Signals


@pytest.mark.unix_only
def test_a_signal_passes_what_catches_exceptions():
    with pytest.raises(Interrupted), StopSignals() as signals, signals.interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        except Exception:
            pass
    with pytest.raises(Interrupted), StopSignals() as signals, signals.interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        except BaseException:  # as some libraries do
            pass


@pytest.mark.unix_only
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_the_set_up_at_once(config, monkeypatch, capsys, name):
    def slow(*_, **__):
        signal.raise_signal(signal.Signals[name])
        time.sleep(20)

    monkeypatch.setattr("hfgpt.training.open_text.prepare_data", slow)
    began = time.monotonic()
    code, lines = ending(capsys, Pretrainer(config()).train)
    assert code == 128 + signal.Signals[name] and lines == [
        f"error: stopped by {name} before the first step; nothing was written"
    ]
    assert time.monotonic() - began < 20 and not os.path.exists(config().output_dir)


@pytest.mark.unix_only
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_recipe_outside_of_training_and_its_imports(capsys, name):
    number = signal.Signals[name]

    def main():
        signal.raise_signal(number)
        time.sleep(20)

    assert ending(capsys, main) == (128 + number, [f"error: {name}"])
    with pytest.raises(SystemExit) as end, exit_on_signal():
        main()
    assert end.value.code == 128 + number and signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.unix_only
def test_a_closed_terminal_ends_a_run_like_any_signal_but_not_under_nohup(config, monkeypatch):
    class HangUp(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert trained(config("nohup"), HangUp()).progress.step == 6
    finally:
        signal.signal(signal.SIGHUP, before)
    run, error = ended(config(), HangUp())
    assert error.exit_code == 129 and str(error).startswith("SIGHUP; ended after step 3; continue")
    assert find_damage(run.folder.checkpoint(3)) is None


@pytest.mark.unix_only
def test_a_signal_ends_a_compilation_at_once(config, monkeypatch):
    run = Pretrainer(config(torch_compile=True))

    def compiles(*_, **__):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr(TrainStep, "__call__", compiles)
    with pytest.raises(RunError, match="SIGTERM; ended after step 0; no checkpoint has been written") as raised:
        run.train()
    assert raised.value.exit_code == 143


# Launchers and their environment

LAUNCHERS = [
    "accelerate launch recipe.py",
    "/usr/bin/python3 /usr/local/bin/accelerate launch recipe.py",
    "python /x/bin/accelerate-launch --config_file a.yaml recipe.py",
    "torchrun --nproc_per_node 2 recipe.py",
    "python -u -X dev -m torch.distributed.run recipe.py",
    "python3.12 -um accelerate.commands.launch recipe.py",
    "python -W ignore -mtorch.distributed.launch recipe.py",
    "python /x/site-packages/accelerate/commands/launch.py recipe.py",
    "C:/venv/Scripts/python.exe C:/venv/Scripts/accelerate.exe launch recipe.py",
    "C:/venv/Scripts/torchrun.exe recipe.py",
    "/usr/bin/python3 /usr/local/bin/hfgpt sweep recipe.py",
    "python3 -m hfgpt.cli sweep recipe.py",
]
OTHERS = [
    "bash -c python recipe.py --torch_compile true & sleep 30",
    "/bin/sh /home/torch/accelerate.sh",
    "python -c import torch.distributed.run",
    "python train.py torchrun",
    "python -m pytest torch.distributed.run",
    "vim torchrun",
    "timeout 60 accelerate launch recipe.py",
    "python -W torchrun train.py",
    "python",
    "",
]


@pytest.mark.parametrize(("command", "right"), [*((c, True) for c in LAUNCHERS), *((c, False) for c in OTHERS)])
def test_only_launchers_are_followed(command, right):
    assert is_launcher(command.split(" ")) is right


def test_a_parent_with_an_odd_command_line_is_no_fault(tmp_path):
    script = "import hfgpt.distributed.launcher as l; l.stop_with_launcher(); print(l.PARENT_IS_LAUNCHER)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    command = [sys.executable, "-c", code, b"\xff\xfe torch"]
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "False\n" and not done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of a parent's end")
def test_a_first_process_that_is_no_launcher_ends_nothing():
    """As in a container: process 1 is a shell, the environment looks like accelerate's."""
    script = "from hfgpt.distributed import launcher; launcher.stop_with_launcher(); print('runs')"
    inside = f'{sys.executable} -c "{script}"; echo $?'
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False"}
    command = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", inside]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if "unshare" in done.stderr:
        pytest.skip("no namespaces of processes here")
    assert done.stdout == "runs\n0\n", done.stderr


@pytest.mark.unix_only
def test_a_launcher_that_has_died_meanwhile_ends_the_process(monkeypatch):
    sent, own = [], (os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(launched.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(launched.sys, "platform", "linux")
    monkeypatch.setattr(launched.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda _, number: sent.append(number)))
    for parent, is_one, right in [
        (os.getppid(), False, []),
        (os.getppid(), True, [signal.SIGTERM]),
        (-1, False, []),
        (-1, True, [signal.SIGTERM, own]),
    ]:
        monkeypatch.setattr(launched, "PARENT", parent)
        monkeypatch.setattr(launched, "PARENT_IS_LAUNCHER", is_one)
        launched.stop_with_launcher()
        assert sent == right
        sent.clear()


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "1"}, "RANK=1 is not from 0 to"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not from 0 to"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first: not a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: below 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=: not a whole number"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 is not from 0 to"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_line(config, monkeypatch, capsys, environment, named):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    settings = config()
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    code, lines = ending(capsys, Pretrainer(settings).train)
    assert code == 2 and len(lines) == 1 and lines[0].startswith(f"error: {named}")
    assert not os.path.exists(settings.output_dir)
    with pytest.raises(UserError, match=named.split(":")[0]):
        config("other")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert rank_and_world_size() == (0, 1)


# Run folders


ODD_FOLDERS = {
    "a file": lambda path: path / "file",
    "in a file": lambda path: path / "file" / "run",
    "a link to nowhere": lambda path: path / "dangling",
    "in a link to nowhere": lambda path: path / "dangling" / "run",
    "a link to itself": lambda path: path / "loop",
    "a long name": lambda path: path / ("x" * 300),
    "a long path": lambda path: (str(path) + ("/" + "x" * 200) * 20)[:4075].rstrip("/"),
    "in a place for no folders": lambda path: "/proc/run",
    "a device": lambda path: os.devnull,
    "a null byte": lambda path: "a\0b",
}


@pytest.mark.unix_only
@pytest.mark.parametrize("kind", ODD_FOLDERS)
def test_a_run_folder_that_cannot_be_is_one_line(config, capsys, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("hfgpt.training.setup.open_text", lambda *_: 1 / 0)  # refused before the text is read
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    def run():
        Pretrainer(dataclasses.replace(config(), output_dir=str(ODD_FOLDERS[kind](tmp_path)))).train()

    code, lines = ending(capsys, run)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: output_dir="), lines
    assert re.search("choose a writable folder|give a(nother)? path", lines[0]), lines
    assert not (tmp_path / "nowhere").exists()
