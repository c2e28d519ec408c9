"""Everything before the first step: `prepare(config) -> TrainingRun`. Nothing is written here."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import TrainerCallback

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.checkpointing.saver import Saver
from hfgpt.config import PretrainConfig
from hfgpt.data import TextData
from hfgpt.data.loader import iterate
from hfgpt.data.mixture_plan import plan_mixture
from hfgpt.distributed.compiler import CompileChoice, choose_compile
from hfgpt.distributed.device import device_name, memory_bytes, start_accelerator
from hfgpt.distributed.device_peaks import device_peak
from hfgpt.distributed.fsdp2 import take_fsdp_request
from hfgpt.distributed.ranks import Ranks
from hfgpt.distributed.stop_signals import Interrupted, StopSignals
from hfgpt.errors import RunError
from hfgpt.hub.background import SavePusher
from hfgpt.hub.push import check_push
from hfgpt.hub.resume_from_hub import find_resume_point
from hfgpt.settings.field_types import AUTO
from hfgpt.settings.step_sizes import total_steps
from hfgpt.training.averaging import build_average, describe_average
from hfgpt.training.batch_size import choose_micro_batch
from hfgpt.training.build_model import attention_arguments, build_model, check_sharding
from hfgpt.training.callback_handler import Callbacks, callback_arguments
from hfgpt.training.divergence import build_divergence
from hfgpt.training.init_from import initial_weights, resolve_init_from
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.non_finite import NonFiniteGuard
from hfgpt.training.open_text import open_text
from hfgpt.training.optimizer import build_optimizer
from hfgpt.training.plan import Plan, check_memory, run_facts
from hfgpt.training.progress import Progress
from hfgpt.training.resume import Resumed, resume, sizes_of_run
from hfgpt.training.run import Machine, TrainingRun
from hfgpt.training.spikes import build_spike_window
from hfgpt.training.step import TrainStep
from hfgpt.training.tracker_runs import keep_runs
from hfgpt.training.trackers import trackers


def prepare(config: PretrainConfig, callbacks: Sequence[TrainerCallback], signals: StopSignals) -> TrainingRun:
    """Build everything that the loop needs: device, text, model, optimizer, and the state of a resumed run.

    Call on all processes. Raises UserError, with nothing written, for a run that cannot work.
    """
    with _stopped_by_signals(signals):
        ranks = Ranks(config.ddp_timeout)
        if ranks.rank:
            logging.getLogger("hfgpt").setLevel(logging.ERROR)  # only the main process prints warnings
        is_sharded = take_fsdp_request()
        with ranks.share_failures():
            ranks.rendezvous()
            accelerator, precision = start_accelerator(config.mixed_precision, config.ddp_timeout)
            ranks.connect()
            machine = Machine(ranks, accelerator, precision, is_sharded)
            check_sharding(config, machine)
            folder = RunFolder(config.output_dir, writes=ranks.rank == 0)
            try:
                return _prepare(config, callbacks, signals, machine, folder)
            except BaseException:
                folder.close()
                raise


@contextmanager
def _stopped_by_signals(signals: StopSignals) -> Iterator[None]:
    """End the run immediately if a signal arrives inside, with the signal's exit code."""
    try:
        with signals.interruptible():
            yield
    except Interrupted as error:
        fault = signals.to_error() or RunError("the end of the main process", 128 + signal.SIGTERM)
        cause = f"{error}; " if str(error) else ""
        raise RunError(
            f"{cause}stopped by {fault} before the first step; nothing was written", fault.exit_code
        ) from error


def _prepare(
    config: PretrainConfig, own: Sequence[TrainerCallback], signals: StopSignals, machine: Machine, folder: RunFolder
) -> TrainingRun:
    ranks, accelerator, device = machine.ranks, machine.accelerator, machine.accelerator.device
    reporting = trackers(config.report_to)
    resume_from = ranks.from_main(partial(_check_folder, config, folder))
    config = ranks.from_main(partial(resolve_init_from, config, resume_from))
    batch = config.batch(ranks.world_size)
    check_memory(config, batch, machine.memory_setting(config, batch), memory_bytes(device))
    sizes = ranks.from_main(partial(sizes_of_run, config, batch, resume_from))
    config, data = open_text(config, sizes, resume_from, ranks)
    max_steps = total_steps(config, sizes, getattr(data.train, "blocks_per_epoch", None))
    compiled = _choose_compile(config, device, batch.of(sizes.blocks_before(max_steps)).accumulation, max_steps)

    # Only the main process reads the weights; it sends them to the others.
    weights = initial_weights(config.init_from, data.tokenizer, ranks) if config.init_from and not resume_from else {}
    model = build_model(config, data.tokenizer, machine, compiled.enabled, weights)
    optimizer, average = build_optimizer(model, config), build_average(config, max_steps, model)
    spikes = build_spike_window(config, accelerator)
    choices = (machine.precision, compiled, device_name(device))
    plan = Plan(
        *(config, model.config, batch, sizes, max_steps, *choices, data.description, str(folder.checkpoint(max_steps))),
        setting=machine.memory_setting(config, batch, compiled.enabled),
        peak_tflops=config.mfu_peak_tflops or device_peak(device, machine.precision.name).tflops,
    )
    resumed = resume(resume_from, folder, plan, data, ranks) if resume_from else None
    if resumed:
        plan = replace(plan, resumed=resumed.describe(folder, max_steps))
        resumed.load(model, optimizer, accelerator.scaler, ranks, average, spikes)
    progress = resumed.progress if resumed else Progress(skipped_rows=data.skipped.copy())
    position = resumed.position if resumed else data.train.start
    data.description += plan_mixture(config.metric_for_best_model, data, position, max_steps)
    step = TrainStep(
        *(model, optimizer, batch),
        accelerator=accelerator,
        ranks=ranks,
        learning_rate=resumed.learning_rate if resumed else LearningRate.of_run(config, sizes, max_steps),
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        attention=attention_arguments(config, model, data.tokenizer, compiled.enabled),
        spikes=spikes,
    )
    data.description += choose_micro_batch(config, machine, step, resumed, compiled.enabled)
    setting = machine.memory_setting(config, step.batch, compiled.enabled)
    averaging = describe_average(config, max_steps, model.config, setting, average)
    plan = replace(plan, batch=step.batch, setting=setting, average=averaging)
    text = (data.train, position, ranks.rank, ranks.world_size)
    return TrainingRun(
        *(config, plan, machine, signals, folder, resumed, data),
        batches=iterate(*text, config.dataloader_num_workers, progress.step),
        position=position,
        step=step,
        average=average,
        progress=progress,
        callbacks=_build_callbacks(plan, machine, own, reporting, data, step, progress, resumed),
        non_finite=_build_guard(config, ranks, folder, data, resumed),
        saver=Saver(folder, config.save_total_limit, config.max_failed_saves, progress.step if resumed else None),
        pusher=SavePusher(config, folder) if config.pushes_saves and folder.writes else None,
        facts=run_facts(progress.run_id, plan, data.train.fingerprint),
    )


def _build_guard(
    config: PretrainConfig, ranks: Ranks, folder: RunFolder, data: TextData, resumed: Resumed | None
) -> NonFiniteGuard:
    decode = partial(data.tokenizer.decode, skip_special_tokens=True)
    guard = NonFiniteGuard(folder, ranks, partial(data.train.locate_rows, decode), build_divergence(config))
    guard.restore(resumed.trainer_state["loss_watch"] if resumed else None)
    return guard


def _choose_compile(config: PretrainConfig, device: torch.device, passes: int, max_steps: int) -> CompileChoice:
    """Choose whether to compile. An "auto" micro-batch is unknown here, because it is measured with this choice."""
    is_measured = config.per_device_train_batch_size == AUTO  # with the largest, a step is one pass
    return choose_compile(config.torch_compile, device, max_steps if is_measured else passes, is_measured)


def _build_callbacks(
    plan: Plan,
    machine: Machine,
    own: Sequence[TrainerCallback],
    reporting: Sequence[TrainerCallback],
    data: TextData,
    step: TrainStep,
    progress: Progress,
    resumed: Resumed | None,
) -> Callbacks:
    config, accelerator, resumed_from = plan.config, machine.accelerator, resumed.folder if resumed else None
    if accelerator.is_main_process:
        reporting = keep_runs(reporting, progress, resumed)
    choices = (plan.max_steps, machine.precision.name, plan.compile.enabled, resumed_from)
    return Callbacks(
        *(config, own, reporting, callback_arguments(config, step.batch, *choices), progress, plan.sizes, step),
        data.tokenizer,
        is_main=(accelerator.is_main_process, accelerator.is_local_main_process),
        blocks_per_epoch=getattr(data.train, "blocks_per_epoch", None),
        saved_states=resumed.trainer_state.get("callbacks", {}) if resumed else {},
    )


def _check_folder(config: PretrainConfig, folder: RunFolder) -> Path | None:
    """Find the checkpoint to resume from. Raises UserError if the folder or the Hub repository cannot be written to."""
    folder.check_writable()
    folder.check_free()
    check_push(config)
    return find_resume_point(config, folder)
