"""What a mixture means for a run: tokens and epochs of each source, and sources that are over before the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.formats.tokens.reading import TokenFiles
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.mixture import MixedStream
from hfgpt.data.prepare_text import TextData
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
    if kind.removesuffix("_ema") == "eval_bits_per_byte" and None in wanted:
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
    while step < max_steps:
        last = _next_border(stream, step, max_steps)
        of_stage = (last - step) * stream.sizes.blocks(step) * stream.stage(step)[1][number]
        exact, whole, step = exact + of_stage, whole + math.floor(of_stage), last
    return exact, whole


def _next_border(stream: MixedStream, step: int, max_steps: int) -> int:
    """Return where, after `step`, the weights or the size of the step change next, or the run ends."""
    return min([first for first, _ in (*stream.schedule, *stream.sizes.stages) if step < first] + [max_steps])


def _until_the_end(
    stream: MixedStream, position: dict[str, Any], max_steps: int
) -> tuple[dict[str, Fraction], dict[str, int]]:
    """Return the blocks of each source from `position` to the end, and the last steps, about, of those that end before.

    Where one ends, the others share its part. Rounding may move an end by a step.
    """
    step, over, ends = position["step"], set(position["over"]), dict[str, int]()
    blocks = dict.fromkeys(stream.names, Fraction(0))
    limited = stream.names if stream.renormalises else []
    left = {name: Fraction(count) for name in limited if (count := stream.blocks_left(name, position)) < math.inf}
    while step < max_steps:
        _, weights = stream.stage(step)
        active = {name: w for name, w in zip(stream.names, weights, strict=True) if w and name not in over}
        if not active:
            break
        rates = {name: stream.sizes.blocks(step) * weight / sum(active.values()) for name, weight in active.items()}
        lasts = {name: step + int(left[name] // rates[name]) for name in rates if name in left}
        border = _next_border(stream, step, max_steps)
        last = min([border, *lasts.values()])
        for name, rate in rates.items():
            blocks[name] += (last - step) * rate
            if name in left:
                left[name] -= (last - step) * rate
        for name in [name for name, end in lasts.items() if end == last < border]:
            over.add(name)
            ends[name] = last
        step = last
    return blocks, ends


def describe_mixture(stream: MixedStream, data: TextData, position: dict[str, Any], max_steps: int) -> list[str]:
    """Return lines for the plan: the weights, and tokens and epochs of each source, estimates marked."""
    lines = []
    for number, (first, weights) in enumerate(stream.schedule):
        where = f" from step {first + 1:,}" if len(stream.schedule) > 1 else ""
        if first < max_steps and (
            number == len(stream.schedule) - 1 or stream.schedule[number + 1][0] > position["step"]
        ):
            lines.append(f"mixture{where}: {share(stream.names, weights)} of the tokens")
    length, (blocks, ends) = stream.sequence_length, _until_the_end(stream, position, max_steps)
    for name, source in stream.sources.items():
        tokens = position["tokens"][name] + round(blocks[name] * length)
        limit = f" of at most {stream.max_epochs[name]}" if stream.max_epochs[name] else ""
        if name in ends:
            limit += f", until about step {ends[name]:,}; then the others share its part"
        elif name in position["over"]:
            limit += ", which it has had"
        epochs, basis = "an unknown number of", ""
        if isinstance(source, MemoryBlocks):
            epochs = rounded(tokens / length / source.blocks_per_epoch)
        elif size := _estimated_tokens(source, *data.named_validation.get(name, (None, None))):
            epochs = f"about {rounded(tokens / size, 2)}"
            basis = " (judging by its held-out text)" if source.source.training_size else ""
            if tokens > size * (stream.max_epochs[name] or math.inf):
                limit += ", so the run ends before its last step"
        lines.append(f"{name}: {tokens:,} tokens, {epochs} epochs{basis}{limit}")
    return lines


def _estimated_tokens(stream: DocumentStream, validation: np.ndarray | None, validation_bytes: int | None) -> float:
    """Return about how many tokens a streamed source has, judging by its held-out text; 0 if unknown."""
    source, size = stream.source, stream.source.training_size
    if isinstance(source.tokens, TokenFiles) and size is None:
        return sum(unit.size_bytes / source.tokens.files[unit.file].item_bytes for unit in source.units)
    if source.has_tokens:
        return size or 0.0
    return (size or 0.0) * len(validation) / validation_bytes if validation is not None and validation_bytes else 0.0
