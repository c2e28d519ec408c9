"""What each micro-batch costs on this machine, the step staying the same: `hfgpt plan --measure`."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hfgpt.config import Batch, PretrainConfig
from hfgpt.distributed import device_peaks
from hfgpt.distributed.compiler import choose_compile, run_compiled
from hfgpt.distributed.device import (
    default_device,
    device_name,
    peak_memory_bytes,
    release_memory,
    reset_peak_memory,
    start_accelerator,
    synchronize,
)
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.field_types import NOT_CONVERTIBLE, convert, describe
from hfgpt.model import flops
from hfgpt.planning.estimate import GPT2_VOCABULARY, length_of
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.optimizer import build_optimizer
from hfgpt.training.out_of_memory import MemoryRanOut
from hfgpt.training.setup import Machine, build_model
from hfgpt.training.step import TrainStep


@dataclass(frozen=True)
class Measured:
    """One cut of the step, over all of it: seconds, tokens per second, MFU (None: no peak is known), peak bytes.

    All are None where it did not fit.
    """

    batch: Batch
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What was measured, told as lines or as one object, and drawn."""

    rows: list[Measured]
    peak: device_peaks.Peak
    device: str

    def lines(self) -> list[str]:
        best = max(self.rows, key=lambda row: row.tokens_per_second or 0)
        table = ["micro-batch x accumulation     s/step   tokens/s     MFU      memory  speed"]
        for row in self.rows:
            cut = f"{row.batch.micro_batch} x {row.batch.accumulation}"
            if not row.tokens_per_second:
                table.append(f"{cut:>26} does not fit")
                continue
            mfu = f"{row.mfu:.1%}" if row.mfu is not None else "-"
            figures = f"{row.step_seconds:>10.4g} {row.tokens_per_second:>10,.0f} {mfu:>7}"
            part = row.tokens_per_second / (best.tokens_per_second or 1)
            table.append(f"{cut:>26} {figures} {(row.memory_bytes or 0) / 2**30:>7.2f} GiB {part:>6.2f}")
        return [
            f"{best.batch.tokens_per_step:,} tokens a step on {self.device}; whole steps, the median of those in turn",
            *([f"MFU is against {self.peak.tflops:.4g} TFLOP/s ({self.peak.source})"] if self.peak.tflops else []),
            *table,
            f"fastest: micro-batch {best.batch.micro_batch} x accumulation {best.batch.accumulation}",
        ]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row.batch), **asdict(row)} for row in self.rows]
        for row in rows:
            del row["batch"]
        return {"device": self.device, "peak_tflops": self.peak.tflops, "peak_source": self.peak.source, "cuts": rows}

    def plot(self, path: Path) -> None:
        """Tokens per second and memory by micro-batch, as a PNG. Raises UserError where it cannot be written."""
        from matplotlib.figure import Figure  # takes a second, and needs no display used like this

        fitting = [row for row in self.rows if row.tokens_per_second]
        sizes, cuts = range(len(fitting)), [f"{row.batch.micro_batch} x {row.batch.accumulation}" for row in fitting]
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        speed, memory = figure.subplots(1, 2)
        for axes, values, label in (
            (speed, [row.tokens_per_second for row in fitting], "tokens per second"),
            (memory, [(row.memory_bytes or 0) / 2**30 for row in fitting], "peak memory, GiB"),
        ):
            axes.bar(sizes, values)
            axes.set_xticks(sizes, cuts, rotation=45)
            axes.set_xlabel("micro-batch x accumulation")
            axes.set_ylabel(label)
        try:
            figure.savefig(path, format="png", dpi=120)
        except OSError as error:
            raise UserError(f"output={path}: cannot be written ({error.strerror})") from error


MEASURED_FLAGS = (
    *("model", "tokens_per_step", "sequence_length", "vocab_size", "mixed_precision", "torch_compile"),
    *("gradient_checkpointing", "optim", "mfu_peak_tflops"),
)


def measure_flags(flags: dict[str, Any]) -> Measurement:
    """`measure` for flags as text by name. Raises UserError with all problems."""
    problems = [f"{key}={flags[key]}: has no meaning with --measure" for key in flags if key not in MEASURED_FLAGS]
    settings = {key: value for key, value in flags.items() if key != "vocab_size"}
    defaults = {"per_device_train_batch_size": "auto", "max_steps": 1, **length_of(settings)}
    try:
        vocab_size = convert(flags.get("vocab_size", GPT2_VOCABULARY), int)
        if vocab_size < 1:
            problems.append(f"vocab_size={vocab_size}: must be greater than 0")
    except NOT_CONVERTIBLE:
        problems.append(f"vocab_size={flags['vocab_size']}: must be {describe(int)}")
    known = {key: value for key, value in settings.items() if key in MEASURED_FLAGS}
    try:
        config = PretrainConfig.from_layers(defaults, known)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)
    rows, peak = measure(config, vocab_size)
    return Measurement(rows, peak, device_name(default_device()))


class Vocabulary:
    """As much of a tokenizer as a model needs to be made."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def get_vocab(self) -> dict[str, int]:
        return {"the last": self.entries - 1}


def measure(config: PretrainConfig, vocab_size: int, steps: int = 3) -> tuple[list[Measured], device_peaks.Peak]:
    """Whole steps of training on random tokens, the median of `steps` for each micro-batch of 1, 2, 4, ... sequences
    that divides the step, until one does not fit; and the peak that MFU is against.

    Raises UserError with more processes than one.
    """
    ranks = Ranks(config.ddp_timeout)
    if ranks.world_size > 1:
        raise UserError("hfgpt plan --measure: measures one process; start it without a launcher")
    accelerator, precision = start_accelerator(config.mixed_precision, config.ddp_timeout)
    device, cuts = accelerator.device, doubling(config.batch(1))
    compiled = choose_compile(config.torch_compile, device, steps * cuts[0].accumulation)
    machine = Machine(ranks, accelerator, precision, is_sharded=False)
    model = build_model(config, Vocabulary(vocab_size), machine, compiled.enabled, {})
    step = TrainStep(
        *(model, build_optimizer(model, config), cuts[0]),
        accelerator=accelerator,
        ranks=ranks,
        learning_rate=LearningRate(config, 1),
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        attention=lambda ids_BT: {},
    )
    peak = device_peaks.Peak(config.mfu_peak_tflops, "given")
    if peak.tflops is None:
        peak = device_peaks.device_peak(device, precision.name)
    per_token = flops.training_flops_per_token(model.config, config.sequence_length)
    rows = (cuts[0].blocks_per_step, config.sequence_length + 1)
    tokens = torch.randint(vocab_size, rows, generator=torch.Generator().manual_seed(config.seed)).to(device)
    torch._dynamo.config.recompile_limit = 2 * len(cuts) + 8  # one form for each cut
    memory = {}
    for cut in cuts:
        if (held := _peak_bytes(step, cut, tokens)) is None:
            break
        memory[cut] = held
    if not memory:
        raise UserError(f"sequence_length={config.sequence_length}: not even one sequence fits; use a smaller model")
    times: dict[Batch, list[float]] = {cut: [] for cut in memory}
    for _ in range(steps):  # in turn, as a machine is not always equally fast
        for cut in memory:
            times[cut].append(_seconds(step, cut, tokens))
    found = []
    for cut in cuts[: len(memory) + 1]:
        if cut not in memory:
            found.append(Measured(cut))
            continue
        seconds = statistics.median(times[cut])
        rate = cut.tokens_per_step / seconds
        mfu = flops.mfu(rate, per_token, peak.tflops, 1) if peak.tflops else None
        found.append(Measured(cut, seconds, rate, mfu, memory[cut]))
    return found, peak


def doubling(batch: Batch) -> list[Batch]:
    """Cuts of a step whose micro-batches rise from one sequence, each at least twice the one before."""
    chosen: list[Batch] = []
    for cut in batch.splits():
        if not chosen or cut.micro_batch >= 2 * chosen[-1].micro_batch:
            chosen.append(cut)
    return chosen


def _peak_bytes(step: TrainStep, cut: Batch, tokens: torch.Tensor) -> int | None:
    """Peak memory of a first step, which also compiles; None where the device has no room for it."""
    device = step.accelerator.device
    release_memory(device)
    reset_peak_memory(device)
    try:
        run_compiled(lambda: _seconds(step, cut, tokens))
    except MemoryRanOut:
        step.optimizer.zero_grad()
        return None
    return peak_memory_bytes(device)


def _seconds(step: TrainStep, cut: Batch, tokens: torch.Tensor) -> float:
    step.batch, device = cut, step.accelerator.device
    synchronize(device)
    start = time.perf_counter()
    step(tokens[:, :-1], tokens[:, 1:], 1)
    synchronize(device)
    return time.perf_counter() - start
