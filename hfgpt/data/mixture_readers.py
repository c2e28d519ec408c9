"""Read one process's blocks of each source of a mixture, as many as its turn has in each step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.stream import StepBatch
from hfgpt.data.threads import start_together
from hfgpt.errors import TextEnded


class MemoryReader:
    """Reads one process's blocks of a source in memory."""

    def __init__(self, source: MemoryBlocks, position: dict[str, Any], first: int, last: int) -> None:
        self.source, self.first, self.last, self._own = source, first, last, slice(0)
        self._counts: deque[int] = deque()
        self._blocks = source.advance(position, iter(self._counts.popleft, None))

    def feed(self, counts: list[int]) -> None:
        """Set the number of blocks of the next step; `counts` are those of all logical streams."""
        self._counts.append(sum(counts))
        self._own = slice(sum(counts[: self.first]), sum(counts[: self.last]))

    def read(self) -> StepBatch:
        """Return this process's part of the next blocks."""
        starts, position = next(self._blocks)
        return StepBatch(self.source.read(starts[self._own]), position)


class DocumentReader:
    """Reads one process's blocks of a document stream. A logical stream that is not needed yet is not begun."""

    def __init__(self, name: str, source: DocumentStream, position: dict[str, Any], first: int, last: int) -> None:
        self.source, self.first, self.last = source, first, last
        self.cursors = list(position["streams"][first:last])
        self.wanted: list[int] = []  # the blocks of each of its logical streams in the next step
        self._counts: list[deque[int]] = [deque() for _ in self.cursors]
        feeds: list[Callable[[], int]] = [counts.popleft for counts in self._counts]
        packed = zip(range(first, last), self.cursors, feeds, strict=True)
        self.packs = [_named(name, source.pack(stream, cursor, iter(feed, None))) for stream, cursor, feed in packed]
        self._none = np.empty((0, source.sequence_length + 1), np.int32)

    def feed(self, counts: list[int]) -> None:
        """See `MemoryReader.feed`."""
        self.wanted = counts[self.first : self.last]
        for of_stream, count in zip(self._counts, self.wanted, strict=True):
            of_stream.extend([count] if count else [])

    def read(self) -> StepBatch:
        blocks, skipped = [self._none], Counter[str]()
        documents: list[list[Any]] = []
        for number, count in enumerate(self.wanted):
            documents.append([])
            if count:
                batch = next(self.packs[number])
                blocks.append(batch.blocks)
                skipped.update(batch.skipped)
                documents[-1] = batch.documents[0]
                self.cursors[number] = batch.position["streams"][0]
        return StepBatch(np.concatenate(blocks), {"streams": list(self.cursors)}, skipped, documents)


def start_readers(readers: Sequence[MemoryReader | DocumentReader]) -> None:
    """Have all remote sources read the text of their first step together."""
    remote = [one for one in readers if isinstance(one, DocumentReader) and not one.source.source.is_local]
    waiting, units = [], []
    for reader in remote:
        of_streams = enumerate(reader.source.next_units(reader.cursors, reader.first))
        own = [(number, unit) for number, unit in of_streams if reader.wanted[number]]
        waiting += [(reader, number) for number, _ in own]
        units += [(id(reader), unit) for _, unit in own]
    started = start_together([reader.packs[number] for reader, number in waiting], units)
    for (reader, number), pack in zip(waiting, started, strict=True):
        reader.packs[number] = pack


def _named(name: str, blocks: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Yield the blocks of a source; put its name before its end."""
    try:
        yield from blocks
    except TextEnded as end:
        raise TextEnded(f"source {name}: {end}") from end
