"""Merge settings from a recipe, YAML files and the command line, before `PretrainConfig` checks them.

Recipe values that conflict with what the user set are replaced, so a recipe never blocks the user's settings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import glob
import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.errors import UserError
from hfgpt.files import has_tokenizer
from hfgpt.messages.formats import shown
from hfgpt.model.configuration_gpt2 import model_fields
from hfgpt.settings.field_types import AUTO, NO_VALUE, NOT_CONVERTIBLE, convert, read_yaml
from hfgpt.settings.step_sizes import as_stages

if TYPE_CHECKING:
    from hfgpt.config import PretrainConfig

LENGTHS = ("max_steps", "max_tokens", "num_train_epochs")
# Settings of a recipe that describe its own dataset or weights. They do not apply to another dataset or other weights.
_OF_ANOTHER = {"dataset": ("dataset_name", "dataset_split", "dataset_revision"), "init_from": ("model", "tokenizer")}
MOST_UNKNOWN = 20  # unknown settings listed in one message

Layer = dict[str, Any]


class FileLayer(Layer):
    """The settings of a YAML file."""

    def __init__(self, path: str) -> None:
        super().__init__(read_yaml(path))
        self.path = path


logger = logging.getLogger(__name__)


class GaveWay(NamedTuple):
    """A recipe's value that conflicts with the user's settings, and the value used instead."""

    recipe: Any
    now: Any

    def __str__(self) -> str:
        now = "left out" if self.now is None else self.now
        return f"{now}, because the recipe's {self.recipe} conflicts with your settings"


class Merged(NamedTuple):
    """The merged settings, which of them the user set, and the recipe values that were replaced."""

    values: Layer
    stated: frozenset[str]
    gave_way: dict[str, GaveWay]
    problems: list[str]


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shown(message)}; see --help")


def read_flags(cls: type[PretrainConfig], defaults: Layer, argv: list[str] | None) -> list[Layer]:
    """Read the command line: one layer for each `--config` file, and one for the flags.

    defaults: the recipe's values, shown by `--help`. If a flag is repeated, the last one counts, with a warning.
    """
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    options: dict[str, Any] = {"action": "append", "nargs": "?"}  # append, to notice repeated flags
    help_ = "YAML file with the same keys; may be repeated, later files win"
    parser.add_argument("--config", metavar="FILE.yaml", const="", help=help_, **options)
    hints = get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        default = defaults.get(spec.name, spec.default)
        text = f"{spec.metadata['help']} (default: {default})".replace("%", "%%").strip()
        alone = "true" if "bool" in str(spec.type) else NO_VALUE  # the value of a flag that has none
        choices = get_args(hints[spec.name]) if get_origin(hints[spec.name]) is Literal else ["VALUE"]
        parser.add_argument(f"--{spec.name}", metavar="|".join(choices), const=alone, help=text, **options)
    known, unknown = parser.parse_known_args(argv)
    given = vars(known)
    files = [FileLayer(path) for path in given.pop("config", [])]
    command_line: Layer = {key: values[-1] for key, values in given.items()}
    for key, values in given.items():
        if any(value != values[-1] for value in values) and rank_and_world_size()[0] == 0:
            logger.warning("--%s: given %d times; using the last: %s", key, len(values), shown(values[-1]))
    value_follows = False
    for argument in unknown:  # reported together with all other problems when layers are merged
        if argument.startswith("--"):
            command_line[argument[2:].split("=")[0]] = None
        elif not value_follows:
            raise UserError(f"{shown(argument)}: not a flag; write settings as --key value")
        value_follows = argument.startswith("--") and "=" not in argument
    return [*files, command_line]


def drop_of_another(cls: type[PretrainConfig], recipe: Layer, layers: list[Layer]) -> dict[str, GaveWay]:
    """Remove settings that describe the recipe's own dataset or weights, if the user names others."""
    stated = {key: value for layer in layers for key, value in layer.items()}
    dropped = {}
    for key, dependent in _OF_ANOTHER.items():
        if stated.get(key) in (None, "none", "null", "None") or stated[key] == recipe.get(key):
            continue
        is_other = _is_mixture(stated[key]) or _is_local(str(stated[key]))
        if key == "dataset" and not is_other:  # perhaps a mirror with the same subsets
            continue
        for name in dependent:
            # Weights come with their own tokenizer, unless they have none.
            if name in recipe and (name != "tokenizer" or _has_tokenizer(str(stated[key]))):
                dropped[name] = GaveWay(recipe.pop(name), cls.__dataclass_fields__[name].default)
    return {key: way for key, way in dropped.items() if key not in stated and way.recipe != way.now}


def stated_size(layers: list[Layer]) -> str:
    """Return the name of the model size that the last layer with a `model` names."""
    model = next((layer["model"] for layer in reversed(layers) if "model" in layer), None)
    with contextlib.suppress(*NOT_CONVERTIBLE):
        model = convert(model, dict[str, Any]).get("size")
    return str(model)


def merge_layers(cls: type[PretrainConfig], layers: list[Layer], recipe: list[Layer]) -> Merged:
    """Merge layers: later ones override earlier ones, and all of them override the recipe.

    Unknown settings are problems. Recipe values that conflict with `layers` are replaced.
    """
    merged: Layer = {}
    for layer in (*recipe, *layers):
        if any(key in layer for key in LENGTHS):  # a run has one length: the last one given
            merged = {key: value for key, value in merged.items() if key not in LENGTHS}
        merged.update(layer)
    names = [spec.name for spec in dataclasses.fields(cls)]
    problems = []
    unknown = [key for key in merged if key not in names]
    files = {key: f"{shown(layer.path)}: " for layer in layers if isinstance(layer, FileLayer) for key in layer}
    for key in unknown[: MOST_UNKNOWN + 1]:
        near = difflib.get_close_matches(key[:100], names, n=1, cutoff=0.5)
        where, dashes = files.get(key, ""), "" if key in files else "--"
        hint = f"did you mean {dashes}{near[0]}?" if near else "see --help"
        problems.append(f"{where}{dashes}{shown(key)}: no such setting; {hint}")
    if len(unknown) > MOST_UNKNOWN:
        problems[MOST_UNKNOWN:] = [f"and {len(unknown) - MOST_UNKNOWN:,} more unknown settings"]
    merged = {key: value for key, value in merged.items() if key in names}
    stated = frozenset(key for layer in layers for key in layer)
    gave_way = _give_way(cls, merged, stated, recipe[0]) if recipe else {}
    return Merged(merged, stated, gave_way, problems)


def _give_way(
    cls: type[PretrainConfig], merged: dict[str, Any], stated: frozenset[str], recipe: dict[str, Any]
) -> dict[str, GaveWay]:
    """Change values in `merged` that the user did not set, until they fit those that the user set.

    The text of a problem names the settings that conflict; the first one that the user did not set gets another value.
    Problems that the recipe has by itself remain.
    """
    defaults = {spec.name: spec.default for spec in dataclasses.fields(cls)}
    open_keys = [key for key in defaults if key not in stated]
    gave_way: dict[str, GaveWay] = {}
    left = {_kind(problem) for problem in _problems_of(cls, recipe)}
    while problem := next((one for one in _problems_of(cls, merged) if _kind(one) not in left), None):
        values = {**defaults, **merged}
        named = [key for key in re.findall(r"\w+", problem) if key in open_keys]
        tries = ((key, value) for key in named for value in _alternatives(key, values, defaults[key]))
        for key, value in tries:
            if _kind(problem) not in map(_kind, _problems_of(cls, {**merged, key: value})):
                gave_way[key] = GaveWay(values[key], value)
                merged[key] = value
                open_keys.remove(key)
                break
        else:
            left.add(_kind(problem))
    return gave_way


def _problems_of(cls: type[PretrainConfig], values: dict[str, Any]) -> tuple[str, ...]:
    try:
        cls(**{key: value for key, value in values.items() if key in cls.__dataclass_fields__})
    except UserError as error:
        return error.problems
    return ()


def _kind(problem: str) -> str:
    """Return the text of a problem without values and hints, to compare problems."""
    return re.sub(r"=\S+|\d\S*", "", problem.split(";")[0])


def _alternatives(key: str, values: dict[str, Any], default: Any) -> list[Any]:
    """Return values to try for a setting that the user did not set: the nearest ones that fit, or the default."""
    with contextlib.suppress(UserError, *NOT_CONVERTIBLE):  # the other values may be invalid themselves
        sequence_length, given = convert(values["sequence_length"], int), values["per_device_train_batch_size"]
        micro_batch = 1 if given == AUTO else convert(given, int)
        blocks = sequence_length * rank_and_world_size()[1]  # tokens of one block on each process
        if key == "sequence_length":
            return [model_fields(_model(values)).get("n_positions", 1024)]
        if key == "model":
            return [{**_model(values), "n_positions": sequence_length}]
        if key == "tokens_per_step":
            each, sizes = micro_batch * blocks, convert(values[key], int | list[list[int]])
            near = [[start, max(1, round(size / each)) * each] for start, size in as_stages(sizes)]
            return [near if isinstance(sizes, list) else near[0][1], default]
        if key == "per_device_train_batch_size" and given != AUTO:
            stages = as_stages(convert(values["tokens_per_step"], int | list[list[int]]))
            wanted = math.gcd(*(size for _, size in stages)) // blocks
            return [size for size in range(min(micro_batch, wanted), 0, -1) if wanted % size == 0] or [default]
        if key == "learning_rate":
            return [convert(values["min_learning_rate"], float)]
        if key == "lr_scheduler_type":
            return ["constant_with_warmup", default]
        if key == "stream_timeout":
            return [convert(values["ddp_timeout"], float) / 2]
        if key == "ddp_timeout":
            return [2 * convert(values["stream_timeout"], float)]
    return [default]


def _model(values: dict[str, Any]) -> dict[str, Any]:
    model = "gpt2-125m" if values["model"] == AUTO else values["model"]
    return (
        {"size": model}
        if isinstance(model, str) and not model.lstrip().startswith("{")
        else convert(model, dict[str, Any])
    )


def _is_mixture(dataset: Any) -> bool:
    return isinstance(dataset, list) or str(dataset).lstrip().startswith("[{")


def _is_local(dataset: str) -> bool:
    return dataset == "embedded" or glob.has_magic(dataset) or _exists(dataset)


def _exists(path: str) -> bool:
    """Return whether the file or folder exists. Impossible names are reported when settings are checked."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _has_tokenizer(init_from: str) -> bool:
    """Return whether weights come with a tokenizer. Hub repositories are assumed to."""
    return not _exists(init_from) or has_tokenizer(Path(init_from).expanduser())
