"""The processes of a run: how they share the model, and what they tell each other apart from gradients."""

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
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hfgpt.errors import RunError, UserError

T = TypeVar("T")

# Connections end a moment before the process they belong to.
SECONDS_TO_END = 3.0


class HostGroup:
    """All processes, on the CPU: no exchange waits for a device. Alone, a process keeps its values as they are.

    Beside the exchange, a store that the main process keeps: why one has failed, and which wait in vain.
    """

    def __init__(self, world: int, timeout_seconds: float) -> None:
        self.world, self.timeout_seconds, self.rank = world, timeout_seconds, 0
        if world == 1:
            return
        timeout, self.rank = timedelta(seconds=timeout_seconds), dist.get_rank()
        gloo = dist.get_backend() == "gloo"
        self._group = dist.group.WORLD if gloo else dist.new_group(backend="gloo", timeout=timeout)
        host, port = os.environ["MASTER_ADDR"], [0]
        if self.rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = [self._store.port]
        dist.broadcast_object_list(port, src=0, group=self._group)
        if self.rank:
            self._store = dist.TCPStore(host, port[0])
        self._store.set_timeout(timedelta(seconds=SECONDS_TO_END))
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
        """An exception of one process inside ends all: RunError on the others, with its rank and cause.

        So does a process that dies, or does not answer for `timeout_seconds`.
        """
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            said = str(error).lower()
            lost = isinstance(error, dist.DistError) or "gloo" in said or "nccl" in said or "tcpstore" in said
            if isinstance(error, UserError | RunError) or not lost:
                cause = (str(error).strip() or "no message").splitlines()[0]
                told = f"process {self.rank} of {self.world}: {type(error).__name__}: {cause}"
                _within(SECONDS_TO_END, lambda: self._store.set("fault", told))
                raise
            loss = _within(2 * SECONDS_TO_END, self._loss) or "no contact to the main process"
            raise RunError(f"{loss}; continue with --resume_from_checkpoint latest", everywhere=True) from error

    def _loss(self) -> str:
        """What has become of the process that was lost, as far as can be told from here."""
        with suppress(RuntimeError):  # where the main process has ended, so has the store
            self._store.set(f"waits {self.rank}", "")
        here, until = socket.gethostname(), time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until:
            with suppress(RuntimeError):
                if self._store.check(["fault"]):
                    return self._store.get("fault").decode()
            gone = [r for r, (host, pid) in enumerate(self._members) if host == here and not _runs(pid)]
            if gone:
                return "; ".join(f"process {r} of {self.world} (pid {self._members[r][1]}) has ended" for r in gone)
            time.sleep(0.05)
        silent = [rank for rank in range(self.world) if not self._store.check([f"waits {rank}"])]
        hosts = ", ".join(f"{rank} (on {self._members[rank][0]})" for rank in silent)  # the others are here by now
        return f"no answer from process {hosts} of {self.world} within ddp_timeout={self.timeout_seconds:g} s"


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


def take_sharding() -> bool:
    """Whether the launcher's configuration asks for FSDP2; the request is taken from the environment.

    `shard` serves it, on cards and on CPUs alike, where Accelerate would give a CPU DDP without a word. Raises
    UserError for what it does not do.
    """
    if os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() not in ("1", "true"):
        return False
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UserError(f"fsdp_version: {version} in the accelerate configuration; only 2 is supported")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() in ("1", "true"):
        raise UserError("fsdp_offload_params: not supported; leave it out of the accelerate configuration")
    return True


def shard(model: Any, precision: str) -> None:
    """Split the parameters of a GPT-2-style model over all processes, in place (FSDP2).

    The matrices of a block are gathered in bf16 if that is the precision, as autocast would compute in it anyway;
    norms, embeddings and head stay float32. Gradients are reduced in float32.
    """
    again = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("1", "true", "full_shard")
    dtype = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        for matrices in (block.attn, block.mlp):
            fully_shard(matrices, mp_policy=policy, reshard_after_forward=again)
        fully_shard(block, reshard_after_forward=again)
    fully_shard(model)
