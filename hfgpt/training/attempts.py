"""Retry a step: with smaller micro-batches if memory ran out, or without a corrupt file in torch.compile's cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType

from hfgpt.distributed.compiler import remove_broken_cache
from hfgpt.distributed.device import release_memory
from hfgpt.errors import RunError
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.training.batch_size import try_micro_batch
from hfgpt.training.out_of_memory import MemoryRanOut, out_of_memory_named
from hfgpt.training.run import TrainingRun

logger = logging.getLogger(__name__)


class Attempt:
    """One attempt at a step: a context that suppresses errors after which the step is retried."""

    is_done = has_run_out = False

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.outer = ExitStack()

    def __enter__(self) -> None:
        run = self.run
        where = f"with micro-batches of {run.step.batch.micro_batch}"
        self.outer.enter_context(out_of_memory_named(where, "use a smaller --per_device_train_batch_size"))
        first_step = run.resumed.trainer_state["step"] if run.resumed else 0
        if run.plan.compile.enabled and run.progress.step == first_step:  # compiling may take minutes
            self.outer.enter_context(run.signals.interruptible())
            self.outer.enter_context(SlowWork("compiling the model"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, MemoryRanOut):
            self.has_run_out = True
        elif kind is None:
            self.is_done = True
        elif not (isinstance(error, Exception) and self.run.step.ranks.world_size == 1 and remove_broken_cache(error)):
            return bool(self.outer.__exit__(kind, error, traceback))
        self.outer.close()
        return kind is not None  # suppressing the exception frees its traceback, and with it the tensors


def attempts(run: TrainingRun) -> Iterator[Attempt]:
    """Yield attempts until one succeeds: `for attempt in attempts(run): with attempt: ...`."""
    while True:
        yield (attempt := Attempt(run))
        if attempt.is_done:
            return
        if attempt.has_run_out:
            use_smaller_micro_batch(run)
            fit_micro_batch(run)
        else:
            run.step.optimizer.zero_grad()


def fit_micro_batch(run: TrainingRun) -> None:
    """Under DDP, try a micro-batch, and make it smaller until it fits on all processes.

    A process that runs out of memory during the exchange of gradients would leave the others waiting, so this is tested
    beforehand.
    """
    step = run.step
    while step.ranks.world_size > 1 and not step.is_sharded:
        try:
            with step.memory.micro_batch(1, 2):
                try_micro_batch(step, step.batch)
            with step.memory.micro_batch(2, 2):  # raises on all processes if one of them failed
                step.optimizer.zero_grad()
            return
        except MemoryRanOut:
            pass
        use_smaller_micro_batch(run)


def use_smaller_micro_batch(run: TrainingRun) -> None:
    """Split this and later steps into smaller micro-batches. Raises RunError if they are already one sequence."""
    step, number = run.step, run.progress.step + 1
    step.optimizer.zero_grad()
    release_memory(step.accelerator.device)
    before, smaller = step.batch, step.batch.halved()
    if smaller is None:
        raise RunError(
            f"out of memory in step {number} with micro-batches of one sequence; use a smaller model, or "
            "--gradient_checkpointing true"
        )
    step.batch = smaller
    accumulation = smaller.of(run.plan.sizes.blocks(number - 1)).accumulation
    sizes = {"micro_batch": smaller.micro_batch, "accumulation": accumulation}
    run.record(event="oom_retry", for_step=number, micro_batch_before=before.micro_batch, **sizes)
    retrying = f"retrying with micro-batch {smaller.micro_batch} x {accumulation}"
    logger.warning("Out of memory in step %d: %s.", number, retrying)
