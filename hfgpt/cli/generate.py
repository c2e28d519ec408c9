"""`hfgpt generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from hfgpt.cli.options import Checkpoint, path, whole
from hfgpt.cli.output import as_json_line, silence_transformers
from hfgpt.errors import UserError


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str] | None, Option("--prompt", help="Text to continue; -: standard input.")] = None,
    prompt_file: Annotated[
        Path | None,
        Option("--prompt_file", parser=path, help="One prompt per line; or a .jsonl with the field prompt."),
    ] = None,
    num_samples: Annotated[int, Option("--num_samples", parser=whole(), help="Texts per prompt.")] = 1,
    max_new_tokens: Annotated[int, Option("--max_new_tokens", parser=whole(), help="Tokens per text, at most.")] = 200,
    temperature: Annotated[float, Option("--temperature", help="0: always the most likely token.")] = 1.0,
    top_k: Annotated[
        int | None, Option("--top_k", parser=whole(), help="Sample from the k most likely tokens; 0: all.")
    ] = None,
    top_p: Annotated[
        float | None, Option("--top_p", help="Sample from the most likely tokens with this total probability.")
    ] = None,
    seed: Annotated[int | None, Option("--seed", parser=whole(), help="The same seed gives the same texts.")] = None,
    batch_size: Annotated[int, Option("--batch_size", parser=whole(), help="Texts generated at a time.")] = 8,
    is_json: Annotated[bool, Option("--json", help="Print one JSON object per text.")] = False,
) -> None:
    """Generate text with a trained model. A single text is shown while it is written.

    Example: hfgpt generate out/run/checkpoint-latest --prompt "To be"
    """
    from hfgpt.evaluation import generate as generation
    from hfgpt.evaluation.loading import load_checkpoint
    from hfgpt.training.out_of_memory import out_of_memory_named

    silence_transformers()
    prompts = _read_standard_input(prompt or ())
    if prompt_file:
        prompts += generation.read_prompts(prompt_file)
    prompts = prompts or [""]
    model, tokenizer = load_checkpoint(checkpoint)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options |= {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "batch_size": batch_size}
    is_streamed = len(prompts) * num_samples == 1 and not is_json
    if is_streamed:
        options["stream"] = lambda _, piece: print(piece, end="", flush=True)
    texts = generation.generate(model, tokenizer, prompts, **options)
    if is_streamed:
        print(prompts[0], end="", flush=True)
    with out_of_memory_named("in generation", "use a smaller --batch_size, or fewer --max_new_tokens"):
        for number, text in enumerate(texts):
            given = prompts[number // num_samples]
            if is_json:
                print(as_json_line({"prompt": given, "text": text}), flush=True)
            elif is_streamed:
                print()
            else:
                print("---\n" * (number > 0) + given + text, flush=True)


def _read_standard_input(prompts: Sequence[str]) -> list[str]:
    """Return the prompts, replacing "-" with standard input."""
    if "-" not in prompts:
        return list(prompts)
    fix = "give a text, or --prompt_file"
    if prompts.count("-") > 1:
        raise UserError("prompt -: standard input can be read only once; give - once")
    if sys.stdin is None:
        raise UserError(f"prompt -: standard input is closed; {fix}")
    try:
        return [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompts]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt -: standard input cannot be read ({error}); {fix}") from None
