"""Read documents of ids from token files: memory-mapped if local, else by range requests."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.tokens.layouts import MEGATRON_HEADER, TokenFile
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit, Unusable
from hfgpt.errors import UserError

SPAN_TOKENS = 2**19
# Read with a span, so that the end of its last document seldom needs another request.
MORE_TOKENS = 2**14
# Documents of tokens without separators in a stream.
PIECE_TOKENS = 2**14
LONGEST_DOCUMENT = 2**26
# An index up to this size is checked when it is opened.
SMALL_INDEX_BYTES = 2**20
SAMPLES, SAMPLE_TOKENS, MOST_SAMPLES = 16, 4096, 1024


class Vocabulary(NamedTuple):
    """What a tokenizer says about ids: its end-of-text, the highest id plus one, and its name."""

    separator: int | None
    rows: int
    name: str


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """Files of token ids, read as documents without separators; a document may continue in the next file.

    `following`: the file that continues each file. `piece_tokens`: size of the pieces that are documents, of
    files without separators.
    """

    files: dict[str, TokenFile]
    following: dict[str, str] = field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    piece_tokens: int | None = None

    @functools.cached_property
    def _before(self) -> dict[str, str]:
        return {after: file for file, after in self.following.items()}

    def check(self, vocabulary: Vocabulary) -> TokenFiles:
        """Return these files with a tokenizer. Raises UserError if a sample of the local ones has other ids."""
        new = dataclasses.replace(self, vocabulary=vocabulary)
        local = [file for file in self.files.values() if "://" not in file.file]
        samples = max(1, min(SAMPLES, MOST_SAMPLES // max(len(local), 1)))
        for file in local:
            last = max(0, file.count - SAMPLE_TOKENS)
            for start in sorted({last * number // max(samples - 1, 1) for number in range(samples)}):
                new._ids(file, start, min(start + SAMPLE_TOKENS, file.count))
        return new

    def in_pieces(self) -> TokenFiles:
        """Return these files in pieces, if the first span of one that has no index contains no separator."""
        first = next((file for file in self.files.values() if file.index is None), None)
        if first is None or self._vocabulary.separator is None:
            return dataclasses.replace(self, piece_tokens=PIECE_TOKENS if first else None)
        ids = self._ids(first, 0, min(first.count, SPAN_TOKENS))
        has_separators = (ids == self._vocabulary.separator).any()
        return dataclasses.replace(self, piece_tokens=None if has_separators else PIECE_TOKENS)

    def read(self, unit: Unit) -> list[Any]:
        """Return the documents that begin in a unit, as ids of the file's own type."""
        file, separator = self.files[unit.file], self._vocabulary.separator
        if file.layout == "Megatron":
            return self._read_sequences(file, *_megatron_sequences(file, unit.start, unit.stop))
        if file.index is not None:
            ends = _datatrove_ends(file, unit.start, unit.stop)
            return split_documents(self._ids(file, int(ends[0]), int(ends[-1])), ends - ends[0], separator)
        if self.piece_tokens:
            ids = self._ids(file, unit.start, unit.stop)
            return np.array_split(ids, -(-len(ids) // self.piece_tokens))
        return self._read_span(file, unit.start, unit.stop)

    @property
    def _vocabulary(self) -> Vocabulary:
        assert self.vocabulary is not None  # noqa: S101 see `check`
        return self.vocabulary

    def _ids(self, file: TokenFile, start: int, stop: int) -> np.ndarray:
        """Return ids of a file. Raises UserError if the tokenizer has none of that number."""
        ids = read_array(file.file, file.dtype, file.offset + start * file.item_bytes, stop - start)
        if len(ids) and (int(ids.max()) >= self._vocabulary.rows or int(ids.min()) < 0):
            bad = int(np.argmax((ids >= self._vocabulary.rows) | (ids < 0)))
            where = f"token {start + bad:,} of {file.file} is"
            raise unknown_id(self._vocabulary, where, int(ids[bad]), file.layout.startswith("headerless"))
        return ids

    def _read_span(self, file: TokenFile, start: int, stop: int) -> list[np.ndarray]:
        """Return the documents that begin in a span of ids."""
        separator, previous = self._vocabulary.separator, self._before.get(file.file)
        if separator is None:
            return [self._ids(file, 0, file.count)] if start == 0 else []
        end = min(stop + MORE_TOKENS, file.count)
        ids = self._ids(file, max(start - 1, 0), end)
        lead, ids = (ids[:1], ids[1:]) if start else (None, ids)
        if start == 0 and previous is not None:
            before = self.files[previous]
            lead = self._ids(before, before.count - 1, before.count)
        ends = np.flatnonzero(ids == separator)
        begins = ends[: np.searchsorted(ends, stop - start - 1)] + 1
        if lead is None or lead[0] == separator:
            begins = np.concatenate([np.zeros(1, np.int64), begins])
        if not len(begins):
            return []
        # The separators after the first document's begin end one document each.
        ends = ends[np.searchsorted(ends, begins[0]) :]
        borders = zip(begins.tolist(), ends[: len(begins)].tolist(), strict=False)
        documents = [ids[begin:end] for begin, end in borders if begin < end]
        if len(ends) < len(begins):  # the last document continues
            documents.append(np.concatenate([ids[begins[-1] :], *self._read_on(file, end)]))
        return documents

    def _read_on(self, file: TokenFile, start: int) -> list[np.ndarray]:
        """Return what follows up to the next separator, which may be in a later file."""
        pieces: list[np.ndarray] = []
        first, size, total = file.file, MORE_TOKENS, 0
        while True:
            if start >= file.count:
                if (after := self.following.get(file.file)) is None:
                    return pieces
                file, start = self.files[after], 0
            ids = self._ids(file, start, min(start + size, file.count))
            ends = np.flatnonzero(ids == self._vocabulary.separator)
            pieces.append(ids[: ends[0]] if len(ends) else ids)
            if len(ends):
                return pieces
            start, size, total = start + len(ids), min(2 * size, 2**24), total + len(ids)
            if total > LONGEST_DOCUMENT:
                what = (
                    f"no end-of-text (id {self._vocabulary.separator}) in {total:,} tokens that follow those of {first}"
                )
                raise UserError(f"tokenizer={self._vocabulary.name}: {what}; give the tokenizer that made the tokens")

    def _read_sequences(
        self, file: TokenFile, borders: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> list[Any]:
        """Return Megatron's documents: sequences that follow each other or not."""
        if not len(lengths):
            return []
        if (offsets[1:] == offsets[:-1] + lengths[:-1]).all():
            ids = self._ids(file, int(offsets[0]), int(offsets[-1] + lengths[-1]))
        else:
            spans = zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)
            ids = np.concatenate([self._ids(file, *span) for span in spans])
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return split_documents(ids, totals[borders - borders[0]], self._vocabulary.separator)


def unknown_id(vocabulary: Vocabulary, where: str, found: int, is_headerless: bool = False) -> UserError:
    """Return the error for an id that the tokenizer does not have. `is_headerless`: the type of ids is not certain."""
    fix = ", or set the right --tokens_dtype" if is_headerless else ""
    if found < 0:
        what = "ids below 0 come from damage" + (" or a wrong tokens_dtype" if is_headerless else "")
        return UserError(f"dataset: {where} id {found:,}, but {what}; write or copy the tokens again{fix}")
    last = f"its highest id is {vocabulary.rows - 1:,}"
    fix = f"give the tokenizer that the tokens were made with{fix}"
    return UserError(f"tokenizer={vocabulary.name}: {last}, but {where} id {found:,}; {fix}")


def split_documents(ids: np.ndarray, borders: np.ndarray, separator: int | None) -> list[Any]:
    """Split ids at `borders`, and remove the separator at the begin and end of each document."""
    starts, ends = borders[:-1].copy(), borders[1:].copy()
    if separator is not None and len(ids):
        starts += (ids[np.minimum(starts, len(ids) - 1)] == separator) & (starts < ends)
        ends -= (ids[np.maximum(ends, 1) - 1] == separator) & (starts < ends)
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return [ids[start:end] if start < end else Unusable("empty") for start, end in spans]


def read_array(file: str, dtype: str, offset: int, count: int) -> np.ndarray:
    """Return `count` numbers from byte `offset` of a file on; a local one is memory-mapped."""
    if count <= 0:
        return np.zeros(0, dtype)
    if "://" not in file:
        try:
            return np.memmap(file, dtype, "r", offset, (count,)).view(np.ndarray)
        except ValueError as error:
            raise BadFile(f"dataset: {file} is shorter than when it was opened; finish writing it first") from error
    with open_file(file, uncompressed=False) as handle:
        handle.seek(offset)
        data = handle.read(count * np.dtype(dtype).itemsize)
    if len(data) < count * np.dtype(dtype).itemsize:
        raise OSError("fewer bytes arrived than were requested")
    return np.frombuffer(data, dtype)


def check_index(file: TokenFile) -> None:
    """Raise BadFile if a small index points outside of the tokens; a larger one is checked where it is read."""
    if file.index is None:
        return
    size = MEGATRON_HEADER.size + 12 * file.sequences + 8 * file.documents
    first, last = 0, file.documents
    if size > SMALL_INDEX_BYTES:
        first = last - 1
    if file.layout != "Megatron":
        _datatrove_ends(file, first, last)
    elif _megatron_sequences(file, first, last)[0][-1] != file.sequences:
        raise _points_outside(file)


def _datatrove_ends(file: TokenFile, first: int, last: int) -> np.ndarray:
    """Return where the documents `first` to `last` end, after the begin of the first one, in tokens."""
    assert file.index is not None  # noqa: S101
    skipped = max(first - 1, 0)
    ends = read_array(file.index, "<u8", 8 * skipped, last - skipped)
    ends = np.concatenate([np.zeros(0 if first else 1, np.int64), ends.astype(np.int64)])
    if (np.diff(ends) < 0).any() or ends[0] < 0 or ends[-1] > file.count:
        raise _points_outside(file)
    return ends


def _megatron_sequences(file: TokenFile, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of the sequences that documents begin with, and where sequences begin and their lengths."""
    assert file.index is not None  # noqa: S101
    lengths_at = MEGATRON_HEADER.size
    offsets_at, documents_at = lengths_at + 4 * file.sequences, lengths_at + 12 * file.sequences
    borders = read_array(file.index, "<i8", documents_at + 8 * first, last - first + 1)
    low, high = int(borders[0]), int(borders[-1])
    if (np.diff(borders) < 0).any() or low < 0 or high > file.sequences:
        raise _points_outside(file)
    lengths = read_array(file.index, "<i4", lengths_at + 4 * low, high - low).astype(np.int64)
    offset_bytes = read_array(file.index, "<i8", offsets_at + 8 * low, high - low)
    offsets, rest = np.divmod(offset_bytes, file.item_bytes)
    if rest.any() or (lengths < 0).any() or (offsets < 0).any() or (offsets + lengths > file.count).any():
        raise _points_outside(file)
    return borders, offsets, lengths


def find_units(file: TokenFile) -> list[Unit]:
    """Return spans of a file: of ids, or of documents if it has an index."""
    count, size = file.count, SPAN_TOKENS
    if file.index is not None:
        count, size = file.documents, max(1, SPAN_TOKENS * file.documents // max(file.count, 1))
    total = file.count * file.item_bytes
    borders = [*range(0, count, size), count]
    return [
        Unit(file.file, start, stop, size_bytes=total * (stop - start) // count)
        for start, stop in itertools.pairwise(borders)
    ]


def _points_outside(file: TokenFile) -> BadFile:
    name = Path(file.file).name
    return BadFile(f"dataset: {file.index} points outside of the {file.count:,} tokens of {name}; copy both again")
