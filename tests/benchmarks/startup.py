"""Launch to first step, as it is and compiled, and `hfgpt --help`: python tests/benchmarks/startup.py

The quickstart is launched as a user does, and ended after its first step. The first compiled start has an empty folder
for the caches of torch's compiler ("cold"), the next one the same folder ("warm").
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import REPOSITORY, at_least_one, keep, machine, parser, use_cores


def first_step_seconds(cache: str, *flags: str) -> float:
    """From the launch to the line that tells of the first step."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/one_process.yaml",
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(REPOSITORY)}
        start = time.perf_counter()
        run = subprocess.Popen(
            [*command, "recipes/quickstart.py", "--output_dir", str(Path(folder, "run")), *flags],
            cwd=REPOSITORY,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            for line in run.stdout or []:
                if line.startswith("step ") and "loss" in line:
                    return time.perf_counter() - start
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    raise RuntimeError("the quickstart ended before its first step")


def help_seconds() -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", "from hfgpt.cli import main; main()", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=at_least_one, default=3)
    given = options.parse_args()
    use_cores(given.threads)
    facts = machine(given.threads)
    with tempfile.TemporaryDirectory() as cache:
        found = {"quickstart": [first_step_seconds(cache) for _ in range(given.rounds)]}
        compiled = "--torch_compile", "true"
        found |= {f"compiled, {state}": [first_step_seconds(cache, *compiled)] for state in ("cold", "warm")}
    found["help"] = [help_seconds() for _ in range(given.rounds)]
    for name, seconds in found.items():
        print(f"  {name:14} {statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)
    keep("startup", facts, {"seconds": found})


if __name__ == "__main__":
    main()
