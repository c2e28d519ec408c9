"""Save checkpoints: their content, the record that one was written, and the report of the run so far."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from hfgpt.checkpointing import state
from hfgpt.checkpointing.checkpoint import rotate
from hfgpt.errors import first_line
from hfgpt.hub.background import STOP_SECONDS, Pushed
from hfgpt.hub.model_card import model_card
from hfgpt.messages import safe_output
from hfgpt.training.run import TrainingRun

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


def save(run: TrainingRun, at_end: bool = False) -> None:
    """Start writing a checkpoint: a Hub model folder that is also a resume point. Call on all processes.

    If the last step was skipped, or its loss is far above others in a run that rolls back, the save is postponed until
    one is not, so that rotation does not replace a good checkpoint with a broken one. At the end of the run, the
    checkpoint is saved anyway.
    """
    run.non_finite.read()
    run.saver.is_postponed = run.non_finite.is_suspicious and not at_end
    if run.saver.is_postponed:
        return
    note_saved(run, wait=True, at_end=at_end)
    start_save(run)
    if not (at_end or run.is_complete):  # otherwise the end of the run writes it
        write_report(run)  # not in a thread: that would slow down steps by more time than this takes
    run.callbacks.mfu.on_save(run.callbacks.args, run.callbacks.state, run.callbacks.control)  # outside of its clock


def start_save(run: TrainingRun, after_failure: bool = False) -> None:
    # Copy first: training changes the tensors while a thread writes the files.
    average = run.average if run.average and run.average.steps else None
    tensors = state.snapshot(run.step.model, run.step.optimizer, average.swapped_in() if average else None)
    if run.is_main:
        trainer, fingerprint = trainer_state(run), run.data.train.fingerprint
        data = {"fingerprint": fingerprint, "position": run.position}
        try:
            card = model_card(run.facts, fingerprint, trainer, tokenizer=run.data.tokenizer)
        except Exception as error:
            if not after_failure:
                raise
            card = f"The model card could not be created ({first_line(error)}).\n"
        write = partial(state.write_files, run.step.model, run.data.tokenizer, tensors, trainer, data, card)
        run.saver.start(run.progress.step, write, rotate=not run.non_finite.is_suspicious)
    run.saver.saved_step = run.progress.step


def trainer_state(run: TrainingRun) -> dict[str, Any]:
    """Return the content of trainer_state.json: progress, and the state of everything else that must be restored."""
    scaler = run.machine.accelerator.scaler
    run.progress.evaluation_is_due = run.callbacks.control.should_evaluate
    run.progress.wall_seconds = run.callbacks.mfu.total_seconds
    return {
        **run.progress.to_json(),
        "schedule": run.step.learning_rate.state(),
        "random_numbers": "seeded by (seed, step, process) at every step",
        "config": run.config.to_dict(),
        "choices": run.plan.choices(),
        "micro_batch": run.step.batch.micro_batch,
        "gradient_scaler": scaler.state_dict() if scaler is not None else None,
        "average": run.average and run.average.state(run.progress.evaluation),
        "spike_window": run.step.spikes and run.step.spikes.state(),
        "loss_watch": run.non_finite.state(),
        "callbacks": run.callbacks.states(),
    }


def note_saved(run: TrainingRun, wait: bool = False, at_end: bool = False) -> None:
    """Record a checkpoint that was written or pushed, or that failed to be, since the last call."""
    note_pushed(run)
    outcome = run.saver.collect(wait)
    record_saved(run, outcome)
    if isinstance(outcome, Path):
        run.callbacks.call("on_save")
    elif outcome is not None:
        is_ending = at_end or run.is_complete or run.callbacks.control.should_training_stop
        next_action = "" if is_ending else ". Training continues"
        logger.warning(
            "The checkpoint of step %s could not be written (%s)%s", run.saver.saved_step, outcome, next_action
        )


def record_saved(run: TrainingRun, outcome: Path | Exception | None) -> None:
    """Record how a save went, with the step of the checkpoint, because training has continued since."""
    step = run.saver.saved_step
    if isinstance(outcome, Path):
        skipped_rows = dict(run.progress.skipped_rows)
        run.record(event="save", checkpoint=outcome.name, checkpoint_step=step, skipped_rows=skipped_rows)
        if run.pusher:
            run.pusher.offer(outcome)
    elif outcome is not None:
        run.record(event="save_failed", checkpoint_step=step, reason=str(outcome))


def note_pushed(run: TrainingRun, next_action: str = ". Training continues, and the next save is pushed") -> None:
    """Record a push of a save that has ended since the last call. Starts the next push, if a save waits for it."""
    if run.pusher and (pushed := run.pusher.collect()):
        _record_push(run, pushed, next_action)


def _record_push(run: TrainingRun, pushed: Pushed, next_action: str = "") -> None:
    name, step = pushed.checkpoint.name, int(pushed.checkpoint.name.split("-")[1])
    if pushed.url is not None:
        run.record(event="push", checkpoint=name, checkpoint_step=step, url=pushed.url)
    else:
        run.record(event="push_failed", checkpoint=name, checkpoint_step=step, reason=pushed.reason)
        repo_id = run.config.hub_repo_id()
        logger.warning("%s was not pushed to %s (%s)%s", name, repo_id, pushed.reason, next_action)


def finish_pushes(run: TrainingRun, is_stopped: bool) -> None:
    """Wait for the pushes of saves, and delete the checkpoints that rotation kept for them.

    is_stopped: the run ends early, so that the newest save is pushed too, within STOP_SECONDS. Otherwise the end of
    the run pushes that, and only the push in progress is waited for. A signal limits the wait to STOP_SECONDS too.
    """
    pusher = run.pusher
    if pusher is None:
        return
    if not is_stopped:
        pusher.drop_waiting()
    limit, start = STOP_SECONDS if is_stopped else math.inf, time.monotonic()
    if pusher.is_busy and is_stopped:
        logger.warning("pushing to %s for at most %.0f s; a second signal ends at once", pusher.repo_id, STOP_SECONDS)
    while pusher.is_busy and time.monotonic() - start < limit:
        if run.signals.received and limit == math.inf:
            limit = time.monotonic() - start + STOP_SECONDS
        if pusher.wait(POLL_SECONDS):
            note_pushed(run, next_action="")
    for pushed in pusher.give_up():
        _record_push(run, pushed)
    if run.saver.saved_step and not (run.saver.failures or run.non_finite.is_suspicious):
        rotate(run.folder, run.folder.checkpoint(run.saver.saved_step), run.config.save_total_limit)


def write_report(run: TrainingRun) -> None:
    """Write the run's report.html, on the main process. A failure is logged once, and the next save tries again."""
    if not (run.config.report and run.is_main):
        return
    # These import pandas, which takes half a second of each start.
    from hfgpt.comparing.comparison import compare
    from hfgpt.comparing.page import as_page
    from hfgpt.comparing.reading import read_folder
    from hfgpt.comparing.report import build_report

    try:
        past = read_folder(run.folder.path, with_ledger=False)
        run.folder.write_report(as_page(build_report([past], compare([past]), with_plots=True)))
    except Exception as error:  # training continues, whatever is wrong with the page
        reason = getattr(error, "strerror", None) or first_line(error)
        if not run.has_warned_of_report:
            logger.warning("%s could not be written (%s); training continues without it", run.folder.report, reason)
        run.has_warned_of_report = True


def record_samples(run: TrainingRun, prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Record samples made after the last step, once each, and write the report again. Call on the main process."""
    with closing(run.folder):
        run.folder.claim()
        known = [(record.get("prompt"), record.get("text")) for record in run.folder.records()]
        for prompt, text in zip(prompts, texts, strict=True):
            if (prompt, text) not in known:
                run.record(event="sample", prompt=prompt, text=text)
        write_report(run)


def record_lost_output(run: TrainingRun) -> None:
    """Record once if standard output or standard error cannot be written. Training continues without it."""
    for stream in safe_output.lost.keys() - run.lost_output:
        run.lost_output.add(stream)
        run.record(event="output_lost", stream=stream, reason=safe_output.lost[stream])
