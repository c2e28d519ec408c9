"""What the processes of a run tell each other apart from gradients: small Python values, exchanged on the host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from hfgpt.errors import RunError

T = TypeVar("T")

# Connections end a moment before the process they belong to.
SECONDS_TO_END = 3.0


class HostGroup:
    """All processes, on the CPU: no exchange waits for a device. Alone, a process keeps its values as they are."""

    def __init__(self, world: int) -> None:
        self.world = world
        if world > 1:
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._members = self.gather((socket.gethostname(), os.getpid()))

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

    @contextmanager
    def contact(self) -> Iterator[None]:
        """Where another process is lost inside, RunError on all that are left, with its rank where that can be told."""
        try:
            yield
        except RuntimeError as error:
            said = str(error).lower()
            if self.world == 1 or not (isinstance(error, dist.DistError) or "gloo" in said or "nccl" in said):
                raise
            raise RunError(f"{self._lost()}; continue with --resume_from_checkpoint latest", everywhere=True) from error

    def _lost(self) -> str:
        here, until = socket.gethostname(), time.monotonic() + SECONDS_TO_END
        others = [rank for rank, (host, _) in enumerate(self._members) if host != here]
        while time.monotonic() < until:
            gone = [r for r, (host, pid) in enumerate(self._members) if host == here and not _runs(pid)]
            if gone:
                return "; ".join(f"process {r} of {self.world} (pid {self._members[r][1]}) has ended" for r in gone)
            time.sleep(0.05)
        where = f", perhaps one of {others}, which run on other machines" if others else ""
        return f"no contact to another process of {self.world}{where}"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
