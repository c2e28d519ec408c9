"""Trackers: which ones `report_to` names, and their transformers callbacks."""

from __future__ import annotations

import difflib
from importlib.util import find_spec

from transformers import TrainerCallback
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hfgpt.errors import UserError


def tracker_names(report_to: str) -> list[str]:
    """Return the trackers in `report_to`, each once. "all" means those that are installed."""
    names = dict.fromkeys(name.strip() for name in report_to.split(","))
    if "all" in names:
        names |= dict.fromkeys(get_available_reporting_integrations())
    return [name for name in names if name not in ("", "none", "all")]


TRACKER_EXTRAS = ("tensorboard", "wandb", "trackio", "mlflow")
# Modules (one of them must be installed) and packages of trackers, where they differ from the tracker's name.
_MODULES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "kubeflow": ("transformers",),  # has no package
}
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}


def trackers(report_to: str) -> list[TrainerCallback]:
    """Build transformers' callback of each tracker. Raises UserError for unknown names and missing packages."""
    found, problems = [], []
    names = tracker_names(report_to)
    if not names and "all" in report_to:
        problems.append("report_to=all: no tracker is installed; pip install 'hfgpt[trackers]', or use none")
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            near = difflib.get_close_matches(name.lower(), INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            problems.append(f"report_to={name}: no such tracker; {hint}")
        elif not any(find_spec(module) for module in _MODULES.get(name, (name,))):
            package = f"'hfgpt[{name}]'" if name in TRACKER_EXTRAS else _PACKAGES.get(name, name)
            problems.append(f"report_to={name}: not installed; pip install {package}")
        else:
            try:
                found.append(INTEGRATION_TO_CALLBACK[name]())
            except Exception as error:  # trackers raise many types of errors when they start
                reason = " ".join(str(error).split()) or type(error).__name__
                problems.append(f"report_to={name}: cannot start: {reason}")
    if problems:
        raise UserError(*problems)
    return found
