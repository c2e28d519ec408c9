"""Where text comes from: local files, Hub datasets, or the documentation that every Python has.

A `Source` is a list of units that can each be read alone (a parquet row group, a span of a text file), so
that any order over the units can be walked, left and resumed without reading what lies before.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import glob
import gzip
import json
import logging
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from hfgpt.errors import UserError

IN_MEMORY_BYTES = 16 * 2**20
SPAN_BYTES = 2 * 2**20
TEXT_DOCUMENT_BYTES = 64 * 2**10
SAMPLE_BYTES = 2**20
EMBEDDED_DOCSTRING_CHARACTERS = 80
KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
FAULTS: dict[type[Exception], str] = {
    UnicodeDecodeError: "invalid_utf8",
    UnicodeEncodeError: "lone_surrogate",
    KeyError: "no_text_column",
    TypeError: "not_an_object",
}
KNOWN = "parquet, jsonl[.gz], json[.gz] or txt[.gz]"


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
    """Text as units of rows. `exclude`: `text_hash` of documents to pass over. Pickles; reading needs no state."""

    units: list[Unit]
    text_column: str
    size_bytes: int
    is_local: bool
    fingerprint: dict[str, Any]
    description: str
    exclude: frozenset[int] = frozenset()

    def read(self, unit: Unit) -> list[str | Unusable]:
        """All rows of `unit` in file order. Raises `UserError` if the file as a whole cannot be read."""
        kind = _kind(unit.file)
        values: list[Any]
        if unit.file == "embedded":
            values = list(_embedded_documents())
        elif kind == "parquet":
            with _opened(unit.file) as handle:
                reader = pq.ParquetFile(handle, metadata=_footer(unit.file))
                rows = reader.read_row_group(unit.start, columns=[self.text_column], use_threads=False)
            values = rows[0].cast(pa.large_binary()).to_pylist()  # arrow does not check what a file calls text
        elif kind == "lines":
            values = [line for line in _read_lines(unit).split(b"\n") if line.strip()]
        else:
            try:
                text = _read_lines(unit).decode().replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                problem = f"{unit.file} is not UTF-8 text ({error})"
                raise UserError(f"dataset: {problem}; convert it, say with iconv") from error
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
    dataset: str, name: str | None = None, split: str = "train", revision: str | None = None, text_column: str = "text"
) -> Source:
    """The text called `dataset`: `"embedded"`, a local file, folder (all below it) or glob, or a Hub dataset.

    A txt file of up to 16 MiB is one document, a larger one is cut at line ends into documents of about 64 KiB.
    `name`, `split` and `revision` choose within a Hub dataset, which is pinned to the commit they resolve to. Looks
    at each file's head or footer, and raises `UserError` for what cannot be found or read.
    """
    if dataset == "embedded":
        documents = _embedded_documents()
        data = "\0".join(documents).encode()
        fingerprint: dict[str, Any] = {"dataset": dataset, "hash": xxhash.xxh3_64_hexdigest(data)}
        description = f"this Python's own documentation: {len(documents):,} documents, {len(data) / 1e6:.1f} MB"
        return Source([Unit(dataset, rows=len(documents))], "text", len(data), True, fingerprint, description)
    files, label = _local_files(dataset), dataset
    if is_local := files is not None:
        fingerprint = {"files": len(files), "hash": _identity(files)}
    else:
        files = _hub_files(dataset, name, split, revision)
        commit = files[0].split("@", 1)[1].split("/", 1)[0]
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) at commit {commit[:8]}"
    with ThreadPoolExecutor(16) as pool:
        units, sizes = zip(*pool.map(lambda file: _file_units(file, text_column), files), strict=True)
    for file in [file for file in files if _kind(file) == "lines"][:1]:
        _check_lines(file, text_column)
    return Source(
        units=[unit for of_file in units for unit in of_file],
        text_column=text_column,
        size_bytes=sum(sizes),
        is_local=is_local,
        fingerprint={**fingerprint, "bytes": sum(sizes), "text_column": text_column},
        description=f"{label}: {len(files):,} file{'' if len(files) == 1 else 's'}, {sum(sizes) / 1e6:,.1f} MB",
    )


def _kind(file: str) -> str | None:
    return KINDS.get(Path(re.sub(r"(?<!\.parquet)\.gz$", "", file.lower())).suffix)


def _local_files(dataset: str) -> list[str] | None:
    """Absolute names of the readable files that `dataset` stands for, sorted; None for a Hub id."""
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    if path.exists() or glob.has_magic(dataset):
        pattern = os.path.join(glob.escape(str(path)), "**") if path.exists() else str(path)
        found = sorted(filter(os.path.isfile, [str(path), *glob.glob(pattern, recursive=True)]))
        if files := list(filter(_kind, found)):
            return files
        raise UserError(f"dataset={dataset}: no {KNOWN} file among {len(found)} found; convert the text to one")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and _kind(dataset) is None:
        return None
    names = [other.name for other in path.parent.glob("*") if _kind(other.name) or other.is_dir()]
    near = difflib.get_close_matches(path.name, names)
    near = [name for name in near if difflib.get_close_matches(path.stem, [Path(name).stem])]  # not the suffix alone
    hint = f"did you mean {Path(dataset).with_name(near[0])}?" if near else "check the path"
    raise UserError(f"dataset={dataset}: no such file or folder; {hint}")


def _identity(files: list[str]) -> str:
    """Hash of the files' names below their common folder, sizes, first and last MiB. Refuses placeholders."""
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    identity = xxhash.xxh3_64()
    for file in files:
        with _opened(file, compression=None) as handle:
            head = handle.read(SAMPLE_BYTES)
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(len(head), size - SAMPLE_BYTES))
            identity.update(f"{Path(file).relative_to(root).as_posix()}\0{size}\0".encode() + head + handle.read())
        is_page = _kind(file) != "text" and head.lstrip().startswith(b"<")
        if is_page or head.startswith(b"version https://git-lfs"):
            raise UserError(f"dataset: {file} is a Git LFS pointer or a web page, not the data; fetch the file itself")
    return identity.hexdigest()


def _hub_files(dataset: str, name: str | None, split: str, revision: str | None) -> list[str]:
    """URLs (hf://datasets/ID@COMMIT/PATH) of the readable files of one split."""
    from datasets import load_dataset_builder

    try:
        with quiet_hub():
            splits = load_dataset_builder(dataset, name, revision=revision).config.data_files or {}
    except Exception as error:  # not found, no network, unknown configuration: each of its own type
        asked = {"dataset": dataset, "dataset_name": name, "dataset_revision": revision}
        given = ", ".join(f"{key}={value}" for key, value in asked.items() if value)
        raise UserError(f"{given}: no local file, and not usable from the Hub: {_first_line(error)}") from error
    if split not in splits:
        raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(map(str, splits))}")
    if files := list(filter(_kind, splits[split])):
        return files
    raise UserError(f"dataset={dataset}: no {KNOWN} file in split {split}, which has {splits[split][0]}")


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the Hub client from logging each retry: the outcome is told in one line."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _opened(file: str, compression: str | None = "infer") -> Iterator[Any]:
    """The file, open to read and uncompressed; faults of the file itself become a `UserError` that names it."""
    try:
        filesystem, path = url_to_fs(file)
        # A read is one request, and what `readline` asks for at a time is small.
        options = {"block_size": 2**16, "cache_type": "none", "compression": compression}
        with filesystem.open(path, "rb", **options) as handle:
            yield handle
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        if "://" in file and isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise  # the network's fault
        reason = _first_line(error)
        raise UserError(f"dataset: {file} cannot be read ({reason}); fetch it again or remove it") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _file_units(file: str, text_column: str) -> tuple[list[Unit], int]:
    """The units of a file, and its size in bytes."""
    with _opened(file, compression=None) as handle:
        size = handle.seek(0, os.SEEK_END)
    if _kind(file) == "parquet":
        metadata = _footer(file)
        schema = metadata.schema.to_arrow_schema()
        if text_column not in schema.names:
            raise _no_column(file, text_column, schema.names)
        kind = schema.field(text_column).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if str(value) not in ("string", "large_string", "string_view"):
            raise UserError(f"text_column={text_column}: holds {kind}, not text, in {file}; name a text column")
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [Unit(file, group, rows=rows) for group, rows in enumerate(counts) if rows], size
    if _kind(file) == "text" and size <= IN_MEMORY_BYTES:
        return [Unit(file, rows=1, one_document=True)], size
    if file.lower().endswith(".gz"):
        return [Unit(file)], size
    return [Unit(file, start, min(start + SPAN_BYTES, size)) for start in range(0, size, SPAN_BYTES)], size


@functools.lru_cache(maxsize=32)  # an entry can take megabytes, so only those of the files being read
def _footer(file: str) -> Any:
    with _opened(file) as handle:
        return pq.read_metadata(handle)


def _no_column(file: str, text_column: str, columns: list[str]) -> UserError:
    return UserError(f"text_column={text_column}: not in {file}; its columns are {', '.join(columns)}")


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
    with _opened(unit.file) as handle:
        handle.seek(start)
        data = handle.read(unit.stop - start)
        if unit.start:
            _, _, data = data.partition(b"\n")
        if data and not data.endswith(b"\n"):
            data += handle.readline()
    return data.removeprefix(b"\xef\xbb\xbf")


@functools.lru_cache(maxsize=1)
def _embedded_documents() -> tuple[str, ...]:
    """The topics of `pydoc`, then each longer docstring of the standard library, parsed from its files, once."""
    documents: list[str] = []
    with contextlib.suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics

        documents += [topics[topic] for topic in sorted(topics)]
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
                documents += [ast.get_docstring(node) or "" for node in nodes]
    return tuple(dict.fromkeys(text for text in documents if len(text) >= EMBEDDED_DOCSTRING_CHARACTERS))
