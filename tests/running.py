"""Runs in processes of their own, for tests that disturb them from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
CPU = str(ROOT / "accelerate_configs" / "cpu.yaml")
ALONE = [sys.executable]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CPU]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TINY = ["--model", '{"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}', "--tokenizer", "bpe-300"]
TINY += ["--sequence_length", "32", "--per_device_train_batch_size", "4", "--torch_compile", "false"]
TINY += ["--eval_steps", "0", "--logging_steps", "1"]


class Run:
    """A tiny endless run on documents, in `folder`."""

    def __init__(
        self,
        launcher: list[str],
        folder: Path,
        *flags: str,
        recipe: str = "quickstart",
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.errors = folder, folder.with_suffix(".err")
        command = [*launcher, str(ROOT / "recipes" / f"{recipe}.py"), "--output_dir", str(folder), *TINY]
        command += ["--streaming", "true", "--max_steps", "1000000", *flags]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **(env or {})},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=self.errors.open("w"),
            start_new_session=True,
        )

    def end(self, seconds: float = 60) -> str:
        """Wait for the end; what was said on stderr."""
        self.process.wait(timeout=seconds)
        return self.errors.read_text()

    def records(self, key: str = "step") -> list[dict]:
        """The whole lines of metrics.jsonl that have `key`."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [record for line in lines if line.endswith("\n") and key in (record := json.loads(line))]

    def ledger(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "ledger.jsonl").read_text().splitlines()]

    def wait_for(self, condition: Callable[[], object], seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < until, "nothing happened"
            time.sleep(0.05)

    def wait_for_steps(self, count: int) -> None:
        """Until `count` more steps are recorded."""
        last = max((record["step"] for record in self.records()), default=0)
        self.wait_for(lambda: any(record["step"] >= last + count for record in self.records("loss")))
