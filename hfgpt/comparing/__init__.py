"""Runs side by side: what differs, how fast and how far they are, loss at equal steps, tokens, FLOPs and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.comparing import noise
from hfgpt.comparing.console_log import read_log
from hfgpt.comparing.pairs import AXES, pair, same_step_is_same_place
from hfgpt.comparing.run_history import PastRun, number, read_folder
from hfgpt.errors import UserError


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
    for run in runs:
        if names.count(run.name) > 1:
            run.name = "/".join(Path(run.path).absolute().parts[-2:])
    for index, run in enumerate(runs):
        earlier = [other.name for other in runs[:index]]
        if run.name in earlier:
            run.name = next(name for n in range(2, len(runs) + 2) if (name := f"{run.name} ({n})") not in earlier)


def compare(runs: Sequence[PastRun]) -> dict[str, Any]:
    """All figures and verdicts as one JSON object; what is not known is None.

    Keys: runs, settings_that_differ, mfu_against, equal (per axis: the point that all runs reach, and their figures
    there), pairs (the first run with each other: same tokens, comparable or not, gaps with bands, speed, verdicts),
    notes.
    """
    against = mfu_against(runs)
    pairs = [pair(runs[0], other) for other in runs[1:]]
    # The first run and those that saw its tokens: they are compared at the steps that all of them recorded.
    alike = [runs[0], *(run for run, one in zip(runs[1:], pairs, strict=True) if one["same_tokens"]["equal"])]
    above = sorted({name for row in against for name, value in row["mfu"].items() if value is not None and value > 1})
    return {
        "runs": [facts(run, alike) for run in runs],
        "settings_that_differ": settings_that_differ(runs),
        "mfu_against": against,
        "equal": {name: found for name, axis in AXES.items() if len(runs) > 1 and (found := equal(runs, axis, alike))},
        "pairs": pairs,
        "notes": [
            *(f"{run.name}: {note}" for run in runs for note in (*run.notes, *_not_finite(run))),
            *(f"{name}: an MFU above 1 is against the peak of a slower device, or a wrong one" for name in above),
        ],
    }


def facts(run: PastRun, alike: Sequence[PastRun] = ()) -> dict[str, Any]:
    """What is known of one run by itself; the training loss at the end is a mean (see `noise.window`).

    alike: runs on the same tokens; where they end at one step, the mean is over steps that all of them recorded.
    """
    step_seconds = run.typical("step_seconds")
    accumulation = run.plan.get("accumulation")
    recut = any(event.get("event") == "oom_retry" for event in run.events)  # micro-batches of two sizes
    steps, losses = run.values("loss")
    if any(run is one for one in alike) and len({one.reach("step") for one in alike}) == 1:
        common = noise.on_common([(steps, losses), *(one.values("loss") for one in alike)])[0]
        steps, losses = common if len(common[0]) and common[0][-1] == steps[-1] else (steps, losses)
    start = noise.window([steps], steps[-1]) if len(steps) else None
    end_loss = float(np.mean(losses[(steps > start) | (steps == steps[-1])])) if len(steps) else None
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
        "micro_batch_seconds": step_seconds / accumulation if step_seconds and accumulation and not recut else None,
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
        "end_loss_from_step": None if start is None else math.floor(start) + 1,
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
        notes.append(
            f"the loss is not finite in {len(steps)} records from step {min(steps)} on{last}; these are left out"
        )
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
    from hfgpt.model.flops import mfu

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


def equal(runs: Sequence[PastRun], axis: str, alike: Sequence[PastRun] = ()) -> dict[str, Any] | None:
    """The point of `axis` that all runs reach, and each run's figures there; None where one has no such axis.

    alike: runs on the same tokens, of which only steps that all of them recorded count, as between two (`pairs.pair`).
    """
    reached = [run.reach(axis) for run in runs]
    ends = [end for end in reached if end is not None]
    if len(ends) < len(runs):
        return None
    end = min(ends)
    curves = {id(run): run.values("loss", axis) for run in runs}
    if all(same_step_is_same_place(alike[0], run, axis) for run in alike[1:]):
        curves |= zip(map(id, alike), noise.on_common([curves[id(run)] for run in alike]), strict=True) if alike else []
    start = noise.window([x for x, _ in curves.values()], end)
    levels = noise.levels_at([curves[id(run)] for run in runs], start, end)
    found: list[dict[str, Any]] = [{"loss": levels[index].value if levels else None} for index in range(len(runs))]
    point: dict[str, Any] = {"at": end, "window_from": start}
    for key in ("eval_loss", "eval_bits_per_byte"):
        evaluations = [run.values(key, axis, evaluations=True) for run in runs]
        at = point[f"{key}_at"] = noise.evaluated_at(evaluations, end)
        for figures, (x, y) in zip(found, evaluations, strict=True):
            figures[key] = None if at is None else float(np.interp(at, x, y))
    for figures in found:
        figures |= {f"{kind}perplexity": perplexity(figures[f"{kind}loss"]) for kind in ("", "eval_")}
    return {**point, "runs": {run.name: figures for run, figures in zip(runs, found, strict=True)}}
