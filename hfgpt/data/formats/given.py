"""Text given in Python, as a `datasets.Dataset`: `Pretrainer(config, train_dataset=..., eval_dataset=...)`.

Settings and fingerprints have the names of these arguments in place of a dataset. `given_datasets` says which sets they
stand for while a text is opened; after that, its `Source` holds the set itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pyarrow as pa

from hfgpt.config import PretrainConfig
from hfgpt.data.formats.parquet import TEXT_TYPES, check_token_column, no_text_column, or_tokens, split_token_lists
from hfgpt.data.units import Unit
from hfgpt.errors import UserError

HAS_COLUMNS, UNIT_START = True, "from_row"  # see `Format`
TRAINING, EVALUATION = "train_dataset", "eval_dataset"
ROWS_PER_UNIT = 1000

_given: ContextVar[dict[str, Any]] = ContextVar("given", default={})  # noqa: B039 never changed


@contextlib.contextmanager
def given_datasets(datasets: dict[str, Any]) -> Iterator[None]:
    token = _given.set(datasets)
    try:
        yield
    finally:
        _given.reset(token)


def find_given(name: str | None) -> Any:
    """Return the set that this name stands for, None for the name of anything else."""
    return _given.get().get(name or "")


def name_datasets(config: PretrainConfig, train: Any, evaluation: Any) -> tuple[PretrainConfig, dict[str, Any]]:
    """Return the settings with the names of the given sets, and the sets by name. Raises UserError if unusable.

    `evaluation` may be a mapping of names to sets, to paths, or to settings such as {"dataset": .., "text_column": ..}.
    """
    given: dict[str, Any] = {}
    settings = {"dataset": _name(TRAINING, train, given)} if train is not None else {}
    if type(evaluation) is dict:
        named = {name: _name(f"{EVALUATION}.{name}", one, given) for name, one in evaluation.items()}
        settings["eval_dataset"] = named
    elif evaluation is not None:
        settings["eval_dataset"] = _name(EVALUATION, evaluation, given)
    for key, argument in (("dataset", TRAINING), ("eval_dataset", EVALUATION)):
        if key in settings and (stated := getattr(config, key)) not in ("embedded", None, settings[key]):
            raise UserError(f"{key}={stated}: {argument} is given too; leave one of them out")
    return (config.with_facts(**settings) if settings else config), given


def _name(key: str, one: Any, given: dict[str, Any]) -> Any:
    """Return what stands for a set in the settings: `key`, under which it is put into `given`."""
    if key.startswith(EVALUATION) and isinstance(one, str):
        return one
    if key.startswith(EVALUATION) and type(one) is dict and "dataset" in one:
        return {**one, "dataset": _name(key, one["dataset"], given)}
    _check(key, one)
    given[key] = one
    return key


def find_missing(config: PretrainConfig, began_with: str | None) -> str | None:
    """Return the name of a set that a run began with, or that its settings name, but that is not given now."""
    texts = [text["dataset"] for text in config.evaluation_texts.values()]
    names = [began_with, config.dataset, *(texts or [config.eval_dataset])]
    given = [name for name in names if isinstance(name, str) and name.split(".")[0] in (TRAINING, EVALUATION)]
    return next((name for name in given if find_given(name) is None and not os.path.exists(name)), None)


def _check(key: str, given: Any) -> None:
    import datasets  # imported late: takes seconds

    if isinstance(given, datasets.IterableDataset):
        fix = "give a datasets.Dataset, or the name of the set as dataset= with streaming=True"
        raise UserError(f"{key}: an IterableDataset cannot be read from the middle, as resuming needs; {fix}")
    if isinstance(given, datasets.DatasetDict):
        raise UserError(f"{key}: is a DatasetDict; give one of its splits: {', '.join(map(str, given))}")
    if not isinstance(given, datasets.Dataset):
        fix = "make one, for example with datasets.Dataset.from_list"
        raise UserError(f"{key}: is a {type(given).__name__}, not a datasets.Dataset; {fix}")
    if given.format["type"] == "custom":
        raise UserError(f"{key}: has a transform that runs when it is read; apply it with map() instead")


def find_units(name: str, given: Any, text_column: str) -> list[Unit]:
    """Return the units of a given set: ranges of its rows."""
    schema = given.features.arrow_schema
    if text_column not in schema.names:
        raise no_text_column(name, text_column, schema)
    kind = schema.field(text_column).type
    if str(kind) not in TEXT_TYPES:
        fix = f"choose a text column{or_tokens(kind)}"
        raise UserError(f"text_column={text_column}: contains {kind}, not text, in {name}; {fix}")
    return _ranges(name, given, text_column)


def find_token_units(name: str, given: Any, tokens_column: str) -> list[Unit]:
    """Like `find_units`, for a column of lists of token ids, of which a unit may have any number of documents."""
    check_token_column(name, given.features.arrow_schema, tokens_column)
    return [unit._replace(rows=None) for unit in _ranges(name, given, tokens_column)]


def _ranges(name: str, given: Any, column: str) -> list[Unit]:
    row_bytes = given.data.column(column).nbytes / max(given.data.num_rows, 1)
    borders = [*range(0, len(given), ROWS_PER_UNIT), len(given)]
    return [
        Unit(name, start, stop, rows=stop - start, size_bytes=int(row_bytes * (stop - start)))
        for start, stop in itertools.pairwise(borders)
    ]


def read_rows(unit: Unit, text_column: str, given: Any) -> list[Any]:
    return _read_column(unit, text_column, given).cast(pa.large_binary()).to_pylist()


def read_tokens(unit: Unit, tokens_column: str, given: Any) -> list[Any]:
    """Return the ids in each row of a unit, or an `Unusable`."""
    return split_token_lists(unit.file, _read_column(unit, tokens_column, given))


def _read_column(unit: Unit, column: str, given: Any) -> Any:
    return given.with_format("arrow")[unit.start : unit.stop][column]
