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

from hfgpt.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")


# Compiling for a CPU takes 20 to 70 seconds, as much as it saves in about this many passes of a small model.
SHORT_RUN_FORWARD_PASSES = 200


COMPILER_ERRORS = ("InductorError", "BackendCompilerFailed")  # by name, as their modules take a second to import


@dataclass(frozen=True)
class CompileChoice:
    """Whether to compile the model, and why."""

    enabled: bool
    reason: str


def choose_compile(requested: str | bool, device: torch.device, forward_passes: int) -> CompileChoice:
    """Whether to compile the model for a run of `forward_passes` micro-batches on this process.

    `requested` is "auto", True or False. Raises UserError where True cannot work.
    """
    if requested is False:
        return CompileChoice(False, "requested")
    missing = _missing_for_compile(device)
    if requested is True and missing:
        raise UserError(f"torch_compile true: {missing}; use auto or false to run without compilation")
    if requested is True:
        return CompileChoice(True, "requested")
    if not missing and device.type == "cpu" and forward_passes < SHORT_RUN_FORWARD_PASSES:
        missing = f"{forward_passes} forward passes, fewer than {SHORT_RUN_FORWARD_PASSES}, do not repay compilation"
    return CompileChoice(not missing, missing or "a compiler is at hand and the run is long enough")


def compiler_fault(error: Exception) -> str | None:
    """What to tell of an error of torch's compiler, and the way out; None for other errors."""
    if type(error).__name__ not in COMPILER_ERRORS and not broken_code(error):
        return None
    what = next((line for line in str(error).splitlines() if "raised:" not in line), type(error).__name__)
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "its cache, torchinductor_<user> in the temporary folder"
    return (
        f"torch.compile failed ({what}); see that the disk is not full, remove {cache}, and start again, or train "
        "without it by --torch_compile false"
    )


def broken_code(error: Exception) -> Path | None:
    """The file of the compiler's cache that `error` says cannot be loaded: a process killed while it compiled left it,
    or a disk that was full.
    """
    reason = r"(?:file too short|invalid ELF header|cannot read file data)"
    found = re.search(rf"(/.+/c\w+(?:\.main)?\.so): {reason}", str(error))
    kinds = (*COMPILER_ERRORS, "ImportError", "OSError")  # the last two come bare from a backward pass
    return Path(found[1]) if found and type(error).__name__ in kinds else None


_removed: set[Path] = set()


def remove_broken_code(error: Exception) -> bool:
    """Whether what failed may be done again: a `broken_code` has been removed, for the first time."""
    broken = broken_code(error)
    if broken is None or broken in _removed:
        return False
    _removed.add(broken)
    broken.unlink(missing_ok=True)
    logger.warning("the compiler's cache held a broken file, as a killed process leaves one: %s, now removed", broken)
    return True


def with_code_mended(call: Callable[[], T]) -> T:
    """What `call` returns, which is called again where `remove_broken_code` helped."""
    while True:
        try:
            return call()
        except Exception as error:
            if not remove_broken_code(error):
                raise


def _missing_for_compile(device: torch.device) -> str | None:
    """What torch.compile lacks here, or None. Looks only; nothing is compiled."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    if device.type not in ("cpu", "cuda"):
        return f"compilation is not tried on {device.type}"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 7:
            return f"triton needs compute capability 7.0, this card has {major}.{minor}"
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # triton's own search
    else:
        compilers = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]  # inductor's own search
    if not any(map(shutil.which, compilers)):
        return f"no compiler ({' or '.join(compilers)}) on the PATH"
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").exists():
        return f"Python.h is not in {headers} (install Python's development package)"
    return None
