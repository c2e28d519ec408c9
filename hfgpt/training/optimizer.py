"""AdamW for all parameters, or Muon for the matrices of the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfgpt.config import PretrainConfig
from hfgpt.distributed.device_kinds import device_kind
from hfgpt.training.muon import BatchedMuon
from hfgpt.training.parameter_groups import parameter_groups

# The usual 0.95 ends with a 2 % higher loss in short runs with small batches (tests/benchmarks/LEDGER.md).
MUON_MOMENTUM = 0.9


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
