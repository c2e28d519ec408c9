"""Figures of steps that the device may still be computing, and the guard against steps that are not finite."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor

from hfgpt.errors import RunError
from hfgpt.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Steps in a row that are left out because of a non-finite loss or gradient before the run gives up.
MAX_SKIPPED_STEPS = 10


class Step(NamedTuple):
    """`loss` and `grad_norm` are scalars on the device until they are read."""

    step: int
    learning_rate: float
    loss: Tensor
    grad_norm: Tensor


class StepGuard:
    """Keeps each step's figures on the device until `read` fetches those of all steps at once."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.pending: list[Step] = []
        self.skipped_in_a_row = 0

    def add(self, step: Step) -> None:
        self.pending.append(step)

    def read(self) -> dict[str, float]:
        """The newest step's figures, empty if there is none since the last call; records the steps left out.

        Raises RunError after MAX_SKIPPED_STEPS of these in a row.
        """
        if not self.pending:
            return {}
        steps, self.pending = self.pending, []
        losses = torch.stack([step.loss.float() for step in steps])
        norms = torch.stack([step.grad_norm.float() for step in steps])
        figures = torch.stack([losses, norms], dim=1).tolist()
        for step, (loss, norm) in zip(steps, figures, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.skipped_in_a_row = 0
                continue
            self.skipped_in_a_row += 1
            self.run.record(event="skip_step", step=step.step, reason=f"loss {loss}, gradient norm {norm}")
            logger.warning("step %d is left out: loss %s, gradient norm %s", step.step, loss, norm)
            if self.skipped_in_a_row == MAX_SKIPPED_STEPS:
                raise RunError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_STEPS} steps in a row, up to step {step.step}; "
                    f"the newest checkpoint in {self.run.path}, if any, is from before; a lower learning_rate may help"
                )
        return {"loss": loss, "learning_rate": steps[-1].learning_rate, "grad_norm": norm}
