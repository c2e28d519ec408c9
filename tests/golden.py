"""Fingerprints of a fixed set of small runs, to show that a change of the code changes no result.

    python tests/golden.py --output before.json      # on one commit
    python tests/golden.py --check before.json       # on another one, on the same machine

Each run prints one hash of its ledger, losses, weights and optimizer; each command one of its JSON. They depend on the
machine and its libraries, so they are compared on one machine and never kept. Only names that users rely on are used
here (settings, files of a run folder, commands), so that the script runs on commits whose modules differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
BASE: dict[str, Any] = {
    "model": TINY,
    "tokenizer": "bpe-300",
    "sequence_length": 32,
    "per_device_train_batch_size": 4,
    "tokens_per_step": 512,
    "max_steps": 12,
    "learning_rate": 1e-2,
    "warmup_steps": 3,
    "logging_steps": 1,
    "eval_steps": 4,
    "eval_tokens": 640,
    "save_steps": 5,
    "mixed_precision": "no",
    "torch_compile": False,
    "mfu_peak_tflops": 1.0,
}
TWO = str(ROOT / "accelerate_configs" / "cpu_2proc.yaml")
FSDP2 = str(ROOT / "accelerate_configs" / "multi_gpu_fsdp2.yaml")
# name: (settings beside BASE, accelerate configuration, step in which the process is killed)
RUNS: dict[str, tuple[dict[str, Any], str | None, int | None]] = {
    "adamw": ({}, None, None),
    "muon": ({"optim": "muon", "muon_learning_rate": 2e-2}, None, None),
    "dropout": ({"model": {**TINY, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}}, None, None),
    "no accumulation": ({"per_device_train_batch_size": 16}, None, None),
    "compiled": ({"torch_compile": True}, None, None),
    "bf16": ({"mixed_precision": "bf16"}, None, None),
    "characters": ({"tokenizer": "char", "lr_scheduler_type": "warmup_stable_decay"}, None, None),
    "document stream": ({"streaming": True}, None, None),
    "document masking": ({"streaming": True, "document_masking": True}, None, None),
    "recomputation": ({"gradient_checkpointing": True, "eval_train": True, "save_best": True}, None, None),
    "two processes": ({"streaming": True}, TWO, None),
    "FSDP2": ({"streaming": True}, FSDP2, None),
    "killed and resumed": ({"streaming": True, "save_steps": 2}, None, 7),
}
COMMANDS = {
    "plan": ["plan", "--model", "gpt2-125m", "--tokens_per_step", "524288", "--device", "NVIDIA GeForce RTX 4070 Ti"],
    "plan FSDP2": [
        *("plan", "--model", "gpt2-1.5b", "--tokens_per_step", "524288", "--device", "NVIDIA H100 80GB HBM3"),
        *("--processes", "8", "--fsdp", "--optim", "muon"),
    ],
    "compare runs": ["compare", "one", "other"],
    "compare logs": ["compare", "nanogpt.log", "llmc.log", "--tokens_per_step", "512"],
    "evaluate": ["evaluate", "one/checkpoint-12", "--dataset", "documents"],
    "evaluate sliding": ["evaluate", "one/checkpoint-12", "--dataset", "documents", "--stride", "8"],
    "audit": ["audit", "one"],
    "verify": ["verify", "one/checkpoint-12"],
}
# What depends on the clock, the folder, or the version rather than on the result.
TIMES = (
    "seconds",
    "tokens_per_second",
    "time",
    "mfu",
    "path",
    "folder",
    "wall",
    "speed",
    "device",
    "memory",
    "version",
)


def write_text(folder: Path) -> None:
    """Documents of many lengths in three files, the same on every machine."""
    folder.mkdir()
    for part in range(3):
        with open(folder / f"{part}.jsonl", "w", encoding="utf-8") as file:
            for n in range(part * 200, (part + 1) * 200):
                text = " ".join(f"document {n} has {n * k % 101}" for k in range(1 + n % 9))
                file.write(json.dumps({"text": text, "id": n}) + "\n")


def write_logs(folder: Path) -> None:
    """Console logs of other programs."""
    loss = [4 / (1 + step / 20) + 0.01 * (step * 7 % 5) for step in range(100)]
    lines = [f"iter {step}: loss {value:.4f}, time 12.50ms, mfu 1.00%" for step, value in enumerate(loss)]
    lines += [f"step {step}: train loss {loss[step]:.4f}, val loss {loss[step] + 0.1:.4f}" for step in (0, 50, 99)]
    (folder / "nanogpt.log").write_text("\n".join(lines) + "\n")
    lines = [f"s:{step} trl:{0.98 * value:.4f}" for step, value in enumerate(loss)]
    lines += [f"s:{step} tel:{loss[step] + 0.08:.4f}" for step in (0, 50, 99)]
    (folder / "llmc.log").write_text("\n".join(lines) + "\n")


def make_run(settings: dict[str, Any], die_at: int | None) -> None:
    """One run in this process; it kills itself in the middle of step `die_at`."""
    from transformers import TrainerCallback

    from hfgpt import PretrainConfig, Pretrainer

    class Kill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step + 1 == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    Pretrainer(PretrainConfig(**settings), [Kill()] if die_at else []).train()


def launch(work: Path, name: str) -> Path:
    """The folder of a finished run."""
    settings, accelerate_config, die_at = RUNS[name]
    folder = work / name.replace(" ", "-")
    settings = {**BASE, "dataset": str(work / "documents"), "output_dir": str(folder), **settings}
    start = [sys.executable]
    if accelerate_config:
        start += ["-m", "accelerate.commands.launch", "--config_file", accelerate_config, "--mixed_precision", "no"]
        start += ["--main_process_port", "0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}

    def run(*options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        command = [*start, __file__, "--run", json.dumps({**settings, **changes}), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    if die_at:
        done = run("--die_at", str(die_at))
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = run(resume_from_checkpoint="latest")
    else:
        done = run()
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    return folder


def digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def tensors(path: Path) -> str:
    """Names, shapes and bytes; `transformer.` in front of a name does not count."""
    from safetensors.torch import load_file

    found = {name.replace("transformer.", ""): value for name, value in load_file(path).items()}
    return digest([[name, list(v.shape), v.numpy().tobytes().hex()] for name, v in sorted(found.items())])


def fingerprint(folder: Path) -> dict[str, str]:
    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    keys = ("step", "num_input_tokens_seen", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_bits_per_byte")
    keys += ("train_eval_loss", "eval_tokens")
    newest = folder / "checkpoint-12"
    return {
        "ledger": digest([[line["step"], line["batch_hash"]] for line in lines("ledger.jsonl")]),
        "losses": digest(
            [{k: line[k] for k in keys if k in line} for line in lines("metrics.jsonl") if "event" not in line]
        ),
        "weights": tensors(newest / "model.safetensors"),
        "optimizer": tensors(newest / "training_state" / "optimizer.safetensors"),
    }


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in TIMES)}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def make_comparable(work: Path, source: Path) -> None:
    """Two run folders with fixed records: `one` is a real run, `other` has its losses 2 % higher from step 7 on."""
    source.rename(work / "one")
    other = work / "other"
    other.mkdir()
    facts = json.loads((work / "one" / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**facts, "run_id": "other"}))
    (other / "ledger.jsonl").write_text((work / "one" / "ledger.jsonl").read_text())
    for folder in (work / "one", other):
        fixed = []
        for line in (work / "one" / "metrics.jsonl").read_text().splitlines():
            record = {**json.loads(line)}
            record |= {"time": 1.7e9 + record["step"], "wall_seconds": 0.5 * record["step"]}
            if "loss" in record:
                record |= {"step_seconds": 0.5, "tokens_per_second": 1024.0, "mfu": 0.1, "memory_bytes": 1e9}
                record["loss"] *= 1.02 if folder == other and record["step"] > 6 else 1
            fixed.append(json.dumps(record))
        (folder / "metrics.jsonl").write_text("\n".join(fixed) + "\n")


def command(work: Path, arguments: list[str]) -> str:
    code = "import sys; from hfgpt import cli; sys.exit(cli.main())"
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    start = [sys.executable, "-c", code, *arguments, "--json"]
    done = subprocess.run(start, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"
    return digest(without_times(json.loads(done.stdout)))


def all_fingerprints(only: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        print(
            f"{name:20} {' '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_text(work / "documents")
        write_logs(work)
        for name in RUNS:
            if not only or name in only or (name == "adamw" and set(only) & set(COMMANDS)):
                keep(name, fingerprint(launch(work, name)))
        if (work / "adamw").is_dir():
            make_comparable(work, work / "adamw")
            for name, arguments in COMMANDS.items():
                if not only or name in only:
                    keep(name, command(work, arguments))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"only these: {', '.join([*RUNS, *COMMANDS])}")
    parser.add_argument("--output", type=Path, help="write the fingerprints to this file")
    parser.add_argument(
        "--check", type=Path, help="compare with the fingerprints in this file; exit code 1 if any differs"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--die_at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        make_run(json.loads(options.run), options.die_at)
        return
    known = [*RUNS, *COMMANDS]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: no such run or command; there are {', '.join(known)}")
    try:
        before = dict(json.loads(options.check.read_text())) if options.check else {}
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"--check {options.check}: cannot be read ({error}); write it with --output on another commit")
    found = all_fingerprints(options.names)
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    if options.check:
        changed = [name for name in found if found[name] != before.get(name)]
        if changed:
            raise SystemExit(f"differ from {options.check}: {', '.join(changed)}")
        print(f"all {len(found)} equal those in {options.check}")


if __name__ == "__main__":
    main()
