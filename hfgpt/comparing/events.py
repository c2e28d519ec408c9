"""Events of runs, such as resumes and failures, as lines of a report and marks in its plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hfgpt.comparing.runs import PastRun
from hfgpt.comparing.values import format_value

_MOST_LINES = 20  # of a run
_UNREMARKABLE = ("start", "save", "push", "end", "sample")
_ON_PLOTS = ("resume", "skip_step", "rollback", "oom_retry", "signal", "stream_retry", "save_failed", "push_failed")
_MOST_MARKS, _MOST_IN_MARK = 60, 5


class Mark(NamedTuple):
    """Events at one position in a plot. is_fault: at least one is not just a resume."""

    at: float
    lines: list[str]
    is_fault: bool


def event_lines(run: PastRun) -> list[str]:
    """Return a line for each notable event, up to a limit."""
    lines = [f"{run.name}: {describe_event(event)}" for event in run.events if event["event"] not in _UNREMARKABLE]
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"{run.name}: {more} more events"] if more > 0 else [])


def describe_event(event: dict[str, Any]) -> str:
    """Describe an event in one line: its name, its step, and what else it records."""
    always = ("event", "step", "time", "wall_seconds", "num_input_tokens_seen", "max_steps", "checkpoint_step")
    details = ", ".join(f"{key} {_words(value)}" for key, value in event.items() if key not in always and value)
    return f"{event.get('event')} at step {event['step']}{': ' if details else ''}{details}"


def _words(value: Any) -> str:
    """Describe what an event records: values of a list or of settings that changed by name, documents by their text."""
    if isinstance(value, dict) and value.keys() == {"from", "to"}:
        return f"from {format_value(value['from'])} to {format_value(value['to'])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items())
    if isinstance(value, list) and all(isinstance(one, dict) and "text" in one for one in value):
        return f'({len(value)}, the first with "{" ".join(str(value[0]["text"]).split()):.60}")'
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{format_value(value):.120}"


def marks_of(runs: Sequence[PastRun], axis: str, start: float, end: float) -> list[Mark]:
    """Return the events to mark on a curve, by position on `axis`; neighbors share a mark."""
    found: dict[int, list[tuple[float, str, bool]]] = {}
    for run in runs:
        events = [event for event in run.events if event["event"] in _ON_PLOTS or event.get("fault")]
        places = run.places_of([event["step"] for event in events], axis) if events else []
        for place, event in zip(places, events, strict=False):
            if start <= place <= end:
                line = describe_event(event) if len(runs) == 1 else f"{run.name}: {describe_event(event)}"
                bucket = round((place - start) / (end - start) * _MOST_MARKS)
                found.setdefault(bucket, []).append((place, line, event["event"] != "resume"))
    marks = []
    for together in found.values():
        lines, more = [line for _, line, _ in together], len(together) - _MOST_IN_MARK
        lines = lines[:_MOST_IN_MARK] + ([f"{more} more"] if more > 0 else [])
        marks.append(Mark(together[0][0], lines, any(is_fault for _, _, is_fault in together)))
    return marks
