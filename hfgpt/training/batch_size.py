"""Find the micro-batch: the fastest one, measured before the run, or the one that a resumed run used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hfgpt.config import PretrainConfig
from hfgpt.distributed.compiler import run_compiled
from hfgpt.distributed.device import memory_bytes, peak_memory_bytes, release_memory, reset_peak_memory, synchronize
from hfgpt.errors import UserError
from hfgpt.model.memory import training_memory
from hfgpt.settings.batch import Batch
from hfgpt.settings.field_types import AUTO
from hfgpt.training.out_of_memory import MemoryRanOut, is_device_out_of_memory
from hfgpt.training.resume import Resumed
from hfgpt.training.run import Machine
from hfgpt.training.step import TrainStep

CANDIDATES = 4  # number of sizes tried before a run
FIX = "use a smaller model, or --gradient_checkpointing true"


class Timing(NamedTuple):
    """Seconds of one call, on the slowest process, and the peak memory on this one; None if it is not counted."""

    seconds: float
    memory_bytes: int | None


def choose_micro_batch(
    config: PretrainConfig, machine: Machine, step: TrainStep, resumed: Resumed | None, compiled: bool
) -> list[str]:
    """Set the micro-batch: that of a resumed run, or with "auto" the fastest. Returns lines for the plan."""
    if resumed and (recorded := find_recorded_split(config, step.batch, resumed.trainer_state)):
        step.batch, line = recorded
        return [line]
    if config.per_device_train_batch_size != AUTO:
        return []

    def needed_bytes(split: Batch) -> int:
        return training_memory(step.model.config, machine.memory_setting(config, split, compiled)).peak

    step.batch, line = find_fastest_split(step, needed_bytes)
    return [line]


def time_splits(
    step: TrainStep, splits: list[Batch], call: Callable[[Batch], None], rounds: int = 3, seconds: float = 0.0
) -> dict[Batch, Timing]:
    """Time `call` for each way to split the step, smallest micro-batch first, until one does not fit the device.

    Times are medians over at least `rounds` calls and `seconds` in total. Splits that do not fit are left out.
    """
    device, peaks = step.accelerator.device, {}
    for split in splits:
        release_memory(device)
        reset_peak_memory(device)
        fits = True
        try:
            run_compiled(partial(call, split))  # compiles, and fills caches
        except (MemoryRanOut, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_device_out_of_memory(error):
                raise
            fits = False
        if not all(step.ranks.gather(fits)):
            break
        peaks[split] = peak_memory_bytes(device)
    step.optimizer.zero_grad()
    release_memory(device)
    times: dict[Batch, list[float]] = {split: [] for split in peaks}
    done, began = 0, time.perf_counter()
    while peaks and (done < rounds or time.perf_counter() - began < seconds):
        done += 1
        for split in peaks:  # in turn, because the speed of a machine varies
            synchronize(device)
            start = time.perf_counter()
            call(split)
            synchronize(device)
            times[split].append(time.perf_counter() - start)
    slowest = {split: max(step.ranks.gather(statistics.median(times[split]))) for split in peaks}
    return {split: Timing(slowest[split], peaks[split]) for split in peaks}


def find_fastest_split(step: TrainStep, needed_bytes: Callable[[Batch], int]) -> tuple[Batch, str]:
    """Return the split of the step with the most tokens per second, and a line with the measurements.

    needed_bytes: estimates the memory of a split, for choosing candidates. Raises UserError if none fits.
    """
    device, optimizer = step.accelerator.device, step.optimizer
    can_fail = device.type != "cpu"  # where a process that takes too much memory is killed
    splits = choose_candidates(step.batch, needed_bytes, int(0.9 * memory_bytes(device)), beyond=can_fail)
    moments = 8 * sum(parameter.numel() for parameter in step.parameters) if can_fail and not optimizer.state else 0
    reserved = torch.empty(moments, dtype=torch.uint8, device=device)  # AdamW's state, which the first step allocates
    timings = time_splits(step, splits, partial(try_micro_batch, step), seconds=2.0)
    del reserved
    optimizer.zero_grad()
    if not timings:
        tried = ", ".join(str(split.micro_batch) for split in splits)
        raise UserError(f"per_device_train_batch_size=auto: none of {tried} fits the device; {FIX}")
    # A call is one micro-batch on each process.
    rates = {split: split.tokens_per_step / split.accumulation / timing.seconds for split, timing in timings.items()}
    shown = [f"{split.micro_batch}: {rates[split]:,.0f}" for split in rates]
    shown += [f"{split.micro_batch}: does not fit" for split in splits if split not in rates]
    return max(rates, key=lambda split: rates[split]), f"micro-batch: tokens/s by size, measured: {', '.join(shown)}"


def choose_candidates(
    batch: Batch, needed_bytes: Callable[[Batch], int], available_bytes: int, beyond: bool
) -> list[Batch]:
    """Return up to `CANDIDATES` splits, each micro-batch at least twice the previous one, up to the largest that fits.

    beyond: add one that should not fit. Raises UserError if not even one block fits.
    """
    splits = batch.splits()
    fitting = [split for split in splits if needed_bytes(split) <= available_bytes]
    if not fitting:
        sizes = f"{needed_bytes(splits[0]) / 2**30:.1f} GiB, and the device has {available_bytes / 2**30:.1f} free"
        raise UserError(
            f"per_device_train_batch_size=auto: one sequence of {batch.sequence_length} tokens needs {sizes}; {FIX}"
        )
    chosen = splits[len(fitting) : len(fitting) + 1] if beyond else []
    for split in reversed(fitting):
        if not chosen or 2 * split.micro_batch <= chosen[-1].micro_batch:
            chosen.append(split)
    return chosen[:CANDIDATES][::-1]


def try_micro_batch(step: TrainStep, batch: Batch) -> None:
    """Run forward and backward on one micro-batch of random tokens, without exchanging gradients."""
    vocabulary, device = step.model.config.vocab_size, step.accelerator.device
    ids = torch.randint(vocabulary, (batch.micro_batch, batch.sequence_length), device=device)
    options = {"num_items_in_batch": ids.numel(), **step.attention(ids)}
    with step.accelerator.no_sync(step.parallel_model), step.accelerator.autocast():
        run_compiled(lambda: step.parallel_model(input_ids=ids, shift_labels=ids, **options).loss.backward())


def find_recorded_split(
    config: PretrainConfig, batch: Batch, trainer_state: dict[str, Any]
) -> tuple[Batch, str] | None:
    """Return the split that a resumed run last used, if measured or reduced for lack of memory, and a line on it.

    None if settings or processes have changed, or if it is the split that the settings give anyway.
    """
    before, stated = trainer_state["config"], config.per_device_train_batch_size
    recorded = {split.micro_batch: split for split in batch.splits()}.get(trainer_state.get("micro_batch", 0))
    if recorded is None or before["per_device_train_batch_size"] != stated:
        return None
    if stated == AUTO:
        now = config.to_dict()
        is_same = all(before.get(key) == now[key] for key in ("tokens_per_step", "sequence_length"))
        if is_same and trainer_state.get("choices", {}).get("processes", batch.processes) == batch.processes:
            return recorded, f"micro-batch: {recorded.micro_batch}, as before in this run"
    elif recorded.micro_batch < batch.micro_batch:
        return recorded, f"micro-batch: {recorded.micro_batch} again, because this run ran out of memory with more"
    return None
