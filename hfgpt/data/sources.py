"""Where text comes from: local files, Hub datasets, or the documentation that every Python has.

A `Source` is a list of units that can each be read alone (a parquet row group, a span of a text file), so
that any order over the units can be walked, left and resumed without reading what lies before.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import glob
import gzip
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from hfgpt.data.embedded import embedded_documents
from hfgpt.data.remote import BROKEN, first_line, hub_files, patiently
from hfgpt.errors import RunError, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

IN_MEMORY_BYTES = 16 * 2**20
SPAN_BYTES = 2 * 2**20
READ_AHEAD_BYTES = 4 * 2**20
GZIP_SPAN_BYTES = 32 * 2**20
START_PATIENCE_SECONDS = 120.0
TEXT_DOCUMENT_BYTES = 64 * 2**10
SAMPLE_BYTES = 2**20
SAMPLES = 64
MOST_NAMED_FILES = 32
KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
FAULTS: dict[type[Exception], str] = {
    UnicodeDecodeError: "invalid_utf8",
    UnicodeEncodeError: "lone_surrogate",
    KeyError: "no_text_column",
    TypeError: "not_an_object",
}
KNOWN = "parquet, jsonl[.gz], json[.gz] or txt[.gz]"


class BadFile(UserError):
    """A file that cannot be read as what it should be."""


class Unusable(NamedTuple):
    """A row that holds no document; `reason` is the word it is counted under."""

    reason: str


class Unit(NamedTuple):
    """A part of a file that is read in one go: row group `start`, or the lines that begin in its bytes `start` to
    `stop` (-1: the end), taken together if `one_document`. Of these only the first `rows`; None: all, not counted.
    """

    file: str
    start: int = 0
    stop: int = -1
    rows: int | None = None
    one_document: bool = False


@dataclass(frozen=True, eq=False)
class Source:
    """Text as units of rows. Pickles; reading needs no state.

    `exclude`: `text_hash` of documents to pass over. `skipped_files`: those left out when it was opened.
    """

    units: list[Unit]
    text_column: str
    size_bytes: int
    is_local: bool
    fingerprint: dict[str, Any]
    description: str
    exclude: frozenset[int] = frozenset()
    patience_seconds: float = 900.0
    skip_bad_files: bool = False
    skipped_files: int = 0

    def read(self, unit: Unit) -> list[str | Unusable]:
        """All rows of `unit` in file order.

        Raises BadFile if the file as a whole cannot be read, RunError if the way to it fails for too long.
        """
        try:
            return read_patiently(unit.file, lambda: self._rows(unit), self.patience_seconds)
        except BadFile as error:
            if not self.skip_bad_files:
                raise
            logger.warning("left out: %s", error)
            return [Unusable("bad_file")]

    def _rows(self, unit: Unit) -> list[str | Unusable]:
        kind = file_kind(unit.file)
        values: list[Any]
        if unit.file == "embedded":
            values = list(embedded_documents())
        elif kind == "parquet":
            with open_file(unit.file) as handle:
                reader = pq.ParquetFile(handle, metadata=_footer(unit.file, _version(unit.file)))
                rows = reader.read_row_group(unit.start, columns=[self.text_column], use_threads=False)
            values = rows[0].cast(pa.large_binary()).to_pylist()  # arrow does not check what a file calls text
        elif kind == "lines":
            values = [line for line in _read_lines(unit).split(b"\n") if line.strip()]
        else:
            text = _read_lines(unit).decode().replace("\r\n", "\n")
            about_64_kib = rf"(?s:.{{1,{TEXT_DOCUMENT_BYTES}}})[^\n]*\n?"  # up to a line end
            values = [text] if unit.one_document else re.findall(about_64_kib, text)
        return [self._document(value, is_json=kind == "lines") for value in values[: unit.rows]]

    def _document(self, value: Any, is_json: bool) -> str | Unusable:
        """The document in a value or JSON line (UTF-8 if bytes), else why it cannot be trained on."""
        try:
            text = value.decode() if isinstance(value, bytes) else value
            if is_json:
                text = json.loads(text)[self.text_column]
            if not isinstance(text, str):
                return Unusable("null" if text is None else "not_text")
            if not text or text.isspace():
                return Unusable("whitespace" if text else "empty")
            return Unusable("in_validation") if text_hash(text) in self.exclude else text
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return Unusable(FAULTS.get(type(error), "malformed"))


def text_hash(text: str) -> int:
    """xxh3_64 of the UTF-8 bytes."""
    return xxhash.xxh3_64_intdigest(text.encode())


def open_source(
    dataset: str,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str = "text",
    patience_seconds: float = 900.0,
    skip_bad_files: bool = False,
) -> Source:
    """The text called `dataset`: `"embedded"`, a local file, folder (all below it) or glob, or a Hub dataset.

    A txt file of up to 16 MiB is one document, a larger one is cut at line ends into documents of about 64 KiB.
    `name`, `split` and `revision` choose within a Hub dataset, which is pinned to the commit they resolve to. Looks
    at each file's head or footer, and raises `UserError` for what cannot be found or read; a broken file is left out
    instead with `skip_bad_files`. Faults of the network are waited out for `patience_seconds`.
    """
    if dataset == "embedded":
        documents = embedded_documents()
        data = "\0".join(documents).encode()
        fingerprint: dict[str, Any] = {"dataset": dataset, "hash": xxhash.xxh3_64_hexdigest(data)}
        description = f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB"
        return Source([Unit(dataset, rows=len(documents))], "text", len(data), True, fingerprint, description)
    found, label = local_files(dataset), dataset
    if is_local := found is not None:
        if revision:
            raise UserError(f"dataset_revision={revision}: dataset={dataset} is local and has none; leave it out")
        files, others = found
        label += f" ({others:,} files of other kinds left out)" if others else ""
    else:
        in_split, commit = hub_files(dataset, name, split, revision, min(patience_seconds, START_PATIENCE_SECONDS))
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) at commit {commit[:8]}"
        if not (files := list(filter(file_kind, in_split))):
            raise UserError(f"dataset={dataset}: no {KNOWN} file in split {split}, which has {in_split[0]}")

    def look(file: str) -> tuple[list[Unit], int] | BadFile:
        try:
            return read_patiently(file, lambda: _file_units(file, text_column), patience_seconds)
        except BadFile as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        looks = dict(zip(files, pool.map(look, files), strict=True))
    if bad := {file: error for file, error in looks.items() if isinstance(error, BadFile)}:
        if not skip_bad_files or len(bad) == len(files):
            raise next(iter(bad.values()))
        for error in bad.values():
            logger.warning("left out: %s", error)
        files = [file for file in files if file not in bad]
    if is_local:
        fingerprint = _identity(files)
    for file in [file for file in files if file_kind(file) == "lines"][:1]:
        read_patiently(file, partial(_check_lines, file, text_column), patience_seconds)
    units, sizes = zip(*(looks[file] for file in files), strict=True)
    return Source(
        units=[unit for of_file in units for unit in of_file],
        text_column=text_column,
        size_bytes=sum(sizes),
        is_local=is_local,
        fingerprint={**fingerprint, "bytes": sum(sizes), "text_column": text_column},
        description=f"{label}: {len(files):,} file{'' if len(files) == 1 else 's'}, {sum(sizes) / 1e6:,.1f} MB",
        patience_seconds=patience_seconds,
        skip_bad_files=skip_bad_files,
        skipped_files=len(bad),
    )


def file_kind(file: str) -> str | None:
    return KINDS.get(Path(re.sub(r"(?<!\.parquet)\.gz$", "", file.lower())).suffix)


def local_files(dataset: str) -> tuple[list[str], int] | None:
    """Absolute names of the files that `dataset` stands for, sorted, and how many of other kinds there are beside them;
    None for a Hub id.
    """
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    if path.exists() or glob.has_magic(dataset):
        pattern = os.path.join(glob.escape(str(path)), "**") if path.exists() else str(path)
        found = sorted(filter(os.path.isfile, [str(path), *glob.glob(pattern, recursive=True)]))
        if files := list(filter(file_kind, found)):
            return files, len(found) - len(files)
        raise UserError(f"dataset={dataset}: no {KNOWN} file among {len(found)} found; convert the text to one")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and file_kind(dataset) is None:
        return None
    names = [other.name for other in path.parent.glob("*") if file_kind(other.name) or other.is_dir()]
    near = difflib.get_close_matches(path.name, names)
    near = [name for name in near if difflib.get_close_matches(path.stem, [Path(name).stem])]  # not the suffix alone
    hint = f"did you mean {Path(dataset).with_name(near[0])}?" if near else "check the path"
    raise UserError(f"dataset={dataset}: no such file or folder; {hint}")


def _identity(files: list[str]) -> dict[str, Any]:
    """The number of files and a hash of their names below their common folder, sizes and content (of large ones evenly
    spread samples); the hash of each too where they are few.
    """
    root, hashes = os.path.commonpath([os.path.dirname(file) for file in files]), {}
    for file in files:
        identity = xxhash.xxh3_64()
        with open_file(file, uncompressed=False) as handle:
            size = handle.seek(0, os.SEEK_END)
            for sample in range(SAMPLES):
                start, stop = size * sample // SAMPLES, size * (sample + 1) // SAMPLES
                handle.seek(max(start, stop - SAMPLE_BYTES))
                identity.update(handle.read(stop - handle.tell()))
        hashes[Path(file).relative_to(root).as_posix()] = f"{size} bytes, {identity.hexdigest()}"
    named = {f"file {name}": told for name, told in hashes.items()} if len(files) <= MOST_NAMED_FILES else {}
    return {"files": len(files), "hash": xxhash.xxh3_64_hexdigest(str(sorted(hashes.items())).encode()), **named}


@contextlib.contextmanager
def open_file(file: str, uncompressed: bool = True) -> Iterator[Any]:
    """The file, open to read, and uncompressed unless asked otherwise. Each read of a remote one is one request."""
    filesystem, path = url_to_fs(file)
    compressed = uncompressed and file.lower().endswith(".gz")
    # gzip reads a few kilobytes at a time.
    cache = {"block_size": READ_AHEAD_BYTES, "cache_type": "readahead"} if compressed else {"cache_type": "none"}
    with filesystem.open(path, "rb", **cache) as raw:
        handle = _Complete(raw) if "://" in file else raw
        yield gzip.GzipFile(fileobj=handle) if compressed else handle


class _Complete:
    """A remote file that takes a short answer for the fault it is, where the client takes it for the file's end."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int | None = -1) -> bytes:
        left = self._file.size - self._file.tell()
        data = self._file.read(-1 if size is None else size)
        if len(data) < (left if size is None or size < 0 else min(size, left)):
            raise OSError("fewer bytes came than were asked for")
        return data


def read_patiently(file: str, read: Callable[[], T], patience_seconds: float) -> T:
    """What `read` returns of `file`, a remote one read patiently. Raises BadFile where the file itself is at fault."""
    try:
        return patiently(read, file, patience_seconds) if "://" in file else read()
    except (UserError, RunError):
        raise
    except UnicodeDecodeError as error:
        raise BadFile(f"dataset: {file} is not UTF-8 text ({error}); convert it, say with iconv") from error
    except (OSError, *BROKEN) as error:
        reason = first_line(error)
        if "://" not in file and getattr(error, "errno", None) is not None:  # the system's, not that of the content
            raise UserError(f"dataset: {file} cannot be read ({reason}); mend that and start again") from error
        if getattr(error, "response", None) is not None:
            way_out = "check that it is there and that your token may read it"
            raise UserError(f"dataset: {file} is refused ({reason}); {way_out}") from error
        raise BadFile(f"dataset: {file} cannot be read ({reason}); fetch it again or remove it") from error


def _file_units(file: str, text_column: str) -> tuple[list[Unit], int]:
    """The units of a file, and its size in bytes."""
    with open_file(file, uncompressed=False) as handle:
        head = handle.read(64)
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - 4))
        tail = handle.read(4)
    if file_kind(file) == "text" and b"\0" in head and not file.lower().endswith(".gz"):
        raise BadFile(f"dataset: {file} holds zero bytes, as UTF-16 and binary files do; convert it to UTF-8")
    is_page = file_kind(file) != "text" and head.lstrip().startswith(b"<")
    if is_page or head.startswith(b"version https://git-lfs"):
        raise BadFile(f"dataset: {file} is a Git LFS pointer or a web page, not the data; fetch the file itself")
    if file_kind(file) == "parquet":
        metadata = _footer(file, _version(file))
        schema = metadata.schema.to_arrow_schema()
        if schema.names.count(text_column) != 1:
            raise _no_column(file, text_column, schema.names)
        kind = schema.field(text_column).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if str(value) not in ("string", "large_string", "string_view"):
            raise BadFile(f"text_column={text_column}: holds {kind}, not text, in {file}; name a text column")
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [Unit(file, group, rows=rows) for group, rows in enumerate(counts) if rows], size
    if file_kind(file) == "text" and size <= IN_MEMORY_BYTES:
        return [Unit(file, rows=1, one_document=True)], size
    if file.lower().endswith(".gz"):
        length = int.from_bytes(tail, "little")  # of the last part of the file, modulo 2^32
        if size <= IN_MEMORY_BYTES:
            with open_file(file) as handle:
                length = handle.seek(0, os.SEEK_END)
        # Each span is reached by uncompressing what lies before, so they are large. The last has all that is left.
        starts = range(0, max(1, length), GZIP_SPAN_BYTES)
        return [Unit(file, start, start + GZIP_SPAN_BYTES) for start in starts[:-1]] + [Unit(file, starts[-1])], size
    return [Unit(file, start, min(start + SPAN_BYTES, size)) for start in range(0, size, SPAN_BYTES)], size


@functools.lru_cache(maxsize=32)  # an entry can take megabytes, so only those of the files being read
def _footer(file: str, version: Any) -> Any:
    with open_file(file) as handle:
        return pq.read_metadata(handle)


def _version(file: str) -> tuple[int, int] | None:
    """What tells a local file from one written over it; on the Hub the commit in the name does."""
    return None if "://" in file else (os.stat(file).st_size, os.stat(file).st_mtime_ns)


def _no_column(file: str, text_column: str, columns: list[str]) -> BadFile:
    found = "more than once" if text_column in columns else "not"
    return BadFile(f"text_column={text_column}: {found} in {file}; its columns are {', '.join(columns)}")


def _check_lines(file: str, text_column: str) -> None:
    """Refuse a text column that no object has among the first MiB of lines."""
    columns: dict[str, None] = {}
    for line in _read_lines(Unit(file, 0, SAMPLE_BYTES)).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            columns |= dict.fromkeys(json.loads(line).keys())
    if columns and text_column not in columns:
        raise _no_column(file, text_column, list(columns))


def _read_lines(unit: Unit) -> bytes:
    """The lines that begin in [start, stop) of the file, without a byte order mark."""
    start = max(unit.start - 1, 0)  # a line that begins at `start` follows a line end just before it
    with open_file(unit.file) as handle:
        handle.seek(start)
        data = handle.read() if unit.stop < 0 else handle.read(unit.stop - start)
        if unit.start:
            _, _, data = data.partition(b"\n")
        parts = [data]
        while parts[-1] and not parts[-1].endswith(b"\n"):  # the rest of the last line
            line, end, _ = handle.read(2**16).partition(b"\n")
            parts.append(line + end)
    return b"".join(parts).removeprefix(b"\xef\xbb\xbf")
