"""`SpikeWindow`: the limits above which the loss or gradient norm of a step is a spike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from hfgpt.config import PretrainConfig
from hfgpt.errors import UserError

# Longer windows have a few fewer false alarms, but find nothing for longer at the start (tests/benchmarks/LEDGER.md).
WINDOW = 128


class SpikeWindow:
    """Loss and gradient norm of the last `window` steps that were not skipped, on the device.

    factor: a step is a spike if its loss or norm is above their mean by this many standard deviations.
    """

    def __init__(self, factor: float, device: torch.device | str = "cpu", window: int | None = None) -> None:
        self.factor = factor
        self.values = torch.full((window or WINDOW, 2), float("nan"), device=device)

    def limits(self) -> torch.Tensor:
        """Return the limits (2,) of loss and norm; NaN, which nothing is above, before there are `window` steps."""
        deviation, mean = torch.std_mean(self.values, dim=0)
        return mean + self.factor * deviation

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor, is_skipped: torch.Tensor) -> None:
        """Add those of a step, in place of the oldest, unless the step is skipped."""
        moved = torch.cat([self.values[1:], torch.stack([loss, grad_norm])[None]])
        self.values.copy_(torch.where(is_skipped, self.values, moved))

    def state(self) -> list[list[float]]:
        """Return the values so far, oldest first. This waits for the device."""
        return self.values[self.values[:, 0].isfinite()].tolist()

    def restore(self, state: Sequence[Sequence[float]] | None) -> None:
        self.values.fill_(float("nan"))
        if state:
            self.values[-len(state) :] = torch.tensor(state)


def build_spike_window(config: PretrainConfig, accelerator: Accelerator) -> SpikeWindow | None:
    """Return the window that the settings ask for. Raises UserError in fp16, whose scaler alone may skip steps."""
    if not config.skip_spikes:
        return None
    if accelerator.scaler is not None:
        raise UserError(
            f"skip_spikes={config.skip_spikes:g}: not with fp16 (mixed_precision={config.mixed_precision}), whose loss "
            "scaling decides by itself which steps are skipped; use --mixed_precision no, or --skip_spikes 0"
        )
    return SpikeWindow(config.skip_spikes, accelerator.device)
