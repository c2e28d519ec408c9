"""Read losses that the device may still be computing, and handle steps that were skipped or have diverged."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.data.stream import StepBatch
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import RunError
from hfgpt.training.divergence import Divergence
from hfgpt.training.step import StepResult

logger = logging.getLogger(__name__)

# Skipped steps in a row, because of a non-finite loss or gradient or a spike, after which a run ends that does not roll
# back.
MAX_SKIPPED_STEPS = 10
# Number of steps whose text is kept until their losses are read.
MAX_PENDING_STEPS = 32


class Step(NamedTuple):
    """A step whose loss has not been read yet. `batch`: this process's share of its blocks.

    `position`, `skipped_rows`: of the text of all processes, after the step.
    """

    step: int
    learning_rate: float
    batch: StepBatch
    position: dict[str, Any]
    skipped_rows: Counter[str]


class Diverged(NamedTuple):
    """Why and where a run must roll back: `first` is the first bad step, and the text continues after `step`."""

    step: Step
    first: int
    reason: str


class NonFiniteGuard:
    """Keeps losses and gradient norms on the device until `read` fetches those of all pending steps at once.

    The optimizer itself skips a step with a non-finite loss or gradient, or a spike, on the device; this class records
    and counts such steps. `named`: returns what to record about the text in given rows of a process's share of a step.
    `divergence`: of a run that rolls back; `diverged` is then set once it must.
    """

    def __init__(
        self,
        run: RunFolder,
        ranks: Ranks,
        named: Callable[[StepBatch, list[int]], list[dict[str, Any]]],
        divergence: Divergence | None = None,
    ) -> None:
        self.run, self.ranks, self.named, self.divergence = run, ranks, named, divergence
        self.pending: list[Step] = []
        # (steps, 4 + micro-batches): loss, gradient norm, their limits, and the micro-batch losses
        self.values = torch.empty(0, 0)
        self.skipped_in_a_row = 0
        self.diverged: Diverged | None = None

    @property
    def has_given_up(self) -> bool:
        """Whether the run cannot go on from the last step, because of too many bad steps in a row."""
        has_skipped_too_many = self.divergence is None and self.skipped_in_a_row >= MAX_SKIPPED_STEPS
        return has_skipped_too_many or self.diverged is not None

    @property
    def is_suspicious(self) -> bool:
        """Whether the last step that was read was skipped, or its loss far above others: no time for a checkpoint."""
        return self.skipped_in_a_row > 0 or (self.divergence is not None and self.divergence.above > 0)

    def add(self, step: Step, result: StepResult) -> None:
        loss, grad_norm, micro_losses, _, limits = result
        width = 4 + len(micro_losses)
        if len(self.pending) == MAX_PENDING_STEPS or (self.pending and width != self.values.shape[1]):
            self.read()
        if not self.pending and width != self.values.shape[1]:
            # One tensor, because many small ones that outlive a step would fragment the device's memory.
            self.values = torch.full((MAX_PENDING_STEPS, width), math.nan, device=loss.device)
        row = self.values[len(self.pending)]
        row[:2], row[4:] = torch.stack([loss, grad_norm]), micro_losses
        if limits is not None:
            row[2:4] = limits
        self.pending.append(step)

    def read(self, alone: bool = False) -> dict[str, float]:
        """Return loss, learning rate and gradient norm of the newest step, and record skipped steps.

        Empty if there was no step since the last call. Call on all processes, or with `alone=True` on one that cannot
        reach the others. Raises RunError after MAX_SKIPPED_STEPS skipped steps in a row, unless the run rolls back.
        """
        if not self.pending:
            return {}
        steps, self.pending = self.pending, []
        values = self.values[: len(steps)].tolist()
        for step, of_step in zip(steps, values, strict=True):
            if self.diverged is None:  # what comes after that is abandoned
                self._check(step, of_step, alone and self.ranks.world_size > 1)
        loss, norm, *_ = values[-1]
        return {"loss": loss, "learning_rate": steps[-1].learning_rate, "grad_norm": norm}

    def _check(self, step: Step, values: list[float], is_alone: bool) -> None:
        loss, norm, *limits = values[:4]
        bad = [value for value in (loss, norm) if not math.isfinite(value)]
        is_spike = not bad and (loss > limits[0] or norm > limits[1])
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if bad or is_spike else 0
        if bad:
            self._record(step, values[4:], is_alone, f"loss {loss}, gradient norm {norm}")
        elif is_spike:
            reason = f"spike: loss {loss:.4g} (limit {limits[0]:.4g}), gradient norm {norm:.4g} (limit {limits[1]:.4g})"
            facts = {"loss": loss, "loss_limit": limits[0], "grad_norm": norm, "grad_norm_limit": limits[1]}
            self._record(step, values[4:], is_alone, reason, facts)
        skipped, divergence = self.skipped_in_a_row, self.divergence
        if divergence is not None:
            divergence.add(loss, is_skipped=skipped > 0)
            if divergence.has_come:
                limit = f"{divergence.best:.4g} + {divergence.margin:g}"
                reason = f"the loss was above {limit}, or the step skipped, in {divergence.above} steps in a row"
                self.diverged = Diverged(step, step.step - divergence.above + 1, reason)
        elif skipped >= MAX_SKIPPED_STEPS:
            wrong, fix = "loss or gradient was not finite", ""
            if is_spike:
                wrong = "loss or gradient was a spike or not finite"
                fix = ", a larger skip_spikes, or rollback_margin to pass over damaged text"
            raise RunError(
                f"{wrong} in {MAX_SKIPPED_STEPS} steps in a row, up to step {step.step}; the newest checkpoint in "
                f"{self.run.path}, if any, is from before; try a lower learning_rate{fix}"
            )

    def state(self) -> dict[str, Any]:
        """Return what trainer_state.json keeps. Call after `read`."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "divergence": self.divergence.state() if self.divergence else None,
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        state = state or {"skipped_in_a_row": 0, "divergence": None}
        self.pending, self.diverged, self.skipped_in_a_row = [], None, state["skipped_in_a_row"]
        if self.divergence is not None:
            self.divergence.restore(state["divergence"])

    def _record(
        self, step: Step, micro_losses: list[float], is_alone: bool, reason: str, facts: dict[str, float] | None = None
    ) -> None:
        bad_ranks, rows = self._bad_rows(len(step.batch.blocks), micro_losses, is_alone)
        self.run.record(
            event="skip_step",
            step=step.step,
            reason=reason,
            **(facts or {}),
            ranks=bad_ranks,
            documents=self._name_documents(step.batch, rows, is_alone),
        )
        where = f" on process {', '.join(map(str, bad_ranks))}" if bad_ranks and self.ranks.world_size > 1 else ""
        logger.warning("Skipped step %d: %s%s", step.step, reason, where)

    def _bad_rows(self, share: int, micro_losses: list[float], alone: bool) -> tuple[list[int] | None, list[int]]:
        """Return the ranks, and this process's rows of its `share`, with a non-finite micro-batch loss.

        (None, all rows) if only the gradient is not finite, as it sums over all rows, of a spike, or if it is `alone`.
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
