"""Read records of a run: one JSON object per line of metrics.jsonl, ledger.jsonl and evaluations.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any


def is_count(value: Any) -> bool:
    """Return whether a value from a file is a valid count (of steps, tokens or the like)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a .jsonl file; None for a broken line, or one without a step."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(line)
        return record if is_count(record["step"]) else None
    return None


def rollbacks_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rollbacks to the step of a ledger's line, oldest first. Raises ValueError if they are malformed."""
    rollbacks = line.get("rollbacks", [])
    counts, others = ("number", "steps", "passed_over"), ("position", "skipped_rows")
    if not isinstance(rollbacks, list) or not all(
        isinstance(one, dict)
        and all(is_count(one.get(key)) for key in counts)
        and all(isinstance(one.get(key), dict) for key in others)
        and all(map(is_count, one["skipped_rows"].values()))
        for one in rollbacks
    ):
        raise ValueError("malformed rollbacks")
    return rollbacks


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file, without broken lines; empty if there is no file."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    whole, rest = lines[:-1], lines[-1:]  # the last line may be incomplete while the run writes it
    with contextlib.suppress(ValueError, RecursionError):  # parsing all at once takes a third of the time
        records = json.loads(b"[%s]" % b",".join(whole))
        if len(records) == len(whole):
            found = [record for record in records if isinstance(record, dict) and is_count(record.get("step"))]
            return found + [record for record in map(parse_record, rest) if record is not None]
    return [record for record in map(parse_record, lines) if record is not None]


def with_time(values: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the current time; NaN and infinity, which JSON lacks, become null."""
    values = {k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in values.items()}  # callbacks log tensors
    values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return {**values, "time": time.time()}
