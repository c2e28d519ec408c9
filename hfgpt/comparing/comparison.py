"""Compare runs: one JSON object with all values and verdicts, from which the report is built."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hfgpt.comparing import statistics
from hfgpt.comparing.pairs import AXES, compare_pair, same_step_is_same_place
from hfgpt.comparing.peaks import mfu_against, too_high
from hfgpt.comparing.runs import PastRun, number
from hfgpt.messages.formats import counted
from hfgpt.settings.step_sizes import StepSizes, stages_in_words


def compare(runs: Sequence[PastRun], all_pairs: bool = False) -> dict[str, Any]:
    """Return all values and verdicts as one JSON object; unknown values are None.

    Keys: runs, settings_that_differ, mfu_against, equal (per axis: the point that all runs reach, and their losses
    there), pairs (each run against the first, or every pair with `all_pairs`: same tokens, comparable or not, gaps with
    bands, speed, verdicts), notes.
    """
    compared = list(itertools.combinations(runs, 2)) if all_pairs else [(runs[0], other) for other in runs[1:]]
    pairs = [compare_pair(a, b) for a, b in compared]
    # The first run and those that saw the same tokens are compared at the steps that all of them recorded.
    same = [b for (a, b), pair in zip(compared, pairs, strict=True) if a is runs[0] and pair["same_tokens"]["equal"]]
    alike = [runs[0], *same]
    against = mfu_against(runs)
    return {
        "runs": [summarize(run, alike) for run in runs],
        "settings_that_differ": settings_that_differ(runs),
        "mfu_against": against,
        "equal": {
            name: point for name, axis in AXES.items() if len(runs) > 1 and (point := at_equal(runs, axis, alike))
        },
        "pairs": pairs,
        "notes": [
            *(f"{run.name}: {note}" for run in runs for note in (*run.notes, *_faults_in_training(run))),
            *too_high(against),
        ],
    }


def summarize(run: PastRun, alike: Sequence[PastRun]) -> dict[str, Any]:
    """Return what is known about one run; its final training loss is a mean (see `statistics.window_start`).

    alike: runs on the same tokens; if they end at the same step, the mean is over the steps that all of them recorded.
    """
    summary: dict[str, Any] = {
        key: getattr(run, key) for key in ("name", "path", "kind", "state", "device", "flops_per_token")
    }
    summary |= {key: run.model.get(key) for key in ("parameters", "parameters_without_positions", "vocab_size")}
    sizes = ("micro_batch", "sequence_length", "accumulation", "processes", "tokens_per_step")
    summary |= {key: run.plan.get(key) for key in sizes}
    if StepSizes.read(stages := run.settings.get("tokens_per_step"), 1) and isinstance(stages, list):
        summary["tokens_per_step"] = stages_in_words(stages)
    summary |= {key: run.median(key) for key in ("tokens_per_second", "step_seconds", "mfu", "hfu")}
    summary |= {key: run.newest(key) for key in ("peak_tflops", "peak_source")}
    events = Counter(str(event.get("event")) for event in run.events)
    micro_batch_seconds = None
    is_grown = any(isinstance(event.get("blocks_per_step"), list) for event in run.events)
    if (
        summary["step_seconds"] and summary["accumulation"] and "oom_retry" not in events and not is_grown
    ):  # otherwise steps of two sizes
        micro_batch_seconds = summary["step_seconds"] / summary["accumulation"]
    last = (run.training or run.evaluations or [{}])[-1]
    return summary | {
        "micro_batch_seconds": micro_batch_seconds,
        "memory_bytes": number(run.curve("memory_bytes").max()) or None,
        "steps": max((record["step"] for record in (*run.training, *run.evaluations)), default=0),
        "planned_steps": run.plan.get("max_steps") or run.settings.get("max_steps"),
        "tokens": number(last.get("num_input_tokens_seen")),
        "flops": run.reach("flops"),
        "wall_seconds": number(last.get("wall_seconds")),
        "events": dict(events),
        **_losses_at_end(run, alike),
    }


def _losses_at_end(run: PastRun, alike: Sequence[PastRun]) -> dict[str, Any]:
    losses, start, end_loss = run.curve("loss"), None, None
    if len(losses):
        last = losses.index[-1]
        if any(run is one for one in alike) and len({one.reach("step") for one in alike}) == 1:
            common = statistics.at_common_places([losses, *(one.curve("loss") for one in alike)])[0]
            losses = common if common.index[-1] == last else losses
        start = statistics.window_start([losses], last)
        end_loss = float(losses[(losses.index > start) | (losses.index == last)].to_numpy().mean())
    evaluations = [record for record in run.evaluations if number(record.get("eval_loss")) is not None]
    newest = evaluations[-1] if evaluations else {}
    best = min(evaluations, key=lambda record: record["eval_loss"], default={})
    return {
        "end_loss": end_loss,
        "end_loss_from_step": None if start is None else math.floor(start) + 1,
        "end_perplexity": perplexity(end_loss),
        "eval_loss": newest.get("eval_loss"),
        "eval_perplexity": perplexity(newest.get("eval_loss")),
        "eval_bits_per_byte": number(newest.get("eval_bits_per_byte")),
        "eval_loss_ema": number(newest.get("eval_loss_ema")),
        "eval_step": newest.get("step"),
        "best_eval_loss": best.get("eval_loss"),
        "best_eval_step": best.get("step"),
    }


def perplexity(loss: float | None) -> float | None:
    return None if loss is None or loss > 709 else math.exp(loss)  # where exp overflows


def _faults_in_training(run: PastRun) -> list[str]:
    steps = {record["step"] for record in run.training if number(record.get("loss")) is None}
    notes = []
    if rollbacks := [event for event in run.events if event.get("event") == "rollback"]:
        tokens = sum(event.get("tokens") or 0 for event in rollbacks)
        notes.append(
            f"{counted(len(rollbacks), 'rollback')} passed over {tokens:,} tokens of text; its tokens and speed leave "
            "out the steps that were abandoned, and only its wall time has them"
        )
    newest = run.evaluations[-1] if run.evaluations else {}
    averaged, last_weights = (number(newest.get(key)) for key in ("eval_loss_ema", "eval_loss"))
    if averaged is not None and last_weights is not None and averaged < last_weights:
        notes.append(
            f"the model of its last checkpoint is an average of the weights (evaluation loss {averaged:.4f}); what is "
            "compared is the loss of the last weights"
        )
    if steps:
        last = " and still is not at its last record" if run.training[-1]["step"] in steps else ""
        notes.append(
            f"the loss is not finite in {len(steps)} records from step {min(steps)} on{last}; these are skipped"
        )
    if skipped := [event.get("step") for event in run.events if event.get("event") == "skip_step"]:
        notes.append(
            f"training skipped {counted(len(skipped), 'step')} because loss or gradient was not finite or a spike; "
            f"the first is step {skipped[0]}"
        )
    return notes


def settings_that_differ(runs: Sequence[PastRun]) -> dict[str, dict[str, Any]]:
    """Return setting -> run -> value, for settings that differ and are known for at least two runs."""
    found = {}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = {run.name: run.settings[key] for run in runs if key in run.settings}
        if any(value != next(iter(values.values())) for value in values.values()):
            found[key] = values
    return found


def at_equal(runs: Sequence[PastRun], axis: str, alike: Sequence[PastRun]) -> dict[str, Any] | None:
    """Return the last point of `axis` that all runs reach, and each run's losses there; None if a run lacks the axis.

    alike: runs on the same tokens; only steps that all of them recorded are used, as in `compare_pair`.
    """
    ends = [end for run in runs if (end := run.reach(axis)) is not None]
    if len(ends) < len(runs):
        return None
    end = min(ends)
    curves = [run.curve("loss", axis) for run in runs]
    if all(same_step_is_same_place(alike[0], run, axis) for run in alike[1:]):
        chosen = [index for index, run in enumerate(runs) if any(run is one for one in alike)]
        for index, curve in zip(chosen, statistics.at_common_places([curves[i] for i in chosen]), strict=True):
            curves[index] = curve
    start = statistics.window_start(curves, end)
    levels = statistics.levels_at(curves, start, end)
    losses: list[dict[str, Any]] = (
        [{"loss": level.value} for level in levels] if levels else [{"loss": None} for _ in runs]
    )
    point: dict[str, Any] = {"at": end, "window_from": start}
    for key in ("eval_loss", "eval_bits_per_byte"):
        evaluations = [run.curve(key, axis) for run in runs]
        at = point[f"{key}_at"] = statistics.last_common_evaluation(evaluations, end)
        for of_run, curve in zip(losses, evaluations, strict=True):
            of_run[key] = None if at is None else statistics.value_at(curve, at)
    for of_run in losses:
        of_run |= {"perplexity": perplexity(of_run["loss"]), "eval_perplexity": perplexity(of_run["eval_loss"])}
    return {**point, "runs": {run.name: of_run for run, of_run in zip(runs, losses, strict=True)}}
