"""What a checkpoint holds of a model and its optimizer: copied, written, and read back by all processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hfgpt.checkpointing.run_folder import write_json
from hfgpt.checkpointing.training_state import STATE
from hfgpt.data.tokenization import save_tokenizer
from hfgpt.distributed.fsdp2 import full_state_options
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.files import read_text_file
from hfgpt.model.modeling_gpt2 import to_parameter_names

# Fields of the model's configuration that change what it computes.
FUNCTION = (
    *("vocab_size", "n_layer", "n_head", "n_embd", "n_positions", "n_inner", "activation_function"),
    *("layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"),
)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def snapshot(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of `weights` by parameter name and of `optimizer` state as `<state>.<parameter name>`, on the CPU.

    To be called on all processes; the main one gets the tensors.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # an evaluation leaves parameters gathered, which are not the optimizer's
    state: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE).get("state", {})
    tensors = {f"{key}.{name}": value for name, values in state.items() for key, value in values.items()}
    weights: Any = get_model_state_dict(model, options=_WHOLE)
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # is the embedding's
    return {"weights": _copied(weights), "optimizer": _copied(tensors)}


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(value, device="cpu").copy_(value) for name, value in tensors.items()}


def write_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tensors: dict[str, dict[str, torch.Tensor]],
    trainer: dict[str, Any],
    data: dict[str, Any],
    card: str,
    folder: Path,
) -> None:
    """All files of a checkpoint but the manifest, from a `snapshot`: training goes on meanwhile."""
    model.save_pretrained(folder, state_dict=tensors["weights"])
    save_tokenizer(tokenizer, folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    save_file(tensors["optimizer"], folder / STATE / "optimizer.safetensors")
    write_json(folder / STATE / "trainer_state.json", trainer)
    write_json(folder / STATE / "data_state.json", data)


def load_model_and_optimizer(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, host: Ranks
) -> None:
    """Weights and optimizer state of a checkpoint into `model` and `optimizer`, in place, on all processes.

    Only the main process reads it, and the others are handed their share. Raises UserError where the checkpoint is of
    a model that computes another function.
    """
    state: Any = get_optimizer_state_dict(model, optimizer)
    read: dict[str, Any] = {"weights": {}, "optimizer": {}}  # stays empty on the other processes
    host.from_main(lambda: read.update(_read_for(model, state["state"], folder)))
    if read["optimizer"]:  # a new dictionary: the one that was returned is the optimizer's own
        read["optimizer"] = {**state, "state": read["optimizer"]}
    options = full_state_options(host.world_size)
    set_model_state_dict(model, read["weights"], options=options)
    set_optimizer_state_dict(model, optimizer, read["optimizer"], options=options)


def _read_for(model: PreTrainedModel, state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`weights` by parameter name and `optimizer` in the form of `state`, from a checkpoint that has the same."""
    try:
        saved = json.loads(read_text_file(folder / "config.json"))
        weights = to_parameter_names(load_file(folder / "model.safetensors"))
        moments = load_file(folder / STATE / "optimizer.safetensors")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"resume_from_checkpoint={folder}: cannot be read ({error}); take another one") from error
    if not all(value.isfinite().all() for value in [*weights.values(), *moments.values()]):
        raise UserError(f"resume_from_checkpoint={folder}: holds values that are not finite; take another one")
    ours, saved = model.config.to_dict(), saved if isinstance(saved, dict) else {}
    changed = [
        f"model.{key}: {saved.get(key)} there, {ours[key]} here" for key in FUNCTION if saved.get(key) != ours[key]
    ]
    if changed:
        raise UserError(f"resume_from_checkpoint={folder}: another model; " + "; ".join(changed))
    names = dict(model.named_parameters())
    if differing := _differing(weights, names):
        raise UserError(f"{folder / 'model.safetensors'}: parameters differ: {differing}; take another checkpoint")
    here = {f"{key}.{name}": value for name, values in state.items() for key, value in values.items()}
    if differing := _differing(moments, here):
        raise UserError(
            f"resume_from_checkpoint={folder}: it holds the state of another optimizer ({differing} differ)"
        )
    filled = {name: {key: moments[f"{key}.{name}"] for key in values} for name, values in state.items()}
    return {"weights": weights, "optimizer": filled}


def _differing(there: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> list[str]:
    """A few names that only one of them has, or with another shape."""
    names = [name for name in {**here, **there} if name not in here or name not in there]
    forms = [{name: (value.shape, value.dtype) for name, value in side.items()} for side in (here, there)]
    return (names or [name for name in here if forms[0][name] != forms[1][name]])[:3]
