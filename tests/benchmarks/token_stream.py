"""Tokens per second of the stream from token files, against tokenizing on the fly: one core, no torch.

    python tests/benchmarks/token_stream.py --text texts.parquet --tokenizer gpt2 [--loopback]

Writes the tokens of the text into files of several layouts, and reads each as a document stream. The median of a few
rounds is taken, each of which measures all candidates in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import token_files
from hub_server import HubServer

from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import Encoder
from hfgpt.data.open_source import open_source
from hfgpt.data.source import Source
from hfgpt.data.token_tokenizer import vocabulary_of
from hfgpt.data.tokenization import load_tokenizer

LENGTH, BLOCKS = 1024, 512  # steps of 524,288 tokens, as GPT-2's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", default="embedded", help="file or folder; default: the embedded text")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--repeat", type=int, default=20, help="how often the text's tokens are written")
    parser.add_argument("--layouts", default="llm.c,datatrove,megatron,column,npy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loopback", action="store_true", help="read the files from a Hub on this machine")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer, lambda: (), LENGTH)
    encoder, text = Encoder(tokenizer), open_source(options.text)
    assert encoder.separator_id is not None
    token_files.END = encoder.separator_id
    rows = [row for unit in text.units for row in text.read(unit) if isinstance(row, str)]
    documents = [ids for start in range(0, len(rows), 64) for ids in encoder.tokens(rows[start : start + 64])]
    layouts = options.layouts.split(",")
    if options.loopback and "HF_ENDPOINT" not in os.environ:
        return serve({name: token_files.files(name, documents * options.repeat) for name in layouts})
    total = sum(map(len, documents))
    print(f"{len(documents):,} documents, {total:,} tokens, {total / len(documents):,.0f} each; x {options.repeat}")
    with tempfile.TemporaryDirectory() as folder:
        candidates: dict[str, Callable[[], int]] = {"tokenizing on the fly": lambda: steps(text, encoder, 2)}
        for layout in layouts:
            path = f"user/{layout}"
            if not options.loopback:
                path = write(Path(folder, layout), token_files.files(layout, documents * options.repeat))
            source = open_source(path, **token_files.STATED.get(layout, {}))
            source = source.with_vocabulary(vocabulary_of(encoder, options.tokenizer))
            candidates[layout] = lambda source=source: steps(source, encoder, 40)
        measure(candidates, options.rounds)


def write(folder: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def serve(sets: dict[str, dict[str, bytes]]) -> None:
    """Serve the files as datasets of a Hub, and run this script again as its client."""
    with (
        tempfile.TemporaryDirectory() as home,
        HubServer({f"datasets/user/{name}": files for name, files in sets.items()}) as hub,
    ):
        subprocess.run([sys.executable, *sys.argv], check=True, env={**os.environ, **hub.environment(Path(home))})


def steps(source: Source, encoder: Encoder, count: int) -> int:
    """Read steps of the stream as one process does that has all of it; returns their tokens."""
    stream = DocumentStream(source.split_for_stream(), encoder, 1, LENGTH, BLOCKS, {})
    batches = stream.steps(stream.start, 0, stream.divisible)
    return sum(next(batches).blocks.size for _ in range(count))


def measure(candidates: dict[str, Callable[[], int]], rounds: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    candidates["tokenizing on the fly"]()  # builds the encoder
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.process_time()
            made = run()
            rates[name].append(made / (time.process_time() - start))
    base = statistics.median(rates["tokenizing on the fly"])
    for name, found in rates.items():
        rate = statistics.median(found)
        spread = f"{min(found) / 1e6:.2f} to {max(found) / 1e6:.2f}"
        print(f"{name:24} {rate / 1e6:8.2f} Mtok per CPU second ({spread}), {rate / base:6.1f} x")


if __name__ == "__main__":
    main()
