"""Save and load model and optimizer: copied from all processes, written by one, and loaded into all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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
from transformers import GPT2Config, PreTrainedModel, PreTrainedTokenizerFast

from hfgpt.checkpointing.read_training_state import STATE
from hfgpt.checkpointing.run_folder import write_json
from hfgpt.data.tokenization import save_tokenizer
from hfgpt.distributed.fsdp2 import full_state_options
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.files import read_text_file
from hfgpt.model.configuration_gpt2 import ARCHITECTURE_FIELDS
from hfgpt.model.modeling_gpt2 import to_parameter_names

Tensors = dict[str, torch.Tensor]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def snapshot(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, averaged: AbstractContextManager[None] | None = None
) -> dict[str, Tensors]:
    """Copy `weights`, by parameter name, and `optimizer` state, as `<state>.<parameter name>`, to the CPU.

    averaged: a context in which the model has averaged weights, which are then copied too, as `average`.
    Call on all processes; the main process gets the tensors.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # evaluation leaves parameters gathered, but the optimizer has the sharded ones
    state: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE).get("state", {})
    copies = {"weights": _copy_weights(model), "optimizer": _copy(_flat(state))}
    if averaged is not None:
        with averaged:
            copies["average"] = _copy_weights(model)
    return copies


def _copy_weights(model: PreTrainedModel) -> Tensors:
    weights: Any = get_model_state_dict(model, options=WHOLE)
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # the embedding's
    return _copy(weights)


def _copy(tensors: Tensors) -> Tensors:
    # A state dict on the CPU shares memory with the model, which training changes.
    return {name: torch.empty_like(value, device="cpu").copy_(value) for name, value in tensors.items()}


def _flat(state: dict[str, Tensors]) -> Tensors:
    """Flatten the optimizer state: keys are `<state>.<parameter name>`, such as `exp_avg.transformer.wte.weight`."""
    return {f"{key}.{name}": value for name, values in state.items() for key, value in values.items()}


def write_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tensors: dict[str, Tensors],
    trainer: dict[str, Any],
    data: dict[str, Any],
    card: str,
    folder: Path,
) -> None:
    """Write all files of a checkpoint except its manifest, from a `snapshot`, because training continues meanwhile."""
    # The one of weights and average that is not the model lies beside the optimizer's state.
    (part, name), others = _model_part(trainer), tensors.keys() - {"optimizer"}
    model.save_pretrained(folder, state_dict=tensors[part])
    for other in others - {part}:
        save_file(tensors[other], folder / STATE / name)
    save_tokenizer(tokenizer, folder)
    (folder / "README.md").write_text(card, encoding="utf-8", newline="\n")
    save_file(tensors["optimizer"], folder / STATE / "optimizer.safetensors")
    write_json(folder / STATE / "trainer_state.json", trainer)
    write_json(folder / STATE / "data_state.json", data)


def _model_part(trainer: dict[str, Any]) -> tuple[str, str]:
    """Return which of `weights` and `average` is in model.safetensors, and the file of the other one, if any."""
    if (trainer["average"] or {}).get("is_model"):
        return "average", "raw_weights.safetensors"
    return "weights", "average.safetensors"


def load_model_and_optimizer(
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    trainer: dict[str, Any],
    take_average: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Load weights and optimizer state of a checkpoint in place, on all processes.

    trainer: its trainer_state.json. take_average: takes the model's weights as the average of which this is the state.
    Only the main process reads the files. Raises UserError if the checkpoint is from another optimizer.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # as in `snapshot`
    state: Any = get_optimizer_state_dict(model, optimizer)
    parts = ["weights"] if take_average is None else ["average", "weights"]
    read: dict[str, Any] = {name: {} for name in (*parts, "optimizer")}  # remains empty on the other processes
    ranks.from_main(lambda: read.update(_read_tensors(folder, model, state["state"], trainer, parts)))
    if read["optimizer"]:  # a new dictionary, because the returned one belongs to the optimizer
        read["optimizer"] = {**state, "state": read["optimizer"]}
    options = full_state_options(ranks.world_size)
    if take_average is not None:
        set_model_state_dict(model, read["average"], options=options)
        take_average(trainer["average"])
    set_model_state_dict(model, read["weights"], options=options)
    set_optimizer_state_dict(model, optimizer, read["optimizer"], options=options)


def check_model(folder: Path, model: GPT2Config, name: str | Path) -> None:
    """Raise UserError if the checkpoint `folder`, which messages call `name`, contains another model."""
    where = f"resume_from_checkpoint={name}"
    try:
        saved = json.loads(read_text_file(folder / "config.json"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: cannot be read ({error}); use another one") from error
    saved, ours = saved if isinstance(saved, dict) else {}, model.to_dict()
    if changed := [key for key in ARCHITECTURE_FIELDS if saved.get(key) != ours[key]]:
        values = (f"model.{key}: {saved.get(key)} there, {ours[key]} here" for key in changed)
        raise UserError(
            f"{where}: a different model; {'; '.join(values)}; restore these values, or start a new run in another "
            f"output_dir, with the model and weights of the checkpoint by --init_from {name}"
        )


def _read_tensors(
    folder: Path, model: PreTrainedModel, state: dict[str, Tensors], trainer: dict[str, Any], parts: list[str]
) -> dict[str, Any]:
    """Read a checkpoint of the same model: `parts` by parameter name, `optimizer` with the structure of `state`."""
    where = f"resume_from_checkpoint={folder}"
    of_model, other = _model_part(trainer)
    files = {part: Path("model.safetensors") if part == of_model else Path(STATE, other) for part in parts}
    try:
        read: dict[str, Any] = {part: to_parameter_names(load_file(folder / file)) for part, file in files.items()}
        # Copies: the optimizer keeps these tensors, and the file, which may be deleted before the run ends, with them.
        moments = {name: value.clone() for name, value in load_file(folder / STATE / "optimizer.safetensors").items()}
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"{where}: cannot be read ({error}); use another one") from error
    for weights in read.values():
        if differing := _find_differing(weights, dict(model.named_parameters())):
            raise UserError(f"{where}: parameters differ from the model's: {differing}; use another one")
    if differing := _find_differing(moments, _flat(state)):
        raise UserError(f"{where}: it contains the state of another optimizer ({differing} differ)")
    if not all(value.isfinite().all() for tensors in [*read.values(), moments] for value in tensors.values()):
        raise UserError(f"{where}: contains NaN or infinity; use another one")
    optimizer = {name: {key: moments[f"{key}.{name}"] for key in values} for name, values in state.items()}
    return {**read, "optimizer": optimizer}


def _find_differing(there: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the first three names that exist on one side only, or whose shape or type differs."""
    forms = [{name: (value.shape, value.dtype) for name, value in side.items()} for side in (here, there)]
    return [name for name in {**here, **there} if forms[0].get(name) != forms[1].get(name)][:3]
