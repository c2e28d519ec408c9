"""Render a report: as text for a terminal, or as a Markdown, HTML or PNG file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from hfgpt.comparing import png
from hfgpt.comparing.page import as_page
from hfgpt.comparing.plots import PLOT_NAMES
from hfgpt.comparing.report import Report, Row
from hfgpt.errors import UserError

SUFFIXES = (".md", ".markdown", ".html", ".htm", ".png")
SUFFIXES_IN_WORDS = ".md, .html or .png"
WIDTH = 100  # of the terminal; more than four runs need more
_LABELS, _COLUMN = 34, 16  # width of the labels, and least width of a run's column
_NOTES = 3  # per pair, and in the whole report, unless verbose


def as_text(report: Report, verbose: bool = False) -> str:
    """Return the report as text for a terminal, short or complete."""
    screen = io.StringIO()
    width = max(WIDTH, _LABELS + _COLUMN * len(report.names))
    # Plain text: names and settings must not be read as markup.
    console = Console(file=screen, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(_grid([Row("", report.names, False)]))
    for title, rows in report.all_tables:
        if shown := [row for row in rows if verbose or not row.is_detail]:
            console.print(f"\n{title}")
            console.print(_grid(shown))
    console.print("", *report.footnotes, sep="\n")
    for title, verdict in report.verdicts:
        console.print(f"\n{title}: {verdict.summary}")
        console.print(_bullets(verdict.evidence + _shortened(verdict.notes, verbose)))
    for title, lines in (("events", report.events if verbose else []), ("notes", _shortened(report.notes, verbose))):
        if lines:
            console.print(f"\n{title}")
            console.print(_bullets(lines))
    if verbose:
        console.print(f"\n{report.explanation}")
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines()).strip("\n")


def _grid(rows: Sequence[Row]) -> Grid:
    grid = Grid.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(width=_LABELS, overflow="fold")
    for _ in rows[0].cells:
        grid.add_column(ratio=1, overflow="fold")
    for label, cells, _ in rows:
        grid.add_row(f"  {label}", *cells)
    return grid


def _bullets(lines: Sequence[str]) -> Grid:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("  -", line)
    return grid


def _shortened(notes: list[str], verbose: bool) -> list[str]:
    more = len(notes) - _NOTES
    return notes if verbose or more <= 0 else [*notes[:_NOTES], f"{more} more with --verbose"]


def write_report(path: Path, report: Report) -> list[Path]:
    """Write the whole report as Markdown or HTML, or its first plot as PNG, depending on the file name.

    The plots of a Markdown report are written next to it, with the same stem. Returns all files, the report last.
    Raises UserError if they cannot be written.
    """
    if path.is_dir():
        raise UserError(f"output={path}: is a folder; give a file name, such as {path / 'report.html'}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"output={path}: unknown format; use a file name that ends in {SUFFIXES_IN_WORDS}")
    if suffix == ".png" and not report.plots:
        raise UserError(f"output={path}: the runs have no records to draw yet; try again later")
    if not path.parent.exists():
        raise UserError(f"output={path}: there is no folder {path.parent}; create it, or choose another place")
    try:
        if suffix == ".png":
            path.write_bytes(png.draw(report.plots[0], dpi=200))
        elif suffix in (".html", ".htm"):
            path.write_text(as_page(report), encoding="utf-8", errors="replace", newline="\n")
        else:
            return _write_markdown(path, report)
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror}); choose another place") from None
    return [path]


def _write_markdown(path: Path, report: Report) -> list[Path]:
    files = {name: path.with_name(f"{path.stem}_{name}.png") for name in PLOT_NAMES}
    drawn = {plot.name: png.draw(plot) for plot in report.plots}
    for file in files.values():
        file.unlink(missing_ok=True)  # a leftover plot of an earlier report would seem to belong to this one
    for name, picture in drawn.items():
        files[name].write_bytes(picture)
    text = as_markdown(report, {name: file.name for name, file in files.items()})
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return [*(files[plot.name] for plot in report.plots), path]


def as_markdown(report: Report, plot_files: dict[str, str]) -> str:
    """Return the whole report as Markdown; plot_files: the file of each plot, by plot name."""
    names = [_escape(name) for name in report.names]
    lines = [f"# {', '.join(names)}", ""]
    for title, verdict in report.verdicts:
        lines += [f"**{_escape(title)}: {_escape(verdict.summary)}.**", ""]
        lines += [*(f"- {_escape(line)}" for line in verdict.evidence + verdict.notes), ""]
    for plot in report.plots:
        lines += [f"![{plot.title}]({plot_files[plot.name].replace(' ', '%20')})", ""]
    for title, rows in report.all_tables:
        if rows:
            lines += [
                f"## {title[0].upper()}{title[1:]}",
                "",
                f"| | {' | '.join(names)} |",
                "|---|" + "---|" * len(names),
            ]
            lines += [*(f"| {' | '.join(map(_escape, [row.label, *row.cells]))} |" for row in rows), ""]
    for title, items in (("Events", report.events), ("Notes", report.footnotes + report.notes)):
        if items:
            lines += [f"## {title}", "", *(f"- {_escape(item)}" for item in items), ""]
    return "\n".join([*lines, *([report.explanation, ""] if report.explanation else [])])


def _escape(text: str) -> str:
    for character in "\\|*_<":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
