"""How far two curves of losses lie apart at a point, and how far chance alone could set them apart."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]  # places, rising, and values

# No pair of runs tells differences below this part of the loss: rounding that has grown over some hundred steps, or
# another seed, moves a run by about as much, and a single pair has no second seed to show it.
FLOOR = 0.001
# Records in a window that a band needs, and that it should have.
FEWEST, ENOUGH = 5, 10
# Evaluations whose jumps tell the noise of one.
NEWEST = 8


class Level(NamedTuple):
    """A mean with its standard error (None: too few values to tell); `freedom`: independent values behind it."""

    value: float
    error: float | None
    freedom: float


class Gap(NamedTuple):
    """Second minus first, and the half width of the 95 % band around zero (None: not known).

    `how`: what the band was derived from. All in the unit of the curves.
    """

    first: float
    second: float
    band: float | None
    how: str

    @property
    def difference(self) -> float:
        return self.second - self.first

    @property
    def percent(self) -> float:
        return 100 * self.difference / self.first if self.first else 0.0

    @property
    def beyond_noise(self) -> bool | None:
        return None if self.band is None else abs(self.difference) > self.band


def level(x: np.ndarray, y: np.ndarray, centre: float) -> Level:
    """Height at `centre` of the straight line through the points, so that neither a trend nor uneven spacing counts.

    The error is that of the line there from the scatter of the points around it: s * sqrt(1/n + (centre - mean x)^2 /
    Sxx). Points that go with their neighbours count for fewer: n (1 - r) / (1 + r), with r their correlation.
    """
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
    """97.5 % point of Student's t (Cornish-Fisher expansion; within 2 % from 4 degrees on, 12 % low at 2)."""
    z, f = 1.959964, max(freedom, 1.0)
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)


def window(xs: list[np.ndarray], end: float) -> float:
    """Where the window that ends at `end` begins: the last tenth, more where a curve has few points, at most half."""
    for part in (0.9, 0.8, 0.7, 0.6):
        if all(np.count_nonzero((x > part * end) & (x <= end)) >= ENOUGH for x in xs):
            return part * end
    return 0.5 * end


def _within(curve: Curve, start: float, end: float) -> Curve:
    x, y = curve
    inside = (x > start) & (x <= end * (1 + 1e-9))
    return x[inside], y[inside]


def levels_at(curves: list[Curve], start: float, end: float) -> list[Level] | None:
    """Levels of curves over one window, all at one place, the mean of their points' places; None if one is empty."""
    parts = [_within(curve, start, end) for curve in curves]
    if not all(len(x) for x, _ in parts):
        return None
    centre = float(np.mean([x.mean() for x, _ in parts]))
    return [level(x, y, centre) for x, y in parts]


def on_common(curves: list[Curve]) -> list[Curve]:
    """The curves at the places that all of them have; as they are where there is none."""
    common = reduce(np.intersect1d, [x for x, _ in curves])
    return [(x[np.isin(x, common)], y[np.isin(x, common)]) for x, y in curves] if len(common) else curves


def evaluated_at(curves: list[Curve], end: float) -> float | None:
    """The last point up to `end` at which all were evaluated, or that all reach where their evaluations lie apart."""
    if not all(len(x) for x, _ in curves):
        return None
    at = min(end, *(x[-1] for x, _ in curves))
    if at < max(x[0] for x, _ in curves):
        return None
    common = reduce(np.intersect1d, [x[x <= at] for x, _ in curves])
    return float(common[-1] if len(common) and common[-1] >= 0.9 * at else at)


def apart(a: Curve, b: Curve, end: float, start: float) -> Gap | None:
    """The gap of two curves of training losses over the window from `start` to `end`; None if one has no point there.

    Step losses scatter with the text of the step. The band is t * sqrt(error a^2 + error b^2), both from `level`.
    """
    levels = levels_at([a, b], start, end)
    if levels is None:
        return None
    one, other = levels
    if one.error is None or other.error is None:
        return Gap(one.value, other.value, None, f"fewer than {FEWEST} records in the window")
    band = student(min(one.freedom, other.freedom)) * float(np.hypot(one.error, other.error))
    return Gap(one.value, other.value, max(band, FLOOR * abs(one.value)), "scatter of each run's step losses")


def paired(a: Curve, b: Curve, end: float, start: float) -> Gap | None:
    """Like `apart`, for runs that saw the same text in each step: the scatter of the text falls out of the differences.

    The band is t * the error of the mean difference over the steps that both recorded.
    """
    common, ia, ib = np.intersect1d(a[0], b[0], return_indices=True)
    ya, yb = a[1][ia], b[1][ib]
    inside = (common > start) & (common <= end * (1 + 1e-9))
    x, ya, yb = common[inside], ya[inside], yb[inside]
    if not len(x):
        return apart(a, b, end, start)
    if len(x) < FEWEST:
        return Gap(float(ya.mean()), float(yb.mean()), None, f"fewer than {FEWEST} steps that both recorded")
    mean = level(x, yb - ya, float(x.mean()))
    band = student(mean.freedom) * (mean.error or 0.0)
    first = float(ya.mean())
    return Gap(first, float(yb.mean()), max(band, FLOOR * abs(first)), "differences step by step on the same tokens")


def between_evaluations(a: Curve, b: Curve, end: float) -> tuple[float, Gap] | None:
    """The point up to `end` that both curves of evaluations reach, and their gap there; None if there is none.

    Between two evaluations the value is interpolated. Both score one and the same text, so the band is what a value
    jumps by from one evaluation to the next: the scatter of the newest ones around the line through their neighbours.
    """
    at = evaluated_at([a, b], end)
    if at is None:
        return None
    first, second = (float(np.interp(at, x, y)) for x, y in (a, b))
    one, other = (_jump(x[x <= at], y[x <= at]) for x, y in (a, b))
    if one is None or other is None:
        return at, Gap(first, second, None, "too few evaluations for a band")
    known = min(int(np.count_nonzero(x <= at)) for x, _ in (a, b))
    band = student(min(known, NEWEST) - 2) * float(np.hypot(one, other))
    return at, Gap(first, second, max(band, FLOOR * abs(first)), "jumps from evaluation to evaluation")


def _jump(x: np.ndarray, y: np.ndarray) -> float | None:
    """Standard deviation of one evaluation around its neighbours, from the newest; None below 4 evaluations."""
    x, y = x[-NEWEST:], y[-NEWEST:]
    if len(x) < 4:
        return None
    weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    rest = y[1:-1] - (1 - weight) * y[:-2] - weight * y[2:]
    return float(np.sqrt(np.mean(rest**2 / (1 + weight**2 + (1 - weight) ** 2))))
