"""Read the runs given on the command line: run folders here, console logs with `logs.read_log`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.comparing.logs import read_log
from hfgpt.comparing.runs import RUN_FOLDER, PastRun, add_record, count, number
from hfgpt.config import PretrainConfig
from hfgpt.data.position import SOURCE
from hfgpt.errors import UserError
from hfgpt.files import read_text_file
from hfgpt.links import follow
from hfgpt.model.flops import training_flops_per_token

# Settings that only name a run or its files, and lengths, which the plan records as max_steps.
_NOT_COMPARED = (
    "output_dir", "run_name", "resume_from_checkpoint", "report", "report_to", "accept_changed_text", "max_tokens",
    "num_train_epochs", "model", "hub_strategy",
)  # fmt: skip
_MODEL = (
    "n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size", "activation_function", "tie_word_embeddings",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
)  # fmt: skip
_RECORD_FILES = ("metrics.jsonl", "run.json")


def read_runs(paths: Sequence[str | Path], tokens_per_step: Sequence[int] = ()) -> list[PastRun]:
    """Read run folders and logs, and give each run a different name.

    tokens_per_step: for the logs: one value for all, or one for each, in order. Raises UserError with all problems.
    """
    places = [follow(path) for path in paths]
    logs = [path for path in places if path.is_file() and path.name not in _RECORD_FILES]
    problems = [f"tokens_per_step={value}: must be greater than 0" for value in tokens_per_step if value < 1]
    if len(tokens_per_step) not in (0, 1, len(logs)):
        problems.append(
            f"tokens_per_step: {len(tokens_per_step)} values for {len(logs)} logs; give one value, or one per log"
        )
    stated = dict(zip(logs, [*tokens_per_step] * (len(logs) if len(tokens_per_step) == 1 else 1), strict=False))
    runs = []
    for path in places:
        try:
            runs.append(_read_run(path, stated.get(path)))
        except UserError as error:
            problems += error.problems
        except OSError as error:
            problems.append(f"run {path}: cannot be read ({error.strerror})")
    if problems:
        raise UserError(*problems)
    _make_names_unique(runs)
    return runs


def _read_run(path: Path, tokens_per_step: int | None) -> PastRun:
    if path.is_dir():
        return read_folder(path)
    if path.name in _RECORD_FILES and path.is_file():
        return read_folder(path.parent)
    if path.exists():
        return read_log(path, tokens_per_step)
    raise UserError(f"run {path}: no such folder or file; give a run's output_dir, or a console log")


def _make_names_unique(runs: list[PastRun]) -> None:
    names = [run.name for run in runs]
    taken: set[str] = set()
    for run in runs:
        name = run.name if names.count(run.name) == 1 else "/".join(Path(run.path).absolute().parts[-2:])
        candidates = [name, *(f"{name} ({n})" for n in range(2, len(runs) + 2))]
        run.name = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(run.name)


def read_folder(path: Path, with_ledger: bool = True) -> PastRun:
    """Read a run folder, skipping and counting broken lines. Raises UserError if it contains no run.

    with_ledger: also read the batch hashes, needed only to tell whether two runs saw the same tokens.
    """
    folder = RunFolder(path)
    if not (folder.metrics.is_file() or folder.run_json.is_file()):
        inside = sorted(p.name for p in path.iterdir() if RunFolder(p).metrics.is_file())
        fix = f"give one of those in it: {', '.join(inside[:5])}" if inside else "give a run's output_dir"
        raise UserError(f"run {path}: no run.json or metrics.jsonl in this folder; {fix}")
    run = PastRun(path.resolve().name, str(path), RUN_FOLDER)
    _read_facts(run, folder)
    records = folder.records()
    for record in records:
        if "event" in record:
            run.events.append(record)
        elif "eval_loss" in record:
            add_record(run.evaluations, record)
        elif "loss" in record:
            add_record(run.training, record)
    _note_broken(run, folder.metrics, records)
    if with_ledger:
        ledger = folder.text_records()
        _note_broken(run, folder.ledger, ledger)
        run.hashes = {line["step"]: line["batch_hash"] for line in ledger if isinstance(line.get("batch_hash"), str)}
    if not run.training and not run.evaluations:
        run.notes.append("no training record yet")
    _apply_changes(run)
    return run


def _note_broken(run: PastRun, path: Path, records: list[dict[str, Any]]) -> None:
    """Add a note if the file has more lines than were read as `records`."""
    content = path.read_bytes() if path.is_file() else b""
    lines = content.splitlines()
    if broken := len(lines) - lines.count(b"") - len(records):
        # The run may still be writing its last line, or have died while writing it.
        cut = " (the last is incomplete)" if not content.endswith(b"\n") else ""
        run.notes.append(f"{broken} broken line{'s' if broken > 1 else ''} of {path.name} skipped{cut}")


def _read_facts(run: PastRun, folder: RunFolder) -> None:
    try:
        facts = json.loads(read_text_file(folder.run_json), parse_constant=lambda _: None)
        config, run.model, run.plan, run.data = (dict(facts.pop(key)) for key in ("config", "model", "plan", "data"))
        run.facts = facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problem = "cannot be read" if folder.run_json.is_file() else "is missing"
        run.notes.append(f"run.json {problem}: settings and model are not known")
        return
    for key in ("vocab_size", "parameters", "parameters_without_positions"):
        if number(run.model.get(key)) is None:
            run.model.pop(key, None)
    for key in ("micro_batch", "sequence_length", "accumulation", "processes", "tokens_per_step", "max_steps"):
        value = number(run.plan.get(key))
        run.plan[key] = int(value) if value and value >= 1 else None
    run.settings = _resolve_settings(config, run)
    run.flops_per_token = _flops_per_token(run.model, run.plan["sequence_length"])


def _resolve_settings(config: dict[str, Any], run: PastRun) -> dict[str, Any]:
    """Return all settings by name: recorded values over defaults, with "auto" and None replaced by the run's choice."""
    settings: dict[str, Any] = {spec.name: spec.default for spec in dataclasses.fields(PretrainConfig)} | config
    plan = run.plan
    if settings["min_learning_rate"] is None and number(settings["learning_rate"]):
        settings["min_learning_rate"] = 0.1 * settings["learning_rate"]
    if settings["optim"] == "muon" and settings["muon_learning_rate"] is None:
        settings["muon_learning_rate"] = settings["learning_rate"]
    usual = dict.fromkeys(("embedding_learning_rate", "vector_learning_rate"), settings["learning_rate"])
    usual |= {"embedding_weight_decay": settings["weight_decay"], "vector_weight_decay": 0.0}
    settings |= {key: None for key, value in usual.items() if settings[key] == value}  # as if it were not stated
    if settings["per_device_eval_batch_size"] is None:
        settings["per_device_eval_batch_size"] = plan["micro_batch"]
    chosen = {
        "per_device_train_batch_size": plan["micro_batch"],
        "gradient_accumulation_steps": plan["accumulation"],
        **{key: plan[key] for key in ("processes", "tokens_per_step", "max_steps")},
        "mixed_precision": _choice(plan, "precision", "name"),
        "torch_compile": _choice(plan, "torch_compile", "enabled"),
        **{key: run.facts.get(key) for key in ("device", "git_revision")},
        "text": _text_of(run.data),
        "held_out": run.data.get("held_out.hash"),
        "tokenizer_hash": run.data.get("tokenizer"),
        **{f"model.{key}": run.model.get(key) for key in _MODEL},
    }
    versions = run.facts.get("versions")
    chosen |= {f"version of {k}": v for k, v in versions.items()} if isinstance(versions, dict) else {}
    settings |= {key: value for key, value in chosen.items() if value is not None}
    return {key: value for key, value in settings.items() if key not in _NOT_COMPARED}


def _text_of(data: dict[str, Any]) -> str | None:
    """Return what identifies the text of a run, of all sources if it is a mixture."""
    if found := data.get("tokens_hash") or data.get("dataset.commit") or data.get("dataset.hash"):
        return found
    keys = tuple(f"{SOURCE}{key}" for key in ("dataset.commit", "dataset.hash"))
    of_sources = [f"{key} {value}" for key, value in sorted(data.items()) if key.endswith(keys)]
    return xxhash.xxh3_64_hexdigest("; ".join(of_sources).encode()) if of_sources else None


def _choice(plan: dict[str, Any], key: str, inner: str) -> str | bool | None:
    value = plan[key].get(inner) if isinstance(plan.get(key), dict) else None
    return value if isinstance(value, str | bool) else None


def _apply_changes(run: PastRun) -> None:
    """Show both values of settings that a resume or an out-of-memory retry changed: "0.1; 0.2 from step 500 on".

    The length of the run is that of the newest resume.
    """
    for event in run.events:
        changes: Any = event.get("changed_settings")
        changes = changes.items() if isinstance(changes, dict) else ()
        now = {key: change["to"] for key, change in changes if isinstance(change, dict) and "to" in change}
        if event["event"] == "resume" and (planned := count(event.get("max_steps") or now.get("max_steps"))):
            run.plan["max_steps"] = planned
        if event["event"] == "oom_retry":
            keys = {"per_device_train_batch_size": "micro_batch", "gradient_accumulation_steps": "accumulation"}
            now = {key: event[name] for key, name in keys.items() if name in event}
        for key, value in now.items():
            if key in run.settings:
                run.settings[key] = f"{run.settings[key]}; {value} from step {event['step']} on"


def _flops_per_token(model: dict[str, Any], sequence_length: int | None) -> float | None:
    """Return the training FLOPs per token of a model with these fields; None if a field is missing or impossible."""
    fields: Any = SimpleNamespace(**{"n_inner": None, "tie_word_embeddings": True, **model})
    try:
        return number(training_flops_per_token(fields, sequence_length))  # type: ignore[arg-type]
    except (AttributeError, TypeError, OverflowError):
        return None
