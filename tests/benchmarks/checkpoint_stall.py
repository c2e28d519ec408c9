"""How long training stands still for a checkpoint, in steps: python tests/benchmarks/checkpoint_stall.py [--rounds N]

Saves in turn beside training, as runs do, and blocking: until all is on disk. All ratios are to the median step without
a save of the same run. Every setting is a flag; the defaults make a 124M model and a step of a few seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from side_by_side import at_least_one, keep, machine
from transformers import TrainerCallback

from hfgpt import PretrainConfig, Pretrainer
from hfgpt.checkpointing import checkpoint, saver
from hfgpt.distributed.device import default_device, device_name, synchronize
from hfgpt.model.flops import parameter_counts
from hfgpt.training import pretrainer, saving
from hfgpt.training.run import TrainingRun

WARM_UP_STEPS = 2
QUIET_STEPS = 3  # before each save, with nothing being written
STEP, STALL, STEP_WITH_SAVE = "step without a save", "save(): training stands still", "step with the save"
STEP_BESIDE, WRITE = "step while it is written", "write in the background"
BLOCKING, STEP_WITH_BLOCKING = "blocking: save() and the write", "blocking: step with the save"


class Times:
    """Saves and writes in place of the loop's own functions, and keeps the seconds of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {
            name: [] for name in (STEP, STALL, STEP_WITH_SAVE, STEP_BESIDE, WRITE, BLOCKING, STEP_WITH_BLOCKING)
        }
        self.blocking, self.writing, self.bytes = False, False, 0
        self.device = default_device()

    def save(self, run: TrainingRun, at_end: bool = False) -> None:
        """`saving.save`, timed."""
        start = self.now()
        saving.save(run, at_end)
        if self.blocking:
            saving.note_saved(run, wait=True)
        self.seconds[BLOCKING if self.blocking else STALL].append(self.now() - start)

    def write(self, *args) -> Path:
        """`checkpoint.write_checkpoint`, timed."""
        self.writing, start = True, time.perf_counter()
        folder = checkpoint.write_checkpoint(*args)
        if not self.blocking:
            self.seconds[WRITE].append(time.perf_counter() - start)
        self.bytes = sum(path.stat().st_size for path in folder.rglob("*"))
        self.writing = False
        return folder

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


class Rounds(TrainerCallback):
    """Times each step to the beginning of the next, and has a save of each kind made `rounds` times; the last save is
    of the last step, so that none is made at the end.
    """

    def __init__(self, times: Times, rounds: int) -> None:
        self.times, self.left, self.quiet = times, 2 * rounds, 0
        self.began, self.kind = 0.0, STEP

    def on_step_begin(self, args, state, control, **kwargs):
        self.on_train_end(args, state, control)
        self.began, self.kind = self.times.now(), STEP_BESIDE if self.times.writing else STEP

    def on_step_end(self, args, state, control, **kwargs):
        self.quiet = self.quiet + 1 if self.kind == STEP else 0
        if self.quiet <= QUIET_STEPS or state.global_step <= WARM_UP_STEPS + QUIET_STEPS:
            return
        control.should_save, control.should_training_stop = True, self.left == 1
        self.times.blocking = self.left % 2 == 1
        self.kind = STEP_WITH_BLOCKING if self.times.blocking else STEP_WITH_SAVE
        self.left, self.quiet = self.left - 1, 0

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step > WARM_UP_STEPS:
            self.times.seconds[self.kind].append(self.times.now() - self.began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    options, settings = parser.parse_known_args()
    facts, small = machine(), default_device().type == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"output_dir": folder, "model": "gpt2-125m", "tokenizer": "bpe-50257", "max_steps": 100_000}
        defaults |= {"save_steps": 0, "eval_steps": 0, "logging_steps": 100_000, "save_total_limit": 1}
        defaults |= {"sequence_length": 256 if small else 1024, "per_device_train_batch_size": 4 if small else 16}
        defaults |= {"gradient_accumulation_steps": 1 if small else 32, "torch_compile": not small}
        times = Times()
        training = Pretrainer(PretrainConfig.from_cli(defaults, settings), [Rounds(times, options.rounds)])
        pretrainer.save, saver.write_checkpoint = times.save, times.write
        training.train()
    report(times, training.run)
    keep("checkpoint_stall", facts, {"seconds": times.seconds, "bytes": times.bytes})


def report(times: Times, run: TrainingRun) -> None:
    parameters, device = parameter_counts(run.step.model.config).total, device_name(times.device)
    print(f"{parameters:,} parameters, {times.bytes / 1e9:.2f} GB a checkpoint, on {device}")
    step = statistics.median(times.seconds[STEP])
    for name, found in times.seconds.items():
        spread = f"{min(found):.2f} to {max(found):.2f}, {len(found)} times" if found else "never"
        middle = statistics.median(found) if found else float("nan")
        print(f"{name:30} {middle:6.2f} s = {middle / step:5.2f} steps ({spread})")
    for kind, names in (("beside training", (STEP_WITH_SAVE, STEP_BESIDE)), ("blocking", (STEP_WITH_BLOCKING,))):
        lost = sum(seconds - step for name in names for seconds in times.seconds[name])
        print(f"a save {kind} costs {lost / len(times.seconds[names[0]]) / step:.2f} steps in all")


if __name__ == "__main__":
    main()
