"""Callbacks for the `Pretrainer` and for transformers' own `Trainer`: throughput and MFU, perplexity."""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import extract_model_from_parallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    ExportableState,
    ProgressCallback,
    TrainerState,
)

from hfgpt.config import Batch, PretrainConfig
from hfgpt.distributed.device import synchronize
from hfgpt.errors import UserError
from hfgpt.evaluation.loss import perplexity
from hfgpt.field_types import duration
from hfgpt.model.flops import Peak, device_peak, mfu, recomputed_flops_per_token, training_flops_per_token
from hfgpt.training.batch_size import out_of_memory_named

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
        """What `hfgpt.evaluation.generate.generate` yields; raises UserError at once for what cannot be."""
        from hfgpt.evaluation.generate import generate

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


class CallbackArguments(TrainingArguments):
    """The `TrainingArguments` that callbacks read, for a run that Accelerate has been started for.

    transformers' own would start Accelerate again, for the devices that it would choose. What trackers keep of them as
    the settings of the run are those of its `PretrainConfig`.
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


# Settings that have one name and one meaning here and in TrainingArguments.
_SHARED = (
    "seed", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "logging_steps", "eval_steps", "save_steps", "save_total_limit",
    "dataloader_num_workers", "push_to_hub", "hub_model_id", "hub_private_repo",
)  # fmt: skip


def callback_arguments(
    config: PretrainConfig, batch: Batch, max_steps: int, precision: str, compiled: bool, resumed_from: Path | None
) -> CallbackArguments:
    """What callbacks read of the run as it was settled before its first step."""
    args = CallbackArguments(
        **{name: getattr(config, name) for name in _SHARED},
        output_dir=os.path.abspath(config.output_dir),  # trackers warn about one that is called as the run is
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
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        include_num_input_tokens_seen="all",
        resume_from_checkpoint=str(resumed_from) if resumed_from else None,
        report_to=tracker_names(config.report_to) or "none",
        use_cpu=PartialState().device.type == "cpu",
    )
    # Set late: on the way in, some would change torch's settings, or be refused for a device they were chosen for.
    args.bf16, args.fp16, args.torch_compile = precision == "bf16", precision == "fp16", compiled
    args.gradient_checkpointing = args.activation_checkpointing = config.gradient_checkpointing
    args.config = config
    return args


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
        if (
            isinstance(one, EarlyStoppingCallback)
            and one.early_stopping_patience_counter >= one.early_stopping_patience
        ):
            return f"no better loss in {one.early_stopping_patience_counter} evaluations"
    return "a callback asked for it"


def callback_states(callbacks: list[TrainerCallback]) -> dict[str, list[dict[str, Any]]]:
    """What callbacks have counted so far, by the name of their class; of several of one class in their order."""
    states: dict[str, list[dict[str, Any]]] = {}
    for one in callbacks:
        if isinstance(one, ExportableState):
            state = one.state()
            states.setdefault(type(one).__name__, []).append(
                {"args": _as_text(state["args"]), "attributes": state["attributes"]}
            )
    return states


def restore_callbacks(callbacks: list[TrainerCallback], states: dict[str, Any]) -> None:
    """Give each callback what it had counted: of one class first those with the arguments they had, then in order."""
    for name, saved in states.items():
        left = [{"attributes": saved}] if isinstance(saved, dict) else list(saved)  # a dict: of an older checkpoint
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


def numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """What trackers can plot of a log."""
    return {key: value for key, value in logs.items() if isinstance(value, int | float)}


def tracker_names(report_to: str) -> list[str]:
    """The trackers in `report_to`, each once; for "all" those that are installed."""
    names = dict.fromkeys(name.strip() for name in report_to.split(","))
    if "all" in names:
        names |= dict.fromkeys(get_available_reporting_integrations())
    return [name for name in names if name not in ("", "none", "all")]


TRACKER_EXTRAS = ("tensorboard", "wandb", "trackio", "mlflow")
# Of the others: modules, one of which must be there, and the package, where they are not called as the tracker is.
_MODULES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "kubeflow": ("transformers",),  # has no package of its own
}
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}


def trackers(report_to: str) -> list[TrainerCallback]:
    """transformers' callback of each tracker. Raises UserError for names it does not know, and packages not there."""
    found, problems = [], []
    names = tracker_names(report_to)
    if not names and "all" in report_to:
        problems.append("report_to=all: no tracker is installed; pip install 'hfgpt[trackers]', or use none")
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            near = difflib.get_close_matches(name.lower(), INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            problems.append(f"report_to={name}: no such tracker; {hint}")
        elif not any(find_spec(module) for module in _MODULES.get(name, (name,))):
            package = f"'hfgpt[{name}]'" if name in TRACKER_EXTRAS else _PACKAGES.get(name, name)
            problems.append(f"report_to={name}: is not installed; pip install {package}")
        else:
            try:
                found.append(INTEGRATION_TO_CALLBACK[name]())
            except Exception as error:  # each package has faults of its own
                reason = " ".join(str(error).split()) or type(error).__name__
                problems.append(f"report_to={name}: cannot be used: {reason}")
    if problems:
        raise UserError(*problems)
    return found


def callback_handler(callbacks: list[TrainerCallback], model: Any, tokenizer: Any, optimizer: Any) -> CallbackHandler:
    """What is due, then `callbacks` in their order, then the display, which so gets the figures the others added."""
    display = ProgressLineCallback() if sys.stderr.isatty() else LogLineCallback()
    return CallbackHandler([DefaultFlowCallback(), *callbacks, display], model, tokenizer, optimizer, None)


def _something_due(control) -> bool:
    return control.should_log or control.should_evaluate or control.should_save


def _precision(args, weight_dtype: torch.dtype) -> str:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(args, name, False) or weight_dtype == dtype:
            return name
    return "no"
