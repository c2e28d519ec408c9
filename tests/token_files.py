"""Token files of every layout, written from their published descriptions with struct and numpy alone."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

END = 0  # the id of end-of-text in the tests' tokenizer
LAYOUTS = (
    *("nanogpt", "nanogpt-uint32", "llm.c", "llm.c-llama3", "nemo-2", "nemo-4", "npy", "npy-int32", "olmo"),
    *("datatrove", "datatrove-4", "megatron", "megatron-int32", "column", "packed-column"),
)
# What has to be stated, because the files do not say it.
STATED = {
    "nanogpt-uint32": {"tokens_dtype": "uint32"},
    "olmo": {"tokens_dtype": "uint16"},
    "column": {"tokens_column": "input_ids"},
    "packed-column": {"tokens_column": "input_ids"},
}


def header(magic: int, version: int, count: int, *more: int) -> bytes:
    return struct.pack("<256i", magic, version, count, *more, *[0] * (253 - len(more)))


def before_each(documents: Sequence[Sequence[int]]) -> list[int]:
    return [i for document in documents for i in [END, *document]]


def after_each(documents: Sequence[Sequence[int]]) -> list[int]:
    return [i for document in documents for i in [*document, END]]


def npy(ids: Sequence[int], dtype: str) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(ids, dtype))
    return stream.getvalue()


def shards(ids: list[int], number: int = 3) -> list[list[int]]:
    """Pieces of about equal length, so that documents cross the borders."""
    borders = [len(ids) * i // number for i in range(number + 1)]
    return [ids[start:stop] for start, stop in pairwise(borders)]


def files(layout: str, documents: Sequence[Sequence[int]]) -> dict[str, bytes]:
    """The files of a set, by name."""
    name, _, variant = layout.partition("-")
    wide = variant in ("uint32", "llama3", "4", "int32")
    code = "i" if variant == "int32" else "I" if wide else "H"
    if name in ("nanogpt", "olmo"):
        ids = after_each(documents)
        return {f"train.{'bin' if name == 'nanogpt' else 'npy'}": struct.pack(f"<{len(ids)}{code}", *ids)}
    if name in ("llm.c", "nemo"):
        start = (20240801, 7) if variant == "llama3" else (20240520, 1) if name == "llm.c" else (278895051, 1)
        return {
            f"set_train_{number:06}.bin": header(*start, len(ids), *([int(variant)] if name == "nemo" else []))
            + struct.pack(f"<{len(ids)}{code}", *ids)
            for number, ids in enumerate(shards(before_each(documents)), 1)
        }
    if name == "npy":
        dtype = variant or "uint16"
        return {f"shard_{n:04}.npy": npy(ids, dtype) for n, ids in enumerate(shards(before_each(documents)))}
    if name == "datatrove":
        ids = after_each(documents)
        ends = list(accumulate(len(document) + 1 for document in documents))
        return {
            "00000_shuffled.ds": struct.pack(f"<{len(ids)}{code}", *ids),
            "00000_shuffled.ds.index": struct.pack(f"<{len(ends)}Q", *ends),
            "00000_shuffled.ds.metadata": f"gpt2|{4 if wide else 2}\n{len(ids)}\n{len(ids)} T".encode(),
        }
    if name == "megatron":
        return megatron(documents, code)
    return {"data/train-00000-of-00001.parquet": parquet(documents, is_packed=name == "packed")}


def megatron(documents: Sequence[Sequence[int]], code: str) -> dict[str, bytes]:
    """Every document is two sequences, and ends with end-of-text."""
    sequences = [part for ids in documents for part in (ids[: len(ids) // 2], [*ids[len(ids) // 2 :], END])]
    lengths, size = [len(part) for part in sequences], struct.calcsize(code)
    offsets = [size * end for end in accumulate([0, *lengths[:-1]])]
    borders = range(0, len(sequences) + 1, 2)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {"H": 8, "i": 4}[code], len(sequences), len(borders))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    ids = [i for part in sequences for i in part]
    return {
        "set_text_document.idx": index + struct.pack(f"<{len(borders)}q", *borders),
        "set_text_document.bin": struct.pack(f"<{len(ids)}{code}", *ids),
    }


def parquet(documents: Sequence[Sequence[int]], is_packed: bool) -> bytes:
    """Lists of ids: a document each, or runs of 50 tokens."""
    rows: list[Sequence[int]] = list(documents)
    if is_packed:
        ids = after_each(documents)
        rows = [ids[start : start + 50] for start in range(0, len(ids), 50)]
    stream = io.BytesIO()
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), stream, row_group_size=10**6)
    return stream.getvalue()
