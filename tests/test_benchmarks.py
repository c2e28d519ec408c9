"""The benchmarks start; what they find is no matter of tests."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
SCRIPTS = ("run", "train_step", "loop_overhead", "lm_head_memory", "long_memory", "startup", "tokens_to_loss")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_tells_how_it_is_run(script):
    done = subprocess.run([sys.executable, FOLDER / f"{script}.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"tests/benchmarks/{script}.py" in done.stdout
