"""Where text comes from: local files, Hub datasets, or the documentation that every Python has.

A `Source` is a list of units that can each be read alone (a parquet row group, a span of a text file), so
that any order over the units can be walked, left and resumed without reading what lies before.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from hfgpt.data.embedded import embedded_documents
from hfgpt.data.formats import HEAD_BYTES, KNOWN, BadFile, check_head, file_kind, lines_fault, no_column
from hfgpt.data.local_files import local_files
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
# A stream of text files is cut into about so many pieces, of at least and at most these sizes.
PIECES, SMALLEST_PIECE = 1024, 2**10
SAMPLE_BYTES = 2**20
SAMPLES = 64
MOST_NAMED_FILES = 32
# Footers are kept up to this size in all, as stored; each is fetched once as long as all fit.
FOOTER_CACHE_BYTES = 128 * 2**20
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
FAULTS: dict[type[Exception], str] = {
    UnicodeDecodeError: "invalid_utf8",
    UnicodeEncodeError: "lone_surrogate",
    KeyError: "no_text_column",
    TypeError: "not_an_object",
}


class Unusable(NamedTuple):
    """A row that holds no document; `reason` is the word it is counted under."""

    reason: str


class Unit(NamedTuple):
    """A part of a file that is read in one go: row group `start`, or the lines that begin in its bytes `start` to
    `stop` (-1: the end), taken together if `one_document`. Of these only the first `rows`; None: all, not counted. Of
    the last of them only the first `cut` characters. `size_bytes`: about the bytes of its text.
    """

    file: str
    start: int = 0
    stop: int = -1
    rows: int | None = None
    one_document: bool = False
    cut: int | None = None
    size_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Source:
    """Text as units of rows. Pickles; reading needs no state.

    `exclude`: `text_hash` of documents to pass over. `skipped_files`: those left out when it was opened.
    `piece_characters`: where a document of a text file ends at a line end after so many, or after twice as many in the
    midst of a line; 0: at a line end after 64 Ki, of a large file alone.
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
    piece_characters: int = 0

    def cut_in_pieces(self) -> Source:
        """The same text for a stream, which needs many documents: text files, and lines without end, in pieces."""
        units, text = [], [unit for unit in self.units if file_kind(unit.file) == "text"]
        size = min(max(sum(unit.size_bytes for unit in text) // PIECES, SMALLEST_PIECE), TEXT_DOCUMENT_BYTES)
        if not any(unit.size_bytes > size for unit in text):
            return self
        for unit in self.units:
            units += _spans(unit.file, unit.size_bytes) if unit.one_document else [unit]
        fingerprint = {**self.fingerprint, "text_pieces": size}
        return dataclasses.replace(self, units=units, fingerprint=fingerprint, piece_characters=size)

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
            text = _read_lines(unit, self.piece_characters or None).decode().replace("\r\n", "\n")
            size = self.piece_characters
            rest_of_line = rf"[^\n]{{0,{size}}}" if size else r"[^\n]*"
            piece = rf"(?s:.{{1,{size or TEXT_DOCUMENT_BYTES}}}){rest_of_line}\n?"
            values = [text] if unit.one_document else re.findall(piece, text)
        values = values[: unit.rows]
        cuts = [*[None] * (len(values) - 1), unit.cut]
        return [self._document(value, kind == "lines", cut) for value, cut in zip(values, cuts, strict=False)]

    def _document(self, value: Any, is_json: bool, cut: int | None = None) -> str | Unusable:
        """The document in a value or JSON line (UTF-8 if bytes), or its first `cut` characters, else why it cannot be
        trained on.
        """
        try:
            text = value.decode() if isinstance(value, bytes) else value
            if is_json:
                text = json.loads(text)[self.text_column]
            if not isinstance(text, str):
                return Unusable("null" if text is None else "not_text")
            text = text[:cut]
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
    `name`, `split` and `revision` choose within a Hub dataset, which is pinned to the commit they resolve to; with
    local text they are refused, as is a `text_column` of text without columns. Looks at each file's head or footer,
    and raises `UserError` for what cannot be found or read; a broken file is left out instead with `skip_bad_files`.
    Faults of the network are waited out for `patience_seconds`.
    """
    if dataset == "embedded":
        _refuse_meaningless(dataset, name, split, revision, text_column)
        documents = embedded_documents()
        data = "\0".join(documents).encode()
        fingerprint: dict[str, Any] = {"dataset": dataset, "hash": xxhash.xxh3_64_hexdigest(data)}
        description = f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB"
        unit = Unit(dataset, rows=len(documents), size_bytes=len(data))
        return Source([unit], "text", len(data), True, fingerprint, description)
    found, label = local_files(dataset), dataset
    if is_local := found is not None:
        files, notes = found
        has_columns = any(file_kind(file) != "text" for file in files)
        _refuse_meaningless(dataset, name, split, revision, "text" if has_columns else text_column)
        label += f" ({'; '.join(notes)})" if notes else ""
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


def _refuse_meaningless(dataset: str, name: str | None, split: str, revision: str | None, text_column: str) -> None:
    """Raise UserError for settings that choose within a Hub dataset, or a column, where there is no such thing."""
    what = "is this Python's own documentation" if dataset == "embedded" else "is local"
    stated = {"dataset_name": name, "dataset_split": split if split != "train" else None, "dataset_revision": revision}
    problems = [
        f"{key}={value}: dataset={dataset} {what} and has none; leave it out" for key, value in stated.items() if value
    ]
    if text_column != "text":
        problems.append(f"text_column={text_column}: dataset={dataset} is plain text without columns; leave it out")
    if problems:
        raise UserError(*problems)


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
    """The units of a file, and its size in bytes. Raises BadFile for a file that is not what its name says."""
    kind = file_kind(file)
    if file.encode("utf-8", "replace").decode() != file or len(file.splitlines()) > 1:  # could not be recorded
        raise BadFile(f"dataset: {file!a}: the name is not one line of UTF-8; rename it")
    if "://" not in file and os.path.islink(file) and not os.path.exists(file):
        raise BadFile(f"dataset: {file} is a link to what is not there; fetch that, or remove the link")
    with open_file(file, uncompressed=False) as handle:
        raw = handle.read(64 if kind == "parquet" else HEAD_BYTES)
        size = handle.seek(0, os.SEEK_END)
        head = check_head(file, raw, size)
        if kind == "text" and raw is head:
            handle.seek(max(0, size - 64))
            if b"\0" in handle.read(64):
                raise BadFile(f"dataset: {file} ends in zero bytes, as broken files do; fetch it again or cut them off")
        length = size
        if file.lower().endswith(".gz"):
            handle.seek(max(0, size - 4))
            length = int.from_bytes(handle.read(4), "little")  # of the last part of the file, modulo 2^32
    if kind == "parquet":
        return _row_groups(file, text_column), size
    if kind == "lines" and (fault := lines_fault(file, head, len(raw) == size == len(head), text_column)):
        data = _read_lines(Unit(file, 0, SAMPLE_BYTES))  # what a few lines are not, more of them may be
        if fault := lines_fault(file, data, True, text_column):
            raise fault
    if length != size and size <= IN_MEMORY_BYTES:
        with open_file(file) as handle:
            length = handle.seek(0, os.SEEK_END)
    if kind == "text" and size <= IN_MEMORY_BYTES:
        return [Unit(file, rows=1, one_document=True, size_bytes=length)], size
    return _spans(file, length), size


def _row_groups(file: str, text_column: str) -> list[Unit]:
    metadata = _footer(file, _version(file))
    schema = metadata.schema.to_arrow_schema()
    if schema.names.count(text_column) != 1:
        raise no_column(file, text_column, schema.names)
    kind = schema.field(text_column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(value) not in TEXT_TYPES:
        raise BadFile(f"text_column={text_column}: holds {kind}, not text, in {file}; name a text column")
    leaf = metadata.schema.names.index(text_column) if text_column in metadata.schema.names else 0
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        Unit(file, number, rows=group.num_rows, size_bytes=group.column(leaf).total_uncompressed_size)
        for number, group in enumerate(groups)
        if group.num_rows
    ]


def _spans(file: str, length: int) -> list[Unit]:
    """Units of the lines of a text or jsonl file of `length` bytes, uncompressed."""
    if not file.lower().endswith(".gz"):
        borders = [*range(0, length, SPAN_BYTES), length]
        return [Unit(file, *part, size_bytes=part[1] - part[0]) for part in itertools.pairwise(borders)]
    # Each span is reached by uncompressing what lies before, so they are large. The last has all that is left.
    starts = range(0, max(1, length), GZIP_SPAN_BYTES)
    whole = [Unit(file, start, start + GZIP_SPAN_BYTES, size_bytes=GZIP_SPAN_BYTES) for start in starts[:-1]]
    return [*whole, Unit(file, starts[-1], size_bytes=length - starts[-1])]


class _Footers:
    """The footers of parquet files, fetched once: the last used, up to a size in all. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cache_clear()

    def cache_clear(self) -> None:
        self._kept: dict[tuple[str, Any], Any] = {}
        self._bytes = 0

    def __call__(self, file: str, version: Any) -> Any:
        key = file, version
        with self._lock:
            if (metadata := self._kept.pop(key, None)) is not None:
                self._kept[key] = metadata  # the last used is at the end
                return metadata
        with open_file(file) as handle:
            metadata = pq.read_metadata(handle)
        with self._lock:
            if self._kept.setdefault(key, metadata) is metadata:
                self._bytes += metadata.serialized_size
            while self._bytes > FOOTER_CACHE_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.pop(next(iter(self._kept))).serialized_size
        return metadata


_footer = _Footers()


def _version(file: str) -> tuple[int, int] | None:
    """What tells a local file from one written over it; on the Hub the commit in the name does."""
    return None if "://" in file else (os.stat(file).st_size, os.stat(file).st_mtime_ns)


def _read_lines(unit: Unit, longest: int | None = None) -> bytes:
    """The lines that begin in [start, stop) of the file, without a byte order mark.

    longest: a line that goes on for as many bytes after a border is cut there, between two characters.
    """
    start = max(unit.start - 1, 0)  # a line that begins at `start` follows a line end just before it
    with open_file(unit.file) as handle:
        handle.seek(start)
        if longest is not None:
            data = handle.read() if unit.stop < 0 else handle.read(unit.stop - start + longest)
            begin = _border(data, unit.start - start, longest) if unit.start else 0
            end = len(data) if unit.stop < 0 else _border(data, unit.stop - start, longest)
            return data[begin:end].removeprefix(codecs.BOM_UTF8)
        data = handle.read() if unit.stop < 0 else handle.read(unit.stop - start)
        if unit.start:
            _, _, data = data.partition(b"\n")
        parts = [data]
        while parts[-1] and not parts[-1].endswith(b"\n"):  # the rest of the last line
            line, end_of_line, _ = handle.read(2**16).partition(b"\n")
            parts.append(line + end_of_line)
    return b"".join(parts).removeprefix(codecs.BOM_UTF8)


def _border(data: bytes, at: int, longest: int) -> int:
    """Where the first line begins at or after `at`; if none does for `longest` bytes, the first character there."""
    window = data[at - 1 : at - 1 + longest]
    if (line_end := window.find(b"\n")) >= 0:
        return at + line_end
    if len(window) < longest:  # the end of the file
        return len(data)
    return at + next((i for i, byte in enumerate(data[at : at + 4]) if byte & 0xC0 != 0x80), 0)
