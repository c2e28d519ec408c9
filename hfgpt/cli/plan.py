"""`hfgpt plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from hfgpt.cli.options import AsJson, Precision, number, path, step_size, whole
from hfgpt.cli.output import as_json
from hfgpt.errors import UserError

NOT_MEASURED = {"device", "processes", "fsdp", "memory_gib", "mfu", "max_tokens", "price_per_hour", "watts"}
NOT_MEASURED |= {"ema_decay", "average_last"}


def plan(
    context: typer.Context,
    tokens_per_step: Annotated[
        Any, Option("--tokens_per_step", parser=step_size, help="Target tokens of a step, or stages that grow.")
    ],
    model: Annotated[str | None, Option("--model", help="Size, or GPT2Config fields as {..}.")] = None,
    device: Annotated[str | None, Option("--device", help="Exact device name; default: this machine's.")] = None,
    sequence_length: Annotated[
        int | None, Option("--sequence_length", parser=whole(), help="Default: the model's.")
    ] = None,
    vocab_size: Annotated[
        int | None, Option("--vocab_size", parser=whole(1), help="Entries of the tokenizer; default: 50257.")
    ] = None,
    mixed_precision: Annotated[Precision | None, Option("--mixed_precision", help="Default: auto.")] = None,
    torch_compile: Annotated[
        Literal["auto", "true", "false"] | None, Option("--torch_compile", help="Default: auto.")
    ] = None,
    gradient_checkpointing: Annotated[
        Literal["true", "false"] | None, Option("--gradient_checkpointing", help="true: recompute activations.")
    ] = None,
    optim: Annotated[Literal["adamw", "muon"] | None, Option("--optim", help="Default: adamw.")] = None,
    ema_decay: Annotated[float | None, Option("--ema_decay", help="Keep an average of the weights.")] = None,
    average_last: Annotated[float | None, Option("--average_last", help="The same.")] = None,
    processes: Annotated[
        int | None, Option("--processes", parser=whole(1), help="Processes, one per device; default: 1.")
    ] = None,
    fsdp: Annotated[bool, Option("--fsdp", help="Shard parameters and optimizer (FSDP2).")] = False,
    memory_gib: Annotated[
        float | None, Option("--memory_gib", parser=number(), help="Memory of one device, in GiB.")
    ] = None,
    mfu: Annotated[
        float | None, Option("--mfu", parser=number(1), help="Fraction of the peak rate; default: 0.4.")
    ] = None,
    mfu_peak_tflops: Annotated[float | None, Option("--mfu_peak_tflops", help="Peak rate of one device.")] = None,
    max_tokens: Annotated[
        int | None, Option("--max_tokens", parser=whole(), help="Token budget; default: 10e9.")
    ] = None,
    price_per_hour: Annotated[
        float | None, Option("--price_per_hour", parser=number(), help="Price of one device, per hour.")
    ] = None,
    watts: Annotated[float | None, Option("--watts", parser=number(), help="Power of one device, in watts.")] = None,
    measure: Annotated[bool, Option("--measure", help="Take real steps here, with each micro-batch.")] = False,
    output: Annotated[Path | None, Option("--output", parser=path, help="With --measure: write a plot (PNG).")] = None,
    is_json: AsJson = False,
) -> None:
    """Plan a run for a device that may be elsewhere: memory by part, the micro-batch that fits, time, energy and cost.

    Example: hfgpt plan --model gpt2-125m --device "NVIDIA GeForce RTX 4070 Ti" --tokens_per_step 524288
    """
    given = {key: value for key, value in context.params.items() if value is not None and value is not False}
    settings = {key: value for key, value in given.items() if key not in ("measure", "output", "is_json")}
    planned = _plan(settings, measure, output)
    print(as_json(planned.to_dict()) if is_json else "\n".join(planned.lines()))


def _plan(settings: dict[str, Any], measure: bool, output: Path | None) -> Any:
    """Return a Forecast, or with `measure` a Measurement, which is drawn into `output`."""
    if measure:
        from hfgpt.planning.benchmark import measure_splits

        if wrong := [key for key in settings if key in NOT_MEASURED]:
            raise UserError(
                f"{', '.join(wrong)}: cannot be used with --measure, which runs on this machine; leave it out"
            )
        measured = measure_splits(**settings)
        if output:
            measured.plot(output)
        return measured
    if output:
        raise UserError(f"output={output}: only --measure draws a plot; add --measure, or leave it out")
    from hfgpt.planning.estimate import forecast

    return forecast(**settings)
