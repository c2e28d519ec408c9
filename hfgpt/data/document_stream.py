"""The block stream of a text of any size: shuffled documents, packed end to end."""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hfgpt.data.encoding import Encoder
from hfgpt.data.formats import format_of
from hfgpt.data.permutation import hashes, permutation
from hfgpt.data.source import Source
from hfgpt.data.stream import SHOWN_TOKENS, Decode, Origin, StepBatch, UnitNumber, divisors, join_batches
from hfgpt.data.threads import start_together
from hfgpt.data.units import IN_MEMORY_BYTES, Row, Unit, Unusable
from hfgpt.data.unusable import fix_of, no_documents
from hfgpt.errors import TextEnded, UserError
from hfgpt.settings.step_sizes import StepSizes

MAX_STREAMS = 96
PARTS_PER_STREAM = 8
CACHED_UNITS = 4
# Files whose units are kept while several logical streams read them.
CACHED_FILES = 16
ENCODED_TOGETHER = 8
# If the parts of a stream happen to contain no document in one epoch, it gets other parts in the next.
MAX_EMPTY_EPOCHS = 8


class StreamedDocument(NamedTuple):
    """Tokens of a document, its place [epoch, part, row] (see `DocumentStream`), and its origin (epoch, unit, row).

    `skipped`: rows before it, and what the tokenizer does not represent of it.
    """

    place: list[int]
    origin: tuple[int, UnitNumber, int]
    ids: np.ndarray
    skipped: Counter[str] | None


class _Section(NamedTuple):
    """Part `k` of `n` of a unit's rows."""

    unit: Unit
    number: UnitNumber
    k: int
    n: int


class _Text(NamedTuple):
    """A document before it is encoded."""

    place: list[int]
    origin: tuple[int, UnitNumber, int]
    text: Row
    skipped: Counter[str] | None


@dataclass(eq=False)
class DocumentStream:
    """Blocks of shuffled documents, packed end to end, from a source of any size.

    A step is split into V logical streams; V is the divisor of `blocks_per_step` (a number, or sizes that change) up to
    96 that has the most divisors itself, so that it suits many world sizes. Each epoch permutes the units (split into
    parts if there are few). Stream i reads every V-th part from the i-th on, shuffles the rows of each, and starts its
    next epoch independently. All of this depends only on seed, epoch and place, so no random state is stored. Position:
    `{"streams": [[epoch, part, row, token], ...]}`, for each stream the first token of its next block. Raises UserError
    if there are fewer rows than streams. A stream that needs more than `max_epochs` raises TextEnded.

    Of a source with `by_file`, files are permuted (and split into parts), and the units of each part when the file is
    opened. The position then has [epoch, part, section, row, token], where a section is a unit or a part of one.
    """

    source: Source
    encoder: Encoder
    seed: int
    sequence_length: int
    blocks_per_step: int | StepSizes
    fingerprint: dict[str, Any]
    max_epochs: int | None = None

    def __post_init__(self) -> None:
        self.sizes = StepSizes.of(self.blocks_per_step, self.sequence_length)
        candidates = [n for n in divisors(self.sizes.common) if n <= MAX_STREAMS]
        self.streams = self.sizes.streams or max(candidates, key=lambda n: (len(divisors(n)), n))
        self.divisible = self.streams
        self.start = self.start_of_epoch(0)
        self._parts = self._split_units()

    def start_of_epoch(self, epoch: int) -> dict[str, Any]:
        zeros = [0] * (4 if self.source.by_file else 3)
        return {"streams": [[epoch, *zeros] for _ in range(self.streams)]}

    def steps(self, position: dict[str, Any], first: int, last: int, step: int = 0) -> Iterator[StepBatch]:
        if (saved_streams := len(position["streams"])) != self.streams:
            raise UserError(
                f"resume_from_checkpoint: position of {saved_streams} streams, but there are {self.streams}"
            )
        cursors, V = position["streams"], self.streams
        packs = [self.pack(i, cursors[i], (n // V for n in self.sizes.counts(step))) for i in range(first, last)]
        return map(join_batches, zip(*self.start_reading(packs, cursors, first)))  # noqa: B905 all of them are endless

    def start_reading(
        self, packs: Sequence[Iterator[StepBatch]], cursors: Sequence[list[int]], first: int
    ) -> Sequence[Iterator[StepBatch]]:
        """Have logical streams from the `first` on read the text of their first step together if it is remote."""
        if self.source.is_local or len(packs) < 2:
            return packs
        return start_together(packs, self.next_units(cursors[first : first + len(packs)], first))

    def next_units(self, cursors: Sequence[list[int]], first: int) -> list[int]:
        """Return the numbers of the units that logical streams from the `first` on read next."""
        orders: dict[int, np.ndarray] = {}  # by epoch
        units = []
        for stream, (epoch, part, *_) in enumerate(cursors, start=first):
            if epoch not in orders:
                orders[epoch] = self._shuffle_parts(epoch)
            units.append(int(orders[epoch][stream :: self.streams][part : part + 1, 0].sum()))
        return units

    def pack(self, stream: int, cursor: list[int], counts: Iterable[int]) -> Iterator[StepBatch]:
        """Yield one logical stream's blocks of each step, `counts` of them, packed from its documents end to end."""
        documents, token = self.documents(stream, cursor), cursor[-1]
        pending = deque([next(documents)])
        held, skipped = len(pending[0].ids), Counter(pending[0].skipped)
        for count in counts:
            step_tokens = count * self.sequence_length
            origins = [(*pending[0].origin, -token)]
            while held <= token + step_tokens:
                pending.append(next(documents))
                held += len(pending[-1].ids)
            rest = (document.ids[: step_tokens + 1] for document in islice(pending, 1, None))
            run = np.concatenate([pending[0].ids[token : token + step_tokens + 1], *rest])
            blocks = sliding_window_view(run, self.sequence_length + 1)[: step_tokens : self.sequence_length]
            token += step_tokens
            while token >= len(pending[0].ids):
                length = len(pending.popleft().ids)
                token, held = token - length, held - length
                origins.append((*pending[0].origin, step_tokens - token))
                if pending[0].skipped:  # counted when the cursor passes them, so that a resume counts none twice
                    skipped.update(pending[0].skipped)
            yield StepBatch(blocks, {"streams": [[*pending[0].place, token]]}, skipped, [origins])
            skipped = Counter()

    def documents(self, stream: int, cursor: list[int]) -> Iterator[StreamedDocument]:
        """Yield the documents of one logical stream endlessly, starting with the one at `cursor`."""
        epoch, first_part, *sections_before, first_row, _ = cursor
        first_section = sum(sections_before)
        # What the tokenizer does not represent of the document at the cursor was counted before the resume.
        counted = cursor[:-1] if any(cursor[1:]) else None
        is_found, skipped, empty_epochs = any(cursor[1:-1]), Counter[str](), 0
        while True:
            if self.max_epochs is not None and epoch >= self.max_epochs:
                raise TextEnded(
                    f"it has had its max_epochs={self.max_epochs}, as the first of its {self.streams} logical streams; "
                    "the others may have some documents left (with streaming=false it ends at its last block)"
                )
            parts = self._shuffle_parts(epoch)[stream :: self.streams].copy()
            for part in range(first_part, len(parts)):
                sections = self._sections(epoch, parts[part])
                for number in range(first_section, len(sections)):
                    place = [epoch, part, number] if self.source.by_file else [epoch, part]
                    texts = self._read_section(stream, place, sections[number], first_row, skipped)
                    for document in self._encode(texts, counted):
                        is_found |= len(document.ids) > 0
                        yield document
                    first_row = 0
                first_section = 0
            empty_epochs = 0 if is_found else empty_epochs + 1
            if empty_epochs == MAX_EMPTY_EPOCHS:
                raise self._too_few(f"stream {stream} found none ({dict(skipped)} skipped)", skipped)
            epoch, first_part, is_found = epoch + 1, 0, False

    def _sections(self, epoch: int, unit_part: np.ndarray) -> list[_Section]:
        """Return what a part reads one after the other: itself, or with `by_file` its share of the file's units."""
        number, k, n = unit_part.tolist()
        if not self.source.by_file:
            return [_Section(self.source.units[number], number, k, n)]
        units = _units_of(self.source, self.source.units[number])
        split = math.ceil(n / max(len(units), 1))
        sections = [_Section(unit, (number, i), part, split) for i, unit in enumerate(units) for part in range(split)]
        own = sections[len(sections) * k // n : len(sections) * (k + 1) // n]
        return [own[i] for i in permutation(len(own), self.seed, epoch, 5, number, k)]

    def _read_section(
        self, stream: int, place: list[int], section: _Section, first_row: int, skipped: Counter[str]
    ) -> list[_Text]:
        """Return its shuffled texts, from `first_row` on. `skipped` counts the rows before the next text."""
        unit, unit_number, k, n = section
        rows = _read(self.source, unit)
        start, stop = len(rows) * k // n, len(rows) * (k + 1) // n
        epoch, *within = place
        order = (start + permutation(stop - start, self.seed, epoch, 2, stream, *within)).tolist()
        texts = []
        for number in range(first_row, len(order)):
            text = rows[order[number]]
            if isinstance(text, Unusable):
                skipped[text.reason] += 1
            else:
                skipped_before = Counter(skipped) if skipped else None
                texts.append(_Text([*place, number], (epoch, unit_number, order[number]), text, skipped_before))
                skipped.clear()
        return texts

    def _encode(self, texts: list[_Text], counted: list[int] | None) -> Iterator[StreamedDocument]:
        for first in range(0, len(texts), ENCODED_TOGETHER):  # encoded together, which is faster
            chunk = texts[first : first + ENCODED_TOGETHER]
            encoded = self.encoder.documents([text for _, _, text, _ in chunk])
            for (place, origin, _, skipped), document in zip(chunk, encoded, strict=True):
                if document.lost and place != counted:
                    skipped = document.lost + (skipped or Counter())
                yield StreamedDocument(place, origin, document.ids, skipped)

    def _shuffle_parts(self, epoch: int) -> np.ndarray:
        """Return all rows (unit, part, parts) in the epoch's order: units shuffled, the parts of each side by side.

        Thus neighboring streams, which share a process, read the same unit at about the same time.
        """
        by_unit = hashes(self._parts[:, 0], self.seed, epoch, 3)
        by_part = hashes(np.arange(len(self._parts)), self.seed, epoch, 4)
        return self._parts[np.lexsort((by_part, by_unit))]

    def _split_units(self) -> np.ndarray:
        """Return all rows (unit, part, parts), int64: at least 8 parts per stream if there are that many rows."""
        wanted = math.ceil(PARTS_PER_STREAM * self.streams / max(len(self.source.units), 1))
        counts, total, skipped = [], 0, Counter[str]()
        for unit in self.source.units:
            rows = None if self.source.by_file else unit.rows
            if rows is None and self.source.size_bytes <= IN_MEMORY_BYTES and not self.source.by_file:
                read = _read(self.source, unit)
                skipped.update(row.reason for row in read if isinstance(row, Unusable))
                rows = len(read)
            counts.append(wanted if rows is None else min(rows, wanted))  # a large source is sure to have enough rows
            total += counts[-1] if rows is None else rows
        if total == skipped.total() and not skipped["in_validation"]:
            raise no_documents(f"dataset={self.source.description}", skipped)
        if sum(counts) < self.streams:
            raise self._too_few(f"there are {sum(counts)}", Counter())
        return np.array([(i, part, count) for i, count in enumerate(counts) for part in range(count)], np.int64)

    def _too_few(self, found: str, skipped: Counter[str]) -> UserError:
        smaller = f"use a smaller tokens_per_step (now {self.sizes.common} blocks) or streaming=false"
        fix = fix_of(skipped) or smaller
        if copies := skipped["in_validation"]:
            fix = f"{copies} are also in the validation text: give another eval_dataset or more text"
        need = f"too few training documents for {self.streams} streams, which need one each"
        return UserError(f"dataset: {need}: {found}; {fix}")

    def locate_rows(self, decode: Decode, batch: StepBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        each = len(batch.blocks) // len(batch.documents)  # a process has only some of the logical streams
        return [
            found
            for number, origins in enumerate(batch.documents)
            for found in self.locate(
                decode,
                batch.blocks[number * each : (number + 1) * each],
                origins,
                {row - number * each for row in rows if row // each == number},
            )
        ]

    def locate(self, decode: Decode, blocks: np.ndarray, origins: list[Origin], rows: set[int]) -> list[dict[str, Any]]:
        """Return where the text in these rows of one logical stream's `blocks` of a step comes from."""
        located, run, length = [], blocks[:, :-1].ravel(), self.sequence_length
        stops = [*(start for *_, start in origins[1:]), len(run)]
        for (epoch, unit, row, start), stop in zip(origins, stops, strict=True):
            if rows.isdisjoint(range(max(start, 0) // length, -(-stop // length))):
                continue
            file, place, *_ = self.source.unit(unit)
            part = {format_of(file).UNIT_START: place, "row": row}
            text = decode(run[max(start, 0) : min(stop, max(start, 0) + SHOWN_TOKENS)])
            located.append({"file": file, **part, "epoch": epoch, "text": text, "goes_on": start < 0})
        return located


@functools.lru_cache(CACHED_FILES)
def _units_of(source: Source, unit: Unit) -> list[Unit]:
    return source.units_of(unit)


@functools.lru_cache(CACHED_UNITS)
def _read(source: Source, unit: Unit) -> list[Row | Unusable]:
    return source.read(unit)
