"""Loss, perplexity and bits per byte of a run of tokens, each token scored once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from hfgpt.errors import UserError


def scored_blocks(tokens: np.ndarray, sequence_length: int, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and shifted targets, both (blocks, sequence_length) int32, of a run of N tokens.

    Windows of `sequence_length` tokens side by side: every token but the first is a target exactly once. The rest,
    up to a multiple of `multiple` blocks, is token 0, whose targets are -100 (not scored).
    """
    count = len(tokens) - 1
    shape = (-(-count // (sequence_length * multiple)) * multiple, sequence_length)
    inputs, targets = np.zeros(shape, dtype=np.int32), np.full(shape, -100, dtype=np.int32)
    inputs.flat[:count], targets.flat[:count] = tokens[:-1], tokens[1:]
    return inputs, targets


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: np.ndarray,
    *,
    accelerator: Accelerator,
    sequence_length: int,
    batch_size: int,
    token_bytes: np.ndarray | None,
    attention: Callable[[torch.Tensor], dict[str, Any]] = lambda ids_BT: {},
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Figures of `model` on `tokens` (N,): `eval_loss` (nats per token), `eval_bits_per_byte` (None where the bytes
    of tokens are unknown), `eval_tokens`, `eval_seconds`; sums over all processes.

    Batches all have one shape, so nothing is compiled twice. `attention`: further arguments of the model for a batch.
    None where `stop`, asked before each batch, broke it off; it must say the same on all processes.
    """
    began = time.perf_counter()
    world, device = accelerator.num_processes, accelerator.device
    blocks = scored_blocks(tokens, sequence_length, batch_size * world)
    inputs, targets = (torch.from_numpy(part[accelerator.process_index :: world]).split(batch_size) for part in blocks)
    was_training = model.training
    model.eval()
    one = torch.ones((), device=device)
    sums, stopped = [], False
    for ids, labels in zip(inputs, targets, strict=True):
        if stopped := stop():
            break
        ids, labels = ids.to(device), labels.to(device)
        options = {"num_items_in_batch": one, "use_cache": False, **attention(ids)}
        with accelerator.autocast():
            sums.append(model(input_ids=ids, shift_labels=labels, **options).loss)
    model.train(was_training)
    if stopped:
        return None
    # In float64, on the CPU as not every device has it.
    nll = sum(gather_object([torch.stack(sums).cpu().double().sum().item()]))
    scored_bytes = 0 if token_bytes is None else int(token_bytes[tokens[1:]].sum())
    return {
        "eval_loss": nll / (len(tokens) - 1),
        "eval_bits_per_byte": nll / math.log(2) / scored_bytes if scored_bytes else None,
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
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    bits_per_byte = nll_sum / math.log(2) / scored_bytes if scored_bytes else None
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}
