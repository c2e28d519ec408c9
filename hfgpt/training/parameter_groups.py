"""The parameter groups of a model: matrices, embeddings and vectors, each with its own learning rate and decay."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from hfgpt.config import PretrainConfig

OWN_RATES = {
    "matrices": "muon_learning_rate",
    "embeddings": "embedding_learning_rate",
    "vectors": "vector_learning_rate",
}


class Group(NamedTuple):
    """What one group of parameters is trained with. All groups follow the same schedule."""

    learning_rate: float  # its peak
    weight_decay: float


def group_settings(config: PretrainConfig) -> dict[str, Group]:
    """Return the settings of each group.

    matrices: of the blocks. embeddings: of tokens and positions, and the head, tied or not. vectors: biases and norms.
    """
    decays = {"matrices": config.weight_decay, "embeddings": config.embedding_weight_decay}
    decays["vectors"] = config.vector_weight_decay or 0.0
    groups = {}
    for name, key in OWN_RATES.items():
        decay = decays[name]
        rate = getattr(config, key) or config.learning_rate
        groups[name] = Group(rate, config.weight_decay if decay is None else decay)
    return groups


def parameter_groups(model: nn.Module, config: PretrainConfig) -> list[dict[str, Any]]:
    """Return the trainable parameters as an optimizer's groups, in the order of `group_settings`."""
    params: dict[str, list[nn.Parameter]] = {name: [] for name in OWN_RATES}
    for name, parameter in model.named_parameters():  # which has a tied head once, as the embedding
        if parameter.requires_grad:
            params["vectors" if parameter.dim() < 2 else "matrices" if ".h." in name else "embeddings"].append(parameter)
    return [
        {
            "params": params[name],
            "lr": group.learning_rate,
            "lr_scale": group.learning_rate / config.learning_rate,
            "weight_decay": group.weight_decay,
        }
        for name, group in group_settings(config).items()
    ]


def own_learning_rates(config: PretrainConfig, learning_rate: float) -> dict[str, float]:
    """Return the rates of groups with a rate of their own, by setting, in the step in which others have this one."""
    own = {key: getattr(config, key) for key in OWN_RATES.values()}
    return {key: peak / config.learning_rate * learning_rate for key, peak in own.items() if peak is not None}


def describe_groups(config: PretrainConfig) -> str:
    """Describe the peak rates and decays of the groups for the plan; empty if none has its own."""
    keys = (*OWN_RATES.values(), "embedding_weight_decay", "vector_weight_decay")
    if all(getattr(config, key) is None for key in keys):
        return ""
    groups = group_settings(config).items()
    return "; ".join(f"{name} {group.learning_rate:g} (weight decay {group.weight_decay:g})" for name, group in groups)
