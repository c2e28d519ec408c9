"""Models from elsewhere into our folders, and ours into plain ones: `hfgpt import` and `hfgpt export`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from hfgpt.checkpointing.checkpoint import MANIFEST, MODEL_FILES, find_damage, refuse_existing, write_folder
from hfgpt.data.tokenization import has_tokenizer, load_tokenizer, save_tokenizer
from hfgpt.errors import UserError
from hfgpt.files import read_text_file
from hfgpt.hub.model_card import exported, plain_card
from hfgpt.model.configuration_gpt2 import fields_of
from hfgpt.model.flops import parameter_counts
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel, new_model
from hfgpt.model.nanogpt_checkpoint import read_nanogpt
from hfgpt.model.pretrained import fit_vocabulary, load_model


def import_nanogpt(checkpoint: Path, folder: Path, tokenizer_name: str | None, text: Path | None) -> list[str]:
    """Make `folder` of a nanoGPT checkpoint; returns lines that say what was done.

    `tokenizer_name`: as `load_tokenizer` knows them, "char" with the `text` it is made from; None: the model alone.
    Raises UserError for a file that is not of nanoGPT or would run code, and for a tokenizer that does not fit.
    """
    where = f"checkpoint {checkpoint}"
    if not checkpoint.is_file():
        raise UserError(f"{where}: no such file; give nanoGPT's ckpt.pt")
    refuse_existing(folder)
    origin = read_nanogpt(checkpoint, where).origin
    model = load_model(checkpoint, where)
    said = [f"imported {origin}"]
    if tokenizer_name is None:
        rows = model.config.vocab_size
        said.append(f"no --tokenizer was given: the folder holds the model only, with all its {rows:,} rows")
        tokenizer = None
    else:
        tokenizer = _tokenizer(tokenizer_name, text, model.config.n_positions)
        if dropped := fit_vocabulary(model, tokenizer, where):
            said.append(f"left out {dropped} rows for which the tokenizer has no entry")
        model = new_model(fields_of(model.config), tokenizer, seed=0, weights=model.state_dict())
    story = f"imported with hfgpt from {origin}."
    count = parameter_counts(model.config).total
    write_folder(folder, partial(_write, model, tokenizer, plain_card(folder.name, count, story, tokenizer)))
    return [*said, _written(folder, model, tokenizer)]


def export(checkpoint: Path, folder: Path, dtype: str = "float32", untie_head: bool = False) -> list[str]:
    """Make `folder` a plain GPT-2 model of a checkpoint, without training state; returns lines that say what was done.

    `untie_head`: the head gets a matrix of its own, for readers that look for one. Raises UserError for a checkpoint
    that is broken, and for values that `dtype` does not have.
    """
    where = f"checkpoint {checkpoint}"
    refuse_existing(folder)
    if (checkpoint / MANIFEST).exists() and (problem := find_damage(checkpoint, MODEL_FILES)):
        raise UserError(f"{where}: {problem}; take another checkpoint")
    model, tokenizer, said = load_model(checkpoint, where), None, []
    if has_tokenizer(checkpoint):
        tokenizer = load_tokenizer(str(checkpoint), lambda: (), model.config.n_positions)
        if dropped := fit_vocabulary(model, tokenizer, where):
            said.append(f"left out {dropped} rows for which the tokenizer has no entry")
    target: torch.dtype = getattr(torch, dtype)
    limit = torch.finfo(target).max
    for name, parameter in model.named_parameters():
        if (largest := float(parameter.detach().abs().max())) > limit:
            raise UserError(f"dtype={dtype}: {name} holds {largest:g}, above its {limit:g}; use bfloat16 or float32")
    if untie_head and model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.to(target)
    readme = checkpoint / "README.md"
    try:
        text = readme.read_text(encoding="utf-8") if readme.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: README.md cannot be read ({error}); mend it or take it away") from None
    count = parameter_counts(model.config).total
    story = f"exported with hfgpt from {checkpoint.resolve().name}."
    text = exported(text, dtype, count) if text else plain_card(folder.name, count, story, tokenizer)
    write_folder(folder, partial(_write, model, tokenizer, text))
    return [*said, _written(folder, model, tokenizer)]


def _tokenizer(name: str, text: Path | None, n_positions: int) -> PreTrainedTokenizerFast:
    from_text = "--tokenizer char --text FILE, the text that it was made from"
    if name.endswith(".pkl"):
        raise UserError(f"tokenizer={name}: a pickle can run code, and is not read; give {from_text}")
    if name.startswith("bpe-"):
        raise UserError(f"tokenizer={name}: would be trained anew, with other ids than the checkpoint's; name a folder")
    if (name == "char") != (text is not None):
        raise UserError(f"tokenizer={name}: text={text}; for a model of characters give {from_text}")
    try:
        characters = read_text_file(text) if text else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text={text}: cannot be read as UTF-8 ({error}); name a text file") from error
    if text and "\n" not in characters:
        raise UserError(
            f"text={text}: holds no line end, which a tokenizer of characters has here, so that the ids would not be "
            "the checkpoint's; it cannot be imported with its tokenizer"
        )
    return load_tokenizer(name, lambda: [characters], n_positions)


def _write(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast | None, readme: str, folder: Path) -> None:
    model.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _written(folder: Path, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast | None) -> str:
    config = model.config
    shape = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, {config.vocab_size:,} rows"
    what = "with its tokenizer" if tokenizer is not None else "without a tokenizer"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"wrote {folder}: {shape}; {parameter_counts(config).total:,} parameters in {dtype}, {what}"
