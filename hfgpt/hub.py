"""The model card of a checkpoint, from the run's facts."""

from __future__ import annotations

from typing import Any

import yaml


def model_card(
    name: str, parameters: int, text: str, tokens: int, dataset: str | None, evaluation: dict[str, Any] | None
) -> str:
    """README.md of a checkpoint folder: Hub metadata, what it was trained on, how to load it.

    `dataset` is the Hub id of the training text, if it has one; `evaluation` the newest evaluation record.
    """
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    if dataset:
        metadata["datasets"] = [dataset]
    measured = ""
    if evaluation:
        measured = (
            f"Held-out text ({evaluation['eval_tokens']:,} tokens): loss {evaluation['eval_loss']:.4f} nats per "
            f"token, perplexity {evaluation['eval_perplexity']:.2f}.\n\n"
        )
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {name}\n\n"
        f"A GPT-2-style language model of {parameters / 1e6:,.1f} M parameters, trained with hfgpt from random weights "
        f"on {tokens:,} tokens of {text}.\n\n{measured}"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder, or its name on the Hub\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n"
    )
