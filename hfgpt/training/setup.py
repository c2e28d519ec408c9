"""Everything before the first step: `prepare(config) -> TrainingRun`. Nothing is written here."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback

from hfgpt.checkpointing.checkpoint import find_checkpoint
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.checkpointing.saver import Saver
from hfgpt.checkpointing.training_state import read_state
from hfgpt.config import AUTO, Batch, PretrainConfig
from hfgpt.data import TextData, prepare_data, prepare_data_of_run
from hfgpt.data.loader import iterate
from hfgpt.data.stream import StepBatch
from hfgpt.distributed.compiler import choose_compile
from hfgpt.distributed.device import Precision, device_name, memory_bytes, start_accelerator
from hfgpt.distributed.fsdp2 import shared_model, take_sharding
from hfgpt.distributed.ranks import HostGroup
from hfgpt.distributed.stop_signals import Interrupted, StopSignals
from hfgpt.errors import RunError, UserError
from hfgpt.hub.push import check_push
from hfgpt.model.memory import Setting, training_memory
from hfgpt.model.modeling_gpt2 import HEAD_CHUNK_SIZE, document_attention, new_model
from hfgpt.model.pretrained import initial_weights, settled
from hfgpt.training.batch_size import fastest_that_fits, find_recorded_batch
from hfgpt.training.callbacks import Callbacks, callback_arguments, trackers
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.non_finite import NonFiniteGuard
from hfgpt.training.optimizer import build_optimizer
from hfgpt.training.plan import Plan, check_memory, run_facts, setting_of
from hfgpt.training.progress import Progress
from hfgpt.training.resume import Resumed, resume
from hfgpt.training.step import TrainStep


@dataclass(frozen=True)
class Machine:
    """The processes of a run, and what they compute on."""

    ranks: HostGroup
    accelerator: Accelerator
    precision: Precision
    is_sharded: bool  # the processes share parameters and optimizer state (FSDP2)

    def memory_setting(self, config: PretrainConfig, batch: Batch, compiled: bool = False) -> Setting:
        shares = self.ranks.world if self.is_sharded else 1
        setting = setting_of(config, batch, self.precision.name, shares, self.accelerator.device.type)
        return replace(setting, compiled=compiled)


@dataclass
class TrainingRun:
    """All parts of a run, complete before its first step."""

    config: PretrainConfig
    plan: Plan  # what the settings came to, and why
    machine: Machine
    signals: StopSignals
    folder: RunFolder
    resumed: Resumed | None
    data: TextData
    batches: Generator[StepBatch, None, None]
    position: dict[str, Any]  # in the text, of all processes, after the last finished step
    step: TrainStep
    progress: Progress
    callbacks: Callbacks
    non_finite: NonFiniteGuard
    saver: Saver
    facts: dict[str, Any]  # what run.json holds
    has_started: bool = False  # the folder is claimed, and records are written
    has_ended: bool = False
    lost_output: set[str] = field(default_factory=set)  # streams whose loss is recorded

    @property
    def is_main(self) -> bool:
        return self.machine.ranks.rank == 0

    @property
    def is_complete(self) -> bool:
        return self.progress.step >= self.plan.max_steps

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl."""
        self.progress.wall_seconds = self.callbacks.mfu.total_seconds
        counters = {key: getattr(self.progress, key) for key in ("step", "num_input_tokens_seen", "wall_seconds")}
        self.folder.record(**{**counters, **values})


def prepare(config: PretrainConfig, callbacks: Sequence[TrainerCallback], signals: StopSignals) -> TrainingRun:
    """A run that is ready for its next step: device, text, model, optimizer, and where a resumed one stood.

    To be called on all processes. Raises UserError, with nothing written, for a run that cannot work.
    """
    with _ended_by_signals(signals):
        ranks = HostGroup(config.ddp_timeout)
        if ranks.rank:
            logging.getLogger("hfgpt").setLevel(logging.ERROR)  # the main process speaks for all
        is_sharded = take_sharding()
        with ranks.contact():
            ranks.meet()
            accelerator, precision = start_accelerator(config.mixed_precision, config.ddp_timeout)
            ranks.join()
            return _prepare(config, callbacks, signals, Machine(ranks, accelerator, precision, is_sharded))


@contextmanager
def _ended_by_signals(signals: StopSignals) -> Iterator[None]:
    """A signal inside ends the run at once, with the exit code of that signal."""
    try:
        with signals.waiting():
            yield
    except Interrupted as error:
        fault = signals.fault() or RunError("the main process was told to end", 128 + signal.SIGTERM)
        cause = f"{error}; ended by " if str(error) else ""
        raise RunError(f"{cause}{fault} before the first step", fault.exit_code) from error


def _prepare(
    config: PretrainConfig, own_callbacks: Sequence[TrainerCallback], signals: StopSignals, machine: Machine
) -> TrainingRun:
    ranks, accelerator, device = machine.ranks, machine.accelerator, machine.accelerator.device
    folder = RunFolder(config.output_dir, writes=ranks.rank == 0)
    reporting = trackers(config.report_to)
    resume_from = ranks.from_main(partial(_check_folder, config, folder))
    config = ranks.from_main(partial(settled, config, resume_from))
    batch = config.batch(ranks.world)
    _check_sharding(config, machine)
    check_memory(config, batch, machine.memory_setting(config, batch), memory_bytes(device))
    config, data = _open_text(config, batch, resume_from, ranks)
    epoch_blocks = getattr(data.train, "blocks_per_epoch", None)
    max_steps = config.total_steps(batch, epoch_blocks)
    compiled = choose_compile(config.torch_compile, device, max_steps * batch.accumulation)

    weights: dict[str, Tensor] = {}  # of the main process alone: it hands them to the others
    if config.init_from and not resume_from:
        weights = initial_weights(config.init_from, data.tokenizer, ranks)
    model = build_model(config, data.tokenizer, machine, compiled.enabled, weights)
    optimizer = build_optimizer(model, config)
    choices = (machine.precision, compiled, device_name(device))
    plan = Plan(
        *(config, model.config, batch, max_steps, *choices, data.description, str(folder.checkpoint(max_steps))),
        setting=machine.memory_setting(config, batch, compiled.enabled),
    )
    progress, position, resumed = Progress(skipped_rows=data.skipped.copy()), data.train.start, None
    learning_rate, is_measured = LearningRate(config, max_steps), config.per_device_train_batch_size == AUTO
    if resume_from:
        resumed = resume(resume_from, folder, plan, data, ranks)
        resumed.load(model, optimizer, machine.accelerator.scaler, ranks)
        progress, position, learning_rate = resumed.progress, resumed.position, resumed.learning_rate
        if recorded := find_recorded_batch(config, batch, resumed.trainer_state):
            (batch, line), is_measured = recorded, False
            data.description.append(line)
    step = TrainStep(
        *(model, optimizer, batch),
        accelerator=accelerator,
        ranks=ranks,
        learning_rate=learning_rate,
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        attention=attention_arguments(config, model, data.tokenizer, compiled.enabled),
    )
    if is_measured:

        def needed_bytes(cut: Batch) -> int:
            return training_memory(model.config, machine.memory_setting(config, cut, compiled.enabled)).peak

        step.batch, line = fastest_that_fits(step, needed_bytes)
        data.description.append(line)
    plan = replace(plan, batch=step.batch, setting=machine.memory_setting(config, step.batch, compiled.enabled))
    args = callback_arguments(config, step.batch, max_steps, machine.precision.name, compiled.enabled, resume_from)
    decode = partial(data.tokenizer.decode, skip_special_tokens=True)
    return TrainingRun(
        config=config,
        plan=plan,
        machine=machine,
        signals=signals,
        folder=folder,
        resumed=resumed,
        data=data,
        batches=iterate(
            *(data.train, position), rank=ranks.rank, world=ranks.world, num_workers=config.dataloader_num_workers
        ),
        position=position,
        step=step,
        progress=progress,
        callbacks=Callbacks(
            *(config, own_callbacks, reporting, args, progress, step, data.tokenizer),
            is_main=(accelerator.is_main_process, accelerator.is_local_main_process),
            blocks_per_epoch=epoch_blocks,
            saved_states=resumed.trainer_state.get("callbacks", {}) if resumed else {},
        ),
        non_finite=NonFiniteGuard(folder, ranks, partial(data.train.locate_rows, decode)),
        saver=Saver(folder, config.save_total_limit, config.max_failed_saves, progress.step if resumed else None),
        facts=run_facts(progress.run_id, plan, data.train.fingerprint),
    )


def _check_folder(config: PretrainConfig, folder: RunFolder) -> Path | None:
    """The checkpoint to resume from. Raises UserError for a folder, or a repository, that cannot be written."""
    folder.check_writable()
    folder.check_free()
    if config.push_to_hub:
        check_push(config)
    return find_checkpoint(folder, config.resume_from_checkpoint)


def _check_sharding(config: PretrainConfig, machine: Machine) -> None:
    if machine.is_sharded and machine.precision.name == "fp16":
        raise UserError("mixed_precision fp16: its loss scaling does not serve FSDP2; use bf16, or DDP")
    if machine.is_sharded and config.per_device_train_batch_size == AUTO:
        raise UserError(
            "per_device_train_batch_size=auto: processes that share the model cannot try what may not fit one of "
            "them; state a number"
        )


def _open_text(
    config: PretrainConfig, batch: Batch, resume_from: Path | None, ranks: HostGroup
) -> tuple[PretrainConfig, TextData]:
    """The text, and the settings: what a recipe says of its own text gives way to the one that is stated."""

    def open_for(settings: PretrainConfig) -> TextData:
        if resume_from is None:
            return prepare_data(settings, batch.blocks_per_step)
        saved, data = (read_state(resume_from, name) for name in ("trainer_state", "data_state"))
        return prepare_data_of_run(settings, batch.blocks_per_step, saved["config"], data["fingerprint"], resume_from)

    while True:
        try:
            return config, ranks.from_main(partial(open_for, config))
        except UserError as error:
            config = config.without(error)


def build_model(
    config: PretrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    machine: Machine,
    compiled: bool,
    weights: dict[str, Tensor],
) -> Any:
    """The model on the device, with random weights or those given by name on the main process."""
    make, device = partial(new_model, config.model, tokenizer, config.seed, weights), machine.accelerator.device
    model: Any = shared_model(make, device, machine.precision.name) if machine.is_sharded else make().to(device)
    if config.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if compiled:
        model.compile(dynamic=False)  # in place, so that names in checkpoints stay as they are
    else:
        model.head_chunk_size = HEAD_CHUNK_SIZE
    return model


def attention_arguments(
    config: PretrainConfig, model: Any, tokenizer: PreTrainedTokenizerBase, compiled: bool
) -> Callable[[Tensor], dict[str, Any]]:
    """What the model's forward needs besides token ids (B, T): masks and positions if documents are kept apart."""
    if not config.document_masking:
        return lambda ids_BT: {}
    flex = compiled and next(model.parameters()).device.type == "cuda" and model.config.attn_pdrop == 0
    return partial(document_attention, separator_id=tokenizer.eos_token_id, flex=flex)
