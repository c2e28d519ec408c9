"""`Batch`: how a step is split into micro-batches and processes, and refused if it cannot be."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfgpt.errors import UserError
from hfgpt.settings.step_sizes import Stages, StepSizes, as_stages

if TYPE_CHECKING:
    from hfgpt.config import PretrainConfig

MOST_CANDIDATES = 2**14  # most sizes tried to find some that fit


@dataclass(frozen=True)
class Batch:
    """The arithmetic of one step: tokens_per_step = micro_batch x sequence_length x accumulation x processes.

    If steps grow in stages, that of the largest step that divides all of them: one micro-batch is then right for each.
    """

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

    def of(self, blocks: int) -> Batch:
        """Return the split of a step of so many blocks into the same micro-batches."""
        return dataclasses.replace(self, accumulation=blocks // (self.micro_batch * self.processes))

    def describe(self) -> str:
        return (
            f"{self.tokens_per_step:,} tokens = micro-batch {self.micro_batch} x sequence {self.sequence_length} x "
            f"accumulation {self.accumulation} x processes {self.processes}"
        )


def largest_step(config: PretrainConfig, batch: Batch) -> Batch:
    """Return the split of a run's largest step, given that of what divides all of them."""
    stages = as_stages(config.tokens_per_step or batch.tokens_per_step)
    return batch.of(max(size for _, size in stages) // config.sequence_length)


def splits_of_stages(batch: Batch, sizes: StepSizes, last: int) -> list[dict[str, Any]]:
    """Return the stages of a run of `last` steps, for JSON: steps from 1 on, and how each step is split."""
    return [
        {
            **{"first_step": first + 1, "last_step": end, "tokens_per_step": batch.of(blocks).tokens_per_step},
            "accumulation": batch.of(blocks).accumulation,
        }
        for first, end, blocks in sizes.stages_before(last)
    ]


def split_stages(
    stages: Stages, micro_batch: int, sequence_length: int, accumulation: int | None, processes: int
) -> Batch:
    """Split the steps of all stages (see `StepSizes`). Raises UserError, which names the stage, if one cannot be."""
    if accumulation is not None:
        raise UserError(
            f"gradient_accumulation_steps={accumulation}: follows from tokens_per_step, which has stages; leave it out"
        )
    common = math.gcd(*(tokens for _, tokens in stages))
    for start, tokens in stages:
        split_step(
            tokens, micro_batch, sequence_length, None, processes, f" in the stage from {start:,} tokens", common
        )
    return split_step(common, micro_batch, sequence_length, None, processes)


def split_step(
    stated: int | None,
    micro_batch: int,
    sequence_length: int,
    accumulation: int | None,
    processes: int,
    stage: str = "",
    common: int | None = None,
) -> Batch:
    """Split a step of `stated` tokens over `processes`; accumulation is derived if it is None.

    stage: the stage that the step is of, in words; common: tokens that divide the steps of all stages. Raises
    UserError, with a list of sizes that fit, if the step cannot be split evenly.
    """
    per_pass = micro_batch * sequence_length * processes
    parts = (
        f"per_device_train_batch_size={micro_batch} x sequence_length="
        f"{sequence_length} x {processes} process{'es' if processes > 1 else ''} = {per_pass}"
    )
    if accumulation is None:
        if stated is not None and stated % per_pass:
            low = max(stated // per_pass, 1) * per_pass
            blocks, rest = divmod(common or stated, sequence_length * processes)
            largest = min(blocks, 4 * micro_batch)
            sizes = range(1, min(largest, MOST_CANDIDATES) + 1)
            fits = [] if rest else [str(size) for size in sizes if blocks % size == 0]
            raise UserError(
                f"tokens_per_step={stated}{stage} is not a multiple of {parts}; tokens_per_step={low} or "
                f"{low + per_pass} would fit" + (f", or a micro-batch of {', '.join(fits)}" if fits else "")
            )
        accumulation = stated // per_pass if stated is not None else 1
    elif stated is not None and stated != per_pass * accumulation:
        raise UserError(
            f"tokens_per_step={stated} and gradient_accumulation_steps={accumulation} disagree: {parts}, times "
            f"{accumulation} is {per_pass * accumulation}; give only one of the two"
        )
    return Batch(micro_batch, sequence_length, accumulation, processes)
