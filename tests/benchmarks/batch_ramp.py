"""What steps that grow (`tokens_per_step` in stages) bring at equal tokens: losses, steps and CPU time of one thread.

Each kind of step is tried at rising rates with one seed, until two in a row are worse; its best rate is then run with
more seeds. Steps of 1,728 tokens are about as many as those that grow. Runs that the results already have are not
repeated.

    python tests/benchmarks/batch_ramp.py TEXT [--tokenizer bpe-1024] --results results/batch_ramp.json
    python tests/benchmarks/batch_ramp.py --plot results/batch_ramp.svg --results results/batch_ramp.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from hfgpt import PretrainConfig, Pretrainer

TOKENS = 500_000
KINDS: dict[str, Any] = {
    "512": 512,
    "1,728": 1728,
    "4,096": 4096,
    "512 to 4,096": [[0, 512], [TOKENS // 10, 1024], [TOKENS // 4, 2048], [TOKENS // 2, 4096]],
}
RATES = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
SEEDS = (1, 2, 3)


class CpuTime(TrainerCallback):
    """Measures the CPU time of the training loop, which other programs change less than the wall time."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.process_time()

    def on_train_end(self, args, state, control, **kwargs):
        self.seconds = time.process_time() - self.start


def train(dataset: str, tokenizer: str, kind: str, rate: float, seed: int) -> dict[str, Any]:
    """Train once, and return what came out."""
    steps = {"512": 976, "1,728": 289, "4,096": 122, "512 to 4,096": 293}[kind]
    with tempfile.TemporaryDirectory() as folder:
        config = PretrainConfig(
            **{"output_dir": folder, "dataset": dataset, "tokenizer": tokenizer, "seed": seed, "max_tokens": TOKENS},
            **{"model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}, "sequence_length": 64},
            **{"tokens_per_step": KINDS[kind], "per_device_train_batch_size": 9 if kind == "1,728" else 8},
            **{"learning_rate": rate, "warmup_steps": {"4,096": 6, "1,728": 14}.get(kind, 48)},  # 25,000 tokens
            **{"eval_steps": steps // 10, "eval_tokens": 20_000, "logging_steps": 10, "save_steps": 0},
            **{"mixed_precision": "no", "torch_compile": False, "mfu_peak_tflops": 1, "report": False},
        )
        clock = CpuTime()
        trainer = Pretrainer(config, [clock])
        loss = trainer.train()["eval_loss"]
        progress = trainer.run.progress
        curve = [
            [record["step"], record["num_input_tokens_seen"], record["eval_loss"]]
            for record in trainer.run.folder.records()
            if "eval_loss" in record
        ]
    sizes = {"steps": progress.step, "tokens": progress.num_input_tokens_seen}
    found = {"kind": kind, "rate": rate, "seed": seed, **sizes, "eval_loss": loss, "cpu_seconds": clock.seconds}
    print({key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}, flush=True)
    return {**found, "curve": curve}


def measure(dataset: str, tokenizer: str, runs: list[dict[str, Any]], keep: Callable[[], Any]) -> None:
    """Add the runs of one text that are missing, and keep the results after each."""
    torch.set_num_threads(1)

    def loss(kind: str, rate: float, seed: int = SEEDS[0]) -> float:
        found = [run for run in runs if (run["kind"], run["rate"], run["seed"]) == (kind, rate, seed)]
        if not found:
            runs.append(train(dataset, tokenizer, kind, rate, seed))
            keep()
        return (found or runs[-1:])[0]["eval_loss"]

    for kind in KINDS:
        losses: list[float] = []
        for rate in RATES:
            losses.append(loss(kind, rate))
            if len(losses) > 2 and min(losses[-2:]) > min(losses):
                break
        for seed in SEEDS[1:]:
            loss(kind, best_rate(runs, kind), seed)


def best_rate(runs: list[dict[str, Any]], kind: str) -> float:
    return min((run["eval_loss"], run["rate"]) for run in runs if (run["kind"], run["seed"]) == (kind, SEEDS[0]))[1]


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the held-out loss of each kind at its best rate, over tokens and over steps."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, and the file small
    figure = Figure(figsize=(9, 3.2 * len(results)), layout="constrained")
    for row, (text, runs) in zip(figure.subplots(len(results), 2, squeeze=False), results.items(), strict=True):
        for color, kind in enumerate(KINDS):
            if not any(run["kind"] == kind for run in runs):
                continue
            rate = best_rate(runs, kind)
            curves = [run["curve"] for run in runs if run["kind"] == kind and run["rate"] == rate]
            steps, tokens, losses = np.array(curves).mean(axis=0).T
            for axes, places, name in ((row[0], tokens, "tokens"), (row[1], steps, "steps")):
                axes.plot(places, losses, color=f"C{color}", label=f"{kind}, rate {rate:g}")
                axes.set_xlabel(name)
                axes.set_ylabel(f"held-out loss, {text}")
        row[0].legend(title="tokens per step")
        row[1].set_xscale("log")
    figure.savefig(path, format=path.suffix[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?")
    parser.add_argument("--tokenizer", default="char")
    parser.add_argument("--name", default="Shakespeare")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args()
    results = json.loads(flags.results.read_text()) if flags.results.exists() else {}
    if flags.text:
        runs = results.setdefault(flags.name, [])
        measure(flags.text, flags.tokenizer, runs, lambda: flags.results.write_text(json.dumps(results)))
    if flags.plot:
        plot(results, flags.plot)


if __name__ == "__main__":
    main()
