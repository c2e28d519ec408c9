"""Training steps side by side with what people would use instead.

    python tests/benchmarks/train_step.py [--case char-cpu 124m] [--nanogpt CHECKOUT] [--rounds 5]
    python tests/benchmarks/train_step.py --gpu [--nanogpt CHECKOUT] [--seconds 540]

Each candidate is a process that trains the same shape of model on the same kind of random tokens, with the same batch,
clipping and AdamW; ours is what a recipe runs, text, records and all. On a CPU the candidates take turns; on a card
each runs alone, as they would not fit together, and MFU is given too. Ratios are those of each round, so that other
work on the machine, which slows all of a round, weighs little; with `--threads 1` CPU time serves on a busy machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side_by_side import (
    Candidate,
    Gate,
    at_least_one,
    check_paths,
    keep,
    machine,
    nanogpt_model,
    parser,
    side_by_side,
    told,
    use_cores,
)

# char-cpu is nanoGPT's documented example for a CPU: 4 layers, T = 64, micro-batch 12, no dropout.
CASES: dict[str, dict[str, Any]] = {
    "char-cpu": {"model": "char-cpu", "vocabulary": 65, "T": 64, "B": 12, "steps": 20},
    "124m": {"model": "gpt2-125m", "vocabulary": 50_257, "T": 256, "B": 4, "steps": 1, "warm_up": 2},
}
GPU_SIZES = (16, 4, 64, 8, 32)
OURS = "hfgpt"


def write_text(folder: Path, vocabulary: int, length: int = 400_000) -> dict[str, str]:
    """A text of random tokens in a tokenizer of so many entries, as settings of a run."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(vocabulary - 1)]
    entries = {word: number for number, word in enumerate([*words, "<|end|>"])}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>")
    fast.save_pretrained(folder / "tokenizer")
    chosen = np.random.default_rng(0).integers(vocabulary - 1, size=length)
    (folder / "text.txt").write_text(" ".join(words[number] for number in chosen))
    return {"dataset": str(folder / "text.txt"), "tokenizer": str(folder / "tokenizer")}


def hfgpt(gate: Gate, case: dict[str, Any], folder: Path) -> None:
    from transformers import TrainerCallback

    from hfgpt import PretrainConfig, Pretrainer

    class AtTheGate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            gate.step()

    config = PretrainConfig(
        model=case["model"],
        sequence_length=case["T"],
        per_device_train_batch_size=case["B"],
        max_steps=100_000,
        warmup_steps=100,
        eval_steps=0,
        save_steps=0,
        torch_compile=True,
        streaming=False,
        output_dir=str(folder / f"run{os.getpid()}"),
        dataset=str(folder / "text.txt"),
        tokenizer=str(folder / "tokenizer"),
        optim=case.get("optim", "adamw"),
    )
    pretrainer = Pretrainer(config, [AtTheGate()])
    gate.device = device()
    pretrainer.train()


def trainer(gate: Gate, case: dict[str, Any], folder: Path, bf16: bool = False, compiled: bool = False) -> None:
    """transformers' Trainer with GPT2LMHeadModel, in its defaults but for what is asked for."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class AtTheGate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            gate.step()

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            start = index * 17 % (len(tokens) - case["T"])
            row = tokens[start : start + case["T"]]
            return {"input_ids": row, "labels": row}

    tokens, gate.device = random_tokens(case), device()
    arguments = TrainingArguments(
        output_dir=str(folder / f"run{os.getpid()}"),
        per_device_train_batch_size=case["B"],
        max_steps=100_000,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device().type == "cpu",
        bf16=bf16,
        torch_compile=compiled,
    )
    Trainer(stock_model(case), arguments, train_dataset=Rows(), callbacks=[AtTheGate()]).train()


def bare(gate: Gate, case: dict[str, Any], model: Any, optimizer: Any, forward: Any) -> None:
    """A plain loop: batch, forward, backward, clipping, step."""
    import torch

    tokens, gate.device = random_tokens(case), device()
    while True:
        gate.step()
        starts = torch.randint(len(tokens) - case["T"] - 1, (case["B"],)).tolist()
        ids = torch.stack([tokens[at : at + case["T"]] for at in starts])
        labels = torch.stack([tokens[at + 1 : at + 1 + case["T"]] for at in starts])
        if gate.device.type == "cuda":
            ids, labels = (part.pin_memory().to(gate.device, non_blocking=True) for part in (ids, labels))
        forward(model, ids, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def bare_stock(gate: Gate, case: dict[str, Any], folder: Path, bf16: bool = False) -> None:
    """GPT2LMHeadModel, eager, in a bare loop."""
    import torch

    def forward(model: Any, ids: Any, labels: Any) -> Any:
        with torch.autocast(device().type, torch.bfloat16, enabled=bf16):
            return model(input_ids=ids, labels=ids).loss

    model = stock_model(case).to(device()).train()
    bare(gate, case, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), forward)


def nanogpt(gate: Gate, case: dict[str, Any], folder: Path) -> None:
    """The user's checkout: its model and its optimizer, eager in float32 on a CPU as its documented command runs it,
    compiled in bf16 on a card, which is its default there.
    """
    import torch

    sys.path.insert(0, case["nanogpt"])
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    config, cuda = stock_config(case), device().type == "cuda"
    # Its own default pads GPT-2's vocabulary to a multiple of 64; its character model has no biases.
    vocabulary = 50_304 if case["vocabulary"] == 50_257 else case["vocabulary"]
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    model = GPT(GPTConfig(block_size=case["T"], vocab_size=vocabulary, dropout=0.0, bias=False, **shape))
    model = model.to(device()).train()
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device().type)
    called = torch.compile(model) if cuda else model
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def forward(model: Any, ids: Any, labels: Any) -> Any:
        with torch.autocast(device().type, torch.bfloat16, enabled=cuda):
            return called(ids, labels)[1]

    bare(gate, case, model, optimizer, forward)


CANDIDATES: dict[str, Any] = {
    OURS: hfgpt,
    "Trainer": trainer,
    "Trainer bf16": lambda *a: trainer(*a, bf16=True),
    "Trainer bf16 torch_compile": lambda *a: trainer(*a, bf16=True, compiled=True),
    "bare loop": bare_stock,
    "bare loop bf16": lambda *a: bare_stock(*a, bf16=True),
    "nanoGPT": nanogpt,
}
ON_CPU = [OURS, "Trainer", "Trainer bf16 torch_compile", "bare loop", "nanoGPT"]
ON_CARD = [OURS, "bare loop bf16", "nanoGPT", "Trainer bf16 torch_compile"]


def device() -> Any:
    from hfgpt.distributed.device import default_device

    return default_device()


def stock_config(case: dict[str, Any]) -> Any:
    from hfgpt.model.configuration_gpt2 import model_config

    config = model_config(case["model"], vocab_size=case["vocabulary"], bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return config


def stock_model(case: dict[str, Any]) -> Any:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(stock_config(case))


def random_tokens(case: dict[str, Any]) -> Any:
    import torch

    return torch.randint(case["vocabulary"], (200_000,), generator=torch.Generator().manual_seed(0))


def flops_per_token(case: dict[str, Any]) -> float:
    from hfgpt.model.flops import training_flops_per_token

    return training_flops_per_token(stock_config(case), case["T"])


def candidate(name: str, case: str, changes: list[str], folder: str, threads: int | None) -> None:
    """The end of one candidate."""
    gate = Gate()
    import torch

    from hfgpt.distributed.cpu import available_cores

    torch.set_num_threads(threads or available_cores())
    values = {
        key: value if key in ("nanogpt", "optim") else int(value)
        for key, value in zip(changes[::2], changes[1::2], strict=True)
    }
    CANDIDATES[name](gate, {**CASES[case], **values}, Path(folder))


def start(name: str, case: str, folder: str, options: Any, **changes: Any) -> Candidate:
    given = [str(word) for pair in changes.items() for word in pair]
    given += ["nanogpt", options.nanogpt] if options.nanogpt else []
    threads = ["--threads", str(options.threads)] if options.threads else []
    return Candidate(name, [__file__, "--candidate", name, case, folder, *given, *threads])


def on_cpu(case: str, folder: str, options: Any) -> dict[str, Any]:
    write_text(Path(folder), CASES[case]["vocabulary"])
    names = [
        name
        for name in {OURS: 0, **dict.fromkeys(options.candidates or ON_CPU)}
        if name != "nanoGPT" or options.nanogpt
    ]
    print(f"{case}: T = {CASES[case]['T']}, micro-batch {CASES[case]['B']}", flush=True)
    running = [start(name, case, folder, options) for name in names]
    try:
        found = side_by_side(
            running, options.rounds, options.steps or CASES[case]["steps"], CASES[case].get("warm_up", 4)
        )
    finally:
        for one in running:
            one.end()
    print("\n".join(told(found, OURS)), flush=True)
    return {"seconds_per_step": found, "tokens_per_step": CASES[case]["B"] * CASES[case]["T"]}


def on_card(folder: str, options: Any) -> dict[str, Any]:
    """124M at T = 1,024, the micro-batches in the order of their interest, as far as the time goes."""
    from hfgpt.distributed.device_peaks import device_peak

    case, ends, results = CASES["124m"], time.monotonic() + options.seconds, {}
    write_text(Path(folder), case["vocabulary"])
    peak = device_peak(device(), "bf16")
    for size in options.sizes or GPU_SIZES:
        found: dict[str, Any] = {}
        for name in options.candidates or ON_CARD:
            if (name == "nanoGPT" and not options.nanogpt) or time.monotonic() > ends:
                continue
            try:
                one = start(name, "124m", folder, options, B=size, T=1024)
                found |= side_by_side([one], options.rounds, max(4, 256 // size), warm_up=4)
                one.end()
            except RuntimeError as error:  # out of memory, say
                print(f"  {error}", flush=True)
                continue
            rate = size * 1024 / statistics.median(turn["wall"] for turn in found[name])
            mfu = rate * flops_per_token({**case, "T": 1024}) / peak.tflops / 1e12
            print(f"  micro-batch {size:3} {name:28} {rate:10,.0f} tokens/s  MFU {mfu:.1%}", flush=True)
        results[str(size)] = found
    return {"peak_tflops": peak.tflops, "peak_source": peak.source, "seconds_per_step": results}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--candidates", nargs="+", choices=list(CANDIDATES))
    options.add_argument("--nanogpt", help="folder of a checkout of nanoGPT")
    options.add_argument("--rounds", type=at_least_one, default=5)
    options.add_argument("--steps", type=at_least_one, help="of a turn")
    options.add_argument("--gpu", action="store_true")
    options.add_argument("--sizes", nargs="+", type=at_least_one, help="micro-batches on a card")
    options.add_argument("--seconds", type=float, default=540, help="after which no further candidate starts on a card")
    options.add_argument("--candidate", nargs="+", help="(the other end)")
    given = options.parse_args()
    if given.candidate:
        name, case, folder, *changes = given.candidate
        return candidate(name, case, changes, folder, given.threads)
    check_paths(nanogpt_model(given.nanogpt))
    use_cores(given.threads)
    for case in ["gpu"] if given.gpu else given.case:
        facts = machine(given.threads)
        with tempfile.TemporaryDirectory() as folder:
            results = on_card(folder, given) if given.gpu else on_cpu(case, folder, given)
        suffix = f"-{given.threads}-thread" if given.threads else ""
        suffix += "-partial" if given.candidates or given.steps or given.sizes or given.rounds < 2 else ""
        keep(f"train_step-{case}{suffix}", facts, results)


if __name__ == "__main__":
    main()
