"""Read losses that the device may still be computing, and handle those that are not finite."""

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

# Skipped steps in a row, because of a non-finite loss or gradient, after which the run ends.
MAX_SKIPPED_STEPS = 10
# Number of steps whose text is kept until their losses are read.
MAX_PENDING_STEPS = 32


class Step(NamedTuple):
    """A step whose loss has not been read yet. `batch`: this process's share of its blocks."""

    step: int
    learning_rate: float
    batch: StepBatch


class NonFiniteGuard:
    """Keeps losses and gradient norms on the device until `read` fetches those of all pending steps at once.

    The optimizer itself skips a step with a non-finite loss or gradient, on the device; this class records and counts
    such steps. `named`: returns what to record about the text in given rows of a process's share of a step.
    """

    def __init__(
        self, run: RunFolder, ranks: Ranks, named: Callable[[StepBatch, list[int]], list[dict[str, Any]]]
    ) -> None:
        self.run, self.ranks, self.named = run, ranks, named
        self.pending: list[Step] = []
        self.values = torch.empty(0, 0)  # (steps, 2 + micro-batches): loss, gradient norm, and the micro-batch losses
        self.skipped_in_a_row = 0

    @property
    def has_given_up(self) -> bool:
        """Whether the run must end because too many steps in a row were skipped."""
        return self.skipped_in_a_row >= MAX_SKIPPED_STEPS

    def add(self, step: Step, result: StepResult) -> None:
        loss, grad_norm, micro_losses, _ = result
        width = 2 + len(micro_losses)
        if len(self.pending) == MAX_PENDING_STEPS or (self.pending and width != self.values.shape[1]):
            self.read()
        if not self.pending and width != self.values.shape[1]:
            # One tensor, because many small ones that outlive a step would fragment the device's memory.
            self.values = torch.empty(MAX_PENDING_STEPS, width, device=loss.device)
        self.values[len(self.pending)] = torch.cat([loss[None], grad_norm[None], micro_losses])
        self.pending.append(step)

    def read(self, alone: bool = False) -> dict[str, float]:
        """Return loss, learning rate and gradient norm of the newest step, and record skipped steps.

        Empty if there was no step since the last call. Call on all processes, or with `alone=True` on one that cannot
        reach the others. Raises RunError after MAX_SKIPPED_STEPS skipped steps in a row.
        """
        if not self.pending:
            return {}
        steps, self.pending = self.pending, []
        values = self.values[: len(steps)].tolist()
        for step, (loss, norm, *micro_losses) in zip(steps, values, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.skipped_in_a_row = 0
                continue
            self.skipped_in_a_row += 1
            is_alone = alone and self.ranks.world_size > 1
            bad_ranks, rows = self._bad_rows(len(step.batch.blocks), micro_losses, is_alone)
            self.run.record(
                event="skip_step",
                step=step.step,
                reason=f"loss {loss}, gradient norm {norm}",
                ranks=bad_ranks,
                documents=self._name_documents(step.batch, rows, is_alone),
            )
            where = f" on process {', '.join(map(str, bad_ranks))}" if bad_ranks and self.ranks.world_size > 1 else ""
            logger.warning("Skipped step %d: loss %s, gradient norm %s%s", step.step, loss, norm, where)
            if self.has_given_up:
                raise RunError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_STEPS} steps in a row, up to step {step.step}; "
                    f"the newest checkpoint in {self.run.path}, if any, is from before; try a lower learning_rate"
                )
        return {"loss": loss, "learning_rate": steps[-1].learning_rate, "grad_norm": norm}

    def _bad_rows(self, share: int, micro_losses: list[float], alone: bool) -> tuple[list[int] | None, list[int]]:
        """Return the ranks, and this process's rows of its `share`, with a non-finite micro-batch loss.

        (None, all rows) if only the gradient is not finite, as it sums over all rows, or if it is `alone`.
        """
        size = -(-share // len(micro_losses))
        rows = [row for row in range(share) if not math.isfinite(micro_losses[row // size])]
        by_rank = [] if alone else self.ranks.gather(bool(rows))
        bad_ranks = [rank for rank, is_bad in enumerate(by_rank) if is_bad]
        return (bad_ranks, rows) if bad_ranks else (None, list(range(share)))

    def _name_documents(self, batch: StepBatch, rows: list[int], alone: bool) -> list[dict[str, Any]]:
        """Return what to record about the text in `rows` of this process's share, and of the others' unless `alone`."""
        first = len(batch.blocks) * self.ranks.rank
        own = self.named(batch, rows) if rows else []
        own = [{**one, "row_of_step": first + one["row_of_step"]} if "row_of_step" in one else one for one in own]
        return own if alone else [one for share in self.ranks.gather(own) for one in share]
