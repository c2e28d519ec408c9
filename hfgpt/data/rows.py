"""Whole rows of small files, whatever their columns; text to train on comes from `hfgpt.data.sources`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from hfgpt.data.formats import HEAD_BYTES, check_head, file_kind, lines_fault
from hfgpt.data.remote import first_line
from hfgpt.data.sources import SAMPLE_BYTES, open_file, read_patiently
from hfgpt.errors import UserError


def read_rows(file: str, patience_seconds: float = 900.0) -> Iterator[tuple[int, Any]]:
    """The rows of one jsonl or parquet file, whatever their columns: number (of the row or line, from 1) and content.

    Blank lines are passed over. For files that fit into memory. Raises UserError like `Source.read`, and for a line
    that is not JSON.
    """

    def whole() -> bytes:
        with open_file(file) as handle:
            return handle.read()

    kind = file_kind(file)
    if kind not in ("lines", "parquet"):
        raise UserError(f"dataset: {file} holds no rows; give a jsonl or parquet file")
    data = read_patiently(file, whole, patience_seconds)
    if not file.lower().endswith(".gz"):
        check_head(file, data[:HEAD_BYTES], len(data))
    if kind == "lines" and (fault := lines_fault(file, data[:SAMPLE_BYTES], len(data) <= SAMPLE_BYTES, None)):
        raise fault
    if kind == "parquet":
        table = read_patiently(file, lambda: pq.read_table(io.BytesIO(data)), patience_seconds)
        yield from enumerate((row for batch in table.to_batches() for row in batch.to_pylist()), 1)
        return
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # not UTF-8 is one of the former
                raise UserError(f"dataset: {file}, row {number}: not JSON ({first_line(error)}); mend it") from error
