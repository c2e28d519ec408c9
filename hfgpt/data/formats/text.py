"""Plain text: a small file is one document; a larger one is split into documents at line ends."""

from __future__ import annotations

import re

from hfgpt.data.compression import GZIP
from hfgpt.data.file_access import open_file
from hfgpt.data.formats.spans import read_lines, read_text, split_into_spans
from hfgpt.data.heads import FileHead
from hfgpt.data.kinds import BadFile, compression
from hfgpt.data.units import IN_MEMORY_BYTES, Unit

HAS_COLUMNS, UNIT_START = False, "from_byte"  # see `Format`
DOCUMENT_CHARACTERS = 64 * 2**10
# For a stream, text files are split into about STREAM_DOCUMENTS documents of at least SMALLEST_PIECE characters.
STREAM_DOCUMENTS, SMALLEST_PIECE = 1024, 2**10


def find_units(file: str, head: FileHead, text_column: str) -> list[Unit]:
    packed = compression(file)
    if not packed:
        with open_file(file) as handle:
            handle.seek(max(0, head.size_bytes - 64))
            if b"\0" in handle.read(64):
                raise BadFile(
                    f"dataset: {file} ends in zero bytes, as damaged files do; download it again, or remove them"
                )
    if (head.size_bytes if packed in (None, GZIP) else head.text_bytes) <= IN_MEMORY_BYTES:
        return [Unit(file, rows=1, piece_characters=None, size_bytes=head.text_bytes)]
    return split_into_spans(file, head.text_bytes)


def read_rows(unit: Unit, text_column: str) -> list[str]:
    size = unit.piece_characters
    data = read_text(unit, size) if size else read_lines(unit)
    text = data.decode().replace("\r\n", "\n")
    if size is None:
        return [text]
    # A document ends at the first line end after this many characters; given a size, at the latest after twice as many.
    rest_of_line = rf"[^\n]{{0,{size}}}" if size else r"[^\n]*"
    return re.findall(rf"(?s:.{{1,{size or DOCUMENT_CHARACTERS}}}){rest_of_line}\n?", text)


def choose_piece_characters(units: list[Unit]) -> int | None:
    """Return the document size that gives a stream enough documents; None if all text files are small enough."""
    size = min(max(sum(unit.size_bytes for unit in units) // STREAM_DOCUMENTS, SMALLEST_PIECE), DOCUMENT_CHARACTERS)
    return size if any(unit.size_bytes > size for unit in units) else None


def split_into_pieces(unit: Unit, piece_characters: int) -> list[Unit]:
    """Split a unit into units whose documents have about `piece_characters` characters."""
    units = split_into_spans(unit.file, unit.size_bytes) if unit.piece_characters is None else [unit]
    return [one._replace(piece_characters=piece_characters) for one in units]
