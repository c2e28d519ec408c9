"""This process's share of the machine: threads, cores and memory, within a container's limits."""

import os
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
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * GIB // 4096}[name])
    cgroups(own, files)
    assert cpu.memory_bytes() == gib * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cpu.memory_bytes() == gib * GIB // 2


def test_memory_without_control_groups_is_the_machines(cgroups, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu.memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100"}, 8),
        ("2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400", "cpu,cpuacct/a/cpu.cfs_period_us": "100"}, 4),
        ("", {}, 8),
    ],
)
def test_cores_by_affinity_and_quota(cgroups, monkeypatch, own, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    cgroups(own, files)
    assert cpu.available_cores() == cores
