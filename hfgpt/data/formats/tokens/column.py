"""Read documents of ids from a column of lists: `input_ids` of parquet files and others with columns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfgpt.data.formats import parquet
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.heads import read_head
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.units import Unit, Unusable
from hfgpt.errors import UserError


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """A column of lists of ids. A row is a document, or a piece of a run of documents with separators in between."""

    column: str
    vocabulary: Vocabulary | None = None

    def check(self, vocabulary: Vocabulary) -> TokenColumn:
        return dataclasses.replace(self, vocabulary=vocabulary)

    def in_pieces(self) -> TokenColumn:
        return self

    def read(self, unit: Unit) -> list[Any]:
        """Return the documents in the rows of a unit. Rows that are cut anywhere are joined and split at separators.

        A document that continues in the next unit is split there.
        """
        assert self.vocabulary is not None  # noqa: S101
        separator, rows = self.vocabulary.separator, _format_of(unit.file).read_tokens(unit, self.column)
        arrays = [row for row in rows if isinstance(row, np.ndarray)]
        for ids in arrays:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary.rows:
                bad = int(ids.max()) if ids.max() >= self.vocabulary.rows else int(ids.min())
                has = f"{self.column} of {unit.file} contains id {bad:,}"
                last = f"its highest id is {self.vocabulary.rows - 1:,}"
                fix = "give the tokenizer that the tokens were made with"
                raise UserError(f"tokenizer={self.vocabulary.name}: {last}, but {has}; {fix}")
        if separator is not None and any((ids[1:-1] == separator).any() for ids in arrays):
            joined = np.concatenate(arrays)
            borders = np.flatnonzero(joined == separator)
            parts = np.split(joined, np.stack([borders, borders + 1], 1).ravel())[::2]
            return [part for part in parts if len(part)]
        return [self._trim(row) if isinstance(row, np.ndarray) else row for row in rows]

    def _trim(self, ids: np.ndarray) -> np.ndarray | Unusable:
        assert self.vocabulary is not None  # noqa: S101
        start = int(len(ids) > 0 and ids[0] == self.vocabulary.separator)
        stop = len(ids) - int(len(ids) > start and ids[-1] == self.vocabulary.separator)
        return ids[start:stop] if start < stop else Unusable("empty")


# Formats with columns of lists, by `file_kind`: modules with `find_token_units` and `read_tokens`.
_FORMATS: dict[str, Any] = {"parquet": parquet}


def find_column_units(file: str, tokens_column: str) -> tuple[list[Unit], int]:
    """Return a file's units and size in bytes. Raises BadFile if it has no such column of ids."""
    head = read_head(file)
    return _format_of(file).find_token_units(file, head, tokens_column), head.size_bytes


def has_token_columns(file: str) -> bool:
    return file_kind(file) in _FORMATS


def _format_of(file: str) -> Any:
    try:
        return _FORMATS[file_kind(file) or ""]
    except KeyError:
        raise BadFile(f"tokens_column: {file} is not parquet, so it has no lists of ids; leave it out") from None
