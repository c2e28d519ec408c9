"""`hfgpt evaluate`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any, Literal

import typer

from hfgpt.cli.options import AsJson, Precision, path_or_id, whole
from hfgpt.cli.output import as_json, as_lines, silence_transformers
from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.errors import UserError

TASK_OPTIONS = {"limit"}
TEXT_OPTIONS = {
    *("dataset_name", "dataset_split", "dataset_revision", "text_column"),
    *("sequence_length", "stride", "by_document", "eval_tokens", "torch_compile"),
}


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="Folder or Hub id: ours, or any causal language model's.", parser=path_or_id)
    ],
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", help="File, folder, glob, Hub id or embedded; of a task: file, Hub id.", parser=path_or_id
        ),
    ] = None,
    task: Annotated[Literal["hellaswag"] | None, typer.Option("--task", help="Instead of a text: hellaswag.")] = None,
    dataset_name: Annotated[str | None, typer.Option("--dataset_name", help="Configuration of a Hub set.")] = None,
    dataset_split: Annotated[str, typer.Option("--dataset_split", help="Split of a Hub set.")] = "train",
    dataset_revision: Annotated[str | None, typer.Option("--dataset_revision", help="Commit, tag, branch.")] = None,
    text_column: Annotated[str, typer.Option("--text_column", help="Column that holds the text.")] = "text",
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence_length", parser=whole(1), help="Of a window; default: as trained, or the model's."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", parser=whole(1), help="Sliding windows: tokens from one to the next.")
    ] = None,
    by_document: Annotated[
        bool | None, typer.Option("--by_document/--packed", help="Each on its own, or one after another.")
    ] = None,
    eval_tokens: Annotated[
        int | None, typer.Option("--eval_tokens", parser=whole(1), help="Score this many tokens only.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", parser=whole(1), help="Of a task: first examples.")] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--per_device_eval_batch_size", parser=whole(1, 2**16), help="Sequences per forward pass; changes nothing."
        ),
    ] = 8,
    mixed_precision: Annotated[Precision, typer.Option("--mixed_precision", help="What to compute in.")] = "no",
    torch_compile: Annotated[bool, typer.Option("--torch_compile/--eager", help="Changes nothing but time.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Keep it in the run folder, for the model card.")] = False,
    is_json: AsJson = False,
) -> None:
    """Loss, perplexity and bits per byte of a text, each token scored once; or a task: hellaswag.

    Several processes share the work under accelerate launch --module hfgpt.cli evaluate ...

    Example: hfgpt evaluate out/run/checkpoint-latest --dataset "texts/*.txt"
    """
    from hfgpt.evaluation import evaluate as evaluation

    silence_transformers()
    _check_options(context, dataset, task)
    if task is None:
        source = {"dataset": dataset, "name": dataset_name, "split": dataset_split, "revision": dataset_revision}
        options: dict[str, Any] = {"sequence_length": sequence_length, "stride": stride, "by_document": by_document}
        options |= {"eval_tokens": eval_tokens, "torch_compile": torch_compile}
        measure = partial(evaluation.score_text, source={**source, "text_column": text_column}, **options)
    else:
        measure = partial(evaluation.score_task, task=task, source=dataset, limit=limit)
    _evaluate(checkpoint, task or "text", partial(measure, batch_size=batch_size), mixed_precision, record, is_json)


def _check_options(context: typer.Context, dataset: str | None, task: str | None) -> None:
    """Raise UserError where there is no text to score, or where an option does not go with what is scored."""
    if task is None and dataset is None:
        raise UserError("dataset: no text is named; give a file, folder, glob, Hub id or embedded, or --task hellaswag")
    given = [
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if wrong := [name for name in given if name in (TASK_OPTIONS if task is None else TEXT_OPTIONS)]:
        raise UserError(f"{', '.join(wrong)}: {'only for --task' if task is None else f'not for --task {task}'}")


def _evaluate(
    checkpoint: str, task: str, measure: partial[dict[str, Any]], precision: str, record: bool, is_json: bool
) -> None:
    from hfgpt.evaluation.evaluate import evaluate_checkpoint
    from hfgpt.evaluation.results import check_recordable, record_evaluation
    from hfgpt.training.out_of_memory import out_of_memory_named

    if record:
        check_recordable(checkpoint)
    with out_of_memory_named(
        f"in evaluation with batches of {measure.keywords['batch_size']}", "use a smaller --per_device_eval_batch_size"
    ):
        facts = evaluate_checkpoint(checkpoint, measure, precision)
    if rank_and_world_size()[0]:
        return
    # Record before printing: the pipe that reads the output may be closed.
    file = record_evaluation(checkpoint, task, facts) if record else None
    print(as_json(facts) if is_json else as_lines(facts))
    if file:
        print(f"recorded in {file}", file=sys.stderr)


def replace_compile_values(arguments: list[str]) -> list[str]:
    """Replace `--torch_compile true` and `--torch_compile false`, as recipes take them, by the flags of `evaluate`."""
    flags = {"true": "--torch_compile", "false": "--eager"}
    found: list[str] = []
    for argument in arguments:
        if arguments[0] == "evaluate" and found[-1:] == ["--torch_compile"] and argument in flags:
            found[-1] = flags[argument]
        else:
            found.append(argument)
    return found
