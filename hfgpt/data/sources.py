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
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from hfgpt.errors import UserError

IN_MEMORY_BYTES = 16 * 2**20
SPAN_BYTES = 2 * 2**20
TEXT_DOCUMENT_BYTES = 64 * 2**10
SAMPLE_BYTES = 2**20
EMBEDDED_DOCSTRING_CHARACTERS = 80
KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
BOM = b"\xef\xbb\xbf"
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


@dataclass(frozen=True)
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
        """All rows of `unit` in file order: documents, and what stands where a document is missing.

        Raises `UserError` naming the file if the file as a whole cannot be read.
        """
        values: list[Any]
        if unit.file == "embedded":
            values = list(_embedded_documents())
        elif _kind(unit.file) == "parquet":
            values = _parquet_values(unit, self.text_column)
        elif _kind(unit.file) == "lines":
            values = [_json_value(line, self.text_column) for line in _read_lines(unit).split(b"\n") if line.strip()]
        else:
            values = _texts(unit)
        return [self._document(value) for value in values[: unit.rows]]

    def _document(self, value: Any) -> str | Unusable:
        """`value` (UTF-8 if bytes) if it is text that can be trained on, else why not."""
        if isinstance(value, Unusable):
            return value
        try:
            value = value.decode() if isinstance(value, bytes) else value
            if not isinstance(value, str):
                return Unusable("null" if value is None else "not_text")
            if not value or value.isspace():
                return Unusable("whitespace" if value else "empty")
            return Unusable("in_validation") if text_hash(value) in self.exclude else value
        except UnicodeDecodeError:
            return Unusable("invalid_utf8")
        except UnicodeEncodeError:
            return Unusable("lone_surrogate")


def text_hash(text: str) -> int:
    """xxh3_64 of the UTF-8 bytes."""
    return xxhash.xxh3_64_intdigest(text.encode())


def open_source(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str = "text",
) -> Source:
    """The text called `dataset`: `"embedded"`, a local file, folder (all below it) or glob, or a Hub dataset.

    Files are parquet, jsonl (one JSON object per line) or txt, the last two also as .gz. A txt file of up to
    16 MiB is one document, a larger one is cut at line ends into documents of about 64 KiB. `name`, `split`
    and `revision` choose within a Hub dataset, which is pinned to the commit they resolve to. Looks at each
    file's head or footer, and raises `UserError` for what cannot be found or read.
    """
    if dataset == "embedded":
        data = "\0".join(_embedded_documents()).encode()
        units = [Unit("embedded", rows=len(_embedded_documents()))]
        fingerprint: dict[str, Any] = {"dataset": dataset, "hash": xxhash.xxh3_64_hexdigest(data)}
        description = f"this Python's own documentation: {units[0].rows:,} documents, {len(data) / 1e6:.1f} MB"
        return Source(units, "text", len(data), True, fingerprint, description)
    files = _local_files(dataset)
    is_local = files is not None
    if files is not None:
        fingerprint, label = {"files": len(files), "hash": _identity(files)}, dataset
    else:
        files = _hub_files(dataset, name, split, revision)
        commit = files[0].split("@", 1)[1].split("/", 1)[0]
        fingerprint = {"dataset": dataset, "name": name, "split": split, "commit": commit}
        label = f"{dataset} ({', '.join(filter(None, [name, split]))}) at commit {commit[:8]}"
    with ThreadPoolExecutor(16) as pool:
        per_file = list(pool.map(lambda file: _file_units(file, text_column), files))
    for file in [file for file in files if _kind(file) == "lines"][:1]:
        _check_lines(file, text_column)
    size_bytes = sum(size for _, size in per_file)
    return Source(
        units=[unit for units, _ in per_file for unit in units],
        text_column=text_column,
        size_bytes=size_bytes,
        is_local=is_local,
        fingerprint={**fingerprint, "bytes": size_bytes, "text_column": text_column},
        description=f"{label}: {len(files):,} file{'' if len(files) == 1 else 's'}, {size_bytes / 1e6:,.1f} MB",
    )


def _kind(file: str) -> str | None:
    return KINDS.get(Path(re.sub(r"(?<!\.parquet)\.gz$", "", file.lower())).suffix)


def _local_files(dataset: str) -> list[str] | None:
    """Absolute names of the readable files that `dataset` stands for, sorted; None for a Hub id."""
    path = Path(os.path.abspath(os.path.expanduser(dataset)))
    if path.exists() or glob.has_magic(dataset):
        pattern = os.path.join(glob.escape(str(path)), "**") if path.exists() else str(path)
        found = sorted(filter(os.path.isfile, [str(path), *glob.glob(pattern, recursive=True)]))
        files = [file for file in found if _kind(file)]
        if not files:
            raise UserError(f"dataset={dataset}: no {KNOWN} file among {len(found)} found; convert the text to one")
        return files
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", dataset) and _kind(dataset) is None:
        return None
    names = [other.name for other in path.parent.glob("*") if _kind(other.name) or other.is_dir()]
    near = [
        name
        for name in difflib.get_close_matches(path.name, names)
        if difflib.get_close_matches(path.stem, [Path(name).stem])  # an equal suffix alone is not close
    ]
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
    files = [file for file in map(str, splits[split]) if _kind(file)]
    if not files:
        raise UserError(f"dataset={dataset}: no {KNOWN} file in split {split}, which has {splits[split][0]}")
    return files


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the Hub clients' log lines about each retry from the user, who is told the outcome in one line."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _opened(file: str, compression: str | None = "infer") -> Iterator[Any]:
    """The file, open to read and uncompressed; faults of the file itself become a `UserError` that names it."""
    import pyarrow as pa
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

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
        import pyarrow as pa

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
    import pyarrow.parquet as pq

    with _opened(file) as handle:
        return pq.read_metadata(handle)


def _no_column(file: str, text_column: str, columns: list[str]) -> UserError:
    return UserError(f"text_column={text_column}: not in {file}; its columns are {', '.join(columns)}")


def _check_lines(file: str, text_column: str) -> None:
    """Refuse a text column that no object has among the first MiB of lines."""
    with _opened(file) as handle:
        lines = handle.read(SAMPLE_BYTES).removeprefix(BOM).split(b"\n")
    columns: dict[str, None] = {}
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            columns |= dict.fromkeys(json.loads(line).keys())
    if columns and text_column not in columns:
        raise _no_column(file, text_column, list(columns))


def _parquet_values(unit: Unit, text_column: str) -> list[bytes | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(unit.file) as handle:
        reader = pq.ParquetFile(handle, metadata=_footer(unit.file))
        column = reader.read_row_group(unit.start, columns=[text_column], use_threads=False)[text_column]
    return column.cast(pa.large_binary()).to_pylist()  # arrow does not check what a file calls text


def _read_lines(unit: Unit) -> bytes:
    """The lines that begin in [start, stop) of the file."""
    start = max(unit.start - 1, 0)  # a line that begins at `start` follows a line end just before it
    with _opened(unit.file) as handle:
        handle.seek(start)
        data = handle.read(unit.stop - start)
        if unit.start:
            _, _, data = data.partition(b"\n")
        if data and not data.endswith(b"\n"):
            data += handle.readline()
    return data.removeprefix(BOM)


def _texts(unit: Unit) -> list[str]:
    """One document, or documents of about 64 KiB that end at line ends."""
    try:
        text = _read_lines(unit).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"dataset: {unit.file} is not UTF-8 text ({error}); convert it, say with iconv") from error
    return [text] if unit.one_document else re.findall(rf"(?s:.{{1,{TEXT_DOCUMENT_BYTES}}})[^\n]*\n?", text)


def _json_value(line: bytes, text_column: str) -> Any:
    try:
        row = json.loads(line.decode())
        return row.get(text_column, Unusable("no_text_column"))
    except UnicodeDecodeError:
        return Unusable("invalid_utf8")
    except (ValueError, RecursionError):
        return Unusable("malformed")
    except AttributeError:
        return Unusable("not_an_object")


@functools.lru_cache(maxsize=1)
def _embedded_documents() -> tuple[str, ...]:
    """The topics of `pydoc`, then each longer docstring of the standard library, once.

    The source files are parsed, not imported. The text differs between Python versions.
    """
    import ast
    import sysconfig
    import warnings

    documents: list[str] = []
    with contextlib.suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics

        documents += [topics[topic] for topic in sorted(topics)]
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
                        documents.append(docstring)
    return tuple(dict.fromkeys(documents))
