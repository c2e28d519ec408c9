"""The learning rate as a pure function of the step, or of the tokens before it if steps grow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from hfgpt.config import PretrainConfig
from hfgpt.settings.step_sizes import StepSizes


class LearningRate:
    """The learning rate of steps 1, 2, ..., following one of transformers' schedules over `curve_steps` steps.

    Step `since` uses the schedule's value at position `at`, and each later step moves `pace` positions further. Step k
    of an uninterrupted run uses the value at k, not k - 1: the first warm-up step is above zero, the last one has the
    peak rate, and the last step of the run has the final rate, which later steps keep.

    unit_tokens: if steps grow, the tokens of the first: a step of k times as many then moves k positions, so that the
    schedule goes by tokens; a warm-up still ends with step `warmup_steps`.
    """

    def __init__(
        self,
        config: PretrainConfig,
        curve_steps: float,
        since: int = 0,
        at: float = 0.0,
        pace: float = 1.0,
        unit_tokens: int | None = None,
        sizes: StepSizes | None = None,
    ) -> None:
        self.curve_steps, self.since, self.at, self.pace = curve_steps, since, at, pace
        self.unit_tokens, self.sizes = unit_tokens, sizes
        warmup = self._clock(config.warmup_steps)
        kind, peak, end = config.lr_scheduler_type, config.learning_rate, config.end_learning_rate()
        specific: dict[str, Any] = {}
        if kind == "cosine_with_min_lr":
            specific = {"min_lr": end}
        elif kind == "warmup_stable_decay":
            decay = max(1, (curve_steps - warmup) // 5)
            specific = {"num_decay_steps": decay, "min_lr_ratio": end / peak}
        carrier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
        schedule = get_scheduler(kind, carrier, warmup, curve_steps, scheduler_specific_kwargs=specific)
        self._peak, self._factor = peak, schedule.lr_lambdas[0]

    @classmethod
    def of_run(cls, config: PretrainConfig, sizes: StepSizes, max_steps: int) -> LearningRate:
        """Return the schedule of a new run."""
        if not isinstance(config.tokens_per_step, list):
            return cls(config, max_steps)
        unit = sizes.tokens(0)
        return cls(config, sizes.tokens_after(max_steps) / unit, unit_tokens=unit, sizes=sizes)

    @classmethod
    def of_resumed(cls, config: PretrainConfig, saved: dict[str, Any], sizes: StepSizes, step: int) -> LearningRate:
        """Return the schedule of `saved`, the result of `state`, after `step`."""
        rate = cls(config, **saved, sizes=sizes)
        if step and isinstance(config.tokens_per_step, list) and rate.unit_tokens is None:  # steps grow from now on
            now = {"since": step, "at": rate._place(step), "unit_tokens": sizes.tokens(step - 1)}
            rate = cls(config, **{**saved, **now}, sizes=sizes)
        return rate

    def __call__(self, step: int) -> float:
        return self._peak * self._factor(min(self._place(step), self.curve_steps))

    def extend(self, step: int, max_steps: int, how: str) -> str | None:
        """Continue after `step` in a run that now ends at `max_steps`, without a jump in the learning rate.

        how: "keep" leaves the schedule as it is, "stretch" fits the rest of it to the new end. Returns a sentence for
        the log if the schedule does not end at the same step as the run.
        """
        left = (self.curve_steps - self.at) / self.pace if self.pace else 0
        end = self.since + round(left)
        if self.unit_tokens and self.sizes:
            tokens = self.sizes.tokens_after(self.since) + left * self.unit_tokens
            end = round(self.sizes.steps_at(round(tokens)))
        if end == max_steps:
            return None
        if how == "keep":
            change = f"keeps its schedule, which ends at step {end}, not at max_steps={max_steps}"
        else:
            change = f"schedule, which ended at step {end}, is stretched to max_steps={max_steps}"
            place = self._place(step)
            left = max(self.curve_steps - place, 0.0)
            self.since, self.at, self.pace = step, place, left / max(self._clock(max_steps) - self._clock(step), 1)
        return f"the learning rate {change}"

    def state(self) -> dict[str, Any]:
        """Return the arguments that, with the configuration, rebuild the same schedule."""
        unit = {"unit_tokens": self.unit_tokens} if self.unit_tokens else {}
        return {"curve_steps": self.curve_steps, "since": self.since, "at": self.at, "pace": self.pace, **unit}

    def _place(self, step: int) -> float:
        return self.at + (self._clock(step) - self._clock(self.since)) * self.pace

    def _clock(self, step: int) -> float:
        return self.sizes.tokens_after(step) / self.unit_tokens if self.unit_tokens and self.sizes else step
