"""Loss, perplexity and bits per byte of runs of tokens, each token scored once."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from hfgpt.distributed.compiler import run_compiled
from hfgpt.errors import UserError

T = TypeVar("T")

UNSCORED = -100  # torch's mark of a target that does not count
PROGRESS_AFTER_SECONDS = 5.0
PROGRESS_LINE_SECONDS = 30.0  # from one to the next in a file


def windows(lengths: Sequence[int], sequence_length: int, stride: int | None = None) -> np.ndarray:
    """Windows over runs of tokens that follow each other, int64 (windows, 3): begin, first scored, end.

    A window reads tokens[begin:end], at most `sequence_length` of them and never beyond its run, and answers for the
    token after each from `first scored` on. The next one begins `stride` tokens (default: `sequence_length`) later and
    answers for what the one before did not:

        a run of 10 tokens, sequence_length 4, stride 2        answers for
        0 1 2 3                                                1 2 3 4
            2 3 4 5                                            5 6
                4 5 6 7                                        7 8
                    6 7 8                                      9

    So every token of a run but its first is scored once, after at least `sequence_length` - `stride` others where
    there are as many.
    """
    stride = stride or sequence_length
    found, start = [np.zeros((0, 3), np.int64)], 0
    for length in lengths:
        last = start + length - 1  # has no token after it
        if length > 1:
            begins = np.arange(start, max(start + 1, last - sequence_length + stride), stride)
            ends = np.minimum(begins + sequence_length, last)
            found.append(np.stack([begins, np.concatenate([[start], ends[:-1]]), ends], axis=1))
        start += length
    return np.concatenate(found)


def scored_blocks(tokens: np.ndarray, parts: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and shifted targets, both (windows, sequence_length) int32, of `windows` over `tokens` (N,).

    Targets that a window does not answer for are -100; what is left of a row is token 0.
    """
    begin, first, end = (column[:, None] for column in parts.T)
    places = begin + np.arange(sequence_length)
    inputs = np.where(places < end, tokens[np.minimum(places, len(tokens) - 1)], 0)
    scored = (first <= places) & (places < end)
    targets = np.where(scored, tokens[np.minimum(places + 1, len(tokens) - 1)], UNSCORED)
    return inputs.astype(np.int32), targets.astype(np.int32)


@torch.no_grad()
def summed_nll(
    model: nn.Module,
    tokens: np.ndarray,
    parts: np.ndarray,
    *,
    accelerator: Accelerator,
    sequence_length: int,
    batch_size: int,
    attention: Callable[[torch.Tensor], dict[str, Any]] = lambda ids_BT: {},
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Negative log-likelihood in nats of what `windows` over `tokens` (N,) answer for, summed over all processes.

    `model` takes `input_ids, shift_labels, num_items_in_batch, use_cache` as ours does. Batches all have one shape, so
    nothing is compiled twice. `attention`: further arguments of the model for a batch. None where `stop`, asked before
    each batch, broke it off; it must say the same on all processes.
    """
    world, device = accelerator.num_processes, accelerator.device
    batch_size = max(1, min(batch_size, -(-len(parts) // world)))
    padding = np.zeros((-len(parts) % (batch_size * world), 3), np.int64)
    mine = np.concatenate([parts, padding])[accelerator.process_index :: world]
    was_training = model.training
    model.eval()
    one = torch.ones((), device=device)
    # All made beforehand: a small tensor left among the large ones that a batch frees would split their memory, so that
    # the next batch takes more from the system.
    sums = torch.zeros(len(mine) // batch_size, device=device)
    try:
        for number, start in enumerate(shown(range(0, len(mine), batch_size), accelerator.is_main_process)):
            if stop():
                return None
            blocks = scored_blocks(tokens, mine[start : start + batch_size], sequence_length)
            ids, labels = (torch.from_numpy(block).to(device) for block in blocks)
            options = {"num_items_in_batch": one, "use_cache": False, **attention(ids)}
            forward = partial(model, input_ids=ids, shift_labels=labels, **options)
            with accelerator.autocast():
                sums[number] = run_compiled(forward).loss
    finally:
        model.train(was_training)
    # In float64, on the CPU as not every device has it.
    return sum(gather_object([sums.cpu().double().sum().item()]))


def shown(work: Iterable[T], is_main: bool, unit: str = "batch") -> Iterable[T]:
    """`work`, with a progress bar on stderr of the main process once it has taken longer than 5 seconds."""
    interval = 0.5 if sys.stderr.isatty() else PROGRESS_LINE_SECONDS
    options: dict[str, Any] = {"delay": PROGRESS_AFTER_SECONDS, "mininterval": interval, "leave": False}
    return tqdm(work, "evaluation", unit=unit, disable=not is_main, **options)


def evaluate(
    model: nn.Module,
    tokens: np.ndarray,
    *,
    accelerator: Accelerator,
    sequence_length: int,
    batch_size: int,
    scored_bytes: int | None = None,
    attention: Callable[[torch.Tensor], dict[str, Any]] = lambda ids_BT: {},
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Figures of `model` on one run of `tokens` (N,), in windows side by side: `eval_loss` (nats per token),
    `eval_bits_per_byte` (None where `scored_bytes`, those of all tokens but the first, are unknown), `eval_tokens`,
    `eval_seconds`.

    None where `stop` broke it off; arguments as of `summed_nll`.
    """
    began = time.perf_counter()
    options: dict[str, Any] = {"sequence_length": sequence_length, "batch_size": batch_size}
    options |= {"accelerator": accelerator, "attention": attention, "stop": stop}
    nll = summed_nll(model, tokens, windows([len(tokens)], sequence_length), **options)
    if nll is None:
        return None
    found = figures(nll, len(tokens) - 1, scored_bytes)
    return {
        "eval_loss": found["loss"],
        "eval_bits_per_byte": found["bits_per_byte"],
        "eval_tokens": len(tokens) - 1,
        "eval_seconds": time.perf_counter() - began,
    }


def figures(nll_sum: float, tokens: int, scored_bytes: int | None = None) -> dict[str, float | None]:
    """`loss` (nats per token), `perplexity` and `bits_per_byte` of `tokens` targets with `nll_sum` nats in all.

    scored_bytes: UTF-8 bytes of these targets' text; `bits_per_byte` is None where they are not known (None, 0).
    `perplexity` is infinite where a float cannot hold it. Raises UserError where there are no tokens.
    """
    if tokens < 1:
        raise UserError(f"tokens={tokens}: no target was scored, and there is no mean of nothing; give longer text")
    loss = nll_sum / tokens
    bits_per_byte = nll_sum / math.log(2) / scored_bytes if scored_bytes else None
    return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": bits_per_byte}


def perplexity(loss: float) -> float:
    """exp(`loss`), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
