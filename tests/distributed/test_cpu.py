"""This process's share of the machine: threads, cores and memory, within a container's limits."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import torch

from hfgpt.distributed import cpu
from hfgpt.distributed.launcher import SET_BY_LAUNCHERS


@pytest.mark.parametrize(
    ("env", "torch_has", "expected"),
    [
        ({}, 6, 6),
        ({}, 2, 2),  # by torch.set_num_threads, or affinity
        ({"LOCAL_WORLD_SIZE": "4"}, 6, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 6, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 6, 2),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),
        ({"MKL_NUM_THREADS": "1"}, 1, 1),
        ({"OMP_NUM_THREADS": "9", "LOCAL_WORLD_SIZE": "2"}, 9, 9),  # as stated
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 1, 1),  # by hand: no launcher has set it
    ],
)
def test_threads_are_the_share_of_the_cores_unless_stated(monkeypatch, env, torch_has, expected):
    for name in (*cpu.THREAD_VARIABLES, *SET_BY_LAUNCHERS, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    numbers = [torch_has]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(cpu, "available_cores", lambda: 6)
    assert cpu.use_all_cores(cpu.local_processes()) == expected
    assert cpu.use_all_cores(cpu.local_processes()) == expected  # a second run in this process


LAUNCHER = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("before", "command", "expected"),
    [
        ({}, ["python", "/bin/accelerate", "launch", "recipe.py"], 6),  # its own default
        ({"OMP_NUM_THREADS": "1"}, ["python", "/bin/accelerate", "launch", "recipe.py"], 1),
        ({"MKL_NUM_THREADS": "1"}, ["python", "-m", "torch.distributed.run", "recipe.py"], 1),
        ({}, ["python", "/bin/accelerate", "launch", "--num_cpu_threads_per_process", "1", "recipe.py"], 1),
        ({}, ["python", "/bin/accelerate", "launch", "--num-cpu-threads-per-process=1", "recipe.py"], 1),
    ],
)
def test_a_launchers_own_number_of_threads_is_not_the_users(monkeypatch, before, command, expected):
    """Between the recipe and the launcher there may be a shell, which has the launcher's variables."""
    for name in (*cpu.THREAD_VARIABLES, *SET_BY_LAUNCHERS, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**before, **LAUNCHER}.items():
        monkeypatch.setenv(name, value)
    shell = SimpleNamespace(environ=lambda: {**before, **LAUNCHER}, cmdline=lambda: ["bash", "-c", "python recipe.py"])
    launcher = SimpleNamespace(environ=lambda: before, cmdline=lambda: command)
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [shell, launcher])
    numbers = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(cpu, "available_cores", lambda: 6)
    assert cpu.use_all_cores(1) == expected

    def gone(self):
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, "parents", gone)  # or not to be looked at
    assert cpu.use_all_cores(1) == 6


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes control groups for this process: what /proc says of it, and files under /sys/fs/cgroup."""

    def write(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n")

    monkeypatch.setattr(cpu, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpu, "OWN_CGROUP", tmp_path / "own")
    return write


GIB = 2**30
NO_LIMIT = "9223372036854771712"  # of version 1


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        ("0::/\n", {"memory.max": str(2 * GIB)}, 2),  # a container sees its group at the top
        ("0::/a/b\n", {"a/b/memory.max": str(3 * GIB)}, 3),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(2 * GIB)}, 2),
        ("0::/a/b\n", {"a/b/memory.max": str(3 * GIB), "a/memory.max": str(2 * GIB)}, 2),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "max"}, 8),
        ("0::/a\n", {"other/memory.max": str(GIB)}, 8),
        ("0::/../../docker/x\n", {"memory.max": str(2 * GIB)}, 2),
        ("0::/docker/x\n", {"memory.max": str(2 * GIB)}, 2),  # without a name space of its own
        ("0::/a\n", {"a/memory.max": str(99 * GIB)}, 8),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(2 * GIB)}, 2),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": NO_LIMIT}, 8),
        (
            "4:hugetlb,memory:/a/b\n",
            {"hugetlb,memory/a/b/memory.limit_in_bytes": NO_LIMIT, "memory/a/memory.limit_in_bytes": str(GIB)},
            1,
        ),
        ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": str(2 * GIB)}, 2),
        ("4:cpu:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(2 * GIB)}, 8),
        ("0::/a\n", {"unified/a/memory.max": str(2 * GIB)}, 2),
        ("", {}, 8),
    ],
)
def test_memory_is_the_containers_limit_shared_among_the_processes(cgroups, monkeypatch, own, files, gib):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB))
    cgroups(own, files)
    assert cpu.memory_bytes() == gib * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cpu.memory_bytes() == gib * GIB // 2


def test_memory_without_control_groups_is_the_machines(cgroups, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu.memory_bytes() == psutil.virtual_memory().total


def machine(monkeypatch, tmp_path, physical, logical, affinity=None, topology=()):
    """A processor as psutil reports it, and its `topology`: the threads that share a core, for each core."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True, counts=(physical, logical): counts[logical])
    monkeypatch.setattr(os, "cpu_count", lambda: logical)
    cpus = [*range(logical)] if affinity is None else affinity
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: cpus, raising=False)
    monkeypatch.setattr(cpu, "TOPOLOGY", str(tmp_path / "topology {}"))
    for siblings in topology:
        for sibling in siblings:
            (tmp_path / f"topology {sibling}").write_text(f"{siblings}\n")


@pytest.mark.parametrize(
    ("described", "cores"),
    [
        ({"physical": 8, "logical": 16}, 8),
        ({"physical": 8, "logical": 8}, 8),  # one thread on each core, as many virtual machines report
        ({"physical": None, "logical": 16}, 16),
        ({"physical": 16, "logical": 4}, 4),  # a container sees four of them
        ({"physical": 8, "logical": 16, "affinity": [*range(8)]}, 4),
        ({"physical": 8, "logical": 16, "affinity": [3]}, 1),
        ({"physical": 2, "logical": 4, "topology": [(0, 2), (1, 3)]}, 2),
        ({"physical": 2, "logical": 4, "topology": [(0, 2), (1, 3)], "affinity": [0, 1]}, 2),
        ({"physical": 2, "logical": 4, "topology": [(0, 2), (1, 3)], "affinity": [0, 2]}, 1),
        ({"physical": 6, "logical": 8, "topology": [(0, 1), (2, 3), (4,), (5,), (6,), (7,)]}, 6),  # of two kinds
        ({"physical": 6, "logical": 8, "topology": [(0, 1), (2, 3), (4,), (5,)], "affinity": [4, 5]}, 2),
        ({"physical": 4, "logical": 8, "affinity": []}, 4),
    ],
)
def test_cores_are_physical_ones_where_they_are_known(cgroups, monkeypatch, tmp_path, described, cores):
    machine(monkeypatch, tmp_path, **described)
    assert cpu.available_cores() == cores


def test_cores_without_affinity(cgroups, monkeypatch, tmp_path):
    """As on macOS, or where this process may not ask for it."""
    machine(monkeypatch, tmp_path, physical=8, logical=16)
    for error in (psutil.AccessDenied(), AttributeError(), OSError()):
        monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self, error=error: raises(error), raising=False)
        assert cpu.available_cores() == 8
    monkeypatch.delattr(psutil.Process, "cpu_affinity")
    assert cpu.available_cores() == 8


def raises(error):
    raise error


def test_peak_memory_without_the_module_resource(monkeypatch):
    with_it = cpu.peak_memory_bytes()
    assert with_it >= 2**20
    monkeypatch.setitem(sys.modules, "resource", None)
    assert abs(cpu.peak_memory_bytes() - psutil.Process().memory_info().rss) < 2**24
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=5, peak_wset=9))
    assert cpu.peak_memory_bytes() == 9  # of Windows


@pytest.mark.parametrize(("platform", "expected"), [("darwin", "Apple M2"), ("win32", "Brand CPU @ 2 GHz")])
def test_the_name_of_the_processor_where_there_is_no_proc(monkeypatch, platform, expected):
    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=1,
        OpenKey=lambda root, path: nullcontext(path),
        QueryValueEx=lambda key, name: (f"Brand CPU @ 2 GHz {'' * len(key + name)} ", 1),
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(cpu.subprocess, "run", lambda command, **_: SimpleNamespace(stdout="Apple M2\n"))
    monkeypatch.setattr(cpu.sys, "platform", platform)
    monkeypatch.setattr(cpu, "cpuinfo", lambda key: "")
    assert cpu.model_name.__wrapped__() == expected
    monkeypatch.setitem(sys.modules, "winreg", None)  # or refused
    monkeypatch.setattr(cpu.subprocess, "run", lambda command, **_: raises(FileNotFoundError()))
    assert cpu.model_name.__wrapped__()


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": ""}, 8),
        ("0::/\n", {"cpu.max": "200000"}, 8),
        ("0::/\n", {"cpu.max": "200000 0"}, 8),
        ("nothing\n0::/\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100"}, 8),
        ("2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400", "cpu,cpuacct/a/cpu.cfs_period_us": "100"}, 4),
        ("", {}, 8),
    ],
)
def test_cores_by_affinity_and_quota(cgroups, tmp_path, monkeypatch, own, files, cores):
    machine(monkeypatch, tmp_path, physical=8, logical=8)
    cgroups(own, files)
    assert cpu.available_cores() == cores
