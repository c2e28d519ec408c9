"""Show a sweep: a table for a terminal, plots of loss against each setting and over sizes, PNG files and one page."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from hfgpt.comparing import png
from hfgpt.comparing.comparison import compare
from hfgpt.comparing.page import as_page
from hfgpt.comparing.plots import Curve, Plot, Tick, round_numbers, short
from hfgpt.comparing.report import build_report
from hfgpt.comparing.sweep import METRICS, SweptRun, describe_settings
from hfgpt.comparing.values import UNKNOWN, format_value
from hfgpt.comparing.verdict import Finding
from hfgpt.errors import UserError
from hfgpt.files import write_whole

WIDTH = 115  # of the table
_LOG_FROM = 5.0  # values that span this factor are on a logarithmic axis
_SIGNS = {"parameters": "N", "compute": "C"}


@dataclass(frozen=True)
class SweepPlot(Plot):
    """A plot over a setting, whose values are at its ticks."""

    def describe_place(self, at: float) -> str:
        nearest = min(self.x_ticks, key=lambda tick: abs(tick.at - at))
        return f"{self.axis} {nearest.label}"


def as_text(result: dict[str, Any]) -> str:
    """Return the table of a sweep, best point first, its verdict and its laws."""
    metric = result["metric"]
    grid = Table(box=None, pad_edge=False)
    grid.add_column("point", overflow="fold")
    for name in (METRICS.get(metric, "loss"), "noise", "std of seeds", "seeds", "tokens/s", "parameters", "state"):
        grid.add_column(name, justify="right" if name != "state" else "left")
    for group in result["groups"]:
        numbers = [group["value"], group["noise"], group["std"]]
        cells = [UNKNOWN if value is None else f"{value:.4f}" for value in numbers]
        cells[1] = f"±{cells[1]}" if group["noise"] is not None else UNKNOWN
        rate, size = (format_value(group[key], key) for key in ("tokens_per_second", "parameters"))
        states = "diverged" if group["why_not"] else ", ".join(group["states"])
        grid.add_row(describe_settings(group["settings"]), *cells, str(group["count"]), rate, size, states)
    screen = io.StringIO()
    # Plain text: names and settings must not be read as markup.
    console = Console(file=screen, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(grid)
    table = "\n".join(line.rstrip() for line in screen.getvalue().splitlines())
    reasons = [
        f"{describe_settings(group['settings'])}: {why}" for group in result["groups"] if (why := group["why_not"])
    ]
    return "\n".join([table, "", *reasons, result["verdict"], *law_lines(result), *_notes(result)])


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
        values = {of: f"{law[of]:.3g} ({low:.3g} to {high:.3g})" for of, (low, high) in law["bands"].items()}
        formula = f"E + A / {sign}^alpha" if "E" in law else f"a / {sign}^b"
        ahead = law["ahead"]
        at = next(value for key, value in ahead.items() if key not in ("loss", "band"))
        low, high = ahead["band"]
        lines.append(
            f"over {name}: loss = {formula}, {', '.join(f'{of} = {value}' for of, value in values.items())}; at "
            f"{sign} = {short(at)}: {ahead['loss']:.3f} ({low:.3f} to {high:.3f})"
        )
    return lines


def write_sweep(folder: Path, points: Sequence[SweptRun], result: dict[str, Any]) -> list[str]:
    """Write sweep.html and the plots as PNG into `folder`; return the names of all files."""
    runs = [point.run for point in points if point.run and point.has_ended]
    plots = build_sweep_plots(result)
    written = []
    try:
        for plot in plots:
            content = png.draw(plot)
            write_whole(folder / f"{plot.name}.png", content)
            written.append(str(folder / f"{plot.name}.png"))
    except UserError:  # no matplotlib: the page needs none
        pass
    if runs:
        report = build_report(runs, compare(runs), with_plots=True)
        lines = [line for line in as_text(result).split(result["verdict"])[0].splitlines() if line]
        report.verdicts = [("sweep", Finding(result["verdict"], law_lines(result) + _notes(result), lines))]
        report.plots = [*plots, *report.plots]
        write_whole(folder / "sweep.html", as_page(report).encode(errors="replace"))
        written.append(str(folder / "sweep.html"))
    return written


def build_sweep_plots(result: dict[str, Any]) -> list[SweepPlot]:
    """Return the loss against each swept setting, and against parameters and compute if models were swept."""
    groups = [group for group in result["groups"] if group["value"] is not None]
    if not groups:
        return []
    plots = [plot for key in groups[0]["settings"] if (plot := _plot_setting(key, groups, result["metric"]))]
    for name, key in (("parameters", "parameters"), ("compute", "flops")) if result["scaling"] else ():
        if result["scaling"][name]:
            plots.append(_plot_law(name, key, result["scaling"][name], result["metric"]))
    return plots


def _plot_setting(key: str, groups: list[dict[str, Any]], metric: str) -> SweepPlot | None:
    """Return the loss against one setting, with a curve for each combination of the others."""
    texts = {json.dumps(group["settings"][key], sort_keys=True): group for group in groups}
    values = [group["settings"][key] for group in texts.values()]
    if len(values) < 2:
        return None
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if is_number:
        place, ticks = _scale(sorted(values))
    elif key == "model":
        place, ticks = _scale(sorted({group["parameters"] for group in groups}))
    else:
        order = list(texts)
        ticks = [Tick(index, shortened(value)) for index, value in enumerate(values)]

        def place(value: Any) -> float:
            return float(order.index(json.dumps(value, sort_keys=True)))

    def at(group: dict[str, Any]) -> float:
        return place(group["parameters"] if key == "model" and not is_number else group["settings"][key])

    curves: dict[str, list[dict[str, Any]]] = {}
    for group in sorted(groups, key=at):
        others = {name: value for name, value in group["settings"].items() if name != key}
        curves.setdefault(describe_settings(others) if others else METRICS[metric], []).append(group)
    drawn = [
        _curve(index, name, [at(group) for group in members], [group["value"] for group in members],
               [group["noise"] or 0.0 for group in members])
        for index, (name, members) in enumerate(curves.items())
    ]  # fmt: skip
    label = "parameters" if key == "model" else key
    return _sweep_plot(f"{METRICS[metric].capitalize()} against {key}", f"sweep_{key}", label, metric, drawn, ticks)


def _plot_law(name: str, key: str, law: dict[str, Any], metric: str) -> SweepPlot:
    """Return the loss of each size, the law and its band."""
    place, ticks = _scale(law["band"][key], labels=6)
    points = law["points"]
    x = [place(value) for value in law["band"][key]]
    sizes = [place(size) for size in points[key]]
    curves = [
        _curve(0, "best of each size", sizes, points["loss"], [0.0] * len(sizes)),
        _curve(1, "law, from", x, law["band"]["low"]),
        _curve(2, "law, to", x, law["band"]["high"]),
    ]  # fmt: skip
    title = f"{METRICS[metric].capitalize()} against {name}, and the 95 % band of the law"
    return _sweep_plot(title, f"sweep_by_{name}", name, metric, curves, ticks)


def _curve(index: int, name: str, x: list[float], y: list[float], noise: list[float] | None = None) -> Curve:
    values = pd.Series(y, index=x)
    return Curve(index, name, values, values, pd.Series(dtype=float), False, noise and pd.Series(noise, index=x))


def _sweep_plot(title: str, name: str, axis: str, metric: str, curves: list[Curve], x_ticks: list[Tick]) -> SweepPlot:
    edges = [value for curve in curves for one in (curve.trend, *_ends(curve)) for value in one]
    margin = 0.06 * (max(edges) - min(edges)) or 0.05 * abs(max(edges)) or 1.0
    x = [at for curve in curves for at in curve.trend.index]
    side = 0.04 * (max(x) - min(x)) or 0.5
    y = (min(edges) - margin, max(edges) + margin)
    y_ticks = [Tick(at, f"{at:,.6g}") for at in round_numbers(*y, 5)]
    key = "loss" if metric == "end_loss" else metric
    limits = (min(x) - side, max(x) + side)
    return SweepPlot(title, name, key, axis, None, axis, METRICS[metric], curves, limits, y, x_ticks, y_ticks, [], "")


def _ends(curve: Curve) -> list[pd.Series]:
    return [] if curve.noise is None else [curve.trend - curve.noise, curve.trend + curve.noise]


def _scale(values: Sequence[float], labels: int = 0) -> tuple[Callable[[Any], float], list[Tick]]:
    """Return where numbers are on an axis, and its ticks: at each value, or about `labels` of them."""
    is_log = values[0] > 0 and values[-1] / values[0] >= _LOG_FROM

    def place(value: Any) -> float:
        return math.log10(value) if is_log else float(value)

    shown = values if not labels else values[:: max(1, len(values) // labels)]
    return place, [Tick(place(value), short(value)) for value in shown]


def shortened(value: Any) -> str:
    """Return a value as the label of a tick."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 16 else f"...{text[-13:]}"
