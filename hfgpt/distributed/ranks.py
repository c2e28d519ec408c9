"""The processes of a run: how they share the model, and what they tell each other apart from gradients."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from hfgpt.distributed.launcher import ranks
from hfgpt.distributed.stop_signals import Interrupted
from hfgpt.errors import RunError, UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Connections end a moment before the process they belong to.
SECONDS_TO_END = 3.0


class HostGroup:
    """All processes, on the CPU: no exchange waits for a device. Alone, a process keeps its values as they are.

    Beside the exchange, the store through which the launcher's processes find each other: which are there, why one
    has failed, and which wait in vain.
    """

    def __init__(self, timeout_seconds: float) -> None:
        """Raises UserError where the environment does not tell the processes apart, or how to find the others."""
        self.rank, self.world = ranks()
        self.timeout_seconds = timeout_seconds
        self._members: dict[int, tuple[str, int]] = {}  # host and pid of those that are there
        if self.world == 1:
            return
        try:
            self._store = _open_store(self.rank, timeout_seconds)
        except dist.DistError as error:
            raise RunError(f"{self._me()}: no contact to the main process: {_line(error)}", everywhere=True) from error

    def meet(self) -> None:
        """Wait until all processes are there. Raises RunError that names those that are not within the timeout."""
        if self.world == 1:
            return
        self._store.set(f"process {self.rank}", f"{socket.gethostname()} {os.getpid()}")
        until = time.monotonic() + self.timeout_seconds
        while missing := self._missing():
            if self._store.check(["fault"]):
                raise RunError(self._store.get("fault").decode())
            if time.monotonic() > until:
                raise RunError(f"{missing} within ddp_timeout={self.timeout_seconds:g} s", everywhere=True)
            time.sleep(0.05)

    def join(self) -> None:
        """Open the exchange, once torch's process group exists."""
        if self.world > 1:
            gloo = dist.get_backend() == "gloo"
            timeout = timedelta(seconds=self.timeout_seconds)
            self._group = dist.group.WORLD if gloo else dist.new_group(backend="gloo", timeout=timeout)

    def leave(self) -> None:
        """To be called before the group is freed: gloo's thread needs the interpreter once more for its last work.

        A group that is freed in that moment waits for the thread with the interpreter in hand, forever.
        """
        if self.world > 1:
            time.sleep(0.2)

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
        fault: BaseException | None = None
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except (Exception, Interrupted) as error:
                fault = outcome[1] = error
                if not isinstance(error, UserError | RunError | Interrupted):  # others may not survive the way
                    outcome[1] = RunError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if fault := fault or outcome[1]:
            raise fault
        return outcome[0]

    @contextmanager
    def contact(self) -> Iterator[None]:
        """An exception of one process inside ends all: RunError on the others, with its rank and cause.

        So does a process that dies, or does not answer for `timeout_seconds`. Where a signal breaks it off,
        Interrupted tells what is known of the others: a launcher ends all after one has failed.
        """
        try:
            yield
        except BaseException as error:
            if self.world == 1:
                raise
            if isinstance(error, Interrupted):
                _within(SECONDS_TO_END, lambda: self._store.set(f"signal {self.rank}", ""))
                raise Interrupted(_within(SECONDS_TO_END, self._known) or "") from error
            # gloo's own errors have no type of their own.
            lost = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error))
            if not lost:
                told = _told(self._me(), error)
                _within(SECONDS_TO_END, lambda: self._store.set("fault", told))
                raise
            loss = _within(2 * SECONDS_TO_END, self._loss) or f"{self._me()}: no contact to the main process"
            if isinstance(error, dist.DistBackendError):  # it may be this device's own
                loss += f" ({_line(error)})"
            _within(SECONDS_TO_END, lambda: self._store.set(f"left {self.rank}", loss))
            raise RunError(loss, everywhere=True) from error

    def _me(self) -> str:
        return f"process {self.rank} of {self.world}"

    def _missing(self) -> str:
        """Those that are not there yet, in words; empty if all are."""
        for rank in range(self.world):
            if rank not in self._members and self._store.check([f"process {rank}"]):
                host, pid = self._store.get(f"process {rank}").decode().rsplit(" ", 1)
                self._members[rank] = host, int(pid)
        missing = [str(rank) for rank in range(self.world) if rank not in self._members]
        return f"process {', '.join(missing)} of {self.world} has not started" if missing else ""

    def _known(self) -> str:
        """Why a process has failed, or that one has ended without a word; empty if nothing is known."""
        if self._store.check(["fault"]):
            return self._store.get("fault").decode()
        if missing := self._missing():
            return missing
        here = socket.gethostname()
        gone = [rank for rank, (host, pid) in self._members.items() if host == here and not _runs(pid)]
        gone = [rank for rank in gone if not self._store.check([f"signal {rank}"])]
        for rank in gone:
            if self._store.check([f"left {rank}"]):  # it has waited in vain, and said for what
                return f"process {rank} of {self.world} has left: {self._store.get(f'left {rank}').decode()}"
        return "; ".join(f"process {r} of {self.world} (pid {self._members[r][1]}) has ended" for r in gone)

    def _loss(self) -> str:
        """What has become of the process that was lost, as far as can be told from here."""
        with suppress(RuntimeError):  # where the launcher of the main process has ended, so has the store
            self._store.set(f"waits {self.rank}", "")
        until = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until:
            with suppress(RuntimeError):
                if known := self._known():
                    return known
            time.sleep(0.05)
        silent = [rank for rank in range(self.world) if not self._store.check([f"waits {rank}"])]
        if not silent:
            return "the processes wait for different things; a callback must do the same on all of them"
        hosts = ", ".join(f"{rank} (on {self._members[rank][0]})" for rank in silent)  # the others are here by now
        return f"no answer from process {hosts} of {self.world} within ddp_timeout={self.timeout_seconds:g} s"


def tell(error: BaseException) -> None:
    """Let the others know why this process ends before it has met them, as far as that can be done."""
    with suppress(Exception):
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        store = _open_store(int(rank), SECONDS_TO_END)
        store.set("fault", _told(f"process {rank} of {world}", error))


def _open_store(rank: int, timeout_seconds: float) -> dist.Store:
    """The launcher's store, or one of the main process where the launcher keeps none."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UserError(
            "WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not; start with accelerate launch or torchrun"
        ) from None
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout_seconds)
    server = dist.TCPStore(host, port, None, keeps, limit, wait_for_workers=False, multi_tenant=True)
    store = dist.PrefixStore(f"hfgpt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    store.set_timeout(timedelta(seconds=SECONDS_TO_END))
    return store


def _told(who: str, error: BaseException) -> str:
    return f"{who}: {type(error).__name__}: {_line(error)}"


def _line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns; None where it fails, or takes longer, as the store does when the network is gone."""
    returned: list[T] = []

    def work() -> None:
        with suppress(RuntimeError):
            returned.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return returned[0] if returned else None


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
