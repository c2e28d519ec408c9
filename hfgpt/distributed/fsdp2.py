"""FSDP2: parameters and optimizer state split over the processes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from hfgpt.errors import UserError

logger = logging.getLogger(__name__)


# What a launcher's configuration may ask for and is not done, and the way out.
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported; use FSDP2",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported; use FSDP2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config is not supported; take it out, and use DDP or FSDP2",
    "ACCELERATE_DYNAMO_BACKEND": "take it out, and use --torch_compile true",
    "FSDP_OFFLOAD_PARAMS": "not supported; take it out",
    "FSDP_ACTIVATION_CHECKPOINTING": "take it out, and use --gradient_checkpointing true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "not supported; take it out",
    "FSDP_IGNORED_MODULES": "not supported; take it out",
}


# How FSDP2 is done here, in the launcher's words.
DONE_SO = {
    "FSDP_AUTO_WRAP_POLICY": "transformer_based_wrap",
    "FSDP_STATE_DICT_TYPE": "full_state_dict",
    "FSDP_BACKWARD_PREFETCH": "backward_pre",
    "FSDP_FORWARD_PREFETCH": "false",
}


_shared_by: dist.ProcessGroup | None = None  # the processes that have shared a model
_sharding = False  # what a run of this process has taken from the environment holds for those after it


def take_sharding() -> bool:
    """Whether the launcher's configuration asks for FSDP2; the request is taken from the environment.

    `shared_model` serves it, on cards and on CPUs alike, where Accelerate would give a CPU DDP without a word. Raises
    UserError for what is asked of the launcher and not done here, and warns where it only is done another way.
    """
    asked = {key: os.environ.get(key, "") for key in (*REFUSED, *DONE_SO)}
    problems = [
        f"{key.lower()}: {asked[key]} in the accelerate configuration; {REFUSED[key]}"
        for key in REFUSED
        if asked[key].lower() not in ("", "no", "false")
    ]
    global _sharding
    if (wanted := os.environ.pop("ACCELERATE_USE_FSDP", None)) is not None:
        _sharding = wanted.lower() in ("1", "true")
    sharding = _sharding
    if not sharding:
        problems = [problem for problem in problems if not problem.startswith("fsdp_")]
    elif (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        problems.append(f"fsdp_version: {version} (the default is 1); state fsdp_version: 2")
    if problems:
        raise UserError(*problems)
    other = [f"{key.lower()} {asked[key]}" for key, so in DONE_SO.items() if asked[key].lower() not in ("", so)]
    if sharding and other:
        logger.warning(
            "not followed: %s; every block is shared out on its own, checkpoints are whole", ", ".join(other)
        )
    return sharding


def shared_model(make: Callable[[], PreTrainedModel], device: torch.device, precision: str) -> PreTrainedModel:
    """The GPT-2-style model of `make`, its parameters split over all processes (FSDP2).

    Only the main process ever holds it whole, in the machine's memory. The matrices of a block are gathered in bf16
    if that is the precision, as autocast would compute in it anyway; norms, embeddings and head stay float32.
    Gradients are reduced in float32. Raises UserError for a second run in one process.
    """
    global _shared_by
    if _shared_by not in (None, dist.group.WORLD):  # torch would use the group of the run before, which is gone
        raise UserError("FSDP2: this process has trained such a run before; start the next one by the launcher again")
    _shared_by = dist.group.WORLD
    again = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("1", "true", "full_shard")
    dtype = torch.bfloat16 if precision == "bf16" else None
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # blocks add out of place
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with torch.device("meta"):
        model: Any = make()
    for block in model.transformer.h:
        for matrices in (block.attn, block.mlp):
            fully_shard(matrices, mp_policy=policy, reshard_after_forward=again)
        fully_shard(block, reshard_after_forward=again)
    fully_shard(model)
    model.to_empty(device=device)
    model.tie_weights()
    whole = make().state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, whole, options=from_main(dist.get_world_size()))
    return model


def from_main(world: int) -> StateDictOptions:
    """For a state dict that only the main process has, of parameters that all hold or share."""
    # A tied head has no entry of its own, hence not strict.
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=world > 1, strict=False)
