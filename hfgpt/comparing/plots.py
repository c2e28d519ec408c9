"""Plots of runs as data: loss against tokens, time and FLOPs; tokens per second; MFU.

`png.py` draws them with matplotlib, `report.html.jinja` as SVG. Long runs are thinned, so that drawing stays fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from hfgpt.comparing.events import Mark, marks_of
from hfgpt.comparing.peaks import stated_peaks
from hfgpt.comparing.runs import PastRun, number
from hfgpt.comparing.values import format_value
from hfgpt.messages.formats import duration, enumerated
from hfgpt.model.flops import mfu

PLOT_NAMES = ("bits_per_byte", "loss_tokens", "loss_steps", "loss_time", "loss_flops", "speed", "mfu")
MOST_POINTS = 600  # of a curve
MOST_DOTS = 200  # evaluations
SMOOTHED_BY = 50  # the trend is a mean over this fraction of the records
FALLING = ("loss", "eval_bits_per_byte")
_LABELS = {
    "step": "steps", "num_input_tokens_seen": "tokens", "flops": "FLOPs",
    "loss": "loss (nats per token)", "tokens_per_second": "tokens per second", "mfu": "MFU",
    "eval_bits_per_byte": "bits per byte of held-out text",
}  # fmt: skip
_TIMES = (
    ("days", 86400, 3),
    ("hours", 3600, 3),
    ("minutes", 60, 3),
    ("seconds", 1, 0),
)  # used from this many records on


class Tick(NamedTuple):
    """A tick on an axis; `below`: a second label, under the first."""

    at: float
    label: str
    below: str = ""


class Curve(NamedTuple):
    """One run in a plot: each record, their running mean (of speeds: median), and evaluations."""

    run_index: int  # of the run, which determines the color
    name: str
    records: pd.Series
    trend: pd.Series
    evaluations: pd.Series
    repeats: bool  # has the records of an earlier curve
    noise: pd.Series | None = None  # half the width of the band of each record, if they are points of their own

    @property
    def is_smoothed(self) -> bool:
        """Whether the records are drawn too, faintly; those of equal curves would blend to a color of their own."""
        return len(self.records) >= 2 * SMOOTHED_BY and not self.repeats


@dataclass(frozen=True)
class Plot:
    """`name`: one of PLOT_NAMES. x, y: the range shown. step_tokens: tokens per step, if equal in all runs."""

    title: str
    name: str
    key: str
    axis: str
    step_tokens: float | None
    x_label: str
    y_label: str
    curves: list[Curve]
    x: tuple[float, float]
    y: tuple[float, float]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marks: list[Mark]
    note: str  # what the range leaves out

    @property
    def is_falling(self) -> bool:
        return self.key in FALLING

    def describe_value(self, value: float) -> str:
        return format_value(value, self.key)

    def describe_place(self, at: float) -> str:
        if self.axis == "wall_seconds":
            return f"after {duration(at)}"
        if self.axis == "step":
            return f"step {at:,.0f}"
        step = f"step {at / self.step_tokens:,.0f}, " if self.step_tokens and self.axis != "flops" else ""
        return f"{step}{short(at)} {_LABELS[self.axis]}"


def build_plots(runs: Sequence[PastRun], comparable: bool = True) -> list[Plot]:
    """Return all plots for which the runs have values.

    comparable: whether loss per token means the same in all runs; if not, bits per byte are drawn too.

    If the tokens of a run are unknown, steps are used instead. MFU uses the same peak for all runs: the first that any
    run states.
    """
    has_tokens = all(run.reach("num_input_tokens_seen") for run in runs)
    main, axis = ("tokens", "num_input_tokens_seen") if has_tokens else ("steps", "step")
    warning = "" if comparable else ": per token, does not compare between these runs"
    specs = [
        (f"Loss against {main}{warning}", f"loss_{main}", "loss", axis),
        (f"Loss against time{warning}", "loss_time", "loss", "wall_seconds"),
        (f"Loss against FLOPs{warning}", "loss_flops", "loss", "flops"),
        ("Tokens per second", "speed", "tokens_per_second", axis),
    ]
    if not comparable:
        specs.insert(0, (f"Bits per byte against {main}", "bits_per_byte", "eval_bits_per_byte", axis))
    peaks = stated_peaks(runs)
    if peaks:
        specs.append((f"MFU against {peaks[0].tflops:.4g} TFLOP/s ({peaks[0].source})", "mfu", "mfu", axis))
    plots = []
    for title, name, key, axis in specs:
        series = [_mfu(run, axis, peaks[0].tflops) if key == "mfu" else run.curve(key, axis) for run in runs]
        if plot := _build(title, name, key, axis, runs, series):
            plots.append(plot)
    return plots


def _mfu(run: PastRun, axis: str, peak: float) -> pd.Series:
    """Return the MFU relative to `peak`, whatever peak the run itself used."""
    rates = run.curve("tokens_per_second", axis)
    if len(rates) and run.flops_per_token:
        return mfu(rates, run.flops_per_token, peak, run.processes)
    return run.curve("mfu", axis) * ((run.newest("peak_tflops") or 0.0) / peak)


def _build(
    title: str, name: str, key: str, axis: str, runs: Sequence[PastRun], series: Sequence[pd.Series]
) -> Plot | None:
    """Return a plot, or None if no run has a value."""
    is_falling = key in FALLING
    curves: list[Curve] = []
    low, high, starts, ends = [], [], [], []
    for index, (run, records) in enumerate(zip(runs, series, strict=True)):
        evaluations = run.curve("eval_loss", axis) if key == "loss" else pd.Series(dtype=float)
        tops = []
        for curve in (records, evaluations):
            if len(curve):
                low.append(curve.quantile(0.002) if is_falling else 0.0)
                tops.append(float(_top(curve) if is_falling else curve.quantile(0.98)))
                starts.append(curve.index[0])
                ends += [curve.index[-1], *run.places_of([run.last_step], axis)]  # records may not be finite
        high += [max(tops)] if tops else []
        repeats = any(records.equals(series[earlier]) for earlier in range(index))
        shown = thin(records), _trend(records, is_falling), thin(evaluations, MOST_DOTS)
        curves.append(Curve(index, run.name, *shown, repeats))
    if not high:
        return None
    bottom = float(min(low))
    top = _common_top(bottom, high) if is_falling else max(high)
    margin = 0.06 * (top - bottom) or 0.05 * abs(top) or 1.0
    start, end = float(min(starts)), float(max(ends))
    start = start if start < 0 or 0.5 * end < start < end else 0.0
    x = (start, end if end > start else start + 1)
    y = (bottom - (margin if is_falling else 0), top + margin)
    step_tokens = _step_tokens(runs)
    x_label, x_ticks = _x_ticks(axis, *x, step_tokens)
    y_ticks = [Tick(at, _y_label(key, at)) for at in round_numbers(*y, 5)]
    what = (title, name, key, axis, step_tokens, x_label, _LABELS[key])
    note = _beyond(curves, y[1], partial(format_value, key=key))
    return Plot(*what, curves, x, y, x_ticks, y_ticks, marks_of(runs, axis, *x), note)


def _common_top(bottom: float, tops: list[float]) -> float:
    """Return the highest of the values up to which curves go, but not one that would flatten all others."""
    limit = bottom + 3 * (sorted(tops)[(len(tops) - 1) // 2] - bottom)
    return max(top for top in tops if top <= limit or len(tops) < 3)


def _beyond(curves: Sequence[Curve], top: float, shown: Callable[[float], str]) -> str:
    """Say which records are above the range of a plot; empty if none are."""
    known = [curve for curve in curves if len(curve.records)]
    highest = max((float(curve.records.max()) for curve in known), default=top)
    if highest <= top:
        return ""
    hidden = [curve.name for curve in known if curve.records.min() > top]
    all_of = f" and all of {enumerated(hidden)}" if hidden else ""
    return f"Not shown: records above {shown(top)}, up to {shown(highest)}{all_of}."


def _step_tokens(runs: Sequence[PastRun]) -> float | None:
    """Return the tokens per step if equal for all steps of all runs, else None."""
    sizes: set[float | None] = {run.tokens_per_step for run in runs}
    for run in runs:
        last = (run.training or run.evaluations)[-1:]
        sizes |= {(number(record.get("num_input_tokens_seen")) or 0) / (record["step"] or 1) for record in last}
    return sizes.pop() if len(sizes) == 1 else None


def _y_label(key: str, at: float) -> str:
    return f"{100 * at:.4g} %" if key == "mfu" else short(at) if at >= 1e5 else f"{at:,.6g}"


def _trend(curve: pd.Series, is_falling: bool) -> pd.Series:
    """Return the running mean (of speeds: median) over a fiftieth of the records; unchanged if there are few."""
    size = max(1, len(curve) // SMOOTHED_BY)
    if size > 1:
        windows = curve.rolling(size, center=True)
        curve = (windows.mean() if is_falling else windows.median()).dropna()
    if len(curve) <= MOST_POINTS:
        return curve
    return curve.iloc[np.linspace(0, len(curve) - 1, MOST_POINTS).astype(int)]


def thin(curve: pd.Series, most: int = MOST_POINTS) -> pd.Series:
    """Return at most `most` points of a curve: both ends, and the lowest and highest of each stretch."""
    if len(curve) <= most:
        return curve
    values = curve.to_numpy()
    kept = {0, len(values) - 1}
    for start, end in itertools.pairwise(np.linspace(0, len(values), most // 2).astype(int)):
        kept |= {start + int(values[start:end].argmin()), start + int(values[start:end].argmax())}
    return curve.iloc[sorted(kept)]


def _top(curve: pd.Series) -> float:
    """Return the highest value after the first twentieth of the run, whose steep drop would flatten the rest."""
    rest = curve.iloc[min(len(curve) // 20, len(curve) - 1) :]
    return float(max(rest.quantile(0.998), curve.iloc[-1]))


def _x_ticks(axis: str, start: float, end: float, step_tokens: float | None) -> tuple[str, list[Tick]]:
    """Return the label and ticks of the x axis. Token ticks are at round steps if all runs have equal steps."""
    if axis == "wall_seconds":
        unit, seconds, _ = next((one for one in _TIMES if end >= one[1] * one[2]), _TIMES[-1])
        places = round_numbers(start / seconds, end / seconds, 6)
        return f"{unit} of training", [Tick(at * seconds, f"{at:,.6g}") for at in places]
    if axis == "num_input_tokens_seen" and step_tokens:
        steps = [step for step in round_numbers(start / step_tokens, end / step_tokens, 6) if step == int(step)]
        # Steps are round, their tokens often are not. Only the first has the words, so that the labels fit on a small
        # screen.
        words = [("step ", " tokens"), *[("", "")] * len(steps)]
        return "steps and tokens", [
            Tick(step * step_tokens, f"{before}{short(step)}", f"{short(step * step_tokens)}{after}")
            for step, (before, after) in zip(steps, words, strict=False)
        ]
    return _LABELS[axis], [Tick(at, short(at)) for at in round_numbers(start, end, 6)]


def round_numbers(start: float, end: float, most: int) -> list[float]:
    """Return round numbers from `start` to `end`: about `most` of them, and at least one if there is any."""
    rough = (end - start) / most
    if not rough > 0 or not math.isfinite(rough):
        return [start]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def short(value: float) -> str:
    """Abbreviate large counts to three digits: 12.5k, 3M, 10B."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if 0.9995 * scale <= abs(value) < 1e15:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}".replace("e+", "e")
