"""`hfgpt compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hfgpt.cli.options import AsJson, path, whole
from hfgpt.cli.output import as_json


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
    is_json: AsJson = False,
) -> None:
    """Report on one run, or put several side by side: settings, speed, loss at equal steps, tokens, FLOPs and time.

    Example: hfgpt compare out/a out/b --output report.md
    """
    from hfgpt.comparing import compare as compared
    from hfgpt.comparing import read_runs, report

    read = read_runs(runs, tokens_per_step or ())
    found = compared(read)
    written = report.write_report(output, read, found) if output else []
    print(as_json(found) if is_json else report.as_text(read, found))
    if written:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
