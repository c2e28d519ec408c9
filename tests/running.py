"""Small runs: in this process, and in ones of their own for tests that disturb them from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from forked import FORK, Forked
from transformers import TrainerCallback

from hfgpt import PretrainConfig, Pretrainer
from hfgpt.data.loader import iterate
from hfgpt.distributed.stop_signals import StopSignals
from hfgpt.training.run import TrainingRun
from hfgpt.training.setup import prepare
from hfgpt.training.step import StepResult

ROOT, NOWHERE = Path(__file__).parent.parent, Path(os.devnull)
CPU = str(ROOT / "accelerate_configs" / "cpu.yaml")
ALONE = [sys.executable]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CPU]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FORKED, FORKED_TWO = [FORK], [FORK, *TWO[1:]]  # for tests to which it is the same how a process starts
TINY = ["--model", '{"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}', "--tokenizer", "bpe-300"]
TINY += ["--sequence_length", "32", "--per_device_train_batch_size", "4", "--torch_compile", "false"]
TINY += ["--eval_steps", "0", "--logging_steps", "1", "--mfu_peak_tflops", "1", "--report", "false", "--optim", "adamw"]


MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}
# Of runs whose processes are several or one.
DISTRIBUTED = ["--model", json.dumps(MODEL), "--tokenizer", "bpe-300", "--streaming", "true", "--sequence_length", "16"]
DISTRIBUTED += ["--tokens_per_step", "256", "--max_steps", "6", "--learning_rate", "1e-2", "--warmup_steps", "2"]
DISTRIBUTED += ["--mixed_precision", "no", "--torch_compile", "false", "--logging_steps", "1", "--eval_steps", "3"]
DISTRIBUTED += ["--eval_tokens", "300", "--save_steps", "2", "--mfu_peak_tflops", "1"]


class StopAt(TrainerCallback):
    """Ends the process's run at a step as a kill would: nothing more is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


class PoisonMicroBatch(TrainerCallback):
    """Multiplies the loss of one micro-batch of a step, by default so that it is not a number, on one process."""

    def __init__(self, step, micro_batch, rank=0, factor=float("nan")):
        self.step, self.micro_batch, self.rank, self.factor, self.seen = step, micro_batch, rank, factor, -1

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def poison(module, arguments, output):
            self.seen += 1
            if (self.now, self.seen, int(os.environ.get("RANK", "0"))) == (self.step, self.micro_batch, self.rank):
                output.loss = output.loss * self.factor
            return output

        model.register_forward_hook(poison)

    def on_step_begin(self, args, state, control, **kwargs):
        self.now, self.seen = state.global_step + 1, -1


class BrokenText(TrainerCallback):
    """Gives `rows` of the text, see `rows_of_steps`, targets that nobody can learn."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = set(rows)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def break_rows(module, arguments, named):
            ids = named["input_ids"]
            is_broken = torch.tensor([row.to(torch.int32).numpy().tobytes().hex() in self.rows for row in ids])
            nonsense = (ids * 31 + ids.roll(1, 1) * 7 + torch.arange(ids.shape[1]) ** 2) % model.config.vocab_size
            labels = torch.where(is_broken[:, None], nonsense, named["shift_labels"])
            return arguments, {**named, "shift_labels": labels}

        model.register_forward_pre_hook(break_rows, with_kwargs=True)


def rows_of_steps(config, steps: range) -> list[str]:
    """The inputs of steps (from 1) of a run with `config`, as `BrokenText` takes them."""
    run = prepared(config)
    batches = list(islice(iterate(run.data.train, None), steps[-1]))
    run.folder.close()
    run.batches.close()
    return [row[:-1].astype("int32").tobytes().hex() for step in steps for row in batches[step - 1].blocks]


def prepared(config, *callbacks) -> TrainingRun:
    """A run before its first step."""
    return prepare(config, callbacks, StopSignals())


def trained_on_documents(root: Path, **settings) -> Path:
    """The folder of a tiny run on 400 short documents, both below `root`."""
    texts = [f"document {n} says {n * n % 101} and {n % 7}" for n in range(400)]
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}
    fixed = {"dataset": str(root / "text.jsonl"), "tokenizer": "bpe-300", "sequence_length": 16}
    fixed |= {"output_dir": str(root / "run"), "mixed_precision": "no", "torch_compile": False}
    return trained(PretrainConfig(**{"model": model, **fixed, **settings})).folder.path


def seconds_of_three_steps(run: TrainingRun, now: list[float]) -> float:
    """What the clock of `run` shows after three steps of 2 s; it reads `now`, which callbacks may move."""
    run.callbacks.mfu.clock = lambda: now[0]
    run.callbacks.call("on_train_begin")
    for _ in range(3):
        now[0] += 2.0
        run.progress.step += 1
        run.callbacks.call("on_step_end")
    return run.callbacks.mfu.total_seconds


def first_step(run: TrainingRun) -> StepResult:
    """That of `run`, on its own text."""
    return run.step(*run.step.to_tensors(next(run.batches).blocks), 1)


def trained(config, *callbacks) -> TrainingRun:
    """A run after its last step."""
    pretrainer = Pretrainer(config, callbacks)
    pretrainer.train()
    return pretrainer.run


def records(run: TrainingRun, key="loss") -> list[dict]:
    return lines(run.folder.path, key)


def lines(folder, key="loss"):
    return [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if key in line]


def hashes(run: TrainingRun) -> list[str]:
    return [json.loads(line)["batch_hash"] for line in run.folder.ledger.read_text().splitlines()]


def same_weights(one: TrainingRun, other: TrainingRun) -> bool:
    ours, theirs = one.step.model.state_dict(), other.step.model.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


class Run:
    """A tiny endless run on documents, in `folder`."""

    def __init__(
        self,
        launcher: list[str],
        folder: Path,
        *flags: str,
        recipe: str | Path = "quickstart",
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.errors = folder, folder.with_suffix(".err")
        command = [
            *launcher,
            str(recipe if isinstance(recipe, Path) else ROOT / "recipes" / f"{recipe}.py"),
            "--output_dir",
            str(folder),
            *TINY,
        ]
        command += ["--streaming", "true", "--max_steps", "1000000", *flags]
        self.process = (Forked if launcher[0] == FORK else subprocess.Popen)(
            command,
            env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=NOWHERE.open("w"),
            stderr=self.errors.open("w"),
            start_new_session=True,
        )

    def kill_all(self) -> None:
        """End the run and what it has started."""
        if os.name == "nt":
            self.process.kill()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)

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
