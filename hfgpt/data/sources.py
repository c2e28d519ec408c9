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
EMBEDDED_DOCSTRING_CHARACTERS = 80
KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
KNOWN = "parquet, jsonl[.gz], json[.gz] or txt[.gz]"
BOM = b"\xef\xbb\xbf"


class Unusable(NamedTuple):
    """A row that holds no document; `reason` is the word it is counted under."""

    reason: str


class Unit(NamedTuple):
    """A part of a file that is read in one go: row group `start`, or the lines that begin in its bytes
    `start` to `stop` (all of a .gz). `rows` is known for parquet and where the whole file is one document.
    """

    file: str
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

        Raises `UserError` naming the file if the file as a whole cannot be read.
        """
        if unit.file == "embedded":
            return list(_embedded_documents())
        if _kind(unit.file) == "parquet":
            return _parquet_rows(unit, self.text_column)
        data = _read_span(unit)
        if _kind(unit.file) == "lines":
            return [_json_row(line, self.text_column) for line in data.split(b"\n") if line.strip()]
        return [_checked(text) for text in _text_documents(unit, data)]


def open_source(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str = "text",
) -> Source:
    """The text called `dataset`: `"embedded"`, a local file, folder or glob, or a Hub dataset.

    Files are parquet, jsonl (one JSON object per line) or txt, the last two also as .gz. A txt file of up to
    16 MiB is one document, a larger one is cut at line ends into documents of about 64 KiB. `name`, `split`
    and `revision` choose within a Hub dataset, which is pinned to the commit they resolve to; of a local folder
    all files below it are read. Looks at each file's head or footer, and raises `UserError` for what cannot be
    found or read.
    """
    if dataset == "embedded":
        return _open_embedded()
    files = _local_files(dataset)
    if files is not None:
        fingerprint: dict[str, Any] = {"files": len(files), "hash": _identity(files)}
        label, is_local = dataset, True
    else:
        files, commit = _hub_files(dataset, name, split, revision)
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label, is_local = f"{dataset} ({', '.join(filter(None, [name, split]))}) at commit {commit[:8]}", False
    with ThreadPoolExecutor(1 if is_local else 16) as pool:
        per_file = list(pool.map(lambda file: _file_units(file, text_column), files))
    _check_first_lines(files, text_column)
    size_bytes = sum(size for _, size in per_file)
    plural = "" if len(files) == 1 else "s"
    return Source(
        units=[unit for units, _ in per_file for unit in units],
        text_column=text_column,
        size_bytes=size_bytes,
        is_local=is_local,
        fingerprint={**fingerprint, "bytes": size_bytes, "text_column": text_column},
        description=f"{label}: {len(files):,} file{plural}, {size_bytes / 1e6:,.1f} MB",
    )


def _kind(file: str) -> str | None:
    suffix = Path(file.lower().removesuffix(".gz")).suffix
    return None if file.lower().endswith(".parquet.gz") else KINDS.get(suffix)


def _local_files(dataset: str) -> list[str] | None:
    """Absolute names of the readable files that `dataset` stands for, sorted; None for a Hub id."""
    path = os.path.abspath(os.path.expanduser(dataset))
    pattern = os.path.join(glob.escape(path), "**", "*") if os.path.isdir(path) else path
    if os.path.isfile(path) or glob.has_magic(pattern):
        found = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        files = [file for file in found if _kind(file)]
        if not files:
            raise UserError(f"dataset={dataset}: no {KNOWN} file among {len(found)} found; convert the text to one")
        return files
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and _kind(dataset) is None:
        return None
    folder = os.path.dirname(path)
    near = difflib.get_close_matches(
        os.path.basename(path), os.listdir(folder) if os.path.isdir(folder) else [], n=1, cutoff=0.5
    )
    hint = f"did you mean {os.path.join(os.path.dirname(dataset), near[0])}?" if near else "check the path"
    raise UserError(f"dataset={dataset}: no such file or folder; {hint}")


def _identity(files: list[str]) -> str:
    """Hash of the files' names below their common folder, sizes, first and last MiB. Refuses placeholders."""
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    identity = xxhash.xxh3_64()
    for file in files:
        with _opened(file) as handle:
            head = handle.read(SAMPLE_BYTES)
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(len(head), size - SAMPLE_BYTES))
            identity.update(f"{Path(file).relative_to(root).as_posix()}\0{size}\0".encode() + head + handle.read())
        if head.startswith(b"version https://git-lfs"):
            raise UserError(f"dataset: {file} is a Git LFS pointer, not the data; run `git lfs pull` there")
        if _kind(file) != "text" and head[:64].lstrip().lower().startswith((b"<!doctype html", b"<html")):
            raise UserError(f"dataset: {file} is a web page, not the data; download the file itself")
    return identity.hexdigest()


def _hub_files(dataset: str, name: str | None, split: str, revision: str | None) -> tuple[list[str], str]:
    """URLs (hf://datasets/ID@COMMIT/PATH) of the readable files of one split, and the commit."""
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(dataset, name, revision=revision)
    except Exception as error:  # not found, no network, unknown configuration: each of its own type
        asked = {"dataset": dataset, "dataset_name": name, "dataset_revision": revision}
        given = ", ".join(f"{key}={value}" for key, value in asked.items() if value)
        raise UserError(f"{given}: no local file, and not usable from the Hub: {_first_line(error)}") from error
    splits = dict(builder.config.data_files or {})
    if split not in splits:
        raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(splits)}")
    files = [str(file) for file in splits[split] if _kind(str(file))]
    if not files:
        raise UserError(f"dataset={dataset}: no {KNOWN} file in split {split}, which has {splits[split][0]}")
    return files, files[0].split("@", 1)[1].split("/", 1)[0]


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """The file, open to read; faults of the file itself become a `UserError` that names it."""
    import pyarrow as pa

    remote = "://" in file
    try:
        if remote:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            filesystem, path = url_to_fs(file)
            handle: BinaryIO = filesystem.open(path, "rb", cache_type="none")  # a read is one request
        else:
            handle = open(file, "rb")  # noqa: SIM115
        with handle:
            yield handle
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        if remote and isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise  # the network's fault
        raise UserError(
            f"dataset: {file} cannot be read ({_first_line(error)}); fetch it again or remove it"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _file_units(file: str, text_column: str) -> tuple[list[Unit], int]:
    with _opened(file) as handle:
        size = handle.seek(0, os.SEEK_END)
    if _kind(file) == "parquet":
        metadata = _footer(file)
        _check_column(file, metadata.schema.to_arrow_schema(), text_column)
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [Unit(file, group, group + 1, rows) for group, rows in enumerate(counts) if rows], size
    one_document = _kind(file) == "text" and size <= IN_MEMORY_BYTES
    if one_document or file.lower().endswith(".gz"):
        return [Unit(file, 0, size, 1 if one_document else None)], size
    return [Unit(file, start, min(start + SPAN_BYTES, size)) for start in range(0, size, SPAN_BYTES)], size


@functools.lru_cache(maxsize=32)  # an entry can take megabytes, so only those of the files being read
def _footer(file: str) -> Any:
    import pyarrow.parquet as pq

    with _opened(file) as handle:
        return pq.read_metadata(handle)


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
    columns: dict[str, None] = {}
    for file in [file for file in files if _kind(file) == "lines"][:1]:
        with _opened(file) as handle:
            head = _plain(file, handle).read(SAMPLE_BYTES)
        for line in head.removeprefix(BOM).split(b"\n")[:1000]:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                columns.update(dict.fromkeys(row if isinstance(row, dict) else ()))
        if columns and text_column not in columns:
            raise _no_column(file, text_column, list(columns))


def _plain(file: str, handle: BinaryIO) -> Any:
    return gzip.GzipFile(fileobj=handle) if file.lower().endswith(".gz") else handle


def _parquet_rows(unit: Unit, text_column: str) -> list[str | Unusable]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(unit.file) as handle:
        reader = pq.ParquetFile(handle, metadata=_footer(unit.file))
        column = reader.read_row_group(unit.start, columns=[text_column], use_threads=False)[text_column]
    try:
        return [_checked(value) for value in column.to_pylist()]
    except UnicodeDecodeError:  # arrow does not check what a file calls text
        return [_checked(_decoded(value)) for value in column.cast(pa.binary()).to_pylist()]


def _read_span(unit: Unit) -> bytes:
    """The lines that begin in [start, stop) of the file, or the whole of a compressed one."""
    with _opened(unit.file) as handle:
        if unit.start == 0:
            plain = _plain(unit.file, handle)
            data = (plain.read() if plain is not handle else handle.read(unit.stop)).removeprefix(BOM)
        else:
            # From one byte earlier: a line that begins at `start` follows a line end just before it.
            handle.seek(unit.start - 1)
            _, _, data = handle.read(unit.stop - unit.start + 1).partition(b"\n")
        pieces = [data]
        while pieces[-1] and not pieces[-1].endswith(b"\n"):
            head, line_end, _ = handle.read(TEXT_DOCUMENT_BYTES).partition(b"\n")
            pieces.append(head + line_end)
    return b"".join(pieces)


def _text_documents(unit: Unit, data: bytes) -> Iterator[str]:
    """One document, or documents of about 64 KiB cut at line ends where the file is large."""
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at {error.start:,} of the part from {unit.start:,}"
        raise UserError(f"dataset: {unit.file} is not UTF-8 text ({where}); convert it, say with iconv") from error
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
    data = "\0".join(documents).encode()
    return Source(
        units=[Unit("embedded", 0, len(data), len(documents))],
        text_column="text",
        size_bytes=len(data),
        is_local=True,
        fingerprint={"dataset": "embedded", "hash": xxhash.xxh3_64_hexdigest(data)},
        description=f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB",
    )


@functools.lru_cache(maxsize=1)
def _embedded_documents() -> tuple[str, ...]:
    """The topics of `pydoc`, then each longer docstring of the standard library, once.

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
    for path in sorted(root.rglob("*.py")):
        if left_out.intersection(path.relative_to(root).parts):
            continue
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    docstring = ast.get_docstring(node) or ""
                    if len(docstring) >= EMBEDDED_DOCSTRING_CHARACTERS:
                        documents.setdefault(docstring)
    return tuple(document for document in documents if isinstance(_checked(document), str))
