"""Iterate over a stream: each process gets its share of every step, prepared ahead of time by worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.utils.data

from hfgpt.data.remote import take_retries
from hfgpt.data.stream import StepBatch, Stream, divisors, join_batches
from hfgpt.distributed.launcher import end_with_parent
from hfgpt.distributed.stop_signals import stop_signals
from hfgpt.errors import RunError, UserError


def iterate(
    stream: Stream, position: dict[str, Any] | None, rank: int = 0, world: int = 1, num_workers: int = 0, step: int = 0
) -> Generator[StepBatch, None, None]:
    """Yield this process's share of each step, endlessly, from `position` (of all processes; None: the start) on.

    step: the first of these steps, from 0, because steps may grow.
    Workers read and encode ahead of time; text in memory needs none. Raises UserError if the step cannot be split over
    `world` processes, and for problems in the text, including those found by workers.
    """
    if stream.divisible % world:
        fitting = ", ".join(map(str, divisors(stream.divisible)))
        sizes = " and ".join(str(blocks) for _, blocks in stream.sizes.stages)
        raise UserError(
            f"tokens_per_step: {sizes} blocks of sequence_length={stream.sequence_length} "
            f"cannot be split over {world} processes; numbers that fit: {fitting}"
        )
    share = stream.divisible // world
    workers = min(num_workers, share) if stream.streams else 0
    return _load(_Share(stream, position or stream.start, rank * share, share, step), workers)


@dataclass(eq=False)
class _Share(torch.utils.data.IterableDataset[Any]):
    """The parts `first` to `first + count` of each step; worker w of W prepares the w-th share of them.

    An error is passed on as the last item, because exceptions raised in a worker lose their type.
    """

    stream: Stream
    position: dict[str, Any]
    first: int
    count: int
    step: int

    def __iter__(self) -> Iterator[StepBatch | UserError | RunError]:
        worker = torch.utils.data.get_worker_info()
        w, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            # Signals often reach the whole process group; only the main process decides what they mean.
            for number in stop_signals():
                signal.signal(number, signal.SIG_IGN)
            _end_with_parent()
        first, last = (self.first + self.count * i // workers for i in (w, w + 1))
        try:
            for batch in self.stream.steps(self.position, first, last, self.step):
                batch.retries += take_retries()
                yield batch
        except (UserError, RunError) as error:
            error.retries = take_retries()
            yield error


def _end_with_parent() -> None:
    """Have this worker end with its parent, however that ends and however long a step takes."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    is_served = multiprocessing.get_start_method() == "forkserver"  # then the server, which ends with the parent, forks
    end_with_parent(os.getppid() if is_served else parent.pid, at_once=True)
    if is_served and not parent.is_alive():
        os._exit(1)  # it ended before


def _load(share: _Share, workers: int) -> Generator[StepBatch, None, None]:
    others = multiprocessing.active_children()
    if not workers:
        items: Iterator[Any] = iter(share)  # the loader would need 0.2 ms for each
    else:
        generator = torch.Generator()  # otherwise the loader would draw from the global generator, which training uses
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
                raise RunError("a process that reads the text was killed, perhaps for lack of memory") from error
            for part in parts:
                if isinstance(part, Exception):
                    raise part
            yield join_batches(parts)
    finally:
        for worker in own:  # they ignore other signals, and may be blocked by the network
            worker.kill()
        del items  # now: the garbage collector would wait 5 s for each worker


@contextlib.contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Undo the loader's SIGCHLD handler, which would raise an exception in the middle of a step if a worker ended."""
    number = getattr(signal, "SIGCHLD", None)
    before = number and signal.getsignal(number)
    yield
    if number and threading.current_thread() is threading.main_thread():
        signal.signal(number, before)
