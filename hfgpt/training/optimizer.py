"""AdamW for all parameters, or Muon for the matrices of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hfgpt.config import PretrainConfig
from hfgpt.distributed.device import native_precision
from hfgpt.distributed.device_kinds import device_kind
from hfgpt.training.parameter_groups import parameter_groups

# The usual 0.95 ends with a 2 % higher loss in short runs with small batches (tests/benchmarks/LEDGER.md).
MUON_MOMENTUM = 0.9
# Elements orthogonalized at once: more would use memory and save no time.
BATCH_ELEMENTS = 2**23


def build_optimizer(model: nn.Module, config: PretrainConfig) -> torch.optim.Optimizer:
    """Build AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest."""
    groups = parameter_groups(model, config)
    options: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    # The fused form can skip a step on the device, without a synchronisation, but not on every kind of device.
    has_fused_skip = device_kind(next(model.parameters()).device).has_fused_skip
    options["fused"] = has_fused_skip or None
    if config.optim == "adamw":
        return (torch.optim.AdamW if has_fused_skip else SkippingAdamW)(groups, **options)
    matrices, *groups = groups
    muon = BatchedMuon([matrices], momentum=MUON_MOMENTUM)
    return MuonWithAdamW(muon, torch.optim.AdamW(groups, **options))


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that skips a step if `found_inf` is 1, which synchronises the device.

    For devices whose fused form does not. On mps it ignores `found_inf`, and with it what the gradient scaler has found
    (https://github.com/pytorch/pytorch/pull/186360).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.__dict__.pop("found_inf", 0):  # torch's own step refuses the attribute
            super().step()


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, with matrices of the same shape orthogonalized together; in bf16 the updates are equal bit for bit.

    This halves its time on two cores (tests/benchmarks/LEDGER.md), and under FSDP2 gathers a batch once instead of each
    matrix in each product. Momentum is Nesterov's, and updates are scaled to the size of AdamW's. On a device without
    bf16 instructions, where torch's Muon is several times slower, it computes in float32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for batch in _batches(group["params"]):
                self._step(batch, group)

    def _step(self, batch: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update the parameters in `batch`, all of one shape (rows, columns)."""
        updates = []
        for parameter in batch:
            gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(momentum, group["momentum"]))  # Nesterov
        stacked = torch.stack(updates)
        if isinstance(stacked, DTensor):
            stacked = stacked.full_tensor()
        dtype = torch.bfloat16 if native_precision(stacked.device) == "bf16" else torch.float32
        made = orthogonalize(stacked.to(dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = group["lr"] * 0.2 * max(stacked.shape[1:]) ** 0.5  # the factor of match_rms_adamw
        for parameter, update in zip(batch, made, strict=True):
            if isinstance(parameter, DTensor):
                update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-rate)


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group the parameters that have gradients by shape."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_shape.setdefault(parameter.shape, []).append(parameter)
    for shape, alike in by_shape.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(alike), size):
            yield alike[first : first + size]


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


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the first parameter group and AdamW for the others, as one optimizer with one state.

    Muon orthogonalizes each update (Jordan et al. 2024), scaled to the size of AdamW's updates (Liu et al. 2025), so
    that learning rates tuned for AdamW work. A step is skipped if `found_inf` is 1, which synchronizes the device.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if getattr(self, "found_inf", 0):
            return
        # Assigned at each step, because loading a state replaces these objects.
        for part, groups in ((self.muon, self.param_groups[:1]), (self.adamw, self.param_groups[1:])):
            part.param_groups, part.state = groups, self.state
            part.step()
