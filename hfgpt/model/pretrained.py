"""Weights that others can start from: GPT-2 folders, repositories of the Hub, nanoGPT checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, PreTrainedTokenizerFast

from hfgpt.checkpointing.training_state import read_state
from hfgpt.config import AUTO, PretrainConfig
from hfgpt.data.remote import model_files, pinned_name
from hfgpt.data.tokenization import has_tokenizer, load_tokenizer
from hfgpt.distributed.ranks import HostGroup
from hfgpt.errors import UserError
from hfgpt.model.configuration_gpt2 import ARCHITECTURE_FIELDS, fields_of, model_fields, model_rows
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
from hfgpt.model.nanogpt_checkpoint import read_nanogpt

logger = logging.getLogger(__name__)

# What other engines round a vocabulary up to.
PADDED_TO = (8, 16, 32, 64, 128, 256, 512)


def read_config(source: Path, where: str) -> GPT2Config:
    """Configuration of the model in a GPT-2 folder or a nanoGPT file.

    Raises UserError, which begins with `where`, for what is not there, not readable or not GPT-2.
    """
    if source.is_file():
        return read_nanogpt(source, where).config
    if not (source / "config.json").is_file():
        missing = "no config.json" if source.is_dir() else "no such folder"
        inside = ", ".join(sorted(path.parent.name for path in source.glob("*/config.json")))
        found = f"one of its checkpoints ({inside})" if inside else "a folder written by save_pretrained"
        raise UserError(f"{where}: {missing}; give {found}")
    try:
        stated = json.loads((source / "config.json").read_text(encoding="utf-8"))
        for key, plain in (("model_type", "gpt2"), ("add_cross_attention", False)):
            if (value := stated.get(key, plain)) != plain:
                raise UserError(f"{where}: not a plain GPT-2 model; its {key} is {value}, and must be {plain}")
        config = GPT2Config.from_dict(stated)
        fields_of(config)
    except Exception as error:  # each broken file raises its own type
        if str(error).startswith(where):
            raise
        raise UserError(f"{where}: config.json cannot be read ({_line(error)}); take another checkpoint") from error
    return config


def load_model(source: Path, where: str) -> GPT2LMHeadModel:
    """The model of a GPT-2 folder or a nanoGPT file, in float32 on the CPU, in evaluation mode.

    Raises UserError, which begins with `where`, for what is missing, broken, not finite or not GPT-2.
    """
    # The other format of weights can run code.
    options = {"dtype": torch.float32, "output_loading_info": True, "local_files_only": True, "use_safetensors": True}
    if source.is_file():
        config, tensors, _ = read_nanogpt(source, where)
        options |= {"config": config, "state_dict": tensors}
    else:
        read_config(source, where)
    try:
        model, loading = GPT2LMHeadModel.from_pretrained(None if source.is_file() else source, **options)
    except Exception as error:  # each broken file raises its own type
        raise UserError(f"{where}: cannot be read ({_line(error)}); take another checkpoint") from error
    if lost := sorted(loading["missing_keys"]):
        raise UserError(f"{where}: {len(lost)} weights are missing, such as {lost[0]}; take another checkpoint")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{where}: {name} holds values that are not finite; take another checkpoint")
    return model.eval()


def fit_vocabulary(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, where: str) -> int:
    """Leave the model the rows that its tokenizer needs, without those it was padded with; how many these were.

    Raises UserError where the numbers differ by anything but padding.
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


def settled(config: PretrainConfig, resumed_from: Path | None) -> PretrainConfig:
    """`config` with the model and the commit that `init_from` stands for; for a resumed run, those it began with.

    A tokenizer in a folder is named by its whole path.

    Raises UserError where what `model` states is not what `init_from` holds, but for what computes the same (dropout).
    """
    if (tokenizer := Path(config.tokenizer).expanduser()).exists():  # so that it is known for a path anywhere
        config = config.settled(tokenizer=str(tokenizer.absolute()))
    if resumed_from is not None:
        began = read_state(resumed_from, "trainer_state")["config"]
        name = began.get("init_from")
        if name is None and config.init_from is None:
            return config
        if name is None:
            told = f"the run goes on from {resumed_from}, and began from random weights"
            raise UserError(f"init_from={config.init_from}: {told}; leave it out, or name another output_dir")
        stated = config.init_from or name
        if name not in (stated, str(Path(stated).resolve())) and not name.startswith(f"{stated}@"):
            told = f"the run goes on from {resumed_from}, and began from {name}"
            logger.warning("init_from=%s is not read: %s", stated, told)
        there = began["model"]
    elif config.init_from is None:
        return config
    else:
        source = model_files(config.init_from)
        name, where = pinned_name(config.init_from, source), f"init_from={config.init_from}"
        there = fields_of(read_config(source, where))
        if config.sequence_length > there["n_positions"] and config.is_stated("sequence_length"):
            positions = f"the {there['n_positions']} positions of {where}"
            raise UserError(f"sequence_length={config.sequence_length}: is above {positions}; shorten it")
    own = {} if config.model == AUTO else model_fields(config.model, under={})
    problems = [
        f"model.{key}={value}: init_from={name} has {there[key]}; leave model out"
        for key, value in own.items()
        if key in ARCHITECTURE_FIELDS and key in there and value != there[key]
    ]
    if problems:
        raise UserError(*problems)
    return config.settled(init_from=name, model={**there, **own})


def initial_weights(init_from: str, tokenizer: PreTrainedTokenizerFast, host: HostGroup) -> dict[str, Tensor]:
    """The weights of `init_from` by parameter name, on the main process; empty on the others.

    Raises UserError where they do not fit the tokenizer; other ids than those of their own one are a warning.
    """
    weights: dict[str, Tensor] = {}

    def read() -> None:
        where = f"init_from={init_from}"
        files = model_files(init_from)
        source = load_model(files, where)
        if has_tokenizer(files):
            own = load_tokenizer(str(files), lambda: (), source.config.n_positions)
            if own.get_vocab() != tokenizer.get_vocab():
                logger.warning("the tokenizer is not that of %s: its ids stand for other tokens", where)
        if dropped := fit_vocabulary(source, tokenizer, where):
            logger.warning("%s: %d rows without an entry in the tokenizer are left out", where, dropped)
        weights.update(source.state_dict())

    host.from_main(read)
    return weights


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
