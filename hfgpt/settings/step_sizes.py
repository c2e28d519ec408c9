"""`StepSizes`: how many blocks each step has, if `tokens_per_step` grows in stages; the tokens after each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from hfgpt.errors import UserError
from hfgpt.messages.formats import shown

if TYPE_CHECKING:
    from hfgpt.config import PretrainConfig

Stages = Sequence[Sequence[int]]  # [tokens seen from which a stage holds, its tokens per step]


@dataclass(frozen=True)
class StepSizes:
    """The blocks of each step, over all processes; steps count from 0. All data, plans and counters go by this.

    stages: (first step, blocks per step), in order. sequence_length: tokens per block.
    since: the step, and the tokens before it, from which the setting counts; a resume may have changed it there.
    known: a step of a resumed run, and the tokens before it, as its earlier blocks may have had another length.
    streams: logical streams of a resumed run, which stay as they are.
    """

    stages: tuple[tuple[int, int], ...]
    sequence_length: int = 1
    since: tuple[int, int] = (0, 0)
    known: tuple[int, int] = (0, 0)
    streams: int | None = None

    @classmethod
    def of(cls, value: int | list[list[int]] | StepSizes, sequence_length: int = 1) -> StepSizes:
        """Read a number of blocks that is the same in all steps, or what `to_json` returned."""
        if isinstance(value, StepSizes):
            return value
        stages = [(0, value)] if isinstance(value, int) else [(first, blocks) for first, blocks in value]
        return cls(tuple(stages), sequence_length)

    @classmethod
    def read(cls, value: Any, sequence_length: int) -> StepSizes | None:
        """Read what a file has of `to_json`; None if it is nothing of the kind."""
        stages = value if isinstance(value, list) else [[0, value]]
        pairs = [stage for stage in stages if isinstance(stage, list) and [*map(type, stage)] == [int, int]]
        rising = [first for first, _ in pairs] == sorted({first for first, _ in pairs})
        if not pairs or len(pairs) < len(stages) or not rising or pairs[0][0] or min(size for _, size in pairs) < 1:
            return None
        return cls.of(pairs, sequence_length)

    @classmethod
    def plan(cls, wanted: Stages, sequence_length: int, step: int = 0, tokens: int = 0) -> StepSizes:
        """Return the steps from `step` on, after `tokens` tokens: a stage begins with the first step at its tokens."""
        stages: list[tuple[int, int]] = []
        for start, tokens_per_step in wanted:
            first = step
            if start > tokens:
                first = math.ceil(cls(tuple(stages), sequence_length, known=(step, tokens)).steps_at(start))
            if stages and stages[-1][0] == first:  # the one before has no step
                stages.pop()
            stages.append((first, tokens_per_step // sequence_length))
        return cls(tuple(stages), sequence_length, (step, tokens), (step, tokens))

    def to_json(self) -> int | list[list[int]]:
        return self.stages[0][1] if len(self.stages) == 1 else [list(stage) for stage in self.stages]

    @property
    def common(self) -> int:
        """The largest number that divides the blocks of every step."""
        return math.gcd(*(blocks for _, blocks in self.stages))

    def first_step(self, step: int) -> int:
        """Return the first step of the stage that has this step."""
        return max((first for first, _ in self.stages if first <= step), default=self.stages[0][0])

    def blocks(self, step: int) -> int:
        return dict(self.stages)[self.first_step(step)]

    def tokens(self, step: int) -> int:
        return self.blocks(step) * self.sequence_length

    def counts(self, step: int) -> Iterator[int]:
        """Yield the blocks of each step from this one on, endlessly."""
        return map(self.blocks, count(step))

    def blocks_before(self, step: int) -> int:
        ends = [*(first for first, _ in self.stages[1:]), step]
        spans = zip(self.stages, ends, strict=True)
        return sum(max(0, min(end, step) - first) * blocks for (first, blocks), end in spans)

    def tokens_after(self, steps: int) -> int:
        """Return the tokens seen after so many steps."""
        step, tokens = self.known
        return tokens + (self.blocks_before(steps) - self.blocks_before(step)) * self.sequence_length

    def steps_at(self, tokens: int) -> Fraction:
        """Return after how many steps, exactly, so many tokens have been seen."""
        step, known = self.known
        return self.steps_with(Fraction(tokens - known, self.sequence_length) + self.blocks_before(step))

    def steps_with(self, blocks: Fraction) -> Fraction:
        """Return how many steps, exactly, have so many blocks."""
        within = [(first, each) for first, each in self.stages if self.blocks_before(first) <= blocks]
        first, each = within[-1] if within else self.stages[0]
        return first + (blocks - self.blocks_before(first)) / each

    def until(self, step: int) -> list[tuple[int, int]]:
        """Return the stages that have begun before this step."""
        return [stage for stage in self.stages if stage[0] < step]

    def followed_by(self, later: StepSizes) -> StepSizes:
        """Return these steps up to those where `later`, which was planned from a step on, begins."""
        stages = self.until(later.since[0])
        for stage in later.stages:
            stages += [stage] if not stages or stages[-1][1] != stage[1] else []
        return replace(later, stages=tuple(stages))

    def stages_before(self, last: int) -> list[tuple[int, int, int]]:
        """Return (first step, end, blocks per step) of the stages that begin before step `last`."""
        ends = [*(first for first, _ in self.stages[1:]), last]
        spans = zip(self.stages, ends, strict=True)
        return [(first, min(end, last), blocks) for (first, blocks), end in spans if first < last]


def step_sizes(config: PretrainConfig, stated: int, step: int = 0, tokens: int = 0) -> StepSizes:
    """Return the sizes of the steps from `step` on, after `tokens` tokens.

    stated: the tokens per step if `tokens_per_step` is not set.
    """
    return StepSizes.plan(as_stages(config.tokens_per_step or stated), config.sequence_length, step, tokens)


def total_steps(config: PretrainConfig, sizes: StepSizes, epoch_blocks: int | None) -> int:
    """Return the length of the run in steps.

    epoch_blocks: blocks in one pass over the text, or None if the text is streamed.
    """
    if config.max_steps is not None:
        return config.max_steps
    if config.max_tokens is not None:
        return max(1, math.floor(sizes.steps_at(config.max_tokens)))
    assert config.num_train_epochs is not None  # noqa: S101
    if epoch_blocks is None:
        raise UserError(
            f"num_train_epochs={config.num_train_epochs}: the length of streamed text is not known in advance; "
            "set max_steps or max_tokens, or load the text into memory with --streaming false"
        )
    return max(1, round(sizes.steps_with(Fraction(config.num_train_epochs * epoch_blocks))))


def find_stage_problem(stages: Stages) -> str | None:
    """Return what is wrong with stages of `tokens_per_step`, in one line, or None."""
    where = f"tokens_per_step={shown(stages)}: "
    if not all(len(stage) == 2 for stage in stages):
        return f"{where}a stage is two numbers, tokens seen and tokens per step, as in {EXAMPLE}"
    if stages[0][0] != 0:
        return f"{where}the first stage begins at {stages[0][0]:,} tokens; it must begin at 0"
    for start, size in stages:
        if start < 0 or size < 1:
            least = "tokens seen must be 0 or more, and tokens per step must be greater than 0"
            return f"{where}the stage [{start}, {size}]: {least}"
    for (start, size), (later, larger) in pairwise(stages):
        if later == start:
            return f"{where}two stages begin at {start:,} tokens; leave one out"
        if later < start:
            return f"{where}the stage from {later:,} tokens comes after that from {start:,}; sort the stages"
        if larger <= size:
            less_noise = "a later step needs a gradient with less noise, not more"
            return f"{where}the stage from {later:,} tokens does not grow ({larger:,} after {size:,}); {less_noise}"
    return None


def as_stages(tokens_per_step: int | list[list[int]]) -> Stages:
    return tokens_per_step if isinstance(tokens_per_step, list) else [[0, tokens_per_step]]


EXAMPLE = "[[0, 65536], [1e9, 524288]]"


def stages_in_words(value: Any) -> str:
    """Return a recorded `tokens_per_step` for a table: a number, or stages."""
    if not isinstance(value, list):
        return f"{value:,}"
    return ", ".join(f"{size:,}" + (f" from {start:,} tokens on" if start else "") for start, size in value)
