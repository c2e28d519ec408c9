"""Open the files of a set of tokens: which is which, which one continues another, and which are validation."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfgpt.data.file_access import read_file
from hfgpt.data.formats.tokens import layouts
from hfgpt.data.formats.tokens.layouts import TokenFile
from hfgpt.data.formats.tokens.reading import TokenFiles, check_index, find_units
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.token_names import COMPANION, SIDECAR, following, is_validation
from hfgpt.data.units import Unit
from hfgpt.errors import UserError

logger = logging.getLogger(__name__)


class MadeWith(NamedTuple):
    """The tokenizer that files name as theirs. `fingerprint`: of its vocabulary and rules.

    `unreadable`: a damaged file, which may have named one.
    """

    name: str | None = None
    fingerprint: str | None = None
    unreadable: str | None = None


class TokenSet(NamedTuple):
    """An opened set of token files. `validation`: units that the set itself calls validation."""

    tokens: TokenFiles
    units: list[Unit]
    validation: list[Unit]
    made_with: MadeWith

    @property
    def hashed_files(self) -> list[str]:
        """All files that determine the documents."""
        return [name for file in self.tokens.files.values() for name in (file.file, file.index) if name]

    @property
    def layouts(self) -> str:
        return ", ".join(sorted({file.layout for file in self.tokens.files.values()}))

    @property
    def size_bytes(self) -> int:
        return sum(file.count * file.item_bytes for file in self.tokens.files.values())


def choose_kind(files: list[str], notes: list[str], tokens_dtype: str | None) -> tuple[list[str], list[str]]:
    """Keep the token files or the files of text, and note the others. Only one kind can be used at once."""
    for file in files:
        if os.path.basename(file) == SIDECAR and "://" not in file:
            folder = os.path.dirname(file)
            sidecar = layouts.sidecar_of(folder, os.path.exists)
            _made_with(folder, sidecar)
            _check_counts(folder, sidecar)
    tokens = _choose_token_files(files, tokens_dtype)
    chosen = tokens or [file for file in files if file_kind(file) not in (None, "tokens")]
    others = [file for file in files if file not in {*chosen} and not COMPANION.search(file)]
    if others:
        what = "text" if tokens else "unmarked tokens"
        notes = [*notes, f"{len(others):,} file{'s' * (len(others) > 1)} of {what} left out: {Path(others[0]).name}"]
    return chosen, notes


def _check_counts(folder: str, sidecar: dict[str, Any]) -> None:
    """Raise BadFile if a shard has not the number of tokens that `hfgpt tokenize` recorded."""
    shards, dtype = sidecar.get("shards"), str(sidecar.get("dtype"))
    for name, count in shards.items() if isinstance(shards, dict) and dtype in layouts.DTYPES else ():
        path, width = os.path.join(folder, name), np.dtype(layouts.DTYPES[dtype]).itemsize
        if os.path.exists(path):
            size = os.path.getsize(path) - layouts.HEADER_BYTES
            if size != count * width:
                found = size // width
                fix = "copy it again, or write the shards again with hfgpt tokenize"
                raise BadFile(f"dataset: {path} has {found:,} tokens, but {SIDECAR} records {count:,}; {fix}")


def refuse_token_settings(dataset: str, settings: dict[str, str | None]) -> None:
    """Raise UserError for settings of tokens that do not apply to this text."""
    of = {"tokens_dtype": "has no token files", "tokens_column": "has no columns"}
    if problems := [
        f"{key}={value}: dataset={dataset} {of[key]}; leave it out" for key, value in settings.items() if value
    ]:
        raise UserError(*problems)


def _choose_token_files(files: list[str], stated: str | None) -> list[str]:
    """Return the token files among `files`: all if there are no others, else those that are sure to be tokens.

    Beside text, a file without header could be anything, so it is used only if the type of its tokens is stated.
    """
    found = [file for file in files if file_kind(file) in (None, "tokens")]
    if len(found) == len(files) or stated:
        return found
    return [file for file in found if "://" in file or layouts.is_marked(file)]


def open_token_files(
    files: list[str], stated: str | None, patience_seconds: float, listed: set[str], skip: bool
) -> TokenSet:
    """Recognize the layout of each file, without reading its tokens. Raises BadFile for one that is not usable.

    `listed`: names of files on the Hub, where asking for each would take a request. `skip`: leave out files that are
    not usable, unless all are.
    """
    found: dict[str, TokenFile] = {}
    sidecars: dict[str, MadeWith] = {}

    def exists(file: str) -> bool:
        return file in listed if "://" in file else os.path.exists(file)

    def inspect(file: str) -> TokenFile:
        recognized = layouts.recognize(file, stated, exists)
        check_index(recognized)
        if (folder := os.path.dirname(file)) not in sidecars:
            sidecars[folder] = _made_with(folder, layouts.sidecar_of(folder, exists))
        own = sidecars[folder]
        return replace(recognized, tokenizer=own.name or recognized.tokenizer, tokenizer_hash=own.fingerprint)

    for number, file in enumerate(files, 1):
        try:
            one = read_file(file, partial(inspect, file), patience_seconds)
        except BadFile as error:
            if not skip or (number == len(files) and not found):
                raise
            logger.warning("left out: %s", error)
        else:
            found.setdefault(one.file, one)
    by_name = {file: found[file] for file in sorted(found)}
    validation = {file for file, one in by_name.items() if is_validation(file, one.layout.startswith("llm.c"))}
    if len(validation) == len(by_name):
        validation = set()
    plain = [file for file, one in by_name.items() if one.index is None]
    return TokenSet(
        TokenFiles(by_name, following(plain)),
        [unit for file, one in by_name.items() if file not in validation for unit in find_units(one)],
        [unit for file in sorted(validation) for unit in find_units(by_name[file])],
        _one_tokenizer(list(by_name.values())),
    )


def _made_with(folder: str, sidecar: dict[str, object]) -> MadeWith:
    if not sidecar:
        return MadeWith()
    if not sidecar.get("finished"):
        raise BadFile(f"dataset: {folder} is a set of tokens that is not finished; run hfgpt tokenize again")
    own = os.path.join(folder, "tokenizer")
    name, fingerprint = sidecar.get("tokenizer"), sidecar.get("tokenizer_fingerprint")
    return MadeWith(own if os.path.isdir(own) else name and str(name), fingerprint and str(fingerprint))  # type: ignore[arg-type]


def _one_tokenizer(files: list[TokenFile]) -> MadeWith:
    """Return the tokenizer that the files name. Raises UserError if they name different ones."""
    found: dict[object, TokenFile] = {}
    for file in files:
        if not file.unreadable:
            found.setdefault(file.tokenizer_hash or file.tokenizer, file)
    if len(found) > 1:
        one, other = list(found.values())[:2]
        names = [file.tokenizer or "an unknown tokenizer" for file in (one, other)]
        what = f"{one.file} was made with {names[0]}, {other.file} with {names[1]}"
        raise UserError(f"dataset: {what}; give token files of one tokenizer")
    first = next(iter(found.values()), files[0])
    unreadable = next((file.unreadable for file in files if file.unreadable), None)
    return MadeWith(first.tokenizer, first.tokenizer_hash, unreadable)
