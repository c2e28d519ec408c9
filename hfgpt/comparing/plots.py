"""Plots of runs: loss against tokens, time and FLOPs, tokens per second, MFU."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from hfgpt.comparing.runs import PastRun
from hfgpt.model.flops import mfu

PLOT_NAMES = ("bits_per_byte", "loss_tokens", "loss_steps", "loss_time", "loss_flops", "speed", "mfu")
# Okabe and Ito's colours, which the colour-blind can tell apart too; dashes show what is under an equal curve.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES, _MARKERS = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))), "osD^v"
_FALLING = ("loss", "eval_bits_per_byte")
_LABELS = {
    "step": "steps", "num_input_tokens_seen": "tokens", "wall_seconds": "seconds of training", "flops": "FLOPs",
    "loss": "loss (nats per token)", "tokens_per_second": "tokens per second", "mfu": "MFU",
    "eval_bits_per_byte": "bits per byte of held-out text",
}  # fmt: skip


class Plot(NamedTuple):
    """A finished plot; `name`: one of PLOT_NAMES."""

    title: str
    name: str
    png: bytes


def draw_plots(runs: Sequence[PastRun], comparable: bool = True) -> list[Plot]:
    """Draw the plots that the runs have values for.

    comparable: whether loss per token means the same in all; if not, bits per byte are drawn too.

    If the tokens of a run are not known, steps are used instead. MFU is drawn against one peak for all runs: the first
    that a run names.
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
    peaks = [(peak, run.newest("peak_source")) for run in runs if (peak := run.newest("peak_tflops"))]
    if peaks:
        specs.append((f"MFU against {peaks[0][0]:.4g} TFLOP/s ({peaks[0][1]})", "mfu", "mfu", axis))
    plots = []
    for title, name, key, axis in specs:
        curves = [_mfu(run, axis, peaks[0][0]) if key == "mfu" else run.curve(key, axis) for run in runs]
        if png := _draw(title, key, axis, runs, curves):
            plots.append(Plot(title, name, png))
    return plots


def _mfu(run: PastRun, axis: str, peak: float) -> pd.Series:
    """Return the MFU against `peak`, whatever peak the run itself used."""
    rates = run.curve("tokens_per_second", axis)
    if len(rates) and run.flops_per_token:
        return mfu(rates, run.flops_per_token, peak, run.processes)
    return run.curve("mfu", axis) * ((run.newest("peak_tflops") or 0.0) / peak)


def _draw(title: str, key: str, axis: str, runs: Sequence[PastRun], curves: Sequence[pd.Series]) -> bytes | None:
    """Return a plot as PNG; None if no run has a value."""
    from matplotlib.figure import Figure  # takes a second; used like this it needs no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    low, high = [], []
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        colour = _COLOURS[index % len(_COLOURS)]
        if len(curve):
            _draw_curve(axes, curve, key, color=colour, label=run.name, linestyle=_DASHES[index % len(_DASHES)])
            low.append(curve.quantile(0.002))
            high.append(_top(curve) if key in _FALLING else curve.quantile(0.98))
        if key == "loss" and len(evaluations := run.curve("eval_loss", axis)):
            axes.plot(
                evaluations, _MARKERS[index % len(_MARKERS)], color=colour, label=f"{run.name}, evaluation",
                markersize=5 if len(evaluations) < 40 else 3, markeredgecolor="white", markeredgewidth=0.5,
            )  # fmt: skip
            low.append(evaluations.min())
            high.append(_top(evaluations))
    png = io.BytesIO()
    if high:
        bottom, top = (min(low) if key in _FALLING else 0.0), max(high)
        margin = 0.06 * (top - bottom) or 0.05 * abs(top) or 1.0
        axes.set_ylim(bottom - (margin if key in _FALLING else 0), top + margin)
        _style(axes, title, key, axis)
        figure.savefig(png, dpi=120)
    return png.getvalue() or None


def _draw_curve(axes: Any, curve: pd.Series, key: str, **look: Any) -> None:
    """Draw each record faint, and a running mean (of speeds: median) over a fiftieth of them in full colour."""
    size = max(1, len(curve) // 50)
    if size > 1:
        axes.plot(curve, color=look["color"], linewidth=0.6, alpha=0.25)
        windows = curve.rolling(size, center=True)
        curve = (windows.mean() if key in _FALLING else windows.median()).dropna()
    axes.plot(curve, linewidth=1.6, marker="." if len(curve) == 1 else "", **look)


def _top(curve: pd.Series) -> float:
    """Return the highest value after a twentieth of the run, as the steep beginning would press the rest flat."""
    rest = curve.iloc[min(len(curve) // 20, len(curve) - 1) :]
    return float(max(rest.quantile(0.998), curve.iloc[-1]))


def _style(axes: Any, title: str, key: str, axis: str) -> None:
    from matplotlib import ticker

    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlabel=_LABELS[axis], ylabel=_LABELS[key])
    if axis != "flops":
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))
    if key == "mfu":
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    if key == "tokens_per_second":
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper right" if key in _FALLING else "best")


def _short(value: float) -> str:
    """Write large counts as is usual: 12.5k, 3M, 10B."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{letter}"
    return f"{value:g}"
