"""`hfgpt import` converts nanoGPT checkpoints to model folders; `hfgpt export` converts ours to plain model folders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from hfgpt.checkpointing.checkpoint import MANIFEST, MODEL_FILES, find_damage, refuse_existing, write_folder
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import UserError
from hfgpt.files import has_tokenizer, read_text_file
from hfgpt.hub.model_card import export_card, plain_card
from hfgpt.links import follow
from hfgpt.model.configuration_gpt2 import fields_of
from hfgpt.model.flops import parameter_counts
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel, new_model
from hfgpt.model.nanogpt_checkpoint import describe_nanogpt
from hfgpt.model.pretrained import fit_vocabulary, load_model


def import_nanogpt(checkpoint: Path, folder: Path, tokenizer_name: str | None, text: Path | None) -> list[str]:
    """Convert a nanoGPT checkpoint to `folder`; returns lines that report what was done.

    `tokenizer_name`: as for `load_tokenizer`, or "char" with the `text` that it came from; None writes only the model.
    Raises UserError for a file that is not nanoGPT's or would run code, and for a tokenizer that does not fit.
    """
    where = f"checkpoint {checkpoint}"
    if not checkpoint.is_file():
        raise UserError(f"{where}: no such file; give nanoGPT's ckpt.pt")
    refuse_existing(folder)
    model, origin = load_model(checkpoint, where), describe_nanogpt(checkpoint, where)
    report = [f"imported {origin}"]
    if tokenizer_name is None:
        rows, tokenizer = model.config.vocab_size, None
        report.append(f"no --tokenizer was given: the folder contains only the model, with all its {rows:,} rows")
    else:
        tokenizer = _load_tokenizer(tokenizer_name, text, model.config.n_positions)
        report += _drop_padded_rows(model, tokenizer, where)
        model = new_model(fields_of(model.config), tokenizer, seed=0, weights=model.state_dict())
    count = parameter_counts(model.config).total
    card = plain_card(folder.name, count, f"imported with hfgpt from {origin}.", tokenizer)
    return [*report, _write(folder, model, tokenizer, card)]


def export(checkpoint: Path, folder: Path, dtype: str = "float32", untie_head: bool = False) -> list[str]:
    """Write a checkpoint as a plain GPT-2 model without training state; returns lines that report what was done.

    `untie_head` also stores the head's matrix, for programs that expect one. Raises UserError for a damaged
    checkpoint, and for values outside the range of `dtype`.
    """
    refuse_existing(folder)
    where, checkpoint = f"checkpoint {checkpoint}", follow(checkpoint)
    model, tokenizer, report = load_whole(checkpoint, where)
    target: torch.dtype = getattr(torch, dtype)
    check_range(model, dtype, torch.finfo(target).max)
    if untie_head:
        untie(model)
    model.to(target)
    try:
        card = (checkpoint / "README.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        card = ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: README.md cannot be read ({error}); fix or delete it") from None
    count = parameter_counts(model.config).total
    if card:
        card = export_card(card, dtype, count)
    else:
        card = plain_card(folder.name, count, f"exported with hfgpt from {checkpoint.resolve().name}.", tokenizer)
    return [*report, _write(folder, model, tokenizer, card)]


def load_whole(checkpoint: Path, where: str = "") -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast | None, list[str]]:
    """Load what an export contains: model and tokenizer, without padded rows, and lines that report those.

    Raises UserError, starting with `where`, for a damaged checkpoint.
    """
    where, checkpoint = where or f"checkpoint {checkpoint}", follow(checkpoint)
    if (checkpoint / MANIFEST).exists() and (damage := find_damage(checkpoint, MODEL_FILES)):
        raise UserError(f"{where}: {damage}; use another checkpoint")
    model = load_model(checkpoint, where)
    if not has_tokenizer(checkpoint):
        return model, None, []
    tokenizer = load_tokenizer(str(checkpoint), lambda: (), model.config.n_positions)
    return model, tokenizer, _drop_padded_rows(model, tokenizer, where)


def check_range(model: GPT2LMHeadModel, dtype: str, limit: float) -> None:
    """Raise UserError if a number of the model is above the `limit` of a data type."""
    for name, parameter in model.named_parameters():
        if (largest := float(parameter.detach().abs().max())) > limit:
            raise UserError(
                f"dtype={dtype}: {name} contains {largest:g}, above the limit of {limit:g}; use bfloat16 or float32"
            )


def untie(model: GPT2LMHeadModel) -> None:
    """Give the head a matrix of its own."""
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _load_tokenizer(name: str, text: Path | None, n_positions: int) -> PreTrainedTokenizerFast:
    """Load the tokenizer of an imported model, which must give the same ids as in the checkpoint."""
    fix = "--tokenizer char --text FILE, the text that the model was trained on"
    if name.endswith(".pkl"):
        raise UserError(f"tokenizer={name}: a pickle can run code, so it is not read; give {fix}")
    if name.startswith("bpe-"):
        raise UserError(f"tokenizer={name}: training it again would change its ids; give a folder")
    if name == "char" and text is None:
        raise UserError(f"tokenizer=char: its characters must come from a text; give {fix}")
    if name != "char" and text is not None:
        raise UserError(f"text={text}: tokenizer={name} does not use it; leave it out, or give {fix}")
    try:
        characters = read_text_file(text) if text else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text={text}: cannot be read as UTF-8 ({error}); choose a text file") from error
    if text and "\n" not in characters:
        raise UserError(
            f"text={text}: has no line end, which our tokenizer of characters always has, so the ids would not be the "
            "checkpoint's; import it without --tokenizer"
        )
    return load_tokenizer(name, lambda: [characters], n_positions)


def _drop_padded_rows(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, where: str) -> list[str]:
    dropped = fit_vocabulary(model, tokenizer, where)
    return [f"left out {dropped} rows without an entry in the tokenizer"] if dropped else []


def _write(folder: Path, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast | None, card: str) -> str:
    """Write the folder; returns the line that reports it."""

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8", newline="\n")

    write_folder(folder, write)
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    shape = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, {config.vocab_size:,} rows"
    what = "with its tokenizer" if tokenizer is not None else "without a tokenizer"
    return f"wrote {folder}: {shape}; {parameter_counts(config).total:,} parameters in {dtype}, {what}"
