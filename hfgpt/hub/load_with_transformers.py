"""The script behind `verify`: load a model folder with stock transformers, run it, and print facts as one JSON object.

    python -I load_with_transformers.py FOLDER [BLOCKS.npz]

Run in a clean process, it cannot import hfgpt. BLOCKS holds `inputs` and `targets`, both (blocks, T), for the loss.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(folder: str, blocks: str | None = None) -> dict[str, Any]:
    """Return facts, `problems` that keep other tools from using the folder, and Python `warnings` while loading it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        options = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, loading = AutoModelForCausalLM.from_pretrained(folder, **options)
    facts = {
        "problems": [
            f"model.safetensors: {kind.replace('_', ' ')}: {sorted(map(str, loading[kind]))[:3]}"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if loading[kind]
        ],
        "warnings": list(dict.fromkeys(str(warning.message) for warning in caught)),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": stored_dtypes(f"{folder}/model.safetensors"),
        "declared_dtype": str(config.dtype).removeprefix("torch."),
        "model_type": config.model_type,
        "architectures": config.architectures,
        "remote_code": bool(getattr(config, "auto_map", None)),
        "n_positions": config.n_positions,
        "model_max_length": tokenizer.model_max_length,
        "vocab_size": config.vocab_size,
        "padding_side": tokenizer.padding_side,
        "has_special_tokens": bool(tokenizer.all_special_ids),
        "finite": all(bool(parameter.isfinite().all()) for parameter in model.parameters()),
        "ids": {
            key: [getattr(holder, key) for holder in (tokenizer, config, generation)]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
    }
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if is_tied != config.tie_word_embeddings:
        head = "tied" if is_tied else "not tied"
        facts["problems"] += [f"config.json: tie_word_embeddings is {config.tie_word_embeddings}, the head is {head}"]
    model = model.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32).eval()
    start = torch.tensor([[tokenizer.eos_token_id or 0]], device=model.device)
    ends = {"max_new_tokens": 8, "pad_token_id": tokenizer.eos_token_id or 0}
    sample = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, **ends)
    facts["sample"] = tokenizer.decode(sample[0, 1:])
    if blocks:
        facts["loss"] = mean_loss(model, blocks)
    return facts


def stored_dtypes(file_name: str) -> str:
    with safe_open(file_name, "pt") as file:
        dtypes = {str(file.get_tensor(name).dtype).removeprefix("torch.") for name in file.keys()}  # noqa: SIM118
    return ", ".join(sorted(dtypes))


@torch.no_grad()
def mean_loss(model: Any, blocks: str) -> float:
    """Return the mean negative log-likelihood in nats over all targets except -100."""
    total = 0.0
    with np.load(blocks) as arrays:
        inputs_NT, targets_NT = (torch.from_numpy(arrays[name]).long() for name in ("inputs", "targets"))
    for inputs_BT, targets_BT in zip(inputs_NT.split(8), targets_NT.split(8), strict=True):
        logits = model(inputs_BT.to(model.device)).logits.flatten(0, 1)
        targets = targets_BT.to(model.device).flatten()
        total += cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
    return total / int((targets_NT != -100).sum())


if __name__ == "__main__":
    sys.modules["hfgpt"] = None  # type: ignore[assignment]
    print(json.dumps(main(*sys.argv[1:])))
