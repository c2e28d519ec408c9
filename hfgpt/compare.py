"""Runs side by side: what differs, speed, loss at equal steps, tokens, FLOPs and seconds, and what can be said of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfgpt import noise
from hfgpt.console_log import read_log
from hfgpt.errors import UserError
from hfgpt.noise import Gap
from hfgpt.run_history import PastRun, number, read_folder

AXES = {"steps": "step", "tokens": "num_input_tokens_seen", "FLOPs": "flops", "wall time": "wall_seconds"}
# Up to what part two runs of the same computation differ by rounding in their first steps: loss, gradient norm.
_ROUNDING = {"no": (1e-4, 1e-3), None: (1e-4, 1e-3)}
_ROUNDING_16_BITS = (2e-3, 2e-2)
_FIRST_STEPS = 5
# First losses lie near ln V. Further apart than this, nats per token, and the vocabularies differ.
_FIRST_LOSS_GAP = 0.5


class SameTokens(NamedTuple):
    """`equal`: True up to `step`, False from `step` on, None where it is not known, and why."""

    equal: bool | None
    step: int | None
    text: str


def read_runs(paths: Sequence[str | Path], tokens_per_step: Sequence[int] = ()) -> list[PastRun]:
    """The runs in `paths`, folders or logs, with names that tell them apart.

    tokens_per_step: for the logs, one for all or one for each in their order. Raises UserError with all problems.
    """
    runs, problems = [], []
    logs = [path for path in map(Path, paths) if path.is_file() and path.name not in ("metrics.jsonl", "run.json")]
    if len(tokens_per_step) not in (0, 1, len(logs)):
        problems.append(f"tokens_per_step: {len(tokens_per_step)} values for {len(logs)} logs; give one, or one each")
    problems += [f"tokens_per_step={value}: must be greater than 0" for value in tokens_per_step if value < 1]
    stated = dict(zip(logs, [*tokens_per_step] * (len(logs) if len(tokens_per_step) == 1 else 1), strict=False))
    for path in map(Path, paths):
        try:
            if path.is_dir():
                runs.append(read_folder(path))
            elif path.name in ("metrics.jsonl", "run.json") and path.is_file():
                runs.append(read_folder(path.parent))
            elif path.exists():
                runs.append(read_log(path, stated.get(path)))
            else:
                raise UserError(f"run {path}: no such folder or file; give a run's output_dir, or a console log")
        except UserError as error:
            problems += error.problems
        except OSError as error:
            problems.append(f"run {path}: cannot be read ({error.strerror})")
    if problems:
        raise UserError(*problems)
    _tell_apart(runs)
    return runs


def _tell_apart(runs: list[PastRun]) -> None:
    names = [run.name for run in runs]
    for index, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = "/".join(Path(run.path).absolute().parts[-2:])
    for index, run in enumerate(runs):
        earlier = [other.name for other in runs[:index]]
        if run.name in earlier:
            run.name = next(name for n in range(2, len(runs) + 2) if (name := f"{run.name} ({n})") not in earlier)


def compare(runs: Sequence[PastRun]) -> dict[str, Any]:
    """All figures and verdicts as one JSON object; what is not known is None. The first run is compared with each other.

    Keys: runs, settings_that_differ, mfu_against, equal (per axis: the point that all runs reach, and their figures
    there), pairs (same tokens, comparable or not, gaps with bands, speed, verdicts), noise, notes.
    """
    return {
        "runs": [facts(run) for run in runs],
        "settings_that_differ": settings_that_differ(runs),
        "mfu_against": mfu_against(runs),
        "equal": {name: found for name, axis in AXES.items() if len(runs) > 1 and (found := equal(runs, axis))},
        "pairs": [pair(runs[0], other) for other in runs[1:]],
        "notes": [f"{run.name}: {note}" for run in runs for note in (*run.notes, *_not_finite(run))],
    }


def facts(run: PastRun) -> dict[str, Any]:
    """What is known of one run by itself; losses at the end are means over the last tenth (see `noise.window`)."""
    step_seconds = run.typical("step_seconds")
    accumulation = run.plan.get("accumulation")
    steps, losses = run.values("loss")
    end_loss = None
    if len(steps):
        start = noise.window([steps], steps[-1])
        end_loss = float(np.mean(losses[(steps > start) | (steps == steps[-1])]))
    evaluations = [record for record in run.evaluations if number(record.get("eval_loss")) is not None]
    last = evaluations[-1] if evaluations else {}
    best = min(evaluations, key=lambda record: record["eval_loss"], default={})
    counted: dict[str, int] = {}
    for event in run.events:
        counted[str(event.get("event"))] = counted.get(str(event.get("event")), 0) + 1
    newest = (run.training or run.evaluations or [{}])[-1]
    return {
        "name": run.name,
        "path": run.path,
        "kind": run.kind,
        "state": run.state,
        "device": run.facts.get("device") or run.settings.get("device"),
        "parameters": run.model.get("parameters"),
        "parameters_without_positions": run.model.get("parameters_without_positions"),
        "vocab_size": run.model.get("vocab_size"),
        "flops_per_token": run.flops_per_token,
        "micro_batch": run.plan.get("micro_batch"),
        "sequence_length": run.plan.get("sequence_length"),
        "accumulation": accumulation,
        "processes": run.plan.get("processes"),
        "tokens_per_step": run.tokens_per_step,
        "tokens_per_second": run.typical("tokens_per_second"),
        "step_seconds": step_seconds,
        "micro_batch_seconds": step_seconds / accumulation if step_seconds and accumulation else None,
        "mfu": run.typical("mfu"),
        "hfu": run.typical("hfu"),
        "peak_tflops": run.newest("peak_tflops"),
        "peak_source": run.newest("peak_source"),
        "memory_bytes": max((number(r.get("memory_bytes")) or 0 for r in run.training), default=0) or None,
        "steps": max((r["step"] for r in (*run.training, *run.evaluations)), default=0),
        "planned_steps": run.plan.get("max_steps") or run.settings.get("max_steps"),
        "tokens": number(newest.get("num_input_tokens_seen")),
        "flops": run.reach("flops"),
        "wall_seconds": number(newest.get("wall_seconds")),
        "end_loss": end_loss,
        "end_perplexity": perplexity(end_loss),
        "eval_loss": last.get("eval_loss"),
        "eval_perplexity": perplexity(last.get("eval_loss")),
        "eval_bits_per_byte": number(last.get("eval_bits_per_byte")),
        "eval_step": last.get("step"),
        "best_eval_loss": best.get("eval_loss"),
        "best_eval_step": best.get("step"),
        "events": counted,
    }


def perplexity(loss: float | None) -> float | None:
    return None if loss is None or loss > 709 else math.exp(loss)  # where exp overflows


def _not_finite(run: PastRun) -> list[str]:
    steps = {r["step"] for r in run.training if number(r.get("loss")) is None}
    notes = []
    if steps:
        last = " and still is not at its last record" if run.training[-1]["step"] in steps else ""
        notes.append(f"the loss is not finite in {len(steps)} records from step {min(steps)} on{last}; these are left out")
    if skipped := [e.get("step") for e in run.events if e.get("event") == "skip_step"]:
        notes.append(f"{len(skipped)} steps were left out of training (not finite), the first is step {skipped[0]}")
    return notes


def settings_that_differ(runs: Sequence[PastRun]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, for settings known of at least two runs that do not all have one value."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    found = {}
    for key in keys:
        values = {run.name: run.settings[key] for run in runs if key in run.settings}
        if len(values) > 1 and any(value != next(iter(values.values())) for value in values.values()):
            found[key] = values
    return found


def mfu_against(runs: Sequence[PastRun]) -> list[dict[str, Any]]:
    """MFU of every run against every peak that one of them names; the median speed stands for a run."""
    from hfgpt.flops import mfu

    peaks = {(run.newest("peak_tflops"), run.newest("peak_source")): None for run in runs}
    rows = []
    for tflops, source in peaks:
        if number(tflops):
            speeds = {run.name: (run.typical("tokens_per_second"), run.flops_per_token, run) for run in runs}
            values = {
                name: mfu(speed, flops, tflops, run.processes) if speed and flops else None
                for name, (speed, flops, run) in speeds.items()
            }
            # A run's own figure stands where speed or FLOPs are not known.
            for run in runs:
                if values[run.name] is None and run.newest("peak_tflops") == tflops:
                    values[run.name] = run.typical("mfu")
            rows.append({"peak_tflops": tflops, "peak_source": source, "mfu": values})
    return rows


def equal(runs: Sequence[PastRun], axis: str) -> dict[str, Any] | None:
    """The point of `axis` that all runs reach, and each run's figures there; None where one has no such axis."""
    reached = [run.reach(axis) for run in runs]
    ends = [end for end in reached if end is not None]
    if len(ends) < len(runs):
        return None
    end = min(ends)
    start = noise.window([run.values("loss", axis)[0] for run in runs], end)
    figures = {}
    for run in runs:
        values: dict[str, Any] = {}
        x, y = run.values("loss", axis)
        inside = (x > start) & (x <= end * (1 + 1e-9))
        values["loss"] = noise.level(x[inside], y[inside], (start + end) / 2).value if inside.any() else None
        for key in ("eval_loss", "eval_bits_per_byte"):
            x, y = run.values(key, axis, evaluations=True)
            values[key] = float(np.interp(end, x, y)) if len(x) and x[0] <= end else None
        values |= {"perplexity": perplexity(values["loss"]), "eval_perplexity": perplexity(values["eval_loss"])}
        figures[run.name] = values
    return {"at": end, "window_from": start, "runs": figures}


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
    """Run `b` against run `a`: see `compare`."""
    from hfgpt.verdict import verdicts

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
        paired = same.equal is True and _same_step_is_same_place(a, b, axis)
        gaps[name] = _gaps(a, b, axis, end, paired) | {"at": end}
    result = None
    if same.equal is not None:
        result = same_result(a, b, same.step if same.equal else (same.step or 1) - 1)
    found = {
        "a": a.name,
        "b": b.name,
        "same_tokens": same._asdict(),
        "same_result": result,
        "loss_per_token_comparable": per_token,
        "why_not_comparable": why_not,
        "reservations": {"training": on_training, "evaluation": on_evaluation},
        "gaps": gaps,
        "speed": _speed(a, b),
    }
    found["verdicts"] = verdicts(found)
    for gap in gaps.values():
        for key in ("loss", "eval_loss", "eval_bits_per_byte"):
            if isinstance(gap.get(key), Gap):
                gap[key] = _as_json(gap[key])
    return found


def _as_json(gap: Gap) -> dict[str, Any]:
    return {**gap._asdict(), "percent": gap.percent, "beyond_noise": gap.beyond_noise}


def _same_step_is_same_place(a: PastRun, b: PastRun, axis: str) -> bool:
    if axis == "flops":
        return a.flops_per_token == b.flops_per_token
    return axis != "wall_seconds"


def _gaps(a: PastRun, b: PastRun, axis: str, end: float, paired: bool) -> dict[str, Any]:
    one, other = a.values("loss", axis), b.values("loss", axis)
    start = noise.window([one[0], other[0]], end)
    found: dict[str, Any] = {"window_from": start, "paired": paired}
    found["loss"] = (noise.paired if paired else noise.apart)(one, other, end, start)
    for key in ("eval_loss", "eval_bits_per_byte"):
        curves = (run.values(key, axis, evaluations=True) for run in (a, b))
        at = noise.between_evaluations(*curves, end)
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
    first = [_first_loss(run) for run in (a, b)]
    if None not in first and abs(first[0] - first[1]) > _FIRST_LOSS_GAP:
        return False, f"first losses of {first[0]:.2f} and {first[1]:.2f}, near ln V, say that the vocabularies differ"
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
    if any(a.settings.get(key) != b.settings.get(key) for key in ("model.resid_pdrop", "model.embd_pdrop")):
        training.append("different dropout, which raises the loss in training alone")
    held = [run.data.get("held_out.hash") for run in (a, b)]
    if None not in held and held[0] != held[1]:
        evaluation.append("evaluated on different text")
    return training, evaluation


def same_result(a: PastRun, b: PastRun, last: int) -> dict[str, Any] | None:
    """Whether steps up to `last`, whose text was the same, gave the same; None without a common record.

    In the first steps the two may differ by rounding alone, in loss and gradient norm. Later, rounding has grown: each
    tenth of the common steps may differ in its mean by twice the paired band (see `noise.paired`).
    """
    rounding = [_ROUNDING.get(run.precision, _ROUNDING_16_BITS) for run in (a, b)]
    largest = 0.0
    for key, tolerance in zip(("loss", "grad_norm"), map(max, *rounding), strict=True):
        steps, ya, yb = _common(a, b, key, last)
        relative = np.abs(ya - yb) / np.maximum(np.maximum(np.abs(ya), np.abs(yb)), 1e-12)
        largest = max(largest, float(relative.max(initial=0.0))) if key == "loss" else largest
        for step, one, other, part in zip(steps, ya, yb, relative, strict=True):
            if step <= _FIRST_STEPS and part > tolerance:
                return {"same": False, "from_step": int(step), "key": key, "a": float(one), "b": float(other)}
    steps, ya, yb = _common(a, b, "loss", last)
    if not len(steps):
        return None
    edges = np.linspace(0, steps[-1], 11)
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        gap = noise.paired((steps, ya), (steps, yb), float(end), float(start)) if np.any(steps <= end) else None
        if gap is not None and gap.band is not None and abs(gap.difference) > 2 * gap.band:
            first = int(steps[steps > start][0])
            return {"same": False, "from_step": first, "key": "loss", "a": gap.first, "b": gap.second}
    return {"same": True, "steps": len(steps), "largest_part": largest}


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
