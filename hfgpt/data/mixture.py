"""The block stream of a mixture: in each step, an exact share of the blocks from each source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.mixture_readers import DocumentReader, MemoryReader, start_readers
from hfgpt.data.stream import Decode, StepBatch
from hfgpt.errors import TextEnded
from hfgpt.settings.step_sizes import StepSizes

Weights = tuple[Fraction, ...]


def step_counts(blocks: int, weights: Weights, before: Sequence[int], step: int) -> list[int]:
    """Return how many of the `blocks` of step `step` (from 0) are from each source.

    `before`: the result of the steps before, in total. `weights` add up to 1. Each source gets its share of the step,
    rounded up or down, and its total is always less than one block from its share of all steps so far.

    Each source first gets its share rounded down; which ones get one of the remaining blocks is the problem of fair
    scheduling, where tasks of given rates share processors. This is PD2 by Anderson and Srinivasan (2001).
    """
    shares = [blocks * weight for weight in weights]
    counts = [math.floor(share) for share in shares]
    waiting = []
    for number, share in enumerate(shares):
        if rate := share - counts[number]:
            turn = before[number] - step * counts[number] + 1  # of the remaining blocks, the next one of this source
            if math.floor((turn - 1) / rate) <= step:
                deadline = math.ceil(turn / rate)
                overlaps = deadline > math.floor(turn / rate)
                group = math.ceil(math.ceil(deadline * (1 - rate)) / (1 - rate)) if 2 * rate >= 1 else 0
                waiting.append((deadline, not overlaps, -group, number))
    for *_, number in sorted(waiting)[: blocks - sum(counts)]:
        counts[number] += 1
    return counts


@dataclass(eq=False)
class MixedStream:
    """Blocks of several streams, in shares that are a pure function of the step and the weights.

    A step has V logical streams, as in `DocumentStream`, of equal length. A source that is streamed has a part of its
    own in each of them, so a process only reads its own; the blocks of a step are dealt so that these parts advance
    evenly. Sources in memory are read in order over the step. In a logical stream, blocks are sorted by source.

    `schedule`: the weights, and the step from which they count (from 0), as they do from where the step grows, too.
    `max_epochs` by source: if a source is over,
    the stream raises TextEnded, or with `renormalises` (for sources in memory) goes on with the others. `over_at`: of a
    run that is audited, the sources that were over, by the step (from 0) from which they were.
    Position: `{"step": steps so far, "since": the step from which the weights have counted, "blocks": {source: number
    since then}, "tokens": {source: in total}, "over": [sources], "ahead": {source: blocks by which each logical stream
    is ahead of the last one}, "sources": {source: position}}`.
    """

    sources: dict[str, MemoryBlocks | DocumentStream]
    schedule: list[tuple[int, Weights]]
    max_epochs: dict[str, int | None]
    renormalises: bool
    sequence_length: int
    blocks_per_step: int | StepSizes
    fingerprint: dict[str, Any]
    over_at: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = list(self.sources)
        of_documents = [one.streams for one in self.sources.values() if isinstance(one, DocumentStream)]
        self.streams = of_documents[0] if of_documents else 0
        self.sizes = StepSizes.of(self.blocks_per_step, self.sequence_length)
        self.divisible = self.streams or self.sizes.common
        self.start = self.start_of_epoch(0)
        self._note_schedule()

    def start_of_epoch(self, epoch: int) -> dict[str, Any]:
        zeros = dict.fromkeys(self.names, 0)
        positions = {name: source.start_of_epoch(epoch) for name, source in self.sources.items()}
        ahead = {
            name: [0] * self.streams for name, source in self.sources.items() if isinstance(source, DocumentStream)
        }
        counters = {"step": 0, "since": 0, "blocks": zeros, "tokens": zeros, "over": [], "ahead": ahead}
        return {**counters, "sources": positions}

    def follow(self, history: list[list[Any]], step: int = 0, now: list[tuple[int, Weights]] | None = None) -> bool:
        """Use the weights of a run that has `history` as its fingerprint; from `step` on, those of `now`, if given.

        Returns whether `now` changes them.
        """
        before: list[tuple[int, Weights]] = [(first, tuple(map(Fraction, weights))) for first, weights in history]
        planned = [entry for entry in before if entry[0] <= step][-1:] + [entry for entry in before if entry[0] > step]
        is_same = now is None or now == [(max(first, step), weights) for first, weights in planned]
        self.schedule = before if is_same or now is None else [e for e in before if e[0] < step] + now
        self._note_schedule()
        return not is_same

    def _note_schedule(self) -> None:
        self.fingerprint["weights"] = [[first, list(map(str, weights))] for first, weights in self.schedule]

    def with_new_limits(self, position: dict[str, Any], then: dict[str, int | None]) -> dict[str, Any]:
        """Return the position of a run whose sources had the `max_epochs` of `then`: one that has more comes back."""
        limits = {name: self.max_epochs[name] or math.inf for name in position["over"]}
        over = [name for name, limit in limits.items() if limit <= (then.get(name) or math.inf)]
        if over == position["over"]:
            return position
        return {**position, "over": over, "since": position["step"], "blocks": dict.fromkeys(self.names, 0)}

    def lift_limits(self) -> None:
        """Let no source end."""
        self.max_epochs = dict.fromkeys(self.names)
        for source in self.sources.values():
            if isinstance(source, DocumentStream):
                source.max_epochs = None

    def plan_step(self, position: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return the blocks of each source in the step after `position`, and the new counters of the position.

        Raises TextEnded if a source is over, or all of them are.
        """
        step, since, over = position["step"], position["since"], list(position["over"])
        blocks = [position["blocks"][name] for name in self.names]
        first, weights = self.stage(step)
        if (first := max(first, self.sizes.first_step(step))) > since:
            since, blocks = first, [0] * len(blocks)
        if self.over_at.get(step, over) != over:
            over, since, blocks = self.over_at[step], step, [0] * len(blocks)
        while True:
            left = [Fraction(0) if name in over else w for name, w in zip(self.names, weights, strict=True)]
            if not (total := sum(left)):
                raise TextEnded(f"all sources with a weight have had their max_epochs: {', '.join(over)}")
            counts = step_counts(self.sizes.blocks(step), tuple(w / total for w in left), blocks, step - since)
            ended = [
                name
                for name, count in zip(self.names, counts, strict=True)
                if not self._has_blocks(name, count, position)
            ]
            if not ended:
                break
            if not self.renormalises:
                raise TextEnded(f"source {ended[0]}: it has had its max_epochs={self.max_epochs[ended[0]]}")
            over, since, blocks = over + ended, step, [0] * len(blocks)
        counted = zip(self.names, counts, blocks, strict=True)
        new = {name: (count, count + before) for name, count, before in counted}
        return counts, {
            "step": step + 1,
            "since": since,
            "blocks": {name: total for name, (_, total) in new.items()},
            "tokens": {name: position["tokens"][name] + n * self.sequence_length for name, (n, _) in new.items()},
            "over": over,
        }

    def stage(self, step: int) -> tuple[int, Weights]:
        """Return the weights of a step, and the step from which they count."""
        return [entry for entry in self.schedule if entry[0] <= step][-1]

    def active(self, position: dict[str, Any]) -> list[str]:
        """Return the sources with a weight in the step after `position`."""
        _, weights = self.stage(position["step"])
        return [name for name, w in zip(self.names, weights, strict=True) if w and name not in position["over"]]

    def _has_blocks(self, name: str, count: int, position: dict[str, Any]) -> bool:
        source, epochs = self.sources[name], self.max_epochs[name]
        if epochs is None or not isinstance(source, MemoryBlocks):
            return True
        return source.has_blocks(count, position["sources"][name], epochs)

    def blocks_left(self, name: str, position: dict[str, Any]) -> float:
        """Return how many blocks are left of a source in memory. (A document stream finds its end by itself.)"""
        source, epochs = self.sources[name], self.max_epochs[name]
        if epochs is None or not isinstance(source, MemoryBlocks):
            return math.inf
        return source.blocks_left(position["sources"][name], epochs)

    def deal(self, counts: list[int], position: dict[str, Any]) -> tuple[np.ndarray, dict[str, list[int]]]:
        """Return the number of blocks of each source in each logical stream, (sources, V), and the new "ahead".

        Each source deals its blocks out evenly; those that are left over go to the logical streams that need most, of
        these to the ones that are least ahead (Ryser's construction of a matrix of zeros and ones with given sums).
        """
        V, ahead = self.divisible, {name: np.array(of) for name, of in position["ahead"].items()}
        if not ahead:  # all in memory, where logical streams are equal parts of the step
            sources = np.repeat(np.arange(len(counts)), counts).reshape(V, -1)
            return (sources == np.arange(len(counts))[:, None, None]).sum(axis=2), {}
        dealt = np.repeat(np.array(counts)[:, None] // V, V, axis=1)
        needed = sum(counts) // V - dealt.sum(axis=0)
        for turn in range(len(counts)):  # the first one chooses freely, so another one in each step
            number = (turn - position["step"]) % len(counts)
            before = ahead.get(self.names[number], needed)
            chosen = np.lexsort((before, -needed))[: counts[number] % V]
            dealt[number, chosen] += 1
            needed[chosen] -= 1
        for name in ahead:
            ahead[name] += dealt[self.names.index(name)]
        return dealt, {name: (of - of.min()).tolist() for name, of in ahead.items()}

    def steps(self, position: dict[str, Any], first: int, last: int, step: int = 0) -> Iterator[StepBatch]:
        assert step in (0, position["step"]), (step, position)  # noqa: S101 the position has it
        readers: list[MemoryReader | DocumentReader] = []
        for name, source in self.sources.items():
            place = position["sources"][name], first, last
            if isinstance(source, MemoryBlocks):
                readers.append(MemoryReader(source, *place))
            else:
                readers.append(DocumentReader(name, source, *place))
        is_started = False
        while True:
            counts, counters = self.plan_step(position)
            dealt, ahead = self.deal(counts, position)
            for reader, of_source in zip(readers, dealt.tolist(), strict=True):
                reader.feed(of_source)
            if not is_started:
                start_readers(readers)
            is_started = True
            sources = np.concatenate([np.repeat(np.arange(len(counts)), of) for of in dealt[:, first:last].T])
            blocks = np.empty((len(sources), self.sequence_length + 1), np.int32)
            skipped, positions = Counter[str](), {}
            documents: list[list[Any]] = [[] for _ in range(first, last)]
            for number, (name, reader) in enumerate(zip(self.names, readers, strict=True)):
                read = reader.read()
                blocks[sources == number] = read.blocks
                skipped.update(read.skipped)
                positions[name] = read.position
                for of_stream, origins in zip(documents, read.documents or [[]] * len(documents), strict=True):
                    of_stream.append(origins)
            position = {**counters, "ahead": ahead, "sources": positions}
            yield StepBatch(blocks, position, skipped, documents, sources=sources)

    def blocks_between(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
        """Return the number of blocks of each source from one position to a later one."""
        tokens = {name: after["tokens"][name] - before["tokens"][name] for name in self.names}
        return {name: count // self.sequence_length for name, count in tokens.items()}

    def locate_rows(self, decode: Decode, batch: StepBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        assert batch.sources is not None  # noqa: S101
        located, each = [], len(batch.blocks) // len(batch.documents)
        for part in sorted({row // each for row in rows}):
            of_part = batch.sources[part * each : (part + 1) * each]
            for number in np.unique(of_part).tolist():
                own = np.flatnonzero(of_part == number) + part * each
                wanted = [place for place, row in enumerate(own.tolist()) if row in rows]
                name, source = self.names[number], self.sources[self.names[number]]
                if isinstance(source, DocumentStream):
                    found = source.locate(decode, batch.blocks[own], batch.documents[part][number], set(wanted))
                else:
                    found = source.locate_rows(decode, batch, own[wanted].tolist())
                located += [{"source": name, **one} for one in found]
        return located
