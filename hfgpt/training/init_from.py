"""`--init_from`: load model settings and weights from a GPT-2 folder, a Hub repository or a nanoGPT checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hfgpt.checkpointing.read_training_state import read_state
from hfgpt.config import PretrainConfig
from hfgpt.data.remote import model_files, pinned_name
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.files import has_tokenizer
from hfgpt.links import follow
from hfgpt.model.configuration_gpt2 import ARCHITECTURE_FIELDS, fields_of, model_fields
from hfgpt.model.pretrained import fit_vocabulary, load_model, read_config
from hfgpt.settings.field_types import AUTO

logger = logging.getLogger(__name__)


def resolve_init_from(config: PretrainConfig, resumed_from: Path | None) -> PretrainConfig:
    """Return `config` with `init_from` pinned to a commit or an absolute path, and `model` set to the source's fields.

    A resumed run keeps the source that it began with; a tokenizer in a folder gets its absolute path.

    Raises UserError if `model` differs from the source in more than dropout.
    """
    if (tokenizer := Path(config.tokenizer).expanduser()).exists():
        config = config.with_facts(tokenizer=str(tokenizer.absolute()))
    if resumed_from is not None:
        name, source_fields = _recorded_source(config, resumed_from)
    else:
        name, source_fields = _stated_source(config)
    if name is None:
        return config
    stated = {} if config.model == AUTO else model_fields(config.model, defaults={})
    problems = [
        f"model.{key}={value}: init_from={name} has {source_fields[key]}; leave out model"
        for key, value in stated.items()
        if key in ARCHITECTURE_FIELDS and key in source_fields and value != source_fields[key]
    ]
    if problems:
        raise UserError(*problems)
    return config.with_facts(init_from=name, model={**source_fields, **stated})


def _recorded_source(config: PretrainConfig, resumed_from: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the source and model fields recorded by a checkpoint's run; None for random weights."""
    recorded = read_state(resumed_from, "trainer_state")["config"]
    name = recorded.get("init_from")
    run = f"the run resumes from {resumed_from}, but began from {name or 'random weights'}"
    if name is None:
        if config.init_from is not None:
            raise UserError(f"init_from={config.init_from}: {run}; leave it out, or choose another output_dir")
        return None, {}
    stated = config.init_from or name
    if name not in (stated, str(follow(stated).resolve())) and not name.startswith(f"{stated}@"):
        logger.warning("init_from=%s is not read: %s", stated, run)
    return name, recorded["model"]


def _stated_source(config: PretrainConfig) -> tuple[str | None, dict[str, Any]]:
    """Return the source and model fields of `init_from`; None for random weights."""
    if config.init_from is None:
        return None, {}
    where, source = f"init_from={config.init_from}", model_files(config.init_from)
    fields = fields_of(read_config(source, where))
    if config.sequence_length > fields["n_positions"] and config.is_stated("sequence_length"):
        positions = f"the {fields['n_positions']} positions of {where}"
        raise UserError(f"sequence_length={config.sequence_length}: is above {positions}; shorten it")
    return pinned_name(config.init_from, source), fields


def initial_weights(init_from: str, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> dict[str, Tensor]:
    """Return the weights of `init_from` by parameter name on the main process, and an empty dictionary on the others.

    Raises UserError if they do not fit the tokenizer, and warns if the tokenizer is not that of the source.
    """
    weights: dict[str, Tensor] = {}

    def read() -> None:
        where, files = f"init_from={init_from}", model_files(init_from)
        model = load_model(files, where)
        if has_tokenizer(files):
            its_tokenizer = load_tokenizer(str(files), lambda: (), model.config.n_positions)
            if its_tokenizer.get_vocab() != tokenizer.get_vocab():
                logger.warning("the tokenizer is not that of %s: its ids stand for different tokens", where)
        if dropped := fit_vocabulary(model, tokenizer, where):
            logger.warning("%s: %d rows without an entry in the tokenizer are left out", where, dropped)
        weights.update(model.state_dict())

    ranks.from_main(read)
    return weights
