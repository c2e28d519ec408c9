"""The content of a report as data; `render` turns it into text for a terminal and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hfgpt.comparing.events import event_lines
from hfgpt.comparing.highlights import RunCard, run_card
from hfgpt.comparing.plots import Plot, build_plots
from hfgpt.comparing.runs import RUN_FOLDER, PastRun, number
from hfgpt.comparing.statistics import FLOOR
from hfgpt.comparing.values import UNKNOWN, format_value
from hfgpt.comparing.verdict import Finding, Verdict, explain

_MOST_EVALUATIONS = 20  # of a run
NOISE = (
    "Noise: half the width of a 95 % band. For training losses it follows from the scatter of step losses around their "
    "trend in the window that ends at the equal point (its last tenth, or more where records are few); for runs that "
    "saw the same tokens from their differences step by step; for evaluations from their jumps from one to the next. "
    f"It is never below {100 * FLOOR:g} % of the loss. It covers which text fell into the steps, but not what another "
    "seed would change: check a difference just beyond it with a second seed."
)
# Title -> label -> key of a run's summary (`comparison.summarize`).
_TABLES = {
    "run": {
        "read from": "kind", "state": "state", "device": "device", "parameters": "parameters", "steps": "steps",
        "steps planned": "planned_steps", "tokens": "tokens", "FLOPs": "flops", "time of training": "wall_seconds",
        "events": "events",
    },
    "model and step": {
        "parameters without positions": "parameters_without_positions", "vocabulary": "vocab_size",
        "FLOPs per token": "flops_per_token", "tokens per step": "tokens_per_step", "micro-batch": "micro_batch",
        "sequence": "sequence_length", "accumulation": "accumulation", "processes": "processes",
    },
    "speed (medians)": {
        "tokens/s": "tokens_per_second", "seconds per step": "step_seconds",
        "seconds per micro-batch": "micro_batch_seconds", "HFU": "hfu", "memory": "memory_bytes",
    },
}  # fmt: skip
_AT_END = {
    "training loss": "end_loss", "its perplexity": "end_perplexity", "averaged from step": "end_loss_from_step",
    "evaluation loss": "eval_loss", "evaluation perplexity": "eval_perplexity", "bits per byte": "eval_bits_per_byte",
    "loss of averaged weights": "eval_loss_ema", "evaluated at step": "eval_step",
    "best evaluation loss": "best_eval_loss", "at step": "best_eval_step",
}  # fmt: skip
_LOSSES = {
    "training loss": "loss", "perplexity": "perplexity", "evaluation loss": "eval_loss",
    "evaluation perplexity": "eval_perplexity", "bits per byte": "eval_bits_per_byte",
}  # fmt: skip
# The keys that a short report has.
_MAIN = {
    "state", "parameters", "steps", "tokens", "wall_seconds", "tokens_per_second", "memory_bytes", "end_loss", "loss",
    "eval_loss", "eval_bits_per_byte",
}  # fmt: skip


class Row(NamedTuple):
    """A table row: a label and one cell per run; a short report leaves out details."""

    label: str
    cells: list[str]
    is_detail: bool


class Table(NamedTuple):
    title: str
    rows: list[Row]


@dataclass
class Report:
    """Everything that a report shows.

    names: of the runs, one column each. verdicts: with a title, such as "b against a". settings: those that differ, or
    all settings of a single run. footnotes: for the tables. explanation: how to read the verdicts. cards: the summary
    of each run at the top.
    """

    names: list[str]
    verdicts: Sequence[tuple[str, Verdict | Finding]]
    settings: Table
    tables: list[Table]
    footnotes: list[str]
    events: list[str]
    notes: list[str]
    explanation: str = ""
    plots: list[Plot] = field(default_factory=list)
    cards: list[RunCard] = field(default_factory=list)

    @property
    def all_tables(self) -> list[Table]:
        """All tables in display order: differing settings first, all settings of a single run last."""
        return [self.settings, *self.tables] if self.verdicts else [*self.tables, self.settings]


def build_report(runs: Sequence[PastRun], compared: dict[str, Any], with_plots: bool = False) -> Report:
    """Build the report from the result of `comparison.compare`."""
    pairs, against = compared["pairs"], compared["mfu_against"]
    comparable = all(pair["loss_per_token_comparable"] for pair in pairs)
    footnotes = [f"[{n}] {row['peak_source'] or 'source not known'}" for n, row in enumerate(against, start=1)]
    if not comparable:
        footnotes.append("* loss per token, which is not comparable between these runs")
    return Report(
        names=[run.name for run in runs],
        verdicts=[(f"{pair['b']} against {pair['a']}", explain(pair)) for pair in pairs],
        settings=_settings_table(runs, compared["settings_that_differ"]),
        tables=[table for table in _tables(runs, compared, comparable) if table.rows],
        footnotes=footnotes,
        events=[line for run in runs for line in event_lines(run)],
        notes=compared["notes"],
        explanation=NOISE if pairs else "",
        plots=build_plots(runs, comparable) if with_plots else [],
        cards=[run_card(run, compared) for run in runs],
    )


def _settings_table(runs: Sequence[PastRun], differing: dict[str, dict[str, Any]]) -> Table:
    if len(runs) == 1:
        return Table("settings", [Row(key, [format_value(value)], True) for key, value in runs[0].settings.items()])
    rows = [
        Row(key, [format_value(values.get(run.name, UNKNOWN)) for run in runs], False)
        for key, values in differing.items()
    ]
    return Table("settings that differ", rows)


def _tables(runs: Sequence[PastRun], compared: dict[str, Any], comparable: bool) -> list[Table]:
    at_end = Table("at the end", _rows(compared["runs"], _AT_END, all_details=bool(compared["equal"])))
    tables = [Table(title, _rows(compared["runs"], labels)) for title, labels in _TABLES.items()]
    if all(run.kind == RUN_FOLDER for run in runs):
        tables[0].rows[:] = [row for row in tables[0].rows if row.label != "read from"]
    against = compared["mfu_against"]
    for n, row in enumerate(against, start=1):
        cells = ["over 100 %" if value and value > 1 else format_value(value, "mfu") for value in row["mfu"].values()]
        first, *more = row["stated_by"]
        of_runs = "" if len(against) == 1 else f" of {first}{f' and {len(more)} more' if more else ''}"
        tables[-1].rows.append(Row(f"MFU against {row['peak_tflops']:.4g} TFLOP/s{of_runs} [{n}]", cells, False))
    tables.append(at_end)
    labels = {label if comparable or "byte" in label else f"{label} *": key for label, key in _LOSSES.items()}
    main = "tokens" if "tokens" in compared["equal"] else "steps"
    for axis, point in compared["equal"].items():
        evaluated = point["eval_loss_at"]
        where = "" if evaluated in (None, point["at"]) else f", evaluated at {_place(axis, evaluated)}"
        title = f"at equal {axis} ({_place(axis, point['at'])}{where})"
        tables.append(Table(title, _rows(point["runs"].values(), labels, all_details=axis != main)))
    if len(runs) == 1:
        records = runs[0].evaluations
        newest_first = records[:: -(-(-len(records) // _MOST_EVALUATIONS) or 1)]  # evenly spread
        rows = [Row(f"step {record['step']:,}", [_evaluation(record)], True) for record in reversed(newest_first)]
        tables.append(Table("evaluations", rows))
    return tables


def _rows(columns: Iterable[dict[str, Any]], labels: dict[str, str], all_details: bool = False) -> list[Row]:
    """Return a row for each key that at least one run has."""
    columns = list(columns)
    rows = [
        Row(label, [format_value(values[key], key) for values in columns], all_details or key not in _MAIN)
        for label, key in labels.items()
    ]
    return [row for row in rows if set(row.cells) != {UNKNOWN}]


def _place(axis: str, at: float) -> str:
    return format_value(at, {"FLOPs": "flops", "wall time": "wall_seconds"}.get(axis, "tokens"))


def _evaluation(record: dict[str, Any]) -> str:
    names = {"eval_loss": "loss", "eval_perplexity": "perplexity", "eval_bits_per_byte": "bits per byte"}
    names |= {"train_eval_loss": "training split", "eval_loss_ema": "loss of averaged weights"}
    values = {key: number(record.get(key)) for key in names}
    if values["eval_loss"] is None:
        return "loss not finite"
    return ", ".join(f"{names[key]} {format_value(value, key)}" for key, value in values.items() if value is not None)
