"""Compare two runs: whether tokens and results are the same, gaps at equal points, and speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hfgpt.comparing import statistics
from hfgpt.comparing.runs import PastRun, number
from hfgpt.comparing.verdict import explain
from hfgpt.data.stream import is_of_blocks

AXES = {"steps": "step", "tokens": "num_input_tokens_seen", "FLOPs": "flops", "wall time": "wall_seconds"}
# How far two runs of the same computation may differ by rounding, relative to the value: the limit in 32 bits, in 16
# bits, and for how many first steps they hold. Observed on tiny models: loss 1e-7 and gradient norm 1e-6 in float32,
# 3e-4 and 3e-3 in bfloat16.
_ROUNDING = {"loss": (1e-4, 2e-3, 20), "grad_norm": (1e-3, 2e-2, 5)}
# A factor in speed that is reported however much the speed of each run varied.
_LARGE_FACTOR = 1.25
# First losses are near ln V. If they are further apart than this (nats per token), the vocabularies differ.
_FIRST_LOSS_GAP = 0.5


def compare_pair(a: PastRun, b: PastRun) -> dict[str, Any]:
    """Compare run `b` with run `a`; return one JSON object."""
    same = same_tokens(a, b)
    last = same["step"] if same["equal"] or same["step"] is None else same["step"] - 1  # step with the same tokens
    comparable, why_not = loss_per_token_is_comparable(a, b)
    gaps = {name: _gaps(a, b, axis, same["equal"] is True) for name, axis in AXES.items()}
    pair: dict[str, Any] = {
        "a": a.name,
        "b": b.name,
        "same_tokens": same,
        "same_result": None if last is None else same_result(a, b, last),
        "loss_per_token_comparable": comparable,
        "why_not_comparable": why_not,
        "assumed": None if a.data and b.data else "text and tokenizer are the same, which is not known",
        "reservations": reservations(a, b),
        "gaps": gaps,
        "speed": _speed(a, b),
        "on_the_way": _on_the_way((a, b), gaps["steps"]["at"]),
    }
    return pair | {"verdicts": explain(pair).lines}


def same_tokens(a: PastRun, b: PastRun) -> dict[str, Any]:
    """Return whether both runs saw the same tokens in the same steps, judging by the batch hashes in their ledgers.

    `equal`: True up to `step`, False from `step` on, None if unknown; `text` says why.
    """
    if a.tokens_per_step and b.tokens_per_step and a.tokens_per_step != b.tokens_per_step:
        why = f"steps of {a.tokens_per_step:,} and {b.tokens_per_step:,} tokens have no hash in common"
    elif missing := [run.name for run in (a, b) if not run.hashes]:
        why = f"{missing[0]} has no ledger"
    elif not (shared := sorted(a.hashes.keys() & b.hashes.keys())):
        why = "the ledgers have no step in common"
    elif common := [step for step in shared if is_of_blocks(a.hashes[step]) == is_of_blocks(b.hashes[step])]:
        if different := [step for step in common if a.hashes[step] != b.hashes[step]]:
            return {"equal": False, "step": different[0], "text": f"differ from step {different[0]} on"}
        last = common[-1]
        gaps = f", of which both ledgers have {len(common)}" if len(common) < last else ""
        return {"equal": True, "step": last, "text": f"equal up to step {last}{gaps}, the last that both have"}
    else:
        why = "one of the runs was made by an earlier version, which hashed the text in another way"
    return {"equal": None, "step": None, "text": f"not known: {why}"}


def same_result(a: PastRun, b: PastRun, last: int) -> dict[str, Any] | None:
    """Return whether the steps up to `last`, on the same text, gave the same result; None without a common record.

    In the first steps, loss and gradient norm may differ only by rounding. Later, rounding has grown: the mean of each
    tenth, fifth and half of the common steps, and of the last window, may differ by up to twice the paired band (see
    `statistics.paired_gap`).
    """
    in_32_bits = all(run.settings.get("mixed_precision") in ("no", None) for run in (a, b))
    early = []
    for key, (tolerance_32, tolerance_16, first_steps) in _ROUNDING.items():
        both = _common_records(a, b, key, min(first_steps, last))
        differing = both[_relative(both) > (tolerance_32 if in_32_bits else tolerance_16)]
        if len(differing):
            early.append(_different_from(differing, key))
    if early:
        return min(early, key=lambda difference: difference["from_step"])
    losses = _common_records(a, b, "loss", last)
    if losses.empty:
        return None
    end = float(losses.index[-1])
    spans = [span for parts in (10, 5, 2) for span in itertools.pairwise(np.linspace(0, end, parts + 1).tolist())]
    for start, stop in [*spans, (statistics.window_start([losses["a"]], end), end)]:
        gap = statistics.paired_gap(losses["a"], losses["b"], start, stop)
        if gap and gap["band"] is not None and abs(gap["second"] - gap["first"]) > 2 * gap["band"]:
            # The difference began at the first record that differs by half as much as the records in this span.
            typical = np.median(_relative(statistics.within(losses, start, stop)))
            return _different_from(losses[_relative(losses) >= 0.5 * typical], "loss")
    return {"same": True, "steps": len(losses), "largest_part": float(_relative(losses).max())}


def _common_records(a: PastRun, b: PastRun, key: str, last: int) -> pd.DataFrame:
    both = pd.concat([a.curve(key), b.curve(key)], axis=1, join="inner", keys=["a", "b"])
    return both[both.index <= last]


def _relative(both: pd.DataFrame) -> pd.Series:
    return (both["a"] - both["b"]).abs() / both.abs().max(axis=1).clip(lower=1e-12)


def _different_from(differing: pd.DataFrame, key: str) -> dict[str, Any]:
    first = differing.iloc[0]
    return {"same": False, "from_step": int(differing.index[0]), "key": key, "a": float(first.a), "b": float(first.b)}


def same_step_is_same_place(a: PastRun, b: PastRun, axis: str) -> bool:
    if axis == "flops":
        return a.flops_per_token == b.flops_per_token
    return axis != "wall_seconds"


def _gaps(a: PastRun, b: PastRun, axis: str, same_text: bool) -> dict[str, Any]:
    """Return the gaps of all losses at the point of `axis` where the shorter run ends."""
    ends = {run.name: run.reach(axis) for run in (a, b)}
    if missing := [name for name, end in ends.items() if end is None]:
        return {"at": None, "missing": missing}
    end = min(end for end in ends.values() if end is not None)
    paired = same_text and same_step_is_same_place(a, b, axis)
    one, other = a.curve("loss", axis), b.curve("loss", axis)
    if paired:
        one, other = statistics.at_common_places([one, other])
    start = statistics.window_start([one, other], end)
    loss = (statistics.paired_gap if paired else statistics.unpaired_gap)(one, other, start, end)
    gaps: dict[str, Any] = {"window_from": start, "paired": paired, "loss": loss}
    for key in ("eval_loss", "eval_bits_per_byte"):
        one, other = a.curve(key, axis), b.curve(key, axis)
        at = gaps[f"{key}_at"] = statistics.last_common_evaluation([one, other], end)
        gaps[key] = None if at is None else statistics.evaluation_gap(one, other, at)
    return gaps | {"at": end}


def loss_per_token_is_comparable(a: PastRun, b: PastRun) -> tuple[bool, str | None]:
    """Return whether losses in nats can be compared, and if not, why.

    They can if vocabulary and tokenizer are equal as far as is known.
    """
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
        return False, f"first losses of {first:.2f} and {second:.2f}, near ln V, show that the vocabularies differ"
    return True, None


def _first_loss(run: PastRun) -> float | None:
    for curve in (run.curve("loss"), run.curve("eval_loss")):
        if len(curve) and curve.index[0] <= 1:
            return float(curve.iloc[0])
    size = number(run.model.get("vocab_size"))
    return math.log(size) if size else None


def reservations(a: PastRun, b: PastRun) -> dict[str, list[str]]:
    """Return why the training and evaluation losses of the two do not mean the same; such losses give no verdict."""
    training, evaluation = [], []

    def differ(one: Any, other: Any) -> bool:
        return one is not None and other is not None and one != other

    if a.data.get("tokenizer") == b.data.get("tokenizer") and differ(a.settings.get("text"), b.settings.get("text")):
        training.append("trained on different text")
    if any(differ(a.settings.get(key), b.settings.get(key)) for key in ("model.resid_pdrop", "model.embd_pdrop")):
        training.append("different dropout, which raises the training loss only")
    if differ(a.data.get("held_out.hash"), b.data.get("held_out.hash")):
        evaluation.append("evaluated on different text")
    return {"training": training, "evaluation": evaluation}


def _on_the_way(runs: Sequence[PastRun], step: float | None) -> dict[str, float]:
    """Return runs for which `step` is well before the end of their learning rate schedule, with the fraction done."""
    lengths = {run.name: number(run.plan.get("max_steps")) or run.reach("step") for run in runs}
    flat = {run.name for run in runs if str(run.settings.get("lr_scheduler_type", "")).startswith("constant")}
    parts = {name: step / length for name, length in lengths.items() if step and length and name not in flat}
    return {name: part for name, part in parts.items() if part < 0.9}


def _speed(a: PastRun, b: PastRun) -> dict[str, Any] | None:
    """Return how many times as fast `b` is per token; None if either has no records.

    times_as_fast: by the medians of the records, which a few slow ones do not move. varied: the middle half of the
    records of each run, if the other's median is in it, because the speed of a shared machine changes by the minute;
    then only a large factor is "clear". over_all: from the first record to the last, so that a run that was held up
    for a part of its time shows; None unless that is by a large factor, and other than by the medians.
    """
    one, other = a.curve("tokens_per_second"), b.curve("tokens_per_second")
    if one.empty or other.empty:
        return None
    first, second = float(one.median()), float(other.median())
    halves = [[float(rates.quantile(part)) for part in (0.25, 0.75)] for rates in (one, other)]
    overlap = any(low <= median <= high for (low, high), median in zip(halves, (second, first), strict=True))
    times, over_all = second / first, _over_all(a, b)
    if over_all and not (_is_large(over_all["times_as_fast"]) and _is_large(over_all["times_as_fast"] / times)):
        over_all = None
    devices = None if None in (a.device, b.device) or a.device == b.device else [a.device, b.device]
    return {
        **{"a": first, "b": second, "times_as_fast": times, "clear": not overlap or _is_large(times)},
        **{"varied": halves if overlap else None, "over_all": over_all, "devices": devices},
    }


def _is_large(times: float) -> bool:
    return not 1 / _LARGE_FACTOR < times < _LARGE_FACTOR


def _over_all(*runs: PastRun) -> dict[str, float] | None:
    """Return the tokens per second of two runs from the first record to the last."""
    rates = []
    for run in runs:
        tokens = run.curve("num_input_tokens_seen", "wall_seconds")
        seconds = float(tokens.index[-1] - tokens.index[0]) if len(tokens) else 0.0
        rates.append(float(tokens.iloc[-1] - tokens.iloc[0]) / seconds if seconds > 0 else 0.0)
    return {"a": rates[0], "b": rates[1], "times_as_fast": rates[1] / rates[0]} if min(rates) > 0 else None
