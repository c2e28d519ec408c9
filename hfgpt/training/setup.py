"""Everything before the first step: device, text, model, optimizer, and where a run that goes on stood."""

from __future__ import annotations

import logging
import math
import signal
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from hfgpt.checkpointing import checkpoint
from hfgpt.checkpointing import state as model_state
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.checkpointing.training_state import changed_settings, read_state
from hfgpt.config import AUTO, Batch, PretrainConfig
from hfgpt.data import TextData, prepare_again, prepare_data
from hfgpt.data.position import resumed_position
from hfgpt.data.stream import iterate, named_documents
from hfgpt.distributed.device import choose_compile, device_name, memory_bytes, start_accelerator
from hfgpt.distributed.ranks import HostGroup, take_sharding
from hfgpt.distributed.stop_signals import Interrupted, StopSignals
from hfgpt.errors import RunError, UserError
from hfgpt.hub.push import check_push
from hfgpt.model.memory import training_memory
from hfgpt.model.pretrained import initial_weights, settled
from hfgpt.training.batch_size import fastest_that_fits
from hfgpt.training.callbacks import (
    MFUCallback,
    PerplexityCallback,
    SampleCallback,
    callback_arguments,
    callback_handler,
    callback_states,
    restore_callbacks,
    trackers,
    wanted_callbacks,
)
from hfgpt.training.non_finite import StepGuard
from hfgpt.training.optimizer import LearningRate
from hfgpt.training.plan import Plan, check_memory, setting_of
from hfgpt.training.step import TrainingStep

logger = logging.getLogger(__name__)


class PreparedRun(TrainingStep):
    """A run by a `PretrainConfig`, ready for its next step after `setup`, which writes nothing."""

    def __init__(self, config: PretrainConfig, callbacks: Sequence[TrainerCallback] = ()) -> None:
        self.config = config
        self.callbacks = callbacks
        self.state = TrainerState(logging_steps=config.logging_steps, save_steps=config.save_steps)
        self.state.eval_steps = config.eval_steps
        self.signals = StopSignals()
        self.control = TrainerControl()
        self.started = self.ended = self.save_is_due = False
        self.lost_output: set[str] = set()  # what is recorded of it

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
        reporting = trackers(config.report_to)
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
        self.data = self._find_text()
        config = self.config
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
        self.evaluation_is_due = False  # a signal broke it off
        self.callback_states: dict[str, Any] = {}  # of a run that goes on
        self.skipped_rows: Counter[str] = Counter(self.data.skipped)
        self.run_id = uuid.uuid4().hex
        self.choices: dict[str, Any] = {
            "precision": self.precision.name,
            "compiled": self.compile.enabled,
            "processes": accelerator.num_processes,
            "device": device_name(device),
        }
        if device.type == "cpu":  # each number of threads adds up in another order
            self.choices["threads"] = torch.get_num_threads()
        self.micro_batch_is_known = config.per_device_train_batch_size != AUTO
        if self.resumed_from:
            position, wall_seconds = self._restore(self.resumed_from)
        self.wrap_model()
        if not self.micro_batch_is_known:

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
        compiled, resumed_from = self.compile.enabled, self.resumed_from
        self.args = callback_arguments(config, self.batch, self.max_steps, self.precision.name, compiled, resumed_from)
        self.steps_per_epoch = epoch_blocks / self.batch.blocks_per_step if epoch_blocks else self.max_steps
        callbacks = [self.mfu_callback, PerplexityCallback(), *wanted_callbacks(config), *self.callbacks, *reporting]
        for callback in callbacks:
            if isinstance(callback, SampleCallback):
                callback.around = self.aside
        restore_callbacks(callbacks, self.callback_states)
        self.handler = callback_handler(callbacks, model, tokenizer, self.optimizer)
        self.control = self.handler.on_init_end(self.args, self.state, self.control)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        self.guard = StepGuard(self.run, self.host, partial(named_documents, self.data.train, decode))
        self.saver = checkpoint.Saver(self.run, config.save_total_limit, config.max_failed_saves)
        self.saved_step = self.state.global_step if self.resumed_from else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what a callback does with the model: in training's precision, outside its clock."""
        with self.mfu_callback.stopped(), self.accelerator.autocast():
            yield

    def _find_text(self) -> TextData:
        """The text; a recipe's settings that do not go with the one that is stated give way to it."""
        while True:
            try:
                return self.host.from_main(self._prepare_data)
            except UserError as error:
                self.config = self.config.without(error)

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
        due = trainer.get("evaluation_is_due", False) and self.evaluation_step != trainer["step"]
        self.evaluation_is_due = bool(due and self.config.eval_steps)
        self.state.best_metric, self.state.best_global_step = trainer.get("best_metric"), trainer.get("best_step")
        self.callback_states = trainer.get("callbacks", {})
        self.run_id, self.skipped_rows = trainer["run_id"], Counter(trainer["skipped_rows"])
        self._restore_micro_batch(trainer)
        if self.max_steps < trainer["step"]:
            raise UserError(f"max_steps={self.max_steps}: {folder} is at step {trainer['step']}; state more steps")
        self.changed_settings = changed_settings(trainer["config"], self.config.to_dict())
        now = {key: self.choices.get(key) for key in trainer.get("choices", {})}
        self.changed_settings |= changed_settings(trainer.get("choices", {}), now)
        for key, change in self.changed_settings.items():
            logger.warning("%s is %s from here on; it was %s", key, change["to"], change["from"])
        self.learning_rate = LearningRate(self.config, **trainer["schedule"])
        if said := self.learning_rate.go_on(trainer["step"], self.max_steps, self.config.lr_schedule_on_resume):
            logger.warning(said)
        return position, trainer["wall_seconds"]

    def _restore_micro_batch(self, trainer: dict[str, Any]) -> None:
        """The micro-batch that the run had in the end: as found by measurement, or smaller where memory ran out."""
        config, then = self.config, trainer["config"]
        if then["per_device_train_batch_size"] != config.per_device_train_batch_size:
            return
        cuts = {cut.micro_batch: cut for cut in self.batch.cuts()}
        recorded = cuts.get(trainer.get("micro_batch", 0))
        if config.per_device_train_batch_size == AUTO:
            step = [(run.get("tokens_per_step"), run.get("sequence_length")) for run in (then, config.to_dict())]
            processes = trainer.get("choices", {}).get("processes", self.batch.processes)
            if recorded and step[0] == step[1] and processes == self.batch.processes:
                self.micro_batch_is_known, self.batch = True, recorded
                self.data.description.append(f"micro-batch: {recorded.micro_batch}, as in this run before")
        elif recorded and recorded.micro_batch < self.batch.micro_batch:
            logger.warning("micro-batch %d again: memory ran out with more in this run", recorded.micro_batch)
            self.batch = recorded

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
            "choices": self.choices,
            "micro_batch": self.batch.micro_batch,
            "gradient_scaler": scaler.state_dict() if scaler is not None else None,
            "skipped_rows": dict(self.skipped_rows),
            "evaluation": self.evaluation if math.isfinite(self.evaluation.get("eval_perplexity", math.nan)) else None,
            "evaluation_step": self.evaluation_step,
            "evaluation_is_due": self.control.should_evaluate,
            "best_metric": self.state.best_metric,
            "best_step": self.state.best_global_step,
            "callbacks": callback_states(self.handler.callbacks),
        }
