"""Read nanoGPT's ckpt.pt as a GPT-2 model, without running any code in it."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GPT2Config

from hfgpt.errors import UserError, message
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

_FIELDS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
_WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")  # added by torch.compile and DDP
_MASK_BUFFER = re.compile(r"\.attn\.(masked_)?bias$")
# nn.Linear's matrix is (out, in), GPT-2's Conv1D matrix (in, out). attn.c_proj is square, so its shape cannot tell.
_TRANSPOSED = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")


class NanoGPT(NamedTuple):
    """A nanoGPT model: its `config`, without special token ids, and its `tensors` in float32, with GPT-2's names and
    shapes.
    """

    config: GPT2Config
    tensors: dict[str, Tensor]


def read_nanogpt(path: Path, where: str) -> NanoGPT:
    """Read the model in a nanoGPT checkpoint. Raises UserError, starting with `where`, for any other file."""
    content = _load(path, where)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise UserError(
            f"{where}: not a nanoGPT checkpoint, which has `model` and `model_args`; give nanoGPT's ckpt.pt"
        )
    given = {_WRAPPERS.sub("", str(name)): value for name, value in content["model"].items()}
    given = {name: value for name, value in given.items() if not _MASK_BUFFER.search(name)}
    config = _read_config(content["model_args"], given, where)
    head, embedding = given.get("lm_head.weight"), given.get("transformer.wte.weight")
    is_untied = isinstance(head, Tensor) and isinstance(embedding, Tensor) and not torch.equal(head, embedding)
    config.tie_word_embeddings = not is_untied
    if not is_untied:
        given.pop("lm_head.weight", None)
    has_biases = content["model_args"].get("bias", True)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT2LMHeadModel(config).named_parameters()}
    tensors, problems = {}, []
    for name, shape in shapes.items():
        value, is_transposed = given.pop(name, None), bool(_TRANSPOSED.search(name))
        if value is None and name.endswith(".bias") and not has_biases:
            value = torch.zeros(shape)
        if (problem := _find_problem(value, shape[::-1] if is_transposed else shape)) is not None:
            problems.append(f"{where}: {name} {problem}")
        else:
            tensors[name] = (value.t() if is_transposed else value).float().contiguous()
    if given:
        unknown = ", ".join(sorted(given)[:3])
        problems.append(f"{where}: unexpected tensors: {unknown}; give a checkpoint of nanoGPT's own model")
    if problems:
        raise UserError(*problems[:3])
    return NanoGPT(config, tensors)


def _load(path: Path, where: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below covers it in one line
            # Memory-mapped: tensors that are not used, such as the optimizer's, are never read.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        needed = re.search(r"(?:GLOBAL:?|class) ([\w.]+\.\w+)", str(error))
        reason = f"it needs {needed[1]}" if needed else "it contains more than tensors, numbers and text"
        fix = "save it again with tensors, numbers and text only"
        raise UserError(f"{where}: {reason}, and code in a file is never run; {fix}") from error
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}; name a file that can be read") from error
    except Exception as error:  # damaged files raise errors of many types
        reason = message(error).split(". ")[0]
        raise UserError(f"{where}: not written by torch.save, or damaged ({reason}); give nanoGPT's ckpt.pt") from error


def _read_config(args: dict[str, Any], tensors: dict[str, Any], where: str) -> GPT2Config:
    if missing := [name for name in (*_FIELDS, "vocab_size") if name not in args]:
        raise UserError(f"{where}: model_args has no {', '.join(missing)}; give a ckpt.pt of nanoGPT's train.py")
    layers = len({name.split(".")[2] for name in tensors if re.match(r"transformer\.h\.\d+\.", name)})
    if args["n_layer"] != layers:
        raise UserError(
            f"{where}: model_args has n_layer={args['n_layer']}, but the tensors are those of {layers} layers"
        )
    fields = {ours: args[theirs] for theirs, ours in _FIELDS.items()}
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.get("dropout", 0.0))
    rows = args["vocab_size"]
    if not isinstance(rows, int) or rows < 1:
        raise UserError(f"{where}: model_args has vocab_size={rows}; it must be a whole number of at least 1")
    try:  # nanoGPT has the exact GELU, GPT-2 its tanh approximation
        return model_config({**fields, "activation_function": "gelu"}, vocab_size=rows)
    except UserError as error:
        raise UserError(*(f"{where}: model_args: {problem}" for problem in error.problems)) from error


def _find_problem(value: Any, shape: tuple[int, ...]) -> str | None:
    if value is None:
        return "is missing"
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        return "is not a tensor of floating-point numbers"
    if value.shape != shape:
        return f"has shape {tuple(value.shape)}, but model_args implies {tuple(shape)}"
    return None if value.isfinite().all() else "contains NaN or infinity"


def describe_nanogpt(path: Path, where: str) -> str:
    """Describe a nanoGPT checkpoint: its name, and the step and loss recorded in it."""
    content = _load(path, where)
    step, loss = content.get("iter_num"), content.get("best_val_loss")
    facts = [f"step {step:,}"] if isinstance(step, int) else []
    # nanoGPT writes 1e9 until its first evaluation.
    if isinstance(loss, int | float | Tensor) and torch.as_tensor(loss).numel() == 1 and float(loss) < 1e9:
        facts.append(f"best validation loss {float(loss):.4f} by its own estimate")
    return f"the nanoGPT checkpoint {path.name}" + (f" ({', '.join(facts)})" if facts else "")
