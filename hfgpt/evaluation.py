"""Loss, perplexity and bits per byte of a run of tokens, each token scored once."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn


def scored_blocks(tokens: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and shifted targets, both (blocks, sequence_length) int32, of a run of N tokens.

    Windows of `sequence_length` tokens side by side: every token but the first is a target exactly once. The last
    window is filled up with token 0, whose targets are -100 (not scored).
    """
    count = len(tokens) - 1
    blocks = -(-count // sequence_length)
    inputs = np.zeros(blocks * sequence_length, dtype=np.int32)
    targets = np.full(blocks * sequence_length, -100, dtype=np.int32)
    inputs[:count], targets[:count] = tokens[:-1], tokens[1:]
    return inputs.reshape(blocks, sequence_length), targets.reshape(blocks, sequence_length)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: np.ndarray,
    *,
    accelerator: Accelerator,
    sequence_length: int,
    batch_size: int,
    token_bytes: np.ndarray | None,
) -> dict[str, Any]:
    """Figures of `model` on `tokens` (N,): `eval_loss` (nats per token), `eval_perplexity`, `eval_bits_per_byte`
    (None where the bytes of tokens are unknown), `eval_tokens`, `eval_seconds`; sums over all processes.

    Batches all have one shape (the last is filled with targets that are not scored), so nothing is compiled twice.
    """
    began = time.perf_counter()
    inputs, targets = scored_blocks(tokens, sequence_length)
    per_pass = batch_size * accelerator.num_processes
    missing = -len(inputs) % per_pass
    inputs = np.pad(inputs, ((0, missing), (0, 0)))
    targets = np.pad(targets, ((0, missing), (0, 0)), constant_values=-100)
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    was_training = model.training
    model.eval()
    sums = []
    one = torch.ones((), device=accelerator.device)
    for ids, labels in zip(_batches(inputs[mine], batch_size), _batches(targets[mine], batch_size), strict=True):
        ids, labels = ids.to(accelerator.device), labels.to(accelerator.device)
        sums.append(model(input_ids=ids, shift_labels=labels, num_items_in_batch=one, use_cache=False).loss)
    model.train(was_training)
    # The exact sum over processes is taken in float64 on the CPU where a device has none.
    nll = torch.stack(sums).cpu().double().sum()
    if accelerator.num_processes > 1:
        nll = accelerator.gather(nll.to(accelerator.device, torch.float32)).double().sum()
    loss = nll.item() / (len(tokens) - 1)
    bits_per_byte = None
    if token_bytes is not None and (scored := int(token_bytes[tokens[1:]].sum())):
        bits_per_byte = nll.item() / math.log(2) / scored
    return {
        "eval_loss": loss,
        "eval_bits_per_byte": bits_per_byte,
        "eval_tokens": len(tokens) - 1,
        "eval_seconds": time.perf_counter() - began,
    }


def _batches(rows: np.ndarray, size: int) -> list[torch.Tensor]:
    return list(torch.from_numpy(rows).split(size))
