"""Skipped spikes and rollbacks: how often they are wrong, and what they bring on clean and on damaged text.

    python tests/benchmarks/spikes.py alarms LOG...          alarms per 10,000 steps in logs of healthy runs
    python tests/benchmarks/spikes.py runs FOLDER --dataset input.txt --damage none --settings '{"skip_spikes": 10}'
    python tests/benchmarks/spikes.py table FOLDER           a line for each group of runs in a folder
    python tests/benchmarks/spikes.py plot FOLDER FILE.svg RUN...    their training losses, by the names of runs

A log is that of llm.c, a table, or a run folder of ours. `--damage` breaks whole steps at known places: `single` breaks
one step in 40 from step 160 on, in turns by shuffled characters and by one repeated character; `stretch` breaks 60
steps from step 300 on. Losses are those of clean held-out text.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from transformers import TrainerCallback

FACTORS, WINDOWS = (4, 5, 6, 8, 10, 15), (64, 128, 256)
SMALL = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}, "sequence_length": 64,
    "per_device_train_batch_size": 12, "max_steps": 600, "learning_rate": 3e-3, "warmup_steps": 50, "adam_beta2": 0.99,
    "logging_steps": 1, "eval_steps": 200, "eval_tokens": 20_000, "save_steps": 50, "save_total_limit": 3,
    "mixed_precision": "no", "torch_compile": False, "report": False,
}  # fmt: skip


class Damage(TrainerCallback):
    """Breaks the text of whole steps, by how many have been read: a rollback does not read them again."""

    def __init__(self, kind: str) -> None:
        places = {"none": (), "single": range(160, 10_000, 40), "stretch": range(300, 360)}[kind]
        self.places, self.read, self.generator = set(places), 0, torch.Generator().manual_seed(1)

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        model.register_forward_pre_hook(self._break, with_kwargs=True)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.read += 1

    def _break(self, model, arguments, named):
        if self.read not in self.places or not model.training:
            return None
        whole = torch.cat([named["input_ids"], named["shift_labels"][:, -1:]], dim=1)
        if self.read % 80 or len(self.places) == 60:
            whole = whole.flatten()[torch.randperm(whole.numel(), generator=self.generator)].view(whole.shape)
        else:
            whole = whole[:1, :1].expand(whole.shape)
        return arguments, {**named, "input_ids": whole[:, :-1], "shift_labels": whole[:, 1:]}


def run(folder: Path, dataset: str, damage: str, seed: int, settings: dict) -> None:
    """Train, and leave what the table needs in the run folder."""
    from hfgpt import PretrainConfig, Pretrainer

    config = PretrainConfig(output_dir=str(folder), dataset=dataset, seed=seed, **{**SMALL, **settings})
    broken, fault = Damage(damage), None
    pretrainer = Pretrainer(config, [broken])
    try:
        loss = pretrainer.train()["eval_loss"]
    except RuntimeError as error:
        loss, fault = None, str(error)
    progress = pretrainer.run.progress
    found = {"eval_loss": loss, "fault": fault, "seconds": progress.wall_seconds, "read": broken.read}
    found |= {"damage": damage, "seed": seed, "settings": settings, "rollbacks": progress.rollbacks}
    (folder / "found.json").write_text(json.dumps(found))
    print(folder.name, found, flush=True)


def count_alarms(values: torch.Tensor, factor: float, window: int) -> tuple[int, int]:
    """Return how many steps (loss, norm) would be skipped, and the most in a row."""
    from hfgpt.training.spikes import SpikeWindow

    one, alarms, row, longest = SpikeWindow(factor, window=window), 0, 0, 0
    for loss, norm in values:
        is_spike = (torch.stack([loss, norm]) > one.limits()).any()
        one.add(loss, norm, is_spike)
        alarms, row = alarms + int(is_spike), row + 1 if is_spike else 0
        longest = max(longest, row)
    return alarms, longest


def print_alarms(paths: list[str]) -> None:
    from hfgpt.comparing.logs import read_log
    from hfgpt.comparing.reading import read_folder

    print("| log | steps | window | " + " | ".join(map(str, FACTORS)) + " |")
    for path in map(Path, paths):
        past = read_folder(path) if path.is_dir() else read_log(path)
        rows = [(one["loss"], one.get("grad_norm") or 0.0) for one in past.training]
        for kind, values in (("both", torch.tensor(rows)), ("loss alone", torch.tensor([(a, 0.0) for a, _ in rows]))):
            for window in WINDOWS:
                counts = [count_alarms(values, factor, window) for factor in FACTORS]
                cells = [f"{1e4 * alarms / len(rows):.1f} ({longest})" for alarms, longest in counts]
                print(f"| {past.name} {kind} | {len(rows)} | {window} | " + " | ".join(cells) + " |", flush=True)


def table(folder: Path) -> None:
    """Print a line for each group of runs that differ only in their seed, and plot their held-out losses."""
    groups = defaultdict(list)
    for path in sorted(folder.glob("*/found.json")):
        found = json.loads(path.read_text())
        records = [json.loads(line) for line in (path.parent / "metrics.jsonl").open()]
        found["skipped"] = sum(record.get("event") == "skip_step" for record in records)
        groups[path.parent.name.rsplit("-", 1)[0]].append(found)
    for name, runs in groups.items():
        losses = [one["eval_loss"] for one in runs if one["eval_loss"] is not None]
        shown = f"{sum(losses) / len(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})" if losses else "-"
        ended = f"; {sum(one['fault'] is not None for one in runs)} ended" if any(one["fault"] for one in runs) else ""
        skipped, rollbacks = ([one[key] for one in runs] for key in ("skipped", "rollbacks"))
        print(f"| {name} | {len(runs)} | {shown}{ended} | {skipped} | {rollbacks} |")


def plot(folder: Path, names: list[str], file: Path) -> None:
    """Draw the training losses of runs, means of 10 steps, as they are recorded in the end, and of abandoned steps."""
    width, height, low, high, steps = 640, 300, 2.0, 3.6, 600
    colors = ("#888888", "#d62728", "#1f77b4", "#2ca02c")

    def line(records: list[dict], style: str) -> str:
        found = [(one["step"], one["loss"]) for one in records if one.get("loss") is not None and "event" not in one]
        places = []
        for first in range(0, len(found) - 9, 10):
            part = found[first : first + 10]
            x, y = sum(step for step, _ in part) / 10, min(sum(loss for _, loss in part) / 10, high)
            places.append(f"{50 + (width - 80) * x / steps:.1f},{10 + (height - 40) * (high - y) / (high - low):.1f}")
        return f'<polyline fill="none" {style} points="{" ".join(places)}"/>'

    drawn = []
    for number, (name, color) in enumerate(zip(names, colors, strict=False)):
        for file_name, dash in (("metrics.jsonl", ""), ("abandoned.jsonl", ' stroke-dasharray="3 3"')):
            if (path := folder / name / file_name).exists():
                records = [json.loads(row) for row in path.open()]
                parts: dict[int | None, list[dict]] = defaultdict(list)
                for one in records:
                    parts[one.get("rollback")].append(one)
                drawn += [line(part, f'stroke="{color}" stroke-width="1.5"{dash}') for part in parts.values()]
        drawn.append(f'<text x="{width - 190}" y="{26 + 16 * number}" fill="{color}">{name}</text>')
    for loss in (2.0, 2.4, 2.8, 3.2, 3.6):
        drawn.append(f'<text x="8" y="{14 + (height - 40) * (high - loss) / (high - low):.0f}">{loss:.1f}</text>')
    for step in range(0, steps + 1, 100):
        drawn.append(f'<text x="{40 + (width - 80) * step / steps:.0f}" y="{height - 10}">{step}</text>')
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    file.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>"]) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["alarms", "runs", "table", "plot"])
    options.add_argument("paths", nargs="+")
    options.add_argument("--dataset")
    options.add_argument("--damage", choices=["none", "single", "stretch"], default="none")
    options.add_argument("--settings", type=json.loads, default={})
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.what == "alarms":
        print_alarms(given.paths)
    elif given.what == "table":
        table(Path(given.paths[0]))
    elif given.what == "plot":
        plot(Path(given.paths[0]), given.paths[2:], Path(given.paths[1]))
    else:
        for seed in given.seeds:
            run(Path(f"{given.paths[0]}-{seed}"), given.dataset, given.damage, seed, given.settings)


if __name__ == "__main__":
    main()
