"""Option types shared by several commands, and parsers that say what is wrong with a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, BadParameter, Option

from hfgpt.files import local_path
from hfgpt.messages.formats import shown
from hfgpt.settings.field_types import NOT_CONVERTIBLE, WHOLE_BELOW, convert, describe


def path(text: str) -> Path:
    """Return a path, with `~` and `$NAME` expanded."""
    return Path(path_or_id(text))


def path_or_id(text: str) -> str:
    """Return a path, with `~` and `$NAME` expanded, or the name of a Hub repository."""
    try:
        return local_path(text)
    except ValueError as error:
        raise BadParameter(str(error)) from None


def whole(least: int | None = None, most: int = WHOLE_BELOW - 1) -> Callable[[str], int]:
    """Return a parser of whole numbers (1e6 is one, too) from `least` to `most`. Without `least`, the callee checks."""

    def integer(text: str) -> int:
        try:
            value = convert(text, int)
        except NOT_CONVERTIBLE:
            raise BadParameter(f"{shown(text)} is not {describe(int)}") from None
        if least is not None and not least <= value <= most:
            raise BadParameter(f"{shown(value)} is not from {least} to {most}")
        return value

    return integer


def step_size(text: str) -> int | list[list[int]]:
    """Return tokens per step: a whole number, or stages. The callee checks them."""
    try:
        return convert(text, int | list[list[int]])
    except NOT_CONVERTIBLE:
        raise BadParameter(f"{shown(text)} is not {describe(int | list[list[int]])}") from None


def number(most: float = 1e15) -> Callable[[str], float]:
    """Return a parser of numbers from 1e-30 to `most`, so that products and ratios of two of them are finite."""

    def real(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise BadParameter(f"{shown(text)} is not {describe(float)}") from None
        if not 1e-30 <= value <= most:
            raise BadParameter(f"{shown(text)} is not from 1e-30 to {most:g}")
        return value

    return real


DatasetName = Annotated[str | None, Option("--dataset_name", help="Configuration (subset) of a Hub dataset.")]
DatasetSplit = Annotated[str, Option("--dataset_split", help="Split of a Hub dataset.")]
DatasetRevision = Annotated[str | None, Option("--dataset_revision", help="Commit, tag or branch of a Hub dataset.")]
TextColumn = Annotated[str, Option("--text_column", help="Column that holds the text.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Checkpoint = Annotated[Path, Argument(help="Folder of a checkpoint, or of any GPT-2 model.", parser=path)]
NewFolder = Annotated[Path, Argument(help="New folder for the GPT-2 model.", parser=path)]
Precision = Literal["auto", "bf16", "fp16", "no"]
