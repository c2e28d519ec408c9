"""What started this process: a launcher, and the other processes that it started; or nothing of the kind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from hfgpt.errors import UserError

PROGRAMS = ("accelerate", "accelerate-launch", "torchrun")
MODULES = (
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("torch.distributed.run", "torch.distributed.launch"),
)
# Each launcher sets one of these for what it starts, and nobody else does.
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")


def ranks() -> tuple[int, int]:
    """Rank and world size as the launcher has set them: 0 and 1 without one. Raises UserError where they do not fit."""
    values = []
    for key, without in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        try:
            values.append(int(os.environ.get(key, without)))
        except ValueError:
            raise UserError(f"{key}={os.environ[key]}: not a whole number; unset it, or use a launcher") from None
    rank, world, local, _ = values
    fix = "unset it, or start all processes with accelerate launch or torchrun"
    if world < 1:
        raise UserError(f"WORLD_SIZE={world}: below 1; {fix}")
    if not 0 <= rank < world:
        there = f"WORLD_SIZE={world}" if "WORLD_SIZE" in os.environ else "WORLD_SIZE is not set"
        raise UserError(f"RANK={rank} does not fit: {there}; {fix}")
    if world > 1 and "RANK" not in os.environ:
        raise UserError(f"WORLD_SIZE={world}, but RANK is not set; {fix}")
    if not 0 <= local < world:
        raise UserError(f"LOCAL_RANK={local} does not fit WORLD_SIZE={world}; {fix}")
    return rank, world


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is that of accelerate, torchrun or torch.distributed, run as a program or a module."""
    words = list(command)
    program = words.pop(0) if words else ""
    if "python" not in Path(program).name.lower():
        return Path(program).name in PROGRAMS
    while words and words[0].startswith("-"):  # the interpreter's own options
        option = words.pop(0)
        if option == "--check-hash-based-pycs":
            words[:1] = []
        letters = "" if option.startswith("--") else option[1:]
        for place, letter in enumerate(letters, start=1):
            if letter in "mcWX":  # these take a value: the rest of the word, or the next one
                value = letters[place:] or "".join(words[:1])
                if letter in "mc":
                    return letter == "m" and value in MODULES
                words[:1] = words[:1] if letters[place:] else []
                break
    script = Path(words[0] if words else "")
    as_module = ".".join([*script.parts[-3:-1], script.stem])  # where a launcher's file is run by its path
    return script.name in PROGRAMS or as_module in MODULES


def _command(process: int) -> list[str]:
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []


# Known from the first import on: a launcher may die while the libraries are being loaded.
PARENT = os.getppid()
PARENT_IS_LAUNCHER = is_launcher(_command(PARENT))


def follow_launcher() -> None:
    """On Linux, have a SIGTERM sent to this process when its launcher dies, which would leave it training alone.

    Nothing else is followed: what a shell starts may outlive it.
    """
    if PARENT_IS_LAUNCHER and sys.platform == "linux":
        at_parents_end(signal.SIGTERM)
    if (PARENT_IS_LAUNCHER and os.getppid() != PARENT) or _orphaned():
        os.kill(os.getpid(), signal.SIGTERM)  # it has died already


def _orphaned() -> bool:
    """Whether the launcher has died before this process could look at it.

    A process is in its parent's session, or begins one of its own; an orphan's new parent has another one.
    """
    if os.environ.keys().isdisjoint(SET_BY_LAUNCHERS) or not hasattr(os, "getsid"):
        return False
    try:
        return os.getsid(0) not in (os.getsid(os.getppid()), os.getpid())
    except OSError:  # the parent is not to be seen from here
        return False


def at_parents_end(number: signal.Signals) -> None:
    """Have a signal sent to this process when its parent ends, however that ends (on Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
