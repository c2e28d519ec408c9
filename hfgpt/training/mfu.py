"""Throughput and MFU, for the `Pretrainer` and for transformers' own `Trainer`."""

from __future__ import annotations

import logging
import math
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
from hfgpt.distributed.device_peaks import Peak, device_peak, measure_again
from hfgpt.errors import UserError
from hfgpt.model.flops import mfu, recomputed_flops_per_token, training_flops_per_token

logger = logging.getLogger(__name__)

MAX_MEASUREMENTS = 4  # of a peak that turns out to be too low


@dataclass(eq=False)
class MFUCallback(TrainerCallback):
    """Adds `step_seconds, tokens_per_second, mfu, peak_tflops, peak_source, wall_seconds` to each training log.

    The values cover the steps since the last log, including waits for data. Evaluation, saving and the first
    `warmup_steps` steps of the process (compilation) are not timed; without timed steps, the values are None. With
    gradient checkpointing, `hfu` is added, which counts recomputation as work. Trackers warn about values that are not
    numbers, so text and None are only added to the loop's own record, `state.log_history`.

    transformers' Trainer calls its trackers before callbacks passed to its constructor. To let trackers see the values,
    insert this one after the first callback: `trainer.callback_handler.callbacks.insert(1, MFUCallback(...))`.

    tokens_per_step: tokens of one step over all processes. None uses the trainer's own count
        (`TrainingArguments(include_num_input_tokens_seen=...)`; "non_padding" leaves padding out).
    sequence_length: tokens per row, for the attention term. None uses the model's `n_positions`.
    peak_tflops: dense peak of one device. None looks it up, or measures a matmul at the start of training.
    precision: "bf16", "fp16" or "no", for the peak. None takes it from the training arguments or weights.
    clock: returns seconds.
    """

    tokens_per_step: int | None = None
    sequence_length: int | None = None
    peak_tflops: float | None = None
    precision: str | None = None
    warmup_steps: int = 1
    clock: Callable[[], float] = time.perf_counter
    total_seconds: float = 0.0  # timed seconds of training so far; a resumed run continues from its earlier total

    def __post_init__(self) -> None:
        self._process_steps, self._warned, self._measurements = 0, False, 1

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        counted_by_trainer = getattr(args, "include_num_input_tokens_seen", "no")
        if self.tokens_per_step is None and counted_by_trainer in ("no", False):
            raise UserError(
                "MFUCallback does not know the tokens per step: pass tokens_per_step, or set "
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
            self.precision = self.precision or _precision(args, weight.dtype)
            self._peak = device_peak(self._device, self.precision)
        if self.sequence_length is None:
            self.sequence_length = model.config.n_positions
            logger.warning(
                "MFU assumes rows of n_positions = %d tokens; pass sequence_length if that is wrong",
                self.sequence_length,
            )
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

    def return_to(self, tokens_seen: int) -> None:
        """Count the tokens of later steps from here, after a rollback. What was timed before it stays."""
        self._tokens_seen = tokens_seen

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self._lap(_something_due(control))

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" not in logs:  # an evaluation, or the summary at the end
            return
        self._lap(wait=True)
        steps, seconds = self._window_steps, self._window_seconds
        values: dict[str, Any] = dict.fromkeys(("step_seconds", "tokens_per_second", "mfu"))
        values |= {"peak_tflops": self._peak.tflops, "peak_source": self._peak.source}
        values["wall_seconds"] = self.total_seconds
        if steps and seconds > 0:
            rate = self._window_tokens / seconds
            values |= {"step_seconds": seconds / steps, "tokens_per_second": rate}
            values |= self._utilization(rate)
            values |= {"peak_tflops": self._peak.tflops, "peak_source": self._peak.source}
        # The loop copied the log before calling the callbacks.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)
            values = only_numbers(values)
        logs.update(values)
        self._open_window()

    def _utilization(self, rate: float) -> dict[str, float | None]:
        """Return `mfu`, and `hfu` with recomputation, at `rate` tokens per second.

        A peak that was measured while other programs ran is too low. If MFU shows that, it is measured again; if that
        does not explain an MFU above 1, MFU is None.
        """
        if self._peak.tflops is None:
            return {}

        def compute() -> dict[str, float]:
            peak = self._peak.tflops or math.nan
            return {key: mfu(rate, flops, peak, self._devices) for key, flops in self._flops.items()}

        found, is_measured = compute(), self._peak.source.startswith("measured")
        if found["mfu"] > 1 and is_measured and self._measurements < MAX_MEASUREMENTS:
            self._measurements += 1
            self._peak = measure_again(self._peak, self._device, self.precision or "no")
            found, self._mark = compute(), self.clock()
        if found["mfu"] <= 1:
            return {**found}
        if not self._warned:
            self._warned = True
            warning = "MFU is %.2f, above 1: check the peak (%s TFLOP/s, %s) and the tokens per step"
            logger.warning(warning, found["mfu"], *self._peak)
        return dict.fromkeys(found, None) if is_measured else {**found}

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self._mark = self.clock()

    on_save = on_evaluate

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside this context."""
        self._lap(wait=True)
        yield
        self._mark = self.clock()

    def _open_window(self) -> None:
        self._window_seconds, self._window_steps, self._window_tokens = 0.0, 0, 0

    def _lap(self, wait: bool) -> None:
        """Add the time since the last mark, unless warming up. `wait`: synchronize the device first.

        Steps between logs are not synchronized: kernels are launched ahead of time, but the log waits for all of them.
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


def only_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Return only the values of a log that are numbers, for trackers."""
    return {key: value for key, value in logs.items() if isinstance(value, int | float)}
