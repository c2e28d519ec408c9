"""Pretrain a GPT-2-style model on the machine you have, on the Hugging Face stack."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hfgpt.distributed.stop_signals import exit_on_signal

if TYPE_CHECKING:
    from hfgpt.cli.run_recipe import run_recipe
    from hfgpt.config import PretrainConfig
    from hfgpt.errors import UserError
    from hfgpt.model.configuration_gpt2 import model_config
    from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
    from hfgpt.training.callbacks import PerplexityCallback, SampleCallback
    from hfgpt.training.mfu import MFUCallback
    from hfgpt.training.pretrainer import Pretrainer

__version__ = "0.1.0"

__all__ = [
    "GPT2LMHeadModel",
    "MFUCallback",
    "PerplexityCallback",
    "PretrainConfig",
    "Pretrainer",
    "SampleCallback",
    "UserError",
    "__version__",
    "model_config",
    "run_recipe",
]

# torch and transformers take seconds to import, so each name is imported when it is first used.
_MODULES = {
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hfgpt' has no attribute {name!r}")
    with exit_on_signal():
        return getattr(importlib.import_module(f"hfgpt.{_MODULES[name]}"), name)
