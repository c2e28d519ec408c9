"""AdamW with GPT-2's weight decay groups, and Muon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hfgpt.config import PretrainConfig

# Of Muon; with 0.95, its usual one, short runs of small batches end 2 % higher (tests/benchmarks/LEDGER.md).
MUON_MOMENTUM = 0.9
# Of the matrices that are orthogonalised at a time: more would take memory, and no time off.
BATCH_ELEMENTS = 2**23


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay, biases and norms do not; every trainable parameter is in exactly one group."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: PretrainConfig) -> torch.optim.Optimizer:
    """AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the others.

    Fused, as only that form of AdamW can leave a step out (`found_inf`) without the host having to look.
    """
    groups, betas = parameter_groups(model, config.weight_decay), (config.adam_beta1, config.adam_beta2)
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "eps": config.adam_epsilon, "fused": True}
    if config.optim == "adamw":
        return torch.optim.AdamW(groups, **options)
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2 and p.requires_grad]
    taken = set(map(id, matrices))
    groups = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
    rate = config.muon_learning_rate or config.learning_rate
    muon = BatchedMuon(matrices, rate, config.weight_decay, MUON_MOMENTUM)
    muon.param_groups[0]["lr_scale"] = rate / config.learning_rate
    return MuonWithAdamW(muon, torch.optim.AdamW(groups, **options))


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, its updates to the bit, with matrices of one shape orthogonalised together.

    It takes half the time on two cores (tests/benchmarks/LEDGER.md). Where processes share the parameters, a batch is
    gathered once, and not each matrix in each product. Always with Nesterov's momentum and updates as large as AdamW's.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, lr, weight_decay, momentum, nesterov=True, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for batch in _batches(group["params"]):
                self._step(batch, group)

    def _step(self, batch: list[nn.Parameter], group: dict[str, Any]) -> None:
        """For parameters (rows, columns) of one shape."""
        updates = []
        for parameter in batch:
            gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(momentum, group["momentum"]))  # Nesterov's
        stacked = torch.stack(updates)
        if isinstance(stacked, DTensor):
            stacked = stacked.full_tensor()
        made = orthogonalized(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = group["lr"] * 0.2 * max(stacked.shape[1:]) ** 0.5  # of match_rms_adamw
        for parameter, update in zip(batch, made, strict=True):
            if isinstance(parameter, DTensor):
                update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-rate)


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those with gradients, by shape."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_shape.setdefault(parameter.shape, []).append(parameter)
    for shape, alike in by_shape.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(alike), size):
            yield alike[first : first + size]


def orthogonalized(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearly the orthogonal factors of `matrices` (n, rows, columns), in bf16, by the Newton-Schulz iteration of Muon
    (Jordan et al. 2024): X <- a X + (b A + c A A) X with A = X X^T.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    x = x.squeeze(0)  # as torch does with one alone: a batch of one may round otherwise
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for one group of matrices and torch's AdamW for the other groups, as one optimizer with one state.

    Muon orthogonalises each update (Jordan et al. 2024), scaled to the size that AdamW's have (Liu et al. 2025), so
    that AdamW's learning rates serve. A step is left out where `found_inf` is 1; that the host has to look for.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if getattr(self, "found_inf", 0):
            return
        # Handed over at each step, as loading a state makes new ones.
        for part, groups in ((self.muon, self.param_groups[:1]), (self.adamw, self.param_groups[1:])):
            part.param_groups, part.state = groups, self.state
            part.step()
