"""Build the model of a run: on its device, sharded, compiled, with recomputation and its kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hfgpt.config import PretrainConfig
from hfgpt.distributed.fsdp2 import build_sharded_model
from hfgpt.errors import UserError
from hfgpt.model.attention_masks import document_attention
from hfgpt.model.head_loss import HEAD_CHUNK_SIZE
from hfgpt.model.modeling_gpt2 import new_model
from hfgpt.settings.field_types import AUTO
from hfgpt.training.run import Machine


def check_sharding(config: PretrainConfig, machine: Machine) -> None:
    """Raise UserError for what FSDP2 cannot do."""
    if machine.is_sharded and not dist.is_initialized():
        raise UserError("FSDP2 needs a launcher; start with accelerate launch or torchrun, also for one process")
    if machine.is_sharded and machine.precision.name == "fp16":
        raise UserError("mixed_precision=fp16: loss scaling does not work with FSDP2; use bf16, or DDP")
    if machine.is_sharded and config.per_device_train_batch_size == AUTO:
        raise UserError(
            "per_device_train_batch_size=auto: not possible with FSDP2, where one process cannot run out of memory "
            "alone; give a number"
        )


def build_model(
    config: PretrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    machine: Machine,
    compiled: bool,
    weights: dict[str, Tensor],
) -> Any:
    """Build the model on its device, with random weights, or with `weights` (on the main process) if given."""
    make, device = partial(new_model, config.model, tokenizer, config.seed, weights), machine.accelerator.device
    model: Any = build_sharded_model(make, device, machine.precision.name) if machine.is_sharded else make().to(device)
    model.tie_weights()  # moving to an accelerator outside of torch makes two parameters of a tied one
    if config.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if compiled:
        model.compile(dynamic=False)  # in place, which keeps the parameter names
    else:
        model.head_chunk_size = HEAD_CHUNK_SIZE
    return model


def attention_arguments(
    config: PretrainConfig, model: Any, tokenizer: PreTrainedTokenizerBase, compiled: bool
) -> Callable[[Tensor], dict[str, Any]]:
    """Return a function from token ids (B, T) to extra model inputs: with document_masking, masks and positions."""
    if not config.document_masking:
        return lambda ids_BT: {}
    flex = compiled and next(model.parameters()).device.type == "cuda" and model.config.attn_pdrop == 0
    return partial(document_attention, separator_id=tokenizer.eos_token_id, flex=flex)
