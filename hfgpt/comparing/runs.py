"""A run to compare: its settings, records and ledger, from a run folder or a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

RUN_FOLDER = "run folder"  # kind of a run that is not a log


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number of plausible size, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) < 1e100 else None
    except OverflowError:
        return None


def count(value: Any) -> int | None:
    """Return `value` if it is a whole number of at least 1, else None."""
    known = number(value)
    return int(known) if known is not None and known >= 1 and known == int(known) else None


def _column(records: list[dict[str, Any]], key: str) -> np.ndarray:
    """Return the values of `key` as floats: NaN wherever `number` returns None."""
    values = [record.get(key) for record in records]
    if not set(map(type, values)) <= {float, int, type(None)}:  # otherwise numpy converts them, which is much faster
        values = list(map(number, values))
    try:
        column = np.array(values, dtype=float)
    except OverflowError:
        column = np.array(list(map(number, values)), dtype=float)
    column[~(np.abs(column) < 1e100)] = np.nan
    return column


@dataclass
class PastRun:
    """A finished or running run. Records have the keys of metrics.jsonl.

    training, evaluations: one record per step, in rising order. `step` counts updates: the loss of step N is measured
        on the text of the Nth update, before that update; an evaluation at N is of the model after N updates.
    settings: with defaults filled in and "auto" resolved; empty if unknown.
    hashes: step -> batch hash, from the ledger.
    notes: remarks on how the files were read, such as skipped lines.
    """

    name: str
    path: str
    kind: str  # RUN_FOLDER, or the format of a log
    training: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # the rest of run.json
    hashes: dict[int, str] = field(default_factory=dict)
    flops_per_token: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> int | None:
        return self.plan.get("tokens_per_step")

    @property
    def processes(self) -> int:
        return self.plan.get("processes") or 1

    @property
    def device(self) -> Any:
        return self.facts.get("device") or self.settings.get("device")

    @property
    def state(self) -> str:
        """The state of the run in words: finished, in progress, or how it ended."""
        if self.kind != RUN_FOLDER:
            return "log"
        last = next((e for e in reversed(self.events) if e.get("event") in ("start", "resume", "end")), None)
        if last is None or last["event"] != "end":
            return "in progress, or killed" if self.training or last else "nothing recorded yet"
        if last.get("fault"):
            return f"ended: {last['fault']}"
        planned, step = self.plan.get("max_steps"), last.get("step")
        return f"ended at step {step} of {planned}" if planned and step and step < planned else "finished"

    def curve(self, key: str, axis: str = "step") -> pd.Series:
        """Return the values of `key` over `axis`, wherever both are known.

        axis: "step", "num_input_tokens_seen", "flops" or "wall_seconds". Keys that begin with `eval_` come from
        evaluations, others from training.
        """
        records = self.evaluations if key.startswith("eval_") else self.training
        places, values = self._places(records, axis), _column(records, key)
        known = np.isfinite(places) & np.isfinite(values)
        curve = pd.Series(values[known], index=places[known])
        return curve[~curve.index.duplicated()]

    def _places(self, records: list[dict[str, Any]], axis: str) -> np.ndarray:
        if axis != "flops":
            return _column(records, axis)
        return _column(records, "num_input_tokens_seen") * (self.flops_per_token or float("nan"))

    def places_of(self, steps: Sequence[int], axis: str) -> list[float]:
        """Return the positions of steps on `axis`, interpolated between records; empty if the records have none."""
        records = sorted((*self.training, *self.evaluations), key=lambda record: record["step"])
        places = self._places(records, axis)
        known = np.isfinite(places)
        if not known.any():
            return []
        return np.interp(steps, [0, *_column(records, "step")[known]], [0, *places[known]]).tolist()

    @property
    def last_step(self) -> int:
        """The step of the last record or skipped step."""
        records = (*self.training[-1:], *self.evaluations[-1:], *self.events)
        return max((record["step"] for record in records), default=0)

    def reach(self, axis: str) -> float | None:
        """Return the last position on `axis` with a finite loss."""
        curves = (self.curve("loss", axis), self.curve("eval_loss", axis))
        return max((float(curve.index[-1]) for curve in curves if len(curve)), default=None)

    def median(self, key: str) -> float | None:
        """Return the median of `key` over the training records."""
        values = self.curve(key)
        return float(values.median()) if len(values) else None

    def newest(self, key: str) -> Any:
        return next((record[key] for record in reversed(self.training) if record.get(key) is not None), None)


def add_record(records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Append a record, replacing records of the same and later steps, which a resumed run repeats."""
    drop_from(records, record["step"])
    records.append(record)


def drop_from(records: list[dict[str, Any]], step: int) -> None:
    while records and records[-1]["step"] >= step:
        records.pop()
