"""Open the text of an existing run, as it was when the run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hfgpt.config import PretrainConfig
from hfgpt.data import embedded
from hfgpt.data.formats.given import EVALUATION, TRAINING, find_missing
from hfgpt.data.local_files import local_files
from hfgpt.data.position import SOURCE
from hfgpt.data.prepare import prepare_data
from hfgpt.data.prepare_text import TextData
from hfgpt.errors import UserError, message
from hfgpt.settings.field_types import AUTO
from hfgpt.settings.step_sizes import StepSizes


def prepare_data_of_run(
    config: PretrainConfig,
    blocks_per_step: int | StepSizes,
    saved_config: dict[str, Any],
    fingerprint: dict[str, Any],
    folder: Path | None,
) -> TextData:
    """Like `prepare_data`, for a run that began with `saved_config` on the text of `fingerprint`.

    The dataset is opened at the same commit, and a tokenizer that was trained for the run is loaded from the checkpoint
    `folder`.
    """
    commit, tokenizer = fingerprint.get("dataset.commit"), None
    if (missing := find_missing(config, fingerprint.get("dataset.dataset"))) and not config.accept_changed_text:
        key, argument = ("dataset", missing) if missing == TRAINING else ("eval_dataset", EVALUATION)
        raise UserError(
            f"{key}: the run was given its text in Python ({missing}), which is not kept; use "
            f"Pretrainer(config, {argument}=...) with the same set"
        )
    if isinstance(config.dataset, list):
        pinned = _pin_sources(config, saved_config, fingerprint)
    else:
        pinned = config
        if commit is None and config.dataset == saved_config.get("dataset"):
            _check_still_there(config.dataset)
        if commit and config.dataset_revision == saved_config.get("dataset_revision"):
            pinned = config.with_facts(dataset_revision=commit)
    is_own = config.tokenizer in ("char", AUTO) or config.tokenizer.startswith("bpe-")
    if folder and is_own and config.tokenizer == saved_config.get("tokenizer"):
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # broken files raise errors of many types
            raise UserError(
                f"{folder}: its tokenizer cannot be read ({message(error)}); use another checkpoint"
            ) from error
    try:
        return prepare_data(pinned, blocks_per_step, tokenizer, fingerprint)
    except UserError as error:
        if pinned is config or "dataset_revision=" not in str(error):
            raise
        if not config.accept_changed_text:
            fix = "the run began with this commit; --accept_changed_text true continues with the newest one"
            raise UserError(f"{error}; {fix}") from error
        return prepare_data(config, blocks_per_step, tokenizer, fingerprint)


def _check_still_there(dataset: str) -> None:
    """Raise UserError if a text that was local when the run began is not there."""
    if dataset not in (embedded.NAME, TRAINING) and local_files(dataset) is None:
        raise UserError(
            f"dataset={dataset}: was a local path when the run began, but does not exist here; start from the "
            "same folder, or give the full path"
        )


def _pin_sources(config: PretrainConfig, saved_config: dict[str, Any], fingerprint: dict[str, Any]) -> PretrainConfig:
    """Return the settings with each source of a mixture at the commit with which the run began."""
    then = saved_config.get("dataset")
    items = [one if isinstance(one, dict) else {"dataset": one} for one in (then if isinstance(then, list) else [])]
    before = {(one.get("dataset"), one.get("dataset_name")): one for one in items}
    sources: list[Any] = []
    assert config.mixture is not None  # noqa: S101
    for source, given in zip(config.mixture.sources, config.dataset, strict=True):
        commit = fingerprint.get(f"{source.name}{SOURCE}dataset.commit")
        now = given if isinstance(given, dict) else {"dataset": given}
        saved = before.get((now["dataset"], now.get("dataset_name")))
        if saved and commit is None:
            _check_still_there(source.settings["dataset"])
        is_same = saved and commit and saved.get("dataset_revision") == now.get("dataset_revision")
        sources.append({**now, "name": source.name, **({"dataset_revision": commit} if is_same else {})})
    return config.with_facts(dataset=sources)
