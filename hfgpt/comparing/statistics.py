"""How far apart two loss curves are at a point, and how far apart noise alone could put them.

A curve is a pandas Series: values by position (step, tokens, FLOPs or seconds), in rising order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

# No pair of runs can show differences below this fraction of the loss: rounding that grew over a few hundred steps, or
# another seed, moves a run by about as much, and a single pair has no second seed to reveal it.
FLOOR = 0.001
# How many records a band needs in its window, and how many it should have.
FEWEST, ENOUGH = 5, 10
# How many of the newest evaluations are used to estimate the noise of one.
NEWEST = 8


class Level(NamedTuple):
    """A mean with its standard error (None: too few values) and degrees of freedom."""

    value: float
    error: float | None
    freedom: float


def make_gap(first: float, second: float, band: float | None, how: str) -> dict[str, Any]:
    """Return how far apart two values are, as in the JSON result.

    band: half the width of the 95 % band around zero, in the unit of the curves, at least FLOOR; None: unknown.
    how: what the band was derived from.
    """
    difference = second - first
    band = None if band is None else max(band, FLOOR * abs(first))
    return {
        "first": first,
        "second": second,
        "band": band,
        "how": how,
        "percent": 100 * difference / first if first else 0.0,
        "beyond_noise": None if band is None else abs(difference) > band,
    }


def level(curve: pd.Series, centre: float) -> Level:
    """Return the value at `centre` of a line fitted to a curve, so that neither trend nor uneven spacing biases it.

    The error is the error of the line there, from the scatter of the points around it: s * sqrt(1/n + (centre - mean
    x)^2 / Sxx). Correlated neighbours reduce the effective number of points: n (1 - r) / (1 + r), with r their
    correlation.
    """
    x, y = curve.index.to_numpy(), curve.to_numpy()
    n = len(x)
    if n < FEWEST or np.ptp(x) == 0:
        return Level(float(np.mean(y)) if n else float("nan"), None, 0)
    spread = float(np.sum((x - x.mean()) ** 2))
    slope = float(np.sum((x - x.mean()) * (y - y.mean()))) / spread
    rest = y - y.mean() - slope * (x - x.mean())
    scatter = float(np.sum(rest**2))
    r = float(np.sum(rest[1:] * rest[:-1])) / scatter if scatter > 0 else 0.0
    r = min(max(r, 0.0), 0.99)
    independent = max(n * (1 - r) / (1 + r), 3.0)
    error = np.sqrt(scatter / (n - 2) * (1 / independent + (centre - x.mean()) ** 2 / spread))
    return Level(float(y.mean() + slope * (centre - x.mean())), float(error), independent - 2)


def student(freedom: float) -> float:
    """Return the 97.5 % point of Student's t (Cornish-Fisher; within 2 % from 4 degrees on, 12 % low at 2)."""
    z, f = 1.959964, max(freedom, 1.0)
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)


def student_of_few(freedom: float) -> float:
    """Return the same also for few repeats, such as seeds: below 4 degrees from a table."""
    return float(np.interp(freedom, (1, 2, 3, 4), (12.706, 4.303, 3.182, 2.776))) if freedom < 4 else student(freedom)


def within(curve: pd.Series, start: float, end: float) -> pd.Series:
    """Return the part of a curve after `start`, up to and including `end`."""
    return curve[(curve.index > start) & (curve.index <= end * (1 + 1e-9))]


def window_start(curves: list[pd.Series], end: float) -> float:
    """Return where the window up to `end` starts: the last tenth, more if a curve has few points, at most half."""
    for part in (0.9, 0.8, 0.7, 0.6):
        if all(len(within(curve, part * end, end)) >= ENOUGH for curve in curves):
            return part * end
    return 0.5 * end


def levels_at(curves: list[pd.Series], start: float, end: float) -> list[Level] | None:
    """Return the levels of curves over a window, at the mean position of all points; None if one has no points."""
    parts = [within(curve, start, end) for curve in curves]
    if any(part.empty for part in parts):
        return None
    centre = float(np.mean([part.index.to_numpy().mean() for part in parts]))
    return [level(part, centre) for part in parts]


def at_common_places(curves: list[pd.Series]) -> list[pd.Series]:
    """Return the curves at the positions that they all have; unchanged if there are none."""
    common = pd.concat(curves, axis=1, join="inner")
    return curves if common.empty else [common.iloc[:, i] for i in range(len(curves))]


def last_common_evaluation(curves: list[pd.Series], end: float) -> float | None:
    """Return the last position up to `end` where all curves have an evaluation; else the last that all reach."""
    if any(curve.empty for curve in curves):
        return None
    at = min(end, *(curve.index[-1] for curve in curves))
    if at < max(curve.index[0] for curve in curves):
        return None
    common = pd.concat(curves, axis=1, join="inner").index
    common = common[common <= at]
    return float(common[-1] if len(common) and common[-1] >= 0.9 * at else at)


def value_at(curve: pd.Series, at: float) -> float:
    """Return the value at a position, interpolated between two points."""
    return float(np.interp(at, curve.index, curve))


def unpaired_gap(a: pd.Series, b: pd.Series, start: float, end: float) -> dict[str, Any] | None:
    """Return how far apart two training curves are from `start` to `end`; None if one has no point there.

    Step losses scatter because each step has other text. The band is t * sqrt(error a^2 + error b^2), both from
    `level`.
    """
    levels = levels_at([a, b], start, end)
    if levels is None:
        return None
    one, other = levels
    if one.error is None or other.error is None:
        return make_gap(one.value, other.value, None, f"fewer than {FEWEST} records in the window")
    band = student(min(one.freedom, other.freedom)) * float(np.hypot(one.error, other.error))
    return make_gap(one.value, other.value, band, "scatter of each run's step losses")


def paired_gap(a: pd.Series, b: pd.Series, start: float, end: float) -> dict[str, Any] | None:
    """Like `unpaired_gap`, for runs with the same text in each step, so that their scatter cancels.

    The band is t * the error of the mean difference over the steps that both runs recorded.
    """
    both = within(pd.concat([a, b], axis=1, join="inner"), start, end)
    if both.empty:
        return unpaired_gap(a, b, start, end)
    ya, yb = both.to_numpy().T.copy()  # contiguous, which numpy adds up more exactly
    if len(both) < FEWEST:
        return make_gap(float(ya.mean()), float(yb.mean()), None, f"fewer than {FEWEST} steps that both recorded")
    mean = level(pd.Series(yb - ya, both.index), float(both.index.to_numpy().mean()))
    band = student(mean.freedom) * (mean.error or 0.0)
    return make_gap(float(ya.mean()), float(yb.mean()), band, "differences step by step on the same tokens")


def evaluation_gap(a: pd.Series, b: pd.Series, at: float) -> dict[str, Any]:
    """Return how far apart two evaluation curves are at a position that both reach.

    Both score the same text, so the band is how much the value jumps from one evaluation to the next: the scatter of
    the newest ones around the line through their neighbors.
    """
    first, second = value_at(a, at), value_at(b, at)
    a, b = a[a.index <= at], b[b.index <= at]
    one, other = _evaluation_scatter(a), _evaluation_scatter(b)
    if one is None or other is None:
        return make_gap(first, second, None, "too few evaluations for a band")
    band = student(min(len(a), len(b), NEWEST) - 2) * float(np.hypot(one, other))
    return make_gap(first, second, band, "jumps from evaluation to evaluation")


def independent_gap(a: Level, b: Level, how: str) -> dict[str, Any]:
    """Return how far apart two values are whose errors do not depend on each other (Welch's test)."""
    if a.error is None or b.error is None:
        return make_gap(a.value, b.value, None, how)
    error = float(np.hypot(a.error, b.error))
    parts = a.error**4 / max(a.freedom, 1) + b.error**4 / max(b.freedom, 1)
    return make_gap(a.value, b.value, student_of_few(error**4 / parts if parts else 1.0) * error, how)


def newest_evaluation(curve: pd.Series) -> Level:
    """Return the last evaluation of a run; its error is how far evaluations jump from one to the next."""
    return Level(float(curve.iloc[-1]), _evaluation_scatter(curve), min(len(curve), NEWEST) - 2)


def _evaluation_scatter(curve: pd.Series) -> float | None:
    """Return the standard deviation of one of the newest evaluations around its neighbors; None for fewer than 4."""
    x, y = curve.index.to_numpy()[-NEWEST:], curve.to_numpy()[-NEWEST:]
    if len(x) < 4:
        return None
    weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    rest = y[1:-1] - (1 - weight) * y[:-2] - weight * y[2:]
    return float(np.sqrt(np.mean(rest**2 / (1 + weight**2 + (1 - weight) ** 2))))
