"""Load the model that a run starts from: a GPT-2 folder or a nanoGPT checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from transformers import GPT2Config, PreTrainedTokenizerFast

from hfgpt.errors import UserError, one_line
from hfgpt.model.configuration_gpt2 import fields_of, model_rows
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
from hfgpt.model.nanogpt_checkpoint import read_nanogpt

# Other programs round the vocabulary up to a multiple of one of these.
PADDED_TO = (8, 16, 32, 64, 128, 256, 512)


def read_config(source: Path, where: str) -> GPT2Config:
    """Read the model configuration from a GPT-2 folder or a nanoGPT file.

    Raises UserError, starting with `where`, if it is missing, unreadable or not GPT-2.
    """
    if source.is_file():
        return read_nanogpt(source, where).config
    if not (source / "config.json").is_file():
        missing = "no config.json" if source.is_dir() else "no such folder"
        inside = ", ".join(sorted(path.parent.name for path in source.glob("*/config.json")))
        fix = f"one of its checkpoints ({inside})" if inside else "a folder written by save_pretrained"
        raise UserError(f"{where}: {missing}; give {fix}")
    try:
        stated = json.loads((source / "config.json").read_text(encoding="utf-8"))
        for key, plain in (("model_type", "gpt2"), ("add_cross_attention", False)):
            if (value := stated.get(key, plain)) != plain:
                raise UserError(f"{where}: not a plain GPT-2 model: {key} is {value}, but must be {plain}")
        config = GPT2Config.from_dict(stated)
        fields_of(config)  # checks them
    except Exception as error:  # broken files raise errors of many types
        if str(error).startswith(where):
            raise
        # Drop the library's own preamble.
        reason = re.sub(r"(Class v|V)alidation error for .*?: (\w+: )?|Value error, ", "", one_line(error))
        raise UserError(f"{where}: config.json cannot be read ({reason}); use another checkpoint") from error
    return config


def load_model(source: Path, where: str) -> GPT2LMHeadModel:
    """Load the model from a GPT-2 folder or a nanoGPT file, in float32 on the CPU, in evaluation mode.

    Raises UserError, starting with `where`, if it is missing, damaged, not GPT-2, or contains NaN or infinity.
    """
    # Only safetensors: loading the other weight format can run code.
    options = {"dtype": torch.float32, "output_loading_info": True, "local_files_only": True, "use_safetensors": True}
    if source.is_file():
        config, tensors = read_nanogpt(source, where)
        options |= {"config": config, "state_dict": tensors}
    else:
        read_config(source, where)
    try:
        model, loading = GPT2LMHeadModel.from_pretrained(None if source.is_file() else source, **options)
    except Exception as error:  # broken files raise errors of many types
        raise UserError(f"{where}: cannot be read ({one_line(error)}); use another checkpoint") from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"{where}: {len(missing)} weights are missing, such as {missing[0]}; use another checkpoint")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{where}: {name} contains NaN or infinity; use another checkpoint")
    return model.eval()


def fit_vocabulary(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, where: str) -> int:
    """Remove rows that only pad the vocabulary, and return how many there were.

    Raises UserError if rows and entries differ by more than padding.
    """
    rows, entries = model.config.vocab_size, model_rows(tokenizer)
    if rows != entries and not any(rows == -(-entries // multiple) * multiple for multiple in PADDED_TO):
        raise UserError(
            f"{where}: the model has {rows:,} rows and the tokenizer {entries:,} entries; give the tokenizer that the "
            "model was trained with"
        )
    if rows != entries:
        model.resize_token_embeddings(entries)
    return rows - entries
