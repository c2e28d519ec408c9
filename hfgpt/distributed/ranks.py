"""The processes of a run: exchange values between them, and report which process failed."""

from __future__ import annotations

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

from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.distributed.stop_signals import Interrupted
from hfgpt.errors import RunError, UserError, first_line, message
from hfgpt.files import WINDOWS

T = TypeVar("T")

STORE_SECONDS = (
    3.0  # for writing to the store, and for a lost process to appear in it: connections end before processes do
)


class Ranks:
    """All processes of the run. They exchange values on the CPU, so that no exchange waits for a device.

    Besides torch's process group, they share the launcher's key-value store, which works before the group exists and
    after a process has failed. Its keys: `process R` (host and pid of a process that has started), `failure` (which
    process failed first, and why), `interrupted R` (a signal stopped it), `waiting R` (it lost a connection).
    """

    def __init__(self, timeout_seconds: float) -> None:
        """Raises UserError if rank, world size or the main process's address is missing from the environment."""
        self.rank, self.world_size = rank_and_world_size()
        self.timeout_seconds = timeout_seconds
        self._started: dict[int, tuple[str, int]] = {}  # host and pid
        if self.world_size == 1:
            return
        try:
            self._store = _open_store(self.rank, timeout_seconds)
        except dist.DistError as error:
            lost = f"{self._name(self.rank)}: no connection to the main process: {message(error)}"
            raise RunError(lost, everywhere=True) from error

    def rendezvous(self) -> None:
        """Wait until all processes have started. Raises RunError with the missing ones after the timeout."""
        if self.world_size == 1:
            return
        self._store.set(f"process {self.rank}", f"{socket.gethostname()} {os.getpid()}")
        until = time.monotonic() + self.timeout_seconds
        while missing := self._find_missing():
            if failure := self._read("failure"):
                raise RunError(failure)
            if time.monotonic() > until:
                raise RunError(f"{missing} within ddp_timeout={self.timeout_seconds:g} s", everywhere=True)
            time.sleep(0.05)

    def connect(self) -> None:
        """Enable `gather` and `from_main`, once torch's process group exists."""
        if self.world_size > 1:
            timeout = timedelta(seconds=self.timeout_seconds)
            is_gloo = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo", timeout=timeout)

    def disconnect(self) -> None:
        """Wait before the process group is freed, because gloo's thread still needs the interpreter.

        Otherwise the group would hold the interpreter while waiting forever for that thread.
        """
        if self.world_size > 1:
            time.sleep(0.2)

    def gather(self, value: T) -> list[T]:
        """Return each process's value, in rank order, on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """Call `make` on the main process only; all processes return its result, or raise its exception."""
        if self.world_size == 1:
            return make()
        error: BaseException | None = None
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except (Exception, Interrupted) as raised:
                error = outcome[1] = raised
                if not isinstance(raised, UserError | RunError | Interrupted):  # other errors may not be picklable
                    outcome[1] = RunError(f"{type(raised).__name__}: {raised}")
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if error := error or outcome[1]:
            raise error
        return outcome[0]

    @contextmanager
    def share_failures(self) -> Iterator[None]:
        """If one process raises inside, end all of them: the others raise RunError with its rank and the cause.

        A process that dies, or does not answer for `timeout_seconds`, counts as one that raised. If a signal interrupts
        this process, Interrupted carries what is known about the others, because a launcher ends all processes after
        one has failed.
        """
        try:
            yield
        except BaseException as error:
            if self.world_size == 1:
                raise
            name = self._name(self.rank)
            if isinstance(error, Interrupted):
                self._write(f"interrupted {self.rank}", "")
                raise Interrupted(_with_timeout(STORE_SECONDS, self._find_failure) or "") from error
            # gloo raises no specific error type.
            is_gloo = type(error) is RuntimeError and "gloo/transport" in str(error)
            if not is_gloo and not isinstance(error, dist.DistError):
                self._write("failure", f"{name}: {first_line(error)}")
                raise
            unknown = f"{name}: no connection to the main process"
            cause = _with_timeout(2 * STORE_SECONDS, self._wait_for_cause) or unknown
            if isinstance(error, dist.DistBackendError):  # it may come from this process's own device
                cause += f" ({message(error)})"
            _with_timeout(
                STORE_SECONDS, lambda: self._store.compare_set("failure", "", cause)
            )  # unless one is already known
            raise RunError(cause, everywhere=True) from error

    def _name(self, rank: object) -> str:
        return f"process {rank} of {self.world_size}"

    def _read(self, key: str) -> str:
        """Return the value of `key` in the store, or an empty string if no process has set it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _write(self, key: str, value: str) -> None:
        _with_timeout(STORE_SECONDS, lambda: self._store.set(key, value))

    def _find_missing(self) -> str:
        """Describe the processes that have not started; empty if all have."""
        for rank in range(self.world_size):
            if rank not in self._started and (address := self._read(f"process {rank}")):
                host, pid = address.rsplit(" ", 1)
                self._started[rank] = host, int(pid)
        missing = [str(rank) for rank in range(self.world_size) if rank not in self._started]
        return f"{self._name(', '.join(missing))} has not started" if missing else ""

    def _find_failure(self) -> str:
        """Describe which process has failed or ended, and why; empty if none is known to have."""
        if known := self._read("failure") or self._find_missing():
            return known
        ended = []
        for rank, (host, pid) in self._started.items():
            if host == socket.gethostname() and not _is_running(pid) and not self._store.check([f"interrupted {rank}"]):
                ended.append(f"{self._name(rank)} (pid {pid}) has ended")
        return "; ".join(ended)

    def _wait_for_cause(self) -> str:
        """Return why the connection to another process was lost, as far as it can be determined here."""
        with suppress(RuntimeError):  # the store disappears with the main process's launcher
            self._store.set(f"waiting {self.rank}", "")
        until = time.monotonic() + STORE_SECONDS
        while time.monotonic() < until:
            with suppress(RuntimeError):
                if failure := self._find_failure():
                    return failure
            time.sleep(0.05)
        silent = [rank for rank in range(self.world_size) if not self._store.check([f"waiting {rank}"])]
        if not silent:
            return "the processes are waiting for different things; a callback must do the same on all of them"
        names = ", ".join(f"{rank} (on {self._started[rank][0]})" for rank in silent)
        return f"no answer from {self._name(names)} within ddp_timeout={self.timeout_seconds:g} s"


def report_failure(error: BaseException) -> None:
    """Report to the other processes why this one ends before its `rendezvous`, if possible."""
    with suppress(Exception):
        rank, world_size = rank_and_world_size()
        _open_store(rank, STORE_SECONDS).set("failure", f"process {rank} of {world_size}: {first_line(error)}")


def _open_store(rank: int, timeout_seconds: float) -> dist.Store:
    """Open the launcher's key-value store, or one hosted by the main process if the launcher has none."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UserError(
            "WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not; start with accelerate launch or torchrun"
        ) from None
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_seconds)
    uses_libuv = os.environ.get("USE_LIBUV", "0" if WINDOWS else "1") == "1"  # as torch: its Windows build lacks it
    options = {"wait_for_workers": False, "multi_tenant": True, "use_libuv": uses_libuv}
    server = dist.TCPStore(host, port, None, is_server, timeout, **options)
    store = dist.PrefixStore(f"hfgpt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    return store


def _with_timeout(seconds: float, call: Callable[[], T]) -> T | None:
    """Return what `call` returns, or None if it fails or takes longer, as the store does without a network."""
    returned: list[T] = []

    def work() -> None:
        with suppress(RuntimeError):
            returned.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return returned[0] if returned else None


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
