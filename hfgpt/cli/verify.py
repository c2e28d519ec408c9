"""`hfgpt verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from hfgpt.cli.options import AsJson, path
from hfgpt.cli.output import print_check, silence_transformers
from hfgpt.errors import UserError
from hfgpt.links import follow


def verify(
    checkpoint: Annotated[
        Path, Argument(help="Folder of a checkpoint, or of any GPT-2 model, or a GGUF file.", parser=path)
    ],
    source: Annotated[
        Path | None, Argument(help="The checkpoint that a GGUF file was exported from.", parser=path)
    ] = None,
    is_json: AsJson = False,
) -> None:
    """Check in a clean process that stock transformers loads a checkpoint and reproduces its recorded loss.

    A GGUF file is compared with the checkpoint it came from: each tensor, the tokens, and the sizes.

    Example: hfgpt verify out/run/checkpoint-latest
    """
    from hfgpt.hub.gguf_file import verify_gguf
    from hfgpt.hub.verify import verify as verify_checkpoint

    if follow(checkpoint).is_file():
        silence_transformers()
        print_check(verify_gguf(checkpoint, source), f"file {checkpoint}", is_json)
    elif checkpoint.suffix.lower() == ".gguf" and not follow(checkpoint).exists():
        raise UserError(f"{checkpoint}: no such file")
    elif source is not None:
        raise UserError(f"{source}: only a GGUF file is compared with a checkpoint, and {checkpoint} is no file")
    else:
        print_check(verify_checkpoint(checkpoint), f"checkpoint {checkpoint}", is_json)
