"""Read documents of ids from a column of lists: `input_ids` of parquet files and others with columns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfgpt.data.formats import arrow, given, parquet
from hfgpt.data.formats.tokens.reading import Vocabulary, split_documents, unknown_id
from hfgpt.data.heads import read_head
from hfgpt.data.kinds import BadFile, file_kind
from hfgpt.data.units import Unit


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """A column of lists of ids. A row is a document, or a piece of a run of documents with separators in between.

    `given`: a `datasets.Dataset` that is read instead of files.
    """

    column: str
    vocabulary: Vocabulary | None = None
    given: Any = None

    def check(self, vocabulary: Vocabulary) -> TokenColumn:
        return dataclasses.replace(self, vocabulary=vocabulary)

    def in_pieces(self) -> TokenColumn:
        return self

    def read(self, unit: Unit) -> list[Any]:
        """Return the documents in the rows of a unit. Rows that are cut anywhere are joined and split at separators.

        A document that continues in the next unit is split there.
        """
        assert self.vocabulary is not None  # noqa: S101
        separator = self.vocabulary.separator
        if self.given is None:
            rows = _format_of(unit.file).read_tokens(unit, self.column)
        else:
            rows = given.read_tokens(unit, self.column, self.given)
        arrays = [row for row in rows if isinstance(row, np.ndarray)]
        if not arrays:
            return list(rows)
        ids, lengths = np.concatenate(arrays), np.fromiter(map(len, arrays), np.int64, len(arrays))
        self._check(unit, ids)
        borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        found = np.flatnonzero(ids == separator) if separator is not None else np.zeros(0, np.int64)
        if len(np.setdiff1d(found, [borders[:-1], borders[1:] - 1])):
            borders = np.concatenate([np.zeros(1, np.int64), found + 1, np.full(1, len(ids))])
            return [row for row in split_documents(ids, borders, separator) if isinstance(row, np.ndarray)]
        documents = iter(split_documents(ids, borders, separator))
        return [next(documents) if isinstance(row, np.ndarray) else row for row in rows]

    def _check(self, unit: Unit, ids: np.ndarray) -> None:
        """Raise UserError for an id that the tokenizer does not have."""
        assert self.vocabulary is not None  # noqa: S101
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary.rows:
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise unknown_id(self.vocabulary, f"{self.column} of {unit.file} contains", bad)


# Formats with columns of lists, by `file_kind`: modules with `find_token_units` and `read_tokens`.
_FORMATS: dict[str, Any] = {"parquet": parquet, "arrow": arrow}


def find_column_units(file: str, tokens_column: str) -> tuple[list[Unit], int]:
    """Return a file's units and size in bytes. Raises BadFile if it has no such column of ids."""
    if _format_of(file) is parquet:  # in one request
        return parquet.find_token_units(file, tokens_column)
    head = read_head(file)
    return _format_of(file).find_token_units(file, head, tokens_column), head.size_bytes


def has_token_columns(file: str) -> bool:
    return file_kind(file) in _FORMATS


def _format_of(file: str) -> Any:
    try:
        return _FORMATS[file_kind(file) or ""]
    except KeyError:
        raise BadFile(
            f"tokens_column: {file} is neither parquet nor Arrow, so it has no lists of ids; leave it out"
        ) from None
