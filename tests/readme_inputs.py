"""What the commands of the READMEs read: a copy of the project, small files, and the repositories of a Hub."""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from nanogpt_like import random_state, write_checkpoint
from readmes import ROOT

from hfgpt.data.embedded import embedded_documents


def copy_project(work: Path) -> None:
    """Copy the files of the project; configurations for cards become ones for the CPU."""
    ignored = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", "out", "*.egg-info", ".venv")
    shutil.copytree(ROOT, work, ignore=ignored)
    for path in (work / "accelerate_configs").glob("*.yaml"):
        text = path.read_text()
        if "use_cpu: true" not in text:
            text = re.sub(r"use_cpu: false|mixed_precision: bf16", "use_cpu: true", text, count=1)
        path.write_text(text)


def write_inputs(work: Path) -> None:
    """Write what commands read: texts, prompts, examples of HellaSwag, a log and a checkpoint of nanoGPT."""
    documents = embedded_documents()
    (work / "input.txt").write_text("".join(c for c in "\n".join(documents[:40]) if c.isascii()))
    (work / "story.txt").write_text("Once there was a module that imported itself.\n")
    (work / "prompts.txt").write_text("Once\nReturn the\n")
    (work / "texts").mkdir()
    (work / "texts" / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in documents[:200]))
    (work / "texts" / "a.txt").write_text(documents[300])
    (work / "hellaswag_val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples()))
    (work / "old").mkdir()
    log = "".join(f"iter {n}: loss {4 - n / 50:.4f}, time 100.00ms, mfu 1.00%\n" for n in range(50))
    (work / "old" / "nanogpt.log").write_text("step 0: train loss 4.1000, val loss 4.2000\n" + log)
    tokenizer_of_gpt2().save_pretrained(work / "gpt2")
    write_nanogpt(work, len(tokenizer_of_gpt2()))


def write_nanogpt(work: Path, vocab_size: int) -> None:
    write_checkpoint(work / "ckpt.pt", random_state(vocab_size=vocab_size), args={"vocab_size": vocab_size})


def examples() -> Iterator[dict]:
    for n in range(8):
        endings = [f"returns {n + k}." for k in range(4)]
        yield {"ctx": f"The function number {n}", "endings": endings, "label": str(n % 4)}


def tokenizer_of_gpt2():
    """A small tokenizer of the same kind."""
    from transformers import GPT2TokenizerFast

    from hfgpt.data.tokenization import load_tokenizer

    trained = load_tokenizer("bpe-400", lambda: embedded_documents()[:40], 1024)
    return GPT2TokenizerFast(tokenizer_object=trained.backend_tokenizer)


def repositories() -> dict[str, dict[str, bytes]]:
    """What the Hub has: FineWeb-Edu's folders with made text, HellaSwag, and GPT-2 with one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    texts, configs = (
        embedded_documents(),
        "---\nconfigs:\n- config_name: {}\n  data_files:\n  - {{split: {}, path: {}}}\n---\n",
    )
    shards = {f"sample/10BT/{n:03}_00000.parquet": parquet([{"text": text} for text in texts[n::4]]) for n in range(4)}
    tokenizer = tokenizer_of_gpt2()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": len(tokenizer)}
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        GPT2LMHeadModel(GPT2Config(**shape, **ends)).save_pretrained(folder)
        gpt2 = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return {
        "datasets/HuggingFaceFW/fineweb-edu": {
            "README.md": configs.format("sample-10BT", "train", "sample/10BT/*").encode(),
            **shards,
        },
        "datasets/Rowan/hellaswag": {
            "README.md": configs.format("default", "validation", "data/validation-*").encode(),
            "data/validation-00000-of-00001.parquet": parquet(list(examples())),
        },
        "models/openai-community/gpt2": gpt2,
    }


def parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()
