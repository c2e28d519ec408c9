"""Recognize the layout of a token file by its content: its header, its size, and the files next to it."""

from __future__ import annotations

import io
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfgpt.data.file_access import open_file
from hfgpt.data.heads import is_text, refuse_beginnings
from hfgpt.data.kinds import BadFile
from hfgpt.data.token_names import SIDECAR

HEAD_BYTES = 4096
HEADER_BYTES = 1024  # 256 int32
# The layouts with such a header, by magic: name, version, and bytes of a token (None: header[3] states them).
MAGICS = {20240520: ("llm.c", 1, 2), 20240801: ("llm.c for Llama 3", 7, 4), 278895051: ("NeMo Automodel", 1, None)}
SURE_BYTES = 64  # fewer bytes of tokens could be those of a text, too
NPY, MEGATRON = b"\x93NUMPY", b"MMIDIDX\0\0"
MEGATRON_HEADER, MEGATRON_DTYPES = struct.Struct("<9sQBQQ"), {4: "int32", 8: "uint16"}
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4"}
# The first lines that datatrove writes: the tokenizer's name, more about it, and the bytes of a token; their number.
_METADATA = re.compile(r"([^\n|]+)(?:\|(?:[^\n]*\|)?(\d+)|[^\n]*)\r?\n(\d+)\r?(?:\n|$)")
# Names that Megatron gives to the .bin of a pair.
_HALF_OF_A_PAIR = re.compile(r"_(document|sentence)\.bin$")


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids: `count` ids of type `dtype` from byte `offset` on.

    `index`: the file that says where documents are, None if only the ids do; `documents` and `sequences`: number of
    both in it. `tokenizer`: named by the file's own metadata. `tokenizer_hash`: identifies its vocabulary and rules.
    `unreadable`: the file of metadata, if it is damaged.
    """

    file: str
    layout: str
    dtype: str
    offset: int
    count: int
    index: str | None = None
    documents: int = 0
    sequences: int = 0
    tokenizer: str | None = None
    tokenizer_hash: str | None = None
    unreadable: str | None = None

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize


class Head(NamedTuple):
    data: bytes
    size: int


def is_marked(file: str) -> bool:
    """Return whether a local file is sure to contain tokens, by its first bytes or the file next to it."""
    if file.lower().endswith(".idx") or os.path.exists(f"{file}.index") or os.path.exists(f"{file[:-4]}.idx"):
        return True
    try:
        with open(file, "rb") as handle:
            head = handle.read(8)
    except OSError:
        return False
    return head.startswith(NPY) or (len(head) == 8 and struct.unpack("<ii", head)[0] in MAGICS)


def recognize(file: str, stated: str | None, exists: Callable[[str], bool]) -> TokenFile:
    """Return the layout of a token file (for Megatron's, of its .idx). `stated`: dtype of ids, if the file has none.

    Raises BadFile for a file that is incomplete or does not contain tokens.
    """
    if file.endswith(".idx") or (file.endswith(".bin") and exists(f"{file[:-4]}.idx")):
        return _megatron(file[:-4], stated, exists)
    head = _read_head(file)
    if not head.size:
        raise BadFile(f"dataset: {file} is empty; finish writing it, or remove it")
    _refuse_cut_header(file, head)
    if len(head.data) >= HEADER_BYTES and not any(head.data[16:HEADER_BYTES]):
        found = _with_header(file, head, stated)
    elif head.data.startswith(NPY) and head.data[6:8] in (b"\1\0", b"\2\0", b"\3\0"):  # its version
        found = _npy(file, head, stated)
    elif file.endswith(".ds") or exists(f"{file}.index"):
        found = _datatrove(file, head, stated, exists)
    else:
        found = _headerless(file, head, stated)
    if not found.count:
        raise BadFile(f"dataset: {file} contains no tokens; finish writing it, or remove it")
    return found


def sidecar_of(folder: str, exists: Callable[[str], bool]) -> dict[str, Any]:
    """Return what `hfgpt tokenize` wrote about the shards in a folder; empty for other folders."""
    path = f"{folder}/{SIDECAR}"
    if not exists(path):
        return {}
    with open_file(path) as handle:
        try:
            content = json.loads(handle.read())
        except ValueError as error:
            raise BadFile(f"dataset: {path} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise BadFile(f"dataset: {path} is not a JSON object; copy it again")
    return content


def _read_head(file: str) -> Head:
    with open_file(file, uncompressed=False) as handle:
        data = handle.read(HEAD_BYTES)
        return Head(data, handle.seek(0, os.SEEK_END))


def _stated_agrees(file: str, stated: str | None, dtype: str) -> str:
    """Return the dtype that the file states. Raises BadFile if another one was given."""
    if stated not in (None, dtype):
        raise BadFile(f"tokens_dtype={stated}: {file} itself says {dtype}; leave it out")
    return DTYPES[dtype]


def _check_size(file: str, says: str, count: int, offset: int, dtype: str, size: int) -> None:
    item = np.dtype(dtype).itemsize
    if count < 0 or size != offset + count * item:
        fix = "it is not finished, or damaged: write or download it again"
        held = f"its {size:,} bytes hold {max(0, size - offset) / item:,.10g}"
        raise BadFile(f"dataset: {file}: {says} {count:,} tokens, but {held}; {fix}")


def _refuse_cut_header(file: str, head: Head) -> None:
    """Raise BadFile for a file that is a part of a header: magic, version, count, and zeros."""
    for magic, (name, version, _) in MAGICS.items():
        begin = struct.pack("<2i", magic, version)
        if 4 <= head.size < HEADER_BYTES and begin.startswith(head.data[:8]) and not any(head.data[16:]):
            what = f"its header of {name} is cut off after {head.size:,} of {HEADER_BYTES:,} bytes"
            raise BadFile(f"dataset: {file}: {what}; write or download it again")


def _with_header(file: str, head: Head, stated: str | None) -> TokenFile:
    magic, version, count, item = struct.unpack("<4i", head.data[:16])
    if magic not in MAGICS:
        known = ", ".join(f"{number} ({name})" for number, (name, *_) in MAGICS.items())
        raise BadFile(f"dataset: {file} begins with a header of magic {magic}, which is none of {known}")
    name, right, item_bytes = MAGICS[magic]
    if version != right:
        raise BadFile(f"dataset: {file}: version {version} of the layout of {name}; only {right} is supported")
    item_bytes = item_bytes or item
    if item_bytes not in (2, 4):
        raise BadFile(f"dataset: {file}: its header says {item_bytes} bytes a token; only 2 and 4 are supported")
    dtype = _stated_agrees(file, stated, "uint16" if item_bytes == 2 else "uint32")
    _check_size(file, "its header says", count, HEADER_BYTES, dtype, head.size)
    return TokenFile(file, name, dtype, HEADER_BYTES, count)


def _npy(file: str, head: Head, stated: str | None) -> TokenFile:
    stream = io.BytesIO(head.data)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise BadFile(f"dataset: {file} has a damaged NPY header ({error}); write it again") from error
    if len(shape) != 1 or dtype.str not in DTYPES.values():
        what = f"an array of {dtype} and shape {shape}"
        raise BadFile(f"dataset: {file} is {what}; give one dimension of uint16, uint32 or int32, little-endian")
    _stated_agrees(file, stated, dtype.name)
    _check_size(file, "its header says", shape[0], stream.tell(), dtype.str, head.size)
    return TokenFile(file, "NPY", dtype.str, stream.tell(), shape[0])


def _headerless(file: str, head: Head, stated: str | None) -> TokenFile:
    refuse_beginnings(file, head.data)
    if is_text(head.data) and (head.data[:1] in (b"{", b"<") or len(head.data) >= SURE_BYTES):
        raise BadFile(f"dataset: {file} is text, not tokens; give it its own suffix, or download the file itself")
    if stated is None and not file.endswith(".bin"):
        known = "tokens_dtype: uint16, uint32 or int32"
        raise BadFile(f"dataset: {file} has no header that states the type of its tokens; set --{known}")
    if stated is None and _HALF_OF_A_PAIR.search(file):
        raise BadFile(f"dataset: {file} needs its index {Path(file).stem}.idx next to it; copy both")
    dtype = stated or "uint16"
    if head.size % (item := np.dtype(dtype).itemsize):
        fix = "finish copying it, or set --tokens_dtype"
        raise BadFile(f"dataset: {file}: {head.size:,} bytes are not a whole number of {dtype} tokens; {fix}")
    _check_width(file, head.data, stated, dtype)
    return TokenFile(file, f"headerless {dtype}", DTYPES[dtype], 0, head.size // item)


def _check_width(file: str, data: bytes, stated: str | None, dtype: str) -> None:
    """Raise BadFile for uint32 tokens that are read as uint16: every second one is 0, or small for ids above 65,535."""
    ids = np.frombuffer(data[: len(data) // 4 * 4], "<u2")
    if np.dtype(dtype).itemsize != 2 or len(ids) < 64:
        return
    largest, upper = int(ids[::2].max()), int(ids[1::2].max())
    if 0 == upper < largest or (upper < 8 and largest > 255):
        given, value = f"tokens_dtype={stated}" if stated else "tokens_dtype", f"{upper} or less" if upper else "0"
        raise BadFile(f"{given}: every second uint16 of {file} is {value}, so its tokens are uint32; set it to uint32")


def _datatrove(file: str, head: Head, stated: str | None, exists: Callable[[str], bool]) -> TokenFile:
    tokenizer, count, item, unreadable = None, None, None, None
    if exists(metadata := f"{file}.metadata"):
        with open_file(metadata, uncompressed=False) as handle:
            data = handle.read(HEAD_BYTES)
        if (found := _METADATA.match(data.decode("utf-8", "replace"))) and is_text(data):
            tokenizer, count = None if found[1] == "Unknown Tokenizer" else found[1], int(found[3])
            item = int(found[2]) if found[2] else None
        elif exists(f"{file}.index"):
            unreadable = metadata
        else:
            raise BadFile(f"dataset: {metadata} cannot be read as a name and a count; copy it again, or remove it")
    index, documents = None, 0
    if exists(f"{file}.index"):
        index = f"{file}.index"
        with open_file(index, uncompressed=False) as handle:
            size = handle.seek(0, os.SEEK_END)
            if size % 8 or not size:
                raise BadFile(f"dataset: {index}: {size:,} bytes are not a whole number of uint64; copy it again")
            handle.seek(size - 8)
            documents, end = size // 8, int.from_bytes(handle.read(8), "little")
        if count not in (None, end):
            raise BadFile(
                f"dataset: {index} ends at token {end:,}, but {file}.metadata says {count:,}; copy both again"
            )
        count = end
    if count:
        item = item or (head.size // count if head.size in (2 * count, 4 * count) else 2)
        dtype = _stated_agrees(file, stated, "uint32" if item == 4 else "uint16") if stated != "int32" else "<i4"
        says = "its index says" if index else "its metadata says"
        _check_size(file, says, count, 0, dtype, head.size)
        tokens = TokenFile(file, "datatrove", dtype, 0, count)
    else:
        tokens = replace(_headerless(file, head, stated), layout="datatrove")
    return replace(tokens, index=index, documents=documents, tokenizer=tokenizer, unreadable=unreadable)


def _megatron(prefix: str, stated: str | None, exists: Callable[[str], bool]) -> TokenFile:
    index, file = f"{prefix}.idx", f"{prefix}.bin"
    if not exists(file):
        raise BadFile(f"dataset: {index} needs the tokens {Path(file).name} next to it; copy both")
    head = _read_head(index)
    if not head.data.startswith(MEGATRON) or len(head.data) < MEGATRON_HEADER.size:
        raise BadFile(f"dataset: {index} does not begin with MMIDIDX, as Megatron's indexes do; copy it again")
    _, version, code, sequences, entries = MEGATRON_HEADER.unpack(head.data[: MEGATRON_HEADER.size])
    if version != 1 or code not in MEGATRON_DTYPES:
        only = "only version 1 with uint16 (8) or int32 (4) is supported"
        raise BadFile(f"dataset: {index}: version {version} with tokens of type {code}; {only}")
    expected = MEGATRON_HEADER.size + 12 * sequences + 8 * entries
    if head.size != expected or entries < 1:
        what = f"{sequences:,} sequences and {entries:,} document entries need {expected:,} bytes"
        raise BadFile(f"dataset: {index}: {what}, but it has {head.size:,}; copy it again")
    dtype = _stated_agrees(index, stated, MEGATRON_DTYPES[code])
    size = _read_head(file).size
    if size % (item := np.dtype(dtype).itemsize):
        raise BadFile(f"dataset: {file}: {size:,} bytes are not a whole number of {MEGATRON_DTYPES[code]} tokens")
    return TokenFile(file, "Megatron", dtype, 0, size // item, index, entries - 1, sequences)
