"""Proof that a checkpoint folder is what others take it for: a GPT-2 model that stock transformers loads and runs."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.checkpointing import checkpoint
from hfgpt.checkpointing.training_state import STATE, read_state
from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data_of_run
from hfgpt.data.tokenization import has_tokenizer
from hfgpt.errors import UserError
from hfgpt.evaluation.loss import scored_blocks, windows
from hfgpt.files import read_text_file
from hfgpt.model.configuration_gpt2 import model_rows

# How far the loss may be from the one recorded: training may have evaluated in 16 bits, here it is float32.
TOLERANCE_16_BITS, TOLERANCE_FLOAT32 = 0.02, 1e-3

# Runs in a process of its own in which this package cannot be imported. Prints one JSON object.
CLEAN_PROCESS = f"""
import json, sys, warnings
from typing import Any
{inspect.getsource(model_rows)}
"""
CLEAN_PROCESS += """
sys.modules["hfgpt"] = None
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

folder, blocks = sys.argv[1:3]
found = {"problems": []}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    options = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loading = AutoModelForCausalLM.from_pretrained(folder, **options)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    if loading[kind]:
        found["problems"].append(f"model.safetensors: {kind.replace('_', ' ')}: {sorted(map(str, loading[kind]))[:3]}")
with safe_open(f"{folder}/model.safetensors", "pt") as file:
    stored = {str(file.get_tensor(name).dtype).removeprefix("torch.") for name in file.keys()}
same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
if same != config.tie_word_embeddings:
    head = "tied" if same else "its own"
    found["problems"].append(f"config.json: tie_word_embeddings is {config.tie_word_embeddings}, the head is {head}")
found |= {
    "class": type(model).__name__,
    "parameters": sum(p.numel() for p in model.parameters()),
    "dtype": ", ".join(sorted(stored)),
    "declared_dtype": str(config.dtype).removeprefix("torch."),
    "model_type": config.model_type,
    "architectures": config.architectures,
    "remote_code": bool(getattr(config, "auto_map", None)),
    "n_positions": config.n_positions,
    "model_max_length": tokenizer.model_max_length,
    "vocab_size": config.vocab_size,
    "tokenizer_rows": model_rows(tokenizer),
    "padding_side": tokenizer.padding_side,
    "has_special_tokens": bool(tokenizer.all_special_ids),
    "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    "ids": {
        key: [getattr(holder, key) for holder in (tokenizer, config, generation)]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    },
}
device = "cuda" if torch.cuda.is_available() else "cpu"
model = model.to(device, torch.float32).eval()
start = torch.tensor([[tokenizer.eos_token_id or 0]], device=device)
options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": tokenizer.eos_token_id or 0}
found["sample"] = tokenizer.decode(model.generate(start, attention_mask=torch.ones_like(start), **options)[0, 1:])
if blocks:
    total = 0.0
    with torch.no_grad(), np.load(blocks) as parts:
        for inputs, targets in zip(*(torch.from_numpy(parts[name]).long().split(8) for name in ("inputs", "targets"))):
            logits = model(inputs.to(device)).logits.flatten(0, 1)
            targets = targets.to(device).flatten()
            total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
        found["loss"] = total / int((parts["targets"] != -100).sum())
print(json.dumps(found))
"""


def verify(folder: str | Path) -> dict[str, Any]:
    """Facts about a checkpoint folder, and `problems`: lines for what would surprise those who load it elsewhere.

    `loss` is the evaluation loss made again by stock transformers in float32, on the tokens of training;
    `loss_not_checked` says why where it is not. Raises UserError for a folder that is no checkpoint.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"checkpoint {folder}: no config.json; give a checkpoint folder")
    facts: dict[str, Any] = {"checkpoint": str(folder)}
    problems = []
    if (folder / checkpoint.MANIFEST).exists() and (fault := checkpoint.fault(folder, checkpoint.MODEL_FILES)):
        problems.append(fault)
    missing = [name for name in ("model.safetensors", "generation_config.json") if not (folder / name).is_file()]
    problems += [f"{name} is missing" for name in missing]
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):
            content = json.loads(read_text_file(path))
            if "auto_map" in content:
                problems.append(f"{path.name} asks for code from elsewhere (auto_map)")
            generic = content.get("tokenizer_class") == "PreTrainedTokenizerFast"
            if "token_type_ids" in content.get("model_input_names", ["token_type_ids"] if generic else []):
                problems.append(f"{path.name}: transformers 4 returns token_type_ids, which change the model's answer")
    if not has_tokenizer(folder):
        problems.append("there is no tokenizer in the folder; stock transformers makes an empty one up")
    if missing:
        return {**facts, "problems": problems}
    recorded, tolerance, blocks = None, TOLERANCE_FLOAT32, None
    try:
        recorded, tolerance, blocks = _evaluation(folder)
    except UserError as error:
        facts["loss_not_checked"] = str(error)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "blocks.npz")
        if blocks is not None:
            np.savez(path, inputs=blocks[0], targets=blocks[1])
        command = [sys.executable, "-c", CLEAN_PROCESS, str(folder.resolve()), str(path) if blocks is not None else ""]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=temporary)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        problems.append(f"stock transformers does not load it: {reason}")
        return {**facts, "problems": problems}
    found = json.loads(done.stdout.splitlines()[-1])
    problems += found.pop("problems") + _surprises(found)
    if recorded is not None:
        facts |= {"recorded_loss": recorded, "tolerance": tolerance}
        if not abs(found["loss"] - recorded) <= tolerance:
            problems.append(f"the loss is {found['loss']:.4f}, recorded was {recorded:.4f} (tolerance {tolerance})")
    return {**facts, **found, "problems": problems}


def _evaluation(folder: Path) -> tuple[float, float, tuple[np.ndarray, np.ndarray]]:
    """The loss recorded for a checkpoint, the tolerance, and its inputs and targets. UserError where there is none."""
    if not (folder / STATE).is_dir():
        raise UserError("the folder has no training_state, which says what it was evaluated on")
    trainer, data = read_state(folder, "trainer_state"), read_state(folder, "data_state")
    if not trainer["evaluation"] or trainer["evaluation_step"] != trainer["step"]:
        raise UserError(f"there was no evaluation at step {trainer['step']}")
    config = PretrainConfig.of_run(trainer["config"])
    if config.document_masking:
        raise UserError("it was evaluated with documents masked from each other")
    blocks_per_step = data["fingerprint"]["blocks_per_step"]
    text = prepare_data_of_run(config, blocks_per_step, trainer["config"], data["fingerprint"], folder)
    for key in ("held_out", "held_out.hash", "tokenizer"):
        if text.train.fingerprint.get(key) != data["fingerprint"].get(key):
            raise UserError(f"the text is no longer that of the run: {key} differs")
    tolerance = TOLERANCE_FLOAT32 if config.mixed_precision == "no" else TOLERANCE_16_BITS
    parts = windows([len(text.validation)], config.sequence_length)
    blocks = scored_blocks(text.validation, parts, config.sequence_length)
    return trainer["evaluation"]["eval_loss"], tolerance, blocks


def _surprises(found: dict[str, Any]) -> list[str]:
    """What other tools would stumble over."""
    expected: dict[str, Any] = {"class": "GPT2LMHeadModel", "architectures": ["GPT2LMHeadModel"]}
    expected |= {"model_type": "gpt2", "remote_code": False, "finite": True}
    problems = [f"{key} is {found[key]}, not {value}" for key, value in expected.items() if found[key] != value]
    for one, other in (
        ("n_positions", "model_max_length"),
        ("dtype", "declared_dtype"),
        ("vocab_size", "tokenizer_rows"),
    ):
        if found[one] != found[other]:
            problems.append(f"{one} is {found[one]}, {other} {found[other]}")
    for key, (in_tokenizer, in_config, in_generation) in found["ids"].items():
        # A pad token that only stands for one is not in the model's configuration, as in GPT-2's.
        if in_config not in ({in_tokenizer, None} if key == "pad_token_id" else {in_tokenizer}):
            problems.append(f"{key} is {in_config} in config.json, {in_tokenizer} in the tokenizer")
        if in_generation != in_tokenizer:
            problems.append(f"{key} is {in_generation} in generation_config.json, {in_tokenizer} in the tokenizer")
    has_special_tokens = found.pop("has_special_tokens")
    if found["padding_side"] != "left":
        problems.append(f"the tokenizer pads at the {found['padding_side']}, where a batch of prompts gets wrong text")
    if has_special_tokens and found["ids"]["pad_token_id"][0] is None:
        problems.append("the tokenizer has no pad token, so prompts of different lengths are refused")
    return problems
