"""The endless streams of token blocks: pure functions of (seed, position).

A block is `sequence_length` + 1 consecutive tokens at stride `sequence_length`; a step takes
`blocks_per_step` blocks over all processes. Neither depends on how a step is cut over processes and
workers: each owns a contiguous range of the step's blocks, so putting the parts side by side restores it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from hfgpt.data.encoding import Encoder
from hfgpt.data.permutation import hash_of, hashes, permutation
from hfgpt.data.remote import take_events
from hfgpt.data.sources import IN_MEMORY_BYTES, Source, Unit, Unusable
from hfgpt.distributed.launcher import signal_at_parent_exit
from hfgpt.distributed.stop_signals import stop_signals
from hfgpt.errors import RunError, UserError

MAX_STREAMS = 96
PARTS_PER_STREAM = 8
CACHED_UNITS = 4
ENCODED_TOGETHER = 8
TOLD_TOKENS = 24
# A stream whose parts have no document, by chance, in one epoch has other parts in the next.
MAX_EMPTY_EPOCHS = 8

Origin = tuple[int, int, int, int]


@dataclass
class StepBatch:
    """One step's blocks for one process, int32 [blocks_per_step / world, sequence_length + 1].

    `position`: its share of the position after the step, see `merge_positions`. `skipped`: rows passed over, by reason.
    `documents`: (epoch, unit, row, start) of those in the step, for each logical stream; `start` counts its tokens in
    the step from 0. The first document is the last of the stream's step before, whose end the step may take up; it
    starts at 0 or below. `retries`: records of reads that were tried again.
    """

    blocks: np.ndarray
    position: dict[str, Any]
    skipped: Counter[str] = field(default_factory=Counter)
    documents: list[list[Origin]] = field(default_factory=list)
    retries: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class MemoryBlocks:
    """Blocks of one run of `tokens` in memory.

    Each epoch shifts the block borders by a phase and permutes the blocks, both keyed by seed and epoch. Position:
    `{"epoch": int, "block": int}`, the next block within the epoch's order. Raises `UserError` for less than a block.
    """

    tokens: np.ndarray
    seed: int
    sequence_length: int
    blocks_per_step: int
    fingerprint: dict[str, Any]

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.sequence_length:
            raise UserError(
                f"dataset: {len(self.tokens):,} training tokens are fewer than one block, which takes "
                f"sequence_length={self.sequence_length} plus one; use a shorter sequence_length or more text"
            )
        self.divisible, self.start = self.blocks_per_step, {"epoch": 0, "block": 0}
        self._phases = min(self.sequence_length, len(self.tokens) - self.sequence_length)
        self.blocks_per_epoch = (len(self.tokens) - self._phases) // self.sequence_length

    def steps(self, position: dict[str, Any], first: int, last: int) -> Iterator[StepBatch]:
        """Blocks `first` to `last` of each step from `position` on."""
        epoch = int(position["epoch"])
        order = self._epoch_starts(epoch)
        left = order[int(position["block"]) :]
        while True:
            orders, count = [left], len(left)
            while count < self.blocks_per_step:
                epoch += 1
                order = self._epoch_starts(epoch)
                orders.append(order)
                count += len(order)
            left = np.concatenate(orders)
            blocks = sliding_window_view(self.tokens, self.sequence_length + 1)[left[first:last]]
            left = left[self.blocks_per_step :]
            yield StepBatch(blocks, {"epoch": epoch, "block": len(order) - len(left)})

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        phase = hash_of(self.seed, epoch, 0) % self._phases
        count = (len(self.tokens) - phase - 1) // self.sequence_length
        return phase + self.sequence_length * permutation(count, self.seed, epoch, 1)


class _Document(NamedTuple):
    """Tokens of one document, its [epoch, part, row], its (epoch, unit, row), and the rows passed over before it, with
    what the tokenizer does not represent of it.
    """

    place: list[int]
    origin: tuple[int, int, int]
    ids: np.ndarray
    skipped: Counter[str] | None


@dataclass(eq=False)
class DocumentStream:
    """Blocks of shuffled documents, packed end to end, from a source of any size.

    The step is cut into V logical streams, V being the divisor of `blocks_per_step` up to 96 that has the most
    divisors itself, so that many world sizes fit it. Each epoch permutes the units (cut into parts where they are
    few); stream i reads every V-th from the i-th on, shuffles the rows of each, and moves to its next epoch on its
    own. All of it is keyed by seed, epoch and place, so nothing random is stored. Position: `{"streams": [[epoch,
    part, row, token], ...]}`, for each stream the first token of its next block. Raises `UserError` for fewer rows
    than streams.
    """

    source: Source
    encoder: Encoder
    seed: int
    sequence_length: int
    blocks_per_step: int
    fingerprint: dict[str, Any]

    def __post_init__(self) -> None:
        candidates = [n for n in _divisors(self.blocks_per_step) if n <= MAX_STREAMS]
        self.streams = self.divisible = max(candidates, key=lambda n: (len(_divisors(n)), n))
        self.start = {"streams": [[0, 0, 0, 0]] * self.streams}
        self._parts = self._cut_units()

    def steps(self, position: dict[str, Any], first: int, last: int) -> Iterator[StepBatch]:
        """Blocks of the streams `first` to `last` of each step from `position` on, stream after stream."""
        if (streams_then := len(position["streams"])) != self.streams:
            raise UserError(f"resume_from_checkpoint: position of {streams_then} streams, and there are {self.streams}")
        streams = [self._packed(i, position["streams"][i]) for i in range(first, last)]
        return map(side_by_side, zip(*streams))  # noqa: B905 all are endless

    def _packed(self, stream: int, cursor: list[int]) -> Iterator[StepBatch]:
        """One logical stream's documents end to end, as its blocks of each step."""
        documents, token = self.documents(stream, cursor), cursor[-1]
        advance = self.blocks_per_step // self.streams * self.sequence_length
        pending = deque([next(documents)])
        held, skipped = len(pending[0].ids), Counter(pending[0].skipped)
        while True:
            origins = [(*pending[0].origin, -token)]
            while held <= token + advance:
                pending.append(next(documents))
                held += len(pending[-1].ids)
            rest = (document.ids[: advance + 1] for document in islice(pending, 1, None))
            run = np.concatenate([pending[0].ids[token : token + advance + 1], *rest])
            blocks = sliding_window_view(run, self.sequence_length + 1)[: advance : self.sequence_length]
            token += advance
            while token >= len(pending[0].ids):
                length = len(pending.popleft().ids)
                token, held = token - length, held - length
                origins.append((*pending[0].origin, advance - token))
                if pending[0].skipped:  # counted when the cursor passes them, so that a resume counts none twice
                    skipped.update(pending[0].skipped)
            yield StepBatch(blocks, {"streams": [[*pending[0].place, token]]}, skipped, [origins])
            skipped = Counter()

    def documents(self, stream: int, cursor: list[int]) -> Iterator[_Document]:
        """The documents of one logical stream, endless, from the one at `cursor` on."""
        epoch, first_part, first_row, token = cursor
        resumed = first_part + first_row + token > 0  # within an epoch
        found, skipped, empty_epochs = first_part + first_row > 0, Counter[str](), 0
        chunk: list[tuple[int, int, str, Counter[str] | None]] = []  # encoded together, which is faster
        while True:
            parts = self._epoch_parts(epoch)[stream :: self.streams].copy()
            for part in range(first_part, len(parts)):
                unit, k, n = parts[part]
                rows = _read(self.source, self.source.units[unit])
                start, stop = len(rows) * k // n, len(rows) * (k + 1) // n
                order = start + permutation(stop - start, self.seed, epoch, 2, stream, part)
                for row in range(first_row, len(order)):
                    text = rows[order[row]]
                    if isinstance(text, Unusable):
                        skipped[text.reason] += 1
                    else:
                        chunk.append((row, int(order[row]), text, skipped if skipped else None))
                        skipped = Counter() if skipped else skipped
                    if len(chunk) == ENCODED_TOGETHER or (chunk and row == len(order) - 1):
                        encoded = self.encoder.documents([text for _, _, text, _ in chunk])
                        for (at, origin, _, before), (ids, lost, *_) in zip(chunk, encoded, strict=True):
                            found |= len(ids) > 0
                            if lost and not (resumed and [epoch, part, at] == cursor[:3]):  # was counted then
                                before = lost + (before or Counter())
                            yield _Document([epoch, part, at], (epoch, int(unit), origin), ids, before)
                        chunk = []
                first_row = 0
            empty_epochs = 0 if found else empty_epochs + 1
            if empty_epochs == MAX_EMPTY_EPOCHS:
                raise self._too_few(f"stream {stream} found none ({dict(skipped)} passed over)", skipped)
            epoch, first_part, found = epoch + 1, 0, False

    def _epoch_parts(self, epoch: int) -> np.ndarray:
        """All rows (unit, part, parts) in the epoch's order: units shuffled, the parts of one side by side, so that
        neighbouring streams, which share a process, read the same unit at about the same time.
        """
        by_unit = hashes(self._parts[:, 0], self.seed, epoch, 3)
        by_part = hashes(np.arange(len(self._parts)), self.seed, epoch, 4)
        return self._parts[np.lexsort((by_part, by_unit))]

    def _cut_units(self) -> np.ndarray:
        """All rows (unit, part, parts), int64: at least 8 for each stream if there are that many rows."""
        wanted = math.ceil(PARTS_PER_STREAM * self.streams / max(len(self.source.units), 1))
        counts = []
        for unit in self.source.units:
            rows = unit.rows
            if rows is None:  # a large source surely has enough of them
                rows = len(_read(self.source, unit)) if self.source.size_bytes <= IN_MEMORY_BYTES else wanted
            counts.append(min(rows, wanted))
        if sum(counts) < self.streams:
            raise self._too_few(f"there are {sum(counts)}", Counter())
        return np.array([(i, part, count) for i, count in enumerate(counts) for part in range(count)], np.int64)

    def _too_few(self, found: str, skipped: Counter[str]) -> UserError:
        way_out = f"use a smaller tokens_per_step (now {self.blocks_per_step} blocks) or streaming=false"
        if copies := skipped["in_validation"]:
            way_out = f"{copies} also stand in the validation text: give another eval_dataset or more text"
        need = f"too few training documents for {self.streams} streams, each of which needs one"
        return UserError(f"dataset: {need}: {found}; {way_out}")


Stream = MemoryBlocks | DocumentStream


@functools.lru_cache(CACHED_UNITS)
def _read(source: Source, unit: Unit) -> list[str | Unusable]:
    return source.read(unit)


def iterate(
    stream: Stream, position: dict[str, Any] | None, *, rank: int = 0, world: int = 1, num_workers: int = 0
) -> Generator[StepBatch, None, None]:
    """This process's share of each step, endless, from `position` (of all processes; None: the start) on.

    With workers the steps are made ahead of time in background processes. Raises `UserError` if the step cannot be
    cut over `world` processes, and for faults of the text that workers meet.
    """
    if stream.divisible % world:
        fitting = ", ".join(map(str, _divisors(stream.divisible)))
        raise UserError(
            f"tokens_per_step: {stream.blocks_per_step} blocks of sequence_length={stream.sequence_length} "
            f"cannot be cut over {world} processes; numbers of processes that fit: {fitting}"
        )
    share = stream.divisible // world
    workers = 0 if isinstance(stream, MemoryBlocks) else min(num_workers, share)
    return _from_workers(_Share(stream, position or stream.start, rank * share, share), workers)


@dataclass(eq=False)
class _Share(torch.utils.data.IterableDataset[Any]):
    """Blocks or streams `first` to `first + count` of each step; worker w of W makes the w-th part of them.

    An error is handed over as the last item, because a worker's exceptions lose their type.
    """

    stream: Stream
    position: dict[str, Any]
    first: int
    count: int

    def __iter__(self) -> Iterator[StepBatch | UserError | RunError]:
        worker = torch.utils.data.get_worker_info()
        w, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            # Signals often reach the whole process group, and the main process alone decides what they mean.
            for number in stop_signals():
                signal.signal(number, signal.SIG_IGN)
            _end_with_parent()
        borders = (self.first + self.count * i // workers for i in (w, w + 1))
        try:
            for batch in self.stream.steps(self.position, *borders):
                batch.retries += take_events()
                yield batch
        except (UserError, RunError) as error:
            error.retries = take_events()
            yield error


def _end_with_parent() -> None:
    """Have this worker killed when its parent ends, however that ends and however long a step takes (on Linux)."""
    signal_at_parent_exit(signal.SIGKILL)
    parent, forkserver = multiprocessing.parent_process(), multiprocessing.get_start_method() == "forkserver"
    if parent and (not parent.is_alive() if forkserver else os.getppid() != parent.pid):
        os._exit(1)  # it ended before


def _from_workers(share: _Share, workers: int) -> Generator[StepBatch, None, None]:
    others = multiprocessing.active_children()
    if not workers:
        items: Iterator[Any] = iter(share)  # the loader would take 0.2 ms for each
    else:
        generator = torch.Generator()  # or the loader would draw from the global one, which training uses
        with _child_signal_kept():
            items = iter(torch.utils.data.DataLoader(share, None, num_workers=workers, generator=generator))
    own = [child for child in multiprocessing.active_children() if child not in others]
    try:
        while True:
            try:
                parts = tuple(islice(items, max(workers, 1)))  # the loader takes one item of each worker in turn
            except RuntimeError as error:
                if all(worker.is_alive() for worker in own):
                    raise
                raise RunError("a process that reads the text has been killed, perhaps for want of memory") from error
            for part in parts:
                if isinstance(part, Exception):
                    raise part
            yield side_by_side(parts)
    finally:
        for worker in own:  # they ignore other signals, and may be waiting for the network
            worker.kill()
        del items  # now: left to the garbage collector, each would be waited for 5 s


@contextlib.contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Undo the loader's handler of SIGCHLD, which would raise the end of a worker in the middle of a training step."""
    number = getattr(signal, "SIGCHLD", None)
    before = number and signal.getsignal(number)
    yield
    if number and threading.current_thread() is threading.main_thread():
        signal.signal(number, before)


def side_by_side(parts: Sequence[StepBatch]) -> StepBatch:
    """The parts of one step, in rank or worker order, as one; its position loads on any world size."""
    if len(parts) == 1:
        return parts[0]
    position = merge_positions([part.position for part in parts])
    skipped = sum((part.skipped for part in parts), Counter[str]())
    return StepBatch(
        np.concatenate([part.blocks for part in parts]),
        position,
        skipped,
        [origins for part in parts for origins in part.documents],
        [event for part in parts for event in part.retries],
    )


def named_documents(
    stream: Stream, decode: Callable[[np.ndarray], str], batch: StepBatch, rows: Sequence[int]
) -> list[dict[str, Any]]:
    """Where the text in the given rows of a whole step's blocks stands in the data set, and how it begins in them.

    Text in memory is one run of tokens, of which only the beginning of each row is told.
    """
    if isinstance(stream, MemoryBlocks):
        return [{"row_of_step": row, "text": decode(batch.blocks[row, :TOLD_TOKENS])} for row in rows]
    named, each, length = [], len(batch.blocks) // stream.streams, stream.sequence_length
    for number, origins in enumerate(batch.documents):
        run = batch.blocks[number * each : (number + 1) * each, :-1].ravel()
        starts = [start for *_, start in origins]
        wanted = {row - number * each for row in rows if row // each == number}
        for (epoch, unit, row, start), stop in zip(origins, [*starts[1:], len(run)], strict=True):
            if not wanted.isdisjoint(range(max(start, 0) // length, -(-stop // length))):
                file, place, *_ = stream.source.units[unit]
                part = {"row_group" if file.endswith(".parquet") else "from_byte": place, "row": row}
                text = decode(run[max(start, 0) : min(stop, max(start, 0) + TOLD_TOKENS)])
                named.append({"file": file, **part, "epoch": epoch, "text": text, "goes_on": start < 0})
    return named


def batch_hash(blocks: np.ndarray) -> str:
    """xxh3_64 (hex) of a step's blocks as little-endian int32, in the stream's own order."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(blocks, dtype="<i4").data)


def merge_positions(positions: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole position from those of all processes in rank order; loads on any world size."""
    if "streams" not in positions[0]:
        assert all(position == positions[0] for position in positions), positions
        return positions[0]
    return {"streams": [cursor for position in positions for cursor in position["streams"]]}


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
