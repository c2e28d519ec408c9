"""Memory that `hfgpt plan` predicts against what a training step takes, on a CPU or a card.

    python tests/benchmarks/memory.py [--only WORD]

Each setting runs in processes of its own: three steps of two micro-batches, as the trainer takes them. Measured is, on
a card, `torch.cuda.max_memory_allocated`; on a CPU, the most that was resident less what was before the model, with the
C library told to give freed memory back at once. `ACCELERATE_USE_CPU=true` before the command keeps off a card.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FIXED = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MEDIUM = {"n_layer": 8, "n_head": 8, "n_embd": 512, "n_positions": 512, "vocab_size": 8000}
WIDE = {"n_layer": 3, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 30000}
CHARACTERS = {"n_layer": 12, "n_head": 6, "n_embd": 384, "n_positions": 256, "vocab_size": 96}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
SHARED = {"processes": 2, "sharded": True}
ON_CPU: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "medium float32": (MEDIUM, {"micro_batch": 8}),
    "medium bf16": (MEDIUM, {"micro_batch": 8, "precision": "bf16"}),
    "medium bf16 compiled": (MEDIUM, {"micro_batch": 8, "precision": "bf16", "compiled": True}),
    "wide float32": (WIDE, {"micro_batch": 2}),
    "wide bf16": (WIDE, {"micro_batch": 2, "precision": "bf16"}),
    "wide bf16 compiled": (WIDE, {"micro_batch": 2, "precision": "bf16", "compiled": True}),
    "wide float32 checkpointing": (WIDE, {"micro_batch": 4, "checkpointing": True}),
    "wide bf16 muon": (WIDE, {"micro_batch": 2, "precision": "bf16", "optim": "muon"}),
    "characters float32": (CHARACTERS, {"micro_batch": 16}),
    "characters bf16 checkpointing": (CHARACTERS, {"micro_batch": 64, "precision": "bf16", "checkpointing": True}),
    "medium bf16, 2 processes, DDP": (MEDIUM, {"micro_batch": 4, "precision": "bf16", "processes": 2}),
    "medium bf16, 2 processes, FSDP2": (MEDIUM, {"micro_batch": 4, "precision": "bf16", **SHARED}),
    "medium float32, 2 processes, FSDP2": (MEDIUM, {"micro_batch": 4, **SHARED}),
    "gpt2-125m x 1 float32": (GPT2, {"micro_batch": 1}),
    "gpt2-125m x 2 bf16": (GPT2, {"micro_batch": 2, "precision": "bf16"}),
    "gpt2-125m x 2 bf16 compiled": (GPT2, {"micro_batch": 2, "precision": "bf16", "compiled": True}),
}
ON_CARD: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    f"gpt2-125m x {size} {'compiled' if compiled else 'eager'}{' checkpointing' if checkpointing else ''}": (
        GPT2,
        {"micro_batch": size, "precision": "bf16", "compiled": compiled, "checkpointing": checkpointing},
    )
    for size in (8, 16, 32)
    for compiled, checkpointing in ((True, False), (False, False), (False, True))
}


def worker(fields: dict[str, int], options: dict[str, Any]) -> None:
    """Trains, and prints the bytes that it took."""
    import torch
    from accelerate import Accelerator
    from transformers import GPT2Config

    from hfgpt import PretrainConfig
    from hfgpt.distributed.device import default_device, peak_memory_bytes
    from hfgpt.distributed.fsdp2 import build_sharded_model
    from hfgpt.model.head_loss import HEAD_CHUNK_SIZE
    from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
    from hfgpt.training.optimizer import build_optimizer

    device, precision = default_device(), options.get("precision", "no")
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    config = PretrainConfig(max_steps=1, optim=options.get("optim", "adamw"))

    sharded = options.get("sharded", False)

    def train(fields: dict[str, int], micro_batch: int, steps: int) -> None:
        def make() -> GPT2LMHeadModel:
            return GPT2LMHeadModel(GPT2Config(**fields, **NO_DROPOUT, bos_token_id=None, eos_token_id=None))

        made: Any = build_sharded_model(make, device, precision) if sharded else make().to(device)
        made.train()
        optimizer = build_optimizer(made, config)
        if options.get("checkpointing"):
            getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)()
        if options.get("compiled"):
            made.compile(dynamic=False)
        else:
            made.head_chunk_size = HEAD_CHUNK_SIZE
        model = made if sharded else accelerator.prepare(made)
        optimizer = accelerator.prepare(optimizer)
        ids = torch.randint(fields["vocab_size"], (micro_batch, fields["n_positions"]), device=device)
        count = torch.tensor(2.0 * ids.numel(), device=device)
        for _ in range(steps):
            for last in (False, True):
                if sharded:
                    made.set_requires_gradient_sync(last)
                with nullcontext() if last or sharded else accelerator.no_sync(model), accelerator.autocast():
                    micro_loss = model(input_ids=ids, shift_labels=ids, num_items_in_batch=count).loss
                    accelerator.backward(micro_loss * accelerator.num_processes)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    # What the first step of a process loads is not the model's.
    small = {**fields, "n_layer": 1, "n_head": 1, "n_embd": 64, "n_positions": 64, "vocab_size": 64}
    train(small, 1, 1)
    before = 0 if device.type == "cuda" else resident_bytes()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    train(fields, options["micro_batch"], 3)  # DDP lays its buckets out anew in the second
    if accelerator.is_main_process:
        print(peak_memory_bytes(device) - before)
    accelerator.end_training()


def resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def predicted(fields: dict[str, int], options: dict[str, Any]) -> Any:
    from transformers import GPT2Config

    from hfgpt.distributed.device import default_device
    from hfgpt.model.memory import Setting, training_memory

    config = GPT2Config(**fields, **NO_DROPOUT, bos_token_id=None, eos_token_id=None)
    setting = Setting(sequence_length=fields["n_positions"], accumulation=2, device=default_device().type, **options)
    return training_memory(config, setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*json.loads(arguments.worker))
        return
    from hfgpt.distributed.device import default_device

    settings = ON_CARD if default_device().type == "cuda" else ON_CPU
    print(f"{'setting':<36} {'predicted MiB':>14} {'measured MiB':>14} {'ratio':>7}")
    for name, (fields, options) in settings.items():
        if arguments.only in name:
            processes = options.get("processes", 1)
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            command = [sys.executable, *(launcher if processes > 1 else [])]
            command += [__file__, "--worker", json.dumps([fields, options])]
            done = subprocess.run(command, env={**os.environ, **FIXED}, check=True, capture_output=True, text=True)
            measured, expected = int(done.stdout.split()[-1]), predicted(fields, options).peak
            ratio = expected / measured
            print(f"{name:<36} {expected / 2**20:14,.0f} {measured / 2**20:14,.0f} {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    main()
