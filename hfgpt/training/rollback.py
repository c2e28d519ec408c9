"""Roll back a run that has diverged: to a checkpoint from before, and past the text that was read since."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.checkpoint import find_damage
from hfgpt.checkpointing.read_records import rollbacks_of
from hfgpt.checkpointing.read_training_state import read_state
from hfgpt.checkpointing.rewind import rewind_run
from hfgpt.errors import RunError, UserError
from hfgpt.messages.formats import counted
from hfgpt.training.callback_handler import restore_callbacks
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.non_finite import Diverged
from hfgpt.training.resume import Resumed
from hfgpt.training.run import TrainingRun
from hfgpt.training.saving import note_saved
from hfgpt.training.tracker_runs import KeptRun

logger = logging.getLogger(__name__)


def roll_back(run: TrainingRun) -> None:
    """Continue a run that has diverged from its newest good checkpoint, with the text after the divergence.

    The step goes back to that of the checkpoint, and the learning rate with it; the text goes on. A run that is killed
    during this or later, before its next checkpoint, resumes to the same: until the rollback is in the ledger, it
    repeats the steps that diverge; from then on it resumes after the rollback. Call on all processes. Raises RunError
    after `max_rollbacks`, and without a good checkpoint.
    """
    diverged, ranks = run.non_finite.diverged, run.machine.ranks
    assert diverged is not None  # noqa: S101
    with run.callbacks.mfu.stopped():
        note_saved(run, wait=True)
        folder, trainer, rollback = ranks.from_main(partial(_prepare, run, diverged))
        before = run.progress.step
        if run.is_main:
            if run.pusher:
                run.pusher.drop_waiting()
            rewind_run(run.folder, folder, trainer["step"], run.config.save_total_limit, rollback)
        _restore(run, folder, trainer, rollback)
    if run.is_main:
        record_rollback(run, rollback)
        tokens = rollback["steps"] * run.plan.sizes.tokens(0)
        steps = counted(before - trainer["step"], "step")
        message = "Rolled back from step %d to %s, which abandons %s and passes over %s tokens of text: %s"
        logger.warning(message, before, folder.name, steps, f"{tokens:,}", diverged.reason)
        if run.pusher:
            run.pusher.offer(folder)  # as the newest


def record_rollback(run: TrainingRun, rollback: dict[str, Any]) -> None:
    """Record the event of a rollback, unless a process that was killed meanwhile has done so."""
    number = rollback["number"]
    if not any(one.get("event") == "rollback" and one.get("number") == number for one in run.folder.records()):
        only_ledger = ("position", "skipped_rows", "passed_over")
        facts = {key: value for key, value in rollback.items() if key not in only_ledger}
        facts["tokens"] = rollback["steps"] * run.plan.sizes.tokens(0)
        run.record(event="rollback", **facts)


def _prepare(run: TrainingRun, diverged: Diverged) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the newest good checkpoint, its trainer_state, and what the ledger keeps of the rollback to it."""
    progress, step = run.progress, diverged.step.step
    begun = f"diverged from step {diverged.first} on: {diverged.reason}"
    if progress.rollbacks >= run.config.max_rollbacks:
        raise RunError(
            f"the run {begun}, after {counted(progress.rollbacks, 'rollback')}; to continue from the newest "
            f"checkpoint, resume with max_rollbacks above {progress.rollbacks}, a lower learning_rate or better text"
        )
    for folder in run.folder.checkpoints():
        # The loss of a step is that of the weights before it, so a step after the checkpoint must have been good.
        at = int(folder.name.split("-")[1])
        is_good = at + 1 < diverged.first or (at < diverged.first and run.folder.rollback_at(at))
        if not is_good or find_damage(folder):
            continue
        trainer = read_state(folder, "trainer_state")
        if trainer["run_id"] != progress.run_id:
            continue
        lines = [line for line in run.folder.text_records() if line["step"] <= trainer["step"]]
        earlier = [one for line in lines for one in rollbacks_of(line)]
        passed_over = progress.passed_over + step - trainer["step"]
        rollback = {
            "number": progress.rollbacks + 1,
            "checkpoint": folder.name,
            "from_step": step,
            "first_bad_step": diverged.first,
            "reason": diverged.reason,
            # Steps of text since the last line of the ledger that stays, and in the whole run.
            "steps": passed_over - (earlier[-1]["passed_over"] if earlier else 0),
            "passed_over": passed_over,
            "skipped_rows": dict(diverged.step.skipped_rows),
            "position": diverged.step.position,
        }
        return folder, trainer, rollback
    raise RunError(
        f"the run {begun}, and {run.folder.path} has no whole checkpoint from before; start again with a smaller "
        "save_steps, or a lower learning_rate"
    )


def _restore(run: TrainingRun, folder: Path, trainer: dict[str, Any], rollback: dict[str, Any]) -> None:
    """Bring everything in memory to where a run that resumes from the checkpoint would be."""
    run.progress.return_to(trainer)
    run.progress.follow_rollback(rollback)
    rate = LearningRate.of_resumed(run.config, trainer["schedule"], run.plan.sizes, trainer["step"])
    rate.extend(trainer["step"], run.plan.max_steps, run.config.lr_schedule_on_resume)
    run.step.learning_rate = rate
    resumed = Resumed(folder, trainer, run.progress, rollback["position"], rate, {}, "", [])
    try:
        step, machine = run.step, run.machine
        parts = (step.model, step.optimizer, machine.accelerator.scaler, machine.ranks, run.average, step.spikes)
        resumed.load(*parts)
    except UserError as error:
        raise RunError(f"rollback to {folder.name}: {error}") from error
    run.non_finite.restore(trainer["loss_watch"])
    run.read_from(rollback["position"])
    run.saver.saved_step, run.saver.is_postponed = trainer["step"], False
    callbacks = run.callbacks
    callbacks.mfu.return_to(run.progress.num_input_tokens_seen)
    restore_callbacks(callbacks.handler.callbacks, trainer.get("callbacks", {}))
    callbacks.state.log_history = [one for one in callbacks.state.log_history if one["step"] <= trainer["step"]]
    callbacks.control.should_log = callbacks.control.should_evaluate = callbacks.control.should_save = False
    for one in callbacks.handler.callbacks:
        if isinstance(one, KeptRun):
            one.return_to(trainer["step"])
