"""Open the text of a run, new or resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hfgpt.checkpointing.read_training_state import read_state
from hfgpt.config import PretrainConfig
from hfgpt.data import TextData, prepare_data, prepare_data_of_run
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.settings.step_sizes import StepSizes


def open_text(
    config: PretrainConfig, sizes: StepSizes, resume_from: Path | None, ranks: Ranks
) -> tuple[PretrainConfig, TextData]:
    """Open the text. Recipe settings that do not apply to the user's text are replaced with defaults."""

    def open_for(settings: PretrainConfig) -> TextData:
        if resume_from is None:
            return prepare_data(settings, sizes)
        saved, data = (read_state(resume_from, name) for name in ("trainer_state", "data_state"))
        return prepare_data_of_run(settings, sizes, saved["config"], data["fingerprint"], resume_from)

    while True:
        try:
            data = ranks.from_main(partial(open_for, config))
            is_same = data.tokenizer_name == config.tokenizer
            return config if is_same else config.with_facts(tokenizer=data.tokenizer_name), data
        except UserError as error:
            config = config.without(error)
