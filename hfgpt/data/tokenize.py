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
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hfgpt.data.encoding import Encoder, make_repeatable
from hfgpt.data.held_out import no_documents
from hfgpt.data.open_source import Earlier, open_source
from hfgpt.data.remote import check_hub
from hfgpt.data.source import Source, read_documents
from hfgpt.data.token_names import SIDECAR
from hfgpt.data.token_tokenizer import refuse_trained
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.data.units import Unit
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
    """What is safe on disk: whole `shards`, tokens in the unfinished one, and units that are in either."""

    shards: list[int]
    tokens: int = 0
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
    default: one per core.

    Raises UserError if the folder holds something else, or shards of another text or tokenizer.
    """
    refuse_trained(tokenizer_name, "the shards of one text need a tokenizer that exists")
    if not os.path.exists(tokenizer_name):
        check_hub(f"tokenizer={tokenizer_name}", tokenizer_name)
    with SlowWork(f"loading the tokenizer {tokenizer_name}"):
        tokenizer = load_tokenizer(tokenizer_name, lambda: (), 1024)
    encoder = Encoder(make_repeatable(tokenizer))
    opened = open_source(**source, as_earlier=Earlier(order=True))  # all units, so that each is counted
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
        "text": opened.fingerprint,
        "shard_tokens": shard_tokens,
        "dtype": np.dtype(dtype).name,
    }
    progress = _read_progress(folder, facts)
    if progress is None:
        return _read_sidecar(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer")
    writer = _ShardWriter(folder, facts, progress, (magic, version, np.dtype(dtype)))
    with SlowWork("tokenizing", "units", len(opened.units)) as work:
        work.done = progress.units
        for tokens in _tokens_of_units(opened, encoder, opened.units[progress.units :], workers or os.cpu_count() or 1):
            writer.add(tokens)
            work.done += 1
    return writer.finish()


def _tokens_of_units(source: Source, encoder: Encoder, units: list[Unit], workers: int) -> Iterator[Tokens]:
    """Yield the tokens of each unit, in order, a few units ahead."""
    if workers == 1 or len(units) < 2:
        yield from (_tokens_of(source, encoder, unit) for unit in units)
        return
    context = multiprocessing.get_context("spawn")  # other threads, of the network, may hold locks
    workers = min(workers, len(units))
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (source, encoder))
    try:
        pending = deque(pool.submit(_tokens_in_worker, unit) for unit in units[: 2 * workers])
        for unit in [*units[2 * workers :], *[None] * len(pending)]:
            yield pending.popleft().result()
            if unit is not None:
                pending.append(pool.submit(_tokens_in_worker, unit))
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
    documents = encoder.documents(list(read_documents(source, [unit], skipped)))
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

    def add(self, tokens: Tokens) -> None:
        progress, ids = self.progress, tokens.ids.astype(self.dtype)
        while len(ids) >= (room := self.facts["shard_tokens"] - progress.tokens):
            self._file.write(ids[:room].tobytes())
            progress.tokens += room
            ids = ids[room:]
            self._end_shard()
        self._file.write(ids.tobytes())
        progress.tokens += len(ids)
        progress.units += 1
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
        content = json.loads((folder / SIDECAR).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"folder {folder}: {SIDECAR} is not JSON ({error}); give a new folder") from error
    return dict(content)
