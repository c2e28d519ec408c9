"""Tar archives as in webdataset: each `.txt` member, or each `.json` member with the text under a key, is a document.

An archive has no list of its members, so it is read through when it is opened: only the headers of a plain local one.
"""

from __future__ import annotations

import codecs
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from hfgpt.data.file_access import open_file
from hfgpt.data.formats.borders import pieces, read_unit, split_at_rows
from hfgpt.data.formats.jsonl import INVALID, pick
from hfgpt.data.heads import FileHead, no_column
from hfgpt.data.kinds import BadFile
from hfgpt.data.units import Unit, Unusable

HAS_COLUMNS, UNIT_START = True, "from_byte"  # see `Format`
TEXT, JSON = ".txt", ".json"
OWN_COLUMNS = ("text", "txt")  # a text_column that names `.txt` members


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    """A layout is the suffix of the members that are read."""
    members, ends = Counter[str](), []
    with open_file(file, read_ahead=True) as handle:
        for member, end in _members(file, handle):
            members[_suffix(member)] += 1
            ends.append(end)
    if not members[TEXT] + members[JSON]:
        if not members:
            raise BadFile(f"dataset: {file} has no members; write it again, or remove it")
        others = ", ".join(suffix or "no suffix" for suffix, _ in members.most_common(3))
        raise BadFile(f"dataset: {file} has no .txt or .json members, but {others}; unpack it")
    if members[TEXT] and (text_column in OWN_COLUMNS or not members[JSON]):
        if text_column not in OWN_COLUMNS:
            raise no_column(file, text_column, ["text (its .txt members)"])
        return split_at_rows(file, ends, TEXT)
    return split_at_rows(file, ends, JSON)


def read_rows(unit: Unit, text_column: str) -> list[Any]:
    rows: list[Any] = []
    with tarfile.open(fileobj=io.BytesIO(read_unit(unit)), mode="r:") as archive:
        for member in archive:
            if _suffix(member) == unit.layout and (content := archive.extractfile(member)):
                data = content.read()
                data = data.removeprefix(codecs.BOM_UTF8)
                rows.append(data if unit.layout == TEXT else _read_json(data, text_column))
    return rows


def _read_json(data: bytes, text_column: str) -> Any:
    try:
        return pick(json.loads(data.decode()), text_column)
    except UnicodeDecodeError:
        return INVALID
    except (ValueError, RecursionError):
        return Unusable("malformed")


def _suffix(member: tarfile.TarInfo) -> str:
    """Return the suffix of a plain file, "" for others and for hidden files, which are often of the system."""
    path = PurePosixPath(member.name)
    is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not path.name.startswith((".", "__"))
    return path.suffix.lower() if is_plain else ""


def _members(file: str, handle: Any) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield the members, and where each one ends. Raises EOFError if the archive is cut off or damaged."""
    try:
        archive = tarfile.open(fileobj=handle, mode="r:")  # noqa: SIM115
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # the archive would keep them all
            yield member, archive.offset
    except tarfile.TarError as error:
        raise EOFError(str(error)) from error
    handle.seek(archive.offset)
    if handle.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise EOFError(f"no end of the archive at byte {archive.offset:,}")
    if any(piece.strip(b"\0") for piece in pieces(handle)):
        what = f"its archive ends at byte {archive.offset:,}, but the file does not"
        raise BadFile(f"dataset: {file}: {what}; unpack it with tar --ignore-zeros, and pack all members at once")
