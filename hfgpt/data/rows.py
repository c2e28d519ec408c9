"""Read whole rows of small files, with all their columns. (Training text is read by `hfgpt.data.source`.)"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from hfgpt.data.file_access import open_file, read_file
from hfgpt.data.formats import json_array
from hfgpt.data.formats.jsonl import SAMPLE_BYTES, find_damage
from hfgpt.data.heads import HEAD_BYTES, check_head
from hfgpt.data.kinds import BadFile, compression, file_kind
from hfgpt.data.units import Unit
from hfgpt.errors import UserError, message


def read_rows(file: str, patience_seconds: float = 900.0) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and content of each row of a json, jsonl or parquet file that fits in memory.

    Skips blank lines. Raises UserError like `Source.read`, and for a line that is not JSON.
    """

    def read_all() -> bytes:
        with open_file(file) as handle:
            return handle.read()

    kind = file_kind(file)
    if kind not in ("lines", "parquet"):
        raise UserError(f"dataset: {file} has no rows; give a jsonl or parquet file")
    data = read_file(file, read_all, patience_seconds)
    if not compression(file):
        check_head(file, data[:HEAD_BYTES], len(data))
    if kind == "parquet":
        table = read_file(file, lambda: pq.read_table(io.BytesIO(data)), patience_seconds)
        yield from enumerate((row for batch in table.to_batches() for row in batch.to_pylist()), 1)
        return
    damage = find_damage(file, data[:SAMPLE_BYTES], len(data) <= SAMPLE_BYTES, None)
    if isinstance(damage, BadFile):
        raise damage
    if damage:  # an array
        yield from enumerate((row for row, _ in json_array.read_rows(Unit(file))), 1)
        return
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                raise UserError(f"dataset: {file}, row {number}: not JSON ({message(error)}); fix it") from error
