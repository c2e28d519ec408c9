"""Muon: matrices of the same shape are orthogonalized together, and several processes share the work."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from hfgpt.distributed.device import native_precision
from hfgpt.training.muon_shares import Pending, Round, Shares, held, plan_rounds


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, with matrices of the same shape orthogonalized together; in bf16 the updates are equal bit for bit.

    This halves its time on two cores (tests/benchmarks/LEDGER.md). Of several processes, each orthogonalizes its share
    of the matrices and sends them to the others, under DDP and FSDP2. Momentum stays where the parameters are, so that
    a state loads on any number of processes. It is Nesterov's, and updates are scaled to the size of AdamW's. On a
    device without bf16 instructions, where torch's Muon is several times slower, it computes in float32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._step(parameters, group)

    def _step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update `parameters`. Matrices travel while others are orthogonalized.

        `StepBytes.muon_workspace` in model/memory.py counts what exists here at once.
        """
        precision = native_precision(parameters[0].device)
        shares = Shares(torch.bfloat16 if precision == "bf16" else torch.float32)
        rounds = plan_rounds(parameters, shares.world_size)
        collected: Pending | None = shares.collect(rounds[0], self._add_gradients(rounds[0], shares, group))
        sent = None
        for now, following in zip_longest(rounds, rounds[1:]):
            whole, collected = cast(Pending, collected).wait(), None  # which frees what it was made from
            if following:
                collected = shares.collect(following, self._add_gradients(following, shares, group))
            if now[shares.rank]:
                whole = orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
            sending = now, shares.send(now, whole)
            if sent:
                _apply(sent[0], sent[1].wait(), group)
            sent = sending
        if sent:
            _apply(sent[0], sent[1].wait(), group)

    def _add_gradients(self, now: Round, shares: Shares, group: dict[str, Any]) -> dict[nn.Parameter, Tensor]:
        """Add the gradients of a round to the momentum; return the updates that this process has and others need."""
        updates = {}
        for rank, batch in enumerate(now):
            for parameter in batch:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(cast(Tensor, parameter.grad))
                gradient = held(cast(Tensor, parameter.grad))
                momentum = held(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
                if shares.takes_part(rank, parameter):
                    updates[parameter] = gradient.lerp(momentum, group["momentum"])  # Nesterov
        return updates


def _apply(now: Round, by_rank: list[Tensor], group: dict[str, Any]) -> None:
    """Update the parameters of a round with what each rank has orthogonalized of them."""
    for batch, updates in zip(now, by_rank, strict=True):
        for parameter, update in zip(batch, updates, strict=True):
            weights, size = held(parameter), max(parameter.shape) ** 0.5
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(update, alpha=-(group["lr"] * 0.2 * size))  # the factor of match_rms_adamw


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return nearly orthogonal matrices close to `matrices` (n, rows, columns), in their precision.

    The Newton-Schulz iteration of Muon (Jordan et al. 2024): X <- a X + (b A + c A A) X with A = X X^T.
    """
    a, b, c = coefficients
    x = matrices.mT if (tall := matrices.shape[1] > matrices.shape[2]) else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    x = x.squeeze(0)  # a batch of one may round differently from torch's single matrix
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)
