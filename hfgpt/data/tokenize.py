"""Write the tokens of a text into shards in llm.c's layout, so that later runs need not tokenize it again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import struct
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hfgpt.data.encoding import Encoder, make_repeatable
from hfgpt.data.local_files import refuse_inside
from hfgpt.data.open_source import open_source
from hfgpt.data.remote import check_hub
from hfgpt.data.source import Source, read_documents
from hfgpt.data.token_names import SIDECAR
from hfgpt.data.token_tokenizer import refuse_trained
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.data.units import Unit
from hfgpt.data.unusable import no_documents
from hfgpt.distributed.cpu import available_cores
from hfgpt.distributed.launcher import end_with_parent
from hfgpt.errors import RunError, UserError
from hfgpt.messages.slow_progress import SlowWork

SHARD_TOKENS = 100_000_000
NARROW, WIDE = (20240520, 1, "<u2"), (20240801, 7, "<u4")  # llm.c's magic, version and type of tokens
HEADER_BYTES = 1024
PROGRESS, PARTIAL = "progress.partial", "shard.partial"
SAVE_SECONDS = 10.0


class Tokens(NamedTuple):
    """The tokens of a unit, each document after the separator; rows left out and text lost, by reason."""

    ids: np.ndarray
    documents: int
    skipped: Counter[str]


@dataclasses.dataclass
class _Progress:
    """What is safe on disk: whole `shards`, tokens in the unfinished one, and what of the text is in either.

    `files`: whole entries of `Source.units`, which are files if there are many. `units`: of those that follow.
    """

    shards: list[int]
    tokens: int = 0
    files: int = 0
    units: int = 0
    documents: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)


def tokenize(
    source: dict[str, Any],
    folder: Path,
    tokenizer_name: str,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
) -> dict[str, Any]:
    """Write the documents of `open_source(**source)` as shards into `folder`, and return what its sidecar says.

    Continues after an interruption, and does nothing if the shards are finished. The order of documents is that of the
    text, so training on the shards sees the documents that streaming the text would give. `workers`: processes;
    default: one per core that may be used.

    Raises UserError if the folder holds something else, or shards of another text or tokenizer.
    """
    refuse_inside(f"folder={folder}", folder, source["dataset"])
    refuse_trained(tokenizer_name, "the shards of one text need a tokenizer that exists")
    if not os.path.exists(tokenizer_name):
        check_hub(f"tokenizer={tokenizer_name}", tokenizer_name)
    with SlowWork(f"loading the tokenizer {tokenizer_name}"):
        tokenizer = load_tokenizer(tokenizer_name, lambda: (), 1024)
    encoder = Encoder(make_repeatable(tokenizer))
    opened = open_source(**source)
    if opened.has_tokens:
        raise UserError(f"dataset={source['dataset']}: contains tokens already; train on it as it is")
    if encoder.separator_id is None:
        raise UserError(f"tokenizer={tokenizer_name}: has no end-of-text (eos), which separates documents in shards")
    magic, version, dtype = NARROW if encoder.rows <= 2**16 else WIDE
    facts = {
        "tokenizer": tokenizer_name,
        "tokenizer_fingerprint": encoder.fingerprint,
        "dataset": source["dataset"],
        "dataset_name": source.get("name"),
        "dataset_split": source.get("split"),
        "commit": opened.fingerprint.get("commit"),
        "text": {key: value for key, value in opened.fingerprint.items() if key != "order"},  # of training
        "shard_tokens": shard_tokens,
        "dtype": np.dtype(dtype).name,
    }
    progress = _read_progress(folder, facts)
    if progress is None:
        return _read_sidecar(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer")
    writer = _ShardWriter(folder, facts, progress, (magic, version, np.dtype(dtype)))
    with SlowWork("tokenizing", "files" if opened.by_file else "units", len(opened.units)) as work:
        parts = _parts(opened, progress.files, progress.units)
        for tokens, files, units in _tokens_of_parts(opened, encoder, parts, workers or available_cores()):
            writer.add(tokens, files, units)
            work.done = files + (0 if opened.by_file else units)
    return writer.finish()


def _parts(source: Source, files: int, units: int) -> Iterator[tuple[Unit, int, int]]:
    """Yield each unit after `units` of those after `files`, and what `_Progress` counts after it."""
    if not source.by_file:
        yield from ((unit, files, number) for number, unit in enumerate(source.units[units:], units + 1))
        return
    for file, whole in enumerate(source.units[files:], files):
        of_file = source.units_of(whole)
        for number, unit in enumerate(of_file[units:], units + 1):
            yield unit, *((file + 1, 0) if number == len(of_file) else (file, number))
        units = 0


def _tokens_of_parts(
    source: Source, encoder: Encoder, parts: Iterator[tuple[Unit, int, int]], workers: int
) -> Iterator[tuple[Tokens, int, int]]:
    """Yield the tokens of each unit, in order, a few units ahead, and the counts of `parts`."""
    if workers == 1 or len(source.units) < 2:
        yield from ((_tokens_of(source, encoder, unit), files, units) for unit, files, units in parts)
        return
    context = multiprocessing.get_context("spawn")  # other threads, of the network, may hold locks
    workers = min(workers, len(source.units))
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (source, encoder))
    pending: deque[tuple[concurrent.futures.Future[Tokens], int, int]] = deque()
    try:
        for part in chain(parts, [None] * 2 * workers):
            if part is not None:
                unit, files, units = part
                pending.append((pool.submit(_tokens_in_worker, unit), files, units))
            if pending and (part is None or len(pending) > 2 * workers):
                tokens, files, units = pending.popleft()
                yield tokens.result(), files, units
    except concurrent.futures.process.BrokenProcessPool as error:
        raise RunError("a process that tokenizes was killed, perhaps for lack of memory; run it again") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_of_worker: list[Any] = []


def _start_worker(source: Source, encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the main process reports it
    end_with_parent(os.getppid(), at_once=True)
    _of_worker[:] = [source, encoder]


def _tokens_in_worker(unit: Unit) -> Tokens:
    source, encoder = _of_worker
    return _tokens_of(source, encoder, unit)


def _tokens_of(source: Source, encoder: Encoder, unit: Unit) -> Tokens:
    skipped = Counter[str]()
    rows = read_documents(dataclasses.replace(source, by_file=False), [unit], skipped)  # the unit is no file
    documents = encoder.documents(list(rows))
    for document in documents:
        skipped += document.lost
    return Tokens(encoder.joined(documents), len(documents), skipped)


class _ShardWriter:
    """Writes tokens into shards of equal length, and records what is safe on disk."""

    def __init__(
        self, folder: Path, facts: dict[str, Any], progress: _Progress, layout: tuple[int, int, np.dtype[Any]]
    ) -> None:
        self.folder, self.facts, self.progress = folder, facts, progress
        self.magic, self.version, self.dtype = layout
        self._file: BinaryIO = self._open(progress.tokens)
        self._last_save = time.monotonic()
        self._save()

    def add(self, tokens: Tokens, files: int, units: int) -> None:
        progress, ids = self.progress, tokens.ids.astype(self.dtype)
        while len(ids) >= (room := self.facts["shard_tokens"] - progress.tokens):
            self._file.write(ids[:room].tobytes())
            progress.tokens += room
            ids = ids[room:]
            self._end_shard()
        self._file.write(ids.tobytes())
        progress.tokens += len(ids)
        progress.files, progress.units = files, units
        progress.documents += tokens.documents
        progress.skipped += tokens.skipped
        if time.monotonic() - self._last_save > SAVE_SECONDS:
            self._save()

    def finish(self) -> dict[str, Any]:
        if self.progress.tokens:
            self._end_shard()
        self._file.close()
        (self.folder / PARTIAL).unlink()
        if not self.progress.shards:
            for name in (PROGRESS, SIDECAR):
                (self.folder / name).unlink()
            shutil.rmtree(self.folder / "tokenizer")
            raise no_documents(f"dataset={self.facts['dataset']}", self.progress.skipped)
        sidecar = {
            **self.facts,
            "shards": {_name(number): count for number, count in enumerate(self.progress.shards, 1)},
            "tokens": sum(self.progress.shards),
            "documents": self.progress.documents,
            "left_out": dict(self.progress.skipped),
            "finished": True,
        }
        _write(self.folder / SIDECAR, sidecar)
        (self.folder / PROGRESS).unlink()
        return sidecar

    def _open(self, tokens: int) -> BinaryIO:
        """Open the unfinished shard, with this many tokens in it."""
        path = self.folder / PARTIAL
        file = path.open("r+b" if tokens else "wb")
        file.truncate(HEADER_BYTES + tokens * self.dtype.itemsize)
        file.seek(0, os.SEEK_END)
        return file

    def _end_shard(self) -> None:
        """Give the shard its header and name."""
        self._file.seek(0)
        self._file.write(struct.pack("<256i", self.magic, self.version, self.progress.tokens, *[0] * 253))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.progress.shards.append(self.progress.tokens)
        os.replace(self.folder / PARTIAL, self.folder / _name(len(self.progress.shards)))
        self.progress.tokens = 0
        self._file = self._open(0)

    def _save(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        _write(self.folder / PROGRESS, {**vars(self.progress), "skipped": dict(self.progress.skipped)})
        _write(self.folder / SIDECAR, {**self.facts, "finished": False})
        self._last_save = time.monotonic()


def _name(number: int) -> str:
    return f"tokens_train_{number:06}.bin"


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _read_progress(folder: Path, facts: dict[str, Any]) -> _Progress | None:
    """Return what an earlier run wrote, ready to be continued; None if it finished. Raises UserError if it differs."""
    if not folder.exists() or not any(path for path in folder.iterdir() if not path.name.startswith(".")):
        return _Progress([])
    where = f"folder {folder}"
    if not (folder / SIDECAR).is_file():
        raise UserError(f"{where}: is not empty, and not of an earlier hfgpt tokenize; give a new folder")
    sidecar = _read_sidecar(folder)
    changed = [key for key, value in facts.items() if sidecar.get(key) != value and key not in ("dataset", "tokenizer")]
    if changed:
        what = ", ".join(key.replace("_", " ") for key in changed)
        raise UserError(f"{where}: holds tokens of {sidecar.get('dataset')} with another {what}; give a new folder")
    if sidecar.get("finished"):
        for name, count in sidecar["shards"].items():
            size = HEADER_BYTES + count * np.dtype(facts["dtype"]).itemsize
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                raise UserError(f"{where}: {name} is missing or incomplete; copy it again, or give a new folder")
        return None
    if not (folder / PROGRESS).is_file():
        return _Progress([])
    saved = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    progress = _Progress(**{**saved, "skipped": Counter(saved["skipped"])})
    # The shard that was being written may have ended since; what is in it after the saved tokens is written again.
    ended = folder / _name(len(progress.shards) + 1)
    if ended.exists():
        os.replace(ended, folder / PARTIAL)
    return progress


def _read_sidecar(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / SIDECAR).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"folder {folder}: {SIDECAR} is not JSON ({error}); give a new folder") from error
