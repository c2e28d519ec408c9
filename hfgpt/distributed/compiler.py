"""Whether to compile the model, and what to do when the compiler fails."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from hfgpt.distributed.device_kinds import device_kind
from hfgpt.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Compiling for a CPU takes 20 to 70 seconds, about as much as it saves in this many passes of a small model.
SHORT_RUN_FORWARD_PASSES = 200
COMPILER_ERRORS = ("InductorError", "BackendCompilerFailed")  # by name, because their modules take a second to import


@dataclass(frozen=True)
class CompileChoice:
    """Whether to compile the model, and why."""

    enabled: bool
    reason: str


def choose_compile(
    requested: str | bool, device: torch.device, forward_passes: int, is_least: bool = False
) -> CompileChoice:
    """Choose whether to compile the model for a run of `forward_passes` micro-batches on this process.

    `requested` is "auto", True or False. is_least: `forward_passes` is a lower bound. Raises UserError if True cannot
    work.
    """
    if requested is False:
        return CompileChoice(False, "requested")
    kind = device_kind(device)
    obstacle = _find_obstacle(device, kind.compiler)
    if requested is True and obstacle:
        raise UserError(f"torch_compile true: {obstacle}; use auto or false to run without compilation")
    if requested is True:
        return CompileChoice(True, "requested")
    if not obstacle and kind.compiler == "metal":
        obstacle = f"torch's compiler for {device.type} is a prototype; --torch_compile true tries it"
    if not obstacle and device.type == "cpu" and forward_passes < SHORT_RUN_FORWARD_PASSES:
        passes = f"{'as few as ' if is_least else ''}{forward_passes}"
        obstacle = f"{passes} forward passes, fewer than {SHORT_RUN_FORWARD_PASSES}, do not repay compilation"
    return CompileChoice(not obstacle, obstacle or "there is a compiler and the run is long enough")


def _find_obstacle(device: torch.device, compiler: str) -> str | None:
    """Return what torch.compile lacks here, or None. Compiles nothing."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported  # takes a second

    if not compiler:
        return f"torch.compile is not known to work on {device.type}"
    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    if compiler == "metal":  # compiles by itself
        return None
    by_platform = {"darwin": "clang++", "win32": "cl"}
    compilers = [os.environ.get("CXX", by_platform.get(sys.platform, "g++"))]  # as inductor does
    if compiler == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (7, 0):
            return "triton needs compute capability 7.0, this card has {}.{}".format(*capability)
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cl"]  # as triton looks for them
    if not any(map(shutil.which, compilers)):
        return f"no compiler ({' or '.join(compilers)}) on the PATH"
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").exists():
        return f"Python.h is not in {headers} (install Python's development package)"
    return None


def explain_compiler_error(error: Exception) -> str | None:
    """Explain a torch.compile error and how to fix it; None for other errors."""
    if type(error).__name__ not in COMPILER_ERRORS and not find_broken_cache_file(error):
        return None
    cause = next((line for line in str(error).splitlines() if "raised:" not in line), type(error).__name__)
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "its cache, torchinductor_<user> in the temporary folder"
    return (
        f"torch.compile failed ({cause}); check that the disk is not full, remove {cache}, and start again; or train "
        "without it by --torch_compile false"
    )


def find_broken_cache_file(error: Exception) -> Path | None:
    """Return the file in torch.compile's cache that cannot be loaded, as left by a killed process or a full disk."""
    reason = r"(?:file too short|invalid ELF header|cannot read file data)"
    found = re.search(rf"(/.+/c\w+(?:\.main)?\.so): {reason}", str(error))
    types = (*COMPILER_ERRORS, "ImportError", "OSError")  # a backward pass raises the last two unwrapped
    return Path(found[1]) if found and type(error).__name__ in types else None


_removed: set[Path] = set()


def remove_broken_cache(error: Exception) -> bool:
    """Remove the corrupt cache file that caused `error`. Returns True (once) if calling again may help."""
    broken = find_broken_cache_file(error)
    if broken is None or broken in _removed:
        return False
    _removed.add(broken)
    broken.unlink(missing_ok=True)
    logger.warning("removed a corrupt file from torch.compile's cache, probably left by a killed process: %s", broken)
    return True


def run_compiled(call: Callable[[], T]) -> T:
    """Call a compiled function; call it again if its cached code was corrupt and could be removed."""
    while True:
        try:
            return call()
        except Exception as error:
            if not remove_broken_cache(error):
                raise
