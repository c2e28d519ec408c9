"""Check what a run was trained on: reproduce its text stream, without training, and compare with its ledger."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.read_records import is_count, rollbacks_of
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.config import PretrainConfig
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.loader import iterate
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.mixture import MixedStream
from hfgpt.data.position import streams_of
from hfgpt.data.run_text import prepare_data_of_run
from hfgpt.data.source import text_hash
from hfgpt.data.stream import Origin, StepBatch, Stream, UnitNumber, is_hash_of
from hfgpt.data.units import Unusable
from hfgpt.errors import UserError
from hfgpt.files import read_text_file
from hfgpt.messages.formats import counted, shown
from hfgpt.settings.step_sizes import StepSizes

RESTORE = "restore the file from a copy, as its content is stored nowhere else"
LEAKED = "of the validation text were trained on"


def audit(folder: str | Path) -> dict[str, Any]:
    """Return facts about the text of a run, and `problems`: what was repeated, skipped, leaked or not as recorded.

    Raises UserError for a folder without a run, and if its text can no longer be read.
    """
    run = RunFolder(folder)
    facts, ledger = _read_run(run)
    problems = _find_lost_lines(run, ledger)
    config = PretrainConfig.of_run(facts["config"])
    sizes = _step_sizes(run, facts, ledger)
    newest = next(iter(run.checkpoints()), None)
    data = prepare_data_of_run(config, sizes, facts["config"], facts["data"], newest)
    for key, then in facts["data"].items():
        if (now := data.train.fingerprint.get(key)) != then and key != "blocks_per_step":
            problems.append(f"the text has changed since the run: {key} was {then!r} and is {now!r}")
    seen, skipped = _seen_documents(data.train), Counter[str]()
    same, tokens_of_sources = 0, None
    if isinstance(data.train, MixedStream):
        _follow_changes(data.train, run, ledger)
    before, batches = data.train.start, iterate(data.train, None)
    passed_over = {"steps": 0, "documents": 0}
    for line, batch in zip(ledger, batches, strict=False):
        if not is_hash_of(str(line["batch_hash"]), batch.blocks) or batch.position != line["position"]:
            problems.append(f"step {line['step']} was not trained on the next text in the stream")
            break
        if isinstance(data.train, MixedStream):
            blocks = data.train.blocks_between(before, batch.position)
            before, tokens_of_sources = batch.position, batch.position["tokens"]
            if line.get("blocks") != blocks:
                problems.append(f"step {line['step']} has blocks {line.get('blocks')}, not {blocks}")
        same += 1
        skipped.update(batch.skipped)
        for one in seen.values():
            one.add(batch)
        if problem := _pass_over(line, batches, seen, skipped, passed_over):
            problems.append(problem)
            break
    found = [one.check() for one in seen.values()]
    for what, counts in (item for of_source in found for item in of_source.items()):
        if +counts:
            problems.append(f"{counted(counts.total(), 'document')} {what}: {', '.join(+counts)}")
    return {
        "run": str(folder),
        "steps": len(ledger),
        "steps_as_recorded": same,
        "tokens": sizes.tokens_after(same),
        **_count_documents(seen),
        **_count_sources(tokens_of_sources or {}, seen),
        **_left_out(run, passed_over, sizes.tokens(0)),
        **({"not_checked": why} if (why := _why_not_checked(data.train)) else {}),
        "validation_documents": data.validation_documents if seen else None,
        "leaked": sum(of_source[LEAKED].total() for of_source in found) if seen else None,
        "skipped_rows": dict(data.skipped + skipped),
        "problems": problems,
    }


def _find_lost_lines(run: RunFolder, ledger: list[dict[str, Any]]) -> list[str]:
    steps, problems = [line["step"] for line in ledger], []
    if (last := _last_step(run)) > len(steps):
        problems.append(f"the ledger ends at step {len(steps)}, but the run reached step {last}")
    if steps != list(range(1, len(steps) + 1)):
        problems.append(f"the ledger's {len(steps)} lines are not steps 1 to {len(steps)}, each once")
    return problems


def _pass_over(
    line: dict[str, Any],
    batches: Iterator[StepBatch],
    seen: dict[str, _SeenDocuments],
    skipped: Counter[str],
    passed_over: dict[str, int],
) -> str | None:
    """Go on with the text past what rollbacks to the step of a line have passed over. Returns what is wrong with it."""
    begun = sum(one.count for one in seen.values())
    for rollback in rollbacks_of(line):
        position = None
        for batch in islice(batches, rollback["steps"]):
            position = batch.position
            skipped.update(batch.skipped)
            for one in seen.values():
                one.add(batch)
            passed_over["steps"] += 1
        if position != rollback["position"]:
            return f"rollback {rollback['number']} to step {line['step']} has not passed over the text as recorded"
    passed_over["documents"] += sum(one.count for one in seen.values()) - begun
    return None


def _left_out(run: RunFolder, passed_over: dict[str, int], tokens_per_step: int) -> dict[str, Any]:
    """Return the text that was read but is not in the model: of skipped steps, and that rollbacks passed over."""
    skipped = [record["step"] for record in run.records() if record.get("event") == "skip_step"]
    facts: dict[str, Any] = {"skipped_steps": skipped} if skipped else {}
    if passed_over["steps"]:
        facts["passed_over"] = {**passed_over, "tokens": passed_over["steps"] * tokens_per_step}
    return facts


def _count_sources(tokens: dict[str, int], seen: dict[str, _SeenDocuments]) -> dict[str, Any]:
    """Return tokens and documents of each source of a mixture; empty if it is none."""
    sources = {
        name: {"tokens": count, **({"documents": seen[name].count} if name in seen else {})}
        for name, count in tokens.items()
    }
    return {"sources": sources} if sources else {}


def _count_documents(seen: dict[str, _SeenDocuments]) -> dict[str, int | None]:
    """Return the documents and epochs of a run; null for a text in memory, which has no separate documents."""
    return {
        "documents": sum(one.count for one in seen.values()) if seen else None,
        "epochs_completed": min(one.epochs_completed for one in seen.values()) if seen else None,
        "epochs_begun": max(one.epochs_begun for one in seen.values()) if seen else None,
    }


def _seen_documents(stream: Stream) -> dict[str, _SeenDocuments]:
    """Return what tracks each document stream of a run, by source."""
    if isinstance(stream, DocumentStream):
        return {"": _SeenDocuments(stream, "", None)}
    sources = enumerate(stream.sources.items() if isinstance(stream, MixedStream) else ())
    return {n: _SeenDocuments(one, n, i) for i, (n, one) in sources if isinstance(one, DocumentStream)}


def _why_not_checked(stream: Stream) -> str:
    """Return why some or all documents are not checked one by one; empty if they are."""
    sources = stream.sources if isinstance(stream, MixedStream) else {"": stream}
    whole = [name for name, one in sources.items() if isinstance(one, MemoryBlocks)]
    of_sources = f" ({', '.join(whole)})" if any(whole) else ""
    in_memory = f"documents of text in memory{of_sources}: it is one run of tokens, whose hash and blocks are compared"
    return in_memory if whole else ""


def _step_sizes(run: RunFolder, facts: dict[str, Any], ledger: list[dict[str, Any]]) -> StepSizes:
    """Return the blocks of each step, which a resume may have changed from there on."""
    changes = [record["blocks_per_step"] for record in run.records() if record.get("blocks_per_step")]
    sizes = StepSizes.read([facts["data"].get("blocks_per_step"), *changes][-1], facts["plan"]["sequence_length"])
    if sizes is None:
        raise UserError(f"run {run.path}: run.json without the sizes of a step; give a run folder")
    streams = streams_of(ledger[0]["position"]) if ledger else None
    return dataclasses.replace(sizes, streams=streams if streams and not sizes.common % streams else None)


def _follow_changes(stream: MixedStream, run: RunFolder, ledger: list[dict[str, Any]]) -> None:
    """Use the weights that the run has recorded: those of its start, or of its last resume.

    Sources end where the ledger says so, because a resume may have moved their ends.
    """
    stream.lift_limits()
    positions = ((line["step"] - 1, line["position"]) for line in ledger)
    stream.over_at = {step: position["over"] for step, position in positions if "over" in position}
    if changes := [record["weights"] for record in run.records() if record.get("weights")]:
        stream.follow(changes[-1])


def _read_run(run: RunFolder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return run.json and the lines of the ledger. Raises UserError if they are missing or malformed."""
    facts, where = {}, "run.json"
    try:
        facts = json.loads(read_text_file(run.run_json))
        where = "ledger.jsonl"
        # Without a line end, the last line is incomplete: the run may be writing it, or have died while writing.
        lines = [line for line in read_text_file(run.ledger).splitlines(keepends=True) if line.endswith("\n")]
        ledger = []
        for number, line in enumerate(lines, start=1):
            where = f"line {number} of ledger.jsonl"
            ledger.append(json.loads(line))
    except FileNotFoundError:
        fix = "give a run folder" if where == "run.json" else RESTORE
        raise UserError(f"run {run.path}: no {where}; {fix}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = shown(getattr(error, "strerror", None) or str(error))
        raise UserError(f"run {run.path}: {where} cannot be read ({reason}); {RESTORE}") from None
    wrong = None
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), dict) for key in ("config", "data", "plan")):
        wrong = "run.json without config, data and plan"
    elif not is_count(facts["plan"].get("sequence_length")):
        wrong = "run.json without the sizes of a step"
    for number, line in enumerate(ledger, start=1):
        if not (
            isinstance(line, dict)
            and is_count(line.get("step"))
            and "batch_hash" in line
            and isinstance(line.get("position"), dict)
        ):
            wrong = wrong or f"line {number} of ledger.jsonl without a step, hash or position"
            continue
        try:
            rollbacks_of(line)
        except ValueError:
            wrong = wrong or f"line {number} of ledger.jsonl with a rollback that cannot be read"
    if wrong:
        fix = RESTORE if wrong.startswith("line") else "give a run folder"
        raise UserError(f"run {run.path}: {wrong}; {fix}")
    return facts, ledger


def _last_step(run: RunFolder) -> int:
    """Return the last step among the run's checkpoints and metrics."""
    steps = [int(folder.name.split("-")[1]) for folder in run.checkpoints()]
    steps += [record["step"] for record in run.records()]
    return max(steps, default=0)


class _SeenDocuments:
    """Tracks the documents used by the steps of a document stream, the source `name` of a mixture if it has one."""

    def __init__(self, stream: DocumentStream, name: str, number: int | None) -> None:
        self._source, self._streams, self._name, self._number = stream.source, stream.streams, name, number
        self._last: dict[int, Origin] = {}  # by logical stream
        self._rows: dict[tuple[int, UnitNumber], array[int]] = {}  # by epoch and unit

    @property
    def count(self) -> int:
        return sum(map(len, self._rows.values()))

    @property
    def epochs_completed(self) -> int:
        """Number of epochs that every logical stream has finished."""
        return min((epoch for epoch, *_ in self._last.values()), default=0) if len(self._last) == self._streams else 0

    @property
    def epochs_begun(self) -> int:
        """Number of epochs that some logical stream has begun. Each goes through its part of the text by itself."""
        return 1 + max((epoch for epoch, *_ in self._last.values()), default=-1)

    def add(self, batch: StepBatch) -> None:
        for stream, of_stream in enumerate(batch.documents):
            if not (origins := of_stream if self._number is None else of_stream[self._number]):
                continue  # the step has no block of this source here
            begun_before = stream in self._last and origins[0][:3] == self._last[stream][:3]
            for epoch, unit, row, _ in origins[begun_before:]:
                self._rows.setdefault((epoch, unit), array("l")).append(row)
            self._last[stream] = origins[-1]

    def check(self) -> dict[str, Counter[str]]:
        """Count problems with the documents, by kind, unit and epoch. Reads all units again."""
        source = self._source
        everything = dataclasses.replace(source, exclude=frozenset())
        repeated, missing, leaked = Counter[str](), Counter[str](), Counter[str]()
        by_unit = defaultdict(list)
        for (epoch, unit), seen in self._rows.items():
            by_unit[unit].append((epoch, seen))
        for unit in sorted(by_unit):
            rows = everything.read(source.unit(unit))
            documents = {i: row for i, row in enumerate(rows) if not isinstance(row, Unusable)}
            held_out = {i for i, row in documents.items() if text_hash(row) in source.exclude}
            usable = documents.keys() - held_out
            for epoch, seen in by_unit[unit]:
                of_source = f"source {self._name}, " if self._name else ""
                where = f"{of_source}unit {unit} ({source.unit(unit).file}) in epoch {epoch}"
                repeated[where] += len(seen) - len(set(seen))
                leaked[where] += len(held_out.intersection(seen))
                if epoch < self.epochs_completed:
                    missing[where] += len(usable.difference(seen))
        return {
            "appeared more than once in an epoch": repeated,
            "never appeared in a finished epoch": missing,
            LEAKED: leaked,
        }
