"""The interface of a stream of token blocks: an endless sequence of steps, a pure function of seed and position.

A block is `sequence_length` + 1 consecutive tokens at stride `sequence_length`; `StepSizes` has the blocks of each
step over all processes. It does not matter how a step is split over processes and workers: each gets a contiguous
range of the step's blocks, so joining the parts in order restores it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from hfgpt.settings.step_sizes import StepSizes

SHOWN_TOKENS = 24
# Begins a step's hash that is made from those of its blocks. Earlier versions hashed all tokens of a step at once.
OF_BLOCKS = "blocks-"

# Of a source with `by_file`, the numbers of the file and of the unit in it.
UnitNumber = int | tuple[int, int]
# Epoch, unit and row of a document, and the token of the step at which it starts.
Origin = tuple[int, UnitNumber, int, int]
Decode = Callable[[np.ndarray], str]


@dataclass
class StepBatch:
    """One step's blocks for one process, int32 [blocks of the step / world_size, sequence_length + 1].

    `position`: this process's share of the position after the step, see `merge_positions`. `skipped`: rows skipped,
    by reason. `documents`: those in the step, for each logical stream. The first is the last one of the previous step,
    whose end this step may contain; it starts at 0 or below. `retries`: records of retried reads. `sources`: in a
    mixture, the number of the source of each block, and `documents` has a list for each source of each logical stream.
    """

    blocks: np.ndarray
    position: dict[str, Any]
    skipped: Counter[str] = field(default_factory=Counter)
    documents: list[list[Any]] = field(default_factory=list)
    retries: list[dict[str, Any]] = field(default_factory=list)
    sources: np.ndarray | None = None


class StepText(NamedTuple):
    """What every process keeps of a step's text: eight bytes a block, so that no process receives another's tokens.

    `hashes`: those of the blocks, see `hash_blocks`.
    """

    hashes: bytes
    position: dict[str, Any]
    skipped: Counter[str]
    retries: list[dict[str, Any]]


class Stream(Protocol):
    """What training needs from a stream.

    `divisible`: a step can be split over any divisor of this number. `start`: the first position. `fingerprint`:
    everything that determines the order of the text. `streams`: number of logical streams, 0 for text in memory, which
    is one run of tokens and needs no workers. `sizes`: the blocks of each step.
    """

    sequence_length: int
    sizes: StepSizes
    fingerprint: dict[str, Any]
    divisible: int
    streams: int
    start: dict[str, Any]

    def steps(self, position: dict[str, Any], first: int, last: int, step: int = 0) -> Iterator[StepBatch]:
        """Return the parts `first` to `last` (of `divisible`) of each step from `step` on (from 0), at `position`."""

    def start_of_epoch(self, epoch: int) -> dict[str, Any]:
        """Return the position at which an epoch begins."""

    def locate_rows(self, decode: Decode, batch: StepBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return where the text in these rows of one process's share of a step comes from, and how it begins.

        A place may be `row_of_step`, which counts from the first row of the share.
        """


def join_batches(parts: Sequence[StepBatch]) -> StepBatch:
    """Join the parts of one step, in the order of ranks or workers."""
    if len(parts) == 1:
        return parts[0]
    return StepBatch(
        np.concatenate([part.blocks for part in parts]),
        merge_positions([part.position for part in parts]),
        sum((part.skipped for part in parts), Counter[str]()),
        [origins for part in parts for origins in part.documents],
        [record for part in parts for record in part.retries],
        None if parts[0].sources is None else np.concatenate([part.sources for part in parts]),
    )


def merge_positions(positions: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the positions of all processes, in rank order, into one that loads with any world size."""
    if names := positions[0].get("sources"):  # a mixture
        sources = {name: merge_positions([position["sources"][name] for position in positions]) for name in names}
        return {**positions[0], "sources": sources}
    if "streams" not in positions[0]:
        assert all(position == positions[0] for position in positions), positions  # noqa: S101
        return positions[0]
    return {"streams": [cursor for position in positions for cursor in position["streams"]]}


def summarize(batch: StepBatch) -> StepText:
    return StepText(hash_blocks(batch.blocks), batch.position, batch.skipped, batch.retries)


def join_texts(parts: Sequence[StepText]) -> StepText:
    """Join what the processes know of one step, in the order of ranks."""
    return StepText(
        b"".join(part.hashes for part in parts),
        merge_positions([part.position for part in parts]),
        sum((part.skipped for part in parts), Counter[str]()),
        [record for part in parts for record in part.retries],
    )


def hash_blocks(blocks: np.ndarray) -> bytes:
    """Return the xxh3_64 hash of each block, as little-endian int32: eight bytes a block."""
    return b"".join(map(xxhash.xxh3_64_digest, np.ascontiguousarray(blocks, dtype="<i4")))


def batch_hash(hashes: bytes) -> str:
    """Return the hash of a whole step from those of its blocks, in stream order: xxh3_64 (hex), after `OF_BLOCKS`."""
    return OF_BLOCKS + xxhash.xxh3_64_hexdigest(hashes)


def is_of_blocks(batch_hash: str) -> bool:
    """Return whether a step's hash is made from those of its blocks. Hashes of different kinds cannot be compared."""
    return batch_hash.startswith(OF_BLOCKS)


def is_hash_of(recorded: str, blocks: np.ndarray) -> bool:
    """Return whether a recorded hash, of either kind, is that of a whole step's blocks."""
    if is_of_blocks(recorded):
        return recorded == batch_hash(hash_blocks(blocks))
    return recorded == xxhash.xxh3_64_hexdigest(np.ascontiguousarray(blocks, dtype="<i4").data)


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
