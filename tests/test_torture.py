"""Kill a run anywhere, as often as you like: the end is that of a run left alone, and `latest` is always whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, str(Path(__file__).parent / "benchmarks" / "torture.py")]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_run_killed_anywhere_ends_bit_for_bit_as_one_left_alone(tmp_path, optim):
    flags = ["--kills", "6", "--seed", "3", "--optim", optim, "--folder", str(tmp_path)]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{optim}: 6 kills, \d+ starts", done.stdout)
