"""`WeightAverage`: the average of the weights after each of many steps, which may be a better model than the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GPT2Config

from hfgpt.config import PretrainConfig
from hfgpt.messages.formats import counted, rounded
from hfgpt.model.memory import Setting, average_bytes
from hfgpt.training.step import StepResult

PART = 2**20  # numbers exchanged at once, so that an exchange takes little memory


class WeightAverage:
    """Averages the weights after each step in float32, on their device. Under FSDP2 a process averages its shards.

    decay: weights of k steps ago count `decay`^k times as much as the newest; None: all count the same. The counts are
    divided by their sum, so that the initial weights, which do not count, need no correction.
    first_step: the first step whose weights count. Skipped steps do not. `begins` is later if the average was not yet
    there at a resume.
    """

    def __init__(self, model: Any, decay: float | None, first_step: int = 1) -> None:
        self.model, self.decay, self.first_step, self.begins = model, decay, first_step, first_step
        self.parameters = list(model.parameters())
        self.tensors = [torch.zeros_like(weights) for weights in self._weights()]
        # On the device, because reading there whether a step was skipped would stall it.
        self._steps = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)

    @property
    def steps(self) -> int:
        """Return how many steps the average has. This waits for the device."""
        return int(self._steps)

    @torch.no_grad()
    def update(self, step: int, result: StepResult) -> None:
        """Add the weights after step `step`, unless the step was skipped."""
        if step < self.first_step:
            return
        is_made = ~result.is_skipped
        self._steps += is_made
        count = self._steps.clamp(min=1).float()
        share = 1 / count
        if self.decay is not None:  # (1 - decay) / (1 - decay^count), exact in float32
            rate = math.log(self.decay)
            share = math.expm1(rate) / torch.expm1(rate * count)
        share = (share * is_made).clamp(max=1)
        for average, weights in zip(self.tensors, self._weights(), strict=True):
            average.lerp_(weights, share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchange the weights of the model and their average inside the context. Call on all processes."""
        self._reshard()
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            for pair in self._parts():
                _exchange(*pair)
                swapped.append(pair)
            yield
        finally:
            self._reshard()
            for pair in swapped:
                _exchange(*pair)

    def continues(self, saved: dict[str, Any] | None, config: dict[str, Any], step: int) -> bool:
        """Return whether this is the average `saved` by a run with `config`, and not one that starts after `step`."""
        is_same_kind = (config.get("ema_decay") is None) == (self.decay is None)
        return bool(saved and saved["steps"]) and is_same_kind and step >= self.first_step

    def reset(self, step: int) -> None:
        """Forget all steps, as the run goes on after `step`."""
        for average in self.tensors:
            average.zero_()
        self._steps.zero_()
        self.begins = max(self.first_step, step + 1)

    @torch.no_grad()
    def take(self, saved: dict[str, Any]) -> None:
        """Continue from the weights that the model has now, as the average that has this `state`."""
        for average, weights in zip(self.tensors, self._weights(), strict=True):
            average.copy_(weights)
        self._steps.fill_(saved["steps"])
        self.begins = saved["first_step"]

    def state(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Return what trainer_state.json keeps: `steps`, the first of them, and whether a checkpoint's model is this.

        That is so if its loss was lower in the newest `evaluation`.
        """
        is_better = evaluation.get("eval_loss_ema", math.inf) < evaluation.get("eval_loss", math.inf)
        return {"steps": (steps := self.steps), "first_step": self.begins, "is_model": steps > 0 and is_better}

    def why_unused(self, evaluation: dict[str, Any], step: int) -> str:
        """Return why a run that ends after `step` has no average, or none that was evaluated; empty if it has."""
        if not (steps := self.steps):
            all_skipped = f"all steps from {self.begins:,} on were skipped"
            too_early = f"it begins with step {self.begins:,}, and the run ended after step {step:,}"
            return f"There is no average of the weights: {too_early if step < self.begins else all_skipped}."
        if "eval_loss_ema" not in evaluation:
            return f"The average of {counted(steps, 'step')} was not evaluated: the newest weights are the model."
        return ""

    def _weights(self) -> list[Tensor]:
        return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in self.parameters]

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        for average, weights in zip(self.tensors, self._weights(), strict=True):
            yield from zip(average.view(-1).split(PART), weights.view(-1).split(PART), strict=True)

    def _reshard(self) -> None:
        """Let FSDP2 free the parameters that it has gathered, which are those before an exchange."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def first_averaged_step(config: PretrainConfig, max_steps: int) -> int | None:
    """Return the first step of the average that the settings ask for; None if they ask for none."""
    if config.average_last is not None:
        return max_steps - max(1, round(config.average_last * max_steps)) + 1
    return None if config.ema_decay is None else 1


def build_average(config: PretrainConfig, max_steps: int, model: Any) -> WeightAverage | None:
    """Return the average that the settings ask for."""
    first = first_averaged_step(config, max_steps)
    return None if first is None else WeightAverage(model, config.ema_decay, first)


def describe_average(
    config: PretrainConfig, max_steps: int, model: GPT2Config, setting: Setting, average: WeightAverage | None = None
) -> str:
    """Return a line of the plan for the average: its steps, kind, memory and evaluations; empty if there is none.

    average: that of the run; None is that of a new run.
    """
    first = average.begins if average else first_averaged_step(config, max_steps)
    if first is None:
        return ""
    if (steps := max_steps - first + 1) < 1:
        return "of no step, because the run is over"
    kind = "evenly (average_last)"
    if config.ema_decay is not None:
        reach = 1 / (1 - config.ema_decay)
        kind = f"exponentially (ema_decay) over about the last {rounded(reach)}"
        kind += f", which is more than the {steps:,} here" if round(reach) > steps else ""
    span = f"steps {first:,} to {max_steps:,}" if steps > 1 else f"step {first:,} alone"
    size = average_bytes(model, setting) / 2**30
    memory = f"{rounded(size, 2)} GiB on each device, part of the memory below"
    return f"of the weights after {span}, {kind}; {memory}; from then on evaluated beside the weights (eval_loss_ema)"


def named_as_average(metrics: dict[str, Any]) -> dict[str, Any]:
    """Rename the metrics of an evaluation: `eval_loss_ema`, and `eval_loss_ema/NAME` of a named text."""
    split = {key: key.partition("/") for key in metrics if key not in ("eval_tokens", "eval_seconds")}
    return {f"{head}_ema{slash}{name}": metrics[key] for key, (head, slash, name) in split.items()}
