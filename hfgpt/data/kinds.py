"""Recognize the kind of a file by its name."""

from __future__ import annotations

import re
from pathlib import Path

from hfgpt.errors import UserError

KINDS = {".parquet": "parquet", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".txt": "text"}
KINDS |= dict.fromkeys([".bin", ".npy", ".ds", ".idx"], "tokens")
KNOWN = "parquet, jsonl[.gz], json[.gz], txt[.gz] or token"
SAVE_AS_TEXT = "save its text as .txt or .jsonl"
# Suffixes that are not supported: what the file is, and the fix.
OTHER_KINDS = {
    ".csv": ("CSV", "convert it, for example pandas.read_csv('{name}').to_parquet('{stem}.parquet')"),
    ".tsv": ("TSV", "convert it, for example pandas.read_csv('{name}', sep='\\t').to_parquet('{stem}.parquet')"),
    ".arrow": ("Arrow", "convert it, for example datasets.Dataset.from_file('{name}').to_parquet('{stem}.parquet')"),
    ".feather": ("Arrow", "convert it, for example pandas.read_feather('{name}').to_parquet('{stem}.parquet')"),
    ".zip": ("a zip archive", "unpack it"),
    ".tar": ("a tar archive", "unpack it"),
    ".tgz": ("a tar archive", "unpack it"),
    ".7z": ("a 7z archive", "unpack it"),
    ".zst": ("compressed with zstd", "unpack it with zstd -d"),
    ".xz": ("compressed with xz", "unpack it with xz -d"),
    ".bz2": ("compressed with bzip2", "unpack it with bunzip2"),
    ".lz4": ("compressed with lz4", "unpack it with lz4 -d"),
    **dict.fromkeys([".html", ".htm", ".xml"], ("markup", SAVE_AS_TEXT)),
    **dict.fromkeys([".pdf", ".docx", ".doc", ".odt", ".rtf", ".epub"], ("a formatted document", SAVE_AS_TEXT)),
    **dict.fromkeys([".xlsx", ".xls", ".ods"], ("a spreadsheet", "save it as parquet or .jsonl")),
    **dict.fromkeys([".npz", ".pt", ".pkl"], ("arrays, not text", "give the text itself")),
}


class BadFile(UserError):
    """A file that cannot be read as its name suggests. `on_bad_files=skip` leaves it out."""


def file_kind(file: str) -> str | None:
    """Return "parquet", "lines", "text" or "tokens"; None for an unsupported file."""
    kind = KINDS.get(Path(re.sub(r"(?<!\.parquet)\.gz$", "", file.lower())).suffix)
    return None if kind == "tokens" and file.lower().endswith(".gz") else kind


def describe_other_kind(file: str) -> str:
    """Describe an unsupported file: its kind, and the fix."""
    path = Path(re.sub(r"\.gz$", "", file, flags=re.IGNORECASE))
    if kind_and_fix := OTHER_KINDS.get(path.suffix.lower()):
        kind, fix = kind_and_fix
        return f"{kind}, which is not supported; {fix.format(name=path.name, stem=path.stem)}"
    if path.suffix.lower() == ".parquet":
        return "compressed parquet, which is not supported; gunzip it"
    return f"of an unknown kind; if it is plain text, rename it to {path.name}.txt (supported: {KNOWN})"
