"""AdamW with GPT-2's decay groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from hfgpt.config import PretrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay, biases and norms do not; every trainable parameter is in exactly one group."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: PretrainConfig) -> torch.optim.AdamW:
    """Fused, as only that form can leave a step out (`found_inf`) without the host having to look."""
    groups, betas = parameter_groups(model, config.weight_decay), (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)


def learning_rate_schedule(config: PretrainConfig, max_steps: int) -> Callable[[int], float]:
    """Learning rate of step 1, 2, ... for a curve that is `max_steps` long.

    The shapes are those of transformers. Step k takes the curve's value at k, not k - 1, so the first step of a
    warm-up already moves, its last one has the peak, and the last step of the run has the end of the decay, which
    then stays.
    """
    kind, peak, end = config.lr_scheduler_type, config.learning_rate, config.end_learning_rate()
    specific: dict[str, Any] = {}
    if kind == "cosine_with_min_lr":
        specific = {"min_lr": end}
    elif kind == "warmup_stable_decay":
        decay = max(1, (max_steps - config.warmup_steps) // 5)
        specific = {"num_decay_steps": decay, "min_lr_ratio": end / peak}
    carrier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = get_scheduler(kind, carrier, config.warmup_steps, max_steps, scheduler_specific_kwargs=specific)
    factor = schedule.lr_lambdas[0]
    return lambda step: peak * factor(min(step, max_steps))
