"""`hfgpt export`."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Option

from hfgpt.cli.options import Checkpoint, NewFolder
from hfgpt.cli.output import silence_transformers


def export(
    checkpoint: Checkpoint,
    folder: NewFolder,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Option("--dtype", help="Data type of the saved weights.")
    ] = "float32",
    untie_head: Annotated[bool, Option("--untie_head", help="Also store the head's matrix.")] = False,
) -> None:
    """Write a checkpoint as a plain GPT-2 folder: model, tokenizer, card; no training state.

    Example: hfgpt export out/run/checkpoint-latest out/model --dtype bfloat16
    """
    from hfgpt.hub.import_export import export as export_checkpoint

    silence_transformers()
    print("\n".join(export_checkpoint(checkpoint, folder, dtype, untie_head)))
