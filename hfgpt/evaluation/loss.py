"""Compute loss, perplexity and bits per byte over runs of tokens, scoring each token once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from hfgpt.distributed.compiler import run_compiled
from hfgpt.errors import UserError
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.model.head_loss import UNSCORED


def windows(lengths: Sequence[int], sequence_length: int, stride: int | None = None) -> np.ndarray:
    """Divide consecutive runs of tokens into windows, int64 (windows, 3): begin, first scored, end.

    A window reads tokens[begin:end], at most `sequence_length` of them and never beyond its run, and scores the token
    after each position from `first scored` on. The next window begins `stride` tokens (default: `sequence_length`)
    later, and scores what the previous one did not:

        a run of 10 tokens, sequence_length 4, stride 2        scores
        0 1 2 3                                                1 2 3 4
            2 3 4 5                                            5 6
                4 5 6 7                                        7 8
                    6 7 8                                      9

    So each token of a run except the first is scored once, after at least `sequence_length` - `stride` other tokens if
    there are that many.
    """
    stride = stride or sequence_length
    found, start = [np.zeros((0, 3), np.int64)], 0
    for length in lengths:
        last = start + length - 1  # no token follows it
        if length > 1:
            begins = np.arange(start, max(start + 1, last - sequence_length + stride), stride)
            ends = np.minimum(begins + sequence_length, last)
            found.append(np.stack([begins, np.concatenate([[start], ends[:-1]]), ends], axis=1))
        start += length
    return np.concatenate(found)


def scored_blocks(tokens: np.ndarray, parts: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and shifted targets, both (windows, sequence_length) int32, of `windows` over `tokens` (N,).

    Targets that a window does not score are -100. Rows are padded with token 0.
    """
    begin, first, end = (column[:, None] for column in parts.T)
    places = begin + np.arange(sequence_length)
    inputs = np.where(places < end, tokens[np.minimum(places, len(tokens) - 1)], 0)
    is_scored = (first <= places) & (places < end)
    targets = np.where(is_scored, tokens[np.minimum(places + 1, len(tokens) - 1)], UNSCORED)
    return inputs.astype(np.int32), targets.astype(np.int32)


@torch.no_grad()
def sum_nll(
    model: nn.Module,
    tokens: np.ndarray,
    parts: np.ndarray,
    *,
    accelerator: Accelerator,
    sequence_length: int,
    batch_size: int,
    attention: Callable[[Tensor], dict[str, Any]] = lambda ids_BT: {},
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the negative log-likelihood in nats that `windows` over `tokens` (N,) score, summed over all processes.

    model: accepts `input_ids, shift_labels, num_items_in_batch, use_cache` as ours does.
    attention: returns further model arguments for token ids (B, T).
    stop: called before each batch; if true, the evaluation returns None. It must agree on all processes.
    """
    world, device = accelerator.num_processes, accelerator.device
    batch_size = max(1, min(batch_size, -(-len(parts) // world)))
    # All batches have the same shape, so nothing is compiled twice; padding windows score nothing.
    padding = np.zeros((-len(parts) % (batch_size * world), 3), np.int64)
    own_parts = np.concatenate([parts, padding])[accelerator.process_index :: world]
    one = torch.ones((), device=device)
    # Allocated at once: small tensors that outlive large ones around them would fragment the memory.
    sums = torch.zeros(len(own_parts) // batch_size, device=device)
    starts = range(0, len(own_parts), batch_size)
    with evaluation_mode(model), SlowWork("evaluation", "batches", len(starts)) as work:
        for number, start in enumerate(work.count(starts)):
            if stop():
                return None
            blocks = scored_blocks(tokens, own_parts[start : start + batch_size], sequence_length)
            ids_BT, labels_BT = (torch.from_numpy(block).to(device) for block in blocks)
            options = {"num_items_in_batch": one, "use_cache": False, **attention(ids_BT)}
            forward = partial(model, input_ids=ids_BT, shift_labels=labels_BT, **options)
            with accelerator.autocast():
                sums[number] = run_compiled(forward).loss
    # In float64, on the CPU because not every device supports it.
    return sum(gather_object([sums.cpu().double().sum().item()]))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode inside the context, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def evaluate_tokens(
    model: nn.Module, tokens: np.ndarray, *, sequence_length: int, scored_bytes: int | None = None, **options: Any
) -> dict[str, Any] | None:
    """Evaluate `model` on one run of `tokens` (N,), in non-overlapping windows; further options as for `sum_nll`.

    Returns `eval_loss` (nats per token), `eval_bits_per_byte` (None if `scored_bytes`, of all tokens except the first,
    is unknown), `eval_tokens` and `eval_seconds`; or None if `stop` ended the evaluation.
    """
    began = time.perf_counter()
    parts = windows([len(tokens)], sequence_length)
    nll = sum_nll(model, tokens, parts, sequence_length=sequence_length, **options)
    if nll is None:
        return None
    metrics = loss_metrics(nll, len(tokens) - 1, scored_bytes)
    return {
        "eval_loss": metrics["loss"],
        "eval_bits_per_byte": metrics["bits_per_byte"],
        "eval_tokens": len(tokens) - 1,
        "eval_seconds": time.perf_counter() - began,
    }


def evaluate_named(
    of_tokens: Callable[..., dict[str, Any] | None], texts: dict[str, tuple[np.ndarray, int | None]]
) -> dict[str, Any] | None:
    """Evaluate named `texts` (tokens, and bytes of all but the first), and their whole: all scored tokens together.

    of_tokens: `evaluate_tokens` of a model.
    """
    found: dict[str, Any] = {}
    nll, tokens, seconds = 0.0, 0, 0.0
    for name, (of_text, scored_bytes) in texts.items():
        if (metrics := of_tokens(of_text, scored_bytes=scored_bytes)) is None:
            return None
        loss, count = metrics["eval_loss"], metrics["eval_tokens"]
        found |= {f"eval_loss/{name}": loss, f"eval_perplexity/{name}": perplexity(loss)}
        found[f"eval_bits_per_byte/{name}"] = metrics["eval_bits_per_byte"]
        nll, tokens, seconds = nll + loss * count, tokens + count, seconds + metrics["eval_seconds"]
    known = [scored_bytes for _, scored_bytes in texts.values() if scored_bytes is not None]
    whole = loss_metrics(nll, tokens, sum(known) if len(known) == len(texts) else None)
    of_whole = {"eval_loss": whole["loss"], "eval_perplexity": whole["perplexity"]}
    of_whole["eval_bits_per_byte"] = whole["bits_per_byte"]
    return {**of_whole, "eval_tokens": tokens, "eval_seconds": seconds, **found}


def loss_metrics(nll_sum: float, tokens: int, scored_bytes: int | None = None) -> dict[str, float | None]:
    """Return `loss` (nats per token), `perplexity` and `bits_per_byte` of `tokens` targets with `nll_sum` nats.

    scored_bytes: UTF-8 bytes of the targets' text; if None or 0, `bits_per_byte` is None.

    Raises UserError if there are no tokens.
    """
    if tokens < 1:
        raise UserError(f"tokens={tokens}: no target was scored; give longer text")
    loss = nll_sum / tokens
    bits_per_byte = nll_sum / math.log(2) / scored_bytes if scored_bytes else None
    return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": bits_per_byte}


def perplexity(loss: float) -> float:
    """Return exp(`loss`), or infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
