"""What the machine offers, and the choices that follow from it: device, precision, compilation, threads."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import resource
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import transformers
import xxhash
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from accelerate.utils.environment import get_int_from_env

from hfgpt.distributed.launcher import SET_BY_LAUNCHERS, ranks
from hfgpt.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Where Linux says what a container may use; and which group this process is in.
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
THREADS_FLAG = "__num_cpu_threads_per_process"  # of accelerate launch, its dashes as underscores


@dataclass(frozen=True)
class Precision:
    """`name` as Accelerate's `mixed_precision` spells it (bf16, fp16, or no for float32), and why it was chosen."""

    name: str
    reason: str


def default_device() -> torch.device:
    """The accelerator that torch finds, else the CPU; the CPU too where the accelerate configuration says so."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was asked of it; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """The exact name of a CUDA device, or the model name of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def choose_precision(requested: str, device: torch.device) -> Precision:
    """What to compute in; weights and optimizer state stay float32 in any case.

    `requested` is "auto", "bf16", "fp16" or "no". "auto" follows the accelerate configuration if that names
    bf16 or fp16, else the hardware. Raises UserError for what the device cannot do.
    """
    native = "bf16" if _has_bf16(device) else "fp16" if device.type == "cuda" else "no"
    name, reason = requested, "requested"
    if requested == "auto":
        name, reason = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "from the accelerate configuration"
        if name == "no":
            what = {"cuda": "card", "cpu": "CPU"}.get(device.type, device.type)
            name, reason = native, f"the {what} has {'' if native == 'bf16' else 'no '}bf16 instructions"
    where = f"mixed_precision {name} ({reason})"
    if name not in ("bf16", "fp16", "no"):
        raise UserError(f"{where}: not one of auto, bf16, fp16, no")
    if name == "bf16" and native == "fp16":
        raise UserError(f"{where}: {device_name(device)} has no bf16; use fp16, or auto to choose it")
    if name == "fp16" and device.type != "cuda":
        raise UserError(f"{where}: fp16 needs a CUDA device, this is {device.type}; use bf16, no or auto")
    if name == "fp16":
        reason += ", with loss scaling"
    if name == "bf16" and native == "no" and device.type == "cpu":
        reason += "; this CPU has no bf16 instructions, float32 would be faster"
    return Precision(name, reason)


def _has_bf16(device: torch.device) -> bool:
    """Whether the device itself computes in bf16; unknown devices do not."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()  # x86 says flags, ARM says Features
    return device.type == "cpu" and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _cpuinfo(key: str) -> str:
    """The first value of `key` in Linux's list of processors, or an empty string."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def available_cores() -> int:
    """Cores this process may use: its affinity, or the container's CPU quota where that is less."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = zip(_cgroup_values("cpu", "cpu.cfs_quota_us"), _cgroup_values("cpu", "cpu.cfs_period_us"), strict=False)
    for quota, period in (*map(str.split, _cgroup_values("cpu", "cpu.max")), *limits):
        with contextlib.suppress(ValueError):  # "max"
            if int(quota) > 0:  # version 1 writes -1 for no limit
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _cgroup_values(controller: str, name: str) -> list[str]:
    """What the file `name` holds in this process's Linux control group and in each around it, version 1 or 2.

    A container may see its own group at the top of the file system, wherever /proc says that it is.
    """
    found: dict[Path, str] = {}
    with contextlib.suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            tops = [CGROUPS / controllers, CGROUPS / controller] if controllers else [CGROUPS, CGROUPS / "unified"]
            inner = Path(*(part for part in Path(path.lstrip("/")).parts if part != ".."))
            if not controllers or controller in controllers.split(","):
                for folder in (top / part for top in tops for part in (inner, *inner.parents)):
                    with contextlib.suppress(OSError):
                        found[folder] = (folder / name).read_text().strip()
    return list(found.values())


def local_processes() -> int:
    """Processes of this run on this machine, by what its launcher has set."""
    names = ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"]
    return max(1, get_int_from_env(names, 1))


def use_all_cores(local_processes: int) -> int:
    """Gives this process its share of the machine's cores as torch threads, and returns that number.

    A number that the user has stated stays: by OMP_NUM_THREADS, MKL_NUM_THREADS or the launcher's flag, or a smaller
    one by torch.set_num_threads. Launchers set OMP_NUM_THREADS too, mostly to 1, which leaves other cores idle.
    """
    threads, share = torch.get_num_threads(), max(1, available_cores() // local_processes)
    if _threads_are_stated():
        return threads
    if str(threads) == os.environ.get("OMP_NUM_THREADS"):
        threads = share
    torch.set_num_threads(min(threads, share))
    return torch.get_num_threads()


def _threads_are_stated() -> bool:
    """Whether the environment's number of threads is the user's, not that of a launcher: it was there before it."""
    stated = any(map(os.environ.get, THREAD_VARIABLES))
    if not stated or os.environ.keys().isdisjoint(SET_BY_LAUNCHERS):
        return stated
    try:
        for process in psutil.Process().parents():  # the launcher is the nearest without its own variables
            if (before := process.environ()).keys().isdisjoint(SET_BY_LAUNCHERS):
                flags = (word.replace("-", "_") for word in process.cmdline())
                return any(map(before.get, THREAD_VARIABLES)) or any(flag.startswith(THREADS_FLAG) for flag in flags)
    except psutil.Error:
        pass
    return os.environ.get("OMP_NUM_THREADS") != "1"


def memory_bytes(device: torch.device) -> int:
    """Total memory of the CUDA device; elsewhere this process's share of the machine's, or of the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (*_cgroup_values("memory", "memory.max"), *_cgroup_values("memory", "memory.limit_in_bytes"))
    # Version 2 writes "max" for no limit, version 1 a number beyond any machine.
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())]) // local_processes()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: by the allocator on a CUDA card, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_bytes` begin anew; on a CPU only Linux can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # see keep_freed_memory
            Path("/proc/self/clear_refs").write_text("5")


def step_seed(seed: int, step: int, process: int) -> int:
    """Seed of the random numbers that one process uses in one step, so that none need be stored to resume."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {process}".encode()) >> 1


def seed_random_numbers(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, of the CPU and one device.

    That one also notes down, with a traceback each time, what to do on devices which are not in use.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one.

    Otherwise it gives large buffers back to the system, which hands them out in the next step page by page, with zeros:
    5 of 34 ms a step, and at 124M parameters 0.13 of 1.32 s. At its peak the process takes some 5 % more.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)  # buffers of more than 32 MiB are to lie in the heap too


def start_accelerator(mixed_precision: str, timeout_seconds: float) -> tuple[Accelerator, Precision]:
    """The Accelerator as `accelerate launch` or torchrun configured it, in the precision chosen here.

    A process that waits for the others for `timeout_seconds` gives up.
    """
    transformers.utils.logging.disable_progress_bar()
    device = default_device()
    precision = choose_precision(mixed_precision, device)
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_seconds))
    # An earlier run of this process may have had another precision or device, which Accelerate keeps for all.
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    # Said outright, as the launcher does not tell several processes that they are to stay on the CPU.
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision.name, kwargs_handlers=[group])
    _, world = ranks()
    if accelerator.num_processes != world:
        raise UserError(f"the launcher started {world} processes, but accelerate sees {accelerator.num_processes}")
    accelerator.gradient_accumulation_steps = 1  # the step accumulates by itself; backward() must not divide
    if accelerator.device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(threads)  # Accelerate takes all cores where OMP_NUM_THREADS alone is not set
        use_all_cores(local_processes())
        # Otherwise threads add up gradients in any order, and a resumed run differs in the last bits.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        _made_deterministic.add(True)
    elif _made_deterministic:  # by a run of this process on the CPU; cuBLAS refuses what this asks of it
        torch.use_deterministic_algorithms(False)
        _made_deterministic.clear()
    return accelerator, precision


_made_deterministic: set[bool] = set()
