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
    metadata = {"datasets": [config.dataset]} if hub else {}
    beginning = "random weights"
    if config.init_from:
        base, _, commit = config.init_from.partition("@")
        beginning = f"the weights of {config.init_from if commit else Path(base).name}"
        metadata |= {"base_model": [base]} if commit else {}
    measured = ""
    if evaluation:
        measured = (
            f"Held-out text ({evaluation['eval_tokens']:,} tokens): loss {evaluation['eval_loss']:.4f} nats per "
            f"token, perplexity {evaluation['eval_perplexity']:.2f}.\n\n"
        )
    story = f"trained with hfgpt from {beginning} on {trainer_state['num_input_tokens_seen']:,} tokens of {text}."
    return card(name, parameters, f"{story}\n\n{measured}", metadata)


def card(name: str, parameters: int, story: str, metadata: dict[str, Any] | None = None) -> str:
    """README.md of a model folder: `metadata` beside what all have, where the model is from, how to load it."""
    known = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"], **(metadata or {})}
    return (
        f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n\n# {name}\n\n"
        f"A GPT-2-style language model of {parameters / 1e6:,.1f} M parameters, {story.strip()}\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder, or its name on the Hub\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n"
    )
