"""Load a checkpoint with its tokenizer: a GPT-2 folder, or any causal language model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfgpt.data.encoding import make_repeatable
from hfgpt.data.remote import model_files
from hfgpt.distributed.device import default_device
from hfgpt.errors import UserError, one_line
from hfgpt.files import has_tokenizer, read_text_file
from hfgpt.links import follow
from hfgpt.model.configuration_gpt2 import model_rows
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
from hfgpt.model.pretrained import load_model, read_config


def load_checkpoint(folder: str | Path, device: torch.device | None = None) -> tuple[GPT2LMHeadModel, Any]:
    """Load the model (float32, evaluation mode) and tokenizer of a GPT-2 folder, ours or any other.

    Raises UserError if the folder is missing, incomplete or unreadable, or if model and tokenizer do not fit.
    """
    folder, where = follow(folder), f"checkpoint {folder}"
    read_config(folder, where)
    if not has_tokenizer(folder):
        raise UserError(f"{where}: no tokenizer.json; copy the tokenizer's files into it")
    model, tokenizer = load_model(folder, where), _load_tokenizer(folder, where)
    count_padded_rows(model, tokenizer, where)
    if unused := sorted({*range(model.config.vocab_size)}.difference(tokenizer.get_vocab().values())):
        model.generation_config.suppress_tokens = unused  # for the model's own `generate`; ours never samples these
    return model.to(device or default_device()).eval(), tokenizer


def load_any_checkpoint(checkpoint: str, device: torch.device) -> tuple[Any, Any, Path]:
    """Load the model (float32, evaluation mode) and tokenizer of a folder or Hub id; also return the folder.

    Supports any causal language model in transformers that needs no custom code. Raises UserError for anything else.
    """
    where, folder = f"checkpoint {checkpoint}", model_files(checkpoint, "checkpoint ")
    try:
        model_type = json.loads(read_text_file(folder / "config.json"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        model_type = "gpt2"  # load_checkpoint reports what is wrong
    if model_type == "gpt2":
        return *load_checkpoint(folder, device), folder
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except Exception as error:  # each broken file raises its own type
        raise UserError(
            f"{where}: cannot be read ({one_line(error)}); give a causal language model's folder"
        ) from error
    tokenizer = _load_tokenizer(folder, where)
    count_padded_rows(model, tokenizer, where)
    return model.to(device).eval(), tokenizer, folder


def count_padded_rows(model: Any, tokenizer: Any, where: str) -> int:
    """Return how many more rows the model has than the tokenizer entries. Raises UserError if it has fewer."""
    rows, entries = len(model.get_input_embeddings().weight), model_rows(tokenizer)
    if entries > rows:
        sizes = f"the tokenizer has {entries:,} entries and the model {rows:,} rows"
        raise UserError(f"{where}: {sizes}; use the tokenizer that the model was trained with")
    return rows - entries


def _load_tokenizer(folder: Path, where: str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each broken file raises its own type
        raise UserError(f"{where}: its tokenizer cannot be read ({one_line(error)}); use another checkpoint") from error
    if not tokenizer.is_fast:
        raise UserError(
            f"{where}: has no tokenizer.json; convert its tokenizer to a fast one and save that with save_pretrained"
        )
    return make_repeatable(tokenizer)
