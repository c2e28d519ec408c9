"""nanoGPT's ckpt.pt as a GPT-2 model: read without running code, its matrices turned to GPT-2's layout."""

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

from hfgpt.errors import UserError
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

_FIELDS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
_WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")  # of torch.compile and DDP
_MASK_BUFFER = re.compile(r"\.attn\.(masked_)?bias$")
# nn.Linear holds (out, in), GPT-2's Conv1D (in, out). attn.c_proj is square: no shape would tell.
_TRANSPOSED = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")


class NanoGPT(NamedTuple):
    """`config` without special ids, `tensors` in float32 under GPT-2's names and shapes, `origin` in words."""

    config: GPT2Config
    tensors: dict[str, Tensor]
    origin: str


def read_nanogpt(path: Path, where: str) -> NanoGPT:
    """The model in a nanoGPT checkpoint. Raises UserError, which begins with `where`, for what is not one."""
    content = _load(path, where)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise UserError(f"{where}: not a nanoGPT checkpoint, which has a `model` and its `model_args`; give ckpt.pt")
    given = {_WRAPPERS.sub("", str(name)): value for name, value in content["model"].items()}
    given = {name: value for name, value in given.items() if not _MASK_BUFFER.search(name)}
    config = _config(content["model_args"], given, where)
    head, rows = given.get("lm_head.weight"), given.get("transformer.wte.weight")
    tied = not (isinstance(head, Tensor) and isinstance(rows, Tensor)) or torch.equal(head, rows)
    config.tie_word_embeddings = tied
    if tied:
        given.pop("lm_head.weight", None)
    has_biases = content["model_args"].get("bias", True)
    tensors, problems = {}, []
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT2LMHeadModel(config).named_parameters()}
    for name, shape in shapes.items():
        value, turned = given.pop(name, None), bool(_TRANSPOSED.search(name))
        if value is None and name.endswith(".bias") and not has_biases:
            value = torch.zeros(shape)
        if (problem := _problem(value, shape[::-1] if turned else shape)) is not None:
            problems.append(f"{where}: {name} {problem}")
            continue
        tensors[name] = (value.t() if turned else value).float().contiguous()
    if given:
        problems.append(
            f"{where}: nanoGPT's model has no {', '.join(sorted(given)[:3])}; this file is of another model"
        )
    if problems:
        raise UserError(*problems[:3])
    return NanoGPT(config, tensors, _origin(path, content))


def _load(path: Path, where: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is amiss is told in one line
            # Tensors of a zip file are read when they are used: those of the optimizer never.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        needed = re.search(r"(?:GLOBAL:?|class) ([\w.]+\.\w+)", str(error))
        reason = f"it needs {needed[1]}" if needed else "it holds more than tensors, numbers and text"
        raise UserError(
            f"{where}: {reason}, and code from a file is never run; save it again with tensors, numbers and text alone"
        ) from error
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}; name a file that can be read") from error
    except Exception as error:  # each kind of damage has a type of its own
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].split(". ")[0]
        raise UserError(f"{where}: not a file of torch.save, or damaged ({reason}); give nanoGPT's ckpt.pt") from error


def _config(args: dict[str, Any], tensors: dict[str, Any], where: str) -> GPT2Config:
    if missing := [name for name in (*_FIELDS, "vocab_size") if name not in args]:
        raise UserError(f"{where}: model_args has no {', '.join(missing)}; give a checkpoint of nanoGPT's train.py")
    layers = len({name.split(".")[2] for name in tensors if re.match(r"transformer\.h\.\d+\.", name)})
    if args["n_layer"] != layers:
        raise UserError(f"{where}: model_args has n_layer={args['n_layer']}, but there are tensors of {layers} layers")
    fields = {ours: args[theirs] for theirs, ours in _FIELDS.items()}
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.get("dropout", 0.0))
    rows = args["vocab_size"]
    if not isinstance(rows, int) or rows < 1:
        raise UserError(f"{where}: model_args has vocab_size={rows}; it must be a whole number of at least 1")
    try:
        return model_config({**fields, "activation_function": "gelu"}, vocab_size=rows)  # the exact one, not GPT-2's
    except UserError as error:
        raise UserError(*(f"{where}: model_args: {problem}" for problem in error.problems)) from error


def _problem(value: Any, shape: tuple[int, ...]) -> str | None:
    if value is None:
        return "is missing"
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        return "is not a tensor of floating-point numbers"
    if value.shape != shape:
        return f"has the shape {tuple(value.shape)}, and by model_args it is {tuple(shape)}"
    return None if value.isfinite().all() else "holds values that are not finite"


def _origin(path: Path, content: dict[str, Any]) -> str:
    """Which checkpoint it is, with the figures that the file states."""
    step, loss = content.get("iter_num"), content.get("best_val_loss")
    said = [f"step {step:,}"] if isinstance(step, int) else []
    # 1e9 stands there until the first evaluation.
    if isinstance(loss, int | float | Tensor) and torch.as_tensor(loss).numel() == 1 and float(loss) < 1e9:
        said.append(f"best validation loss {float(loss):.4f} by its own estimate")
    return f"the nanoGPT checkpoint {path.name}" + (f" ({', '.join(said)})" if said else "")
