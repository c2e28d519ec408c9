"""Peak memory of short and long work of one kind: python tests/benchmarks/long_memory.py

Evaluation, training and generation on this machine's CPU, eager and compiled, each in a process of its own; what is
printed is the most memory that the process held. Ten times the work should take no more than a fifth more, and eager
work no more than a fifth above compiled work. The model is char-cpu with GPT-2's 50,257 rows, whose logits are large;
training is of a layer of 32 with 4,096 rows, and evaluates on 10,000 tokens every 300 steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import REPOSITORY, keep, machine, parser, use_cores

KINDS = ("evaluate", "train", "generate")
LENGTHS = {"evaluate": (15_000, 60_000), "train": (300, 3_000), "generate": (200, 2_000)}
UNITS = {"evaluate": "tokens", "train": "steps", "generate": "tokens"}
MODEL, TINY = {"size": "char-cpu"}, {"n_layer": 1, "n_head": 1, "n_embd": 32, "n_positions": 64}


def model_folder(folder: Path) -> Path:
    """A GPT-2 folder with random weights, whose tokenizer knows numbers as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from hfgpt.model.modeling_gpt2 import new_model

    entries = {"<|endoftext|>": 0} | {str(number): number for number in range(1, 50_257)}
    plain = Tokenizer(models.WordLevel(entries, unk_token="<|endoftext|>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=end, eos_token=end, model_max_length=64)
    new_model(MODEL, tokenizer, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(kind: str, length: int, compiled: bool, folder: Path) -> list[str]:
    text = folder / "text.txt"
    if kind == "evaluate":
        flags = ["--dataset", str(text), "--eval_tokens", str(length), "--torch_compile" if compiled else "--eager"]
        return ["-m", "hfgpt.cli", "evaluate", str(folder / "model"), *flags, "--json"]
    if kind == "generate":
        flags = ["--max_new_tokens", str(length), "--num_samples", "4", "--batch_size", "4", "--seed", "1"]
        return ["-m", "hfgpt.cli", "generate", str(folder / "model"), *flags]
    flags = {"model": json.dumps(TINY), "dataset": "embedded", "tokenizer": "bpe-4096", "streaming": "false"}
    flags |= {"sequence_length": "64", "per_device_train_batch_size": "4", "gradient_accumulation_steps": "2"}
    flags |= {"max_steps": str(length), "logging_steps": "50", "eval_steps": "300", "eval_tokens": "10000"}
    flags |= {"save_steps": "0", "torch_compile": str(compiled).lower(), "mfu_peak_tflops": "1"}
    flags |= {"output_dir": str(folder / f"{length}-{compiled}")}
    recipe = str(REPOSITORY / "recipes" / "shakespeare_char.py")
    return [recipe, *(word for key, value in flags.items() for word in (f"--{key}", value))]


def peak_bytes(arguments: list[str]) -> int:
    """The most resident memory of a process that runs Python with these arguments."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    quiet = {} if os.environ.get("BENCHMARK_LOG") else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *arguments], env=environment, **quiet)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}; BENCHMARK_LOG=1 shows why")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=KINDS, help="one kind; keeps no result")
    options.add_argument("--quick", action="store_true", help="a third of the long work; keeps no result")
    given = options.parse_args()
    use_cores(given.threads)
    facts, found = machine(given.threads), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model_folder(folder / "model")
        (folder / "text.txt").write_text(" ".join(str(7919 * number % 50_256 + 1) for number in range(70_000)))
        for kind in [given.only] if given.only else KINDS:
            short, long = LENGTHS[kind]
            for compiled in (False, True) if kind != "generate" else (False,):  # generation is never compiled
                name = f"{kind}, {'compiled' if compiled else 'eager'}"
                lengths = (short, long // 3 if given.quick else long)
                found[name] = {n: peak_bytes(command(kind, n, compiled, folder)) / 2**20 for n in lengths}
                one, other = found[name].values()
                told = ", ".join(f"{n:,} {UNITS[kind]}: {mib:,.0f} MiB" for n, mib in found[name].items())
                print(f"  {name:20} {told} (x {other / one:.2f})", flush=True)
    if not (given.only or given.quick):
        keep("long_memory", facts, {"peak_mib": found})


if __name__ == "__main__":
    main()
