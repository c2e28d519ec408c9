"""The block stream of a text that is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hfgpt.data.permutation import hash_of, permutation
from hfgpt.data.stream import SHOWN_TOKENS, Decode, StepBatch
from hfgpt.errors import UserError
from hfgpt.settings.step_sizes import StepSizes


@dataclass(eq=False)
class MemoryBlocks:
    """Blocks of one contiguous run of `tokens`.

    Each epoch shifts the block borders by a phase and permutes the blocks; both depend on seed and epoch. Position:
    `{"epoch": int, "block": int}`, the next block in the epoch's order. `blocks_per_step`: a number, or sizes that
    change. Raises UserError if there is less than one block.
    """

    tokens: np.ndarray
    seed: int
    sequence_length: int
    blocks_per_step: int | StepSizes
    fingerprint: dict[str, Any]
    streams = 0

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.sequence_length:
            raise UserError(
                f"dataset: {len(self.tokens):,} training tokens are fewer than one block, which needs "
                f"sequence_length={self.sequence_length} plus one; use a shorter sequence_length or more text"
            )
        self.sizes = StepSizes.of(self.blocks_per_step, self.sequence_length)
        self.divisible, self.start = self.sizes.common, self.start_of_epoch(0)
        self._phases = min(self.sequence_length, len(self.tokens) - self.sequence_length)
        self.blocks_per_epoch = (len(self.tokens) - self._phases) // self.sequence_length

    def start_of_epoch(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "block": 0}

    def steps(self, position: dict[str, Any], first: int, last: int, step: int = 0) -> Iterator[StepBatch]:
        for starts, after in self.advance(position, self.sizes.counts(step)):
            each = len(starts) // self.divisible
            yield StepBatch(self.read(starts[first * each : last * each]), after)

    def advance(self, position: dict[str, Any], counts: Iterable[int]) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield where the next blocks start in `tokens`, for each of `counts`, and the position after them."""
        epoch = int(position["epoch"])
        order = self._shuffle_blocks(epoch)
        left = order[int(position["block"]) :]
        for wanted in counts:
            orders, count = [left], len(left)
            while count < wanted:
                epoch += 1
                order = self._shuffle_blocks(epoch)
                orders.append(order)
                count += len(order)
            left = np.concatenate(orders)
            starts, left = left[:wanted], left[wanted:]
            yield starts, {"epoch": epoch, "block": len(order) - len(left)}

    def read(self, starts: np.ndarray) -> np.ndarray:
        """Return the blocks that start there."""
        return sliding_window_view(self.tokens, self.sequence_length + 1)[starts]

    def blocks_left(self, position: dict[str, Any], epochs: int) -> int:
        """Return the number of blocks from `position` to the end of this many epochs."""
        return sum(map(self._block_count, range(position["epoch"], epochs))) - position["block"]

    def has_blocks(self, count: int, position: dict[str, Any], epochs: int) -> bool:
        """Return whether `count` blocks are left from `position` to the end of this many epochs.

        Counts no more epochs than needed, because a mixture asks in every step, and `max_epochs` may be a million.
        """
        left, epoch = -position["block"], position["epoch"]
        while left < count and epoch < epochs:
            left, epoch = left + self._block_count(epoch), epoch + 1
        return left >= count

    def _block_count(self, epoch: int) -> int:
        return (len(self.tokens) - self._phase(epoch) - 1) // self.sequence_length

    def _phase(self, epoch: int) -> int:
        return hash_of(self.seed, epoch, 0) % self._phases

    def _shuffle_blocks(self, epoch: int) -> np.ndarray:
        """Return where the epoch's blocks start in `tokens`, in the epoch's order."""
        order = permutation(self._block_count(epoch), self.seed, epoch, 1)
        return self._phase(epoch) + self.sequence_length * order

    def locate_rows(self, decode: Decode, batch: StepBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{"row_of_step": row, "text": decode(batch.blocks[row, :SHOWN_TOKENS])} for row in rows]
