"""Open the files of a text: find their units, and check them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from hfgpt.data.file_access import read_file
from hfgpt.data.kinds import BadFile
from hfgpt.data.remote import listed_sizes, read_with_retries
from hfgpt.data.units import IN_MEMORY_BYTES, Unit

logger = logging.getLogger(__name__)

Find = Callable[[str, str], tuple[list[Unit], int]]  # of a file and a column: its units and its size
# Of more files than this, only INSPECTED are read before the first step, and the others when their turn comes.
FEW_FILES, INSPECTED = 64, 16


class Opened(NamedTuple):
    """Files that can be used, their units, and their size. `by_file`: a file is a unit, and most are not read yet."""

    files: list[str]
    units: list[Unit]
    size_bytes: int
    by_file: bool


def open_files(files: list[str], find: Find, options: dict[str, Any], read_all: bool) -> Opened:
    """Find the units of files with `find`, and check them: of many files only some, if it is sure to be a large text.

    Bad files are left out if they may be skipped and not all files are bad. `options`: fields of a `Source`.
    `read_all`: however many files there are.
    """
    is_local, patience_seconds = options["is_local"], options["patience_seconds"]
    inspect = partial(_inspect_files, find, options["text_column"], patience_seconds, options["skip_bad_files"])
    sizes = None if read_all or len(files) <= FEW_FILES else _find_sizes(files, is_local, patience_seconds)
    if sizes is None or (is_local and sum(sizes) <= IN_MEMORY_BYTES):
        inspected = inspect(files)
        units = [unit for units, _ in inspected.values() for unit in units]
        return Opened(list(inspected), units, sum(size for _, size in inspected.values()), False)
    inspect([files[(len(files) - 1) * number // (INSPECTED - 1)] for number in range(INSPECTED)])
    units = [Unit(file, size_bytes=size) for file, size in zip(files, sizes, strict=True)]
    return Opened(files, units, sum(sizes), True)


def _find_sizes(files: list[str], is_local: bool, patience_seconds: float) -> list[int] | None:
    """Return the sizes of the files, without reading them; None if a local one is missing."""
    if not is_local:
        return read_with_retries(partial(listed_sizes, files), os.path.dirname(files[0]), patience_seconds)
    try:
        return [os.path.getsize(file) for file in files]
    except OSError:
        return None


def _inspect_files(
    find: Find, column: str, patience_seconds: float, skip_bad_files: bool, files: list[str]
) -> dict[str, tuple[list[Unit], int]]:
    """Return units and size of each file. Bad files are left out if they may be skipped and not all files are bad."""

    def inspect(file: str) -> tuple[list[Unit], int] | BadFile:
        try:
            return read_file(file, lambda: find(file, column), patience_seconds)
        except BadFile as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        results = dict(zip(files, pool.map(inspect, files), strict=True))
    bad = [result for result in results.values() if isinstance(result, BadFile)]
    if bad and (not skip_bad_files or len(bad) == len(files)):
        raise bad[0]
    for error in bad:
        logger.warning("left out: %s", error)
    return {file: result for file, result in results.items() if not isinstance(result, BadFile)}
