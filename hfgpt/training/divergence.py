"""`Divergence`: whether the loss has stayed far above its lowest mean for many steps."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from hfgpt.config import PretrainConfig
from hfgpt.messages.formats import counted
from hfgpt.training.spikes import WINDOW


class Divergence:
    """Follows the losses of all steps in order.

    margin: how far a loss is above the lowest mean of `steps` losses to be above. After `steps` such steps in a row the
    run has diverged. A skipped step counts as one, because it shows no loss that is not above.
    """

    def __init__(self, margin: float, steps: int) -> None:
        self.margin, self.steps = margin, steps
        self.recent: deque[float] = deque(maxlen=steps)
        self.best, self.above = math.inf, 0

    @property
    def has_come(self) -> bool:
        return self.above >= self.steps

    def add(self, loss: float, is_skipped: bool) -> None:
        is_above = is_skipped or loss > self.best + self.margin
        self.above = self.above + 1 if is_above else 0
        if is_skipped:
            return
        self.recent.append(loss)
        if len(self.recent) == self.steps:
            self.best = min(self.best, math.fsum(self.recent) / self.steps)

    def state(self) -> dict[str, Any]:
        best = None if self.best == math.inf else self.best
        return {"losses": list(self.recent), "best": best, "above": self.above}

    def restore(self, state: dict[str, Any] | None) -> None:
        state = state or {"losses": [], "best": None, "above": 0}
        self.recent = deque(state["losses"], maxlen=self.steps)
        self.best = math.inf if state["best"] is None else state["best"]
        self.above = state["above"]


def build_divergence(config: PretrainConfig) -> Divergence | None:
    """Return what the settings ask for."""
    return None if config.rollback_margin is None else Divergence(config.rollback_margin, config.rollback_steps)


def describe_guards(config: PretrainConfig, max_steps: int) -> str:
    """Return a line of the plan for `skip_spikes` and `rollback_margin`; empty if neither is set."""
    found = []
    if config.skip_spikes:
        never = f", which this run of {max_steps:,} never reaches" if max_steps <= WINDOW else ""
        found.append(f"skip spikes above {config.skip_spikes:g} standard deviations, from step {WINDOW + 1} on{never}")
    if config.rollback_margin is not None:
        steps, times = counted(config.rollback_steps, "step"), counted(config.max_rollbacks, "time")
        above = f"a loss {config.rollback_margin:g} above its lowest mean"
        found.append(f"roll back after {steps} with {above}, at most {times}")
    return "; ".join(found)
