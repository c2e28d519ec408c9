"""Plots of runs: loss against tokens, wall time and FLOPs, tokens per second, MFU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.run_history import PastRun

# Okabe and Ito's colours, which the colour-blind can tell apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LOSS = "loss (nats per token)"
_UNITS = {"step": "step", "num_input_tokens_seen": "tokens", "wall_seconds": "seconds of training", "flops": "FLOPs"}


def draw(report: Path, runs: Sequence[PastRun]) -> list[tuple[str, Path]]:
    """Write the plots that the runs have figures for, as PNG beside `report`; titles and paths.

    Where tokens are not known of all runs, losses stand over steps instead.
    """
    import matplotlib

    matplotlib.use("Agg")
    tokens = all(run.reach("num_input_tokens_seen") for run in runs)
    first = ("tokens", "num_input_tokens_seen") if tokens else ("steps", "step")
    plots = [(f"loss against {name}", name, "loss", axis) for name, axis in (first, ("time", "wall_seconds"), ("flops", "flops"))]
    plots += [("tokens per second", "speed", "tokens_per_second", first[1]), ("MFU", "mfu", "mfu", first[1])]
    written = []
    for title, name, key, axis in plots:
        path = report.with_name(f"{report.stem}_{'loss_' * (key == 'loss')}{name}.png")
        if _plot(path, title, key, axis, runs):
            written.append((title.replace("flops", "FLOPs"), path))
        else:
            path.unlink(missing_ok=True)  # of an earlier report, which this one would seem to mean
    return written


def _plot(path: Path, title: str, key: str, axis: str, runs: Sequence[PastRun]) -> bool:
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    lows, highs, drawn = [], [], False
    for index, run in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)]
        x, y = run.values(key, axis)
        if len(x):
            drawn = True
            _curve(axes, x, y, colour, run.name)
            lows.append(np.quantile(y, 0.002))
            highs.append(_start_of_interest(y) if key == "loss" else np.quantile(y, 0.99))
        if key == "loss":
            x, y = run.values("eval_loss", axis, evaluations=True)
            if len(x):
                drawn = True
                axes.plot(x, y, "o", color=colour, markersize=4, markeredgecolor="white", label=f"{run.name}, evaluation")
                lows.append(y.min())
                highs.append(_start_of_interest(y))
    if drawn:
        _dress(axes, title, key, axis, runs, ticker)
        span = max(highs) - min(lows)
        low = min(lows) - 0.05 * span if key == "loss" else 0
        axes.set_ylim(low, max(highs) + 0.08 * (span or 1) if key == "loss" else 1.15 * max(highs) or 1)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return drawn


def _curve(axes: Any, x: np.ndarray, y: np.ndarray, colour: str, name: str) -> None:
    """Each record faint, the running mean over a fiftieth of them in full colour."""
    size = max(1, len(y) // 50)
    if size == 1:
        axes.plot(x, y, color=colour, linewidth=1.5, label=name)
        return
    axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.25)
    kernel = np.ones(size) / size
    middle = (len(x) - size + 1, size // 2)
    axes.plot(x[middle[1] : middle[1] + middle[0]], np.convolve(y, kernel, "valid"), color=colour, linewidth=1.7, label=name)


def _start_of_interest(y: np.ndarray) -> float:
    """The steep beginning would press the rest of the curve flat: the loss after a fiftieth of the run is the top."""
    return float(max(y[min(len(y) // 50, len(y) - 1) :].max(), y[-1]))


def _dress(axes: Any, title: str, key: str, axis: str, runs: Sequence[PastRun], ticker: Any) -> None:
    peaks = {(run.newest("peak_tflops"), run.newest("peak_source")) for run in runs} - {(None, None)}
    if key == "mfu":
        if len(peaks) > 1:
            title += ", each run against its own peak: the figures do not compare"
        elif peaks:
            title += f" against {next(iter(peaks))[0]:.4g} TFLOP/s ({next(iter(peaks))[1]})"
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.set_title(title.replace("flops", "FLOPs"), loc="left", fontsize=10)
    axes.set_xlabel(_UNITS[axis])
    axes.set_ylabel({"loss": _LOSS, "mfu": "MFU", "tokens_per_second": "tokens per second"}[key])
    if axis in ("num_input_tokens_seen", "flops"):
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep="") if axis != "flops" else ticker.ScalarFormatter(True))
    if key == "tokens_per_second":
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
