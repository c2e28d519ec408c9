"""FSDP2: shard parameters and optimizer state over the processes."""

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

# What the accelerate configuration may request but hfgpt does not support, and the fix.
UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported; use FSDP2",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported; use FSDP2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config is not supported; remove it, and use DDP or FSDP2",
    "ACCELERATE_DYNAMO_BACKEND": "remove it, and use --torch_compile true",
    "FSDP_OFFLOAD_PARAMS": "not supported; remove it",
    "FSDP_ACTIVATION_CHECKPOINTING": "remove it, and use --gradient_checkpointing true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "not supported; remove it",
    "FSDP_IGNORED_MODULES": "not supported; remove it",
}
# How FSDP2 is set up here, in the terms of that configuration; other values cause a warning.
FIXED = {
    "FSDP_AUTO_WRAP_POLICY": "transformer_based_wrap",
    "FSDP_STATE_DICT_TYPE": "full_state_dict",
    "FSDP_BACKWARD_PREFETCH": "backward_pre",
    "FSDP_FORWARD_PREFETCH": "false",
}

_is_requested = False  # the environment requests it once, for all runs of this process
_process_group: dist.ProcessGroup | None = None  # of the run in this process that sharded a model


def take_fsdp_request() -> bool:
    """Return whether the launcher's configuration asks for FSDP2, and remove the request from the environment.

    `build_sharded_model` does the sharding, on GPUs and CPUs alike; Accelerate would silently use DDP on a CPU. Raises
    UserError for unsupported settings in the configuration, and warns about ignored ones.
    """
    global _is_requested
    if (request := os.environ.pop("ACCELERATE_USE_FSDP", None)) is not None:
        _is_requested = request.lower() in ("1", "true")
    settings = {key: os.environ.get(key, "") for key in (*UNSUPPORTED, *FIXED)}
    problems = [
        f"{key.lower()}: {settings[key]} in the accelerate configuration; {fix}"
        for key, fix in UNSUPPORTED.items()
        if settings[key].lower() not in ("", "no", "false") and (_is_requested or not key.startswith("FSDP_"))
    ]
    if _is_requested and (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        problems.append(f"fsdp_version: {version} (the default is 1); set fsdp_version: 2")
    if problems:
        raise UserError(*problems)
    ignored = [f"{key.lower()} {settings[key]}" for key in FIXED if settings[key].lower() not in ("", FIXED[key])]
    if _is_requested and ignored:
        logger.warning(
            "ignored: %s; each block is sharded separately, and checkpoints are unsharded", ", ".join(ignored)
        )
    return _is_requested


def build_sharded_model(make: Callable[[], PreTrainedModel], device: torch.device, precision: str) -> PreTrainedModel:
    """Build the GPT-2-style model that `make` returns, with its parameters sharded over all processes.

    Only the main process ever holds the complete model, in CPU memory. The matrices of a block are gathered in bf16 if
    that is the precision, because autocast would compute in it anyway; norms, embeddings and head stay float32.
    Gradients are reduced in float32. Raises UserError for a second run in one process.
    """
    global _process_group
    if _process_group not in (
        None,
        dist.group.WORLD,
    ):  # torch would use the earlier run's group, which no longer exists
        raise UserError("FSDP2: only one run per process is possible; start the next one with the launcher")
    _process_group = dist.group.WORLD
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("1", "true", "full_shard")
    dtype = torch.bfloat16 if precision == "bf16" else None
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view"
    )  # blocks add out of place, so this is safe
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with torch.device("meta"):
        model: Any = make()
    for block in model.transformer.h:
        for matrices in (block.attn, block.mlp):
            fully_shard(matrices, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    model.to_empty(device=device)
    model.tie_weights()
    whole = make().state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, whole, options=full_state_options(dist.get_world_size()))
    return model


def full_state_options(world_size: int) -> StateDictOptions:
    """Return options for a full state dict that only the main process has, and that loads on all processes."""
    # Not strict, because a tied head has no entry of its own.
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size > 1, strict=False)
