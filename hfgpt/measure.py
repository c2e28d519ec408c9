"""What each micro-batch costs on this machine, the step staying the same: `hfgpt plan --measure`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from hfgpt import flops
from hfgpt.config import Batch, PretrainConfig
from hfgpt.device import choose_compile, peak_memory_bytes, reset_peak_memory, start_accelerator, synchronize
from hfgpt.distributed import HostGroup
from hfgpt.errors import UserError
from hfgpt.micro_batch import MemoryRanOut, release_memory
from hfgpt.optim import LearningRate
from hfgpt.step import TrainingStep


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


class Vocabulary:
    """As much of a tokenizer as a model needs to be made."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return self.entries


def measure(config: PretrainConfig, vocab_size: int, steps: int = 3) -> tuple[list[Measured], flops.Peak]:
    """Whole steps of training on random tokens, the median of `steps` for each micro-batch of 1, 2, 4, ... sequences
    that divides the step, until one does not fit; and the peak that MFU is against.

    Raises UserError with more processes than one.
    """
    host = HostGroup(config.ddp_timeout)
    if host.world > 1:
        raise UserError("hfgpt plan --measure: measures one process; start it without a launcher")
    run = TrainingStep()
    run.config, run.host, run.sharded = config, host, False
    run.accelerator, run.precision = start_accelerator(config.mixed_precision, config.ddp_timeout)
    device, cuts = run.accelerator.device, doubling(config.batch(1))
    run.compile = choose_compile(config.torch_compile, device, steps * cuts[0].accumulation)
    run.learning_rate = LearningRate(config, 1)
    model = run.build_model(Vocabulary(vocab_size), {})
    run.wrap_model()
    peak = flops.Peak(config.mfu_peak_tflops, "given")
    if peak.tflops is None:
        peak = flops.device_peak(device, run.precision.name)
    per_token = flops.training_flops_per_token(model.config, config.sequence_length)
    rows = (cuts[0].blocks_per_step, config.sequence_length + 1)
    tokens = torch.randint(vocab_size, rows, generator=torch.Generator().manual_seed(config.seed)).to(device)
    torch._dynamo.config.recompile_limit = 2 * len(cuts) + 8  # one form for each cut
    memory = {}
    for cut in cuts:
        if (held := _peak_bytes(run, cut, tokens)) is None:
            break
        memory[cut] = held
    times: dict[Batch, list[float]] = {cut: [] for cut in memory}
    for _ in range(steps):  # in turn, as a machine is not always equally fast
        for cut in memory:
            times[cut].append(_seconds(run, cut, tokens))
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
    for cut in batch.cuts():
        if not chosen or cut.micro_batch >= 2 * chosen[-1].micro_batch:
            chosen.append(cut)
    return chosen


def _peak_bytes(run: TrainingStep, cut: Batch, tokens: torch.Tensor) -> int | None:
    """Peak memory of a first step, which also compiles; None where the device has no room for it."""
    device = run.accelerator.device
    release_memory(device)
    reset_peak_memory(device)
    try:
        _seconds(run, cut, tokens)
    except MemoryRanOut:
        run.optimizer.zero_grad()
        return None
    return peak_memory_bytes(device)


def _seconds(run: TrainingStep, cut: Batch, tokens: torch.Tensor) -> float:
    run.batch, device = cut, run.accelerator.device
    synchronize(device)
    start = time.perf_counter()
    run.training_step(tokens[:, :-1], tokens[:, 1:], step=1)
    synchronize(device)
    return time.perf_counter() - start
