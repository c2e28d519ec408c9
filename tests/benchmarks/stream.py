"""What the data path costs, as ratios measured in one run: python tests/benchmarks/stream.py [--dataset FOLDER]

Rates are tokens per second of CPU time on one thread, so that other work on the machine changes them little. The
median of a few rounds is taken, each of which measures all candidates one after the other.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from hub_server import HubServer
from side_by_side import at_least_one, keep, machine

from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.loader import iterate
from hfgpt.data.open_source import open_source
from hfgpt.data.source import Source
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer

LENGTH, BLOCKS = 1024, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dataset", help="parquet file or folder; without it, repeated embedded text of 100 MB")
    parser.add_argument("--tokenizer", default="bpe-4096")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="per measurement")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--resume-only", action="store_true")
    parser.add_argument("--resume-client", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.resume_client:
        return resume_client(*options.resume_client)
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder, "large.parquet")
        tokenizer = str(Path(folder, "tokenizer"))
        texts = write_large_file(large)
        save_tokenizer(load_tokenizer(options.tokenizer, lambda: texts, LENGTH), tokenizer)
        if not options.resume_only:
            measure_rates(options.dataset or str(large), tokenizer, options.tokens, options.rounds)
        measure_resume(large, tokenizer, Path(folder))


def config(dataset: str, tokenizer: str) -> PretrainConfig:
    return PretrainConfig(dataset=dataset, tokenizer=tokenizer, sequence_length=LENGTH, streaming=True, max_steps=1)


def write_large_file(path: Path, characters: int = 100_000_000) -> list[str]:
    """Documents of about 1,000 tokens, as FineWeb-Edu's, out of embedded ones, no two equal; 1,000 to a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = open_source("embedded")
    documents = cycle(row for row in source.read(source.units[0]) if isinstance(row, str))
    texts = []
    while characters > 0:
        text = f"{len(texts)}: "
        while len(text) < 4_000:
            text += next(documents) + "\n\n"
        texts.append(text)
        characters -= len(texts[-1])
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000, compression="none", use_dictionary=False)
    return texts


def measure_rates(dataset: str, tokenizer: str, tokens: int, rounds: int) -> None:
    data = prepare_data(config(dataset, tokenizer), BLOCKS)
    assert isinstance(data.train, DocumentStream)
    source, texts = sample(data.train.source, 5 * tokens)
    stream = dataclasses.replace(data.train, source=source)
    print(f"{len(texts):,} documents of {sum(map(len, texts)):,} characters, {len(source.units)} units")

    plain = copy.copy(stream.encoder)
    plain._fast = None
    backend, encoding = plain._backend, stream.encoder._fast
    candidates: dict[str, Callable[[], int]] = {
        "encode_batch_fast": lambda: bare(
            lambda batch: (len(encoding.ids) for encoding in backend.encode_batch_fast(batch)), texts, tokens
        ),
        "our stream": lambda: ours(dataclasses.replace(stream, encoder=plain), tokens),
        "usual chain": lambda: usual_chain(dataset, data.tokenizer, tokens // 8),
    }
    if encoding is not None:
        pairs = zip(stream.encoder.encode(texts), plain.encode(texts), strict=True)
        print(f"tiktoken gives other ids in {sum(not np.array_equal(*pair) for pair in pairs)} documents")
        candidates["tiktoken"] = lambda: bare(
            lambda batch: map(len, map(encoding.encode_ordinary, batch)), texts, tokens
        )
        candidates["our stream, tiktoken"] = lambda: ours(stream, tokens)
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.process_time()
            made = run()
            rates[name].append(made / (time.process_time() - start))
    for name, found in rates.items():
        spread = f"{min(found) / 1e6:.3f} to {max(found) / 1e6:.3f}"
        print(f"{name:22} {statistics.median(found) / 1e6:7.3f} Mtok per CPU second ({spread})")

    def ratio(above: str, below: str, goal: str = "") -> None:
        if above in rates and below in rates:
            found = statistics.median(a / b for a, b in zip(rates[above], rates[below], strict=True))
            print(f"{above} / {below}: {found:.2f}{goal}")
            results[f"{above} / {below}"] = found

    results: dict[str, Any] = {"tokens_per_cpu_second": rates}
    ratio("our stream", "encode_batch_fast", " (goal 0.90)")
    ratio("our stream", "usual chain", " (goal 20)")
    ratio("tiktoken", "encode_batch_fast")
    ratio("our stream, tiktoken", "tiktoken", " (goal 0.90)")
    ratio("our stream, tiktoken", "usual chain", " (goal 20)")
    keep("stream", machine(1), results)


def sample(source: Source, characters: int) -> tuple[Source, list[str]]:
    """The first units with about that many characters, and their documents."""
    texts: list[str] = []
    units = []
    for unit in source.units:
        units.append(unit)
        texts += [row for row in source.read(unit) if isinstance(row, str)]
        characters -= sum(len(text) for text in texts[-(unit.rows or 0) :])
        if characters < 0:
            break
    return dataclasses.replace(source, units=units), texts


def bare(encode: Callable[[list[str]], Any], texts: list[str], tokens: int) -> int:
    made, source = 0, cycle(texts)
    while made < tokens:
        made += sum(encode(list(islice(source, 64))))
    return made


def ours(stream: DocumentStream, tokens: int) -> int:
    fresh = dataclasses.replace(stream)  # nothing read yet
    steps = -(-tokens // (LENGTH * BLOCKS))
    return sum(batch.blocks[:, 1:].size for batch in islice(iterate(fresh, None), steps))


def usual_chain(dataset: str, tokenizer: Any, tokens: int) -> int:
    """As in the examples of transformers (run_clm), streamed."""
    from datasets import load_dataset
    from transformers.utils import logging

    logging.set_verbosity_error()  # documents longer than the model are no news here

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"])

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain(*values)) for key, values in batch.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        result = {key: [run[i : i + LENGTH] for i in range(0, total, LENGTH)] for key, run in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    files = str(Path(dataset) / "**" / "*.parquet") if Path(dataset).is_dir() else dataset
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True).select_columns("text").repeat(None)
    blocks = rows.map(tokenize, batched=True, remove_columns="text").map(group_texts, batched=True).with_format("torch")
    return sum(block["input_ids"].numel() for block in islice(blocks, -(-tokens // LENGTH)))


def measure_resume(large: Path, tokenizer: str, folder: Path) -> None:
    """Seconds from a position to its first batch, of the local file and over HTTP, in fresh processes."""
    content = large.read_bytes()
    print(f"resume in a file of {len(content) / 1e6:.0f} MB: seconds to the first batch")
    with HubServer({"datasets/user/large": {"data/train-0.parquet": content}}) as hub:
        for dataset in (str(large), "user/large"):
            child = subprocess.Popen(
                [sys.executable, __file__, "--resume-client", dataset, tokenizer],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **hub.environment(folder / "home")},
            )
            assert child.stdin and child.stdout
            for phase in ("open", "start", "near", "last"):
                before = hub.bytes_sent, len(hub.requests)
                child.stdin.write(f"{phase}\n")
                child.stdin.flush()
                answer = child.stdout.readline().strip()
                sent = f"{(hub.bytes_sent - before[0]) / 1e6:.2f} MB in {len(hub.requests) - before[1]} requests"
                print(f"  local, {answer}" if dataset == str(large) else f"  HTTP, {answer}, {sent}")
            child.stdin.close()
            assert child.wait(60) == 0


def resume_client(dataset: str, tokenizer: str) -> None:
    """Answers each phase named on standard input with a line of its seconds; the first must be "open"."""
    for phase in map(str.strip, sys.stdin):
        start = time.perf_counter()
        if phase == "open":
            data = prepare_data(config(dataset, tokenizer), BLOCKS)
            stream = data.train
            print(f"open, with validation held out: {time.perf_counter() - start:.2f} s", flush=True)
            continue
        position = None if phase == "start" else {"streams": [cursor(stream, i, phase) for i in range(stream.streams)]}
        fresh = dataclasses.replace(stream)
        start = time.perf_counter()
        next(iterate(fresh, position))
        shown = position["streams"][0] if position else "none"
        print(f"{phase} (first cursor {shown}): {time.perf_counter() - start:.2f} s", flush=True)


def cursor(stream: DocumentStream, i: int, phase: str) -> list[int]:
    """Stream i's cursor at row 100 of its first part, or at the last row of its last part of the epoch."""
    if phase == "near":
        return [0, 0, 100, 0]
    parts = stream._shuffle_parts(0)[i :: stream.streams]
    unit, part, count = parts[-1]
    rows = stream.source.units[unit].rows
    return [0, len(parts) - 1, int(rows * (part + 1) // count - rows * part // count - 1), 0]


if __name__ == "__main__":
    main()
