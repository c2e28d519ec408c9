"""The launcher of this process, if any: the environment that it sets, and ending this process when it dies."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from hfgpt.errors import UserError
from hfgpt.files import WINDOWS

PROGRAMS = ("accelerate", "accelerate-launch", "torchrun", "hfgpt")  # hfgpt: its sweep
MODULES = (
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("torch.distributed.run", "torch.distributed.launch", "hfgpt.cli", "hfgpt.cli.__main__"),
)
# Every launcher sets one of these for its children; nothing else does.
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")
WATCH_SECONDS = 1.0  # between looks at the parent


def rank_and_world_size() -> tuple[int, int]:
    """Read rank and world size from the environment (default 0 and 1). Raises UserError if they are inconsistent."""
    values = []
    for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        try:
            values.append(int(os.environ.get(key, default)))
        except ValueError:
            raise UserError(
                f"{key}={os.environ[key]}: not a whole number; unset it, or start with accelerate launch or torchrun"
            ) from None
    rank, world_size, local_rank, _ = values
    fix = "unset it, or start all processes with accelerate launch or torchrun"
    if world_size < 1:
        raise UserError(f"WORLD_SIZE={world_size}: below 1; {fix}")
    if not 0 <= rank < world_size:
        world = f"WORLD_SIZE={world_size}" if "WORLD_SIZE" in os.environ else "WORLD_SIZE is not set"
        raise UserError(f"RANK={rank} is not from 0 to WORLD_SIZE - 1 ({world}); {fix}")
    if world_size > 1 and "RANK" not in os.environ:
        raise UserError(f"WORLD_SIZE={world_size}, but RANK is not set; {fix}")
    if not 0 <= local_rank < world_size:
        raise UserError(f"LOCAL_RANK={local_rank} is not from 0 to WORLD_SIZE - 1 (WORLD_SIZE={world_size}); {fix}")
    return rank, world_size


def is_launcher(command: list[str]) -> bool:
    """Return whether a command line runs accelerate, torchrun or torch.distributed, as a program or a module."""
    program, *words = command or [""]
    if "python" not in Path(program).name.lower():
        return _program(program) in PROGRAMS
    while words and words[0].startswith("-"):  # the interpreter's options; -m, -c, -W and -X take a value
        if option := re.match(r"-[^-mcWX]*([mcWX])(.*)", words.pop(0)):
            value = option[2] or "".join(words[:1])
            if option[1] in "mc":
                return option[1] == "m" and value in MODULES
            words = words if option[2] else words[1:]
    script = Path(words[0] if words else "")
    as_module = ".".join([*script.parts[-3:-1], script.stem])  # where a launcher's file is run by its path
    return _program(script) in PROGRAMS or as_module in MODULES


def _program(path: str | Path) -> str:
    return Path(path).name.removesuffix(".exe")


def _command_line(pid: int) -> list[str]:
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        pass
    import psutil  # takes time to import

    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(pid).cmdline()
    return []


def _find_parent() -> int:
    """Return the process that started this one.

    In a virtual environment on Windows, `python` starts the real one with the same arguments, and waits for it.
    """
    parent = os.getppid()
    if WINDOWS and _command_line(parent)[1:] == _command_line(os.getpid())[1:]:
        import psutil  # takes time to import

        with contextlib.suppress(psutil.Error):
            return psutil.Process(parent).ppid()
    return parent


# Read at the first import: a launcher may die while the libraries are being loaded.
PARENT = _find_parent()
PARENT_IS_LAUNCHER = is_launcher(_command_line(PARENT))


def stop_with_launcher() -> None:
    """Receive SIGTERM when the launcher ends, however it ends; otherwise this process would go on alone.

    Other parents do not matter: the children of a shell may outlive it.
    """
    if PARENT_IS_LAUNCHER:
        end_with_parent(PARENT)


def end_with_parent(parent: int, at_once: bool = False) -> None:
    """Receive SIGTERM when `parent`, which started this process, ends, however it ends; or end `at_once`.

    Linux sends the signal. Elsewhere a thread waits.
    """
    if sys.platform != "linux":
        _watch(parent, at_once)
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL if at_once else signal.SIGTERM))
    if os.getppid() != parent:  # it has ended already
        _end(at_once)


@functools.cache  # one thread is enough
def _watch(parent: int, at_once: bool) -> None:
    def wait() -> None:
        if _wait_for_end(parent):
            _end(at_once)

    threading.Thread(target=wait, daemon=True).start()


def _wait_for_end(parent: int) -> bool:
    """Wait until the parent has ended. Returns False at once if this process may not know."""
    if not WINDOWS:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        return True
    import psutil  # takes time to import

    try:
        psutil.Process(parent).wait()
    except psutil.NoSuchProcess:
        pass
    except psutil.Error:
        return False
    return True


def _end(at_once: bool) -> None:
    if at_once:
        os._exit(1)
    elif WINDOWS and callable(signal.getsignal(signal.SIGTERM)):  # os.kill would not call the handler there
        _thread.interrupt_main(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
