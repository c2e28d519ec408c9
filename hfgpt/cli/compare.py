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
        Path | None,
        typer.Option(
            "--output",
            help="Report: one page (.html), Markdown with PNG plots next to it (.md), or only the loss curve (.png).",
            parser=path,
        ),
    ] = None,
    tokens_per_step: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens_per_step",
            parser=whole(),
            help="For logs that do not state it: one value for all, or repeat the flag for each log.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print all rows and notes, and compare every pair of runs.")
    ] = False,
    is_json: AsJson = False,
) -> None:
    """Report on one run, or compare several with the first: settings, speed, and loss at equal steps, tokens and time.

    Example: hfgpt compare out/a out/b --output report.html
    """
    from hfgpt.comparing import compare as compare_runs
    from hfgpt.comparing import read_runs, render, report

    read = read_runs(runs, tokens_per_step or ())
    compared = compare_runs(read, all_pairs=verbose)
    found = report.build_report(read, compared, with_plots=output is not None)
    written = render.write_report(output, found) if output else []
    print(as_json(compared) if is_json else render.as_text(found, verbose))
    if written:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
