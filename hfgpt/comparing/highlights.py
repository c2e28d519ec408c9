"""The card at the top of a report for each run: its size, progress, losses, hardware and date."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

from hfgpt.comparing.plots import short
from hfgpt.comparing.runs import PastRun, count, number
from hfgpt.comparing.values import format_value
from hfgpt.messages.formats import counted, duration

_MOST_SAMPLES = 5  # steps of a run, and samples of a step


class Highlight(NamedTuple):
    label: str
    value: str
    detail: str = ""
    is_text: bool = False  # not a number


class Sample(NamedTuple):
    step: int
    prompt: str
    text: str


class RunCard(NamedTuple):
    """A short summary of a run for the top of a report. samples: newest first."""

    name: str
    state: str
    highlights: list[Highlight]
    samples: list[Sample]


def run_card(run: PastRun, compared: dict[str, Any]) -> RunCard:
    """Return the card of a run; compared: `comparison.compare`'s result."""
    summary = next(one for one in compared["runs"] if one["name"] == run.name)
    against = next((row for row in compared["mfu_against"] if run.name in row["stated_by"]), None)
    speed = _speed(
        summary["tokens_per_second"], *((against["mfu"][run.name], against["peak_tflops"]) if against else ())
    )
    shown = [_size(run, summary), _length(summary), *_losses(run, summary), speed, *_where_and_when(run)]
    return RunCard(run.name, run.state, [one for one in shown if one.value], _samples(run))


def _size(run: PastRun, summary: dict[str, Any]) -> Highlight:
    layers, width = count(run.model.get("n_layer")), count(run.model.get("n_embd"))
    shape = [*([counted(layers, "layer")] if layers else []), *([f"{width:,} wide"] if width else [])]
    if summary["sequence_length"]:
        shape.append(f"sequence {summary['sequence_length']:,}")
    size = number(summary["parameters"]) or number(summary["parameters_without_positions"])
    return Highlight("parameters", short(size) if size else "", ", ".join(shape))


def _length(summary: dict[str, Any]) -> Highlight:
    steps, planned, tokens = summary["steps"], number(summary["planned_steps"]), summary["tokens"]
    of_plan = f"step {steps:,} of {planned:,.0f}" if planned and planned > steps else f"{steps:,} steps"
    return Highlight("tokens", short(tokens), of_plan) if tokens else Highlight("steps", f"{steps:,}", "")


def _losses(run: PastRun, summary: dict[str, Any]) -> list[Highlight]:
    """Return the last evaluation, or else the final training loss."""
    loss, where = number(summary["eval_loss"]), f"held-out text, step {summary['eval_step'] or 0:,}"
    perplexity = summary["eval_perplexity"]
    if loss is None:
        loss, perplexity = summary["end_loss"], summary["end_perplexity"]
        where = f"training, mean from step {summary['end_loss_from_step'] or 0:,} on"
    if run.training and number(run.training[-1].get("loss")) is None:
        where += "; not finite in the end"
    bits = summary["eval_bits_per_byte"]
    return [
        Highlight("loss", "" if loss is None else f"{loss:.4f}", where),
        Highlight("perplexity", "" if perplexity is None else f"{perplexity:,.4g}"),
        Highlight("bits per byte", "" if bits is None else f"{bits:.4f}"),
    ]


def _speed(rate: float | None, mfu: float | None = None, peak: float | None = None) -> Highlight:
    detail = f"MFU {format_value(mfu, 'mfu')} of {peak:.4g} TFLOP/s" if mfu else ""
    return Highlight("tokens per second", f"{rate:,.0f}" if rate else "", detail)


def _where_and_when(run: PastRun) -> list[Highlight]:
    setup = [f"{run.processes} processes" if run.processes > 1 else "", _precision(run)]
    times = [when for record in (*run.events, *run.training[-1:]) if (when := number(record.get("time")))]
    started = number(run.facts.get("started")) or (times[0] if times else None)
    seconds = number((run.training or [{}])[-1].get("wall_seconds"))
    trained = f"{duration(seconds)} of training" if seconds else ""
    return [
        Highlight("hardware", str(run.device or ""), ", ".join(filter(None, setup)), is_text=True),
        Highlight("started", date(started) if started else "", trained, is_text=True),
    ]


def _precision(run: PastRun) -> str:
    name = run.settings.get("mixed_precision")
    return {"no": "float32", None: ""}.get(name, str(name))


def date(seconds: float) -> str:
    """Return a Unix time as a date in UTC; empty for an impossible time."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def _samples(run: PastRun) -> list[Sample]:
    """Return the samples of steps spread evenly over the run, newest step first."""
    found: dict[int, list[Sample]] = {}
    for event in run.events:
        if event["event"] == "sample":
            sample = Sample(event["step"], str(event.get("prompt") or ""), str(event.get("text") or ""))
            found.setdefault(sample.step, []).append(sample)
    newest_first = sorted(found, reverse=True)[:: -(-len(found) // _MOST_SAMPLES) or 1]
    return [sample for step in newest_first for sample in found[step][:_MOST_SAMPLES]]
