"""All benchmarks that fit this machine: python tests/benchmarks/run.py [--nanogpt CHECKOUT] [--shakespeare input.txt]

Some twelve minutes on two cores (`--quick`: half of that); `--gpu` runs those of a card, in ten. Each prints its
figures, and keeps them in tests/benchmarks/results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from side_by_side import check_paths, nanogpt_model

FOLDER = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nanogpt", help="folder of a checkout of nanoGPT, which is measured too")
    parser.add_argument("--shakespeare", help="the tiny Shakespeare file, without which tokens_to_loss is left out")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--gpu", action="store_true", help="those of a card")
    given = parser.parse_args()
    check_paths(given.shakespeare, nanogpt_model(given.nanogpt))
    nanogpt = ["--nanogpt", given.nanogpt] if given.nanogpt else []
    few, many = ("3", "5") if given.quick else ("5", "15")
    commands = [
        ["train_step.py", "--case", "char-cpu", "--rounds", many, *nanogpt],
        ["train_step.py", "--case", "124m", "--rounds", "2" if given.quick else "7", *nanogpt],
        ["loop_overhead.py", "--rounds", many],
        ["lm_head_memory.py"],
        ["long_memory.py", *(["--quick"] if given.quick else [])],
        ["startup.py", "--rounds", few],
        ["stream.py", "--rounds", few],
        ["checkpoint_stall.py", "--rounds", "1", "--max_steps", "100000"],
    ]
    if given.shakespeare:
        commands.insert(3, ["tokens_to_loss.py", "--dataset", given.shakespeare, "--rounds", few, *nanogpt])
    if given.gpu:
        commands = [["train_step.py", "--gpu", "--seconds", "480", *nanogpt], ["lm_head_memory.py"]]
    failed = []
    for script, *arguments in commands:
        start = time.perf_counter()
        print(f"\n{script} {' '.join(arguments)}", flush=True)
        code = subprocess.run([sys.executable, str(FOLDER / script), *arguments]).returncode
        failed += [script] if code else []
        print(f"  {time.perf_counter() - start:.0f} s" + (f", ended with code {code}" if code else ""), flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
