"""The launcher of this process, if any: the environment that it sets, and ending this process when it dies."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

from hfgpt.errors import UserError

PROGRAMS = ("accelerate", "accelerate-launch", "torchrun")
MODULES = (
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("torch.distributed.run", "torch.distributed.launch"),
)
# Every launcher sets one of these for its children; nothing else does.
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")


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
        return Path(program).name in PROGRAMS
    while words and words[0].startswith("-"):  # the interpreter's options; -m, -c, -W and -X have a value
        if option := re.match(r"-[^-mcWX]*([mcWX])(.*)", words.pop(0)):
            value = option[2] or "".join(words[:1])
            if option[1] in "mc":
                return option[1] == "m" and value in MODULES
            words = words if option[2] else words[1:]
    script = Path(words[0] if words else "")
    as_module = ".".join([*script.parts[-3:-1], script.stem])  # a launcher's file, run by its path
    return script.name in PROGRAMS or as_module in MODULES


def _command_line(pid: int) -> list[str]:
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []


# Read at import: the launcher may die while the libraries are still being imported.
PARENT = os.getppid()
PARENT_IS_LAUNCHER = is_launcher(_command_line(PARENT))


def stop_with_launcher() -> None:
    """On Linux, receive SIGTERM when the launcher dies; otherwise this process would continue alone.

    Other parents do not matter: the children of a shell may outlive it.
    """
    if PARENT_IS_LAUNCHER:
        signal_at_parent_exit(signal.SIGTERM)
    if PARENT_IS_LAUNCHER and os.getppid() != PARENT:  # it has already died
        os.kill(os.getpid(), signal.SIGTERM)


def signal_at_parent_exit(number: signal.Signals) -> None:
    """On Linux, receive this signal when the parent process ends, for whatever reason."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
