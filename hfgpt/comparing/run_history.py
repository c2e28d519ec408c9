"""What a finished or running run has left: its settings, records and ledger, read from its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.errors import UserError
from hfgpt.files import read_text_file

# Settings that name a run or say where things go, and those that `plan` holds resolved.
_NAMES = ("output_dir", "run_name", "resume_from_checkpoint", "report_to", "accept_changed_text")
_LENGTHS = ("max_tokens", "num_train_epochs")
_MODEL = (
    "n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size", "activation_function", "tie_word_embeddings",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
)  # fmt: skip


def number(value: Any) -> float | None:
    """`value` if it is a finite number, and not beyond anything a run could measure, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) < 1e100 else None
    except OverflowError:
        return None


@dataclass
class PastRun:
    """A run as it can be compared: records have the keys of metrics.jsonl, whatever they were read from.

    training, evaluations: one record per step, steps rising; `step` counts updates: the loss of step N is that of the
        Nth update's text before the update, an evaluation at N is of the model after N updates.
    settings: with defaults filled in and "auto" resolved; empty where they are not known.
    hashes: step -> batch hash, from the ledger.
    notes: what a reader should know about the reading, such as lines that were left out.
    """

    name: str
    path: str
    kind: str  # "run folder", or the form of a log
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

    def values(self, key: str, axis: str = "step", evaluations: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Where both are known, `axis` ("step", "num_input_tokens_seen", "flops", "wall_seconds") and `key`."""
        records = self.evaluations if evaluations else self.training
        pairs = [(self._place(record, axis), number(record.get(key))) for record in records]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        array = np.array(known, dtype=float).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def reach(self, axis: str) -> float | None:
        """How far the run has come on `axis` with a finite loss."""
        ends = [x[-1] for x in (self.values("loss", axis)[0], self.values("eval_loss", axis, True)[0]) if len(x)]
        return float(max(ends)) if ends else None

    def typical(self, key: str) -> float | None:
        """The median over the training records."""
        values = self.values(key)[1]
        return float(np.median(values)) if len(values) else None

    def newest(self, key: str) -> Any:
        return next((r[key] for r in reversed(self.training) if r.get(key) is not None), None)

    @property
    def tokens_per_step(self) -> int | None:
        return self.plan.get("tokens_per_step")

    @property
    def processes(self) -> int:
        return self.plan.get("processes") or 1

    @property
    def precision(self) -> str | None:
        return self.settings.get("mixed_precision")

    @property
    def state(self) -> str:
        """In plain words: finished, in progress, or how it ended."""
        if self.kind != "run folder":
            return "log"
        last = next((e for e in reversed(self.events) if e.get("event") in ("start", "resume", "end")), None)
        if last is None or last["event"] != "end":
            return "in progress, or ended without a word" if self.training or last else "nothing recorded yet"
        if last.get("fault"):
            return f"ended: {last['fault']}"
        planned, step = self.plan.get("max_steps"), last.get("step")
        return f"ended at step {step} of {planned}" if planned and step and step < planned else "finished"

    def _place(self, record: dict[str, Any], axis: str) -> float | None:
        if axis != "flops":
            return number(record.get(axis))
        tokens = number(record.get("num_input_tokens_seen"))
        return None if tokens is None or self.flops_per_token is None else tokens * self.flops_per_token


def add_in_order(records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Append, after dropping what a restarted run makes again: records of this step and later ones."""
    while records and records[-1]["step"] >= record["step"]:
        records.pop()
    records.append(record)


def read_folder(path: Path) -> PastRun:
    """The run in a folder. Raises UserError where there is none; broken lines are left out and counted."""
    folder = RunFolder(path)
    if not (folder.metrics.is_file() or folder.run_json.is_file()):
        inside = sorted(p.name for p in path.iterdir() if RunFolder(p).metrics.is_file())
        way_out = f"give one of those in it: {', '.join(inside[:5])}" if inside else "give a run's output_dir"
        raise UserError(f"run {path}: no run.json or metrics.jsonl in this folder; {way_out}")
    run = PastRun(path.resolve().name, str(path), "run folder")
    _read_facts(run, folder)
    bad = 0
    for record in _lines(folder.metrics):
        if record is None or not isinstance(record.get("step"), int) or isinstance(record["step"], bool):
            bad += 1
        elif "event" in record:
            run.events.append(record)
        elif "eval_loss" in record:
            add_in_order(run.evaluations, record)
        elif "loss" in record:
            add_in_order(run.training, record)
    if bad:
        run.notes.append(f"{bad} broken line{'s' if bad > 1 else ''} of metrics.jsonl left out")
    for line in _lines(folder.ledger):
        if line is not None and isinstance(line.get("step"), int) and isinstance(line.get("batch_hash"), str):
            run.hashes[line["step"]] = line["batch_hash"]
    if not run.training and not run.evaluations:
        run.notes.append("no training record yet")
    _take_changes(run)
    return run


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines; None for a line that is not one."""
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise UserError(f"run {path.parent}: {path.name} cannot be read ({error.strerror})") from None
    for line in content.splitlines():
        try:
            value = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            value = None
        if value != {}:
            yield value if isinstance(value, dict) else None


def _read_facts(run: PastRun, folder: RunFolder) -> None:
    try:
        content = json.loads(read_text_file(folder.run_json), parse_constant=lambda _: None)
        parts = {key: content.pop(key) for key in ("config", "model", "plan", "data")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        parts = {"": None}
    if not all(isinstance(part, dict) for part in parts.values()):
        there = "is not one of ours" if folder.run_json.is_file() else "is missing"
        run.notes.append(f"run.json {there}: settings and model are not known")
        return
    run.model, run.plan, run.data, run.facts = parts["model"], parts["plan"], parts["data"], content
    for key in ("vocab_size", "parameters", "parameters_without_positions"):
        if number(run.model.get(key)) is None:
            run.model.pop(key, None)
    for key in ("micro_batch", "sequence_length", "accumulation", "processes", "tokens_per_step", "max_steps"):
        value = number(run.plan.get(key))
        run.plan[key] = int(value) if value and value >= 1 else None
    run.settings = _resolved(parts["config"], run)
    run.flops_per_token = flops_per_token(run.model, run.plan.get("sequence_length"))


def _resolved(config: dict[str, Any], run: PastRun) -> dict[str, Any]:
    """All settings by name: stated ones over defaults, and what was decided at the start for "auto" and None."""
    from hfgpt.config import PretrainConfig

    defaults: dict[str, Any] = {spec.name: spec.default for spec in dataclasses.fields(PretrainConfig)}
    settings = defaults | config
    plan = run.plan
    if settings["min_learning_rate"] is None and number(settings["learning_rate"]):
        settings["min_learning_rate"] = 0.1 * settings["learning_rate"]
    if settings["optim"] == "muon" and settings["muon_learning_rate"] is None:
        settings["muon_learning_rate"] = settings["learning_rate"]
    if settings["per_device_eval_batch_size"] is None:
        settings["per_device_eval_batch_size"] = plan.get("micro_batch")
    decided = {
        "per_device_train_batch_size": plan.get("micro_batch"),
        "gradient_accumulation_steps": plan.get("accumulation"),
        "processes": plan.get("processes"),
        "tokens_per_step": plan.get("tokens_per_step"),
        "max_steps": plan.get("max_steps"),
        "mixed_precision": _of(plan, "precision", "name"),
        "torch_compile": _of(plan, "torch_compile", "enabled"),
        "device": run.facts.get("device"),
        "git_revision": run.facts.get("git_revision"),
        "text": run.data.get("tokens_hash") or run.data.get("dataset.commit") or run.data.get("dataset.hash"),
        "held_out": run.data.get("held_out.hash"),
        "tokenizer_hash": run.data.get("tokenizer"),
        **{f"model.{key}": run.model.get(key) for key in _MODEL},
    }
    versions = run.facts.get("versions")
    decided |= {f"version of {k}": v for k, v in versions.items()} if isinstance(versions, dict) else {}
    settings |= {key: value for key, value in decided.items() if value is not None}
    return {key: value for key, value in settings.items() if key not in (*_NAMES, *_LENGTHS, "model")}


def _of(facts: dict[str, Any], key: str, inner: str) -> str | bool | None:
    value = facts[key].get(inner) if isinstance(facts.get(key), dict) else None
    return value if isinstance(value, str | bool) else None


def _take_changes(run: PastRun) -> None:
    """Settings that a resume, or want of memory, changed hold both values: "0.1; 0.2 from step 500 on"."""
    for event in run.events:
        changes: Any = event.get("changed_settings")
        changes = changes.items() if isinstance(changes, dict) else ()
        now = {key: change["to"] for key, change in changes if isinstance(change, dict) and "to" in change}
        if event["event"] == "oom_retry":
            cut = {"per_device_train_batch_size": "micro_batch", "gradient_accumulation_steps": "accumulation"}
            now = {key: event[name] for key, name in cut.items() if name in event}
        for key, value in now.items():
            if key in run.settings:
                run.settings[key] = f"{run.settings[key]}; {value} from step {event['step']} on"


def flops_per_token(model: dict[str, Any], sequence_length: int | None) -> float | None:
    """Training FLOPs per token of a model given as GPT-2's fields; None where one is missing."""
    from hfgpt.model.flops import training_flops_per_token

    fields: Any = SimpleNamespace(**{"n_inner": None, "tie_word_embeddings": True, **model})
    try:
        return number(training_flops_per_token(fields, sequence_length))  # type: ignore[arg-type]
    except (AttributeError, TypeError, OverflowError):
        return None
