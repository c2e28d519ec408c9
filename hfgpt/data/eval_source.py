"""Open the evaluation text of `eval_dataset`, with the settings of the training text where they apply."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
from typing import Any

from hfgpt.config import PretrainConfig
from hfgpt.data import embedded
from hfgpt.data.formats import format_of
from hfgpt.data.formats.given import find_given
from hfgpt.data.formats.tokens.column import has_token_columns
from hfgpt.data.kinds import file_kind
from hfgpt.data.local_files import local_files, no_such_file
from hfgpt.data.open_source import NOT_EARLIER, Earlier, open_source
from hfgpt.data.saved_datasets import saved_splits
from hfgpt.data.source import Source
from hfgpt.errors import UserError


def source_options(config: PretrainConfig) -> dict[str, Any]:
    return {
        "text_column": config.text_column,
        "patience_seconds": config.stream_timeout,
        "skip_bad_files": config.on_bad_files == "skip",
        "tokens_dtype": config.tokens_dtype,
        "tokens_column": config.tokens_column,
    }


def open_eval_source(
    eval_dataset: str, source: Source, config: PretrainConfig, as_earlier: Earlier = NOT_EARLIER
) -> Source:
    """Open the evaluation text: local files, the embedded text, or another split of the training text's Hub dataset.

    If the training text is a column of tokens, it is such a column, or else text.
    """
    options = source_options(config)
    path = os.path.expanduser(eval_dataset)
    is_path = os.path.exists(path) or os.path.exists(f"{path}.idx") or glob.has_magic(eval_dataset)
    try:
        if find_given(eval_dataset) is not None:
            return open_source(eval_dataset, **options)
        if isinstance(config.dataset, str) and eval_dataset in saved_splits(config.dataset):
            return open_source(config.dataset, split=eval_dataset, **options)
        if not (source.is_local or is_path or eval_dataset == embedded.NAME):
            revision = source.fingerprint["commit"]
            assert isinstance(config.dataset, str)  # noqa: S101
            return open_source(config.dataset, config.dataset_name, eval_dataset, revision, **options)
        files = ([], []) if eval_dataset == embedded.NAME else local_files(eval_dataset)
        if files is None and "/" not in eval_dataset:
            raise no_such_file(eval_dataset)  # the name of a split, but local text has no splits
        if files:  # the settings apply to the training text
            if not any(format_of(file).HAS_COLUMNS for file in files[0]):
                options["text_column"] = "text"
            if not any(map(has_token_columns, files[0])):
                options["tokens_column"] = None
            if not any(file_kind(file) in (None, "tokens") for file in files[0]):
                options["tokens_dtype"] = None
        return open_source(eval_dataset, **options, as_earlier=as_earlier)
    except UserError as error:
        if config.tokens_column and re.match("tokens_column=.*: not in ", str(error)):
            with contextlib.suppress(UserError):
                return open_eval_source(eval_dataset, source, dataclasses.replace(config, tokens_column=None))
        raise UserError(re.sub("^dataset(_split)?", "eval_dataset", str(error))) from error
