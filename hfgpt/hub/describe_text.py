"""Describe the text of a run for its model card, without local paths."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from hfgpt.data.position import SOURCE
from hfgpt.messages.formats import counted
from hfgpt.settings.mixture import OF_SOURCE, read_mixture
from hfgpt.settings.step_sizes import StepSizes


def describe_text(config: dict[str, Any], fingerprint: dict[str, Any]) -> str:
    """Describe the training text, without local paths."""
    if isinstance(config["dataset"], list):
        return f"a mixture of {len(config['dataset'])} sources"
    commit = fingerprint.get("dataset.commit")
    if commit or config["dataset"] == "embedded":
        return describe_record({**config, "dataset_revision": commit})
    if rows := fingerprint.get("dataset.rows"):
        return f"{rows:,} rows given in Python"
    files = [key.removeprefix("dataset.file ") for key in fingerprint if key.startswith("dataset.file ")]
    name, count = Path(config["dataset"]).name, fingerprint.get("dataset.files", len(files))
    if count == 1 and Path(files[0] if files else name).name == name:
        return name
    return f"{name} ({counted(count, 'local file')})" if name else counted(count, "local file")


class DescribedSource(NamedTuple):
    """A source of a mixture: its Hub id, if it is public, and text without local paths."""

    name: str
    hub: str | None
    text: str


def describe_sources(
    config: dict[str, Any], fingerprint: dict[str, Any], progress: dict[str, dict[str, Any]] | None = None
) -> list[DescribedSource]:
    """Describe the sources of a mixture, with their weights and `progress` (of `Progress`); empty for a single text."""
    if not isinstance(config["dataset"], list):
        return []
    found, mixture = [], read_mixture(config["dataset"], config.get("stages"), OF_SOURCE)
    for number, source in enumerate(mixture.sources):
        prefix = f"{source.name}{SOURCE}"
        own = {key.removeprefix(prefix): value for key, value in fingerprint.items() if key.startswith(prefix)}
        sizes = StepSizes.of(fingerprint["blocks_per_step"], fingerprint["sequence_length"])
        shares = [
            f"{100 * float(Fraction(weights[number])):.3g} %"
            + (f" after {sizes.tokens_after(first):,}" if first else " of the tokens")
            for first, weights in fingerprint.get("weights", [])
        ]
        hub = source.settings["dataset"] if own.get("dataset.commit") else None
        text = describe_text({"dataset": "", **source.settings}, own)
        text += f", token ids that were ready ({ready})" if (ready := own.get("dataset.tokens")) else ""
        so_far = _so_far((progress or {}).get(source.name, {}))
        found.append(DescribedSource(source.name, hub, f"{', then '.join(shares)}: {text}{so_far}"))
    return found


def _so_far(progress: dict[str, Any]) -> str:
    """Describe what a run has seen of a source, and its loss."""
    words = [f"{progress['tokens']:,} tokens"] if "tokens" in progress else []
    if "last_step" in progress:
        words.append(f"to step {progress['last_step']:,}, where its max_epochs ended")
    if "loss" in progress:
        words.append(f"loss {progress['loss']:.4f} in step {progress['loss_step']:,}")
    return "".join(f"; {word}" for word in words)


def describe_record(record: dict[str, Any]) -> str:
    """Describe the text of an evaluation record, without local paths."""
    if record.get("dataset_revision"):
        words = {"dataset_name": "configuration", "dataset_split": "split", "dataset_revision": "commit"}
        parts = [f"{word} {record[key]}" for key, word in words.items() if record.get(key)]
        return ", ".join([record["dataset"], *parts])
    return "Python's own documentation" if record["dataset"] == "embedded" else Path(record["dataset"]).name
