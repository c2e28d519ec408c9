"""Steps and time to a loss on Shakespeare by character: python tests/benchmarks/tokens_to_loss.py --dataset input.txt

Our runs of char-cpu (T = 64, micro-batch 12) with Muon, to the loss on the whole held-out tenth of the text.
nanoGPT's own run of 2,000 steps ends there at 1.893. With `--nanogpt`, its steps are timed in turns with ours, and the
run's time is compared with 2,000 of them; without it, the steps of AdamW are timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import train_step
from side_by_side import (
    at_least_one,
    check_paths,
    keep,
    machine,
    nanogpt_model,
    parser,
    ratios,
    side_by_side,
    told,
    use_cores,
)

NANOGPT_LOSS, NANOGPT_STEPS = 1.893, 2000
TUNED = {"optim": "muon", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 20, "adam_beta2": 0.99}


def run(dataset: str, steps: int, seed: int, folder: str) -> dict[str, float]:
    """Loss on the held-out text, seconds of training, and seconds of everything from setting up to the last file."""
    from hfgpt import PretrainConfig, Pretrainer

    shape = {"model": "char-cpu", "tokenizer": "char", "sequence_length": 64, "per_device_train_batch_size": 12}
    length = {"max_steps": steps, "eval_steps": steps, "save_steps": 0, "logging_steps": 100, "torch_compile": True}
    config = PretrainConfig(
        dataset=dataset, seed=seed, output_dir=f"{folder}/{steps}-{seed}", **shape, **length, **TUNED
    )
    pretrainer, start = Pretrainer(config), time.perf_counter()
    loss = pretrainer.train()["eval_loss"]
    trained = pretrainer.run.progress.wall_seconds
    return {"eval_loss": loss, "training_seconds": trained, "all_seconds": time.perf_counter() - start}


def time_steps(folder: str, options) -> dict:
    """Steps of Muon, AdamW and nanoGPT in turns."""
    from pathlib import Path

    train_step.write_text(Path(folder), train_step.CASES["char-cpu"]["vocabulary"])
    running = [train_step.start("hfgpt", "char-cpu", folder, options, optim=optim) for optim in ("muon", "adamw")]
    for one, name in zip(running, ("muon", "adamw"), strict=True):
        one.name = name
    running += [train_step.start("nanoGPT", "char-cpu", folder, options)] if options.nanogpt else []
    found = side_by_side(running, options.rounds, 20, warm_up=10)
    for one in running:
        one.end()
    print("\n".join(told(found, "muon")), flush=True)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dataset", required=True, help="the tiny Shakespeare file (1,115,394 characters)")
    options.add_argument("--steps", nargs="+", type=at_least_one, default=[500])
    options.add_argument("--seeds", nargs="+", type=int, default=[1337, 1, 2])
    options.add_argument("--nanogpt", help="folder of a checkout of nanoGPT")
    options.add_argument("--rounds", type=at_least_one, default=7)
    given = options.parse_args()
    check_paths(given.dataset, nanogpt_model(given.nanogpt))
    use_cores(given.threads)
    facts, runs = machine(given.threads), {}
    with tempfile.TemporaryDirectory() as folder:
        found = time_steps(folder, given)
        for steps in given.steps:
            runs[steps] = {seed: run(given.dataset, steps, seed, folder) for seed in given.seeds}
            print("\n".join(f"  {steps} steps, seed {seed}: {one}" for seed, one in runs[steps].items()), flush=True)
    results = {"runs": runs, "seconds_per_step": found, "muon_over": ratios(found, "muon")}
    if given.nanogpt:
        theirs = NANOGPT_STEPS * statistics.median(one["wall"] for one in found["nanoGPT"])
        short = [one for seeds in runs.values() for one in seeds.values() if one["eval_loss"] <= NANOGPT_LOSS]
        if short:
            share = {
                key: statistics.median(one[key] for one in short) / theirs
                for key in ("training_seconds", "all_seconds")
            }
            results["share_of_nanogpts_time"] = share
            print(f"  to {NANOGPT_LOSS} in this share of nanoGPT's {theirs:.0f} s: {share}", flush=True)
    keep("tokens_to_loss", facts, results)


if __name__ == "__main__":
    main()
