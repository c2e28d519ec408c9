"""Pretrain a GPT-2-style model on the card you have, on the Hugging Face stack."""

from __future__ import annotations

import importlib
from typing import Any

from hfgpt.signals import ending_at_once

__version__ = "0.1.0"

_HOMES = {
    "GPT2LMHeadModel": "modeling_hfgpt",
    "MFUCallback": "callbacks",
    "PerplexityCallback": "callbacks",
    "PretrainConfig": "config",
    "Pretrainer": "trainer",
    "SampleCallback": "callbacks",
    "UserError": "errors",
    "model_config": "configuration_hfgpt",
    "run_recipe": "ending",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, so each name is imported when it is first used.
    if name not in _HOMES:
        raise AttributeError(f"module 'hfgpt' has no attribute {name!r}")
    with ending_at_once():
        return getattr(importlib.import_module(f"hfgpt.{_HOMES[name]}"), name)
