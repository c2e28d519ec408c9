"""What the data path costs, as ratios measured in one run: python tests/benchmarks/stream.py [--dataset FOLDER]

Rates are tokens per second of CPU time on one thread, so that other work on the machine changes them little. The
median of a few rounds is taken, each of which measures all candidates one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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

from hfgpt.data import prepare_data
from hfgpt.data.sources import Source, open_source
from hfgpt.data.stream import DocumentStream, iterate
from hfgpt.data.tokenization import Encoder, load_tokenizer, save_tokenizer

LENGTH, BLOCKS = 1024, 8
SHAPE = {"seed": 0, "sequence_length": LENGTH, "blocks_per_step": BLOCKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dataset", help="parquet file or folder; without it, repeated embedded text of 100 MB")
    parser.add_argument("--tokenizer", default="bpe-4096")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3)
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


def write_large_file(path: Path, characters: int = 100_000_000) -> list[str]:
    """The embedded documents again and again, each with a number so that no two are equal; 1,000 to a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = open_source("embedded")
    documents = cycle(row for row in source.read(source.units[0]) if isinstance(row, str))
    texts = []
    while characters > 0:
        texts.append(f"{len(texts)}: {next(documents)}")
        characters -= len(texts[-1])
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000, compression="none", use_dictionary=False)
    return texts


def measure_rates(dataset: str, tokenizer: str, tokens: int, rounds: int) -> None:
    data = prepare_data(dataset=dataset, tokenizer=tokenizer, n_positions=LENGTH, streaming=True, **SHAPE)
    assert isinstance(data.train, DocumentStream)
    source, texts = sample(data.train.source, 5 * tokens)
    stream = dataclasses.replace(data.train, source=source)
    print(f"{len(texts):,} documents of {sum(map(len, texts)):,} characters, {len(source.units)} units")

    backend = stream.encoder._backend
    candidates: dict[str, Callable[[], int]] = {
        "encode_batch_fast": lambda: bare(lambda batch: map(len, backend.encode_batch_fast(batch)), texts, tokens),
        "our stream": lambda: ours(stream, tokens),
        "usual chain": lambda: usual_chain(dataset, data.tokenizer, tokens),
    }
    encoding = tiktoken_encoding(data.tokenizer)
    if encoding is not None:
        fast_stream = dataclasses.replace(stream, encoder=TiktokenEncoder(encoding, stream.encoder))
        check_equal_ids(stream.encoder, fast_stream.encoder, texts)
        candidates["tiktoken"] = lambda: bare(
            lambda batch: map(len, map(encoding.encode_ordinary, batch)), texts, tokens
        )
        candidates["our stream, tiktoken"] = lambda: ours(fast_stream, tokens)
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

    ratio("our stream", "encode_batch_fast", " (goal 0.90)")
    ratio("our stream", "usual chain", " (goal 20)")
    ratio("tiktoken", "encode_batch_fast")
    ratio("our stream, tiktoken", "tiktoken", " (goal 0.90)")
    ratio("our stream, tiktoken", "usual chain", " (goal 20)")


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


def tiktoken_encoding(tokenizer: Any) -> Any:
    """A `tiktoken.Encoding` that gives the ids of a byte-level BPE, or None where it might not or is not installed.

    tiktoken joins the pair whose *result* has the lowest id, the tokenizer the pair listed first. The two agree if
    each entry is a byte or the result of one merge, ids in the order of merges, and each entry's own text comes out
    as that entry: then whatever else tiktoken could join to an entry never stands side by side.
    """
    try:
        import tiktoken
    except ImportError:
        return None
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = tokenizer.backend_tokenizer
    specification = json.loads(backend.to_str())
    model, splitter = specification["model"], specification["pre_tokenizer"] or {}
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    options = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"
    if (
        model["type"] != "BPE"
        or any(model.get(option) for option in options)
        or specification["normalizer"] is not None
        or splitter.get("type") != "ByteLevel"
        or splitter["add_prefix_space"]
        or not splitter.get("use_regex", True)
        or not all(added["special"] for added in specification["added_tokens"])
    ):
        return None
    special = {added["content"] for added in specification["added_tokens"]}
    vocabulary = {token: i for token, i in model["vocab"].items() if token not in special}
    merged = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    ids = [vocabulary.get(token, -1) for token in merged]
    if (
        sorted(vocabulary) != sorted([*byte_of, *merged])
        or ids != sorted(ids)
        or any(len(backend.model.tokenize(token)) != 1 for token in merged)
    ):
        return None
    ranks = {bytes(byte_of[character] for character in token): i for token, i in vocabulary.items()}
    # The pattern of GPT-2 in tiktoken's own, faster form.
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("converted", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


class TiktokenEncoder:
    """Stands in for `Encoder`. tiktoken panics at a million whitespace characters in a row."""

    def __init__(self, encoding: Any, encoder: Encoder) -> None:
        self.encoding, self.encoder, self.separator_id = encoding, encoder, encoder.separator_id

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        if any(len(text) >= 1_000_000 for text in texts):
            return self.encoder.encode(texts)
        first = [] if self.separator_id is None else [self.separator_id]
        return [np.array(first + self.encoding.encode_ordinary(text), np.int32) for text in texts]


def check_equal_ids(encoder: Encoder, other: Any, texts: list[str]) -> None:
    pairs = zip(encoder.encode(texts), other.encode(texts), strict=True)
    different = sum(not np.array_equal(a, b) for a, b in pairs)
    print(f"tiktoken gives other ids in {different} of {len(texts):,} documents")


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
            data = prepare_data(dataset=dataset, tokenizer=tokenizer, n_positions=LENGTH, streaming=True, **SHAPE)
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
    parts = stream._epoch_parts(0)[i :: stream.streams]
    return [0, len(parts) - 1, len(stream._rows(*parts[-1])) - 1, 0]


if __name__ == "__main__":
    main()
