"""`hfgpt export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from hfgpt.cli.options import Checkpoint, path
from hfgpt.cli.output import silence_transformers
from hfgpt.errors import UserError

SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def export(
    checkpoint: Checkpoint,
    output: Annotated[Path, Argument(help="New folder for the GPT-2 model, or new file model.gguf.", parser=path)],
    format: Annotated[
        Literal["folder", "gguf"] | None, Option("--format", help="Default: gguf for a name that ends so, else folder.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "f32", "bf16", "f16", "q8_0"] | None,
        Option("--dtype", help="Data type of the saved weights. Default: float32, in GGUF float16. q8_0 is for GGUF."),
    ] = None,
    untie_head: Annotated[bool, Option("--untie_head", help="Also store the head's matrix.")] = False,
) -> None:
    """Write a checkpoint as a plain GPT-2 folder (model, tokenizer, card), or as a GGUF file for llama.cpp and Ollama.

    Example: hfgpt export out/run/checkpoint-latest out/model --dtype bfloat16
    """
    from hfgpt.hub.gguf_file import export_gguf
    from hfgpt.hub.import_export import export as export_folder

    silence_transformers()
    is_gguf = format == "gguf" if format else output.suffix.lower() == ".gguf"
    if not is_gguf and output.suffix in (".safetensors", ".bin", ".pt", ".pth", ".onnx"):
        raise UserError(f"{output}: this writes a folder; name one, or model.gguf for a GGUF file")
    name = SHORT.get(dtype or "", dtype or ("float16" if is_gguf else "float32"))
    if name == "q8_0" and not is_gguf:
        raise UserError("dtype=q8_0: only GGUF has it; name the output model.gguf, or use bfloat16")
    print("\n".join((export_gguf if is_gguf else export_folder)(checkpoint, output, name, untie_head)))
