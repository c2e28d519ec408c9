"""Pretrain a GPT-2-style model on the card you have, on the Hugging Face stack."""

from __future__ import annotations

import importlib
from typing import Any

from hfgpt.distributed.stop_signals import exit_on_signal

__version__ = "0.1.0"

_HOMES = {
    "GPT2LMHeadModel": "model.modeling_gpt2",
    "MFUCallback": "training.mfu",
    "PerplexityCallback": "training.callbacks",
    "PretrainConfig": "config",
    "Pretrainer": "training.pretrainer",
    "SampleCallback": "training.callbacks",
    "UserError": "errors",
    "model_config": "model.configuration_gpt2",
    "run_recipe": "cli.run_recipe",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, so each name is imported when it is first used.
    if name not in _HOMES:
        raise AttributeError(f"module 'hfgpt' has no attribute {name!r}")
    with exit_on_signal():
        return getattr(importlib.import_module(f"hfgpt.{_HOMES[name]}"), name)
