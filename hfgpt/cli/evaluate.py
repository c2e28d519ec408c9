"""`hfgpt evaluate`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from hfgpt.cli.options import (
    AsJson,
    DatasetName,
    DatasetRevision,
    DatasetSplit,
    Precision,
    TextColumn,
    path_or_id,
    whole,
)
from hfgpt.cli.output import as_json, as_lines, silence_transformers
from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.errors import UserError

TASK_OPTIONS = ("limit",)
TEXT_OPTIONS = (
    *("dataset_name", "dataset_split", "dataset_revision", "text_column", "tokens_dtype", "tokens_column"),
    *("sequence_length", "stride", "by_document", "eval_tokens", "torch_compile"),
)


TokensDtype = Annotated[
    Literal["uint16", "uint32", "int32"] | None,
    Option("--tokens_dtype", help="Type of the ids in token files without a header."),
]
TokensColumn = Annotated[
    str | None, Option("--tokens_column", help="Column that holds lists of token ids, instead of text.")
]


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[str, Argument(parser=path_or_id, help="Folder, or Hub id, of any causal language model.")],
    dataset: Annotated[
        str | None, Option("--dataset", parser=path_or_id, help="File, folder, glob, Hub id or embedded.")
    ] = None,
    task: Annotated[Literal["hellaswag"] | None, Option("--task", help="Score a task instead of a text.")] = None,
    dataset_name: DatasetName = None,
    dataset_split: DatasetSplit = "train",
    dataset_revision: DatasetRevision = None,
    text_column: TextColumn = "text",
    tokens_dtype: TokensDtype = None,
    tokens_column: TokensColumn = None,
    sequence_length: Annotated[
        int | None,
        Option("--sequence_length", parser=whole(1), help="Tokens per window; default: the training length."),
    ] = None,
    stride: Annotated[int | None, Option("--stride", parser=whole(1), help="Tokens between sliding windows.")] = None,
    by_document: Annotated[
        bool | None, Option("--by_document/--packed", help="Score each document on its own, or one after another.")
    ] = None,
    eval_tokens: Annotated[int | None, Option("--eval_tokens", parser=whole(1), help="Score only so many.")] = None,
    limit: Annotated[int | None, Option("--limit", parser=whole(1), help="Of a task: the first examples.")] = None,
    batch_size: Annotated[
        int, Option("--per_device_eval_batch_size", parser=whole(1, 2**16), help="Sequences per forward pass.")
    ] = 8,
    mixed_precision: Annotated[Precision, Option("--mixed_precision", help="Precision to compute in.")] = "no",
    torch_compile: Annotated[bool, Option("--torch_compile/--eager", help="Compile; changes only the speed.")] = False,
    record: Annotated[bool, Option("--record", help="Record the result for the model card.")] = False,
    is_json: AsJson = False,
) -> None:
    """Score a text, each token once: loss, perplexity and bits per byte; or a task: hellaswag.

    To share the work between processes: accelerate launch --module hfgpt.cli evaluate ...

    Example: hfgpt evaluate out/run/checkpoint-latest --dataset "texts/*.txt"
    """
    from hfgpt.evaluation import evaluate as evaluation

    silence_transformers()
    _check_options(context, dataset, task)
    if task is None:
        source = {"dataset": dataset, "name": dataset_name, "split": dataset_split, "revision": dataset_revision}
        options: dict[str, Any] = {"sequence_length": sequence_length, "stride": stride, "by_document": by_document}
        options |= {"eval_tokens": eval_tokens, "torch_compile": torch_compile}
        source |= {"text_column": text_column, "tokens_dtype": tokens_dtype, "tokens_column": tokens_column}
        measure = partial(evaluation.score_text, source=source, **options)
    else:
        measure = partial(evaluation.score_hellaswag, source=dataset, limit=limit)
    _evaluate(checkpoint, task or "text", partial(measure, batch_size=batch_size), mixed_precision, record, is_json)


def _check_options(context: typer.Context, dataset: str | None, task: str | None) -> None:
    """Raise UserError if there is no text to score, or if an option does not apply."""
    if task is None and dataset is None:
        raise UserError("dataset: no text is given; use a file, folder, glob, Hub id or embedded, or --task hellaswag")
    unfit = TASK_OPTIONS if task is None else TEXT_OPTIONS
    if wrong := [name for name in unfit if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]:
        options = {
            parameter.name: "/".join([*parameter.opts, *parameter.secondary_opts])
            for parameter in context.command.params
        }
        problem = "only used with --task" if task is None else f"cannot be used with --task {task}"
        fix = "leave it out" if len(wrong) == 1 else "leave them out"
        raise UserError(f"{', '.join(options[name] for name in wrong)}: {problem}; {fix}")


def _evaluate(
    checkpoint: str, task: str, measure: partial[dict[str, Any]], precision: str, record: bool, is_json: bool
) -> None:
    from hfgpt.evaluation.evaluate import evaluate_checkpoint
    from hfgpt.evaluation.results import check_recordable, record_evaluation
    from hfgpt.training.out_of_memory import out_of_memory_named

    if record:
        check_recordable(checkpoint)
    where = f"in evaluation with batches of {measure.keywords['batch_size']}"
    with out_of_memory_named(where, "use a smaller --per_device_eval_batch_size"):
        facts = evaluate_checkpoint(checkpoint, measure, precision)
    if rank_and_world_size()[0]:
        return
    try:  # recorded before printing, because the pipe that reads the output may be closed
        file = record_evaluation(checkpoint, task, facts) if record else None
    finally:  # a result that cannot be recorded is printed, too
        print(as_json(facts) if is_json else as_lines(facts))
    if file:
        print(f"recorded in {file}", file=sys.stderr)


def replace_compile_values(arguments: list[str]) -> list[str]:
    """Replace `--torch_compile true` and `--torch_compile false`, as in recipes, with the flags of `evaluate`."""
    flags = {"true": "--torch_compile", "false": "--eager"}
    found: list[str] = []
    for argument in arguments:
        if arguments[0] == "evaluate" and found[-1:] == ["--torch_compile"] and argument in flags:
            found[-1] = flags[argument]
        else:
            found.append(argument)
    return found
