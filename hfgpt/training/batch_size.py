"""The micro-batch that fits: found by measurement before the run, and made smaller in it where memory runs out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hfgpt.config import Batch
from hfgpt.distributed.device import memory_bytes, synchronize
from hfgpt.distributed.ranks import HostGroup
from hfgpt.errors import RunError, UserError, message

# Sizes that are tried, each at least twice the next smaller one, and for how long.
CANDIDATES, SECONDS_PER_CANDIDATE = 4, 1.0


class MemoryRanOut(Exception):
    """The device had no room for a micro-batch of this step, on one process or more; nothing was updated."""


class MemoryWatch:
    """Sees to it that all processes know of a micro-batch that did not fit before any of them exchanges gradients."""

    def __init__(self, host: HostGroup, sharded: bool) -> None:
        self.host, self.sharded, self.failed = host, sharded, False

    @contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        """Around micro-batch `index` of `count`: raises MemoryRanOut on all processes where one had no room.

        Where processes share the model, or in the last micro-batch, in which they exchange gradients, they are out of
        step by then: the error of the device ends the run.
        """
        alone, last = self.host.world == 1, index == count
        if not alone and not self.sharded and last and index > 1 and any(self.host.gather(self.failed)):
            self.failed = False
            raise MemoryRanOut
        try:
            yield
        except torch.OutOfMemoryError as error:
            if alone:
                raise MemoryRanOut from error
            if self.sharded or last:
                raise
            self.failed = True  # told before the last micro-batch; what comes until then is in vain


@contextmanager
def out_of_memory_named(where: str, fix: str) -> Iterator[None]:
    """Where memory runs out inside: RunError that names `where` and the `fix`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not should_reduce_batch_size(error):
            raise
        raise RunError(f"out of memory {where} ({message(error)}); {fix}") from error


def release_memory(device: torch.device) -> None:
    """Give back to the device what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def fastest_that_fits(
    batch: Batch,
    trial: Callable[[Batch], None],
    needed_bytes: Callable[[Batch], int],
    host: HostGroup,
    device: torch.device,
    optimizer: torch.optim.Optimizer,
) -> tuple[Batch, str]:
    """The step of `batch` cut so that most tokens are done per second, and a line that says what was measured.

    `trial` does one micro-batch forward and backward; `needed_bytes` is the estimate from which the search begins.
    """
    cuda = device.type == "cuda"  # elsewhere a process that takes too much memory is killed
    cuts = candidates(batch, needed_bytes, int(0.9 * memory_bytes(device)), beyond=cuda)
    parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    moments = 8 * parameters if cuda and not optimizer.state else 0
    place = torch.empty(moments, dtype=torch.uint8, device=device)  # which the first step will take
    best, rates = fastest(cuts, trial, host, device)
    del place
    shown = ", ".join(f"{size}: {rate:,.0f}" if rate else f"{size}: does not fit" for size, rate in rates.items())
    return best, f"micro-batch: tokens/s by size, measured: {shown}"


def candidates(batch: Batch, needed_bytes: Callable[[Batch], int], available_bytes: int, beyond: bool) -> list[Batch]:
    """The same step cut otherwise, from the largest micro-batch that fits down; `beyond`: and one that should not.

    Raises UserError where not even one block fits.
    """
    cuts = batch.cuts()
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
    cuts: list[Batch], trial: Callable[[Batch], None], host: HostGroup, device: torch.device
) -> tuple[Batch, dict[int, float | None]]:
    """The cut with most tokens per second in `trial`, one micro-batch forward and backward, and that of each.

    Keys are micro-batches; tokens per second over all processes, of which the slowest counts; None: it did not fit.
    Raises UserError where none does.
    """
    rates: dict[int, float | None] = {}
    for cut in cuts:
        seconds = host.gather(_seconds(cut, trial, device))
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
