"""Python without its start: forks of a process that has imported the library and what it stands on, and done no more.

For tests of what processes do, and not of how one starts: importing takes a process longer than its tiny run. A
launcher can be run so too (`FORK, "-m", "accelerate.commands.launch", ...`): what it starts are forks as well. Each has
the environment it is given, a session of its own, and ends when who started it does; the one parent of all of them is
the process that only imports. Where processes cannot be forked safely (Windows, macOS), each starts Python as ever.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import reduction
from typing import IO
from unittest import mock

import numpy as np
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

FORK = "fork"  # in place of sys.executable
LAUNCHERS = ["accelerate.commands.launch", "torch.distributed.run"]
CAN_FORK = sys.platform == "linux"
FORKS = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
PRELOADED = ["hfgpt.cli", "hfgpt.evaluation.generate", "hfgpt.training.pretrainer", "hfgpt.model.modeling_gpt2"]
if CAN_FORK:
    FORKS.set_forkserver_preload([*LAUNCHERS, *PRELOADED])


class Forked:
    """As subprocess.Popen; the first word of the command is not looked at."""

    def __init__(self, args: list[str], env: dict[str, str], stdout=None, stderr=None, cwd=None, **_) -> None:
        files = _Open(1 if stdout is None else stdout.fileno()), _Open(2 if stderr is None else stderr.fileno())
        arguments = [argument for argument in args[1:] if argument != "-u"]
        self.args = args
        self.process = FORKS.Process(target=_python, args=(arguments, dict(env), files, cwd))
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):  # no threads where all others come from
            self.process.start()
        multiprocessing.process._children.discard(self.process)  # which are waited for at the end
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def started(args: list[str], env: dict[str, str], stdout=None, **options) -> subprocess.Popen:
    """Python from its start, as a `Forked` is used."""
    return subprocess.Popen([sys.executable, *args[1:]], env=env, stdout=stdout, **options)


if not CAN_FORK:
    Forked = started  # type: ignore[assignment, misc]


def completed(command: list[str], env: dict[str, str], timeout: float, cwd=None) -> subprocess.CompletedProcess:
    """As subprocess.run with what was said as text; the command may be any other one, too."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        begin = Forked if command[0] == FORK else subprocess.Popen
        forked = begin(command, env=env, stdout=stdout, stderr=stderr, cwd=cwd)
        try:
            forked.wait(timeout)
        finally:
            forked.kill()
        return subprocess.CompletedProcess(command, forked.returncode, _said(stdout), _said(stderr))


def _said(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


class _Open:
    """An open file on its way to a fork, where it is a number again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self):
        return _detached, (reduction.DupFd(self.number),)


def _detached(file) -> int:
    return file.detach()


def _end_with(parent) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _read_hub_settings_again() -> None:
    """Hugging Face reads its environment when imported, which was before the fork."""
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    sys.modules["huggingface_hub.hf_api"].api.endpoint = sys.modules["huggingface_hub.constants"].ENDPOINT


def _python(arguments: list[str], env: dict[str, str], files: tuple[int, int], cwd: str | None) -> None:
    os.setsid()
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], daemon=True).start()
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd or ".")
    os.environ.clear()
    os.environ.update(env)
    _read_hub_settings_again()
    np.random.seed()  # the other generators are made anew with a fork, or the same in every process
    multiprocessing.set_start_method(None, force=True)  # its own children are begun as ever
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if arguments[1] in LAUNCHERS:
            multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # it is: it has forked this process
            subprocess.Popen = subprocess_handler.Popen = Forked
        sys.modules[arguments[1]].main()
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
