"""Callbacks for the `Pretrainer`, which also work in transformers' `Trainer`; and log lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback, TrainerState

from hfgpt.evaluation.loss import perplexity
from hfgpt.messages.formats import duration
from hfgpt.training.out_of_memory import out_of_memory_named

# Values of a log shown in the progress line.
SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "eval_perplexity": "perplexity {:.4g}",
    "eval_bits_per_byte": "{:.4f} bits per byte",
    "train_eval_loss": "training text {:.4f}",
    "eval_loss_ema": "average of weights {:.4f}",
    "learning_rate": "rate {:.3g}",
    "grad_norm": "norm {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "hfu": "HFU {:.1%}",
}


class PerplexityCallback(TrainerCallback):
    """Adds `eval_perplexity` = exp(`eval_loss`) to evaluation logs and metrics.

    For a named evaluation dataset X, adds `eval_X_perplexity` from `eval_X_loss`. This is the perplexity of the text if
    the loss is the mean over all tokens. transformers' Trainer averages over rows, which is the same if all rows have
    the same number of targets.
    """

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        for target in (logs, *state.log_history[-1:]):
            self.on_evaluate(args, state, control, target)

    def on_evaluate(self, args, state, control, metrics, **kwargs) -> None:
        for key in [key for key in metrics if key.startswith("eval_") and key.endswith("_loss")]:
            metrics.setdefault(key.removesuffix("loss") + "perplexity", perplexity(metrics[key]))


@dataclass(eq=False)
class SampleCallback(TrainerCallback):
    """Every `every` steps, prints a sample of `max_new_tokens` tokens for each of `prompts`.

    The seed is always the same, so that samples differ only by what was learned. `around` is a context in which to
    generate, such as `MFUCallback.stopped`; the Pretrainer sets it, and records the `newest` samples. Under FSDP2 all
    processes generate together, otherwise only the main process does.
    """

    every: int
    prompts: Sequence[str] = ("",)
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    seed: int = 1337
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    newest: list[dict[str, str]] = field(default_factory=list, init=False)

    def texts(self, model: Any, tokenizer: Any) -> Iterator[str]:
        """Generate one text per prompt. Raises UserError immediately for settings that cannot work."""
        from hfgpt.evaluation.generate import generate

        draw: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return generate(model, tokenizer, self.prompts, max_new_tokens=self.max_new_tokens, **draw)

    def on_init_end(self, args, state, control, model=None, processing_class=None, **kwargs) -> None:
        self.texts(model, processing_class)  # reports wrong settings before the first step

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs) -> None:
        shared = isinstance(next(model.parameters()), DTensor)
        if state.global_step % self.every or not (shared or state.is_world_process_zero):
            return
        fix = "use shorter or fewer prompts, or --sample_steps 0"
        with self.around(), out_of_memory_named("in sampling", fix):
            texts = list(self.texts(model, processing_class))
        if state.is_world_process_zero:
            self.newest = [{"prompt": p, "text": text} for p, text in zip(self.prompts, texts, strict=True)]
            for sample in self.newest:
                with tqdm.external_write_mode():  # printed above a progress bar
                    print(f"sample at step {state.global_step}: {sample['prompt']}{sample['text']}", flush=True)


def shown_values(state: TrainerState, logs: dict[str, Any]) -> dict[str, str]:
    """Return the values of a log to show, by key. The ETA excludes evaluation and saving."""
    left = (state.max_steps - state.global_step) * (logs.get("step_seconds") or 0)
    if left and hasattr(state, "tokens_left"):  # the Pretrainer's steps may grow
        left = state.tokens_left / logs["tokens_per_second"]
    shown = {key: template.format(logs[key]) for key, template in SHOWN.items() if logs.get(key) is not None}
    if logs.get("memory_bytes"):
        shown["memory"] = f"{logs['memory_bytes'] / 2**30:.3g} GiB"
    if left:
        shown["eta"] = f"ETA {duration(left)}"
    return shown


def log_line(state: TrainerState, logs: dict[str, Any]) -> str:
    """Format a training or evaluation log as one line: `step 50/2000  loss 2.501  ...  ETA 0:03:20`."""
    width = len(str(state.max_steps))
    return "  ".join([f"step {state.global_step:{width}}/{state.max_steps}", *shown_values(state, logs).values()])


class LogLineCallback(TrainerCallback):
    """Prints each log as one line, for output to a file."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero:
            print(log_line(state, logs), flush=True)


class ProgressLineCallback(ProgressCallback):
    """Shows a progress bar with the newest training log, and prints each evaluation as a line above it.

    Also prints training logs if stdout is a file.
    """

    IN_BAR = ("loss", "tokens_per_second", "mfu", "eta")

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            form = {"bar_format": "step {n_fmt}/{total_fmt} |{bar}| {desc}", "dynamic_ncols": True, "file": sys.stderr}
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, **form)
        self.current_step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            if "loss" in logs:
                shown = shown_values(state, logs)
                self.training_bar.set_description_str("  ".join(shown[key] for key in self.IN_BAR if key in shown))
            if "loss" not in logs or not sys.stdout.isatty():
                self.training_bar.write(log_line(state, logs), file=sys.stdout)
