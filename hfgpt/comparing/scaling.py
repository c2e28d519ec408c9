"""How the loss falls with the size of a model, and with compute: two laws, each with its band, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DRAWS = 1000  # of the losses within their noise, for bands
FEWEST_SIZES = {"parameters": 4, "compute": 3}
ALPHAS = np.geomspace(0.01, 3.0, 800)  # exponents that are tried: steps of 0.7 %
FURTHER = 4.0  # the loss is extrapolated to this many times the largest size

Coefficients = np.ndarray  # one row per draw


def fit_scaling(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the law `loss = E + A / N^alpha` of parameters N, and `loss = a / C^b` of compute C in FLOPs.

    points: one per size, each with `parameters`, `flops`, `tokens`, `loss`, its `noise` or None, and for several seeds
    `std` and `count`. A law is None if it cannot be right, and `why_not` says why.
    """
    laws: dict[str, Any] = {"why_not": {}}
    for name, key, fit in (("parameters", "parameters", _fit_size), ("compute", "flops", _fit_power)):
        known = sorted((point for point in points if point.get(key)), key=lambda point: point[key])
        law = _law(name, known, key, fit)
        laws[name] = None if isinstance(law, str) else law
        if isinstance(law, str):
            laws["why_not"][name] = law
    return laws


def _law(
    name: str, points: list[dict[str, Any]], key: str, fit: Callable[[np.ndarray, np.ndarray], Coefficients]
) -> dict[str, Any] | str:
    """Return a law, or why there is none."""
    x, losses = (np.array([point[of] for point in points], dtype=float) for of in (key, "loss"))
    if len(set(x)) < FEWEST_SIZES[name]:
        return f"{len(set(x))} sizes with a loss; it takes {FEWEST_SIZES[name]}"
    tokens = [point["tokens"] or 0 for point in points]
    if name == "parameters" and max(tokens) > 1.01 * min(tokens):
        return f"the sizes were trained on {min(tokens):,.0f} to {max(tokens):,.0f} tokens, which also moves the loss"
    best = fit(x, losses[None])
    if not np.isfinite(best).all():
        return "the loss does not fall with the size as a power law would"
    fitted = curve(best, x)[0]
    drawn = fit(x, _draw(points, losses, fitted, best.shape[1]))
    drawn = drawn[np.isfinite(drawn).all(axis=1)]
    if len(drawn) < 0.95 * DRAWS:
        return "noise and scatter are too large to tell the exponent: within them, other losses fit none"
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    names = ("E", "A", "alpha") if best.shape[1] == 3 else ("a", "b")
    grid = np.geomspace(x[0], FURTHER * x[-1], 50)
    bands = np.percentile(curve(drawn, grid), [2.5, 97.5], axis=0)
    return {
        **{of: float(value) for of, value in zip(names, best[0], strict=True)},
        "bands": {of: [float(a), float(b)] for of, a, b in zip(names, low, high, strict=True)},
        "points": {key: x.tolist(), "loss": losses.tolist(), "fitted": fitted.tolist(),
                   "noise": [point.get("noise") for point in points]},
        "ahead": {key: grid[-1], "loss": float(curve(best, grid)[0, -1]), "band": bands[:, -1].tolist()},
        "band": {key: grid.tolist(), "loss": curve(best, grid)[0].tolist(), "low": bands[0].tolist(),
                 "high": bands[1].tolist()},
    }  # fmt: skip


def _draw(points: list[dict[str, Any]], losses: np.ndarray, fitted: np.ndarray, parameters: int) -> np.ndarray:
    """Return losses as other seeds could have given them: with the noise of seeds, or the scatter around the law.

    The larger of the two counts, because a law may miss by more than its seeds differ. Few seeds or sizes know their
    noise badly, so each draw also draws that (a parametric bootstrap with Student's t).
    """
    freedom = len(losses) - parameters
    error = np.full(len(losses), np.sqrt(np.sum((losses - fitted) ** 2) / freedom))
    counts = np.array([point.get("count", 1) for point in points])
    if counts.min() > 1:
        pooled = np.sqrt(np.average([point["std"] ** 2 for point in points], weights=counts - 1))
        if np.mean(pooled / np.sqrt(counts)) > error.mean():
            error, freedom = pooled / np.sqrt(counts), int(np.sum(counts - 1))
    random = np.random.default_rng(0)
    scale = np.sqrt(freedom / random.chisquare(freedom, (DRAWS, 1)))
    return np.asarray(fitted + error * scale * random.standard_normal((DRAWS, len(losses))))


def curve(coefficients: Coefficients, x: np.ndarray) -> np.ndarray:
    """Return the loss at each `x` (columns) by each law (rows): E, A, alpha, or a, b."""
    *floor, factor, power = coefficients.T[:, :, None]
    return np.asarray(factor * x[None] ** -power + (floor[0] if floor else 0.0))


def _fit_size(x: np.ndarray, losses: np.ndarray) -> Coefficients:
    """Return E >= 0, A > 0 and alpha of least squares for each row of losses; NaN where alpha has no inner optimum."""
    middle = float(np.exp(np.log(x).mean()))
    basis = (x / middle) ** -ALPHAS[:, None]  # one row per alpha
    centred = basis - basis.mean(axis=1, keepdims=True)
    factor = losses @ (centred / np.sum(centred**2, axis=1, keepdims=True)).T  # by draw and alpha
    floor = losses.mean(axis=1)[:, None] - factor * basis.mean(axis=1)
    factor = np.where(floor < 0, losses @ (basis / np.sum(basis**2, axis=1, keepdims=True)).T, factor)
    floor = floor.clip(min=0)
    squares = sum((losses[:, [size]] - floor - factor * basis[:, size]) ** 2 for size in range(len(x)))
    squares = np.where(factor > 0, squares, np.inf)
    rows, best = np.arange(len(losses)), squares.argmin(axis=1)
    law = np.stack([floor[rows, best], factor[rows, best] * middle ** ALPHAS[best], ALPHAS[best]], axis=1)
    law[(best == 0) | (best == len(ALPHAS) - 1) | ~np.isfinite(squares.min(axis=1))] = np.nan
    return law


def _fit_power(x: np.ndarray, losses: np.ndarray) -> Coefficients:
    """Return a and b > 0 of least squares in the logarithms for each row; NaN where the loss does not fall."""
    log_x = np.log(x) - np.log(x).mean()
    logs = np.log(losses.clip(min=1e-9))
    power = -(logs @ log_x) / (log_x @ log_x)
    factor = np.exp(logs.mean(axis=1) + power * np.log(x).mean())
    law = np.stack([factor, power], axis=1)
    law[power <= 0] = np.nan
    return law
