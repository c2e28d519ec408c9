"""Read compressed files: gzip, zstd, xz and bzip2, by the suffix of their name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa

GZIP, ZSTD, XZ, BZIP2 = ".gz", ".zst", ".xz", ".bz2"
# First bytes by suffix. bzip2's fourth byte is its block size.
BEGINNINGS = {GZIP: b"\x1f\x8b", ZSTD: b"\x28\xb5\x2f\xfd", XZ: b"\xfd7zXZ\0", BZIP2: b"BZh"}
NAMES = {GZIP: "gzip", ZSTD: "zstd", XZ: "xz", BZIP2: "bzip2"}
# A zstd file may begin with a frame to be skipped: one of 16 magic numbers.
_SKIPPED_FRAMES = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))
_READ_BYTES, _RAW_BYTES = 2**20, 2**16
LARGEST_BEGINNING_BYTES = 16 * 2**20
# What the decoders raise as OSError for broken content, which is no fault of the disk or the network.
_BROKEN = ("ZSTD", "Truncated compressed stream", "Invalid data stream")
_TOO_WIDE = "Frame requires too much memory"


def is_compressed(suffix: str, raw: bytes) -> bool:
    return raw.startswith((BEGINNINGS[suffix], *(_SKIPPED_FRAMES if suffix == ZSTD else ())))


def has_checksum(suffix: str, raw: bytes) -> bool:
    """Return whether a compressed file that begins like this states a checksum; only zstd may do without."""
    return suffix != ZSTD or not raw.startswith(BEGINNINGS[ZSTD]) or bool(raw[4] & 4)


def decompress_beginning(suffix: str, raw: bytes) -> bytes:
    """Return what the first bytes of a compressed file hold, as far as they go, up to 16 MiB."""
    if suffix == GZIP:
        return zlib.decompressobj(31).decompress(raw, LARGEST_BEGINNING_BYTES)
    parts: list[bytes] = []
    try:
        if suffix == XZ:
            return lzma.LZMADecompressor().decompress(raw, LARGEST_BEGINNING_BYTES)
        if suffix == BZIP2:
            return bz2.BZ2Decompressor().decompress(raw, LARGEST_BEGINNING_BYTES)
        stream = pa.CompressedInputStream(pa.BufferReader(raw), "zstd")
        while sum(map(len, parts)) < LARGEST_BEGINNING_BYTES and (part := stream.read(2**14)):
            parts.append(part)
    except (lzma.LZMAError, OSError) as error:
        if not str(error).startswith("Truncated"):
            raise _broken(error) from error
    return b"".join(parts)


def open_compressed(suffix: str, handle: Any) -> Any:
    """Return a readable file with the content of a compressed one. Seeking reads what lies between."""
    if suffix == GZIP:
        return gzip.GzipFile(fileobj=handle)
    start: dict[str, Callable[[], Any]] = {
        ZSTD: lambda: pa.CompressedInputStream(pa.PythonFile(_Unclosed(handle), mode="r"), "zstd"),
        XZ: lambda: _Streams(handle, lzma.LZMADecompressor),
        BZIP2: lambda: _Streams(handle, bz2.BZ2Decompressor),
    }
    return io.BufferedReader(_Decompressed(handle, start[suffix]), _READ_BYTES)


class _Decompressed(io.RawIOBase):
    """The content of a compressed file. Seeking backward starts over; broken content raises EOFError."""

    def __init__(self, handle: Any, start: Callable[[], Any]) -> None:
        self._handle, self._start, self._stream, self._at = handle, start, start(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and not str(error).startswith(_BROKEN):
                raise
            raise _broken(error) from error
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        target = float("inf") if whence == os.SEEK_END else offset + (self._at if whence == os.SEEK_CUR else 0)
        if target < self._at:
            self._handle.seek(0)
            self._stream, self._at = self._start(), 0
        while self._at < target and self.read(int(min(_READ_BYTES, target - self._at))):
            pass
        return self._at


class _Streams:
    """Streams of xz or bzip2 one after another, as parallel compressors write them.

    The readers of the standard library take a damaged stream after the first one for the end of the file.
    """

    def __init__(self, handle: Any, start: Callable[[], Any]) -> None:
        self._handle, self._start = handle, start
        self._decoder: Any = None

    def read(self, size: int) -> bytes:
        while True:
            raw = b""
            if self._decoder is None or self._decoder.eof:
                raw = self._decoder.unused_data.lstrip(b"\0") if self._decoder else b""
                while not raw and (more := self._handle.read(_RAW_BYTES)):
                    raw = more.lstrip(b"\0")  # padding
                if not raw:
                    return b""
                self._decoder = self._start()
            elif self._decoder.needs_input and not (raw := self._handle.read(_RAW_BYTES)):
                raise EOFError("Truncated compressed stream")
            if data := self._decoder.decompress(raw, size):
                return data


class _Unclosed:
    """A file that stays open when Arrow drops its reader."""

    closed = False

    def __init__(self, handle: Any) -> None:
        self.read, self.seek, self.tell = handle.read, handle.seek, handle.tell

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass


def _broken(error: Exception) -> EOFError:
    if _TOO_WIDE in str(error):
        return EOFError("zstd with a window above 128 MiB: unpack it with zstd -d --long=31 and compress it again")
    return EOFError(str(error))
