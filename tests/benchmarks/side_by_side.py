"""Candidates side by side: each a process of its own, which takes its steps while the others wait.

A candidate is the benchmark's own file, started with `--candidate NAME`; it calls `Gate.step` at the beginning of each
step. Also what every benchmark says of the machine, and the file it keeps its results in.

OMP_WAIT_POLICY is left to the user: unset, threads wait awake for a moment for the next kernel, which a quiet machine
repays (two threads on char-cpu: 17 ms a step, and 27 with PASSIVE); PASSIVE serves a busy one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).parents[2]
Rounds = list[dict[str, float]]


class Gate:
    """The candidate's end: waits for the number of steps to take, and tells the seconds that one of them took."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is not an answer
        self._left = 0
        self.device: Any = None  # waited for at both ends of a turn

    def step(self) -> None:
        """To be called at the beginning of each step; ends the process when no more are wanted."""
        if self._left:
            self._left -= 1
            return
        now = self._now()
        if hasattr(self, "_began"):
            self._answer({key: (now[key] - self._began[key]) / self._steps for key in now})
        else:
            self._answer({})
        line = sys.stdin.readline()
        if not line.strip():
            os._exit(0)
        self._steps = int(line)
        self._left = self._steps - 1
        self._began = self._now()

    def _now(self) -> dict[str, float]:
        if self.device is not None and self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return {"wall": time.perf_counter(), "process": time.process_time()}

    def _answer(self, values: dict[str, float]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)


class Candidate:
    """The benchmark's end of one candidate. Raises RuntimeError with its last words where it fails."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCHMARK_LOG") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._answer()

    def turn(self, steps: int) -> dict[str, float]:
        """Takes so many steps; seconds of one, by the wall's clock and the process's own."""
        print(steps, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()

    def _answer(self) -> dict[str, float]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}; BENCHMARK_LOG=1 shows why")
        return json.loads(line)


def side_by_side(candidates: list[Candidate], rounds: int, steps: int, warm_up: int = 3) -> dict[str, Rounds]:
    """Seconds per step of each candidate in each round; in a round each takes its turn."""
    for candidate in candidates:
        candidate.turn(warm_up)
    found: dict[str, Rounds] = {candidate.name: [] for candidate in candidates}
    for _ in range(rounds):
        for candidate in candidates:
            found[candidate.name].append(candidate.turn(steps))
    return found


def ratios(found: dict[str, Rounds], ours: str, clock: str = "wall") -> dict[str, dict[str, float]]:
    """How many times faster `ours` is than each other candidate: median of the rounds' ratios, least and most."""
    result = {}
    for name, theirs in found.items():
        if name != ours:
            each = [other[clock] / own[clock] for own, other in zip(found[ours], theirs, strict=True)]
            result[name] = {"median": statistics.median(each), "least": min(each), "most": max(each)}
    return result


def told(found: dict[str, Rounds], ours: str) -> Iterable[str]:
    """The table that is printed: milliseconds per step, and the ratios by both clocks."""
    by_clock = {clock: ratios(found, ours, clock) for clock in ("wall", "process")}
    yield f"  {'candidate':34} {'ms a step':>10}   {ours} is so many times faster: wall (least to most), CPU time"
    for name, rounds in found.items():
        middle = 1e3 * statistics.median(one["wall"] for one in rounds)
        line = f"  {name:34} {middle:10.2f}"
        if name != ours:
            wall, process = by_clock["wall"][name], by_clock["process"][name]
            line += f"   {wall['median']:.2f} ({wall['least']:.2f} to {wall['most']:.2f}), {process['median']:.2f}"
        yield line


def machine(threads: int | None = None) -> dict[str, Any]:
    """Device, versions, threads and load, as they stand in every result."""
    import torch

    from hfgpt.distributed.cpu import available_cores
    from hfgpt.distributed.device import default_device, device_name

    packages = ("torch", "transformers", "accelerate")
    return {
        "device": device_name(default_device()),
        "cores": available_cores(),
        "threads": threads or available_cores(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def keep(name: str, facts: dict[str, Any], results: dict[str, Any]) -> None:
    """Write results/NAME.json, with the load at the end beside that at the beginning."""
    facts = {**facts, "load_after": [round(load, 2) for load in os.getloadavg()]}
    facts["arguments"] = [Path(word).name for word in sys.argv[1:]]
    RESULTS.mkdir(exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": facts, **rounded}, indent=1) + "\n")
    print(
        f"  machine: {facts['device']}, {facts['threads']} of {facts['cores']} cores; torch {facts['torch']}, ", end=""
    )
    print(
        f"transformers {facts['transformers']}; load {facts['load_before'][0]} to {facts['load_after'][0]}", flush=True
    )


def check_paths(*files: str | None) -> None:
    """Ends with a line and code 2 where one of these is stated and not there."""
    for file in filter(None, files):
        if not Path(file).is_file():
            print(f"error: {file}: no such file; name a checkout of nanoGPT, or the text", file=sys.stderr)
            sys.exit(2)


def nanogpt_model(checkout: str | None) -> str | None:
    """The file by which a checkout of nanoGPT is known."""
    return f"{checkout}/model.py" if checkout else None


def use_cores(threads: int | None) -> None:
    """Keep this process and its children to the first `threads` cores, where the system can."""
    if threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.pop("OMP_NUM_THREADS", None)


def at_least_one(text: str) -> int:
    """For argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1")
    return number


def parser(documentation: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=documentation, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--threads", type=at_least_one, help="cores to keep to; default: all")
    return found
