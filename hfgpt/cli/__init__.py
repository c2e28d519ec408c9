"""The `hfgpt` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hfgpt import __version__
from hfgpt.cli.run_recipe import run_command
from hfgpt.distributed.launcher import ranks
from hfgpt.errors import RunError, UserError
from hfgpt.field_types import NOT_CONVERTIBLE, WHOLE_BELOW, convert, describe, shown
from hfgpt.files import local_path

INTERRUPTED = 130  # what typer returns after Ctrl-C
Dtype = Literal["float32", "bfloat16", "float16"]

app = typer.Typer(
    name="hfgpt",
    help="Pretrain a GPT-2-style model on the card you have.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def path(text: str) -> Path:
    """A path, as `local_path` reads it."""
    return Path(name(text))


def name(text: str) -> str:
    """A path, or something of the Hub."""
    try:
        return local_path(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def whole(least: int | None = None, most: int = WHOLE_BELOW - 1) -> Callable[[str], int]:
    """A whole number, which may be written 1e6, from `least` to `most`; without `least` its user checks it."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            try:
                value = convert(text, int)
            except NOT_CONVERTIBLE:
                raise typer.BadParameter(f"{shown(text)} is not {describe(int)}") from None
        if least is not None and not least <= value <= most:
            raise typer.BadParameter(f"{shown(value)} is not from {least} to {most}")
        return value

    return integer


def main() -> None:
    """The console entry point."""
    run_command(_run_app)


def _run_app() -> None:
    try:
        if app(_flags_without_values(sys.argv[1:]) or ["--help"], standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except typer.Abort as error:  # older versions
        raise KeyboardInterrupt from error
    except Exception as error:
        # Wrong use of the command line. Which module holds click's exceptions depends on the typer version.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "hfgpt"
        raise UserError(f"{error.format_message().rstrip('.')}; see {command} --help") from error


def _flags_without_values(arguments: list[str]) -> list[str]:
    """`evaluate --torch_compile true`, as recipes write it, as the flag that it is there."""
    if arguments[:1] != ["evaluate"]:
        return arguments
    flags = {("--torch_compile", "true"): "--torch_compile", ("--torch_compile", "false"): "--eager"}
    found: list[str] = []
    for argument in arguments:
        flag = flags.get((found[-1] if found else "", argument))
        found[-1:] = [flag] if flag else [*found[-1:], argument]
    return found


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hfgpt {__version__}")


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder: ours, or any GPT-2 model's.", parser=path)],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to go on from; repeat it for several; -: standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt_file", help="A prompt per line; of a .jsonl: the field prompt.", parser=path),
    ] = None,
    num_samples: Annotated[
        int, typer.Option("--num_samples", parser=whole(), help="Texts to write for each prompt.")
    ] = 1,
    max_new_tokens: Annotated[
        int, typer.Option("--max_new_tokens", parser=whole(), help="Tokens per text, at most.")
    ] = 200,
    temperature: Annotated[float, typer.Option("--temperature", help="0: the likeliest token.")] = 1.0,
    top_k: Annotated[
        int | None, typer.Option("--top_k", parser=whole(), help="Draw from the k likeliest; 0: from all.")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top_p", help="Draw from this much probability.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", parser=whole(), help="Same seed, same texts.")] = None,
    batch_size: Annotated[
        int, typer.Option("--batch_size", parser=whole(), help="Texts that are written at a time.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per text.")] = False,
) -> None:
    """Write text with a trained model; a single text appears as it is written.

    Example: hfgpt generate out/run/checkpoint-latest --prompt "To be"
    """
    from hfgpt.evaluation import generate as generation
    from hfgpt.training.out_of_memory import out_of_memory_named

    _quiet_transformers()
    if "-" in (prompt or []) and sys.stdin is None:
        raise UserError("prompt -: standard input is closed; give a text, or --prompt_file")
    try:
        prompts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompt or []]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt -: standard input cannot be read ({error}); give a text, or --prompt_file") from None
    if prompt_file:
        prompts += generation.read_prompts(prompt_file)
    prompts = prompts or [""]
    model, tokenizer = generation.load_checkpoint(checkpoint)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options |= {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "batch_size": batch_size}
    is_streamed = len(prompts) * num_samples == 1 and not as_json
    if is_streamed:
        options["stream"] = lambda _, piece: print(piece, end="", flush=True)
    texts = generation.generate(model, tokenizer, prompts, **options)
    if is_streamed:
        print(prompts[0], end="", flush=True)
    with out_of_memory_named("in generation", "state a smaller --batch_size, or fewer --max_new_tokens"):
        for number, text in enumerate(texts):
            given = prompts[number // num_samples]
            if as_json:
                print(json.dumps({"prompt": given, "text": text}, ensure_ascii=False), flush=True)
            elif is_streamed:
                print()
            else:
                print("---\n" * (number > 0) + given + text, flush=True)


@app.command()
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder or Hub id: ours, or any causal language model's.", parser=name)
    ],
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="File, folder, glob, Hub id or embedded; of a task: file, Hub id.", parser=name),
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
        int | None, typer.Option("--eval_tokens", parser=whole(1), help="Score so many only.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", parser=whole(1), help="Of a task: the first so many examples.")
    ] = None,
    per_device_eval_batch_size: Annotated[
        int,
        typer.Option(
            "--per_device_eval_batch_size", parser=whole(1, 2**16), help="Sequences per forward pass; changes nothing."
        ),
    ] = 8,
    mixed_precision: Annotated[Literal["auto", "bf16", "fp16", "no"], typer.Option("--mixed_precision")] = "no",
    torch_compile: Annotated[bool, typer.Option("--torch_compile/--eager", help="Changes nothing but time.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Keep it in the run folder; the card tells it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits per byte of a text, each token scored once; or a task: hellaswag.

    Several processes share the work under accelerate launch --module hfgpt.cli evaluate ...

    Example: hfgpt evaluate out/run/checkpoint-latest --dataset "texts/*.txt"
    """
    from hfgpt.evaluation import evaluate as scoring
    from hfgpt.training.out_of_memory import out_of_memory_named

    _quiet_transformers()

    if task is None and dataset is None:
        raise UserError("dataset: no text is named; give a file, folder, glob, Hub id or embedded, or --task hellaswag")
    stated: dict[str, Any] = (
        {"limit": limit} if task is None else {"sequence_length": sequence_length, "stride": stride}
    )
    if task is not None:
        stated |= {"by_document": by_document, "eval_tokens": eval_tokens, "torch_compile": torch_compile or None}
        stated |= {"dataset_name": dataset_name, "dataset_revision": dataset_revision}
        stated |= {"dataset_split": None if dataset_split == "train" else dataset_split}
        stated |= {"text_column": None if text_column == "text" else text_column}
    if strange := [name for name, value in stated.items() if value is not None]:
        raise UserError(f"{', '.join(strange)}: {'of --task alone' if task is None else f'not for --task {task}'}")
    if record:
        from hfgpt.evaluation.results import check_recordable, record_evaluation

        check_recordable(checkpoint)
    measure: Any
    if task is None:
        source = {"dataset": dataset, "name": dataset_name, "split": dataset_split, "revision": dataset_revision}
        source["text_column"] = text_column
        options: dict[str, Any] = {"sequence_length": sequence_length, "stride": stride, "by_document": by_document}
        options |= {"eval_tokens": eval_tokens, "torch_compile": torch_compile}
        measure = partial(scoring.score_text, source=source, batch_size=per_device_eval_batch_size, **options)
    else:
        options = {"source": dataset, "limit": limit, "batch_size": per_device_eval_batch_size}
        measure = partial(scoring.score_task, task=task, **options)
    where, fix = f"in evaluation with batches of {per_device_eval_batch_size}", "state a smaller "
    with out_of_memory_named(where, fix + "--per_device_eval_batch_size"):
        facts = scoring.evaluate_checkpoint(checkpoint, measure, mixed_precision)
    if ranks()[0]:
        return
    place = record_evaluation(checkpoint, task or "text", facts) if record else None  # first: a pipe may be closed
    print(_as_json(facts) if as_json else "\n".join(_lines(facts)))
    if place:
        print(f"recorded in {place}", file=sys.stderr)


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="nanoGPT's ckpt.pt; no code in it is run.", parser=path)],
    folder: Annotated[Path, typer.Argument(help="New folder for the GPT-2 model.", parser=path)],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Hub id or folder, or char.", parser=name)
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="With char: the text it was made from.", parser=path)
    ] = None,
) -> None:
    """Turn a nanoGPT checkpoint into a GPT-2 folder for generate, verify, --init_from and stock transformers.

    Example: hfgpt import out/ckpt.pt out/model --tokenizer gpt2
    """
    from hfgpt.hub import import_export as exchange

    _quiet_transformers()
    print("\n".join(exchange.import_nanogpt(checkpoint, folder, tokenizer, text)))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder: ours, or any GPT-2 model's.", parser=path)],
    folder: Annotated[Path, typer.Argument(help="New folder for the GPT-2 model.", parser=path)],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the numbers in the file.")] = "float32",
    untie_head: Annotated[bool, typer.Option("--untie_head", help="Store the head's matrix, too.")] = False,
) -> None:
    """Write a checkpoint as a plain GPT-2 folder: model, tokenizer, card; no training state.

    Example: hfgpt export out/run/checkpoint-latest out/model --dtype bfloat16
    """
    from hfgpt.hub import import_export as exchange

    _quiet_transformers()
    print("\n".join(exchange.export(checkpoint, folder, dtype, untie_head)))


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan a run: memory by part, the micro-batch that fits, time, energy and cost; the device need not be there.

    Example: hfgpt plan --model gpt2-125m --device "NVIDIA GeForce RTX 4070 Ti" --tokens_per_step 524288
    """
    flags = {key: value for key, value in locals().items() if value not in (None, False)}
    for key in ("as_json", "measure", "output"):
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
    print(_as_json(planned.to_dict()) if as_json else "\n".join(planned.lines()))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show what this machine offers: device, precision, compiler, peak rate, versions.

    Example: hfgpt doctor --json
    """
    from importlib.metadata import version

    from hfgpt.distributed import compiler, device_peaks
    from hfgpt.distributed import device as machine

    device, threads = machine.default_device(), machine.use_all_cores(1)
    name, precision = machine.device_name(device), machine.choose_precision("auto", device)
    compilation = compiler.choose_compile("auto", device, compiler.SHORT_RUN_FORWARD_PASSES)
    rated = device_peaks.rated_device_peak(device, precision.name)
    measured = device_peaks.measure_matmul_tflops(device, precision.name)
    stack = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
    facts: dict[str, Any] = {
        "device": device.type,
        "device_name": name,
        "memory_gib": round(machine.memory_bytes(device) / 2**30, 1),
        "cores": machine.available_cores(),
        "threads": threads,
        "precision": precision.name,
        "precision_reason": precision.reason,
        "torch_compile": compilation.enabled,
        "torch_compile_reason": compilation.reason,
        "peak_tflops_rated": rated.tflops if rated else None,
        "peak_rated_source": rated.source if rated else None,
        "peak_tflops_measured": measured.tflops,
        "peak_measured_source": measured.source,
        "versions": {"python": sys.version.split()[0], "hfgpt": __version__} | {part: version(part) for part in stack},
    }
    if as_json:
        print(_as_json(facts))
        return
    facts["versions"] = ", ".join(f"{part} {number}" for part, number in facts["versions"].items())
    print("\n".join(_lines(facts)))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Run folder.", parser=path)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove from a run's ledger what it was trained on: nothing repeated, skipped, or leaked into validation.

    The stream is made again, without training, and compared step by step. Example: hfgpt audit out/run
    """
    from hfgpt.data.audit import audit as audited

    _tell(audited(run), f"run {run}", as_json)


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN ...]", help="Run folders, or console logs of nanoGPT or llm.c.", parser=path),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", help="Markdown report; PNG plots go beside it.", parser=path)
    ] = None,
    tokens_per_step: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens_per_step",
            parser=whole(),
            help="Of logs that do not say: one for all, or repeated, one for each log.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print all rows and notes, and compare each run with each other.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report on one run, or compare several with the first: settings, speed, loss at equal steps, tokens and time.

    Example: hfgpt compare out/a out/b --output report.md
    """
    from hfgpt.comparing import compare as compare_runs
    from hfgpt.comparing import read_runs, render, report

    read = read_runs(runs, tokens_per_step or ())
    compared = compare_runs(read, all_pairs=verbose)
    found = report.build_report(read, compared, with_plots=output is not None)
    written = render.write_report(output, found) if output else []
    print(_as_json(compared) if as_json else render.as_text(found, verbose))
    if written:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder: ours, or any GPT-2 model's.", parser=path)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check in a clean process that stock transformers loads a checkpoint and gives the loss that was recorded.

    Example: hfgpt verify out/run/checkpoint-latest
    """
    from hfgpt.hub.verify import verify as verified

    _tell(verified(checkpoint), f"checkpoint {checkpoint}", as_json)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.", parser=path)],
    repository: Annotated[str, typer.Argument(help="user/name on the Hub; a name alone is the token's user's.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private; refuses one that is public.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch; made if there is none.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Name for the commit.")] = None,
    license: Annotated[str | None, typer.Option("--license", help="For the card, such as apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option("--language", help="For the card, such as en.")] = None,
) -> None:
    """Verify a checkpoint and upload its model files, with a card of the run's facts, to the Hub in one commit.

    Optimizer and text position stay here. Example: hfgpt push out/run/checkpoint-latest me/tiny --private
    """
    from hfgpt.hub.push import push as pushed

    print(f"pushed to {pushed(checkpoint, repository, private or None, revision, tag, license, language)}")


def _tell(facts: dict[str, Any], what: str, as_json: bool) -> None:
    """Print the facts of a check; raises RunError with its problems, if any."""
    if as_json:
        print(_as_json(facts))
    else:
        print("\n".join(_lines(facts, "not checked")))
    if facts["problems"]:
        raise RunError(f"{what}: {'; '.join(facts['problems'])}")


def _as_json(facts: dict[str, Any]) -> str:
    """With null for what JSON does not have: infinity, and what is no number."""
    return json.dumps(json.loads(json.dumps(facts), parse_constant=lambda _: None), indent=2)


def _lines(facts: dict[str, Any], unknown: str = "unknown") -> list[str]:
    shown = {k: unknown if v is None else "none" if v in ([], {}) else v for k, v in facts.items()}
    return [f"{key.replace('_', ' '):22} {value}" for key, value in shown.items()]


if __name__ == "__main__":
    main()
