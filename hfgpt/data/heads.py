"""Check the first bytes of a file against what its name promises."""

from __future__ import annotations

import codecs
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from hfgpt.data.compression import BEGINNINGS, GZIP, NAMES, decompress_beginning, is_compressed
from hfgpt.data.file_access import open_file
from hfgpt.data.kinds import COMPRESSIBLE, SAVE_AS_TEXT, BadFile, compression, file_kind
from hfgpt.data.units import IN_MEMORY_BYTES

HEAD_BYTES = 2**16
LARGEST_ERROR_PAGE_BYTES = 2**20
# How much of a compressed file is read to estimate how much it unpacks to; bzip2 needs more than HEAD_BYTES.
PACKED_HEAD_BYTES = 2**20
# A gzip file that seems to unpack to so much more than it states, and four times as much, has several members.
UNSTATED_BYTES = 512 * 2**20
_NPY = b"\x93NUMPY"
# First bytes of files that are not supported, or need another name: what the file is, and the fix.
_BEGINNINGS = {
    b"version https://git-lfs": ("a Git LFS pointer, not the data", "fetch the file itself with git lfs pull"),
    b"/annex/objects/": ("a git-annex pointer, not the data", "fetch the file itself with git annex get"),
    b"PAR1": ("parquet", "rename it to .parquet"),
    b"PARE": ("encrypted parquet", "decrypt it"),
    **{BEGINNINGS[suffix]: (f"compressed with {name}", f"add {suffix} to its name") for suffix, name in NAMES.items()},
    b"PK\x03\x04": ("a zip archive or an office document", "unpack it, or save its text as .txt or .jsonl"),
    b"%PDF-": ("a PDF document", SAVE_AS_TEXT),
    b"{\\rtf1": ("an RTF document", SAVE_AS_TEXT),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an office document", SAVE_AS_TEXT),
    b"ARROW1": ("Arrow", "rename it to .arrow"),
    b"\xff\xff\xff\xff": ("Arrow", "rename it to .arrow"),
    b"FEA1": ("Arrow of a version without streams", "convert it to parquet, for example with pandas.read_feather"),
    b"SQLite format 3\0": ("an SQLite database", "export its text to parquet or .jsonl"),
    _NPY: ("an array of numbers", "rename it to .npy if it holds token ids"),
}
# First bytes, of these, that are right for a kind of file.
_OWN_BEGINNINGS = {"parquet": (b"PAR1",), "arrow": (b"ARROW1", b"\xff\xff\xff\xff")}


# Kinds above that may be text; the others have bytes that text has not.
_TEXTS = (b"version https://git-lfs", b"/annex/objects/", b"%PDF-", b"{\\rtf1")
# Kinds with these bytes at the end.
_ENDS = {first: first for first in (b"PAR1", b"PARE", b"ARROW1", b"FEA1")} | {b"%PDF-": b"%%EOF", b"{\\rtf1": b"}"}


class FileHead(NamedTuple):
    """The first bytes of a file's content, decompressed: all of it if `is_whole`.

    Also its size as stored and decompressed: of a large compressed file as it states it, or else an estimate.
    """

    data: bytes
    is_whole: bool
    size_bytes: int
    text_bytes: int


def read_head(file: str) -> FileHead:
    """Read and check the head of a file. Raises BadFile if it is not what the file's name promises."""
    packed, kind = compression(file), file_kind(file)
    with open_file(file, uncompressed=False) as handle:
        wanted = PACKED_HEAD_BYTES if packed not in (None, GZIP) else HEAD_BYTES if kind in COMPRESSIBLE else 64
        raw = handle.read(wanted)
        size = text_bytes = handle.seek(0, os.SEEK_END)
        data = check_head(file, raw, size)
        if packed == GZIP:
            handle.seek(max(0, size - 4))
            text_bytes = int.from_bytes(handle.read(4), "little")  # modulo 2^32, and only of the last member
        if packed:
            estimate = size * len(data) // max(len(raw), 1)
            if packed != GZIP or estimate > max(4 * text_bytes, text_bytes + UNSTATED_BYTES):
                text_bytes = estimate
    if packed and (text_bytes != size and size <= IN_MEMORY_BYTES if packed == GZIP else size == len(raw)):
        with open_file(file) as handle:
            text_bytes = handle.seek(0, os.SEEK_END)
    return FileHead(data[:PACKED_HEAD_BYTES], len(raw) == size == len(data) and not packed, size, text_bytes)


def check_head(file: str, raw: bytes, size_bytes: int) -> bytes:
    """Decompress the first bytes `raw` of a file. Raises BadFile if they are not what the file's name promises."""
    kind, packed, head = file_kind(file), compression(file), raw
    if packed and raw:
        if not is_compressed(packed, raw):
            refuse_beginnings(file, raw)
            raise BadFile(
                f"dataset: {file} cannot be read as {NAMES[packed]}, because it is not compressed; "
                f"remove {packed} from its name"
            )
        head = decompress_beginning(packed, raw)
    if not head.startswith(_OWN_BEGINNINGS.get(kind or "", ())):
        refuse_beginnings(file, head)
    start = head[:1024].removeprefix(codecs.BOM_UTF8).lstrip().lower()
    is_page = start.startswith((b"<!doctype html", b"<html")) or (start.startswith(b"<?xml") and b"<error>" in start)
    if kind in ("lines", "text", "csv") and b"\0" in head[:64]:
        fix = f"convert it, for example: iconv -f UTF-16 -t UTF-8 {Path(file).name} > utf8-{Path(file).name}"
        raise BadFile(f"dataset: {file} contains zero bytes, as UTF-16 and binary files do, not UTF-8 text; {fix}")
    if is_page and size_bytes <= LARGEST_ERROR_PAGE_BYTES if kind in ("text", "csv") else start.startswith(b"<"):
        hint = " (markup to train on goes into .jsonl)" if kind == "text" else ""
        raise BadFile(f"dataset: {file} is a web page, not the data; download the file itself{hint}")
    if kind == "parquet" and start[:1] in (b"{", b"["):
        raise BadFile(f"dataset: {file} is JSON, not parquet; rename it to .jsonl if it contains one object per line")
    if kind == "text":
        codecs.getincrementaldecoder("utf-8")().decode(head)
    return head


def refuse_beginnings(file: str, head: bytes) -> None:
    """Raise BadFile for a file that begins like one of another kind, and does not only have its first bytes."""
    for beginning, (kind, fix) in _BEGINNINGS.items():
        if head.startswith(beginning) and (beginning in _TEXTS or not is_text(head)):
            if file_kind(file) in (None, "tokens") and not _is_confirmed(file, beginning):  # ids may be any bytes
                continue
            raise BadFile(f"dataset: {file} is {kind}; {fix}")
    if head[257:262] == b"ustar" and file_kind(file) != "tar":
        raise BadFile(f"dataset: {file} is a tar archive; rename it to .tar")


def is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character.isspace() for character in text)


def _is_confirmed(file: str, beginning: bytes) -> bool:
    """Return whether a file is more like what has this beginning than like token ids."""
    with open_file(file, uncompressed=False) as handle:
        raw = handle.read(PACKED_HEAD_BYTES)
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - 64))
        tail = handle.read()
        if beginning == b"PK\x03\x04":
            return zipfile.is_zipfile(handle)
    if beginning in _ENDS:
        return tail.rstrip().endswith(_ENDS[beginning])
    try:
        if beginning == b"\xff\xff\xff\xff":
            return bool(pa.ipc.open_stream(raw).schema)
        suffix = next((suffix for suffix, first in BEGINNINGS.items() if first == beginning), None)
        return bool(decompress_beginning(suffix, raw)) if suffix else beginning != _NPY  # which layouts.py checks
    except (EOFError, zlib.error, pa.ArrowException):
        return False


def no_column(file: str, text_column: str, columns: list[str], hint: str = "") -> BadFile:
    found = "more than once" if text_column in columns else "not"
    return BadFile(f"text_column={text_column}: {found} in {file}; its columns are {', '.join(columns)}{hint}")


def hint_of_ids(row: dict[str, Any]) -> str:
    """Return that a row of JSON holds lists of integers, if it does."""
    for key, ids in row.items():
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return f"; {key} has lists of integers: if these are token ids, save it as parquet and set tokens_column"
    return ""
