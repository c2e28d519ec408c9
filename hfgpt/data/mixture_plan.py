"""What a mixture means for a run: tokens and epochs of each source, and sources that are over before the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.mixture import MixedStream
from hfgpt.data.prepare import TextData
from hfgpt.errors import UserError
from hfgpt.messages.formats import rounded


def share(names: Sequence[str], weights: Sequence[Fraction]) -> str:
    return ", ".join(f"{rounded(100 * float(weight))} % {name}" for name, weight in zip(names, weights, strict=True))


def plan_mixture(metric: str, data: TextData, position: dict[str, Any], max_steps: int) -> list[str]:
    """Return lines for the plan on a mixture, if the text is one. Raises UserError for a run that cannot work."""
    check_metric(metric, data)
    if not isinstance(data.train, MixedStream):
        return []
    check_epochs(data.train, position, max_steps)
    return describe_mixture(data.train, data, position, max_steps)


def check_metric(metric: str, data: TextData) -> None:
    """Raise UserError if `metric_for_best_model` is bits per byte of a text whose bytes are unknown."""
    kind, _, name = metric.partition("/")
    named = data.named_validation
    wanted = [named[name][1]] if name else [of[1] for of in named.values()] or [data.validation_bytes]
    if kind == "eval_bits_per_byte" and None in wanted:
        raise UserError(f"metric_for_best_model={metric}: the bytes of this text are unknown; use eval_loss")


def check_epochs(stream: MixedStream, position: dict[str, Any], max_steps: int) -> None:
    """Raise UserError if a source in memory is over before the end of the run, unless others go on without it."""
    if stream.renormalises:
        return
    problems = []
    for name, source in stream.sources.items():
        epochs = stream.max_epochs[name]
        if epochs is None or not isinstance(source, MemoryBlocks):
            continue
        left = source.blocks_left(position["sources"][name], epochs)
        exact, needed = _blocks(stream, name, position["step"], max_steps)
        if needed > left:
            wanted = float(exact) / source.blocks_per_epoch
            problems.append(
                f"source {name}: max_epochs={epochs} leaves {max(left, 0):,} blocks, but the run needs {needed:,} "
                f"({rounded(wanted)} epochs); use a smaller weight, fewer steps, or --on_exhausted renormalise"
            )
    if problems:
        raise UserError(*problems)


def _blocks(stream: MixedStream, name: str, step: int, max_steps: int) -> tuple[Fraction, int]:
    """Return the exact share of a source from `step` to the end, in blocks; and the whole blocks of it at least."""
    number, exact, whole = stream.names.index(name), Fraction(0), 0
    borders = [*(first for first, _ in stream.schedule), max_steps]
    for (first, weights), last in zip(stream.schedule, borders[1:], strict=True):
        steps = min(last, max_steps) - max(first, step)
        if steps > 0:
            of_stage = steps * stream.blocks_per_step * weights[number]
            exact, whole = exact + of_stage, whole + math.floor(of_stage)
    return exact, whole


def describe_mixture(stream: MixedStream, data: TextData, position: dict[str, Any], max_steps: int) -> list[str]:
    """Return lines for the plan: the weights, and tokens and epochs of each source, estimates marked."""
    lines = []
    for number, (first, weights) in enumerate(stream.schedule):
        where = f" from step {first + 1:,}" if len(stream.schedule) > 1 else ""
        if first < max_steps and (
            number == len(stream.schedule) - 1 or stream.schedule[number + 1][0] > position["step"]
        ):
            lines.append(f"mixture{where}: {share(stream.names, weights)} of the tokens")
    length = stream.sequence_length
    for name, source in stream.sources.items():
        blocks, _ = _blocks(stream, name, position["step"], max_steps)
        tokens = position["tokens"][name] + round(blocks * length)
        limit = f" of at most {stream.max_epochs[name]}" if stream.max_epochs[name] else ""
        epochs = "an unknown number of"
        if isinstance(source, MemoryBlocks):
            epochs = rounded(tokens / length / source.blocks_per_epoch)
        elif size := _estimated_tokens(source, *data.named_validation.get(name, (None, None))):
            epochs = f"about {rounded(tokens / size, 2)}"
            if tokens > size * (stream.max_epochs[name] or math.inf):
                limit += ", so the run ends before its last step"
        lines.append(f"{name}: {tokens:,} tokens, {epochs} epochs{limit}")
    return lines


def _estimated_tokens(source: DocumentStream, validation: np.ndarray | None, validation_bytes: int | None) -> float:
    """Return about how many tokens a streamed source has, judging by its size and its validation text; 0 if unknown."""
    if validation is None or not validation_bytes:
        return 0.0
    return sum(unit.size_bytes for unit in source.source.units) * len(validation) / validation_bytes
