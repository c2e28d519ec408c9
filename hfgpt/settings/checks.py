"""The ranges of settings, and which settings do not go together."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.errors import UserError
from hfgpt.messages.formats import enumerated, shown
from hfgpt.model.configuration_gpt2 import model_fields
from hfgpt.settings.field_types import AUTO
from hfgpt.settings.layers import LENGTHS
from hfgpt.settings.mixture import OF_SOURCE
from hfgpt.settings.step_sizes import find_stage_problem

if TYPE_CHECKING:
    from hfgpt.config import PretrainConfig

WITH_MIN_LR = ("cosine_with_min_lr", "warmup_stable_decay")  # schedules
POSITIVE, NOT_NEGATIVE, FRACTION = "greater than 0", "0 or more", "at least 0 and below 1"
OPEN = "above 0 and below 1"
# For numbers that are multiplied or divided in float32 on the device: the product or ratio of any two stays finite.
SIZE, SIZE_OR_NONE = "from 1e-30 to 1e15", "0, or from 1e-30 to 1e15"
SECONDS = "from 0.001 to 1e9"  # the range that clocks and timeouts accept
WORKERS = "from 0 to 1024"
NAME, PATH = "not empty", "a path"
ALWAYS_RESERVED = ("<|endoftext|>", "<|pad|>")  # special tokens of a tokenizer with `reserved_tokens`
RULES: dict[str, Callable[[Any], bool]] = {
    POSITIVE: lambda value: 0 < value < math.inf,
    NOT_NEGATIVE: lambda value: 0 <= value < math.inf,
    FRACTION: lambda value: 0 <= value < 1,
    OPEN: lambda value: 0 < value < 1,
    SIZE: lambda value: 1e-30 <= value <= 1e15,
    SIZE_OR_NONE: lambda value: value == 0 or 1e-30 <= value <= 1e15,
    SECONDS: lambda value: 1e-3 <= value <= 1e9,
    WORKERS: lambda value: 0 <= value <= 1024,
    NAME: bool,
}


def out_of_range(spec: dataclasses.Field[Any], value: Any) -> str | None:
    """Return a line if the value of a setting is out of its range, else None."""
    must = spec.metadata["must"]
    if spec.name == "tokens_per_step" and isinstance(value, list):
        return find_stage_problem(value)
    is_checked = value is not None and isinstance(value, str) == (must == NAME)  # "auto" is not a number
    if must not in (None, PATH) and is_checked and not RULES[must](value):
        return f"{spec.name}={value}: must be {must}"
    return None


def find_problems(config: PretrainConfig, unreadable: set[str]) -> list[str]:
    """Return a line for each setting out of its range, and for settings that do not go together.

    unreadable: keys whose values could not be converted, which have their defaults here.
    """
    problems = []
    for spec in dataclasses.fields(config):
        if problem := out_of_range(spec, getattr(config, spec.name)):
            problems.append(problem)
    sizes_fine = not problems
    return (
        problems
        + _find_mixture_problems(config)
        + _find_conflicts(config, unreadable, sizes_fine)
        + _find_size_problems(config, unreadable, sizes_fine)
        + _find_reserved_problems(config)
    )


def _find_reserved_problems(config: PretrainConfig) -> list[str]:
    """Find names of tokens that no tokenizer can reserve."""
    names, where = config.reserved, f"reserved_tokens={config.reserved_tokens}"
    # One character is a token of text, and spaces belong to the text.
    is_odd = any(len(name) < 2 or re.search(r"\s", name) or name in ALWAYS_RESERVED for name in names)
    if is_odd or len(set(names)) < len(names):
        always = " and ".join(ALWAYS_RESERVED)
        return [f"{where}: give different names of two characters or more, without spaces; {always} are added anyway"]
    if names and config.tokenizer == "char":
        return [f"{where}: tokenizer=char has characters alone; use bpe-N"]
    return []


def _find_mixture_problems(config: PretrainConfig) -> list[str]:
    """Find what is wrong with the sources of a mixture, its stages, and named evaluation texts."""
    problems = list(config.checked_evaluation_texts[1])
    metrics = [f"eval_{kind}" for kind in ("loss", "perplexity", "bits_per_byte")]
    mixture, named = config.mixture, list(config.evaluation_texts)
    if mixture is None:
        if config.stages is not None:
            problems.append("stages: only for a mixture; give dataset as a list of sources, or leave it out")
    else:
        problems += mixture.problems
        if config.eval_dataset is None:
            named = [source.name for source in mixture.sources]
        for key in set(OF_SOURCE) & set(config.__dataclass_fields__) - {"dataset", "tokenizer"}:
            if (value := getattr(config, key)) != config.__dataclass_fields__[key].default:
                problems.append(f"{key}={shown(value)}: dataset is a list; set it in the source that it is for")
        tokenizers = [config.tokenizer.removeprefix("openai-community/")]
        if len(names := list(dict.fromkeys(tokenizers + config.source_tokenizers))) > 1:
            problems.append(f"tokenizer: {enumerated(names)} differ; a mixture has one tokenizer for all sources")
        if config.num_train_epochs is not None:
            problems.append(
                f"num_train_epochs={config.num_train_epochs}: a mixture has no epoch in common; set max_steps or "
                "max_tokens, and max_epochs of a source"
            )
    known = metrics + [f"{metric}/{name}" for metric in metrics for name in named]
    if config.ema_decay is not None:  # the first evaluations of average_last have no average
        known += [f"{head}_ema{slash}{name}" for head, slash, name in (key.partition("/") for key in known)]
    if config.metric_for_best_model not in known:
        problems.append(f"metric_for_best_model={config.metric_for_best_model}: must be one of {', '.join(known)}")
        if config.ema_decay is None and "_ema" in config.metric_for_best_model:
            problems[-1] += (
                "; that of an average needs ema_decay, as average_last has none until the last part of the run"
            )
    return problems


def _find_conflicts(config: PretrainConfig, unreadable: set[str], sizes_fine: bool) -> list[str]:
    """Find settings that contradict each other."""
    problems = []
    lengths = [key for key in LENGTHS if getattr(config, key) is not None]
    if len(lengths) != 1 and unreadable.isdisjoint(LENGTHS):
        few = f"no length is given: set one of {', '.join(LENGTHS)}"
        every = "both" if len(lengths) == 2 else "all"
        problems.append(f"{enumerated(lengths)} are {every} given; keep one" if lengths else few)
    if config.min_learning_rate is not None:
        if config.lr_scheduler_type not in WITH_MIN_LR:
            problems.append(
                f"min_learning_rate={config.min_learning_rate}: not used by lr_scheduler_type="
                f"{config.lr_scheduler_type}; leave it out, or use {' or '.join(WITH_MIN_LR)}"
            )
        elif sizes_fine and not 0 <= config.min_learning_rate <= config.learning_rate:
            problems.append(
                f"min_learning_rate={config.min_learning_rate}: must be 0 to learning_rate={config.learning_rate}"
            )
    if config.muon_learning_rate is not None and config.optim != "muon":
        problems.append(f"muon_learning_rate={config.muon_learning_rate}: only used with optim=muon; leave it out")
    if config.ema_decay is not None and config.average_last is not None:
        problems.append("ema_decay and average_last are both given; keep one")
    problems += _find_rollback_conflicts(config)
    if sizes_fine and config.ddp_timeout <= config.stream_timeout:
        problems.append(
            f"ddp_timeout={config.ddp_timeout:g}: must be above stream_timeout={config.stream_timeout:g}, since the "
            "other processes wait while one retries reading"
        )
    if config.per_device_train_batch_size == AUTO and (
        config.tokens_per_step is None or config.gradient_accumulation_steps is not None
    ):
        problems.append("per_device_train_batch_size=auto: needs tokens_per_step, and no gradient_accumulation_steps")
    if config.init_from is not None and config.tokenizer.startswith("bpe-"):
        problems.append(
            f"tokenizer={config.tokenizer}: a newly trained tokenizer does not fit the weights of init_from="
            f"{config.init_from}; leave it out, or give a tokenizer folder"
        )
    if config.hub_strategy != "end" and not config.push_to_hub:
        problems.append(f"hub_strategy={config.hub_strategy}: nothing is pushed; add --push_to_hub true")
    if not config.eval_steps:
        keys = ("eval_train", "early_stopping_patience", "save_best", "ema_decay", "average_last")
        wanted = [key for key in keys if getattr(config, key)]
        problems += [f"{key}: nothing is evaluated with eval_steps=0; set eval_steps" for key in wanted]
    if config.lr_scheduler_type == "constant" and config.warmup_steps:
        problems.append(
            f"warmup_steps={config.warmup_steps}: lr_scheduler_type=constant has no warm-up; use constant_with_warmup"
        )
    return problems


def _find_rollback_conflicts(config: PretrainConfig) -> list[str]:
    """Find settings with which there may be no checkpoint to go back to, or no text to pass over."""
    if config.rollback_margin is None:
        return [
            f"{name}={getattr(config, name)}: has no effect without rollback_margin; set it, such as 1"
            for name in ("rollback_steps", "max_rollbacks")
            if getattr(config, name) != getattr(type(config), name)
        ]
    problems, where = [], f"rollback_margin={config.rollback_margin:g}"
    if not config.save_steps:
        problems.append(f"{where}: needs checkpoints to go back to; set save_steps above 0")
    if config.save_total_limit == 1:
        problems.append(f"{where}: with save_total_limit=1 the only checkpoint may be a bad one; keep 2 or more")
    if isinstance(config.dataset, list):
        problems.append(f"{where}: not with a mixture, whose shares follow the step; leave it out")
    if isinstance(config.tokens_per_step, list):
        problems.append(f"{where}: not with a tokens_per_step that grows; leave it out, or give one number")
    return problems


def _find_size_problems(config: PretrainConfig, unreadable: set[str], sizes_fine: bool) -> list[str]:
    """Find sizes that do not fit the model or the number of processes."""
    problems: list[str] = []
    try:
        n_positions = math.inf if config.model == AUTO else model_fields(config.model).get("n_positions", 1024)
        if config.sequence_length > n_positions and "sequence_length" not in unreadable:
            problems.append(
                f"sequence_length={config.sequence_length} is above the model's n_positions={n_positions}; "
                f'shorten it, or set --model \'{{"size": .., "n_positions": {config.sequence_length}}}\''
            )
    except UserError as error:
        problems += error.problems
    if sizes_fine:
        try:
            config.batch(rank_and_world_size()[1])
        except UserError as error:
            problems += error.problems
    return problems
