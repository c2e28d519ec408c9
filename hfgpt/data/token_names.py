"""What the names of token files say: which belong to a set, which are validation, and which one continues another."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from hfgpt.data.kinds import file_kind

SIDECAR = "hfgpt_tokens.json"  # written by `hfgpt tokenize`
# Files that belong to a set of tokens, but are not training text.
COMPANION = re.compile(rf"\.ds\.(index|metadata|loss)$|(^|/){re.escape(SIDECAR)}$|(^|/)tokenizer/[^/]+$")
_VALIDATION = re.compile(r"(?i)(^|[^a-z])val(id|idation)?([^a-z]|$)")
_TRAINING = re.compile(r"(?i)(^|[^a-z])train(ing)?([^a-z]|$)")
_FIRST_SHARD = re.compile(r"(^|\D)0{6}(?=\D*$)")
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


def is_validation(file: str, has_numbered_validation: bool = True) -> bool:
    """Return whether a file's name says that it is validation text: val, or shard 000000 as in llm.c."""
    name = Path(file).name
    if _TRAINING.search(name):
        return False
    return bool(_VALIDATION.search(name) or (has_numbered_validation and _FIRST_SHARD.search(name)))


def splits_of_repository(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the token files of a repository by split; "train" is all of them, because validation is found there."""
    data = [file for file in files if file_kind(file) == "tokens"]
    validation = [file for file in data if is_validation(file)]
    splits = {"train": [*data, *filter(COMPANION.search, files)]} if len(validation) < len(data) else {}
    return splits | ({"validation": validation} if validation else {})


def following(files: Sequence[str]) -> dict[str, str]:
    """Return the file after each one in a sorted set: the same name with the next number."""

    def parts(file: str) -> tuple[str, int | None]:
        found = _LAST_NUMBER.search(file)
        return (_LAST_NUMBER.sub("#", file), int(found[0])) if found else (file, None)

    after = {}
    for one, other in itertools.pairwise(files):
        (name, number), (next_name, next_number) = parts(one), parts(other)
        if name == next_name and number is not None and next_number == number + 1:
            after[one] = other
    return after
