"""One run against another: same tokens or not, same result or not, gaps at equal points, speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hfgpt.comparing import noise
from hfgpt.comparing.noise import Gap
from hfgpt.comparing.run_history import PastRun, number
from hfgpt.comparing.verdict import verdicts

AXES = {"steps": "step", "tokens": "num_input_tokens_seen", "FLOPs": "flops", "wall time": "wall_seconds"}
# Up to what part two runs of the same computation differ by rounding in their first steps: loss, gradient norm. Seen
# on tiny models: 1e-7 and 1e-6 in float32, 3e-4 and 3e-3 in bfloat16.
_ROUNDING = {"no": (1e-4, 1e-3), None: (1e-4, 1e-3)}
_ROUNDING_16_BITS = (2e-3, 2e-2)
_FIRST_STEPS = (20, 5)
# First losses lie near ln V. Further apart than this, nats per token, and the vocabularies differ.
_FIRST_LOSS_GAP = 0.5


class SameTokens(NamedTuple):
    """`equal`: True up to `step`, False from `step` on, None where it is not known, and why."""

    equal: bool | None
    step: int | None
    text: str


def same_tokens(a: PastRun, b: PastRun) -> SameTokens:
    """Whether the two saw the same tokens in the same steps, by the batch hashes of their ledgers."""
    if a.tokens_per_step and b.tokens_per_step and a.tokens_per_step != b.tokens_per_step:
        why = f"steps of {a.tokens_per_step:,} and {b.tokens_per_step:,} tokens have no hash in common"
        return SameTokens(None, None, f"not known: {why}")
    for run in (a, b):
        if not run.hashes:
            return SameTokens(None, None, f"not known: {run.name} has no ledger")
    common = sorted(a.hashes.keys() & b.hashes.keys())
    if not common:
        return SameTokens(None, None, "not known: the ledgers have no step in common")
    for step in common:
        if a.hashes[step] != b.hashes[step]:
            return SameTokens(False, step, f"differ from step {step} on")
    gaps = f", of which both ledgers have {len(common)}" if len(common) < common[-1] else ""
    return SameTokens(True, common[-1], f"equal up to step {common[-1]}{gaps}, the last that both have")


def pair(a: PastRun, b: PastRun) -> dict[str, Any]:
    """Run `b` against run `a`, as one JSON object: see `compare.compare`."""
    same = same_tokens(a, b)
    per_token, why_not = loss_per_token_is_comparable(a, b)
    on_training, on_evaluation = _reservations(a, b)
    gaps: dict[str, Any] = {}
    for name, axis in AXES.items():
        ends = [run.reach(axis) for run in (a, b)]
        if None in ends:
            missing = [run.name for run, end in zip((a, b), ends, strict=True) if end is None]
            gaps[name] = {"at": None, "missing": missing}
            continue
        end = min(end for end in ends if end is not None)
        paired = same.equal is True and same_step_is_same_place(a, b, axis)
        gaps[name] = _gaps(a, b, axis, end, paired) | {"at": end}
    result = None
    if same.step is not None:
        result = same_result(a, b, same.step if same.equal else same.step - 1)
    found: dict[str, Any] = {
        "a": a.name,
        "b": b.name,
        "same_tokens": same._asdict(),
        "same_result": result,
        "loss_per_token_comparable": per_token,
        "why_not_comparable": why_not,
        "assumed": None if a.data and b.data else "text and tokenizer are the same, which is not known",
        "reservations": {"training": on_training, "evaluation": on_evaluation},
        "gaps": gaps,
        "speed": _speed(a, b),
    }
    found["on_the_way"] = _on_the_way((a, b), gaps["steps"]["at"])
    found["verdicts"] = verdicts(found)
    for gap in gaps.values():
        for key in ("loss", "eval_loss", "eval_bits_per_byte"):
            if isinstance(gap.get(key), Gap):
                gap[key] = _as_json(gap[key])
    return found


def _on_the_way(runs: Sequence[PastRun], step: float | None) -> dict[str, float]:
    """Runs for which `step` lies well before the end of their schedule, with the part of it that was done."""
    lengths = {run.name: number(run.plan.get("max_steps")) or run.reach("step") for run in runs}
    flat = {run.name for run in runs if str(run.settings.get("lr_scheduler_type", "")).startswith("constant")}
    parts = {name: step / length for name, length in lengths.items() if step and length and name not in flat}
    return {name: part for name, part in parts.items() if part < 0.9}


def _as_json(gap: Gap) -> dict[str, Any]:
    return {**gap._asdict(), "percent": gap.percent, "beyond_noise": gap.beyond_noise}


def same_step_is_same_place(a: PastRun, b: PastRun, axis: str) -> bool:
    if axis == "flops":
        return a.flops_per_token == b.flops_per_token
    return axis != "wall_seconds"


def _gaps(a: PastRun, b: PastRun, axis: str, end: float, paired: bool) -> dict[str, Any]:
    one, other = a.values("loss", axis), b.values("loss", axis)
    if paired:
        one, other = noise.on_common([one, other])
    start = noise.window([one[0], other[0]], end)
    found: dict[str, Any] = {"window_from": start, "paired": paired}
    found["loss"] = (noise.paired if paired else noise.apart)(one, other, end, start)
    for key in ("eval_loss", "eval_bits_per_byte"):
        curves = [run.values(key, axis, evaluations=True) for run in (a, b)]
        at = noise.between_evaluations(curves[0], curves[1], end)
        found[key], found[f"{key}_at"] = (at[1], at[0]) if at else (None, None)
    return found


def loss_per_token_is_comparable(a: PastRun, b: PastRun) -> tuple[bool, str | None]:
    """Whether a nat per token means the same in both: same vocabulary and tokenizer, as far as is known."""
    for what, one, other in (
        ("vocabulary", a.model.get("vocab_size"), b.model.get("vocab_size")),
        ("tokenizer", a.data.get("tokenizer"), b.data.get("tokenizer")),
    ):
        if one is not None and other is not None and one != other:
            return False, f"the {what} is not the same ({one} and {other})"
    if a.data.get("tokenizer") and b.data.get("tokenizer"):
        return True, None
    first, second = _first_loss(a), _first_loss(b)
    if first is not None and second is not None and abs(first - second) > _FIRST_LOSS_GAP:
        return False, f"first losses of {first:.2f} and {second:.2f}, near ln V, say that the vocabularies differ"
    return True, None


def _first_loss(run: PastRun) -> float | None:
    for curve in (run.values("loss"), run.values("eval_loss", evaluations=True)):
        if len(curve[0]) and curve[0][0] <= 1:
            return float(curve[1][0])
    size = number(run.model.get("vocab_size"))
    return math.log(size) if size else None


def _reservations(a: PastRun, b: PastRun) -> tuple[list[str], list[str]]:
    """Why training losses, and evaluation losses, of the two do not mean the same; no verdict is given on such."""
    training, evaluation = [], []
    texts = [run.settings.get("text") for run in (a, b)]
    if None not in texts and texts[0] != texts[1] and a.data.get("tokenizer") == b.data.get("tokenizer"):
        training.append("trained on different text")
    dropouts = [[run.settings.get(f"model.{key}") for key in ("resid_pdrop", "embd_pdrop")] for run in (a, b)]
    if None not in (*dropouts[0], *dropouts[1]) and dropouts[0] != dropouts[1]:
        training.append("different dropout, which raises the loss in training alone")
    held = [run.data.get("held_out.hash") for run in (a, b)]
    if None not in held and held[0] != held[1]:
        evaluation.append("evaluated on different text")
    return training, evaluation


def same_result(a: PastRun, b: PastRun, last: int) -> dict[str, Any] | None:
    """Whether steps up to `last`, whose text was the same, gave the same; None without a common record.

    In the first steps the two may differ by rounding alone, in loss and gradient norm. Later, rounding has grown: the
    mean of no tenth, fifth or half of the common steps, nor of the last window, may differ by more than twice the
    paired band (see `noise.paired`).
    """
    rounding = [_ROUNDING.get(run.precision, _ROUNDING_16_BITS) for run in (a, b)]
    early: list[dict[str, Any]] = []  # where the two first differ by more, in each figure
    for key, tolerance, until in zip(("loss", "grad_norm"), map(max, *rounding), _FIRST_STEPS, strict=True):
        steps, ya, yb = _common(a, b, key, last)
        for i in np.flatnonzero((steps <= until) & (_relative(ya, yb) > tolerance))[:1]:
            step, one, other = int(steps[i]), float(ya[i]), float(yb[i])
            early.append({"same": False, "from_step": step, "key": key, "a": one, "b": other})
    if early:
        return min(early, key=lambda found: found["from_step"])
    steps, ya, yb = _common(a, b, "loss", last)
    if not len(steps):
        return None
    spans = [span for parts in (10, 5, 2) for span in itertools.pairwise(np.linspace(0, steps[-1], parts + 1))]
    for start, end in [*spans, (noise.window([steps], steps[-1]), steps[-1])]:
        gap = noise.paired((steps, ya), (steps, yb), float(end), float(start))
        if gap is not None and gap.band is not None and abs(gap.difference) > 2 * gap.band:
            return _first_shown(steps, ya, yb, (steps > start) & (steps <= end))
    return {"same": True, "steps": len(steps), "largest_part": float(_relative(ya, yb).max())}


def _first_shown(steps: np.ndarray, ya: np.ndarray, yb: np.ndarray, inside: np.ndarray) -> dict[str, Any]:
    """The first record that differs by half of what those inside the window that told do."""
    parts = _relative(ya, yb)
    i = int(np.flatnonzero(parts >= 0.5 * np.median(parts[inside]))[0])
    return {"same": False, "from_step": int(steps[i]), "key": "loss", "a": float(ya[i]), "b": float(yb[i])}


def _relative(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.abs(one - other) / np.maximum(np.maximum(np.abs(one), np.abs(other)), 1e-12)


def _common(a: PastRun, b: PastRun, key: str, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    (xa, ya), (xb, yb) = a.values(key), b.values(key)
    steps, ia, ib = np.intersect1d(xa, xb, return_indices=True)
    inside = steps <= last
    return steps[inside], ya[ia][inside], yb[ib][inside]


def _speed(a: PastRun, b: PastRun) -> dict[str, Any] | None:
    """How many times as fast `b` is per token, by medians of the records; "clear" where each median lies outside the
    middle half of the other's records: a machine that others use too changes its speed by the minute."""
    rates = [run.values("tokens_per_second")[1] for run in (a, b)]
    if not all(len(rate) for rate in rates):
        return None
    one, other = rates
    medians = [float(np.median(rate)) for rate in rates]
    clear = not any(
        np.quantile(rate, 0.25) <= median <= np.quantile(rate, 0.75)
        for rate, median in ((one, medians[1]), (other, medians[0]))
    )
    devices = [run.facts.get("device") or run.settings.get("device") for run in (a, b)]
    return {
        "a": medians[0], "b": medians[1], "times_as_fast": medians[1] / medians[0], "clear": clear,
        "devices": devices if None not in devices and devices[0] != devices[1] else None,
    }  # fmt: skip
