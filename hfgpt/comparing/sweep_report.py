"""Show a sweep: a table for a terminal, plots of loss against each setting and over sizes, PNG files and one page."""

from __future__ import annotations

import contextlib
import io
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hfgpt.comparing import png
from hfgpt.comparing.comparison import compare
from hfgpt.comparing.page import as_page
from hfgpt.comparing.plots import Curve, Plot, Tick, round_numbers, short
from hfgpt.comparing.report import build_report
from hfgpt.comparing.short_values import as_key
from hfgpt.comparing.sweep import METRICS, SweptRun, describe_settings
from hfgpt.comparing.values import UNKNOWN
from hfgpt.comparing.verdict import Finding
from hfgpt.errors import UserError
from hfgpt.files import write_whole

TABLE = "sweep.csv"
WIDTH = 120
_LEFT_OUT_FIRST = ("tokens/s", "std of seeds", "parameters")
_LOG_FROM = 5.0  # values that span this factor are on a logarithmic axis
_SIGNS = {"parameters": "N", "compute": "C"}


@dataclass(frozen=True)
class SweepPlot(Plot):
    """A plot over a setting, whose values are at its ticks."""

    def describe_place(self, at: float) -> str:
        nearest = min(self.x_ticks, key=lambda tick: abs(tick.at - at))
        return f"{self.axis} {nearest.label}"


class LawPlot(Plot):
    """A plot over the logarithm of a size."""

    def describe_place(self, at: float) -> str:
        return f"{short(10**at)} {self.axis}"


def as_text(result: dict[str, Any], width: int = WIDTH) -> str:
    """Return the table of a sweep, best point first, its verdict and its laws, in lines of at most `width` characters.

    Columns that say nothing, and those that do not fit, are left out.
    """
    screen = io.StringIO()
    # Plain text: names and settings must not be read as markup.
    console = Console(file=screen, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    settings, measured = _columns(result)
    left_out = _left_out(console, settings, measured)
    console.print(_grid(settings, measured, left_out))
    lines = [f"{describe_settings(group)}: {why}" for group in result["groups"] if (why := group["why_not"])]
    lines += [result["verdict"], *law_lines(result), *_notes(result)]
    lines += [f"left out, as they do not fit: {', '.join(left_out)}; --json shows them"] if left_out else []
    wrapped = [textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    return "\n".join([*(line.rstrip() for line in screen.getvalue().splitlines()), "", *wrapped])


def _columns(result: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the cells of the columns of settings, and of what was measured and says something."""
    groups = result["groups"]
    settings = {key: [group["shown"][key] for group in groups] for key in groups[0]["shown"]}

    def column(key: str, form: str = "{:.4f}") -> list[str]:
        return [UNKNOWN if group[key] is None else form.format(group[key]) for group in groups]

    measured = {METRICS.get(result["metric"], "loss"): column("value"), "noise": column("noise", "±{:.4f}")}
    if any(group["count"] > 1 for group in groups):
        measured |= {"std of seeds": column("std"), "seeds": column("count", "{}")}
    measured["tokens/s"] = column("tokens_per_second", "{:,.0f}")
    if len({*(sizes := column("parameters", "{:,}"))} - {UNKNOWN}) > 1:
        measured["parameters"] = sizes
    states = ["diverged" if _has_diverged(group) else ", ".join(group["states"]) for group in groups]
    if {*states} != {"finished"}:
        measured["state"] = states
    return settings or {"point": [describe_settings(group) for group in groups]}, measured


def _left_out(console: Console, settings: dict[str, list[str]], measured: dict[str, list[str]]) -> list[str]:
    """Return the columns to leave out, so that no setting is broken over lines, or else no word of one."""
    could_be = [name for name in _LEFT_OUT_FIRST if name in measured]
    choices = [could_be[:number] for number in range(len(could_be) + 1)]
    endless = console.options.update_width(10**6)
    sizes = [Measurement.get(console, endless, _grid(settings, measured, left_out)) for left_out in choices]
    for widths in [size.maximum for size in sizes], [size.minimum for size in sizes]:
        if fitting := [left_out for left_out, width in zip(choices, widths, strict=True) if width <= console.width]:
            return fitting[0]
    return could_be


def _has_diverged(group: dict[str, Any]) -> bool:
    return group["why_not"] is not None and "failed" not in group["states"]


def _grid(settings: dict[str, list[str]], measured: dict[str, list[str]], left_out: Sequence[str]) -> Table:
    grid = Table(box=None, pad_edge=False)
    for key in settings:
        lines = textwrap.wrap(key.replace("_", "_ "), 22)
        grid.add_column("\n".join(line.replace("_ ", "_") for line in lines), overflow="fold")
    shown = {name: cells for name, cells in measured.items() if name not in left_out}
    for name in shown:
        header = "\n".join(textwrap.wrap(name, 10))
        grid.add_column(header, justify="left" if name == "state" else "right", no_wrap=True)
    for cells in zip(*settings.values(), *shown.values(), strict=True):
        grid.add_row(*cells)
    return grid


def _notes(result: dict[str, Any]) -> list[str]:
    return [f"note: {note}" for note in result["notes"]]


def law_lines(result: dict[str, Any]) -> list[str]:
    """Return a line for each law over sizes."""
    lines = []
    for name, sign in _SIGNS.items() if result["scaling"] else ():
        law = result["scaling"][name]
        if law is None:
            lines.append(f"no law over {name}: {result['scaling']['why_not'][name]}")
            continue
        ahead = law["ahead"]
        at = next(value for key, value in ahead.items() if key not in ("loss", "band"))
        low, high = ahead["band"]
        lines.append(
            f"over {name}: {_formula(law, sign, *law['bands'])}; at {sign} = {short(at)}: {ahead['loss']:.3f} "
            f"({low:.3f} to {high:.3f})"
        )
    return lines


def _formula(law: dict[str, Any], sign: str, *names: str) -> str:
    """Return a law in words, with the values and intervals of its parameters `names`."""
    formula = f"loss = E + A / {sign}^alpha" if "E" in law else f"loss = a / {sign}^b"
    values = (
        f"{name} = {law[name]:.3g} ({low:.3g} to {high:.3g})" for name in names for low, high in [law["bands"][name]]
    )
    return ", ".join([formula, *values])


def write_sweep(folder: Path, points: Sequence[SweptRun], result: dict[str, Any]) -> list[str]:
    """Write sweep.csv, sweep.html and the plots as PNG into `folder`; return the names of all files."""
    runs = [point.run for point in points if point.run and point.has_ended]
    plots = build_sweep_plots(result)
    contents = {TABLE: _as_csv(result["points"])}
    with contextlib.suppress(UserError):  # no matplotlib: the page needs none
        contents |= {f"{plot.name}.png": png.draw(plot) for plot in plots}
    if runs:
        report = build_report(runs, compare(runs), with_plots=True)
        settings, measured = _columns(result)
        cells = {**settings, **measured}
        lines = [
            ", ".join(f"{name} {column[row]}" for name, column in cells.items()) for row in range(len(result["groups"]))
        ]
        report.verdicts = [("sweep", Finding(result["verdict"], law_lines(result) + _notes(result), lines))]
        report.plots = [*plots, *report.plots]
        contents["sweep.html"] = as_page(report).encode(errors="replace")
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [str(folder / name) for name in contents]


def _as_csv(points: Sequence[dict[str, Any]]) -> bytes:
    """Return a row for each point, with a column for each swept setting, in full."""
    rows = [
        {key: value for key, value in point.items() if key != "settings"}
        | {
            key: value if isinstance(value, int | float | str) else json.dumps(value)
            for key, value in point["settings"].items()
        }
        for point in points
    ]
    return pd.DataFrame(rows).to_csv(index=False).encode(errors="replace")


def build_sweep_plots(result: dict[str, Any]) -> list[Plot]:
    """Return the loss against each swept setting, and against parameters and compute if models were swept."""
    groups = [group for group in result["groups"] if group["value"] is not None]
    if not groups:
        return []
    plots = [plot for key in groups[0]["settings"] if (plot := _plot_setting(key, groups, result["metric"]))]
    for name, key in (("parameters", "parameters"), ("compute", "flops")) if result["scaling"] else ():
        if result["scaling"][name]:
            plots.append(_plot_law(name, key, result["scaling"][name], result["metric"]))
    return plots


def _plot_setting(key: str, groups: list[dict[str, Any]], metric: str) -> Plot | None:
    """Return the loss against one setting, with a curve for each combination of the others."""
    texts = {as_key(group["settings"][key]): group for group in groups}
    values = [group["settings"][key] for group in texts.values()]
    if len(values) < 2:
        return None
    sizes = [group["parameters"] for group in texts.values()] if key == "model" else values
    are_numbers = all(isinstance(size, int | float) and not isinstance(size, bool) for size in sizes)
    if are_numbers and len({*sizes}) == len(texts):  # models may differ only in dropout
        place, ticks = _scale(sorted(sizes))
        places = {text: place(size) for text, size in zip(texts, sizes, strict=True)}
        axis = "parameters" if key == "model" else key
    else:
        places = {text: float(index) for index, text in enumerate(texts)}
        ticks = [Tick(index, textwrap.fill(group["shown"][key], 16)) for index, group in enumerate(texts.values())]
        axis = key

    def at(group: dict[str, Any]) -> float:
        return places[as_key(group["settings"][key])]

    curves: dict[str, list[dict[str, Any]]] = {}
    for group in sorted(groups, key=at):
        name = describe_settings(group, without=key) if len(group["shown"]) > 1 else METRICS[metric]
        curves.setdefault(name, []).append(group)
    drawn = [
        _curve(index, name, [at(group) for group in members], [group["value"] for group in members],
               [group["noise"] or 0.0 for group in members])
        for index, (name, members) in enumerate(curves.items())
    ]  # fmt: skip
    title = f"{METRICS[metric].capitalize()} against {key}"
    return _sweep_plot(SweepPlot, title, f"sweep_{key}", axis, metric, drawn, ticks)


def _plot_law(name: str, key: str, law: dict[str, Any], metric: str) -> Plot:
    """Return the loss of each size, the law and its band."""
    points, band = law["points"], law["band"]
    start, end = band[key][0], band[key][-1]
    powers = range(math.floor(math.log10(start)), math.ceil(math.log10(end)))
    round_sizes = [factor * 10.0**power for power in powers for factor in (1, 3)]
    ticks = [Tick(math.log10(size), short(size)) for size in round_sizes if start <= size <= end]
    x, sizes = np.log10(band[key]).tolist(), np.log10(points[key]).tolist()
    noise = [value or 0.0 for value in points["noise"]]
    dots = _curve(3, "best of each size, ± noise", sizes, points["loss"], noise)
    formula = _formula(law, _SIGNS[name], "alpha" if "E" in law else "b")
    curves = [
        dots._replace(records=pd.Series(dtype=float)),  # not joined by a line
        _curve(0, formula, x, band["loss"]),
        _curve(2, "95 % band of the law, from", x, band["low"]),
        _curve(2, "95 % band of the law, to", x, band["high"]),
    ]
    title = f"{METRICS[metric].capitalize()} against {name}"
    axis = {"parameters": "parameters without positions", "compute": "FLOPs"}[name]
    return _sweep_plot(LawPlot, title, f"sweep_by_{name}", axis, metric, curves, ticks)


def _curve(index: int, name: str, x: list[float], y: list[float], noise: list[float] | None = None) -> Curve:
    values = pd.Series(y, index=x)
    return Curve(index, name, values, values, pd.Series(dtype=float), False, noise and pd.Series(noise, index=x))


def _sweep_plot(
    kind: type[Plot], title: str, name: str, axis: str, metric: str, curves: list[Curve], x_ticks: list[Tick]
) -> Plot:
    edges = [value for curve in curves for one in (curve.trend, *_ends(curve)) for value in one]
    margin = 0.06 * (max(edges) - min(edges)) or 0.05 * abs(max(edges)) or 1.0
    x = [at for curve in curves for at in curve.trend.index]
    side = 0.04 * (max(x) - min(x)) or 0.5
    y = (min(edges) - margin, max(edges) + margin)
    y_ticks = [Tick(at, f"{at:,.6g}") for at in round_numbers(*y, 5)]
    key = "loss" if metric == "end_loss" else metric
    limits = (min(x) - side, max(x) + side)
    return kind(title, name, key, axis, None, axis, METRICS[metric], curves, limits, y, x_ticks, y_ticks, [], "")


def _ends(curve: Curve) -> list[pd.Series]:
    return [] if curve.noise is None else [curve.trend - curve.noise, curve.trend + curve.noise]


def _scale(values: Sequence[float]) -> tuple[Callable[[Any], float], list[Tick]]:
    """Return where numbers are on an axis, and its ticks: at each value."""
    is_log = values[0] > 0 and values[-1] / values[0] >= _LOG_FROM

    def place(value: Any) -> float:
        return math.log10(value) if is_log else float(value)

    return place, [Tick(place(value), short(value)) for value in values]
