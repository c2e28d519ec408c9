"""Where text comes from: local files, Hub datasets, or the documentation that every Python has.

A `Source` is a list of units that can each be read alone (a parquet row group, a span of a text file), so
that any order over the units can be walked, and left and resumed, without reading what lies before.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from hfgpt.errors import UserError

IN_MEMORY_BYTES = 16 * 2**20
SPAN_BYTES = 2 * 2**20
TEXT_DOCUMENT_BYTES = 64 * 2**10
SAMPLE_BYTES = 2**20
KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
EMBEDDED_DOCSTRING_CHARACTERS = 80


class Unusable(NamedTuple):
    """A row that holds no document; `reason` is the word it is counted under."""

    reason: str


class Unit(NamedTuple):
    """A part of a source that is read in one go.

    `start`, `stop`: row group and the next one (parquet), or bytes; lines that begin in them belong to the
    unit. `rows` is the number of rows where it is known without reading.
    """

    file: str
    kind: str
    start: int
    stop: int
    rows: int | None = None


@dataclass(frozen=True)
class Source:
    """Text as units of rows. Pickles; reading needs no state."""

    units: list[Unit]
    text_column: str
    size_bytes: int
    is_local: bool
    fingerprint: dict[str, Any]
    description: str

    def read(self, unit: Unit) -> list[str | Unusable]:
        """All rows of `unit` in file order: documents, and what stands where a document is missing.

        Raises `UserError` that names the file if the file as a whole cannot be read.
        """
        if unit.kind == "embedded":
            return list(_embedded_documents())
        try:
            if unit.kind == "parquet":
                return _parquet_rows(unit, self.text_column)
            data = _read_span(unit)
            if unit.kind == "lines":
                return [_json_row(line, self.text_column) for line in data.split(b"\n") if line.strip()]
            return [_checked(text) for text in _text_documents(unit, data)]
        except (OSError, EOFError, zlib.error) as error:
            if _is_remote(unit.file):  # the network's fault, not the file's
                raise
            raise _damaged(unit.file, error) from error


def open_source(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str = "text",
) -> Source:
    """The text called `dataset`: `"embedded"`, a local file, folder or glob, or a Hub dataset.

    Files are parquet, jsonl (one JSON object per line) or txt, the last two also as .gz. A txt file of up
    to 16 MiB is one document; a larger one is cut at line ends into documents of about 64 KiB. `name`,
    `split` and `revision` choose within a Hub dataset, which is pinned to the commit they resolve to.
    Looks at every file's head, and raises `UserError` for what cannot be found or read.
    """
    if dataset == "embedded":
        return _open_embedded()
    files = _local_files(dataset)
    if files is not None:
        root = os.path.commonpath([os.path.dirname(file) for file in files])
        identity = xxhash.xxh3_64()
        for file in files:
            head_and_tail, size = _ends(file)
            _refuse_placeholder(file, head_and_tail)
            identity.update(f"{Path(file).relative_to(root).as_posix()}\0{size}\0".encode() + head_and_tail)
        fingerprint: dict[str, Any] = {"files": len(files), "hash": identity.hexdigest()}
        label = dataset
    else:
        files, commit = _hub_files(dataset, name, split, revision)
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) at commit {commit[:8]}"
    units, size_bytes = _units(files, text_column)
    plural = "" if len(files) == 1 else "s"
    return Source(
        units=units,
        text_column=text_column,
        size_bytes=size_bytes,
        is_local=not _is_remote(files[0]),
        fingerprint={**fingerprint, "bytes": size_bytes, "text_column": text_column},
        description=f"{label}: {len(files):,} file{plural}, {size_bytes / 1e6:,.1f} MB",
    )


def is_local(dataset: str) -> bool:
    """Whether `dataset` names local files (that exist) rather than something on the Hub."""
    return os.path.exists(os.path.expanduser(dataset)) or glob.has_magic(dataset)


def _local_files(dataset: str) -> list[str] | None:
    """Absolute names of the readable files that `dataset` stands for, sorted; None for a Hub id."""
    path = os.path.abspath(os.path.expanduser(dataset))
    if os.path.isfile(path):
        if _kind(path) is None:
            raise UserError(f"dataset={dataset}: not a {_known()} file; convert it to one of these")
        return [path]
    pattern = os.path.join(glob.escape(path), "**", "*") if os.path.isdir(path) else path
    if glob.has_magic(pattern):
        found = sorted(file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file))
        files = [file for file in found if _kind(file)]
        if not files:
            raise UserError(f"dataset={dataset}: no {_known()} file among the {len(found)} files there")
        return files
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and _kind(dataset) is None:
        return None
    parent = os.path.dirname(path)
    names = os.listdir(parent) if os.path.isdir(parent) else []
    near = difflib.get_close_matches(os.path.basename(path), names, n=1, cutoff=0.5)
    hint = f"did you mean {os.path.join(os.path.dirname(dataset), near[0])}?" if near else "check the path"
    raise UserError(f"dataset={dataset}: no such file or folder; {hint}")


def _kind(file: str) -> str | None:
    suffix = Path(file.lower().removesuffix(".gz")).suffix
    return None if file.endswith(".parquet.gz") else KINDS.get(suffix)


def _known() -> str:
    return "parquet, jsonl[.gz], json[.gz] or txt[.gz]"


def _is_remote(file: str) -> bool:
    return "://" in file


def _open(file: str) -> BinaryIO:
    if not _is_remote(file):
        return open(file, "rb")
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    filesystem, path = url_to_fs(file)
    return filesystem.open(path, "rb", cache_type="none")


def _ends(file: str) -> tuple[bytes, int]:
    with open(file, "rb") as handle:
        head = handle.read(SAMPLE_BYTES)
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(len(head), size - SAMPLE_BYTES))
        return head + handle.read(), size


def _refuse_placeholder(file: str, head: bytes) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"dataset: {file} is a Git LFS pointer, not the data; run `git lfs pull` there")
    if _kind(file) != "text" and head[:64].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise UserError(f"dataset: {file} is a web page, not the data; download the file itself")


def _damaged(file: str, error: Exception) -> UserError:
    reason = str(error).strip().split("\n")[0]
    return UserError(f"dataset: {file} is damaged ({reason}); fetch it again or take it away")


def _hub_files(dataset: str, name: str | None, split: str, revision: str | None) -> tuple[list[str], str]:
    """URLs (hf://datasets/ID@COMMIT/PATH) of the readable files of one split, and the commit."""
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(dataset, name, revision=revision)
    except Exception as error:  # not found, no network, unknown configuration: each of its own type
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"dataset={dataset}: no local file, and not usable from the Hub: {reason}") from error
    splits = dict(builder.config.data_files or {})
    if split not in splits:
        raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(splits)}")
    files = [str(file) for file in splits[split] if _kind(str(file))]
    if not files:
        raise UserError(f"dataset={dataset}: no {_known()} file in split {split}, which has {splits[split][0]}")
    return files, files[0].split("@", 1)[1].split("/", 1)[0]


def _units(files: list[str], text_column: str) -> tuple[list[Unit], int]:
    """The units of all files in order, and the files' bytes. Reads footers and the first lines."""
    with ThreadPoolExecutor(16 if _is_remote(files[0]) else 1) as pool:
        per_file = list(pool.map(lambda file: _file_units(file, text_column), files))
    _check_first_lines(files, text_column)
    return [unit for units, _ in per_file for unit in units], sum(size for _, size in per_file)


def _file_units(file: str, text_column: str) -> tuple[list[Unit], int]:
    kind = _kind(file)
    assert kind is not None
    with _open(file) as handle:
        size = handle.seek(0, os.SEEK_END)
    if kind == "parquet":
        metadata = _footer(file)
        _check_column(file, metadata.schema.to_arrow_schema(), text_column)
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [Unit(file, kind, group, group + 1, rows) for group, rows in enumerate(counts) if rows], size
    if file.endswith(".gz") or (kind == "text" and size <= IN_MEMORY_BYTES):
        return [Unit(file, kind, 0, size, 1 if kind == "text" and size <= IN_MEMORY_BYTES else None)], size
    starts = range(0, size, SPAN_BYTES)
    return [Unit(file, kind, start, min(start + SPAN_BYTES, size)) for start in starts], size


# An entry can take megabytes, so only a few are kept: those of the files being read.
@functools.lru_cache(maxsize=32)
def _footer(file: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _open(file) as handle:
            return pq.read_metadata(handle)
    except (pa.ArrowException, OSError) as error:
        if _is_remote(file) and not isinstance(error, pa.ArrowInvalid):
            raise
        raise _damaged(file, error) from error


def _check_column(file: str, schema: Any, text_column: str) -> None:
    import pyarrow as pa

    if text_column not in schema.names:
        raise _no_column(file, text_column, schema.names)
    kind = schema.field(text_column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(test(value) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        raise UserError(f"text_column={text_column}: holds {kind}, not text, in {file}; name a text column")


def _no_column(file: str, text_column: str, columns: list[str]) -> UserError:
    return UserError(f"text_column={text_column}: not in {file}; its columns are {', '.join(columns)}")


def _check_first_lines(files: list[str], text_column: str) -> None:
    """Refuse a text column that no object among the first lines of the first jsonl file has."""
    file = next((file for file in files if _kind(file) == "lines"), None)
    if file is None:
        return
    columns: dict[str, None] = {}
    for line in _first_bytes(file).split(b"\n")[:1000]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        columns.update(dict.fromkeys(row if isinstance(row, dict) else ()))
    if columns and text_column not in columns:
        raise _no_column(file, text_column, list(columns))


def _first_bytes(file: str) -> bytes:
    try:
        with _open(file) as handle:
            stream = gzip.GzipFile(fileobj=handle) if file.endswith(".gz") else handle
            return stream.read(SAMPLE_BYTES).removeprefix(b"\xef\xbb\xbf")
    except (OSError, EOFError, zlib.error) as error:
        if _is_remote(file):
            raise
        raise _damaged(file, error) from error


def _parquet_rows(unit: Unit, text_column: str) -> list[str | Unusable]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _open(unit.file) as handle:
            reader = pq.ParquetFile(handle, metadata=_footer(unit.file))
            column = reader.read_row_group(unit.start, columns=[text_column], use_threads=False)[text_column]
    except pa.ArrowException as error:
        raise _damaged(unit.file, error) from error
    try:
        return [_checked(value) for value in column.to_pylist()]
    except UnicodeDecodeError:  # arrow does not check what a file calls text
        return [_checked(_decoded(value)) for value in column.cast(pa.binary()).to_pylist()]


def _read_span(unit: Unit) -> bytes:
    """The lines that begin in [start, stop) of the file; the whole of a compressed one. No leading BOM."""
    with _open(unit.file) as handle:
        if unit.file.endswith(".gz"):
            return gzip.GzipFile(fileobj=handle).read().removeprefix(b"\xef\xbb\xbf")
        if unit.start == 0:
            data = handle.read(unit.stop)
        else:
            # One byte earlier: the line that begins at `start` follows a line end just before it.
            handle.seek(unit.start - 1)
            data = handle.read(unit.stop - unit.start + 1)
            line_end = data.find(b"\n")
            if line_end < 0:
                return b""  # inside one long line, which belongs to an earlier unit
            data = data[line_end + 1 :]
        pieces = [data]
        while pieces[-1] and not pieces[-1].endswith(b"\n"):
            piece = handle.read(TEXT_DOCUMENT_BYTES)
            line_end = piece.find(b"\n")
            pieces.append(piece if line_end < 0 else piece[: line_end + 1])
        data = b"".join(pieces)
    return data.removeprefix(b"\xef\xbb\xbf") if unit.start == 0 else data


def _text_documents(unit: Unit, data: bytes) -> Iterator[str]:
    """One document, or documents of about 64 KiB cut at line ends where the file is large."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"dataset: {unit.file} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start:,} of the "
            f"part from {unit.start:,}); convert it, for example with iconv"
        ) from error
    text = text.replace("\r\n", "\n")
    if unit.rows == 1:
        yield text
        return
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + TEXT_DOCUMENT_BYTES)
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _json_row(line: bytes, text_column: str) -> str | Unusable:
    text = _decoded(line)
    if isinstance(text, Unusable):
        return text
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return Unusable("malformed")
    if not isinstance(row, dict):
        return Unusable("not_an_object")
    return _checked(row[text_column]) if text_column in row else Unusable("no_text_column")


def _decoded(value: bytes | None) -> Any:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return Unusable("invalid_utf8")


def _checked(value: Any) -> str | Unusable:
    """`value` if it is text that can be tokenised, else why not."""
    if isinstance(value, Unusable):
        return value
    if not isinstance(value, str):
        return Unusable("null" if value is None else "not_text")
    if not value or value.isspace():
        return Unusable("whitespace" if value else "empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return Unusable("lone_surrogate")
    return value


def _open_embedded() -> Source:
    documents = _embedded_documents()
    size_bytes = sum(len(document.encode()) for document in documents)
    identity = xxhash.xxh3_64_hexdigest("\0".join(documents).encode())
    return Source(
        units=[Unit("embedded", "embedded", 0, size_bytes, len(documents))],
        text_column="text",
        size_bytes=size_bytes,
        is_local=True,
        fingerprint={"dataset": "embedded", "hash": identity},
        description=f"this Python's own documentation: {len(documents):,} documents, {size_bytes / 1e6:.1f} MB",
    )


@functools.lru_cache(maxsize=1)
def _embedded_documents() -> tuple[str, ...]:
    """The topics of `pydoc`, then each docstring of the standard library of some length, once.

    The source files are parsed, not imported. The text differs between Python versions.
    """
    import ast
    import sysconfig
    import warnings

    documents: dict[str, None] = {}
    with contextlib.suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics

        documents.update(dict.fromkeys(topics[topic] for topic in sorted(topics)))
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if left_out.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, documented) else None
            if docstring and len(docstring) >= EMBEDDED_DOCSTRING_CHARACTERS:
                documents.setdefault(docstring)
    return tuple(document for document in documents if isinstance(_checked(document), str))
