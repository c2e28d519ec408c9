"""Shared by all tests: no network, a fresh Accelerate state for each test, small runs and real text by request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests share the cores, and spinning threads would take them all
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, as in the runs that tests start

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "data"


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if os.name == "nt" and item.get_closest_marker("unix_only"):
            item.add_marker(pytest.mark.skip(reason="needs signals, pipes or files that Windows has not"))


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def text_file(tmp_path) -> Path:
    """About 40,000 characters of one text of varied words."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n * n % 97} words, line {n}: the {n % 13}th of {n // 7}.\n" for n in range(1200)))
    return path


@pytest.fixture
def document_folder(tmp_path) -> Path:
    """600 documents of different lengths in three jsonl files."""
    import json

    folder = tmp_path / "documents"
    folder.mkdir()
    for part in range(3):
        with open(folder / f"{part}.jsonl", "w") as file:
            for n in range(part * 200, (part + 1) * 200):
                text = " ".join(f"document {n} says {n * k % 101}" for k in range(1 + n % 9))
                file.write(json.dumps({"text": text, "id": n}) + "\n")
    return folder


@pytest.fixture
def start(tmp_path, document_folder):
    """Starts a `running.Run` on the documents, waits for its third step, and ends it with the test."""
    from running import Run

    runs = []

    def start(launcher, *flags, **options) -> Run:
        runs.append(Run(launcher, tmp_path / "run", "--dataset", str(document_folder), *flags, **options))
        runs[-1].wait_for_steps(3)
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.kill_all()


@pytest.fixture
def config(tmp_path, text_file):
    """Settings of a run that takes a second; every argument can be replaced."""

    from running import MODEL

    from hfgpt import PretrainConfig

    def build(name: str = "run", **changes) -> Any:
        defaults = {
            "model": MODEL,
            "dataset": str(text_file),
            "tokenizer": "char",
            "sequence_length": 16,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_steps": 6,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "logging_steps": 1,
            "eval_steps": 0,
            "save_steps": 2,
            "mixed_precision": "no",
            "torch_compile": False,
        }
        return PretrainConfig(output_dir=str(tmp_path / name), **{**defaults, **changes})

    return build


@pytest.fixture(autouse=True)
def verification_in_a_fork(request, monkeypatch):
    """Verify in a fork, which has transformers imported: a new Python takes seconds for that.

    Tests that are marked `clean_process`, and other processes, verify as users do.
    """
    if request.node.get_closest_marker("clean_process") or "hfgpt.hub.verify" not in sys.modules:
        return
    from forked import FORK, completed

    from hfgpt.hub import verify

    def run(command, *, env=None, cwd=None, **options) -> subprocess.CompletedProcess:
        if str(verify.SCRIPT) not in command:
            return plain(command, env=env, cwd=cwd, **options)
        return completed([FORK, *command[command.index(str(verify.SCRIPT)) :]], env, timeout=300, cwd=cwd)

    plain = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
