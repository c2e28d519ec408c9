"""A mixture of texts as settings: `dataset` as a list of sources, `stages`, and named evaluation texts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

from hfgpt.files import local_path
from hfgpt.messages.formats import counted, enumerated, shown
from hfgpt.settings.field_types import NOT_CONVERTIBLE, convert
from hfgpt.settings.step_sizes import StepSizes

# Settings of `PretrainConfig` that a source has for itself.
OF_SOURCE = (
    *("dataset", "dataset_name", "dataset_split", "dataset_revision", "text_column"),
    *("tokenizer", "tokens_dtype", "tokens_column"),
)
_OWN = ("name", "weight", "max_epochs")
_NUMBERS = ("weight", "weights", "max_epochs", "until_tokens")
NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class MixtureSource:
    """One source: its settings by the names of `PretrainConfig`, and `max_epochs` of it at most."""

    name: str
    settings: dict[str, Any]
    max_epochs: int | None = None


@dataclass(frozen=True)
class Stage:
    """Shares of the tokens from the end of the stage before until `until_tokens` (None: the end of the run)."""

    weights: tuple[Fraction, ...]
    until_tokens: int | None = None


@dataclass
class Mixture:
    sources: list[MixtureSource] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def schedule(self, sizes: StepSizes, step: int = 0) -> list[tuple[int, tuple[Fraction, ...]]]:
        """Return the weights and the first step (from 0) of each stage, from `step` on."""
        found, first = [], step
        for stage in self.stages:
            last = None if stage.until_tokens is None else math.ceil(sizes.steps_at(stage.until_tokens))
            if last is None or last > first:
                found.append((first, stage.weights))
            if last is None:
                break
            first = max(first, last)
        return found


def with_numbers(settings: Any, is_number: bool = False) -> Any:
    """Return sources or stages with a number for text such as 1.28e3, which YAML 1.1 takes for text."""
    if isinstance(settings, list | tuple):
        return [with_numbers(one, is_number) for one in settings]
    if isinstance(settings, dict):
        return {key: with_numbers(value, is_number or key in _NUMBERS) for key, value in settings.items()}
    if is_number and isinstance(settings, str):
        for kind in (int, float):
            with suppress(*NOT_CONVERTIBLE):
                if math.isfinite(number := convert(settings, kind)):
                    return number
    return settings


def read_mixture(dataset: Sequence[Any], stages: Sequence[Any] | None, known: Sequence[str]) -> Mixture:
    """Read a list of sources, and the stages. `known`: the keys that a source may have. `problems` has all of them."""
    mixture = Mixture()
    problems, weights, has_weight = mixture.problems, list[Fraction | None](), list[bool]()
    names = _names(dataset)
    for number, item in enumerate(dataset):
        given = {"dataset": item} if isinstance(item, str) else item
        where = f"dataset[{number}]"
        if not isinstance(given, dict):
            problems.append(f"{where}={shown(item)}: must be a name or a mapping such as {{dataset: .., weight: 0.5}}")
            continue
        settings = {key: value for key, value in given.items() if key not in _OWN}
        problems += _setting_problems(where, settings, [key for key in OF_SOURCE if key in known], _OWN)
        has_weight.append(any(_means(key, "weight") for key in given if given[key] is not None))
        weights.append(_weight(given.get("weight"), f"{where}.weight", problems))
        limit = _whole(given.get("max_epochs"), f"{where}.max_epochs", problems)
        mixture.sources.append(MixtureSource(names[number], settings, limit))
    if twice := {name for name in names if names.count(name) > 1}:
        problems.append(f"dataset: two sources have the name {enumerated(sorted(twice))}; set another name in one")
    problems += [
        f"dataset[{number}].name={shown(name)}: must be letters, digits, dots, dashes"
        for number, name in enumerate(names)
        if not NAME.fullmatch(name)
    ]
    if not dataset:
        problems.append("dataset: the list of sources is empty; give at least one")
    if not dataset or len(mixture.sources) < len(dataset):
        return mixture
    of_stages = stages or [{}]
    if any("weights" not in stage for stage in of_stages if isinstance(stage, dict)) or not stages:
        if any(has_weight) and not all(has_weight):
            problems.append(f"dataset: {sum(has_weight)} of {len(weights)} sources have a weight; give all or none")
        if all(has_weight) and not any(weight is None or weight for weight in weights):
            problems.append("dataset: all weights are 0; give one a weight above 0")
    if not twice:
        _read_stages(mixture, of_stages, [Fraction(1) if weight is None else weight for weight in weights])
    return mixture


def _names(dataset: Sequence[Any]) -> list[str]:
    """Return the name of each source: its `name`, or the last part of its dataset, which is made unique."""
    given = [item.get("name") if isinstance(item, dict) else None for item in dataset]
    stated = [None if name is None else str(name) for name in given]
    names: list[str] = []
    for item, name in zip(dataset, stated, strict=True):
        path = str(item.get("dataset", "")) if isinstance(item, dict) else str(item)
        plain = [part for part in PurePosixPath(path).parts if not set("*?[") & set(part)]
        usual = re.sub(r"[^\w.-]+", "-", plain[-1].split(".")[0] if plain else "").strip("-") or "text"
        count, own = 1, name or usual
        while name is None and own in {*names, *filter(None, stated)}:
            count += 1
            own = f"{usual}-{count}"
        names.append(own)
    return names


def _means(key: Any, name: str) -> bool:
    """Return whether a key is a name, or that name misspelled."""
    return bool(difflib.get_close_matches(str(key)[:100], [*OF_SOURCE, *_OWN], n=1)[:1] == [name])


def _setting_problems(where: str, settings: dict[str, Any], known: list[str], own: Sequence[str] = ()) -> list[str]:
    """Return problems with the settings of a source, or of an evaluation text, and expand its paths in place.

    `own`: keys beside `known`, which are not in `settings`.
    """
    problems, has_dataset = [], any(_means(key, "dataset") for key in settings if settings[key] is not None)
    kind = "a source" if own else "an evaluation text"
    for key in [key for key in settings if key not in known]:
        problems.append(f"{where}.{shown(key)}: no such setting of {kind}; it has {', '.join([*known, *own])}")
    for key in known:
        if settings.get(key) is None:
            settings.pop(key, None)
        elif isinstance(settings[key], dict | list | bool) or not str(settings[key]):
            problems.append(f"{where}.{key}={shown(settings.pop(key))}: must be text")
        else:
            settings[key] = str(settings[key])
    if not has_dataset:
        problems.append(f"{where}: has no dataset; give a Hub id, file, folder, glob or embedded")
    for key in settings.keys() & {"dataset", "tokenizer"}:
        try:
            settings[key] = local_path(settings[key])
        except ValueError as error:
            problems.append(f"{where}.{key}={shown(settings[key])}: {error}")
    return problems


def _weight(value: Any, where: str, problems: list[str]) -> Fraction | None:
    """Return a weight exactly as it is written."""
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not 0 <= (weight := Fraction(str(value).strip())) <= 10**15:
            raise ValueError
        return weight
    except (ValueError, ZeroDivisionError):
        problems.append(f"{where}={shown(value)}: must be a number, 0 or more")
        return None


def _whole(value: Any, where: str, problems: list[str]) -> int | None:
    if value is None:
        return None
    try:
        if (number := convert(value, int)) > 0:
            return number
    except NOT_CONVERTIBLE:
        pass
    problems.append(f"{where}={shown(value)}: must be a whole number above 0")
    return None


def _read_stages(mixture: Mixture, stages: Sequence[Any], default: list[Any]) -> None:
    problems, before = mixture.problems, 0
    for number, stage in enumerate(stages):
        where, is_last = f"stages[{number}]", number == len(stages) - 1
        if not isinstance(stage, dict) or stage.keys() - {"until_tokens", "weights"}:
            problems.append(f"{where}={shown(stage)}: must be a mapping of until_tokens, weights or both")
            continue
        until = _whole(stage.get("until_tokens"), f"{where}.until_tokens", problems)
        if is_last and stage.get("until_tokens") is not None:
            problems.append(f"{where}.until_tokens={until}: the last stage goes to the end of the run; leave it out")
        elif not is_last and stage.get("until_tokens") is None:
            problems.append(f"{where}: has no until_tokens, but another stage follows; set it")
        elif until is not None and until <= before:
            problems.append(f"{where}.until_tokens={until}: must be above {before}, where the stage begins")
        before = until or before
        weights = default if "weights" not in stage else _stage_weights(mixture, stage["weights"], where)
        if weights and (total := sum(weights)):
            mixture.stages.append(Stage(tuple(Fraction(weight) / total for weight in weights), until))


def _stage_weights(mixture: Mixture, given: Any, where: str) -> list[Fraction] | None:
    """Return the weights of a stage, which has a list for all sources, or a mapping of names (others have 0)."""
    names, before = [source.name for source in mixture.sources], len(mixture.problems)
    if isinstance(given, dict):
        unknown = [str(name) for name in given if name not in names]
        if unknown:
            fix = f"the sources are {', '.join(names)}"
            mixture.problems.append(f"{where}.weights: no source {enumerated(unknown, 'or')}; {fix}")
        given = [given.get(name, 0) for name in names]
    if not isinstance(given, list | tuple) or len(given) != len(names):
        count = counted(len(given), "weight") if isinstance(given, list | tuple) else shown(given)
        mixture.problems.append(f"{where}.weights: {count} for {counted(len(names), 'source')}; give one for each")
        return None
    weights = [
        _weight(0 if one is None else one, f"{where}.weights[{number}]", mixture.problems)
        for number, one in enumerate(given)
    ]
    if len(mixture.problems) > before:
        return None
    if not sum(filter(None, weights)):
        mixture.problems.append(f"{where}.weights: all are 0; give one a weight above 0")
        return None
    return [weight or Fraction(0) for weight in weights]


def evaluation_texts(eval_dataset: dict[str, Any], known: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the settings of each named evaluation text, and problems."""
    texts, problems = {}, []
    keys = [key for key in OF_SOURCE if key in known and key != "tokenizer"]
    if not eval_dataset:
        problems.append("eval_dataset: the mapping is empty; give at least one text as {name: path}")
    for name, value in eval_dataset.items():
        where = f"eval_dataset.{shown(name)}"
        settings = dict(value) if isinstance(value, dict) else {"dataset": value}
        if not NAME.fullmatch(str(name)):
            problems.append(f"{where}: a name must be letters, digits, dots, dashes")
        problems += _setting_problems(where, settings, keys)
        texts[str(name)] = settings
    return texts, problems
