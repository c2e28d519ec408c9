"""Throughput and MFU, for the `Pretrainer` and for transformers' own `Trainer`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback

from hfgpt.distributed.device import synchronize
from hfgpt.distributed.device_peaks import Peak, device_peak
from hfgpt.errors import UserError
from hfgpt.model.flops import mfu, recomputed_flops_per_token, training_flops_per_token

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MFUCallback(TrainerCallback):
    """Adds `step_seconds, tokens_per_second, mfu, peak_tflops, peak_source, wall_seconds` to each training log.

    They cover the steps since the last log, waiting for data included; evaluation, saving and the first
    `warmup_steps` steps of the process (compilation) are outside the clock. Where no counted step is left, the
    figures are None. `hfu` (recomputation counted as work) is added when gradient checkpointing is on. Where the loop
    keeps a record of the log, as transformers' does in `state.log_history`, text and None go there alone: trackers plot
    what is in a log, and warn about all that is not a number.

    transformers' Trainer runs callbacks given to its constructor after the trackers. To let these see the figures,
    put it behind the first callback, which decides what is due: `trainer.callback_handler.callbacks.insert(1, it)`.

    tokens_per_step: tokens of one step over all processes. None takes what the trainer counts
        (`TrainingArguments(include_num_input_tokens_seen=...)`; "non_padding" leaves padding out).
    sequence_length: tokens per row, for the attention term. None takes the model's `n_positions`.
    peak_tflops: dense peak of one device. None looks the device up, or measures a matmul at train begin.
    precision: "bf16", "fp16" or "no", for the look-up. None takes it from the training arguments or weights.
    clock: seconds, rising.
    """

    tokens_per_step: int | None = None
    sequence_length: int | None = None
    peak_tflops: float | None = None
    precision: str | None = None
    warmup_steps: int = 1
    clock: Callable[[], float] = time.perf_counter
    total_seconds: float = 0.0  # counted seconds of training so far; a resumed run sets what it had

    def __post_init__(self) -> None:
        self._process_steps, self._warned = 0, False

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        counted_by_trainer = getattr(args, "include_num_input_tokens_seen", "no")
        if self.tokens_per_step is None and counted_by_trainer in ("no", False):
            raise UserError(
                "MFUCallback cannot tell the tokens of a step: pass tokens_per_step, or set "
                'include_num_input_tokens_seen="all" in the TrainingArguments'
            )
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        weight = next(model.parameters())
        self._device = weight.device
        processes = getattr(args, "world_size", None) or int(os.environ.get("WORLD_SIZE", 1))
        self._devices = processes * max(1, getattr(args, "n_gpu", 1))  # above 1 under torch.nn.DataParallel
        if self.peak_tflops is not None:
            self._peak = Peak(self.peak_tflops, "given")
        else:
            self._peak = device_peak(self._device, self.precision or _precision(args, weight.dtype))
        if self.sequence_length is None:
            self.sequence_length = model.config.n_positions
            logger.warning("MFU takes rows of n_positions = %d tokens; else pass sequence_length", self.sequence_length)
        self._flops = {"mfu": training_flops_per_token(model.config, self.sequence_length)}
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            self._flops["hfu"] = self._flops["mfu"] + recomputed_flops_per_token(model.config, self.sequence_length)
        self._tokens_seen = state.num_input_tokens_seen
        self._open_window()
        self._mark = self.clock()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._process_steps += 1
        if self._process_steps > self.warmup_steps:
            self._window_steps += 1
            self._window_tokens += self.tokens_per_step or state.num_input_tokens_seen - self._tokens_seen
        self._tokens_seen = state.num_input_tokens_seen
        self._lap(_something_due(control) or self._process_steps == self.warmup_steps)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self._lap(_something_due(control))

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" not in logs:  # an evaluation, or the summary at the end
            return
        self._lap(wait=True)
        steps, seconds = self._window_steps, self._window_seconds
        figures: dict[str, Any] = dict.fromkeys(("step_seconds", "tokens_per_second", "mfu"))
        figures |= {"peak_tflops": self._peak.tflops, "peak_source": self._peak.source}
        figures["wall_seconds"] = self.total_seconds
        if steps and seconds > 0:
            rate = self._window_tokens / seconds
            figures |= {"step_seconds": seconds / steps, "tokens_per_second": rate}
            if self._peak.tflops is not None:
                for key, flops_per_token in self._flops.items():
                    figures[key] = mfu(rate, flops_per_token, self._peak.tflops, self._devices)
                if figures["mfu"] > 1 and not self._warned:
                    self._warned = True
                    warning = "MFU is %.2f, above 1: check the peak (%s TFLOP/s, %s) and the tokens per step"
                    logger.warning(warning, figures["mfu"], *self._peak)
        # A copy of the log, made before the callbacks.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)
            figures = numbers(figures)
        logs.update(figures)
        self._open_window()

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self._mark = self.clock()

    on_save = on_evaluate

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done inside is outside the clock."""
        self._lap(wait=True)
        yield
        self._mark = self.clock()

    def _open_window(self) -> None:
        self._window_seconds, self._window_steps, self._window_tokens = 0.0, 0, 0

    def _lap(self, wait: bool) -> None:
        """Counts the time since the last mark, unless still warming up; `wait` for the device first.

        Between logs nobody waits: launch times are early, but the window closes on a device that is done.
        """
        if wait:
            synchronize(self._device)
        last, self._mark = self._mark, self.clock()
        if self._process_steps > self.warmup_steps:
            self.total_seconds += self._mark - last
            self._window_seconds += self._mark - last


def _something_due(control) -> bool:
    return control.should_log or control.should_evaluate or control.should_save


def _precision(args, weight_dtype: torch.dtype) -> str:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(args, name, False) or weight_dtype == dtype:
            return name
    return "no"


def numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """What trackers can plot of a log."""
    return {key: value for key, value in logs.items() if isinstance(value, int | float)}
