"""What it takes to open many files: python tests/benchmarks/opening.py [--files 2400] [--latency 0.1]

Serves parquet files from a Hub on loopback that answers each request after `--latency` seconds, and trains nothing: a
process opens them and reads its blocks of the first step, and of steps after a resume. Then opens local files of any
size, and counts what the processes of a run exchange.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from hub_server import HubServer
from side_by_side import keep, machine

BLOCKS, LENGTH = 512, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--files", type=int, default=2400)
    parser.add_argument("--latency", type=float, default=0.1, help="seconds a request")
    parser.add_argument("--groups", type=int, default=3, help="row groups in a file")
    parser.add_argument("--columns", type=int, default=6, help="columns beside the text")
    parser.add_argument("--local-files", type=int, default=1000)
    parser.add_argument("--local-bytes", type=int, default=2**30, help="size of each, most of it not on the disk")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        return client(*options.client)
    results: dict[str, Any] = {"options": vars(options)}
    with tempfile.TemporaryDirectory() as folder:
        results["hub"] = measure_hub(options, Path(folder))
        results["local"] = measure_local(options, Path(folder))
    results["bytes_between_processes"] = measure_exchange()
    keep("opening", machine(1), results)


def write_file(number: int, groups: int, columns: int) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(number)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(100)]
    texts = [" ".join(rng.choices(words, k=400)) for _ in range(20 * groups)]
    others = {f"column_{i}": [f"{text[:20]}{i}" for text in texts] for i in range(columns)}
    file = io.BytesIO()
    pq.write_table(pa.table({**others, "text": texts}), file, row_group_size=20, compression="snappy")
    return file.getvalue()


def measure_hub(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    files = {f"data/{i:05d}.parquet": write_file(i, options.groups, options.columns) for i in range(options.files)}
    print(f"{options.files} files of {sum(map(len, files.values())) / options.files / 1e3:.0f} kB", flush=True)

    def wait(*_: str) -> None:
        time.sleep(options.latency)

    found = {}
    with HubServer({"datasets/user/corpus": files}, before_answer=wait) as hub:
        position = "null"
        for phase in ("start", "resume"):
            before = len(hub.requests)
            environment = {**os.environ, **hub.environment(folder / "home")}
            command = [sys.executable, __file__, "--client", phase, position]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
                assert child.stdout
                first = json.loads(child.stdout.readline())
                first["requests"] = len(hub.requests) - before
                rest = json.loads(child.stdout.readline())
                rest["requests"] = len(hub.requests) - before - first["requests"]
            position = json.dumps(rest.pop("position"))
            found[phase] = {"first step": first, "more steps": rest}
            print(f"{phase}: {found[phase]}", flush=True)
    return found


def client(phase: str, position: str) -> None:
    """Prints a line at the first step, and one after the text of each logical stream has come from a few row groups."""
    start = time.perf_counter()
    import datasets  # noqa: F401 these have their memory and time whatever is read
    import torch  # noqa: F401

    from hfgpt import PretrainConfig
    from hfgpt.data import prepare_data
    from hfgpt.data.loader import iterate

    imported = memory()
    config = PretrainConfig(
        dataset="user/corpus", tokenizer=str(tokenizer()), sequence_length=LENGTH, eval_tokens=10_000, max_steps=1
    )
    began = time.perf_counter()
    batches = iterate(prepare_data(config, BLOCKS).train, json.loads(position))
    next(batches)
    now = time.perf_counter()
    print(json.dumps({"seconds": now - start, "after imports": now - began, "MB": memory() - imported}), flush=True)
    time.sleep(0.5)  # while the requests are counted
    steps = list(islice(batches, 5))
    print(json.dumps({"MB": memory() - imported, "position": steps[-1].position}), flush=True)


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def tokenizer() -> Path:
    """A tokenizer in a temporary folder: the text is not what is measured."""
    from hfgpt.data.tokenization import load_tokenizer, save_tokenizer

    path = Path(tempfile.mkdtemp())
    save_tokenizer(load_tokenizer("bpe-300", lambda: ["abcdefghij " * 100], LENGTH), str(path))
    return path


def measure_local(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from hfgpt.data.open_source import open_source

    line = json.dumps({"text": "some text " * 50}).encode() + b"\n"
    (folder / "local").mkdir()
    for number in range(options.local_files):
        with open(folder / "local" / f"{number}.jsonl", "wb") as file:
            file.write(line * 2000)
            file.truncate(options.local_bytes)
            file.seek(options.local_bytes - len(line))
            file.write(line)

    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before, start = read_bytes(), time.perf_counter()
    open_source(str(folder / "local"))
    found = {"seconds": time.perf_counter() - start, "MB a file": (read_bytes() - before) / options.local_files / 1e6}
    print(f"{options.local_files} local files: {found}")
    return found


def measure_exchange() -> dict[str, int]:
    """Bytes that each process receives in a step of 524,288 tokens."""
    from hfgpt.data.stream import StepBatch, summarize

    blocks, cursors = np.zeros((BLOCKS, LENGTH + 1), np.int32), [[0, 25, 17, 900, 512]] * 64
    found = {}
    for world in (1, 8, 64):
        share = summarize(StepBatch(blocks[: BLOCKS // world], {"streams": cursors[: 64 // world]}))
        found[f"{world} processes"] = len(pickle.dumps(share)) * world
    print(f"received by each process per step: {found}")
    return found


if __name__ == "__main__":
    main()
