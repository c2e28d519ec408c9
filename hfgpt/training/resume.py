"""Resuming from a checkpoint: progress, position in the text, and settings that changed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hfgpt.checkpointing import state
from hfgpt.checkpointing.read_training_state import changed_settings, read_state
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.config import PretrainConfig
from hfgpt.data import TextData
from hfgpt.data.mixture import MixedStream
from hfgpt.data.mixture_plan import share
from hfgpt.data.position import resumed_position, streams_of
from hfgpt.data.stream import Stream
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.settings.batch import Batch
from hfgpt.settings.mixture import OF_SOURCE, Mixture, read_mixture
from hfgpt.settings.step_sizes import StepSizes, step_sizes
from hfgpt.training.averaging import WeightAverage
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.plan import Plan
from hfgpt.training.progress import Progress
from hfgpt.training.spikes import SpikeWindow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from, and the settings that changed since."""

    folder: Path
    trainer_state: dict[str, Any]
    progress: Progress
    position: dict[str, Any]
    learning_rate: LearningRate
    changed_settings: dict[str, dict[str, Any]]
    changed_text: str
    warnings: list[str]
    rollback: dict[str, Any] | None = None  # after the checkpoint, by the ledger

    @property
    def origin(self) -> str | None:
        """Return where on the Hub the checkpoint was downloaded from, if it was."""
        return self.trainer_state.get("origin")

    def describe(self, run: RunFolder, max_steps: int) -> str:
        """Describe what the run continues from, for the plan."""
        step = self.progress.step
        skipped = [folder.name for folder in run.checkpoints() if int(folder.name.split("-")[1]) > step]
        found = f"from {self.origin or self.folder}, step {step:,}"
        found += f"; skipped: {', '.join(skipped)}" if skipped else ""
        return f"{found}; already finished at step {step:,}" if step >= max_steps else found

    def to_record(self, stream: Stream) -> dict[str, Any]:
        """Return what the event of the resume says of the checkpoint, and of what has changed since."""
        return {
            "checkpoint": self.folder.name,
            **({"origin": self.origin} if self.origin else {}),
            "changed_settings": self.changed_settings,
            "changed_text": self.changed_text or None,
            "blocks_per_step": stream.fingerprint["blocks_per_step"],
            **({"weights": stream.fingerprint["weights"]} if isinstance(stream, MixedStream) else {}),
        }

    def warn(self) -> None:
        """Log which settings have changed. Call once the run is certain to start."""
        for warning in self.warnings:
            logger.warning(warning)

    def load(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        ranks: Ranks,
        average: WeightAverage | None,
        spikes: SpikeWindow | None,
    ) -> None:
        """Restore in place: weights, their average, optimizer, loss scaler, spike window. Call on all processes."""
        trainer = self.trainer_state
        goes_on = average and average.continues(trainer["average"], trainer["config"], self.progress.step)
        take = average.take if average and goes_on else None
        if not take:  # the newest evaluation is not one of the average that starts here
            self.progress.forget_average()
            if average:
                average.reset(self.progress.step)
        state.load_model_and_optimizer(self.folder, model, optimizer, ranks, trainer, take)
        if scaler is not None and self.trainer_state["gradient_scaler"]:
            scaler.load_state_dict(self.trainer_state["gradient_scaler"])
        if spikes is not None:
            spikes.restore(trainer["spike_window"])


def _continue_mixture(
    plan: Plan, stream: MixedStream, saved: dict[str, Any], position: dict[str, Any], trainer: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Let the weights of a mixture, which may have changed, count from the next step on; return the change in words."""
    step, mixture = trainer["step"], plan.config.mixture
    assert mixture is not None  # noqa: S101
    if position["step"] != step:  # the text has changed, and starts over
        before = saved["position"].get("tokens", {})
        tokens = {name: before.get(name, 0) for name in stream.names}
        position = {**position, "step": step, "since": step, "tokens": tokens}
    then = read_mixture(trainer["config"]["dataset"], None, OF_SOURCE) if position["over"] else Mixture()
    position = stream.with_new_limits(position, {source.name: source.max_epochs for source in then.sources})
    now = mixture.schedule(plan.sizes, step)
    history = saved["fingerprint"].get("weights", [])
    if not (stream.follow(history, step, now) and history):
        return position, ""
    words = [f"{share(stream.names, weights)} from step {first + 1}" for first, weights in now]
    return position, f"weights ({'; '.join(words)})"


def sizes_of_run(config: PretrainConfig, batch: Batch, resume_from: Path | None) -> StepSizes:
    """Return the blocks of each step: what a resumed run has had of them, and from there on what the settings say.

    If these say something else of the steps that the run has had, they count from now on, if that is accepted. Raises
    UserError for a new stage that the logical streams of the run do not divide.
    """
    if resume_from is None:
        return step_sizes(config, batch.tokens_per_step)
    trainer, saved = (read_state(resume_from, name) for name in ("trainer_state", "data_state"))
    step, tokens = trainer["step"], trainer["num_input_tokens_seen"]
    then = StepSizes.read(saved["fingerprint"].get("blocks_per_step"), config.sequence_length)
    if then is None:
        return step_sizes(config, batch.tokens_per_step)
    now = then.followed_by(step_sizes(config, batch.tokens_per_step, *trainer["sized_since"]))
    is_changed = now.until(step) != then.until(step)
    if is_changed and config.accept_changed_text:
        now = then.followed_by(step_sizes(config, batch.tokens_per_step, step, tokens))
    streams = streams_of(saved["position"])
    if streams and now.common % streams:
        if not is_changed:
            raise UserError(
                f"tokens_per_step: the text of this run is read in {streams} streams, so steps must be multiples of "
                f"{streams * config.sequence_length:,} tokens"
            )
        streams = None
    return replace(now, known=(step, tokens), streams=streams)


def _begun(saved: dict[str, Any], sizes: StepSizes, step: int) -> bool:
    """Return whether the steps that the run has had were of these sizes."""
    then = StepSizes.read(saved["fingerprint"].get("blocks_per_step"), sizes.sequence_length)
    return then is not None and then.until(step) == sizes.until(step)


def _is_evaluated_otherwise(
    then: dict[str, Any], fingerprint: dict[str, Any], config: PretrainConfig, stream: Stream
) -> bool:
    """Return whether evaluations from now on cannot be compared with those of the checkpoint."""
    settings = ("eval_tokens", "sequence_length", "document_masking")
    of_text = [key for key in stream.fingerprint if key.endswith(("held_out", "held_out.hash", "tokenizer"))]
    now = config.to_dict()
    is_same = all(then.get(key, now[key]) == now[key] for key in settings)
    return not is_same or any(fingerprint.get(key) != stream.fingerprint[key] for key in of_text)


def resume(folder: Path, run: RunFolder, plan: Plan, data: TextData, ranks: Ranks) -> Resumed:
    """Read checkpoint `folder`. Call on all processes; the main process reads the files.

    Raises UserError if the run cannot continue with its current settings.
    """
    config, max_steps = plan.config, plan.max_steps
    trainer, saved = ranks.from_main(lambda: [read_state(folder, name) for name in ("trainer_state", "data_state")])
    rollback = ranks.from_main(partial(RunFolder(folder.resolve().parent).rollback_at, trainer["step"]))
    saved = {**saved, "position": rollback["position"]} if rollback else saved
    name, problems = trainer.get("origin") or folder, list[str]()  # a download is removed if it is not used
    if plan.sizes.since == tuple(trainer["sized_since"]) and _begun(saved, plan.sizes, trainer["step"]):
        saved["fingerprint"]["blocks_per_step"] = plan.sizes.to_json()  # only of later steps, if at all
    try:
        ranks.from_main(partial(state.check_model, folder, plan.model, name))
    except UserError as error:
        problems += error.problems
    try:
        position, changed_text = resumed_position(
            data.train, saved["fingerprint"], saved["position"], config.accept_changed_text
        )
        if isinstance(data.train, MixedStream):
            position, change = _continue_mixture(plan, data.train, saved, position, trainer)
            changed_text = "; ".join(filter(None, (changed_text, change)))
    except UserError as error:
        problems += error.problems
    if (then := trainer["config"].get("optim")) != config.optim:
        problems.append(f"optim={config.optim}: {name} was saved with optim={then}; set --optim {then}")
    if max_steps < trainer["step"]:
        problems.append(f"max_steps={max_steps}: {name} is at step {trainer['step']}; set a larger --max_steps")
    if problems:
        raise UserError(*problems)
    progress = Progress.from_json(trainer)
    progress.sized_since = plan.sizes.since
    if rollback:
        progress.follow_rollback(rollback)
    is_missing = progress.evaluation_step != progress.step
    if is_missing and (made_later := ranks.from_main(partial(run.evaluation, progress.step))):
        progress.evaluation, progress.evaluation_step = made_later, progress.step
    if _is_evaluated_otherwise(trainer["config"], saved["fingerprint"], config, data.train):
        progress.evaluated_since = progress.step
    progress.forget_earlier_text()
    if trainer["config"].get("metric_for_best_model") != config.metric_for_best_model:
        progress.best_metric = progress.best_step = None
    progress.evaluation_is_due &= progress.evaluation_step != progress.step and config.eval_steps > 0
    recorded, now = trainer.get("choices", {}), plan.choices()
    changed = changed_settings(trainer["config"], config.to_dict())
    changed |= changed_settings(recorded, {key: now.get(key) for key in recorded})
    warnings = [f"{key} is {now['to']} from here on; it was {now['from']}" for key, now in changed.items()]
    learning_rate = LearningRate.of_resumed(config, trainer["schedule"], plan.sizes, trainer["step"])
    if change_of_rate := learning_rate.extend(trainer["step"], max_steps, config.lr_schedule_on_resume):
        warnings.append(change_of_rate)
    return Resumed(folder, trainer, progress, position, learning_rate, changed, changed_text, warnings, rollback)
