"""The micro-batch: found by measurement before the run, or as a run that continues had it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hfgpt.config import AUTO, Batch, PretrainConfig
from hfgpt.distributed.compiler import run_compiled
from hfgpt.distributed.device import memory_bytes, release_memory, synchronize
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.training.step import TrainStep

# Sizes that are tried, each at least twice the next smaller one, and for how long.
CANDIDATES, SECONDS_PER_CANDIDATE = 4, 1.0


def fastest_that_fits(step: TrainStep, needed_bytes: Callable[[Batch], int]) -> tuple[Batch, str]:
    """The same step split so that most tokens are done per second, and a line that says what was measured.

    needed_bytes: the estimate of memory from which the search begins.
    """
    device, optimizer = step.accelerator.device, step.optimizer
    cuda = device.type == "cuda"  # elsewhere a process that takes too much memory is killed
    cuts = candidates(step.batch, needed_bytes, int(0.9 * memory_bytes(device)), beyond=cuda)
    moments = 8 * sum(parameter.numel() for parameter in step.parameters) if cuda and not optimizer.state else 0
    place = torch.empty(moments, dtype=torch.uint8, device=device)  # which the first step will take
    best, rates = fastest(cuts, partial(try_micro_batch, step), step.ranks, device)
    del place
    optimizer.zero_grad()
    shown = ", ".join(f"{size}: {rate:,.0f}" if rate else f"{size}: does not fit" for size, rate in rates.items())
    return best, f"micro-batch: tokens/s by size, measured: {shown}"


def try_micro_batch(step: TrainStep, batch: Batch) -> None:
    """One micro-batch of random tokens forward and backward; no gradients are exchanged."""
    vocabulary, device = step.model.config.vocab_size, step.accelerator.device
    ids = torch.randint(vocabulary, (batch.micro_batch, batch.sequence_length), device=device)
    options = {"num_items_in_batch": ids.numel(), **step.attention(ids)}
    with step.accelerator.no_sync(step.parallel_model), step.accelerator.autocast():
        run_compiled(lambda: step.parallel_model(input_ids=ids, shift_labels=ids, **options).loss.backward())


def find_recorded_batch(
    config: PretrainConfig, batch: Batch, trainer_state: dict[str, Any]
) -> tuple[Batch, str] | None:
    """How the run split its step in the end, as measured or smaller where memory ran out; and a line that says so.

    None where the settings or the number of processes are not as they were, or nothing is other than stated.
    """
    then, asked = trainer_state["config"], config.per_device_train_batch_size
    recorded = {cut.micro_batch: cut for cut in batch.splits()}.get(trainer_state.get("micro_batch", 0))
    if recorded is None or then["per_device_train_batch_size"] != asked:
        return None
    if asked == AUTO:
        sizes = [(run.get("tokens_per_step"), run.get("sequence_length")) for run in (then, config.to_dict())]
        processes = trainer_state.get("choices", {}).get("processes", batch.processes)
        if sizes[0] == sizes[1] and processes == batch.processes:
            return recorded, f"micro-batch: {recorded.micro_batch}, as in this run before"
    elif recorded.micro_batch < batch.micro_batch:
        return recorded, f"micro-batch: {recorded.micro_batch} again, as memory ran out with more in this run"
    return None


def candidates(batch: Batch, needed_bytes: Callable[[Batch], int], available_bytes: int, beyond: bool) -> list[Batch]:
    """The same step cut otherwise, from the largest micro-batch that fits down; `beyond`: and one that should not.

    Raises UserError where not even one block fits.
    """
    cuts = batch.splits()
    fitting = [cut for cut in cuts if needed_bytes(cut) <= available_bytes]
    if not fitting:
        needed = needed_bytes(cuts[0]) / 2**30
        raise UserError(
            f"per_device_train_batch_size=auto: one sequence of {batch.sequence_length} tokens needs some "
            f"{needed:.1f} GiB, and the device has {available_bytes / 2**30:.1f} free; use a smaller model, or "
            "--gradient_checkpointing true"
        )
    chosen = cuts[len(fitting) : len(fitting) + 1] if beyond else []
    for cut in reversed(fitting):
        if not chosen or 2 * cut.micro_batch <= chosen[-1].micro_batch:
            chosen.append(cut)
    return chosen[:CANDIDATES]


def fastest(
    cuts: list[Batch], trial: Callable[[Batch], None], ranks: Ranks, device: torch.device
) -> tuple[Batch, dict[int, float | None]]:
    """The cut with most tokens per second in `trial`, one micro-batch forward and backward, and that of each.

    Keys are micro-batches; tokens per second over all processes, of which the slowest counts; None: it did not fit.
    Raises UserError where none does.
    """
    rates: dict[int, float | None] = {}
    for cut in cuts:
        seconds = ranks.gather(_seconds(cut, trial, device))
        slowest = None if None in seconds else max(value for value in seconds if value is not None)
        rates[cut.micro_batch] = slowest and cut.micro_batch * cut.sequence_length * cut.processes / slowest
    best = max(cuts, key=lambda cut: rates[cut.micro_batch] or 0)
    if rates[best.micro_batch] is None:
        tried = ", ".join(map(str, rates))
        raise UserError(
            f"per_device_train_batch_size=auto: none of {tried} fits the device; use a smaller model, or "
            "--gradient_checkpointing true"
        )
    return best, rates


def _seconds(cut: Batch, trial: Callable[[Batch], None], device: torch.device) -> float | None:
    """Seconds of one micro-batch, the fastest of some; None where the device has no room for it."""
    times: list[float] = []
    try:
        trial(cut)  # compiles, and fills caches
        began = time.perf_counter()
        while len(times) < 2 or time.perf_counter() - began < SECONDS_PER_CANDIDATE:
            synchronize(device)
            start = time.perf_counter()
            trial(cut)
            synchronize(device)
            times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return None
    finally:
        release_memory(device)
    return min(times)
