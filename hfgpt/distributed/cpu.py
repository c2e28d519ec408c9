"""Cores, memory and threads of the machine, within the limits of a container and shared by the processes on it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils.environment import get_int_from_env

from hfgpt.distributed.launcher import SET_BY_LAUNCHERS

# The limits of Linux's control groups, and the group of this process.
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
THREADS_FLAG = "__num_cpu_threads_per_process"  # of accelerate launch, with underscores for dashes


@functools.cache
def cpuinfo(key: str) -> str:
    """Return the first value of `key` in Linux's list of processors, or an empty string."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = re.search(rf"^{key}[ \t]*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


@functools.cache
def model_name() -> str:
    """Return the name of the processor as its maker writes it, where the system knows it."""
    name = cpuinfo("model name")
    with contextlib.suppress(OSError, ImportError):
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip()
        elif sys.platform == "win32":
            winreg: Any = importlib.import_module("winreg")
            path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
                name = winreg.QueryValueEx(key, "ProcessorNameString")[0].strip()
    return name or platform.processor() or platform.machine()


def has_bf16() -> bool:
    """Return whether the CPU has bf16 instructions."""
    flags = (cpuinfo("flags") or cpuinfo("Features")).split()  # of x86, of ARM
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def available_cores() -> int:
    """Return how many cores this process may use: those of its affinity, or the container's CPU quota if that is less.

    Cores are physical where the system knows them: two threads on one core compute no faster than one.
    """
    cores = _physical_cores()
    limits = zip(_cgroup_values("cpu", "cpu.cfs_quota_us"), _cgroup_values("cpu", "cpu.cfs_period_us"), strict=False)
    for limit in (*map(str.split, _cgroup_values("cpu", "cpu.max")), *limits):
        with contextlib.suppress(ValueError, ZeroDivisionError):  # no limit is "max", and -1 in version 1
            quota, period = map(int, limit)
            if quota > 0:
                cores = min(cores, max(1, quota // period))
    return cores


def _physical_cores() -> int:
    """Return the number of physical cores that this process's affinity reaches; of logical ones if they are unknown."""
    logical = os.cpu_count() or 1
    cpus = [*range(logical)]
    with contextlib.suppress(psutil.Error, OSError, AttributeError):  # macOS has no affinity
        cpus = psutil.Process().cpu_affinity() or cpus
    with contextlib.suppress(OSError):
        return len({Path(TOPOLOGY.format(cpu)).read_text(encoding="utf-8") for cpu in cpus})
    physical = min(psutil.cpu_count(logical=False) or logical, logical)
    return max(1, min(len(cpus), round(len(cpus) * physical / logical)))


def memory_bytes() -> int:
    """Return this process's share of the machine's memory, or of the container's limit where that is less."""
    machine = psutil.virtual_memory().total
    limits = (*_cgroup_values("memory", "memory.max"), *_cgroup_values("memory", "memory.limit_in_bytes"))
    # No limit is "max", and a number beyond any machine in version 1.
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())]) // local_processes()


def _cgroup_values(controller: str, name: str) -> list[str]:
    """Return the contents of the file `name` in this process's control group and those around it, version 1 or 2.

    A container may see its own group at the top of the file system, whatever path /proc gives.
    """
    found: dict[Path, str] = {}
    with contextlib.suppress(OSError):
        for line in OWN_CGROUP.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.count(":") < 2:
                continue
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            tops = [CGROUPS / controllers, CGROUPS / controller] if controllers else [CGROUPS, CGROUPS / "unified"]
            group = Path(*(part for part in Path(path.lstrip("/")).parts if part != ".."))
            for folder in (top / part for top in tops for part in (group, *group.parents)):
                with contextlib.suppress(OSError):
                    found[folder] = (folder / name).read_text(encoding="utf-8").strip()
    return list(found.values())


def local_processes() -> int:
    """Return the number of processes of this run on this machine, as its launcher has set it."""
    names = ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"]
    with contextlib.suppress(ValueError):
        return max(1, get_int_from_env(names, 1))
    return 1


def use_all_cores(local_processes: int) -> int:
    """Set torch's threads to this process's share of the machine's cores; returns their number.

    A number that the user has set stays: by OMP_NUM_THREADS, MKL_NUM_THREADS or the launcher's flag, or a smaller one
    by torch.set_num_threads. Launchers set OMP_NUM_THREADS too, mostly to 1, which leaves other cores idle.
    """
    threads, share = torch.get_num_threads(), max(1, available_cores() // local_processes)
    if _user_has_set_threads():
        return threads
    if str(threads) == os.environ.get("OMP_NUM_THREADS"):
        threads = share
    torch.set_num_threads(min(threads, share))
    return torch.get_num_threads()


def _user_has_set_threads() -> bool:
    """Return whether the environment's number of threads is the user's: the launcher's own environment has it, too."""
    is_set = any(map(os.environ.get, THREAD_VARIABLES))
    if not is_set or os.environ.keys().isdisjoint(SET_BY_LAUNCHERS):
        return is_set
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():  # the launcher is the nearest without its own variables
            if (environment := process.environ()).keys().isdisjoint(SET_BY_LAUNCHERS):
                flags = (word.replace("-", "_") for word in process.cmdline())
                by_flag = any(flag.startswith(THREADS_FLAG) for flag in flags)
                return by_flag or any(map(environment.get, THREAD_VARIABLES))
    return os.environ.get("OMP_NUM_THREADS") != "1"


def peak_memory_bytes() -> int:
    """Return the most memory that was resident so far."""
    try:
        resource: Any = importlib.import_module("resource")
    except ImportError:  # Windows
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory() -> None:
    """Let `peak_memory_bytes` start again from what is resident now; only Linux can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # see keep_freed_memory
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees for the next one.

    Otherwise it gives large buffers back to the system, which hands them out page by page, with zeros, in the next
    step: 5 of 34 ms a step, and at 124M parameters 0.13 of 1.32 s. The peak rises by some 5 %.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)  # keep buffers of more than 32 MiB in the heap, too


def busy_share() -> float:
    """Return the fraction of the machine's cores that other programs are using, from a tenth of a second."""
    return psutil.cpu_percent(0.1) / 100
