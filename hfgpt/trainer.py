"""`Pretrainer`: the training loop on Accelerate. Its step is in hfgpt/step.py."""

from __future__ import annotations

import logging
import math
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from hfgpt import checkpoint, model_state
from hfgpt.callbacks import (
    CallbackArguments,
    MFUCallback,
    PerplexityCallback,
    SampleCallback,
    callback_handler,
    callback_states,
    restore_callbacks,
    wanted_callbacks,
)
from hfgpt.config import AUTO, Batch, PretrainConfig
from hfgpt.data import TextData, prepare_again, prepare_data, told_counts
from hfgpt.data.position import resumed_position
from hfgpt.data.stream import StepBatch, batch_hash, iterate, named_documents, side_by_side
from hfgpt.device import choose_compile, device_name, memory_bytes, peak_memory_bytes, start_accelerator
from hfgpt.distributed import HostGroup, take_sharding
from hfgpt.errors import RunError, UserError, told_by
from hfgpt.evaluation import evaluate
from hfgpt.guard import Step, StepGuard, StepResult
from hfgpt.hub import check_push, push_trained
from hfgpt.memory import training_memory
from hfgpt.micro_batch import MemoryRanOut, fastest_that_fits, release_memory
from hfgpt.model_card import model_card
from hfgpt.optim import LearningRate
from hfgpt.plan import Plan, check_memory, run_facts, setting_of
from hfgpt.run_folder import RunFolder
from hfgpt.signals import Interrupted, StopSignals
from hfgpt.step import TrainingStep
from hfgpt.training_state import changed_settings, read_state
from hfgpt.weights import initial_weights, settled

logger = logging.getLogger(__name__)


class Pretrainer(TrainingStep):
    """Trains a GPT-2-style model by a `PretrainConfig`; `callbacks` are transformers `TrainerCallback`s.

    `train()` prepares everything, runs to the last step, and returns the newest evaluation record.
    Raises UserError, before anything is written, for a run that cannot work.
    """

    def __init__(self, config: PretrainConfig, callbacks: Sequence[TrainerCallback] = ()) -> None:
        self.config = config
        self.callbacks = callbacks
        self.state = TrainerState(logging_steps=config.logging_steps, save_steps=config.save_steps)
        self.state.eval_steps = config.eval_steps
        self.signals = StopSignals()
        self.control = TrainerControl()
        self.started = self.ended = self.save_is_due = False

    def train(self) -> dict[str, Any]:
        with self.signals:
            self.setup()
            with closing(self.run), self.saver, closing(self.batches), self.end_told(), self.host.contact():
                self._train()
        if self.config.push_to_hub and self.run.writes:  # the other processes, and the hold on the folder, are gone
            push_trained(self.config, self.run.checkpoint(self.state.global_step))
        return self.evaluation

    def _train(self) -> None:
        if self.accelerator.is_main_process:
            print("\n".join(self.plan.lines()), flush=True)
        batch = self.next_batch() if self.state.global_step < self.max_steps else None
        self.start_run()  # nothing is written for a run whose text fails at once
        while self.state.global_step < self.max_steps and not self.control.should_training_stop:
            mine, whole = batch or self.next_batch()
            batch = None
            self.control = self.handler.on_step_begin(self.args, self.state, self.control)
            self.after_step(whole, self.take_step(mine.blocks, self.state.global_step + 1))
        if self.state.global_step < self.max_steps and self.accelerator.is_main_process:
            print(f"ended at step {self.state.global_step} of {self.max_steps}, as a callback asked for it", flush=True)
        missing = self.config.eval_steps and self.evaluation_step != self.max_steps == self.state.global_step
        if missing and self.evaluate() is None:  # a signal broke it off before, and the checkpoint says so
            self.stop(next(filter(None, self.host.gather(self.signals.fault()))))
        self.finish()

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
    def end_told(self) -> Iterator[None]:
        """An exception inside is recorded as the end of the run."""
        try:
            yield
        except Exception as error:
            if self.started and not self.ended:
                self._record(
                    event="end", skipped_rows=dict(self.skipped_rows), fault=f"{type(error).__name__}: {error}"
                )
            if isinstance(error, torch.OutOfMemoryError):
                size = self.batch.micro_batch
                told = f"out of memory with micro-batches of {size} ({str(error).splitlines()[0]})"
                raise RunError(f"{told}; state a smaller --per_device_train_batch_size; {self._way_on()}") from error
            if isinstance(error, RunError) and error.everywhere:
                raise RunError(f"{error}; {self._way_on()}", everywhere=True) from error
            raise

    def stop(self, fault: Exception) -> NoReturn:
        """Save what there is, and raise RunError with the way to go on. To be called on all processes."""
        self.finish(fault=str(fault))
        message = f"{fault}; ended after step {self.state.global_step}; {self._way_on()}"
        raise RunError(message, getattr(fault, "exit_code", 1))

    def _way_on(self) -> str:
        if self.saved_step is None:
            return "no checkpoint has been written"
        return "continue with --resume_from_checkpoint latest"

    def take_step(self, blocks: np.ndarray, step: int) -> StepResult:
        """`training_step`; again from its beginning, in smaller micro-batches, where memory runs out."""
        tensors = self.to_tensors(blocks)
        while True:
            try:
                return self.training_step(*tensors, step=step)
            except MemoryRanOut:
                pass  # what the failed one holds is freed with its traceback
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

    def setup(self) -> None:
        """Everything before the first step that writes nothing: device, text, model, optimizer, resume."""
        timeout = self.config.ddp_timeout
        try:
            with self.signals.waiting():
                self.host = HostGroup(timeout)
                if self.host.rank:
                    logging.getLogger("hfgpt").setLevel(logging.ERROR)  # what it would say, the main one says
                self.sharded = take_sharding()
                with self.host.contact():
                    self.host.meet()
                    self.accelerator, self.precision = start_accelerator(self.config.mixed_precision, timeout)
                    self.host.join()
                    self._prepare()
        except Interrupted as error:
            fault = self.signals.fault() or RunError("the main process was told to end", 128 + signal.SIGTERM)
            cause = f"{error}; ended by " if str(error) else ""
            raise RunError(f"{cause}{fault} before the first step", fault.exit_code) from error

    def _prepare(self) -> None:
        config, accelerator, device = self.config, self.accelerator, self.accelerator.device
        self.state.is_world_process_zero = accelerator.is_main_process
        self.state.is_local_process_zero = accelerator.is_local_main_process
        self.run = RunFolder(config.output_dir, writes=accelerator.is_main_process)
        self.host.from_main(self.run.check_writable)
        self.host.from_main(self.run.check_free)
        if config.push_to_hub:
            self.host.from_main(partial(check_push, config))
        self.resumed_from = self.host.from_main(
            partial(checkpoint.find_checkpoint, self.run, config.resume_from_checkpoint)
        )
        if self.sharded and self.precision.name == "fp16":
            raise UserError("mixed_precision fp16: its loss scaling does not serve FSDP2; use bf16, or DDP")
        self.config = config = self.host.from_main(partial(settled, config, self.resumed_from))
        if self.sharded and config.per_device_train_batch_size == AUTO:
            raise UserError(
                "per_device_train_batch_size=auto: processes that share the model cannot try what may not fit one of "
                "them; state a number"
            )
        self.batch = config.batch(accelerator.num_processes)
        shares = accelerator.num_processes if self.sharded else 1
        check_memory(config, self.batch, self.precision.name, memory_bytes(device), shares, device.type)
        self.data = self.host.from_main(self._prepare_data)
        epoch_blocks = getattr(self.data.train, "blocks_per_epoch", None)
        self.max_steps = self.state.max_steps = config.total_steps(self.batch, epoch_blocks)
        self.compile = choose_compile(config.torch_compile, device, self.max_steps * self.batch.accumulation)

        tokenizer = self.data.tokenizer
        weights = {}  # of the main process alone: it hands them to the others
        if config.init_from and not self.resumed_from:
            weights = initial_weights(config.init_from, tokenizer, self.host)
        model = self.build_model(tokenizer, weights)
        self.learning_rate = LearningRate(config, self.max_steps)
        position, wall_seconds = None, 0.0
        self.evaluation: dict[str, Any] = {}  # the newest, of step `evaluation_step`
        self.evaluation_step = 0
        self.callback_states: dict[str, dict[str, Any]] = {}  # of a run that goes on
        self.skipped_rows: Counter[str] = Counter(self.data.skipped)
        self.run_id = uuid.uuid4().hex
        if self.resumed_from:
            position, wall_seconds = self._restore(self.resumed_from)
        self.wrap_model()
        if config.per_device_train_batch_size == AUTO:

            def needed(cut: Batch) -> int:
                setting = setting_of(config, cut, self.precision.name, shares, device.type)
                return training_memory(model.config, replace(setting, compiled=self.compile.enabled)).peak

            self.batch, said = fastest_that_fits(self.batch, self.trial, needed, self.host, device, self.raw_optimizer)
            self.data.description.append(said)
            self.optimizer.zero_grad()
        self.batches = iterate(
            self.data.train,
            position,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            num_workers=config.dataloader_num_workers,
        )
        self.position = position or self.data.train.start
        choices = (self.precision, self.compile, device_name(device))
        target = str(self.run.checkpoint(self.max_steps))
        setting = setting_of(config, self.batch, self.precision.name, shares, device.type)
        self.plan = Plan(
            *(config, model.config, self.batch, self.max_steps, *choices, self.data.description, target),
            setting=replace(setting, compiled=self.compile.enabled),
        )
        self.mfu_callback = MFUCallback(
            tokens_per_step=self.batch.tokens_per_step,
            sequence_length=config.sequence_length,
            precision=self.precision.name,
            peak_tflops=config.mfu_peak_tflops,
            warmup_steps=1 if self.compile.enabled else 0,
        )
        self.mfu_callback.total_seconds = wall_seconds
        self.args = CallbackArguments(config, accelerator.num_processes)
        callbacks = [self.mfu_callback, PerplexityCallback(), *wanted_callbacks(config), *self.callbacks]
        for callback in callbacks:
            if isinstance(callback, SampleCallback):
                callback.around = self.aside
        restore_callbacks(callbacks, self.callback_states)
        self.handler = callback_handler(self.args, callbacks, model, tokenizer, self.optimizer)
        self.control = self.handler.on_init_end(self.args, self.state, self.control)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        self.guard = StepGuard(self.run, self.host, partial(named_documents, self.data.train, decode))
        self.saver = checkpoint.Saver(self.run, config.save_total_limit, config.max_failed_saves)
        self.saved_step = self.state.global_step if self.resumed_from else None

    def start_run(self) -> None:
        """run.json, and the record that the run starts or goes on."""
        step = self.state.global_step
        self.host.from_main(self.run.claim)
        self.started = True
        self.facts = run_facts(self.run_id, self.plan, self.data.train.fingerprint)
        if not (self.resumed_from and self.run.run_json.exists()):
            self.run.start(self.facts)
        if self.run.writes:
            checkpoint.go_on_from(self.run, self.resumed_from, step, self.config.save_total_limit)
        if self.resumed_from:
            changed = {"changed_settings": self.changed_settings, "changed_text": self.changed_text or None}
            self._record(event="resume", checkpoint=self.resumed_from.name, **changed)
        else:
            self._record(event="start")
        self.rehearse_all()
        self.control = self.handler.on_train_begin(self.args, self.state, self.control)

    def after_step(self, batch: StepBatch, result: StepResult) -> None:
        """Count the step, tell the callbacks, and log, evaluate and save when due."""
        state, config = self.state, self.config
        state.global_step = step = state.global_step + 1
        state.num_input_tokens_seen += self.batch.tokens_per_step
        self.position = batch.position
        self.skipped_rows.update(batch.skipped)
        self.guard.add(Step(step, self.learning_rate(step), result, batch))
        self.run.record_text(step=step, batch_hash=batch_hash(batch.blocks), position=batch.position)
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
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)
        self._record(**logs)

    def evaluate(self) -> dict[str, Any] | None:
        """The evaluation record of the model as it is; None where a signal to any process broke it off."""
        self.guard.read()
        of_tokens = partial(
            evaluate,
            self.model,
            accelerator=self.accelerator,
            sequence_length=self.config.sequence_length,
            batch_size=self.config.per_device_eval_batch_size or self.batch.micro_batch,
            token_bytes=self.data.token_bytes,
            attention=self.attention,
            stop=lambda: any(self.host.gather(self.signals.received is not None)),
        )
        if (metrics := of_tokens(self.data.validation)) is None:
            return None
        if self.data.train_sample is not None:
            if (on_training := of_tokens(self.data.train_sample)) is None:
                return None
            metrics |= {"train_eval_loss": on_training["eval_loss"]}
            metrics["eval_seconds"] += on_training["eval_seconds"]
        self.control = self.handler.on_log(self.args, self.state, self.control, metrics)
        self.control = self.handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.evaluation, self.evaluation_step = metrics, self.state.global_step
        if metrics["eval_loss"] < (math.inf if self.state.best_metric is None else self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = metrics["eval_loss"], self.state.global_step
            self.control.should_save |= self.config.save_best
        self._record(**metrics)
        return metrics

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what a callback does with the model: in training's precision, outside its clock."""
        with self.mfu_callback.stopped(), self.accelerator.autocast():
            yield

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
        step = self.saved_step = self.state.global_step
        tensors = model_state.snapshot(self.raw_model, self.raw_optimizer)
        if self.accelerator.is_main_process:
            trainer, fingerprint = self._trainer_state(), self.data.train.fingerprint
            data = {"fingerprint": fingerprint, "position": self.position}
            card = model_card(self.facts, fingerprint, trainer)
            files = partial(model_state.write_files, self.raw_model, self.data.tokenizer, tensors, trainer, data, card)
            self.saver.start(step, files, rotate=self.guard.skipped_in_a_row == 0)
        self.mfu_callback.on_save(self.args, self.state, self.control)  # the copy is outside the clock

    def note_saved(self, wait: bool = False) -> None:
        """Record a checkpoint that has been written since, or could not be."""
        if (outcome := self.saver.ended(wait)) is None:
            return
        if isinstance(outcome, Path):
            self._record(event="save", checkpoint=outcome.name, skipped_rows=dict(self.skipped_rows))
            self.control = self.handler.on_save(self.args, self.state, self.control)
        else:
            self._record(event="save_failed", reason=str(outcome))
            logger.warning("a checkpoint could not be written (%s); training goes on to the next one", outcome)

    def finish(self, fault: str | None = None) -> None:
        """Leave the run at its end, or where it had to stop, with everything recorded and saved."""
        if self.state.global_step not in (0, self.saved_step):
            self.save(at_end=True)
        self.note_saved(wait=True)
        self.accelerator.wait_for_everyone()
        self.control = self.handler.on_train_end(self.args, self.state, self.control)
        self._record(event="end", skipped_rows=dict(self.skipped_rows), fault=fault)
        self.ended = True
        if self.skipped_rows and self.accelerator.is_main_process:
            print(f"rows of text left out: {told_counts(self.skipped_rows)}", flush=True)
        if self.accelerator.num_processes > 1:
            # gloo's thread needs the interpreter once more to let go of its last work. A group that is freed in that
            # moment waits for the thread with the interpreter in hand, forever.
            time.sleep(0.2)
        self.accelerator.end_training()

    def _prepare_data(self) -> TextData:
        if (folder := self.resumed_from) is None:
            return prepare_data(self.config, self.batch.blocks_per_step)
        saved, data = (read_state(folder, name) for name in ("trainer_state", "data_state"))
        return prepare_again(self.config, self.batch.blocks_per_step, saved["config"], data["fingerprint"], folder)

    def _restore(self, folder: Path) -> tuple[dict[str, Any], float]:
        """Weights, optimizer, counters of a checkpoint; returns the text position and the seconds trained so far."""
        trainer, data = self.host.from_main(
            lambda: [read_state(folder, name) for name in ("trainer_state", "data_state")]
        )
        position, self.changed_text = resumed_position(
            self.data.train, data["fingerprint"], data["position"], self.config.accept_changed_text
        )
        if (then := trainer["config"].get("optim")) != self.config.optim:
            raise UserError(f"optim={self.config.optim}: {folder} was saved with optim={then}; restore that")
        model_state.load_model_and_optimizer(folder, self.raw_model, self.raw_optimizer, self.host)
        if self.accelerator.scaler is not None and trainer["gradient_scaler"]:
            self.accelerator.scaler.load_state_dict(trainer["gradient_scaler"])
        self.state.global_step = trainer["step"]
        self.state.num_input_tokens_seen = trainer["num_input_tokens_seen"]
        self.evaluation, self.evaluation_step = trainer["evaluation"] or {}, trainer["evaluation_step"]
        if self.evaluation_step != trainer["step"] and (
            made_up := self.host.from_main(partial(self.run.evaluation, trainer["step"]))
        ):
            self.evaluation, self.evaluation_step = made_up, trainer["step"]
        self.state.best_metric, self.state.best_global_step = trainer.get("best_metric"), trainer.get("best_step")
        self.callback_states = trainer.get("callbacks", {})
        self.run_id, self.skipped_rows = trainer["run_id"], Counter(trainer["skipped_rows"])
        asked = self.config.per_device_train_batch_size
        for cut in self.batch.cuts() if trainer["config"]["per_device_train_batch_size"] == asked else []:
            if cut.micro_batch == trainer.get("micro_batch") and cut.micro_batch < self.batch.micro_batch:
                logger.warning("micro-batch %d again: memory ran out with more in this run", cut.micro_batch)
                self.batch = cut
        if self.max_steps < trainer["step"]:
            raise UserError(f"max_steps={self.max_steps}: {folder} is at step {trainer['step']}; state more steps")
        self.changed_settings = changed_settings(trainer["config"], self.config.to_dict())
        for key, change in self.changed_settings.items():
            logger.warning("%s is %s from here on; it was %s", key, change["to"], change["from"])
        self.learning_rate = LearningRate(self.config, **trainer["schedule"])
        if said := self.learning_rate.go_on(trainer["step"], self.max_steps, self.config.lr_schedule_on_resume):
            logger.warning(said)
        return position, trainer["wall_seconds"]

    def _trainer_state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "run_id": self.run_id,
            "step": self.state.global_step,
            "num_input_tokens_seen": self.state.num_input_tokens_seen,
            "wall_seconds": self.mfu_callback.total_seconds,
            "schedule": self.learning_rate.state(),
            "random_numbers": "seeded by (seed, step, process) at every step",
            "config": self.config.to_dict(),
            "micro_batch": self.batch.micro_batch,
            "gradient_scaler": scaler.state_dict() if scaler is not None else None,
            "skipped_rows": dict(self.skipped_rows),
            "evaluation": self.evaluation if math.isfinite(self.evaluation.get("eval_perplexity", math.nan)) else None,
            "evaluation_step": self.evaluation_step,
            "best_metric": self.state.best_metric,
            "best_step": self.state.best_global_step,
            "callbacks": callback_states(self.handler.callbacks),
        }

    def _record(self, **values: Any) -> None:
        self.run.record(
            step=self.state.global_step,
            num_input_tokens_seen=self.state.num_input_tokens_seen,
            wall_seconds=self.mfu_callback.total_seconds,
            **values,
        )
