"""What a file is: by its name what it should be, by its first bytes what it is."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from pathlib import Path

from hfgpt.errors import UserError

KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
KNOWN = "parquet, jsonl[.gz], json[.gz] or txt[.gz]"
HEAD_BYTES = 2**16
LARGEST_ERROR_PAGE_BYTES = 2**20

_UNPACK = "unpack it"
_DOCUMENT = "save its text as .txt or .jsonl"
# Endings of files that are not read: what they are, and what to do.
OTHERS = {
    ".csv": ("CSV", "convert it, for example pandas.read_csv('{name}').to_parquet('{stem}.parquet')"),
    ".tsv": ("TSV", "convert it, for example pandas.read_csv('{name}', sep='\\t').to_parquet('{stem}.parquet')"),
    ".arrow": ("Arrow", "convert it, for example datasets.Dataset.from_file('{name}').to_parquet('{stem}.parquet')"),
    ".feather": ("Arrow", "convert it, for example pandas.read_feather('{name}').to_parquet('{stem}.parquet')"),
    ".zip": ("a zip archive", _UNPACK),
    ".tar": ("a tar archive", _UNPACK),
    ".tgz": ("a tar archive", _UNPACK),
    ".7z": ("a 7z archive", _UNPACK),
    ".zst": ("compressed with zstd", "unpack it with zstd -d"),
    ".xz": ("compressed with xz", "unpack it with xz -d"),
    ".bz2": ("compressed with bzip2", "unpack it with bunzip2"),
    ".lz4": ("compressed with lz4", "unpack it with lz4 -d"),
    **dict.fromkeys([".html", ".htm", ".xml"], ("markup", _DOCUMENT)),
    **dict.fromkeys([".pdf", ".docx", ".doc", ".odt", ".rtf", ".epub"], ("a formatted document", _DOCUMENT)),
    **dict.fromkeys([".xlsx", ".xls", ".ods"], ("a spreadsheet", "save it as parquet or .jsonl")),
    **dict.fromkeys([".npy", ".npz", ".bin", ".pt", ".pkl"], ("arrays, not text", "give the text itself")),
}
# How files begin that are not read, or are read under another name.
_BEGINNINGS = [
    (b"version https://git-lfs", "a Git LFS pointer, not the data", "fetch the file itself with git lfs pull"),
    (b"/annex/objects/", "a git-annex pointer, not the data", "fetch the file itself with git annex get"),
    (b"PAR1", "parquet", "rename it to .parquet"),
    (b"PARE", "encrypted parquet", "decrypt it"),
    (b"\x1f\x8b", "compressed with gzip", "add .gz to its name"),
    (b"PK\x03\x04", "a zip archive or an office document", "unpack it, or save its text as .txt or .jsonl"),
    (b"%PDF", "a PDF document", _DOCUMENT),
    (b"{\\rtf", "an RTF document", _DOCUMENT),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an office document", _DOCUMENT),
    (b"\x28\xb5\x2f\xfd", *OTHERS[".zst"]),
    (b"\xfd7zXZ\0", *OTHERS[".xz"]),
    (b"BZh9", *OTHERS[".bz2"]),
    (b"ARROW1", "Arrow", "convert it to parquet"),
    (b"\xff\xff\xff\xff", "Arrow", "convert it to parquet, for example with datasets.Dataset.from_file"),
    (b"SQLite format 3\0", "an SQLite database", "export its text to parquet or .jsonl"),
    (b"\x93NUMPY", *OTHERS[".npy"]),
]
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ARROW_IN = {"state.json", "dataset_info.json"}  # what `datasets.save_to_disk` writes beside its arrow files


class BadFile(UserError):
    """A file that cannot be read as what it should be."""


def file_kind(file: str) -> str | None:
    """parquet, lines or text, by the file's name; None for what is not read."""
    return KINDS.get(Path(re.sub(r"(?<!\.parquet)\.gz$", "", file.lower())).suffix)


def other_kind(file: str) -> str:
    """What a file is that is not read, by its name, and what to do."""
    path = Path(re.sub(r"\.gz$", "", file, flags=re.IGNORECASE))
    what, fix = OTHERS.get(path.suffix.lower(), ("", ""))
    if what:
        return f"{what}, which is not read; {fix.format(name=path.name, stem=path.stem)}"
    if path.suffix.lower() == ".parquet":
        return "compressed parquet, which is not read; gunzip it"
    return f"not read by this name; if it is plain text, rename it to {path.name}.txt (read are {KNOWN})"


def saved_to_disk(files: list[str]) -> str | None:
    """The folder among those of `files` that `datasets.save_to_disk` wrote; None if there is none."""
    by_folder: dict[str, set[str]] = {}
    for path in map(Path, files):
        by_folder.setdefault(str(path.parent), set()).add(path.name)
    return next((at for at, names in by_folder.items() if "dataset_dict.json" in names or names >= _ARROW_IN), None)


def check_head(file: str, raw: bytes, size: int) -> bytes:
    """The beginning of the file's content, uncompressed, from its first bytes `raw`.

    Raises BadFile, with what to do, for a file that is not what its name says.
    """
    kind, head = file_kind(file), raw
    if file.lower().endswith(".gz") and raw:
        _refuse(file, raw, [entry for entry in _BEGINNINGS if entry[0] != b"\x1f\x8b"])
        if not raw.startswith(b"\x1f\x8b"):
            raise BadFile(f"dataset: {file} cannot be read as gzip, which it is not; take .gz out of its name")
        head = zlib.decompressobj(31).decompress(raw)
    _refuse(file, head, [entry for entry in _BEGINNINGS if kind != "parquet" or not entry[0].startswith(b"PAR1")])
    start = head[:1024].removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if kind != "parquet" and (encoding := _wide_encoding(head)):
        fix = f"iconv -f {encoding} -t UTF-8 {Path(file).name} > utf8-{Path(file).name}"
        raise BadFile(f"dataset: {file} is {encoding}, not UTF-8 text; convert it: {fix}")
    if kind == "text" and b"\0" in head[:64]:
        raise BadFile(f"dataset: {file} holds zero bytes, as binary files do; give plain text in UTF-8")
    is_page = start.startswith((b"<!doctype html", b"<html")) or (start.startswith(b"<?xml") and b"<error>" in start)
    if is_page and size <= LARGEST_ERROR_PAGE_BYTES if kind == "text" else start.startswith(b"<"):
        way = "fetch the file itself" + (" (markup to train on goes into .jsonl)" if kind == "text" else "")
        raise BadFile(f"dataset: {file} is a web page, not the data; {way}")
    if kind == "parquet" and start[:1] in (b"{", b"["):
        raise BadFile(f"dataset: {file} is JSON, not parquet; rename it to .jsonl if it holds one object a line")
    if kind == "text":
        codecs.getincrementaldecoder("utf-8")().decode(head)
    return head


def _refuse(file: str, head: bytes, beginnings: list[tuple[bytes, str, str]]) -> None:
    for begins, what, fix in beginnings:
        if head.startswith(begins):
            raise BadFile(f"dataset: {file} is {what}; {fix}")


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, if the text is in one: by its mark, or by every other byte being zero."""
    if head.startswith(_UTF_32):
        return "UTF-32"
    if head.startswith(_UTF_16):
        return "UTF-16"
    little, big = head[1:1024:2], head[0:1024:2]
    for zeros, encoding in ((little, "UTF-16LE"), (big, "UTF-16BE")):
        if len(head) > 1 and 2 * zeros.count(0) > len(zeros):
            return encoding
    return None


def lines_fault(file: str, data: bytes, is_whole: bool, text_column: str | None) -> BadFile | None:
    """Why a file that begins with `data` does not hold one JSON object a line, with `text_column` if it is given; None
    if it may.
    """
    data = data.removeprefix(codecs.BOM_UTF8).lstrip()
    text = data.decode("utf-8", "replace")
    lines = [line for line in (data if is_whole else data.rpartition(b"\n")[0]).split(b"\n") if line.strip()]
    columns: dict[str, None] = {}
    objects = 0
    for line in lines:
        try:
            value = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects += 1
            columns |= dict.fromkeys(value)
    name = Path(file).name
    if 2 * objects < len(lines) or not lines:
        if re.match(r"\[\s*\{", text):
            fix = f"write one object a line, for example: jq -c '.[]' {name} > lines-{Path(name).stem}.jsonl"
            return BadFile(f"dataset: {file} is a JSON array, not lines of JSON; {fix}")
        if lines and _spans_lines(text):
            fix = f"write one object a line, for example: jq -c . {name} > lines-{Path(name).stem}.jsonl"
            return BadFile(f"dataset: {file} holds a JSON object over several lines, not one a line; {fix}")
        if lines and not objects:
            shown = ascii(lines[0][:40].decode("utf-8", "replace"))
            fix = "give one JSON object a line, in UTF-8"
            which = f"none of its first {len(lines):,} lines is" if len(lines) > 1 else "its line is not"
            return BadFile(f"dataset: {file}: {which} a JSON object ({shown}); {fix}")
    if columns and text_column is not None and text_column not in columns:
        return no_column(file, text_column, list(columns))
    return None


def _spans_lines(text: str) -> bool:
    """Whether the object that the text begins with goes on beyond what begins the second line."""
    second = re.search(r"\n\s*(?=\S)", text)
    if not text.startswith("{") or second is None:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        end = error.pos
    except RecursionError:
        return False
    return end > second.end()


def no_column(file: str, text_column: str, columns: list[str]) -> BadFile:
    found = "more than once" if text_column in columns else "not"
    return BadFile(f"text_column={text_column}: {found} in {file}; its columns are {', '.join(columns)}")
