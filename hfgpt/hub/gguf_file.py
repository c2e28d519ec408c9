"""GGUF, the file of llama.cpp, Ollama and LM Studio: write a checkpoint as one, and compare one with its checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import nn

from hfgpt.checkpointing.checkpoint import refuse_existing
from hfgpt.errors import UserError, one_line
from hfgpt.files import remove, rename, sync
from hfgpt.hub.gguf_tokenizer import tokenizer_fields
from hfgpt.hub.import_export import check_range, load_whole, untie
from hfgpt.model.flops import parameter_counts
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

# Data types of matrices: the package's name, its code as general.file_type, and the largest number.
TYPES = {
    "float32": ("F32", 0, np.finfo(np.float32).max),
    "float16": ("F16", 1, 65504.0),
    "bfloat16": ("BF16", 32, 3.38e38),
    "q8_0": ("Q8_0", 7, 127 * 65504.0),  # 32 numbers of 8 bits with a scale in float16
}
# Fields of config.json for which llama.cpp's GPT-2 has no other values.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
HASH = "hfgpt.xxh3_128"


def export_gguf(checkpoint: Path, file: Path, dtype: str = "float16", untie_head: bool = False) -> list[str]:
    """Write a checkpoint as a GGUF file; returns lines that report what was done.

    Norms, biases and positions stay in float32, as llama.cpp has them. Raises UserError for a damaged checkpoint, for a
    model or tokenizer that llama.cpp would compute in another way, and for values outside the range of `dtype`.
    """
    library = import_gguf()
    refuse_existing(file)
    where = f"checkpoint {checkpoint}"
    model, tokenizer, report = load_whole(checkpoint)
    fields = {**_model_fields(model, where), **_tokenizer_fields(tokenizer, where)}
    check_range(model, dtype, TYPES[dtype][2])
    if untie_head:
        untie(model)
    name, code, _ = TYPES[dtype]
    tensors, hashed = {}, xxhash.xxh3_128()
    for key, value in _arrays(model):
        kind = _type_of(library, key, value, name)
        tensors[key] = (library.quants.quantize(value, kind), kind)
        _add_to_hash(hashed, key, tensors[key][0])
    fields |= {"general.file_type": code, "general.quantization_version": 2}
    _add_fields_to_hash(hashed, fields)
    fields[HASH] = hashed.hexdigest()
    _write(library, file, fields, tensors)
    kinds = {kind.name for value, kind in tensors.values() if value.ndim == 2}
    if name not in kinds | {"F32"}:
        report.append(f"wrote float16 instead of {dtype}: its rows are no multiple of 32 numbers")
    config = model.config
    shape = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, {config.vocab_size:,} rows"
    count, size = parameter_counts(config).total, os.path.getsize(file) / 1e6
    return [*report, *_notes(fields), f"wrote {file}: {shape}; {count:,} parameters in {dtype}, {size:,.1f} MB"]


def import_gguf() -> Any:
    """Import the package. Raises UserError if it is not installed."""
    try:
        import gguf  # optional
    except ImportError as error:
        raise UserError(f"GGUF needs the package gguf ({error}); pip install 'hfgpt[gguf]'") from error
    return gguf


def verify_gguf(file: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Return facts about a GGUF file, and `problems`: damage, and differences from the checkpoint it came from.

    Numbers may differ by the rounding of their data type. Raises UserError for a file that is not GGUF.
    """
    library = import_gguf()
    try:
        reader = library.GGUFReader(file)
        found = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # broken files raise errors of many types
        cause = one_line(error)
        raise UserError(f"{file}: damaged, or another kind of file than GGUF ({cause}); export it again") from error
    facts: dict[str, Any] = {"file": str(file), "architecture": found.get("general.architecture")}
    facts["dtype"] = ", ".join(sorted({tensor.tensor_type.name for tensor in tensors.values()}))
    facts["parameters"] = sum(int(tensor.n_elements) for tensor in tensors.values())
    facts["tokenizer"] = " ".join(str(found.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre")).strip()
    facts["rows"] = len(found.get("tokenizer.ggml.tokens", []))
    hashed = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        _add_to_hash(hashed, name, tensor.data)
    _add_fields_to_hash(hashed, found)
    problems = []
    if HASH not in found:
        problems.append("it was not written by hfgpt export")
    elif hashed.hexdigest() != found[HASH]:
        problems.append("its content is not what was written; export it again")
    if checkpoint is None:
        facts["not_compared"] = f"with its checkpoint: hfgpt verify {file} CHECKPOINT"
        return {**facts, "problems": problems}
    where = f"checkpoint {checkpoint}"
    model, tokenizer, _ = load_whole(checkpoint)
    wanted = {**_model_fields(model, where), **_tokenizer_fields(tokenizer, where)}
    problems += [f"{key} is not the checkpoint's" for key, value in wanted.items() if found.get(key) != value]
    if "output.weight" in tensors:
        untie(model)
    largest, differing = _compare_tensors(library, dict(_arrays(model)), tensors)
    facts |= {"checkpoint": str(checkpoint), "largest_difference": largest}
    return {**facts, "problems": problems + differing}


def _compare_tensors(library: Any, wanted: dict[str, np.ndarray], tensors: dict[str, Any]) -> tuple[float, list[str]]:
    """Return the largest difference of a number, and a line for each tensor that differs by more than rounding."""
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in wanted]
    largest = 0.0
    for name in wanted.keys() & tensors.keys():
        value, tensor = wanted[name], tensors[name]
        found = library.quants.dequantize(tensor.data, tensor.tensor_type)
        if found.shape != value.shape:
            problems.append(f"{name} has shape {found.shape}, not {value.shape}")
            continue
        difference = np.abs(found - value)
        largest = max(largest, float(difference.max()))
        # ~: also for NaN
        if ~(difference <= _rounding(value, tensor.tensor_type.name)).all():
            problems.append(f"{name} differs by up to {difference.max():.2g}")
    return largest, sorted(problems)


def _rounding(value: np.ndarray, kind: str) -> np.ndarray:
    """Return by how much a number of this type may differ from `value`: half a unit of its last place."""
    size = np.abs(value)
    if kind == "Q8_0":
        scale = size.reshape(-1, 32).max(-1, keepdims=True) / 127
        # 127 scales, each rounded to float16, and half a scale for each number
        scale = np.broadcast_to(scale * (0.5 + 127 * 2.0**-11) + 127 * 2.0**-25, (size.size // 32, 32))
        return scale.reshape(size.shape) * 1.001
    relative, least = {"F32": (0.0, 0.0), "F16": (2.0**-11, 2.0**-25), "BF16": (2.0**-8, 2.0**-126)}[kind]
    return size * relative + least


def _model_fields(model: GPT2LMHeadModel, where: str) -> dict[str, Any]:
    """Return the fields that describe the model. Raises UserError if llama.cpp would compute another one."""
    config = model.config
    problems = [
        f"{where}: {key} is {getattr(config, key)}, and llama.cpp's GPT-2 has only {value}; export a folder"
        for key, value in FIXED.items()
        if getattr(config, key, value) != value
    ]
    if config.activation_function not in TANH_GELU:
        exact = " (the exact GELU, as nanoGPT's)" if config.activation_function == "gelu" else ""
        problems.append(
            f"{where}: activation_function is {config.activation_function}{exact}, and llama.cpp's GPT-2 has only "
            "gelu_new, its tanh form; export a folder"
        )
    if problems:
        raise UserError(*problems)
    return {
        "general.architecture": "gpt2",
        "general.type": "model",
        # llama.cpp treats some tokens by the name of the model: nothing of the user's goes here
        "general.name": "GPT-2",
        "gpt2.context_length": config.n_positions,
        "gpt2.embedding_length": config.n_embd,
        "gpt2.feed_forward_length": config.n_inner or 4 * config.n_embd,
        "gpt2.block_count": config.n_layer,
        "gpt2.attention.head_count": config.n_head,
        "gpt2.attention.layer_norm_epsilon": float(np.float32(config.layer_norm_epsilon)),
        "gpt2.vocab_size": config.vocab_size,
    }


def _tokenizer_fields(tokenizer: Any, where: str) -> dict[str, Any]:
    if tokenizer is None:
        raise UserError(f"{where}: has no tokenizer, which llama.cpp requires; save it with its tokenizer")
    try:
        return tokenizer_fields(tokenizer)
    except UserError as error:
        raise UserError(*(f"{where}: {problem}" for problem in error.problems)) from None


def _arrays(model: GPT2LMHeadModel) -> Iterator[tuple[str, np.ndarray]]:
    """Yield llama.cpp's name of each parameter and its numbers, with matrices as (out, in)."""
    for name, parameter in model.named_parameters():  # a tied head comes once
        module, _, kind = name.rpartition(".")
        if module.startswith("transformer.h."):
            layer, _, part = module.removeprefix("transformer.h.").partition(".")
            module = f"blk.{layer}.{NAMES[part]}"
            if parameter.ndim == 2:
                parameter = nn.Parameter(parameter.t())  # Conv1D's matrix is (in, out)
        else:
            module = NAMES[module]
        yield f"{module}.{kind}", parameter.detach().float().contiguous().numpy()


def _type_of(library: Any, name: str, value: np.ndarray, wanted: str) -> Any:
    if value.ndim == 1 or name == "position_embd.weight":
        wanted = "F32"
    elif wanted == "Q8_0" and value.shape[-1] % 32:
        wanted = "F16"
    return library.GGMLQuantizationType[wanted]


def _add_to_hash(hashed: Any, name: str, data: np.ndarray) -> None:
    hashed.update(name.encode())
    hashed.update(np.ascontiguousarray(data).view(np.uint8))


def _add_fields_to_hash(hashed: Any, fields: dict[str, Any]) -> None:
    own = {key: value for key, value in fields.items() if key != HASH and not key.startswith("GGUF.")}
    hashed.update(json.dumps(own, sort_keys=True).encode())


def _notes(fields: dict[str, Any]) -> list[str]:
    if fields["tokenizer.ggml.model"] == "rwkv" and any(
        token.count("\\x") > 1 for token in fields["tokenizer.ggml.tokens"]
    ):
        return [
            "llama.cpp may never return from a prompt with a character that is not in the vocabulary: check prompts"
        ]
    return []


def _write(library: Any, file: Path, fields: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Any]]) -> None:
    """Write the file under a temporary name, sync it to disk, and rename it."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
        writer = library.GGUFWriter(temporary, fields["general.architecture"])
        for key, value in fields.items():
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            if key != "general.architecture":  # the writer has it
                add.get(type(value), writer.add_array)(key, value)
        for name, (value, kind) in tensors.items():
            writer.add_tensor(name, value, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sync(temporary)
        rename(temporary, file)
        sync(file.absolute().parent)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}; choose a writable folder") from error
    finally:
        remove(temporary)
