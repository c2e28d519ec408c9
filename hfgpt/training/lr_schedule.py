"""The learning rate as a pure function of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from hfgpt.config import PretrainConfig


class LearningRate:
    """The learning rate of steps 1, 2, ..., following one of transformers' schedules over `curve_steps` steps.

    Step `since` uses the schedule's value at position `at`, and each later step moves `pace` positions further. Step k
    of an uninterrupted run uses the value at k, not k - 1: the first warm-up step is above zero, the last one has the
    peak rate, and the last step of the run has the final rate, which later steps keep.
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

    def extend(self, step: int, max_steps: int, how: str) -> str | None:
        """Continue after `step` in a run that now ends at `max_steps`, without a jump in the learning rate.

        how: "keep" leaves the schedule as it is, "stretch" fits the rest of it to the new end. Returns a sentence for
        the log if the schedule does not end at the same step as the run.
        """
        end = self.since + round((self.curve_steps - self.at) / self.pace) if self.pace else self.since
        if end == max_steps:
            return None
        if how == "keep":
            change = f"keeps its schedule, which ends at step {end}, not at max_steps={max_steps}"
        else:
            change = f"schedule, which ended at step {end}, is stretched to max_steps={max_steps}"
            place = self._place(step)
            left = max(self.curve_steps - place, 0.0)
            self.since, self.at, self.pace = step, place, left / max(max_steps - step, 1)
        return f"the learning rate {change}"

    def state(self) -> dict[str, Any]:
        """Return the arguments that, with the configuration, rebuild the same schedule."""
        return {"curve_steps": self.curve_steps, "since": self.since, "at": self.at, "pace": self.pace}

    def _place(self, step: int) -> float:
        return self.at + (step - self.since) * self.pace
