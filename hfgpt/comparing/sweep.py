"""The results of a sweep: a loss with its noise for each point, the best one, and whether the next differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.comparing import statistics
from hfgpt.comparing.comparison import summarize
from hfgpt.comparing.pairs import loss_per_token_is_comparable, reservations
from hfgpt.comparing.reading import read_runs
from hfgpt.comparing.runs import PastRun, number
from hfgpt.comparing.scaling import fit_scaling
from hfgpt.comparing.short_values import as_key, shorten
from hfgpt.comparing.statistics import Level
from hfgpt.comparing.verdict import describe_gap
from hfgpt.config import PretrainConfig
from hfgpt.messages.formats import counted

REPEAT = "seed"  # points that differ only in this setting are repeats of one measurement
OF_AVERAGE = "eval_loss_ema"
METRICS = {"eval_loss": "evaluation loss", "eval_bits_per_byte": "bits per byte", "end_loss": "training loss"}
TOO_FEW = "too few losses for a band; repeat each point with --seed 1,2,3, or evaluate more often"
METRICS |= {OF_AVERAGE: "loss of averaged weights"}
_COLUMNS = ("tokens_per_second", "parameters", "parameters_without_positions", "tokens", "flops", "wall_seconds")


@dataclass
class SweptRun:
    """A point of a sweep. values: of the swept settings. run: None if it has no records. error: why it failed."""

    name: str
    values: dict[str, Any]
    folder: Path
    error: str | None = None
    run: PastRun | None = None

    def __post_init__(self) -> None:
        if (self.folder / "run.json").exists():
            self.run = read_runs([self.folder])[0]
            self.run.name = self.name

    @property
    def state(self) -> str:
        if self.run is None or (self.error and not self.has_ended):
            return "failed" if self.error else "not run"
        return self.run.state

    @property
    def has_ended(self) -> bool:
        """Whether the run came to its own end, and saved."""
        events = self.run.events if self.run else []
        last: dict[str, Any] = next((e for e in reversed(events) if e.get("event") in ("start", "resume", "end")), {})
        saved = any(self.folder.glob("checkpoint-*"))
        return last.get("event") == "end" and not last.get("fault") and saved

    def level(self, metric: str) -> Level | None:
        """Return the loss at the end with its noise; None if the run has not ended, or its loss is not finite there."""
        if self.run is None or not self.has_ended:
            return None
        records = self.run.training if metric == "end_loss" else self.run.evaluations
        if not records or number(records[-1].get("loss" if metric == "end_loss" else metric)) is None:
            return None
        if metric != "end_loss":
            return statistics.newest_evaluation(self.run.curve(metric))
        losses = self.run.curve("loss")
        level = statistics.levels_at([losses], statistics.window_start([losses], end := losses.index[-1]), end)
        return level[0]._replace(value=summarize(self.run, [self.run])["end_loss"]) if level else None


def summarize_sweep(points: Sequence[SweptRun]) -> dict[str, Any]:
    """Return the table of a sweep as one JSON object; unknown values are None.

    Keys: metric, points (the values of each run), groups (points that differ only in their seed, best first; `shown`:
    their settings as short texts), best (why_no_best: if there is nothing to compare), next, gap between the two,
    verdict, scaling (if models are swept), notes.
    """
    ended = [point for point in points if point.run and point.has_ended]
    metric, why_not = _choose_metric([point.run for point in ended if point.run])
    groups = _group(points, metric)
    ranked = [group for group in groups if group["value"] is not None]
    why_no_best = why_not or (None if ranked else "no point has a finite loss at its end")
    if len(groups) == 1:
        why_no_best = why_no_best or "there is only one point"
    best, following = [None, None] if why_no_best else [*ranked, None][:2]
    gap = _gap(best, following) if best and following else None
    for group in groups:
        group.pop("level")
    swept_models = len({as_key(point.values.get("model")) for point in points}) > 1
    return {
        "metric": metric,
        "why_no_metric": why_not,
        "points": [_row(point, metric) for point in points],
        "groups": groups,
        "best": best and {key: best[key] for key in ("settings", "value", "runs")},
        "why_no_best": why_no_best,
        "next": following and {key: following[key] for key in ("settings", "value", "runs")},
        "gap": gap,
        "verdict": _verdict(metric, why_no_best, best, following, gap),
        "notes": _notes(metric, points, ranked),
        "scaling": fit_scaling(_best_of_each_size(ranked)) if swept_models else None,
    }


def _notes(metric: str | None, points: Sequence[SweptRun], ranked: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the losses of a sweep do not show."""
    notes = []
    if metric != OF_AVERAGE and any(point.run and len(point.run.curve(OF_AVERAGE)) for point in points):
        fix = f"--average_last of all points, or --ema_decay with --metric_for_best_model {OF_AVERAGE}, ranks by them"
        notes.append(f"losses are those of the last weights, not of their averages; {fix}")
    if others := _differ_unswept(points):
        notes.append(f"points also differ in what is not swept: {', '.join(others)}")
    if len({group["tokens"] for group in ranked}) > 1:
        least, most = (choose(group["tokens"] or 0 for group in ranked) for choose in (min, max))
        notes.append(f"points were trained on different numbers of tokens, {least:,.0f} to {most:,.0f}")
    if any(group["why_no_noise"] for group in ranked):
        notes.append(f"noise is not known everywhere: {TOO_FEW}")
    elif ranked and min(group["count"] for group in ranked[:2]) < 2:
        notes.append("noise is the scatter within single runs; other seeds may differ by more: add --seed 1,2,3")
    return notes


def _differ_unswept(points: Sequence[SweptRun]) -> list[str]:
    """Return what differs but was not swept, because a file that the recipe reads has changed, or the code."""
    found: dict[str, list[Any]] = {}
    for facts in (RunFolder(point.folder).facts() for point in points if point.run):
        for key, value in {**facts, **(facts.get("versions") or {}), **(facts.get("config") or {})}.items():
            found.setdefault(key, []).append(value)
    compared = {*PretrainConfig.__dataclass_fields__, "git_revision", "device", "hfgpt", "torch"}
    compared -= {"output_dir", *(key for point in points for key in point.values)}
    texts = {key: shorten(values) for key, values in found.items() if key in compared}
    return [f"{key} ({', '.join(values.values())})" for key, values in texts.items() if len(values) > 1]


def _gap(best: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    levels = best["level"], following["level"]
    how = "seeds" if min(best["count"], following["count"]) > 1 else "scatter of each run's losses"
    if any(level.error is None for level in levels):
        how = TOO_FEW
    return statistics.independent_gap(*levels, how)


def _choose_metric(runs: list[PastRun]) -> tuple[str | None, str | None]:
    """Return the loss that all runs have and that means the same in all of them, or None and why there is none."""
    if not runs:
        return None, "no point has finished"
    first, others = runs[0], runs[1:]
    unlike: dict[str, list[str]] = {"training": [], "evaluation": []}
    for other in others:
        for kind, reasons in reservations(first, other).items():
            unlike[kind] += reasons
    comparable = all(loss_per_token_is_comparable(first, other)[0] for other in others)
    # An average of the last steps cannot be stated as a metric, as it does not exist before them.
    settings = [(run.settings.get("metric_for_best_model"), run.settings.get("average_last")) for run in runs]
    by_average = all(metric == OF_AVERAGE or last is not None for metric, last in settings)
    per_token = [*([OF_AVERAGE] if by_average else []), "eval_loss", "end_loss"]
    for metric in per_token if comparable else ["eval_bits_per_byte"]:
        kind = "training" if metric == "end_loss" else "evaluation"
        has_all = all(len(run.curve("loss" if metric == "end_loss" else metric)) for run in runs)
        if has_all and not unlike[kind]:
            return metric, None
    reasons = [reason for of_kind in unlike.values() for reason in dict.fromkeys(of_kind)]
    if not comparable:
        reasons.insert(0, "tokenizers differ, so only bits per byte of one held-out text can be compared")
    return None, "; ".join(reasons) or "the points have no loss in common"


def _row(point: SweptRun, metric: str | None) -> dict[str, Any]:
    summary = summarize(point.run, [point.run]) if point.run else {}
    level = point.level(metric) if metric else None
    return {
        "name": point.name,
        "path": str(point.folder),
        "settings": point.values,
        "state": point.state,
        "error": point.error,
        "loss": level and level.value,
        "noise": level and _half_width(level),
        **{key: getattr(point.level(key), "value", None) for key in METRICS},
        **{key: summary.get(key) for key in _COLUMNS},
    }


def _half_width(level: Level) -> float | None:
    """Return half the width of the 95 % band of a value."""
    return None if level.error is None else statistics.student_of_few(level.freedom) * level.error


def _group(points: Sequence[SweptRun], metric: str | None) -> list[dict[str, Any]]:
    """Return points that differ only in their seed as one, best first. If one diverged, it has no value."""
    found: dict[str, tuple[dict[str, Any], list[SweptRun]]] = {}
    for point in points:
        others = {key: value for key, value in point.values.items() if key != REPEAT}
        found.setdefault(as_key(others), (others, []))[1].append(point)
    groups = [_summarize_group(settings, members, metric) for settings, members in found.values()]
    keys = dict.fromkeys(key for group in groups for key in group["settings"])
    short = {key: shorten([group["settings"][key] for group in groups]) for key in keys}
    for group in groups:
        group["shown"] = {key: short[key][as_key(value)] for key, value in group["settings"].items()}
    return sorted(groups, key=lambda group: math.inf if group["value"] is None else group["value"])


def _summarize_group(settings: dict[str, Any], members: list[SweptRun], metric: str | None) -> dict[str, Any]:
    levels = [level for member in members if metric and (level := member.level(metric))]
    losses = np.array([level.value for level in levels])
    diverged = [member.name for member in members if metric and member.has_ended and not member.level(metric)]
    failed = [member.error for member in members if member.state == "failed"]
    why_not = f"the loss of {', '.join(diverged)} is not finite at the end" if diverged else None
    if failed:
        why_not = f"{counted(len(failed), 'run')} failed: {failed[0]}"
    level, std = (levels[0] if levels else None), None
    if len(levels) > 1:
        std = float(losses.std(ddof=1))
        level = Level(float(losses.mean()), std / math.sqrt(len(levels)), len(levels) - 1)
    if why_not:  # the mean of the other seeds would be too good
        level = std = None
    rows = [_row(member, metric) for member in members]
    rates = [row["tokens_per_second"] for row in rows if row["tokens_per_second"]]
    known = next((row for row in rows if row["loss"] is not None), rows[0])
    return {
        "settings": settings,
        "count": len(levels),
        "value": level and level.value,
        "std": std,
        "noise": level and _half_width(level),
        "why_not": why_not,
        "why_no_noise": TOO_FEW if level and level.error is None else None,
        "tokens_per_second": float(np.median(rates)) if rates else None,
        **{key: known[key] for key in ("parameters", "parameters_without_positions", "tokens", "flops")},
        "states": sorted({member.state for member in members}),
        "runs": [member.name for member in members],
        "level": level,
    }


def _best_of_each_size(ranked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the group with the lowest loss of each model, for the fit over sizes."""
    best: dict[str, dict[str, Any]] = {}
    for group in ranked:
        best.setdefault(as_key(group["settings"].get("model")), group)
    return [
        {"parameters": group["parameters_without_positions"], "flops": group["flops"], "tokens": group["tokens"],
         "loss": group["value"], "noise": group["noise"], "std": group["std"], "count": group["count"]}
        for group in best.values()
    ]  # fmt: skip


def describe_settings(group: dict[str, Any], without: str = "") -> str:
    """Return the settings of a group in words."""
    words = ", ".join(f"{key}={text}" for key, text in group["shown"].items() if key != without)
    return words or ("all seeds" if len(group["runs"]) > 1 else "the recipe as it is")


def _verdict(
    metric: str | None,
    why_no_best: str | None,
    best: dict[str, Any] | None,
    following: dict[str, Any] | None,
    gap: dict[str, Any] | None,
) -> str:
    if metric is None or best is None:
        return f"no best point: {why_no_best}"
    seeds = f", mean of {best['count']} seeds" if best["count"] > 1 else ""
    first = f"best: {describe_settings(best)} ({METRICS[metric]} {best['value']:.4f}{seeds})"
    if following is None or gap is None:
        return f"{first}; no other point to compare with"
    answer = {True: "differs by more than noise", False: "no difference beyond noise", None: "noise is not known"}
    return f"{first}; next: {describe_settings(following)}, {answer[gap['beyond_noise']]}: {describe_gap(gap)}"
