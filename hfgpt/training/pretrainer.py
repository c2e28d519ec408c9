"""`Pretrainer`: the training loop on Accelerate. What is before it: hfgpt/prepared.py. Its step: hfgpt/step.py."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hfgpt import safe_output as output
from hfgpt.checkpointing import checkpoint
from hfgpt.checkpointing import state as model_state
from hfgpt.data import told_counts
from hfgpt.data.stream import StepBatch, batch_hash, side_by_side
from hfgpt.distributed.device import compiler_fault, peak_memory_bytes, remove_broken_code
from hfgpt.distributed.stop_signals import Interrupted
from hfgpt.errors import RunError, UserError, first_line, told_by
from hfgpt.evaluation.loss import evaluate
from hfgpt.hub.model_card import model_card
from hfgpt.hub.push import push_trained
from hfgpt.safe_output import safe
from hfgpt.training.batch_size import MemoryRanOut, out_of_memory_named, release_memory
from hfgpt.training.callbacks import numbers, why_stopped
from hfgpt.training.non_finite import Step, StepResult
from hfgpt.training.plan import run_facts
from hfgpt.training.setup import PreparedRun

logger = logging.getLogger(__name__)


class Pretrainer(PreparedRun):
    """Trains a GPT-2-style model by a `PretrainConfig`; `callbacks` are transformers `TrainerCallback`s.

    `train()` prepares everything, runs to the last step, and returns the newest evaluation record.
    Raises UserError, before anything is written, for a run that cannot work.
    """

    def train(self) -> dict[str, Any]:
        with safe(), self.signals:
            self.setup()
            with closing(self.run), self.saver, closing(self.batches), self.saved_at_fault(), self.host.contact():
                self._train()
        if self.config.push_to_hub and self.run.writes:  # the other processes, and the hold on the folder, are gone
            push_trained(self.config, self.run.checkpoint(self.state.global_step))
        return self.evaluation

    def _train(self) -> None:
        if self.accelerator.is_main_process:
            print("\n".join(self.plan.lines()), flush=True)
        batch = self.next_batch() if self.state.global_step < self.max_steps else None
        self.start_run()  # nothing is written for a run whose text fails at once
        if self.evaluation_is_due:
            self.evaluate_or_stop()
        while self.state.global_step < self.max_steps and not self.control.should_training_stop:
            mine, whole = batch or self.next_batch()
            batch = None
            self.control = self.handler.on_step_begin(self.args, self.state, self.control)
            self.after_step(whole, self.take_step(mine.blocks, self.state.global_step + 1))
        if self.state.global_step < self.max_steps and self.accelerator.is_main_process:
            why = why_stopped(self.handler.callbacks)
            print(f"ended at step {self.state.global_step} of {self.max_steps}: {why}", flush=True)
        missing = self.config.eval_steps and self.evaluation_step != self.max_steps == self.state.global_step
        if missing:
            self.evaluate_or_stop()
        self.finish()
        if self.saver.failures:
            raise RunError(f"the checkpoint of step {self.state.global_step} could not be written; {self._way_on()}")

    def next_batch(self) -> tuple[StepBatch, StepBatch]:
        """The next step's blocks: this process's share, and the whole of all processes.

        Where the text of any process fails, or a signal reached it, all save what they have, and raise RunError.
        """
        mine: StepBatch | UserError | RunError | None
        try:
            with self.signals.waiting():
                mine = next(self.batches)
        except Interrupted:
            mine = self.signals.fault()
        except (UserError, RunError) as error:
            mine = error
        shares = self.host.gather(mine)
        if faults := {rank: share for rank, share in enumerate(shares) if isinstance(share, UserError | RunError)}:
            rank, fault = next(iter(faults.items()))
            if len(faults) < self.host.world:
                fault = told_by(fault, f"process {rank} of {self.host.world}")
            if not self.started:
                raise fault
            for event in (event for fault in faults.values() for event in fault.retries):
                self._record(event="stream_retry", **event)
            self.stop(fault)
        whole = side_by_side([share for share in shares if isinstance(share, StepBatch)])
        return shares[self.accelerator.process_index], whole

    @contextmanager
    def saved_at_fault(self) -> Iterator[None]:
        """An exception inside is recorded as the end of the run, after a checkpoint of the last finished step.

        What is a fault of its own to users becomes a RunError that says how to go on. Any other exception stays what it
        is: its `end_of_run` says the same, and names the file that holds its traceback.
        """
        try:
            yield
        except (Exception, SystemExit, Interrupted) as error:
            if self.ended or not self.started:
                raise
            given_up = self.guard.has_given_up or self.saver.failures >= self.saver.max_failures
            lost = [] if given_up else self._save_at_fault()
            fault: BaseException = error
            if isinstance(error, Interrupted):
                fault = self.signals.fault() or RunError("the main process was ended", 128 + signal.SIGTERM)
            cause = str(fault) if fault is not error else f"{type(error).__name__}: {error}"
            self._record(event="end", skipped_rows=dict(self.skipped_rows), fault=cause)
            if given_up or isinstance(error, SystemExit):
                raise
            everywhere = getattr(error, "everywhere", False)
            end = [*([] if everywhere else [f"ended after step {self.state.global_step}"]), *lost, self._way_on()]
            if broken := compiler_fault(error) if isinstance(error, Exception) else None:
                fault = RunError(broken)
            if isinstance(fault, UserError | RunError):
                problems = getattr(fault, "problems", [str(fault)])
                raise RunError("; ".join([*problems, *end]), getattr(fault, "exit_code", 1), everywhere) from error
            if file := self.run.keep_traceback(error, self.host.rank):
                end.append(f"traceback in {file}")
            vars(error).update(end_of_run="; ".join(end), traceback_file=file)
            raise

    def _save_at_fault(self) -> list[str]:
        """A checkpoint of the last finished step, by the main process alone and without callbacks; where there is none,
        why, in words.
        """
        step = self.state.global_step
        if not self.accelerator.is_main_process or step == 0:
            return []
        try:
            self._record_saved(self.saver.ended(wait=True))
            logs = self.guard.read(alone=True)
            if logs and self.control.should_log:
                self.mfu_callback.on_log(self.args, self.state, self.control, logs)
                self._record(**logs)
            self.record_lost_output()
            if step == self.saved_step and not self.saver.failures:
                return []
            if self.updating:
                return [f"step {step} is not saved, as the next one had begun to change the model"]
            if self.sharded:
                return [f"step {step} is not saved, as the processes share the model and only all of them can save it"]
            self._start_save(at_fault=True)
            outcome = self.saver.ended(wait=True)
            self._record_saved(outcome)
        except Exception as error:
            outcome = error
        return [f"step {step} is not saved ({first_line(outcome)})"] if isinstance(outcome, Exception) else []

    def stop(self, fault: Exception) -> NoReturn:
        """Save what there is, and raise RunError with the way to go on. To be called on all processes."""
        self.finish(fault=str(fault))
        message = f"{fault}; ended after step {self.state.global_step}; {self._way_on()}"
        raise RunError(message, getattr(fault, "exit_code", 1))

    def _way_on(self) -> str:
        saved_by_main = self.saved_step is not None and not self.run.writes  # perhaps in a folder not seen from here
        if self.run.checkpoints() or saved_by_main:
            return "continue with --resume_from_checkpoint latest"
        return "no checkpoint has been written"

    def take_step(self, blocks: np.ndarray, step: int) -> StepResult:
        """`training_step`; again from its beginning, in smaller micro-batches where memory runs out, or with a broken
        compiled file removed.
        """
        tensors = self.to_tensors(blocks)
        compiles = self.compile.enabled and self.state.global_step == self.begins_at  # for minutes, perhaps
        fix = "state a smaller --per_device_train_batch_size"
        while True:
            self.updating = self.sharded  # processes that share the model may stand anywhere in a step
            where = f"with micro-batches of {self.batch.micro_batch}"
            try:
                with out_of_memory_named(where, fix), self.signals.waiting() if compiles else nullcontext():
                    return self.training_step(*tensors, step=step)
            except MemoryRanOut:
                pass  # what the failed one holds is freed with its traceback
            except Exception as error:
                if self.host.world > 1 or not remove_broken_code(error):
                    raise
                self.optimizer.zero_grad()
                continue
            self.use_smaller_micro_batch(step)
            self.rehearse_all()

    def rehearse_all(self) -> None:
        """`rehearse`, until the micro-batch is one that fits."""
        while True:
            try:
                return self.rehearse()
            except MemoryRanOut:
                pass
            self.use_smaller_micro_batch(self.state.global_step + 1)

    def use_smaller_micro_batch(self, step: int) -> None:
        """The same steps in smaller micro-batches from here on. Raises RunError where there are none."""
        self.optimizer.zero_grad()
        release_memory(self.accelerator.device)
        before = self.batch
        smaller = before.halved()
        if smaller is None:
            raise RunError(
                f"out of memory in step {step} with micro-batches of one sequence; use a smaller model, or "
                "--gradient_checkpointing true"
            )
        self.batch = smaller
        cut = {"micro_batch": smaller.micro_batch, "accumulation": smaller.accumulation}
        self._record(event="oom_retry", for_step=step, micro_batch_before=before.micro_batch, **cut)
        logger.warning(
            "out of memory in step %d: it is done again, micro-batch %d x accumulation %d from here on",
            *(step, smaller.micro_batch, smaller.accumulation),
        )

    def start_run(self) -> None:
        """run.json, and the record that the run starts or goes on."""
        step = self.begins_at = self.state.global_step
        self.host.from_main(self.run.claim)
        self.facts = run_facts(self.run_id, self.plan, self.data.train.fingerprint)
        if not (self.resumed_from and self.run.run_json.exists()):
            self.run.start(self.facts)
        self.started = True
        if self.run.writes:
            checkpoint.go_on_from(self.run, self.resumed_from, step, self.config.save_total_limit)
        if self.resumed_from:
            changed = {"changed_settings": self.changed_settings, "changed_text": self.changed_text or None}
            self._record(event="resume", checkpoint=self.resumed_from.name, **changed)
        else:
            self._record(event="start")
        with self.signals.waiting():
            self.rehearse_all()
        self.control = self.handler.on_train_begin(self.args, self.state, self.control)

    def after_step(self, batch: StepBatch, result: StepResult) -> None:
        """Count the step, tell the callbacks, and log, evaluate and save when due."""
        state, config = self.state, self.config
        state.global_step = step = state.global_step + 1
        state.num_input_tokens_seen += self.batch.tokens_per_step
        state.epoch = step / self.steps_per_epoch
        self.position = batch.position
        self.skipped_rows.update(batch.skipped)
        self.run.record_text(step=step, batch_hash=batch_hash(batch.blocks), position=batch.position)
        self.updating = False
        self.guard.add(Step(step, self.learning_rate(step), batch), result)
        for event in batch.retries:
            self._record(event="stream_retry", **event)
        if step == self.max_steps:
            self.control.should_log = self.control.should_save = True
            self.control.should_evaluate = config.eval_steps > 0
        self.control = self.handler.on_step_end(self.args, state, self.control)
        self.agree()
        if self.control.should_log:
            self.log()
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save or self.save_is_due:
            self.save()
        self.record_lost_output()
        self.note_saved()  # late, as it takes what is due for done, and sets the clock of the steps anew
        self.agree()

    def agree(self) -> None:
        """What a callback of the user's wants on one process is done on all."""
        if self.callbacks and self.host.world > 1:
            for wanted in self.host.gather(vars(self.control)):
                for name, value in wanted.items():
                    setattr(self.control, name, value or getattr(self.control, name))

    def log(self) -> None:
        """The training record of the newest step; the only place where the host waits for the device."""
        if not (logs := self.guard.read()):
            return
        logs["memory_bytes"] = peak_memory_bytes(self.accelerator.device)
        try:
            self._report(logs)
        finally:  # whatever a callback does
            self._record(**logs)

    def _report(self, figures: dict[str, Any]) -> None:
        """Give callbacks and trackers `figures` as transformers' Trainer gives a log; what they add is in `figures`."""
        counters = {"num_input_tokens_seen": self.state.num_input_tokens_seen}
        logs = numbers({**figures, **counters, "wall_seconds": self.mfu_callback.total_seconds})
        record = {**figures, **counters, "step": self.state.global_step}
        self.state.log_history.append(record)
        try:
            self.control = self.handler.on_log(self.args, self.state, self.control, logs)
        finally:
            counted = ("step", "wall_seconds", *counters)
            figures |= {key: value for key, value in {**record, **logs}.items() if key not in counted}

    def evaluate(self) -> dict[str, Any] | None:
        """The evaluation record of the model as it is; None where a signal to any process broke it off."""
        self.guard.read()
        batch_size = self.config.per_device_eval_batch_size or self.batch.micro_batch
        of_tokens = partial(
            evaluate,
            self.model,
            accelerator=self.accelerator,
            sequence_length=self.config.sequence_length,
            batch_size=batch_size,
            attention=self.attention,
            stop=lambda: any(self.host.gather(self.signals.received is not None)),
        )
        fix = "state a smaller --per_device_eval_batch_size"
        with out_of_memory_named(f"in evaluation with batches of {batch_size}", fix):
            if (metrics := of_tokens(self.data.validation, scored_bytes=self.data.validation_bytes)) is None:
                return None
            if self.data.train_sample is not None:
                if (on_training := of_tokens(self.data.train_sample)) is None:
                    return None
                metrics |= {"train_eval_loss": on_training["eval_loss"]}
                metrics["eval_seconds"] += on_training["eval_seconds"]
        try:
            self._report(metrics)
            self.control = self.handler.on_evaluate(self.args, self.state, self.control, metrics)
        finally:  # whatever a callback does
            self.evaluation, self.evaluation_step = metrics, self.state.global_step
            if metrics["eval_loss"] < (math.inf if self.state.best_metric is None else self.state.best_metric):
                self.state.best_metric, self.state.best_global_step = metrics["eval_loss"], self.state.global_step
                self.control.should_save |= self.config.save_best
            self._record(**metrics)
        return metrics

    def evaluate_or_stop(self) -> None:
        """An evaluation that a signal broke off before, as the checkpoint says. Another signal stops the run."""
        if self.evaluate() is None:
            self.stop(next(filter(None, self.host.gather(self.signals.fault()))))

    def save(self, at_end: bool = False) -> None:
        """Start a checkpoint of the model as it is: a Hub model folder that is also the point to resume from.

        The state is copied at once and written beside training.
        """
        self.guard.read()
        # A model that gives no finite loss is not worth a checkpoint, nor the place of one.
        self.save_is_due = self.guard.skipped_in_a_row > 0 and not at_end
        if self.save_is_due:
            return
        self.note_saved(wait=True)
        self._start_save()
        self.mfu_callback.on_save(self.args, self.state, self.control)  # the copy is outside the clock

    def _start_save(self, at_fault: bool = False) -> None:
        tensors = model_state.snapshot(self.raw_model, self.raw_optimizer)
        if self.accelerator.is_main_process:
            trainer, fingerprint = self._trainer_state(), self.data.train.fingerprint
            data = {"fingerprint": fingerprint, "position": self.position}
            try:
                card = model_card(self.facts, fingerprint, trainer, tokenizer=self.data.tokenizer)
            except Exception as error:
                if not at_fault:
                    raise
                card = f"No model card could be made ({first_line(error)}).\n"
            files = partial(model_state.write_files, self.raw_model, self.data.tokenizer, tensors, trainer, data, card)
            self.saver.start(self.state.global_step, files, rotate=self.guard.skipped_in_a_row == 0)
        self.saved_step = self.state.global_step

    def note_saved(self, wait: bool = False) -> None:
        """Record a checkpoint that has been written since, or could not be."""
        outcome = self.saver.ended(wait)
        self._record_saved(outcome)
        if isinstance(outcome, Path):
            self.control = self.handler.on_save(self.args, self.state, self.control)
        elif outcome is not None:
            logger.warning("a checkpoint could not be written (%s); training goes on to the next one", outcome)

    def _record_saved(self, outcome: Path | Exception | None) -> None:
        if isinstance(outcome, Path):
            self._record(event="save", checkpoint=outcome.name, skipped_rows=dict(self.skipped_rows))
        elif outcome is not None:
            self._record(event="save_failed", reason=str(outcome))

    def record_lost_output(self) -> None:
        """Record, once, that standard output or standard error cannot be written; training goes on without it."""
        for stream in output.lost.keys() - self.lost_output:
            self.lost_output.add(stream)
            self._record(event="output_lost", stream=stream, reason=output.lost[stream])

    def finish(self, fault: str | None = None) -> None:
        """Leave the run at its end, or where it had to stop, with everything recorded and saved."""
        if self.state.global_step not in (0, self.saved_step):
            self.save(at_end=True)
        self.note_saved(wait=True)
        self.accelerator.wait_for_everyone()
        self.control = self.handler.on_train_end(self.args, self.state, self.control)
        self.record_lost_output()
        self._record(event="end", skipped_rows=dict(self.skipped_rows), fault=fault)
        self.ended = True
        if self.skipped_rows and self.accelerator.is_main_process:
            print("\n".join(told_counts(self.skipped_rows)), flush=True)
        self.host.leave()
        self.accelerator.end_training()

    def _record(self, **values: Any) -> None:
        counted = {
            "step": self.state.global_step,
            "num_input_tokens_seen": self.state.num_input_tokens_seen,
            "wall_seconds": self.mfu_callback.total_seconds,
        }
        self.run.record(**{**counted, **values})
