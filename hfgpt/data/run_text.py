"""Open the text of an existing run, as it was when the run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hfgpt.config import PretrainConfig
from hfgpt.data import embedded
from hfgpt.data.local_files import local_files
from hfgpt.data.prepare import TextData, prepare_data
from hfgpt.errors import UserError, message
from hfgpt.settings.field_types import AUTO


def prepare_data_of_run(
    config: PretrainConfig,
    blocks_per_step: int,
    saved_config: dict[str, Any],
    fingerprint: dict[str, Any],
    folder: Path | None,
) -> TextData:
    """Like `prepare_data`, for a run that began with `saved_config` on the text of `fingerprint`.

    The dataset is opened at the same commit, and a tokenizer that was trained for the run is loaded from the checkpoint
    `folder`.
    """
    commit, held_out = fingerprint.get("dataset.commit"), fingerprint.get("held_out")
    pinned, tokenizer = config, None
    was_local = commit is None and config.dataset != embedded.NAME and config.dataset == saved_config.get("dataset")
    if was_local and local_files(config.dataset) is None:
        raise UserError(
            f"dataset={config.dataset}: was a local path when the run began, but does not exist here; start from the "
            "same folder, or give the full path"
        )
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
        return prepare_data(pinned, blocks_per_step, tokenizer, held_out)
    except UserError as error:
        if pinned is config or f"dataset_revision={commit}" not in str(error):
            raise
        if not config.accept_changed_text:
            fix = "the run began with this commit; --accept_changed_text true continues with the newest one"
            raise UserError(f"{error}; {fix}") from error
        return prepare_data(config, blocks_per_step, tokenizer, held_out)
