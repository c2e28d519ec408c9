"""The benchmarks start; what they find is no matter of tests."""

import subprocess
import sys
from pathlib import Path

import golden
import pytest

FOLDER = Path(__file__).parent / "benchmarks"
SCRIPTS = ("run", "train_step", "loop_overhead", "lm_head_memory", "long_memory", "startup", "tokens_to_loss")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_tells_how_it_is_run(script):
    done = subprocess.run([sys.executable, FOLDER / f"{script}.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"tests/benchmarks/{script}.py" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"), [(["nope"], "nope: no such run"), (["adamw", "--check", "missing.json"], "missing.json: ")]
)
def test_golden_refuses_what_it_cannot_compare_before_any_run(arguments, named, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["golden.py", *arguments])
    monkeypatch.setattr(golden, "all_fingerprints", None)
    with pytest.raises(SystemExit) as ended:
        golden.main()
    assert ended.value.code == 2 and named in capsys.readouterr().err
