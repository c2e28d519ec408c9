"""Plots of runs: loss against tokens, wall time and FLOPs, tokens per second, MFU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.comparing.noise import Curve
from hfgpt.comparing.run_history import PastRun
from hfgpt.model.flops import mfu

# Okabe and Ito's colours, which the colour-blind can tell apart too; dashes show what lies under an equal curve.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES, _MARKERS = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))), "osD^v"
_FALLING = ("loss", "eval_bits_per_byte")
_LABELS = {
    "step": "steps", "num_input_tokens_seen": "tokens", "wall_seconds": "seconds of training", "flops": "FLOPs",
    "loss": "loss (nats per token)", "tokens_per_second": "tokens per second", "mfu": "MFU",
    "eval_bits_per_byte": "bits per byte of held-out text",
}  # fmt: skip


def draw(report: Path, runs: Sequence[PastRun], comparable: bool = True) -> list[tuple[str, Path]]:
    """Write the plots that the runs have figures for, as PNG beside `report`; titles and paths.

    comparable: whether loss per token means the same in all; if not, bits per byte are drawn too.

    Where tokens are not known of all runs, steps stand in their place. MFU is drawn against one peak for all runs: the
    first that one of them names.
    """
    import matplotlib

    matplotlib.use("Agg")
    tokens = all(run.reach("num_input_tokens_seen") for run in runs)
    main = ("tokens", "num_input_tokens_seen") if tokens else ("steps", "step")
    plots = [(f"Loss against {name}", f"loss_{name}", "loss", axis) for name, axis in (main, ("time", "wall_seconds"))]
    plots.append(("Loss against FLOPs", "loss_flops", "loss", "flops"))
    if not comparable:
        warning = "per token, does not compare between these runs"
        plots = [(f"{title}: {warning}", name, key, axis) for title, name, key, axis in plots]
        plots.insert(0, (f"Bits per byte against {main[0]}", "bits_per_byte", "eval_bits_per_byte", main[1]))
    plots.append(("Tokens per second", "speed", "tokens_per_second", main[1]))
    peak, source = next((p for p in map(_peak, runs) if p[0]), (None, None))
    plots.append((f"MFU against {peak or 0:.4g} TFLOP/s ({source})", "mfu", "mfu", main[1]))
    written = []
    for title, name, key, axis in plots:
        path = report.with_name(f"{report.stem}_{name}.png")
        curves = [run.values(key, axis, evaluations=key.startswith("eval_")) for run in runs]
        curves = [_mfu(run, axis, peak) for run in runs] if key == "mfu" else curves
        if _plot(path, title, key, axis, runs, curves):
            written.append((title, path))
        else:
            path.unlink(missing_ok=True)  # of an earlier report, which this one would seem to mean
    return written


def _peak(run: PastRun) -> tuple[float | None, str | None]:
    return run.newest("peak_tflops"), run.newest("peak_source")


def _mfu(run: PastRun, axis: str, peak: float | None) -> Curve:
    """MFU against `peak`, whatever peak the run itself took."""
    x, rate = run.values("tokens_per_second", axis)
    if peak and len(x) and run.flops_per_token:
        return x, np.array([mfu(value, run.flops_per_token, peak, run.processes) for value in rate])
    x, own = run.values("mfu", axis)
    return x, own * ((_peak(run)[0] or 0.0) / (peak or 1.0))


def _plot(path: Path, title: str, key: str, axis: str, runs: Sequence[PastRun], curves: Sequence[Curve]) -> bool:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    low, high = [], []
    for index, (run, (x, y)) in enumerate(zip(runs, curves, strict=True)):
        look: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)], "label": run.name}
        if len(x):
            _curve(axes, x, y, key, linestyle=_DASHES[index % len(_DASHES)], **look)
            low.append(np.quantile(y, 0.002))
            high.append(_top(y) if key in _FALLING else np.quantile(y, 0.98))
        x, y = run.values("eval_loss", axis, evaluations=True) if key == "loss" else (x[:0], y[:0])
        if len(x):
            look["label"] = f"{run.name}, evaluation"
            size, marker = (5 if len(x) < 40 else 3), _MARKERS[index % len(_MARKERS)]
            axes.plot(x, y, marker, markersize=size, markeredgecolor="white", markeredgewidth=0.5, **look)
            low.append(y.min())
            high.append(_top(y))
    if high:
        bottom, top = (min(low) if key in _FALLING else 0.0), max(high)
        margin = 0.06 * (top - bottom) or 0.05 * abs(top) or 1.0
        axes.set_ylim(bottom - (margin if key in _FALLING else 0), top + margin)
        _dress(axes, title, key, axis)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return bool(high)


def _curve(axes: Any, x: np.ndarray, y: np.ndarray, key: str, color: str, label: str, linestyle: Any) -> None:
    """Each record faint, a running mean (of speeds: median) over a fiftieth of them in full colour."""
    size = max(1, len(y) // 50)
    if size > 1:
        axes.plot(x, y, color=color, linewidth=0.6, alpha=0.25)
        windows = np.lib.stride_tricks.sliding_window_view(y, size)
        y = windows.mean(axis=1) if key in _FALLING else np.median(windows, axis=1)
        x = x[size // 2 : size // 2 + len(y)]
    axes.plot(x, y, color=color, linewidth=1.6, linestyle=linestyle, label=label, marker="." if len(x) == 1 else "")


def _top(y: np.ndarray) -> float:
    """The steep beginning would press the rest flat: what comes after a twentieth of the run has to fit."""
    return float(max(np.quantile(y[min(len(y) // 20, len(y) - 1) :], 0.998), y[-1]))


def _dress(axes: Any, title: str, key: str, axis: str) -> None:
    from matplotlib import ticker

    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(_LABELS[axis])
    axes.set_ylabel(_LABELS[key])
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
    """12.5k, 3M, 10B: large counts as people say them."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{letter}"
    return f"{value:g}"
