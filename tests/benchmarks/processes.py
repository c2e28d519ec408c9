"""One process against several on the same cores or cards, and our loop against bare DDP.

    python tests/benchmarks/processes.py [--processes 2] [--rounds 5] [-- --any_recipe_flag value ...]
    python tests/benchmarks/processes.py --optim adamw muon [--fsdp] [--steps 1] [-- --any_recipe_flag value ...]

Each process count runs alone, several times in turn. Within a run our loop (text, step, log) and a bare one (the same
model under torch's DistributedDataParallel, one batch that is there, no log) take steps in turn.

With --optim, optimizers take steps in turn on one model, on all processes: seconds of a step, of the optimizer in it,
and the largest memory of each process.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext

STEPS = 4  # of one loop before the other's turn
FLAGS = ["--model", '{"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256}', "--tokenizer", "bpe-2000"]
FLAGS += ["--sequence_length", "256", "--tokens_per_step", "4096", "--per_device_train_batch_size", "4"]
FLAGS += ["--mixed_precision", "auto", "--torch_compile", "false", "--eval_steps", "0", "--learning_rate", "1e-4"]
FLAGS += ["--warmup_steps", "10", "--save_steps", "0"]


def worker(rounds: int, flags: list[str]) -> None:
    """One process of a run: seconds per step of both loops, printed by the main one."""
    from contextlib import closing

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from hfgpt import PretrainConfig
    from hfgpt.distributed.device import device_name, synchronize
    from hfgpt.distributed.stop_signals import StopSignals
    from hfgpt.training import pretrainer
    from hfgpt.training.optimizer import build_optimizer
    from hfgpt.training.setup import prepare

    with tempfile.TemporaryDirectory() as folder:
        steps = str(STEPS * rounds + 1)
        config = PretrainConfig.from_cli(argv=[*FLAGS, "--output_dir", folder, "--max_steps", steps, *flags])
        ours = prepare(config, (), StopSignals())
        take, accelerator, world = ours.step, ours.machine.accelerator, ours.machine.ranks.world_size
        device, model = accelerator.device, copy.deepcopy(take.model)
        optimizer = build_optimizer(model, config)
        bare = DistributedDataParallel(model) if world > 1 else model
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        own, _ = pretrainer.next_batch(ours)
        ids, labels = take.to_tensors(own.blocks)
        micro = list(zip(ids.split(take.batch.micro_batch), labels.split(take.batch.micro_batch), strict=True))

        def our_step() -> None:
            share, text = pretrainer.next_batch(ours)
            ours.callbacks.call("on_step_begin")
            result = take(*take.to_tensors(share.blocks), ours.progress.step + 1)
            pretrainer.advance(ours, share, text, result)
            if ours.callbacks.control.should_log:
                pretrainer.log(ours)

        def bare_step() -> None:
            for index, (inputs, targets) in enumerate(micro, start=1):
                waits = index < len(micro) and world > 1
                with bare.no_sync() if waits else nullcontext(), accelerator.autocast():
                    loss = bare(input_ids=inputs, shift_labels=targets, num_items_in_batch=ids.numel()).loss
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        with closing(ours.folder), ours.saver, closing(ours.batches):
            pretrainer.start(ours)
            for turn in range(rounds):
                for name, step in (("ours", our_step), ("bare", bare_step)):
                    for _ in range(STEPS if turn or name == "bare" else STEPS - 1):
                        synchronize(device)
                        accelerator.wait_for_everyone()
                        start = time.perf_counter()
                        step()
                        synchronize(device)
                        if turn:  # the first one warms up
                            seconds[name].append(time.perf_counter() - start)
        if ours.is_main:
            facts = {name: statistics.median(values) for name, values in seconds.items()}
            print("RESULT", json.dumps({**facts, "device": device_name(device), "step": str(take.batch)}), flush=True)
        accelerator.end_training()


def optimizers(names: list[str], rounds: int, steps: int, flags: list[str]) -> None:
    """One process of a run: seconds per step with each optimizer and seconds of its update, printed by the main one."""
    from dataclasses import replace

    from hfgpt import PretrainConfig
    from hfgpt.distributed.stop_signals import StopSignals
    from hfgpt.training.optimizer import build_optimizer
    from hfgpt.training.setup import prepare

    with tempfile.TemporaryDirectory() as folder:
        config = PretrainConfig.from_cli(argv=[*FLAGS, "--output_dir", folder, "--max_steps", "1000", *flags])
        run = prepare(config, (), StopSignals())
        take, ranks = run.step, run.machine.ranks
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        built = {name: build_optimizer(take.model, replace(config, optim=name)) for name in names}
        inputs = take.to_tensors(next(run.batches).blocks)
        for turn in range(rounds * steps):
            for name, optimizer in built.items():
                take.optimizer = take.scaled_optimizer = optimizer
                marks = [0.0]
                optimizer.register_step_pre_hook(lambda *_, marks=marks: marks.append(time.perf_counter()))
                ranks.gather(None)
                marks[0] = time.perf_counter()
                take(*inputs, 1)
                end = time.perf_counter()
                if turn >= steps:  # the first round warms up
                    seconds[name].append((end - marks[0], end - marks[1]))
        memory = ranks.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        if run.is_main:
            found = {name: list(map(statistics.median, zip(*times, strict=True))) for name, times in seconds.items()}
            print("RESULT", json.dumps({"seconds": found, "memory_gib": memory, "step": str(take.batch)}), flush=True)
        run.batches.close()
        run.folder.close()
        run.machine.accelerator.end_training()


def compare_optimizers(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.processes}"]
    command += [__file__, "--worker", "--rounds", str(options.rounds), "--steps", str(options.steps)]
    command += ["--optim", *options.optim, "--", *options.flags]
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "FSDP_VERSION": "2"}
    env |= {"ACCELERATE_USE_FSDP": "true"} if options.fsdp else {}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stderr)
    result = json.loads(lines[-1].removeprefix("RESULT "))
    print(f"{options.processes} processes, {'FSDP2' if options.fsdp else 'DDP'}: {result['step']}")
    for name, (step, update) in result["seconds"].items():
        print(f"{name}: step {step:.2f} s, of which the optimizer {update:.2f} s")
    print(f"largest memory: {', '.join(f'{one:.2f} GiB' for one in result['memory_gib'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optim", nargs="+", choices=("adamw", "muon"), help="compare these instead")
    parser.add_argument("--fsdp", action="store_true", help="with --optim: FSDP2 instead of DDP")
    parser.add_argument("--steps", type=int, default=1, help="with --optim: in each round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of the recipe, after --")
    options = parser.parse_args()
    if options.optim and options.worker:
        return optimizers(options.optim, options.rounds, options.steps, options.flags)
    if options.optim:
        return compare_optimizers(options)
    if options.worker:
        return worker(options.rounds, options.flags)
    found: dict[int, list[dict]] = {1: [], options.processes: []}
    for _ in range(options.repeats):
        for processes, results in found.items():
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            command += [__file__, "--worker", "--rounds", str(options.rounds), "--", *options.flags]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(done.stderr)
            results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    first = found[1][0]
    print(f"{first['device']}; one process: {first['step']}")
    for processes, results in found.items():
        ours, bare = (statistics.median(result[name] for result in results) for name in ("ours", "bare"))
        kind = "bare DDP" if processes > 1 else "a bare loop"
        ratios = sorted(result["ours"] / result["bare"] for result in results)
        print(
            f"{processes} process(es): our step {ours:.3f} s, {kind} {bare:.3f} s; ours / bare "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    one, many = (statistics.median(result["ours"] for result in results) for results in found.values())
    print(f"{options.processes} processes / 1 process, the same step in all: {many / one:.3f}")


if __name__ == "__main__":
    main()
