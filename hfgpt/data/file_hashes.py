"""Recognize local files by hashes of their names, sizes and samples of their content."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from hfgpt.data.file_access import read_file

# Evenly spread samples, the first at the beginning and the last at the end; or all of a smaller file.
SAMPLES, SAMPLE_BYTES = 4, 2**16
# Earlier versions hashed more of each file. Their hashes are recognized by their form.
EARLIER_SAMPLES, EARLIER_SAMPLE_BYTES = 64, 2**20
MAX_NAMED_FILES = 32


def is_earlier_hash(recorded: Any) -> bool:
    """Return whether this ends in a hash of text as earlier versions made it."""
    return re.search(r"(^| )[0-9a-f]{16}$", str(recorded)) is not None


def hash_files(files: list[str], whole: bool = False, as_earlier: bool = False) -> dict[str, Any]:
    """Return the number of files and one hash of their names, sizes and content; for few files, also one hash each.

    Names are relative to the common folder. `whole`: read all of each file, and not just samples. `as_earlier`: like
    earlier versions.
    """
    root, prefix = os.path.commonpath([os.path.dirname(file) for file in files]), "" if as_earlier else "samples-"

    def hash_content(file: str) -> str:
        content = xxhash.xxh3_64()
        with open(file, "rb", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            for start, stop in _earlier_samples(size) if as_earlier else _samples(size, whole):
                handle.seek(start)
                content.update(handle.read(stop - start))
        return f"{size} bytes, {prefix}{content.hexdigest()}"

    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda file: read_file(file, lambda: hash_content(file), 0), files)
        hashes = {Path(file).relative_to(root).as_posix(): value for file, value in zip(files, found, strict=True)}
    named = {f"file {name}": value for name, value in hashes.items()} if len(files) <= MAX_NAMED_FILES else {}
    of_all = prefix + xxhash.xxh3_64_hexdigest(str(sorted(hashes.items())).encode())
    return {"files": len(files), "hash": of_all, **named}


def _samples(size: int, whole: bool) -> Iterator[tuple[int, int]]:
    if whole or size <= SAMPLES * SAMPLE_BYTES:
        yield 0, size
        return
    for sample in range(SAMPLES):
        start = (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)
        yield start, start + SAMPLE_BYTES


def _earlier_samples(size: int) -> Iterator[tuple[int, int]]:
    for sample in range(EARLIER_SAMPLES):
        start, stop = size * sample // EARLIER_SAMPLES, size * (sample + 1) // EARLIER_SAMPLES
        yield max(start, stop - EARLIER_SAMPLE_BYTES), stop
