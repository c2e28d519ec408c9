"""Recognize the kind of a file by its name."""

from __future__ import annotations

import os
from pathlib import Path

from hfgpt.data.compression import NAMES
from hfgpt.errors import UserError

KINDS = {
    ".parquet": "parquet",
    **dict.fromkeys([".jsonl", ".json", ".ndjson"], "lines"),
    ".txt": "text",
    **dict.fromkeys([".csv", ".tsv"], "csv"),
    **dict.fromkeys([".arrow", ".feather"], "arrow"),
    ".tar": "tar",
    **dict.fromkeys([".bin", ".npy", ".ds", ".idx"], "tokens"),
}
# Kinds that are read in any order and compress their content themselves; others may be compressed as a whole.
COMPRESSIBLE = ("lines", "text", "csv", "tar")
KNOWN = "parquet, arrow, jsonl, json, csv, tsv, txt, tar (the last six also .gz, .zst, .xz, .bz2) or token"
SAVE_AS_TEXT = "save its text as .txt or .jsonl"
# Suffixes that are not supported: what the file is, and the fix.
OTHER_KINDS = {
    ".zip": ("a zip archive", "unpack it"),
    ".7z": ("a 7z archive", "unpack it"),
    ".lz4": ("compressed with lz4", "unpack it with lz4 -d"),
    **dict.fromkeys([".html", ".htm", ".xml"], ("markup", SAVE_AS_TEXT)),
    **dict.fromkeys([".pdf", ".docx", ".doc", ".odt", ".rtf", ".epub"], ("a formatted document", SAVE_AS_TEXT)),
    **dict.fromkeys([".xlsx", ".xls", ".ods"], ("a spreadsheet", "save it as parquet or .jsonl")),
    **dict.fromkeys([".npz", ".pt", ".pkl"], ("arrays, not text", "give the text itself")),
}


class BadFile(UserError):
    """A file that cannot be read as its name suggests. `on_bad_files=skip` leaves it out."""


def compression(file: str) -> str | None:
    """Return the suffix of a compressed file: ".gz", ".zst", ".xz" or ".bz2"; None for any other file."""
    suffix = os.path.splitext(file.lower())[1].replace(".tgz", ".gz")
    return suffix if suffix in NAMES else None


def file_kind(file: str) -> str | None:
    """Return a value of `KINDS`; None for an unsupported file."""
    stem, suffix = os.path.splitext(file.lower().removesuffix("/"))
    if suffix == ".tgz":
        return "tar"
    if suffix not in NAMES:
        return KINDS.get(suffix)
    kind = KINDS.get(os.path.splitext(stem)[1])
    return kind if kind in COMPRESSIBLE else None


def describe_other_kind(file: str) -> str:
    """Describe an unsupported file: its kind, and the fix."""
    path, packed = Path(file), compression(file)
    if packed:
        path = path.with_suffix("")
        if path.suffix.lower() in KINDS:
            return f"compressed {path.suffix[1:].lower()}, which is not supported; unpack it"
    if kind_and_fix := OTHER_KINDS.get(path.suffix.lower()):
        kind, fix = kind_and_fix
        return f"{kind}, which is not supported; {fix.format(name=path.name, stem=path.stem)}"
    if packed:
        like = f"{path.name}.txt{packed}"
        return f"compressed with {NAMES[packed]}, of an unknown kind; if it is plain text, rename it to {like}"
    return f"of an unknown kind; if it is plain text, rename it to {path.name}.txt (supported: {KNOWN})"
