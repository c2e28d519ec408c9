"""Call callbacks from the loop: their order, their arguments, and their state across resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    ExportableState,
    TrainerControl,
    TrainerState,
)

from hfgpt.config import PretrainConfig
from hfgpt.distributed.ranks import Ranks
from hfgpt.messages.slow_progress import has_room_for_bar
from hfgpt.settings.batch import Batch
from hfgpt.settings.step_sizes import StepSizes
from hfgpt.training.callbacks import LogLineCallback, PerplexityCallback, ProgressLineCallback, SampleCallback
from hfgpt.training.mfu import MFUCallback, only_numbers
from hfgpt.training.progress import Progress
from hfgpt.training.step import TrainStep
from hfgpt.training.trackers import tracker_names


class CallbackArguments(TrainingArguments):
    """`TrainingArguments` for callbacks, based on the run's Accelerate state.

    transformers' own class would restart Accelerate with its own choice of device. `to_dict`, which trackers record as
    the run's settings, returns the `PretrainConfig`.
    """

    config: PretrainConfig | None = None

    def __post_init__(self) -> None:
        self.distributed_state = PartialState()
        self._n_gpu = int(self.device.type != "cpu")
        super().__post_init__()

    @property
    def _setup_devices(self) -> torch.device:
        return self.distributed_state.device

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() if self.config is None else self.config.to_dict()


# Settings with the same name and meaning in TrainingArguments.
_SHARED = (
    "seed", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "logging_steps", "eval_steps", "save_steps", "save_total_limit",
    "dataloader_num_workers", "push_to_hub", "hub_strategy", "hub_model_id", "hub_private_repo",
)  # fmt: skip


def callback_arguments(
    config: PretrainConfig, batch: Batch, max_steps: int, precision: str, compiled: bool, resumed_from: Path | None
) -> CallbackArguments:
    """Build the `TrainingArguments` that callbacks receive."""
    args = CallbackArguments(
        **{name: getattr(config, name) for name in _SHARED},
        output_dir=os.path.abspath(config.output_dir),  # trackers print a warning if it equals run_name
        run_name=config.run_name or Path(config.output_dir).name,
        max_steps=max_steps,
        num_train_epochs=config.num_train_epochs or 1,
        per_device_train_batch_size=batch.micro_batch,
        per_device_eval_batch_size=config.per_device_eval_batch_size or batch.micro_batch,
        gradient_accumulation_steps=batch.accumulation,
        ddp_timeout=round(config.ddp_timeout),
        logging_strategy="steps",
        logging_first_step=True,
        eval_strategy="steps" if config.eval_steps else "no",
        save_strategy="steps",
        metric_for_best_model=config.metric_for_best_model,
        greater_is_better=False,
        include_num_input_tokens_seen="all",
        resume_from_checkpoint=str(resumed_from) if resumed_from else None,
        report_to=tracker_names(config.report_to) or "none",
        use_cpu=PartialState().device.type == "cpu",
    )
    # Set afterwards: __post_init__ would change torch's settings, or reject values that it thinks the device lacks.
    args.bf16, args.fp16, args.torch_compile = precision == "bf16", precision == "fp16", compiled
    args.gradient_checkpointing = args.activation_checkpointing = config.gradient_checkpointing
    args.config = config
    return args


class Callbacks:
    """Calls the callbacks of a run, as transformers' Trainer does, with shared arguments, state and control.

    The order is: flow control, MFU and perplexity, those turned on by settings, the user's, trackers, the display. Thus
    each callback sees the values that earlier ones added to a log.
    """

    def __init__(
        self,
        config: PretrainConfig,
        own: Sequence[TrainerCallback],
        reporting: Sequence[TrainerCallback],
        args: CallbackArguments,
        progress: Progress,
        sizes: StepSizes,
        step: TrainStep,
        tokenizer: Any,
        is_main: tuple[bool, bool],
        blocks_per_epoch: int | None,
        saved_states: dict[str, Any],
    ) -> None:
        """is_main: main process of the run, and of this machine. saved_states: the result of an earlier `states`."""
        self.args, self.progress, self.sizes, self.has_own = args, progress, sizes, bool(own)
        self.blocks_per_epoch = blocks_per_epoch or max(sizes.blocks_before(args.max_steps), 1)
        self.mfu = MFUCallback(
            sequence_length=config.sequence_length,
            precision=step.accelerator.mixed_precision,
            peak_tflops=config.mfu_peak_tflops,
            warmup_steps=1 if args.torch_compile else 0,
            total_seconds=progress.wall_seconds,
        )
        self.control = TrainerControl()
        self.state = TrainerState(
            logging_steps=config.logging_steps,
            save_steps=config.save_steps,
            eval_steps=config.eval_steps,
            max_steps=args.max_steps,
            is_world_process_zero=is_main[0],
            is_local_process_zero=is_main[1],
        )
        callbacks = [self.mfu, PerplexityCallback(), *configured_callbacks(config), *own, *reporting]

        @contextmanager
        def outside_the_clock() -> Iterator[None]:
            """Stop the clock and use the training precision while a callback runs the model."""
            with self.mfu.stopped(), step.accelerator.autocast():
                yield

        for callback in callbacks:
            if isinstance(callback, SampleCallback):
                callback.around = outside_the_clock
        restore_callbacks(callbacks, saved_states)
        display = ProgressLineCallback() if has_room_for_bar() else LogLineCallback()
        self.handler = CallbackHandler(
            [DefaultFlowCallback(), *callbacks, display], step.model, tokenizer, step.scaled_optimizer, None
        )
        self.call("on_init_end")

    def call(self, event: str, *arguments: Any) -> None:
        """Call `event` of each callback. Their requests are then in `control`."""
        state, progress = self.state, self.progress
        state.global_step, state.num_input_tokens_seen = progress.step, progress.num_input_tokens_seen
        state.epoch = self.sizes.blocks_before(progress.step) / self.blocks_per_epoch
        state.tokens_left = self.sizes.tokens_after(state.max_steps) - progress.num_input_tokens_seen
        state.best_metric, state.best_global_step = progress.best_metric, progress.best_step
        control = getattr(self.handler, event)(self.args, state, self.control, *arguments)
        vars(self.control).update(vars(control))  # a callback may return a new control

    def report(self, values: dict[str, Any]) -> None:
        """Send the log `values` to callbacks and trackers. Values that they add are added to `values`."""
        counters = {"num_input_tokens_seen": self.progress.num_input_tokens_seen}
        logs = only_numbers({**values, **counters, "wall_seconds": self.mfu.total_seconds})
        record = {**values, **counters, "step": self.progress.step}
        self.state.log_history.append(record)
        try:
            self.call("on_log", logs)
        finally:
            counted = ("step", "wall_seconds", *counters)
            values |= {key: value for key, value in {**record, **logs}.items() if key not in counted}

    def agree(self, ranks: Ranks) -> None:
        """Make requests of a user's callback on one process take effect on all."""
        if self.has_own and ranks.world_size > 1:
            for wanted in ranks.gather(vars(self.control)):
                for name, value in wanted.items():
                    setattr(self.control, name, value or getattr(self.control, name))

    def take_samples(self) -> list[dict[str, str]]:
        """Return the samples of this step, once and only on the main process."""
        samples = []
        for one in self.handler.callbacks:
            if isinstance(one, SampleCallback):
                samples += one.newest
                one.newest = []
        return samples

    def states(self) -> dict[str, list[dict[str, Any]]]:
        """Return the callbacks' states, for a checkpoint."""
        return callback_states(self.handler.callbacks)

    def why_stopped(self) -> str:
        """Return why a callback ended the run."""
        for one in self.handler.callbacks:
            if (
                isinstance(one, EarlyStoppingCallback)
                and one.early_stopping_patience_counter >= one.early_stopping_patience
            ):
                name = self.args.metric_for_best_model.removeprefix("eval_")
                return f"no better {name} in {one.early_stopping_patience_counter} evaluations"
        return "a callback requested it"


def configured_callbacks(config: PretrainConfig) -> list[TrainerCallback]:
    """Return the callbacks turned on by settings."""
    wanted: list[TrainerCallback] = []
    if config.sample_steps:
        wanted.append(SampleCallback(config.sample_steps, [config.sample_prompt or ""]))
    if config.early_stopping_patience:
        wanted.append(EarlyStoppingCallback(config.early_stopping_patience))
    return wanted


def callback_states(callbacks: list[TrainerCallback]) -> dict[str, list[dict[str, Any]]]:
    """Return the states of all exportable callbacks: a list per class name, as there may be several of a class."""
    states: dict[str, list[dict[str, Any]]] = {}
    for one in callbacks:
        if isinstance(one, ExportableState):
            state = one.state()
            states.setdefault(type(one).__name__, []).append(
                {"args": _as_text(state["args"]), "attributes": state["attributes"]}
            )
    return states


def restore_callbacks(callbacks: list[TrainerCallback], states: dict[str, Any]) -> None:
    """Restore the state of callbacks. Several of the same class are matched by their arguments first, then by order."""
    for name, saved in states.items():
        left = (
            [{"attributes": saved}] if isinstance(saved, dict) else list(saved)
        )  # a dict in checkpoints of version 0.1
        waiting = [one for one in callbacks if isinstance(one, ExportableState) and type(one).__name__ == name]
        for with_same_arguments in (True, False):
            for one in list(waiting):
                args = _as_text(one.state()["args"])
                found = [state for state in left if not with_same_arguments or state.get("args") == args]
                for state in found[:1]:
                    for key, value in state["attributes"].items():
                        setattr(one, key, value)
                    left.remove(state)
                    waiting.remove(one)


def _as_text(args: Any) -> str:
    return json.dumps(args, sort_keys=True, default=str)
