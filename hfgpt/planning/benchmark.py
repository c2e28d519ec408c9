"""`hfgpt plan --measure`: speed and memory of each micro-batch size on this machine, for a fixed step size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hfgpt.comparing.png import new_figure
from hfgpt.config import PretrainConfig
from hfgpt.distributed.compiler import choose_compile
from hfgpt.distributed.device import default_device, device_name, start_accelerator
from hfgpt.distributed.device_peaks import Peak, device_peak
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.model import flops
from hfgpt.planning.estimate import GPT2_VOCABULARY, default_length
from hfgpt.settings.batch import Batch
from hfgpt.training.batch_size import time_splits
from hfgpt.training.build_model import build_model
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.optimizer import build_optimizer
from hfgpt.training.run import Machine
from hfgpt.training.step import TrainStep


@dataclass(frozen=True)
class Measured:
    """Measurements of one split of the step: seconds, tokens per second, MFU (None without a peak), peak bytes.

    All are None if the split did not fit in memory.
    """

    batch: Batch
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None

    @property
    def label(self) -> str:
        return f"{self.batch.micro_batch} x {self.batch.accumulation}"


@dataclass(frozen=True)
class Measurement:
    """All measured splits, which can be printed as lines, a JSON object, or a plot."""

    rows: list[Measured]
    peak: Peak
    device: str

    def lines(self) -> list[str]:
        best = max(self.rows, key=lambda row: row.tokens_per_second or 0)
        lines = [f"{best.batch.tokens_per_step:,} tokens per step on {self.device}; medians over whole steps"]
        if self.peak.tflops:
            lines.append(f"MFU is against {self.peak.tflops:.4g} TFLOP/s ({self.peak.source})")
        lines.append("micro-batch x accumulation     s/step   tokens/s     MFU      memory  speed")
        for row in self.rows:
            if not row.tokens_per_second:
                lines.append(f"{row.label:>26} does not fit")
                continue
            mfu = f"{row.mfu:.1%}" if row.mfu is not None else "-"
            speed = row.tokens_per_second / (best.tokens_per_second or 1)
            memory = f"{row.memory_bytes / 2**30:>7.2f} GiB" if row.memory_bytes else f"{'unknown':>11}"
            rates = f"{row.step_seconds:>10.4g} {row.tokens_per_second:>10,.0f} {mfu:>7}"
            lines.append(f"{row.label:>26} {rates} {memory} {speed:>6.2f}")
        return [*lines, f"fastest: micro-batch {best.batch.micro_batch} x accumulation {best.batch.accumulation}"]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row.batch), **asdict(row)} for row in self.rows]
        for row in rows:
            del row["batch"]
        return {"device": self.device, "peak_tflops": self.peak.tflops, "peak_source": self.peak.source, "cuts": rows}

    def plot(self, path: Path) -> None:
        """Draw tokens per second and memory by micro-batch, as a PNG. Raises UserError if it cannot be written."""
        fitting = [row for row in self.rows if row.tokens_per_second]
        labels = [row.label for row in fitting]
        figure = new_figure()
        speed, memory = figure.subplots(1, 2)
        speed.bar(labels, [row.tokens_per_second for row in fitting])
        speed.set_ylabel("tokens per second")
        memory.bar(labels, [(row.memory_bytes or 0) / 2**30 for row in fitting])
        memory.set_ylabel("peak memory, GiB")
        for axes in (speed, memory):
            axes.tick_params("x", rotation=45)
            axes.set_xlabel("micro-batch x accumulation")
        try:
            figure.savefig(path, format="png", dpi=120)
        except OSError as error:
            raise UserError(f"output={path}: cannot be written ({error.strerror})") from error


class Vocabulary:
    """The part of a tokenizer that a new model needs."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def get_vocab(self) -> dict[str, int]:
        return {"the last": self.entries - 1}


def measure_splits(*, vocab_size: int = GPT2_VOCABULARY, **settings: Any) -> Measurement:
    """Call `measure` with settings given by name. Raises UserError with all problems."""
    defaults = {"per_device_train_batch_size": "auto", "max_steps": 1, **default_length(settings)}
    config = PretrainConfig.from_layers(defaults, settings)
    if isinstance(config.tokens_per_step, list):
        raise UserError("tokens_per_step: --measure times steps of one size; give a number, such as that of one stage")
    rows, peak = measure(config, vocab_size)
    return Measurement(rows, peak, device_name(default_device()))


def measure(config: PretrainConfig, vocab_size: int, steps: int = 3) -> tuple[list[Measured], Peak]:
    """Train whole steps on random tokens, with micro-batches of 1, 2, 4, ... sequences, until one does not fit.

    Returns medians over `steps` steps, and the peak rate for MFU. Raises UserError with several processes.
    """
    ranks = Ranks(config.ddp_timeout)
    if ranks.world_size > 1:
        raise UserError("hfgpt plan --measure: measures one process; start it without a launcher")
    accelerator, precision = start_accelerator(config.mixed_precision, config.ddp_timeout)
    device, splits = accelerator.device, choose_doubling(config.batch(1))
    compiled = choose_compile(config.torch_compile, device, steps * splits[0].accumulation)
    machine = Machine(ranks, accelerator, precision, is_sharded=False)
    model = build_model(config, Vocabulary(vocab_size), machine, compiled.enabled, {})
    step = TrainStep(
        *(model, build_optimizer(model, config), splits[0]),
        accelerator=accelerator,
        ranks=ranks,
        learning_rate=LearningRate(config, 1),
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        attention=lambda ids_BT: {},
    )
    peak = Peak(config.mfu_peak_tflops, "given") if config.mfu_peak_tflops else device_peak(device, precision.name)
    rows = (splits[0].blocks_per_step, config.sequence_length + 1)
    tokens = torch.randint(vocab_size, rows, generator=torch.Generator().manual_seed(config.seed)).to(device)
    torch._dynamo.config.recompile_limit = 2 * len(splits) + 8  # the model is compiled for each micro-batch

    def take_step(split: Batch) -> None:
        step.batch = split
        step(tokens[:, :-1], tokens[:, 1:], 1)

    timings = time_splits(step, splits, take_step, rounds=steps)
    if not timings:
        raise UserError(f"sequence_length={config.sequence_length}: not even one sequence fits; use a smaller model")
    flops_per_token = flops.training_flops_per_token(model.config, config.sequence_length)
    found = []
    for split, timing in timings.items():
        rate = split.tokens_per_step / timing.seconds
        mfu = flops.mfu(rate, flops_per_token, peak.tflops, 1) if peak.tflops else None
        found.append(Measured(split, timing.seconds, rate, mfu, timing.memory_bytes))
    too_large = splits[len(timings) : len(timings) + 1]
    return [*found, *map(Measured, too_large)], peak


def choose_doubling(batch: Batch) -> list[Batch]:
    """Return splits of a step with micro-batches from one sequence up, each at least twice the previous one."""
    chosen: list[Batch] = []
    for split in batch.splits():
        if not chosen or split.micro_batch >= 2 * chosen[-1].micro_batch:
            chosen.append(split)
    return chosen
