"""`Progress`: the counters and newest results that `trainer_state.json` keeps."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Progress:
    """Counters and newest results of a run, saved in each checkpoint."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the run that a checkpoint belongs to
    step: int = 0  # finished optimizer updates
    num_input_tokens_seen: int = 0  # target tokens over all processes
    # The step, and the tokens before it, from which `tokens_per_step` counts: where a resume changed what had begun.
    sized_since: tuple[int, int] = (0, 0)
    wall_seconds: float = 0.0  # training time across resumes, without evaluation, saving and compilation
    skipped_rows: Counter[str] = field(default_factory=Counter)  # unusable rows of text, counted by reason
    evaluation: dict[str, Any] = field(
        default_factory=dict
    )  # the newest evaluation record, made at step `evaluation_step`
    evaluation_step: int = 0
    evaluated_since: int = 0  # after this step, evaluations are of the present held-out text
    evaluation_is_due: bool = False  # a signal interrupted an evaluation
    best_metric: float | None = None
    best_step: int | None = None
    trackers: dict[str, str] = field(default_factory=dict)  # the id of the run in each tracker
    # Of each source of a mixture: `tokens` so far, newest `loss` and its `loss_step`, and `last_step` if it is over.
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollbacks: int = 0  # of the run so far, see rollback.py
    passed_over: int = 0  # steps whose text they passed over, in total

    def to_json(self) -> dict[str, Any]:
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        # JSON has no infinity, so an overflowing evaluation is not kept.
        is_finite = math.isfinite(self.evaluation.get("eval_perplexity", math.nan))
        evaluation = {key: of for key, of in self.evaluation.items() if not isinstance(of, float) or math.isfinite(of)}
        state["sources"] = {name: dict(of) for name, of in self.sources.items()}
        return {**state, "skipped_rows": dict(self.skipped_rows), "evaluation": evaluation if is_finite else None}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Progress:
        known = {one.name: state[one.name] for one in fields(cls) if one.name in state}
        skipped_rows = Counter(state["skipped_rows"])
        return cls(**{**known, "skipped_rows": skipped_rows, "evaluation": state["evaluation"] or {}})

    def return_to(self, state: dict[str, Any]) -> None:
        """Take the state of an earlier checkpoint of this run, but keep what the run has cost and where it reports."""
        kept = {name: getattr(self, name) for name in ("wall_seconds", "trackers", "sized_since", "evaluated_since")}
        vars(self).update({**vars(self.from_json(state)), **kept, "evaluation_is_due": False})
        self.forget_earlier_text()

    def follow_rollback(self, rollback: dict[str, Any]) -> None:
        """Count a rollback, and the unusable rows in the text that it passed over."""
        self.rollbacks, self.passed_over = rollback["number"], rollback["passed_over"]
        self.skipped_rows = Counter(rollback["skipped_rows"])

    def forget_earlier_text(self) -> None:
        """Drop results that were measured on the held-out text of before `evaluated_since`."""
        if self.evaluation_step <= self.evaluated_since:
            self.evaluation = {}
        if self.best_step is not None and self.best_step <= self.evaluated_since:
            self.best_metric = self.best_step = None

    def forget_average(self) -> None:
        """Drop what the newest evaluation has of an average of the weights."""
        self.evaluation = {key: of for key, of in self.evaluation.items() if not key.partition("/")[0].endswith("_ema")}

    def note_evaluation(self, metrics: dict[str, Any], best_by: str) -> bool:
        """Keep the evaluation of the current step. Returns whether it has the lowest value of `best_by` so far."""
        self.evaluation, self.evaluation_step = metrics, self.step
        value = metrics.get(best_by, math.nan)  # of an average of no steps
        is_best = value < (math.inf if self.best_metric is None else self.best_metric)
        if is_best:
            self.best_metric, self.best_step = value, self.step
        return is_best
