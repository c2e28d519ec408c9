"""Detect running out of memory on all processes before they exchange gradients, and report it with a fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import RunError, message


class MemoryRanOut(Exception):
    """A micro-batch did not fit on the device of at least one process. Nothing was updated."""


class MemoryWatch:
    """Notifies all processes that a micro-batch did not fit, before any of them exchanges gradients."""

    def __init__(self, ranks: Ranks, sharded: bool) -> None:
        self.ranks, self.sharded, self.failed = ranks, sharded, False

    @contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        """Raise MemoryRanOut on all processes if micro-batch `index` of `count`, run inside, does not fit on one.

        If the model is sharded, or in the last micro-batch, when gradients are exchanged, the processes would already
        be out of sync: the device's own error ends the run.
        """
        alone, last = self.ranks.world_size == 1, index == count
        if not alone and not self.sharded and last and index > 1 and any(self.ranks.gather(self.failed)):
            self.failed = False
            raise MemoryRanOut
        try:
            yield
        except RuntimeError as error:
            if not is_device_out_of_memory(error):
                raise
            if alone:
                raise MemoryRanOut from error
            if self.sharded or last:
                raise
            self.failed = True  # all processes learn about it before the last micro-batch


def is_device_out_of_memory(error: BaseException) -> bool:
    """Return whether an accelerator ran out of memory; mps has no error of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error)


@contextmanager
def out_of_memory_named(where: str, fix: str) -> Iterator[None]:
    """Raise RunError with `where` and the `fix` if memory runs out inside."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, MemoryError) or is_device_out_of_memory(error)
        if not known and not should_reduce_batch_size(error):
            raise
        raise RunError(f"out of memory {where} ({message(error)}); {fix}") from error
