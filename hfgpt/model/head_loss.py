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


def head_loss(x_NC: Tensor, weight_VC: Tensor, target_N: Tensor, chunk_size: int | None = None) -> Tensor:
    """Return the summed negative log-likelihood of the targets in nats, a float32 scalar. Targets of -100 are ignored.

    With `chunk_size`, the logits of at most that many tokens exist at once.
    """
    if chunk_size is None or x_NC.shape[0] <= chunk_size:
        return _unchunked_loss(x_NC, weight_VC, target_N)
    # torch's own chunked loss ignores autocast: it would compute the loss itself in bf16, which has three digits.
    has_autocast = torch.is_autocast_enabled(x_NC.device.type)
    if hasattr(F, "linear_cross_entropy") and not has_autocast and not _pads(weight_VC) and torch.is_grad_enabled():
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size, allow_retain_graph=True)
        return F.linear_cross_entropy(x_NC, weight_VC, target_N, reduction="sum", options=options)
    # Each chunk's logits are freed after the forward pass and computed again in the backward pass.
    chunks = zip(x_NC.split(chunk_size), target_N.split(chunk_size), strict=True)
    losses = [checkpoint(_unchunked_loss, x, weight_VC, target, use_reentrant=False) for x, target in chunks]
    return torch.stack(losses).sum()


def _unchunked_loss(x_NC: Tensor, weight_VC: Tensor, target_N: Tensor) -> Tensor:
    V = weight_VC.shape[0]
    if _pads(weight_VC):
        weight_VC = F.pad(weight_VC, (0, 0, 0, -V % 64))
    logits_NV = F.linear(x_NC, weight_VC)[:, :V]  # the added rows get no probability
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
