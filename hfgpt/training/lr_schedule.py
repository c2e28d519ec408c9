"""The learning rate as a pure function of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from hfgpt.config import PretrainConfig


class LearningRate:
    """Learning rate of step 1, 2, ...: a curve of `curve_steps` steps, of which step `since` stands at place `at`, and
    each later one `pace` further on.

    The shapes are those of transformers. Step k of an undisturbed run takes the curve's value at k, not k - 1, so the
    first step of a warm-up already moves, its last one has the peak, and the last step of the run has the end of the
    decay, which then stays.
    """

    def __init__(
        self, config: PretrainConfig, curve_steps: int, since: int = 0, at: float = 0.0, pace: float = 1.0
    ) -> None:
        self.curve_steps, self.since, self.at, self.pace = curve_steps, since, at, pace
        kind, peak, end = config.lr_scheduler_type, config.learning_rate, config.end_learning_rate()
        specific: dict[str, Any] = {}
        if kind == "cosine_with_min_lr":
            specific = {"min_lr": end}
        elif kind == "warmup_stable_decay":
            decay = max(1, (curve_steps - config.warmup_steps) // 5)
            specific = {"num_decay_steps": decay, "min_lr_ratio": end / peak}
        carrier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
        schedule = get_scheduler(kind, carrier, config.warmup_steps, curve_steps, scheduler_specific_kwargs=specific)
        self._peak, self._factor = peak, schedule.lr_lambdas[0]

    def __call__(self, step: int) -> float:
        return self._peak * self._factor(min(self._place(step), self.curve_steps))

    def go_on(self, step: int, max_steps: int, how: str) -> str | None:
        """Go on after `step` in a run that is to end at `max_steps`; what that means, in words, where the curve ends
        at another step. It is kept, or what is left of it is stretched to the new end: the rate does not jump.
        """
        end = self.since + round((self.curve_steps - self.at) / self.pace) if self.pace else self.since
        if end == max_steps:
            return None
        if how == "keep":
            said = f"keeps the curve it was started with, which ends at step {end}, not at max_steps={max_steps}"
        else:
            said = f"takes what is left of its curve, which ended at step {end}, stretched to max_steps={max_steps}"
            place = self._place(step)
            left = max(self.curve_steps - place, 0.0)
            self.since, self.at, self.pace = step, place, left / max(max_steps - step, 1)
        return f"the learning rate {said}"

    def state(self) -> dict[str, Any]:
        """What to pass besides the configuration to go on with the same curve."""
        return {"curve_steps": self.curve_steps, "since": self.since, "at": self.at, "pace": self.pace}

    def _place(self, step: int) -> float:
        return self.at + (step - self.since) * self.pace
