"""Evaluation during training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hfgpt.evaluation.loss import evaluate_named, evaluate_tokens, perplexity
from hfgpt.training.averaging import named_as_average
from hfgpt.training.out_of_memory import out_of_memory_named
from hfgpt.training.run import TrainingRun


def of_held_out(run: TrainingRun, of_tokens: Callable[..., dict[str, Any] | None]) -> dict[str, Any] | None:
    """Evaluate the model as it is on all held-out text. Returns None if a signal interrupted it."""
    if run.data.named_validation:
        return evaluate_named(of_tokens, run.data.named_validation)
    metrics = of_tokens(run.data.validation, scored_bytes=run.data.validation_bytes)
    return metrics and {**metrics, "eval_perplexity": perplexity(metrics["eval_loss"])}


def evaluate(run: TrainingRun) -> dict[str, Any] | None:
    """Evaluate the model and record the result. Returns None if a signal interrupted it on any process."""
    run.non_finite.read()
    batch_size = run.config.per_device_eval_batch_size or run.step.batch.micro_batch
    of_tokens = partial(
        evaluate_tokens,
        run.step.parallel_model,
        accelerator=run.machine.accelerator,
        sequence_length=run.config.sequence_length,
        batch_size=batch_size,
        attention=run.step.attention,
        stop=lambda: any(run.machine.ranks.gather(run.signals.received is not None)),
    )
    fix = "use a smaller --per_device_eval_batch_size"
    with out_of_memory_named(f"in evaluation with batches of {batch_size}", fix):
        if (metrics := of_held_out(run, of_tokens)) is None:
            return None
        if run.average and run.average.steps:
            with run.average.swapped_in():
                of_average = of_held_out(run, of_tokens)
            if of_average is None:
                return None
            metrics |= named_as_average(of_average)
            metrics["eval_seconds"] += of_average["eval_seconds"]
        if run.data.train_sample is not None:
            if (on_training := of_tokens(run.data.train_sample)) is None:
                return None
            metrics |= {"train_eval_loss": on_training["eval_loss"]}
            metrics["eval_seconds"] += on_training["eval_seconds"]
    try:
        run.callbacks.report(metrics)
        run.callbacks.call("on_evaluate", metrics)
    finally:  # even if a callback fails
        is_best = run.progress.note_evaluation(metrics, run.config.metric_for_best_model)
        run.callbacks.control.should_save |= is_best and run.config.save_best
        run.record(**metrics)
    return metrics


def note_average(run: TrainingRun) -> dict[str, Any]:
    """Return what the record of the end says of the average of the weights; print why there is none."""
    if not run.average:
        return {}
    if run.is_main and (why := run.average.why_unused(run.progress.evaluation, run.progress.step)):
        print(why, flush=True)
    return {"average": run.average.state(run.progress.evaluation)}
