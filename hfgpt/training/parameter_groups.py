"""The parameter groups of a model: matrices, embeddings and vectors, each with its own learning rate and decay."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from hfgpt.config import PretrainConfig

OWN_RATES = ("muon_learning_rate", "embedding_learning_rate", "vector_learning_rate")
OWN_DECAYS = ("embedding_weight_decay", "vector_weight_decay")


class Group(NamedTuple):
    """What one group of parameters is trained with. All groups follow the same schedule."""

    learning_rate: float  # its peak
    weight_decay: float


def group_settings(config: PretrainConfig) -> dict[str, Group]:
    """Return the settings of each group.

    matrices: of the blocks. embeddings: of tokens and positions, and the head, tied or not. vectors: biases and norms.
    """
    rate, decay, of_embeddings = config.learning_rate, config.weight_decay, config.embedding_weight_decay
    return {
        "matrices": Group(config.muon_learning_rate or rate, decay),
        "embeddings": Group(config.embedding_learning_rate or rate, decay if of_embeddings is None else of_embeddings),
        "vectors": Group(config.vector_learning_rate or rate, config.vector_weight_decay or 0.0),
    }


def parameter_groups(model: nn.Module, config: PretrainConfig) -> list[dict[str, Any]]:
    """Return the trainable parameters as an optimizer's groups, in the order of `group_settings`."""
    params: dict[str, list[nn.Parameter]] = {name: [] for name in group_settings(config)}
    for name, parameter in model.named_parameters():  # which has a tied head once, as the embedding
        if parameter.requires_grad:
            group = "vectors" if parameter.dim() < 2 else "matrices" if ".h." in name else "embeddings"
            params[group].append(parameter)
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
    own = {key: getattr(config, key) for key in OWN_RATES}
    return {key: peak / config.learning_rate * learning_rate for key, peak in own.items() if peak is not None}


def describe_groups(config: PretrainConfig) -> str:
    """Describe the peak rates and decays of the groups for the plan; empty if none has its own."""
    if all(getattr(config, key) is None for key in (*OWN_RATES, *OWN_DECAYS)):
        return ""
    groups = group_settings(config).items()
    return "; ".join(f"{name} {group.learning_rate:g} (weight decay {group.weight_decay:g})" for name, group in groups)
