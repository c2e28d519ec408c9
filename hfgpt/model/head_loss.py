"""The loss of the language-model head, with only a limited number of tokens' logits in memory at once.

The logits of a micro-batch are its largest tensor: 8 x 1,024 tokens of GPT-2 take 1.6 GiB in float32, and their
gradient as much again.

Shape suffixes: N tokens, C width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

UNSCORED = -100  # torch's value for ignored targets
HEAD_CHUNK_SIZE = 1024  # tokens whose logits exist at once in training; a compiled model needs no chunks
SOFTMAX_ROWS = 128  # tokens whose softmax exists at once in evaluation; likewise


def head_loss(
    x_NC: Tensor, weight_VC: Tensor, target_N: Tensor, chunk_size: int | None = None, rows: int | None = None
) -> Tensor:
    """Return the summed negative log-likelihood of the targets in nats, a float32 scalar. Targets of -100 are ignored.

    With `chunk_size`, the logits of at most that many tokens exist at once. With `rows` B, returns (B,), the sum of
    each row of N / B tokens; the gradients of their sum are those of the scalar.
    """
    if chunk_size is None or x_NC.shape[0] <= chunk_size:
        if rows is not None:
            return _losses(x_NC, weight_VC, target_N).view(rows, -1).sum(1)
        return _unchunked_loss(x_NC, weight_VC, target_N)
    # torch's own chunked loss ignores autocast: it would compute the loss itself in bf16, which has three digits.
    has_autocast = torch.is_autocast_enabled(x_NC.device.type)
    if hasattr(F, "linear_cross_entropy") and not has_autocast and not _pads(weight_VC) and torch.is_grad_enabled():
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size, allow_retain_graph=True)
        if rows is not None:  # row by row, because its losses of single tokens would be computed twice
            of_rows = zip(x_NC.chunk(rows), target_N.chunk(rows), strict=True)
            losses = [F.linear_cross_entropy(x, weight_VC, t, reduction="sum", options=options) for x, t in of_rows]
            return torch.stack(losses)
        return F.linear_cross_entropy(x_NC, weight_VC, target_N, reduction="sum", options=options)
    # Each chunk's logits are freed after the forward pass and computed again in the backward pass.
    chunks = zip(x_NC.split(chunk_size), target_N.split(chunk_size), strict=True)
    compute = _unchunked_loss if rows is None else _losses
    losses = [checkpoint(compute, x, weight_VC, target, use_reentrant=False) for x, target in chunks]
    return torch.stack(losses).sum() if rows is None else torch.cat(losses).view(rows, -1).sum(1)


def _logits(x_NC: Tensor, weight_VC: Tensor) -> Tensor:
    V = weight_VC.shape[0]
    if _pads(weight_VC):
        weight_VC = F.pad(weight_VC, (0, 0, 0, -V % 64))
    return F.linear(x_NC, weight_VC)[:, :V]  # the added rows get no probability


def _losses(x_NC: Tensor, weight_VC: Tensor, target_N: Tensor) -> Tensor:
    return F.cross_entropy(_logits(x_NC, weight_VC).float(), target_N, reduction="none")


def _unchunked_loss(x_NC: Tensor, weight_VC: Tensor, target_N: Tensor) -> Tensor:
    logits_NV = _logits(x_NC, weight_VC)
    if torch.is_grad_enabled():
        return F.cross_entropy(logits_NV.float(), target_N, reduction="sum")
    # The sum above loses a digit over a thousand tokens, and evaluations would show it; Tensor.sum adds pairwise. The
    # softmax takes a few rows at a time, as a second copy of the logits would set the peak. Compiled code does both by
    # itself.
    rows = len(target_N) if torch.compiler.is_compiling() else SOFTMAX_ROWS
    losses_N = torch.empty(len(target_N), device=x_NC.device)
    for losses, logits, target in zip(losses_N.split(rows), logits_NV.split(rows), target_N.split(rows), strict=True):
        losses.copy_(F.cross_entropy(logits.float(), target, reduction="none"))
    return losses_N.sum()


def _pads(weight_VC: Tensor) -> bool:
    """Return whether to round the vocabulary up to a multiple of 64, which tensor cores need for their full speed."""
    return weight_VC.is_cuda and weight_VC.shape[0] % 64 != 0
