"""Loss of the weights and of their average during runs at a constant and at a decaying rate, three seeds each.

    python tests/benchmarks/averages.py TEXT.txt FOLDER [--plot tests/benchmarks/results/averages.svg]

Runs of 800 steps that are in FOLDER already are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from hfgpt import PretrainConfig, Pretrainer

RATES = {"constant rate": "constant_with_warmup", "cosine to a tenth": "cosine_with_min_lr"}
SEEDS = (1, 2, 3)


def train(folder: Path, text: str, schedule: str, seed: int) -> list[dict[str, float]]:
    """Return the evaluations of a run."""
    if not (folder / "checkpoint-800").exists():
        config = PretrainConfig(
            output_dir=str(folder),
            dataset=text,
            tokenizer="char",
            model={"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64},
            sequence_length=64,
            per_device_train_batch_size=12,
            max_steps=800,
            learning_rate=3e-3,
            min_learning_rate=None if schedule.startswith("constant") else 3e-4,
            lr_scheduler_type=schedule,
            warmup_steps=50,
            adam_beta2=0.99,
            ema_decay=0.97,
            eval_steps=50,
            eval_tokens=20_000,
            save_steps=0,
            mixed_precision="no",
            torch_compile=False,
            report=False,
            seed=seed,
        )
        Pretrainer(config).train()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "eval_loss" in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args()
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, and the file small
    figure = Figure((9, 3.4), layout="constrained")
    for axes, (title, schedule) in zip(figure.subplots(1, 2, sharey=True), RATES.items(), strict=True):
        runs = [train(flags.folder / f"{schedule}-{seed}", flags.text, schedule, seed) for seed in SEEDS]
        for color, (key, name) in enumerate({"eval_loss": "weights", "eval_loss_ema": "average, decay 0.97"}.items()):
            curves = [[record[key] for record in run] for run in runs]
            print(f"{title}: {name} {[round(curve[-1], 4) for curve in curves]}")
            steps, places = [record["step"] for record in runs[0]], list(zip(*curves, strict=True))
            axes.plot(steps, list(map(statistics.mean, places)), color=f"C{color}", label=name)
            lowest, highest = list(map(min, places)), list(map(max, places))
            axes.fill_between(steps, lowest, highest, color=f"C{color}", alpha=0.2, linewidth=0)
        axes.set(title=title, xlabel="step", ylim=(2.05, 2.7))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.supylabel("held-out loss, three seeds")
    if flags.plot:
        figure.savefig(flags.plot, metadata={"Date": None})


if __name__ == "__main__":
    main()
