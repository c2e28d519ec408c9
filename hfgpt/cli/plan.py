"""`hfgpt plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hfgpt.cli.options import AsJson, path
from hfgpt.cli.output import as_json
from hfgpt.errors import UserError


def plan(
    model: Annotated[str | None, typer.Option("--model", help="Size, or GPT2Config fields as {..}.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Exact name; default: this machine's.")] = None,
    tokens_per_step: Annotated[str | None, typer.Option("--tokens_per_step", help="Target tokens of a step.")] = None,
    sequence_length: Annotated[str | None, typer.Option("--sequence_length", help="Default: the model's.")] = None,
    vocab_size: Annotated[str | None, typer.Option("--vocab_size", help="Of the tokenizer; default: 50257.")] = None,
    mixed_precision: Annotated[str | None, typer.Option("--mixed_precision", help="auto, bf16, fp16, no.")] = None,
    torch_compile: Annotated[str | None, typer.Option("--torch_compile", help="auto, true, false.")] = None,
    gradient_checkpointing: Annotated[
        str | None, typer.Option("--gradient_checkpointing", help="true: recompute the blocks.")
    ] = None,
    optim: Annotated[str | None, typer.Option("--optim", help="adamw or muon.")] = None,
    processes: Annotated[str | None, typer.Option("--processes", help="One on each device.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Share parameters and optimizer (FSDP2).")] = False,
    memory_gib: Annotated[str | None, typer.Option("--memory_gib", help="Of one device.")] = None,
    mfu: Annotated[str | None, typer.Option("--mfu", help="Part of the peak that is reached; default: 0.4.")] = None,
    mfu_peak_tflops: Annotated[str | None, typer.Option("--mfu_peak_tflops", help="Peak of one device.")] = None,
    max_tokens: Annotated[str | None, typer.Option("--max_tokens", help="Token budget; default: 10e9.")] = None,
    price_per_hour: Annotated[str | None, typer.Option("--price_per_hour", help="Of one device.")] = None,
    watts: Annotated[str | None, typer.Option("--watts", help="That one device draws.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Take real steps here, cut in each way.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="With --measure: a plot, as PNG.", parser=path)
    ] = None,
    is_json: AsJson = False,
) -> None:
    """Plan a run: memory by part, the micro-batch that fits, time, energy and cost; the device need not be there.

    Example: hfgpt plan --model gpt2-125m --device "NVIDIA GeForce RTX 4070 Ti" --tokens_per_step 524288
    """
    flags = {key: value for key, value in locals().items() if value not in (None, False)}
    for key in ("is_json", "measure", "output"):
        flags.pop(key, None)
    planned: Any
    if measure:
        from hfgpt.planning.benchmark import measure_flags

        planned = measure_flags(flags)
        if output:
            planned.plot(output)
    elif output:
        raise UserError(f"output={output}: is the plot of --measure; state that, or leave it out")
    else:
        from hfgpt.planning.estimate import forecast

        planned = forecast(flags)
    print(as_json(planned.to_dict()) if is_json else "\n".join(planned.lines()))
