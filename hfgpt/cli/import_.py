"""`hfgpt import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hfgpt.cli.options import NewFolder, path, path_or_id
from hfgpt.cli.output import silence_transformers


def import_(
    checkpoint: Annotated[Path, Argument(help="nanoGPT's ckpt.pt; no code in it is run.", parser=path)],
    folder: NewFolder,
    tokenizer: Annotated[
        str | None, Option("--tokenizer", help="Hub id or folder, or char.", parser=path_or_id)
    ] = None,
    text: Annotated[
        Path | None, Option("--text", help="With char: the text that the characters came from.", parser=path)
    ] = None,
) -> None:
    """Turn a nanoGPT checkpoint into a GPT-2 folder for generate, verify, --init_from and stock transformers.

    Example: hfgpt import out/ckpt.pt out/model --tokenizer gpt2
    """
    from hfgpt.hub.import_export import import_nanogpt

    silence_transformers()
    print("\n".join(import_nanogpt(checkpoint, folder, tokenizer, text)))
