"""Figures of steps that the device may still be computing, and the guard against steps that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.data.stream import StepBatch
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import RunError
from hfgpt.training.step import StepResult

logger = logging.getLogger(__name__)

# Steps in a row that are left out because of a non-finite loss or gradient before the run gives up.
MAX_SKIPPED_STEPS = 10
# Steps whose text is held until their figures are read.
MAX_PENDING_STEPS = 32


class Step(NamedTuple):
    """`batch` is the whole step's, of all processes."""

    step: int
    learning_rate: float
    batch: StepBatch


class NonFiniteGuard:
    """Keeps each step's figures on the device until `read` fetches those of all steps at once.

    `named`: what to record of the text in some rows of a step's blocks.
    """

    def __init__(
        self, run: RunFolder, host: Ranks, named: Callable[[StepBatch, list[int]], list[dict[str, Any]]]
    ) -> None:
        self.run, self.host, self.named = run, host, named
        self.pending: list[Step] = []
        self.figures = torch.empty(0, 0)  # loss, gradient norm and micro-losses of each pending step
        self.skipped_in_a_row = 0

    @property
    def has_given_up(self) -> bool:
        """Whether as many steps in a row were left out as end the run."""
        return self.skipped_in_a_row >= MAX_SKIPPED_STEPS

    def add(self, step: Step, result: StepResult) -> None:
        loss, grad_norm, micro_losses = result
        width = 2 + len(micro_losses)
        if len(self.pending) == MAX_PENDING_STEPS or (self.pending and width != self.figures.shape[1]):
            self.read()
        if not self.pending and width != self.figures.shape[1]:
            # In one place: small tensors that live on between large freed ones keep their memory from being reused.
            self.figures = torch.empty(MAX_PENDING_STEPS, width, device=loss.device)
        self.figures[len(self.pending)] = torch.cat([loss[None], grad_norm[None], micro_losses])
        self.pending.append(step)

    def read(self, alone: bool = False) -> dict[str, float]:
        """The newest step's figures, empty if there is none since the last call; records the steps left out.

        To be called on all processes, or `alone`, where what was bad on the others is not known. Raises RunError after
        MAX_SKIPPED_STEPS of these in a row.
        """
        if not self.pending:
            return {}
        steps, self.pending = self.pending, []
        figures = self.figures[: len(steps)].tolist()
        for step, (loss, norm, *micro_losses) in zip(steps, figures, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.skipped_in_a_row = 0
                continue
            self.skipped_in_a_row += 1
            ranks, rows = self._bad_rows(len(step.batch.blocks), micro_losses, alone and self.host.world_size > 1)
            self.run.record(
                event="skip_step",
                step=step.step,
                reason=f"loss {loss}, gradient norm {norm}",
                ranks=ranks,
                documents=self.named(step.batch, rows),
            )
            where = f" on process {', '.join(map(str, ranks))}" if ranks and self.host.world_size > 1 else ""
            logger.warning("step %d is left out: loss %s, gradient norm %s%s", step.step, loss, norm, where)
            if self.has_given_up:
                raise RunError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_STEPS} steps in a row, up to step {step.step}; "
                    f"the newest checkpoint in {self.run.path}, if any, is from before; a lower learning_rate may help"
                )
        return {"loss": loss, "learning_rate": steps[-1].learning_rate, "grad_norm": norm}

    def _bad_rows(self, total: int, micro_losses: list[float], unknown: bool) -> tuple[list[int] | None, list[int]]:
        """Ranks and, of the step's `total`, blocks of the micro-batches whose loss is not finite.

        None and all blocks where only the gradient is not, which is summed over all of them, or where it is unknown.
        """
        if unknown:
            return None, list(range(total))
        by_rank = self.host.gather([math.isfinite(loss) for loss in micro_losses])
        share = total // len(by_rank)
        size = -(-share // len(micro_losses))
        rows = [row for row in range(total) if not by_rank[row // share][row % share // size]]
        return (sorted({row // share for row in rows}), rows) if rows else (None, list(range(total)))
