"""Proof from a run's ledger of what it was trained on: the stream is made again, without training."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.run_folder import RunFolder, is_count
from hfgpt.config import PretrainConfig
from hfgpt.data import TextData, prepare_again
from hfgpt.data.sources import text_hash
from hfgpt.data.stream import DocumentStream, Origin, StepBatch, batch_hash, iterate
from hfgpt.errors import UserError
from hfgpt.field_types import shown
from hfgpt.files import read_text_file


def audit(folder: str | Path) -> dict[str, Any]:
    """Facts about the text of a run, and `problems`: lines for what is repeated, skipped, leaked or not as recorded.

    Raises UserError for a folder without a run, and where its text can no longer be read.
    """
    run = RunFolder(folder)
    facts, ledger = _read_run(run)
    steps, problems = [line["step"] for line in ledger], []
    if (last := _last_step(run)) > len(steps):
        problems.append(f"the ledger ends at step {len(steps)}, the run was at step {last}")
    if steps != list(range(1, len(steps) + 1)):
        problems.append(f"the ledger's {len(steps)} steps are not 1 to {len(steps)}, each once")
    data = _text_of(run, facts)
    for key, then in facts["data"].items():
        if (now := data.train.fingerprint.get(key)) != then:
            problems.append(f"the text is no longer that of the run: {key} was {then!r} and is {now!r}")
    seen = _Seen(data)
    same = 0
    for line, batch in zip(ledger, iterate(data.train, None), strict=False):
        if batch_hash(batch.blocks) != line["batch_hash"] or batch.position != line["position"]:
            problems.append(f"step {line['step']} was not trained on the text that follows in the stream")
            break
        same += 1
        seen.take(batch)
    problems += seen.problems()
    return {
        "run": str(folder),
        "steps": len(steps),
        "steps_as_recorded": same,
        "tokens": same * facts["plan"]["tokens_per_step"],
        # Of a text in memory, which is one run of tokens, single documents are not told apart.
        "documents": seen.count if seen.source else None,
        "epochs_completed": seen.completed if seen.source else None,
        "validation_documents": data.validation_documents if seen.source else None,
        "leaked": seen.leaked if seen.source else None,
        "skipped_rows": dict(seen.skipped + data.skipped),
        "problems": problems,
    }


def _read_run(run: RunFolder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """run.json and the lines of the ledger. Raises UserError where they are not as a run writes them."""
    try:
        facts = json.loads(read_text_file(run.run_json))
        ledger = [json.loads(line) for line in read_text_file(run.ledger).splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        reason = shown(getattr(error, "strerror", None) or str(error))
        raise UserError(
            f"run {run.path}: no readable run.json and ledger.jsonl ({reason}); give a run folder"
        ) from None
    wrong = None
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), dict) for key in ("config", "data", "plan")):
        wrong = "run.json without config, data and plan"
    elif not all(
        is_count(facts["plan"].get(key)) for key in ("micro_batch", "accumulation", "processes", "tokens_per_step")
    ):
        wrong = "run.json without the sizes of a step"
    for number, line in enumerate(ledger, start=1):
        if not (isinstance(line, dict) and is_count(line.get("step")) and {"batch_hash", "position"} <= line.keys()):
            wrong = wrong or f"line {number} of ledger.jsonl without a step, hash or position"
    if wrong:
        raise UserError(f"run {run.path}: {wrong}; give a run folder")
    return facts, ledger


def _last_step(run: RunFolder) -> int:
    """The furthest step that the run's checkpoints and whole lines of metrics speak of."""
    steps = [int(folder.name.split("-")[1]) for folder in run.checkpoints()]
    steps += [record["step"] for record in run.records() if is_count(record["step"])]
    return max(steps, default=0)


def _text_of(run: RunFolder, facts: dict[str, Any]) -> TextData:
    """The text of a run at its commit, in the tokenizer of its newest checkpoint."""
    plan, config = facts["plan"], PretrainConfig.of_run(facts["config"])
    blocks_per_step = plan["micro_batch"] * plan["accumulation"] * plan["processes"]
    return prepare_again(config, blocks_per_step, facts["config"], facts["data"], next(iter(run.checkpoints()), None))


class _Seen:
    """Which documents the steps had. A stream from memory is one run of tokens, of which the hash says all."""

    def __init__(self, data: TextData) -> None:
        self.source = data.train.source if isinstance(data.train, DocumentStream) else None
        self.held_out = self.source.exclude if self.source else frozenset[int]()
        self.last: list[Origin] = []
        self.rows: dict[tuple[int, int], array[int]] = {}  # by epoch and unit
        self.skipped: Counter[str] = Counter()
        self.leaked = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def completed(self) -> int:
        """Epochs that every logical stream has left behind."""
        return min((epoch for epoch, *_ in self.last), default=0)

    def take(self, batch: StepBatch) -> None:
        for stream, origins in enumerate(batch.documents):
            begun_before = bool(self.last) and origins[0][:3] == self.last[stream][:3]
            for epoch, unit, row, _ in origins[begun_before:]:
                self.rows.setdefault((epoch, unit), array("l")).append(row)
        self.last = [origins[-1] for origins in batch.documents]
        self.skipped.update(batch.skipped)

    def problems(self) -> list[str]:
        """Documents repeated or left out within an epoch, or of the validation text, with all units read again."""
        if self.source is None:
            return []
        everything = dataclasses.replace(self.source, exclude=frozenset())
        repeated, missing, leaked = Counter[str](), Counter[str](), Counter[str]()
        by_unit = defaultdict(list)
        for (epoch, unit), seen in self.rows.items():
            by_unit[unit].append((epoch, seen))
        for unit in sorted(by_unit):
            rows = everything.read(self.source.units[unit])
            held_out = {i for i, row in enumerate(rows) if isinstance(row, str) and text_hash(row) in self.held_out}
            usable = {i for i, row in enumerate(rows) if isinstance(row, str)} - held_out
            for epoch, seen in by_unit[unit]:
                where = f"unit {unit} ({self.source.units[unit].file}) in epoch {epoch}"
                repeated[where] += len(seen) - len(set(seen))
                leaked[where] += len(held_out.intersection(seen))
                if epoch < self.completed:
                    missing[where] += len(usable.difference(seen))
        self.leaked = leaked.total()
        return [
            f"{found.total()} documents {what}: {', '.join(+found)}"
            for found, what in (
                (repeated, "came more than once in an epoch"),
                (missing, "never came in an epoch that is over"),
                (leaked, "of the validation text were trained on"),
            )
            if found.total()
        ]
