"""What the processes of a run tell each other apart from gradients: small Python values, exchanged on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class HostGroup:
    """All processes, on the CPU: no exchange waits for a device. Alone, a process keeps its values as they are."""

    def __init__(self, world: int) -> None:
        self.world = world
        if world > 1:
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def gather(self, value: T) -> list[T]:
        """Each process's value, in rank order, on every process."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns, or raises, on the main process; the others do not call it."""
        if self.world == 1:
            return make()
        outcome: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                outcome[0] = make()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
