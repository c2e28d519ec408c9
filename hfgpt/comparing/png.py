"""Draw a plot as PNG."""

from __future__ import annotations

import io
import os
from typing import Any

from hfgpt.comparing.plots import Curve, Plot
from hfgpt.errors import UserError

# Okabe and Ito's palette for the color-blind; dashes keep a curve visible beneath an equal one.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES, _MARKERS = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))), "osD^v"


def draw(plot: Plot, dpi: int = 120) -> bytes:
    """Return a plot as PNG, 8 x 4.5 inches, with 64 colors to keep the file small."""
    try:
        from PIL import Image  # optional

        figure = new_figure()
    except ImportError as error:
        fix = "pip install matplotlib pillow, or write a .html, which needs neither"
        raise UserError(f"PNG plots cannot be drawn ({error}); {fix}") from None
    axes = figure.subplots()
    for curve in plot.curves:
        _draw_curve(axes, curve, alone=len(plot.curves) == 1)
    for mark in plot.marks:
        axes.axvline(mark.at, color="0.6", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)
    axes.set_title(f"{plot.title}\n{_literal(plot.note)}".strip(), loc="left", fontsize=10)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label, xlim=_with_margin(*plot.x), ylim=plot.y)
    axes.set_xticks([t.at for t in plot.x_ticks], [f"{t.label}\n{t.below}".strip() for t in plot.x_ticks])
    axes.set_yticks([t.at for t in plot.y_ticks], [t.label for t in plot.y_ticks])
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper right" if plot.is_falling else "best")
    drawn, png = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=dpi)
    image = Image.open(drawn).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(png, "PNG", optimize=True)
    return png.getvalue()


def new_figure() -> Any:
    """Return an empty figure of matplotlib, 8 x 4.5 inches, which needs no display.

    matplotlib refuses to be imported with an MPLBACKEND that it does not have, such as the one that notebooks give to
    the commands that they start. This kind of figure uses none.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure  # takes a second to import
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure(figsize=(8, 4.5), layout="constrained")


def _draw_curve(axes: Any, curve: Curve, alone: bool) -> None:
    colour, name = _COLOURS[curve.run_index % len(_COLOURS)], _literal(curve.name)
    training, evaluation = (name, f"{name}, evaluation")
    if alone and curve.noise is None:
        training, evaluation = "training", "evaluation"
    if len(curve.records):
        if curve.is_smoothed:
            # Without antialiasing, the file is a third of the size.
            axes.plot(curve.records, color=colour, linewidth=0.6, alpha=0.25, antialiased=False)
        dash, marker = _DASHES[curve.run_index % len(_DASHES)], "." if len(curve.trend) == 1 else ""
        axes.plot(curve.trend, color=colour, linewidth=1.6, linestyle=dash, marker=marker, label=training)
    if curve.noise is not None:
        bars = {"fmt": _MARKERS[curve.run_index % len(_MARKERS)], "markersize": 5, "capsize": 3, "elinewidth": 1}
        label = "" if len(curve.records) else name
        axes.errorbar(curve.trend.index, curve.trend, curve.noise, color=colour, label=label, **bars)
    if len(curve.evaluations):
        axes.plot(
            curve.evaluations, _MARKERS[curve.run_index % len(_MARKERS)], color=colour, label=evaluation,
            markersize=5 if len(curve.evaluations) < 40 else 3, markeredgecolor="white", markeredgewidth=0.5,
        )  # fmt: skip


def _literal(name: str) -> str:
    """Escape a name so that matplotlib shows it literally, neither as mathematics nor hidden."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _with_margin(start: float, end: float) -> tuple[float, float]:
    margin = 0.03 * (end - start)
    return start - margin, end + margin
