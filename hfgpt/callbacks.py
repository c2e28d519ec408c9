"""Callbacks for the `Pretrainer` and for transformers' own `Trainer`: throughput and MFU, perplexity."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    ExportableState,
    ProgressCallback,
    TrainerState,
)

from hfgpt.config import PretrainConfig
from hfgpt.convert import duration
from hfgpt.device import synchronize
from hfgpt.errors import UserError
from hfgpt.evaluation import perplexity
from hfgpt.flops import Peak, device_peak, mfu, recomputed_flops_per_token, training_flops_per_token
from hfgpt.micro_batch import out_of_memory_named

logger = logging.getLogger(__name__)

# What a line of progress shows of a log.
SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "eval_perplexity": "perplexity {:.4g}",
    "eval_bits_per_byte": "{:.4f} bits per byte",
    "train_eval_loss": "on training text {:.4f}",
    "learning_rate": "rate {:.3g}",
    "grad_norm": "norm {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "hfu": "HFU {:.1%}",
}


@dataclass(eq=False)
class MFUCallback(TrainerCallback):
    """Adds `step_seconds, tokens_per_second, mfu, peak_tflops, peak_source` to each training log.

    They cover the steps since the last log, waiting for data included; evaluation, saving and the first
    `warmup_steps` steps of the process (compilation) are outside the clock. Where no counted step is left, the
    figures are None. `hfu` (recomputation counted as work) is added when gradient checkpointing is on.

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
        logs.update(figures)
        # transformers' Trainer keeps a copy made before the callbacks.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)
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


class PerplexityCallback(TrainerCallback):
    """Adds `eval_perplexity` = exp(`eval_loss`) to evaluation logs and metrics (`eval_X_...` for a split X).

    It is the perplexity of the text if `eval_loss` is the mean over all tokens. transformers' Trainer
    averages over rows, which is the same when all rows have equally many targets.
    """

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        for target in (logs, *state.log_history[-1:]):
            self.on_evaluate(args, state, control, target)

    def on_evaluate(self, args, state, control, metrics, **kwargs) -> None:
        for key in [key for key in metrics if key.startswith("eval_") and key.endswith("_loss")]:
            metrics.setdefault(key.removesuffix("loss") + "perplexity", perplexity(metrics[key]))


@dataclass(eq=False)
class SampleCallback(TrainerCallback):
    """Prints what the model writes, every `every` steps: one sample of `max_new_tokens` for each of `prompts`.

    The same `seed` each time, so that samples differ by what was learned. `around`: a context to write in, such as
    `MFUCallback.stopped`; the Pretrainer sets it. Where the processes share the parameters (FSDP2) all write, else the
    main one alone.
    """

    every: int
    prompts: Sequence[str] = ("",)
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    seed: int = 1337
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def texts(self, model: Any, tokenizer: Any) -> Iterator[str]:
        """What `hfgpt.generation.generate` yields; raises UserError at once for what cannot be."""
        from hfgpt.generation import generate

        draw: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return generate(model, tokenizer, self.prompts, max_new_tokens=self.max_new_tokens, **draw)

    def on_init_end(self, args, state, control, model=None, processing_class=None, **kwargs) -> None:
        self.texts(model, processing_class)  # what is wrong with it is told before the first step

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs) -> None:
        shared = isinstance(next(model.parameters()), DTensor)
        if state.global_step % self.every or not (shared or state.is_world_process_zero):
            return
        fix = "use shorter or fewer prompts, or --sample_steps 0"
        with self.around(), out_of_memory_named("in sampling", fix):
            texts = list(self.texts(model, processing_class))
        if state.is_world_process_zero:
            for prompt, text in zip(self.prompts, texts, strict=True):
                print(f"sample at step {state.global_step}: {prompt}{text}", flush=True)


def log_line(state: TrainerState, logs: dict[str, Any]) -> str:
    """A training or evaluation log as one line: `step 50/2000  loss 2.501  ...  ETA 0:03:20`; what is None is left out.

    The estimate covers the steps alone, at the speed of the last ones.
    """
    left = (state.max_steps - state.global_step) * (logs.get("step_seconds") or 0)
    shown = {key: template.format(logs[key]) for key, template in SHOWN.items() if logs.get(key) is not None}
    if logs.get("memory_bytes"):
        shown["memory"] = f"{logs['memory_bytes'] / 2**30:.3g} GiB"
    if left:
        shown["eta"] = f"ETA {duration(left)}"
    width = len(str(state.max_steps))
    return "  ".join([f"step {state.global_step:{width}}/{state.max_steps}", *shown.values()])


class LogLineCallback(TrainerCallback):
    """Each log as one plain line, for output that goes to a file."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero:
            print(log_line(state, logs), flush=True)


class ProgressLineCallback(ProgressCallback):
    """transformers' progress bar, and above it each log as one line."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(log_line(state, logs))


class CallbackArguments:
    """What transformers' callbacks read of `TrainingArguments`, from our configuration."""

    logging_strategy = save_strategy = "steps"
    logging_first_step, eval_delay = True, 0
    load_best_model_at_end, metric_for_best_model, greater_is_better = False, "eval_loss", False

    def __init__(self, config: PretrainConfig, world_size: int) -> None:
        self.config, self.world_size = config, world_size
        self.to_dict = self.to_sanitized_dict = config.to_dict
        self.output_dir = self.logging_dir = config.output_dir
        self.run_name = config.run_name or Path(config.output_dir).name
        self.logging_steps, self.save_steps = config.logging_steps, config.save_steps
        self.eval_steps, self.eval_strategy = config.eval_steps, "steps" if config.eval_steps else "no"
        self.report_to = [name.strip() for name in config.report_to.split(",") if name.strip() not in ("", "none")]

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def wanted_callbacks(config: PretrainConfig) -> list[TrainerCallback]:
    """Those that settings ask for."""
    wanted: list[TrainerCallback] = []
    if config.sample_steps:
        wanted.append(SampleCallback(config.sample_steps, [config.sample_prompt or ""]))
    if config.early_stopping_patience:
        wanted.append(EarlyStoppingCallback(config.early_stopping_patience))
    return wanted


def why_stopped(callbacks: list[TrainerCallback]) -> str:
    """What a callback has ended a run for, in words."""
    for one in callbacks:
        if isinstance(one, EarlyStoppingCallback) and one.early_stopping_patience_counter:
            return f"no better loss in {one.early_stopping_patience_counter} evaluations"
    return "a callback asked for it"


def callback_states(callbacks: list[TrainerCallback]) -> dict[str, dict[str, Any]]:
    """What callbacks have counted so far, by the name of their class."""
    return {type(one).__name__: one.state()["attributes"] for one in callbacks if isinstance(one, ExportableState)}


def restore_callbacks(callbacks: list[TrainerCallback], states: dict[str, dict[str, Any]]) -> None:
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            vars(callback).update(states.get(type(callback).__name__, {}))


def callback_handler(
    args: CallbackArguments, callbacks: list[TrainerCallback], model: Any, tokenizer: Any, optimizer: Any
) -> CallbackHandler:
    """What is due, then `callbacks`, then trackers and display, which so get the figures the others added."""
    try:
        trackers = [tracker() for tracker in get_reporting_integration_callbacks(args.report_to)]
    except (ValueError, RuntimeError, ImportError) as error:  # unknown, or not installed
        raise UserError(f"report_to={args.config.report_to}: {error}") from None
    display = ProgressLineCallback() if sys.stderr.isatty() else LogLineCallback()
    return CallbackHandler([DefaultFlowCallback(), *callbacks, *trackers, display], model, tokenizer, optimizer, None)


def _something_due(control) -> bool:
    return control.should_log or control.should_evaluate or control.should_save


def _precision(args, weight_dtype: torch.dtype) -> str:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(args, name, False) or weight_dtype == dtype:
            return name
    return "no"
