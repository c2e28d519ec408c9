"""The model card of a checkpoint, from the run's facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hfgpt.config import PretrainConfig


def model_card(
    config: PretrainConfig, fingerprint: dict[str, Any], parameters: int, trainer_state: dict[str, Any]
) -> str:
    """README.md of a checkpoint folder: Hub metadata, what it was trained on, how to load it."""
    hub, evaluation = "dataset.commit" in fingerprint, trainer_state["evaluation"]
    name = config.run_name or Path(config.output_dir).name
    text = config.dataset if hub or config.dataset == "embedded" else Path(config.dataset).name
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    if hub:
        metadata["datasets"] = [config.dataset]
    measured = ""
    if evaluation:
        measured = (
            f"Held-out text ({evaluation['eval_tokens']:,} tokens): loss {evaluation['eval_loss']:.4f} nats per "
            f"token, perplexity {evaluation['eval_perplexity']:.2f}.\n\n"
        )
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {name}\n\n"
        f"A GPT-2-style language model of {parameters / 1e6:,.1f} M parameters, trained with hfgpt from random weights "
        f"on {trainer_state['num_input_tokens_seen']:,} tokens of {text}.\n\n{measured}"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder, or its name on the Hub\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n"
    )
