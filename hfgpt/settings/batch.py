"""`Batch`: how one step is split into micro-batches and processes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """The arithmetic of one step: tokens_per_step = micro_batch x sequence_length x accumulation x processes."""

    micro_batch: int
    sequence_length: int
    accumulation: int
    processes: int

    @property
    def blocks_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.processes

    def splits(self) -> list[Batch]:
        """Return all ways to split this step over the same processes, smallest micro-batch first."""
        blocks = self.micro_batch * self.accumulation
        small = [size for size in range(1, math.isqrt(blocks) + 1) if blocks % size == 0]
        sizes = sorted({*small, *(blocks // size for size in small)})
        return [dataclasses.replace(self, micro_batch=size, accumulation=blocks // size) for size in sizes]

    def halved(self) -> Batch | None:
        """Return the same step with half the micro-batch, or the next smaller divisor; None if it is one block."""
        return max(
            (cut for cut in self.splits() if 2 * cut.micro_batch <= self.micro_batch),
            key=lambda cut: cut.micro_batch,
            default=None,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.blocks_per_step * self.sequence_length

    def describe(self) -> str:
        return (
            f"{self.tokens_per_step:,} tokens = micro-batch {self.micro_batch} x sequence {self.sequence_length} x "
            f"accumulation {self.accumulation} x processes {self.processes}"
        )
