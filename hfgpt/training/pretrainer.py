"""`Pretrainer`: the training loop. setup.py prepares a run, step.py makes one optimizer update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NoReturn

from transformers import TrainerCallback

from hfgpt.checkpointing.rewind import rewind_run
from hfgpt.config import PretrainConfig
from hfgpt.data import describe_skipped
from hfgpt.data.formats.given import given_datasets, name_datasets
from hfgpt.data.stream import StepBatch, StepText, batch_hash, join_texts, summarize
from hfgpt.distributed.device import peak_memory_bytes
from hfgpt.distributed.stop_signals import Interrupted, StopSignals
from hfgpt.errors import RunError, TextEnded, UserError, name_process
from hfgpt.hub.push import push_trained
from hfgpt.messages.safe_output import safe
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.training.attempts import attempts, fit_micro_batch
from hfgpt.training.evaluating import evaluate, note_average
from hfgpt.training.failures import how_to_continue, saved_on_failure
from hfgpt.training.non_finite import Step
from hfgpt.training.parameter_groups import own_learning_rates
from hfgpt.training.rollback import record_rollback, roll_back
from hfgpt.training.run import TrainingRun
from hfgpt.training.saving import finish_pushes, note_saved, record_lost_output, record_samples, save, write_report
from hfgpt.training.setup import prepare
from hfgpt.training.source_losses import losses_are_due, note_sources
from hfgpt.training.step import StepResult


class Pretrainer:
    """Pretrains a GPT-2-style model.

    config: all settings of the run.
    callbacks: transformers `TrainerCallback`s.
    train_dataset, eval_dataset: `datasets.Dataset`s with a column `config.text_column` (or `config.tokens_column`),
        instead of a `config.dataset`. `eval_dataset` may name several: `{"wiki": wiki, "code": code}`.
    """

    run: TrainingRun  # set by `train`

    def __init__(
        self,
        config: PretrainConfig,
        callbacks: Sequence[TrainerCallback] = (),
        train_dataset: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        self.callbacks = callbacks
        self.config, self._datasets = name_datasets(config, train_dataset, eval_dataset)

    def train(self) -> dict[str, Any]:
        """Train to the last step and return the newest evaluation record.

        Raises UserError, before anything is written, for settings that cannot work. Raises RunError if the run cannot
        continue; its progress is saved.
        """
        with safe(), StopSignals() as signals:
            with given_datasets(self._datasets):
                run = self.run = prepare(self.config, self.callbacks, signals)
            ranks, control, step = run.machine.ranks, run.callbacks.control, run.step
            with closing(run), run.saver, saved_on_failure(run), ranks.share_failures():
                if run.is_main:
                    print("\n".join(run.plan.lines()), flush=True)
                    if run.resumed:
                        run.resumed.warn()
                # Read a batch first, so that nothing is written if the text cannot be read.
                with SlowWork("reading the text of the first step"):
                    batch = None if run.is_complete else next_batch(run)
                start(run)
                if run.progress.evaluation_is_due:
                    evaluate_or_stop(run)
                while not (run.is_complete or control.should_training_stop):
                    if (batch := batch or next_batch(run)) is None:  # max_epochs are over
                        break
                    (own, whole), batch = batch, None
                    run.callbacks.call("on_step_begin")
                    due = losses_are_due(run)
                    for attempt in attempts(run):  # again with smaller micro-batches if memory runs out
                        with attempt:
                            result = step(*step.to_tensors(own.blocks), run.progress.step + 1, due)
                    advance(run, own, whole, result)
                    if control.should_log:
                        log(run)
                    if control.should_evaluate:
                        evaluate(run)
                    if control.should_save or run.saver.is_postponed:
                        save(run)
                    record_lost_output(run)
                    note_saved(run)  # last, because on_save resets control.should_save
                    run.callbacks.agree(ranks)
                    if run.non_finite.diverged:
                        roll_back(run)
                complete(run)
        if self.config.push_to_hub and run.is_main:  # after the other processes have finished
            push_trained(self.config, run.folder.checkpoint(run.progress.step))
        return run.progress.evaluation

    def record_samples(self, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Add samples of the trained model to metrics.jsonl and report.html. Call after `train`, on one process."""
        record_samples(self.run, prompts, texts)


def next_batch(run: TrainingRun) -> tuple[StepBatch, StepText] | None:
    """Return this process's share of the next step's blocks, and what all keep of its text; None at the text's end.

    If reading fails on any process, or a signal arrived, all processes save and raise RunError.
    """
    if run.text_ended:
        return None
    ranks = run.machine.ranks
    text: StepText | UserError | RunError | None
    try:
        with run.signals.interruptible():
            text = summarize(own := next(run.batches))
    except Interrupted:
        text = run.signals.to_error()
    except (UserError, RunError) as error:
        text = error
    shares = ranks.gather(text)
    if faults := {rank: share for rank, share in enumerate(shares) if isinstance(share, UserError | RunError)}:
        rank, fault = next(iter(faults.items()))
        if all(isinstance(fault, TextEnded) for fault in faults.values()):
            run.text_ended = str(fault)
            return None
        if len(faults) < ranks.world_size:
            fault = name_process(fault, f"process {rank} of {ranks.world_size}")
        if not run.has_started:
            raise fault
        for event in (event for fault in faults.values() for event in fault.retries):
            run.record(event="stream_retry", **event)
        stop(run, fault)
    return own, join_texts([share for share in shares if isinstance(share, StepText)])


def start(run: TrainingRun) -> None:
    """Lock the run folder, and record that the run starts or resumes."""
    run.machine.ranks.from_main(run.folder.claim)
    if not (run.resumed and run.folder.run_json.exists()):
        run.folder.start(run.facts)
    run.has_started = True
    if run.is_main:
        resumed_from = run.resumed.folder if run.resumed else None
        rewind_run(run.folder, resumed_from, run.progress.step, run.config.save_total_limit)
        if run.resumed and run.resumed.rollback:
            record_rollback(run, run.resumed.rollback)
    if run.resumed:
        run.record(event="resume", max_steps=run.plan.max_steps, **run.resumed.to_record(run.data.train))
    else:
        run.record(event="start")
    with run.signals.interruptible():
        fit_micro_batch(run)
    run.callbacks.call("on_train_begin")


def advance(run: TrainingRun, own: StepBatch, text: StepText, result: StepResult) -> None:
    """Count the finished step, write a ledger line for its text, and ask the callbacks what is due."""
    progress, control = run.progress, run.callbacks.control
    progress.num_input_tokens_seen += run.plan.sizes.tokens(progress.step)
    progress.step += 1
    progress.skipped_rows.update(text.skipped)
    of_sources = note_sources(run, own, text, result)
    run.position = text.position
    run.folder.record_text(step=progress.step, batch_hash=batch_hash(text.hashes), **of_sources, position=text.position)
    if run.average:
        run.average.update(progress.step, result)
    run.step.is_updating = False
    rate, skipped_rows = run.step.learning_rate(progress.step), progress.skipped_rows.copy()
    run.non_finite.add(Step(progress.step, rate, own, text.position, skipped_rows), result)
    for event in text.retries:
        run.record(event="stream_retry", **event)
    if run.is_complete:
        control.should_log = control.should_save = True
        control.should_evaluate = run.config.eval_steps > 0
    run.callbacks.call("on_step_end")
    for sample in run.callbacks.take_samples():
        run.record(event="sample", **sample)
    run.callbacks.agree(run.machine.ranks)


def log(run: TrainingRun) -> None:
    """Record the newest step. This is the only place where the loop waits for the device."""
    if not (logs := run.non_finite.read()):
        return
    logs |= own_learning_rates(run.config, logs["learning_rate"])
    if run.source_losses:
        logs |= run.source_losses.read(run.machine.ranks, run.progress)
    if (peak := peak_memory_bytes(run.machine.accelerator.device)) is not None:  # trackers want numbers
        logs["memory_bytes"] = peak
    try:
        run.callbacks.report(logs)
    finally:  # even if a callback fails
        run.record(**{"memory_bytes": None, **logs})


def evaluate_or_stop(run: TrainingRun) -> None:
    """Repeat an evaluation that a signal interrupted. Another signal stops the run."""
    if evaluate(run) is None:
        stop(run, next(filter(None, run.machine.ranks.gather(run.signals.to_error()))))


def complete(run: TrainingRun) -> None:
    """Finish after the last step: evaluate if not yet done, save the last checkpoint, close the records."""
    progress, max_steps = run.progress, run.plan.max_steps
    if not run.is_complete and run.is_main:
        why = run.text_ended or run.callbacks.why_stopped()
        print(f"Stopped at step {progress.step} of {max_steps}: {why}", flush=True)
    is_last = progress.step == max_steps or (run.text_ended and progress.step)
    if run.config.eval_steps and is_last and progress.evaluation_step != progress.step:
        evaluate_or_stop(run)
    finish(run)
    if run.saver.failures:
        raise RunError(f"the checkpoint of step {progress.step} could not be written; {how_to_continue(run)}")


def stop(run: TrainingRun, fault: Exception) -> NoReturn:
    """Save, and raise a RunError that says how to continue. Call on all processes."""
    finish(run, fault=str(fault))
    step = f"step {run.progress.step}"
    lost = f"; {step} is not saved" if run.saver.failures else ""
    raise RunError(f"{fault}; ended after {step}{lost}; {how_to_continue(run)}", getattr(fault, "exit_code", 1))


def finish(run: TrainingRun, fault: str | None = None) -> None:
    """Save and record everything that has not been saved or recorded yet."""
    run.non_finite.read()
    if run.non_finite.diverged:
        roll_back(run)
    if run.progress.step not in (0, run.saver.saved_step):
        save(run, at_end=True)
    note_saved(run, wait=True, at_end=True)
    run.machine.accelerator.wait_for_everyone()
    run.callbacks.call("on_train_end")
    run.machine.ranks.disconnect()
    run.machine.accelerator.end_training()
    finish_pushes(run, is_stopped=fault is not None)
    record_lost_output(run)
    run.record(event="end", skipped_rows=dict(run.progress.skipped_rows), fault=fault, **note_average(run))
    write_report(run)
    run.has_ended = True
    if run.progress.skipped_rows and run.is_main:
        print("\n".join(describe_skipped(run.progress.skipped_rows)), flush=True)
