"""`hfgpt sweep`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfgpt.checkpointing.run_folder import RunFolder, write_json
from hfgpt.cli.options import AsJson, path, whole
from hfgpt.cli.output import as_json
from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.distributed.stop_signals import StopSignals
from hfgpt.errors import RunError, UserError
from hfgpt.files import WINDOWS, read_text_file
from hfgpt.messages.formats import counted, shown

if TYPE_CHECKING:
    from hfgpt.comparing.sweep import SweptRun
    from hfgpt.settings.grid import Point

RECORD, LOG = "sweep.json", "sweep.log"  # in the folder of each point
NOT_SET = "not set"
LONGEST_CAUSE = 500  # of a failed point, in characters
NARROWEST = 60  # table, in characters
WAIT_SECONDS = 0.2
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def sweep(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe, before its flags.", parser=path)],
    output_dir: Annotated[
        Path | None,
        typer.Option("--output_dir", help="Folder of the sweep, of run folders; default: out/sweep.", parser=path),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config_file", help="Start points with accelerate launch and this configuration.", parser=path),
    ] = None,
    max_failures: Annotated[
        int | None, typer.Option("--max_failures", parser=whole(1), help="Stop after this many failed points.")
    ] = None,
    table_only: Annotated[bool, typer.Option("--table_only", help="Run nothing; show what is there.")] = False,
    is_json: AsJson = False,
) -> None:
    """Run a recipe at each point of a grid, one after the other, and compare: flags with commas have several values.

    Points that have finished are not run again, and unfinished ones resume: repeat the command after a stop. With
    several --seed, points that differ only in it are one, with mean and noise. With several --model, the loss is fitted
    over sizes.

    Example: hfgpt sweep recipes/quickstart.py --learning_rate 1e-3,3e-3,1e-2 --seed 1,2,3 --output_dir out/sweep
    """
    from hfgpt.comparing.sweep import summarize_sweep
    from hfgpt.comparing.sweep_report import WIDTH, as_text, write_sweep
    from hfgpt.settings.grid import read_grid

    output_dir = output_dir or Path("out", "sweep")
    points, notes = read_grid(context.args)
    start = _start_command(recipe, config_file)
    points = _in_earlier_folders(output_dir, points, recipe)
    records = {point.name: _record(recipe, point) for point in points}
    _check(output_dir, points, records)
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    failed = [] if table_only else _run_all(start, output_dir, points, records, max_failures)
    swept = [_read(output_dir, point) for point in points]
    if not any(one.run for one in swept) and not failed:
        raise UserError(f"output_dir={output_dir}: holds no run of this grid; leave out --table_only")
    result = summarize_sweep(swept)
    written = write_sweep(output_dir, swept, result)
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST)
    print(as_json(result) if is_json else as_text(result, width))
    print(f"written: {', '.join(written)}", file=sys.stderr)
    if failed:
        more = f"; and {len(failed) - 1} more, see above" if len(failed) > 1 else ""
        which = f"{counted(len(failed), 'point')} of {len(points)} failed: {failed[0]}{more}"
        raise RunError(f"{which}; the same command tries them again")


def _start_command(recipe: Path, config_file: Path | None) -> list[str]:
    for name, file in (("RECIPE", recipe), ("config_file", config_file)):
        if file is not None and not file.is_file():
            raise UserError(f"{name}={shown(file)}: there is no such file; write hfgpt sweep RECIPE.py --flag values")
    if rank_and_world_size()[1] > 1:
        raise UserError("hfgpt sweep starts the runs itself; start it without a launcher, and with --config_file")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config_file)] if config_file else []
    return [sys.executable, *launcher, str(recipe)]


def _record(recipe: Path, point: Point) -> dict[str, Any]:
    """Return what a point is run with; a folder with another record is not this point."""
    text = hashlib.sha256(recipe.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    return {"recipe": recipe.name, "recipe_sha256": text, "settings": json.loads(json.dumps(point.settings))}


def _check(output_dir: Path, points: list[Point], records: dict[str, dict[str, Any]]) -> None:
    """Raise UserError if a folder of a point holds a run with other settings."""
    RunFolder(output_dir).check_writable()
    problems = []
    for point in points:
        folder, wanted = output_dir / point.name, records[point.name]
        found = _stored(folder)
        if os.path.lexists(folder):
            RunFolder(folder).check_writable()
        if not RunFolder(folder).holds_run():  # it failed before its first step, or did not start
            continue
        differ = [key for key in ("recipe", "recipe_sha256") if found.get(key) != wanted[key]][:1]
        settings = found.get("settings") or {}
        keys = dict.fromkeys((*settings, *wanted["settings"]))
        differ += [key for key in keys if settings.get(key, NOT_SET) != wanted["settings"].get(key, NOT_SET)]
        texts = [_difference(key, settings, wanted["settings"]) for key in differ]
        if not found:
            texts = ["its sweep.json is missing or damaged"]
        if texts:
            problems.append(
                f"output_dir={output_dir}: {point.name} was run with other settings ({'; '.join(texts[:3])})"
            )
    if problems:
        more = f" and {len(problems) - 1} more points" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}; choose another output_dir, or the same settings")


def _difference(key: str, *of_both: dict[str, Any]) -> str:
    if key.startswith("recipe"):
        return "the recipe has changed"
    before, now = (shown(settings.get(key, NOT_SET)) for settings in of_both)
    return f"{key}: {before}, now {now}"


def _in_earlier_folders(output_dir: Path, points: list[Point], recipe: Path) -> list[Point]:
    """Return the points, named as the folders that have their settings, if an earlier grid gave them other names."""
    earlier: dict[str, list[str]] = {}
    for file in sorted(output_dir.glob(f"*/{RECORD}")):
        record = {key: value for key, value in _stored(file.parent).items() if key not in ("exit_code", "error")}
        earlier.setdefault(json.dumps(record, sort_keys=True), []).append(file.parent.name)
    names = [earlier.get(json.dumps(_record(recipe, point), sort_keys=True), [point.name]) for point in points]
    return [
        point if point.name in found else point._replace(name=found[0])
        for point, found in zip(points, names, strict=True)
    ]


def _stored(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads(read_text_file(folder / RECORD))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _read(output_dir: Path, point: Point) -> SweptRun:
    from hfgpt.comparing.sweep import SweptRun

    folder = output_dir / point.name
    return SweptRun(point.name, point.values, folder, _stored(folder).get("error"))


def _run_all(
    start: list[str], output_dir: Path, points: list[Point], records: dict[str, Any], max_failures: int | None
) -> list[str]:
    """Run all points that have not finished; return a line for each that failed. Raises RunError after a signal."""
    failed: list[str] = []
    for number, point in enumerate(points, start=1):
        folder = output_dir / point.name
        where = f"point {number} of {len(points)}  {point.name}"
        _wait_until_free(folder)
        if _read(output_dir, point).has_ended:
            print(f"{where}: finished before", file=sys.stderr)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, records[point.name])
        print(f"{where}: its output is in {folder / LOG}", file=sys.stderr, flush=True)
        earlier = (folder / LOG).stat().st_size if (folder / LOG).exists() else 0
        flags = [f"--output_dir={folder}", "--resume_from_checkpoint=latest"]
        with StopSignals() as signals:
            code = launch([*start, *point.flags, *flags], folder / LOG, signals)
            _wait_until_free(folder)  # a launcher may end before its run has saved
        if stopped := signals.to_error():
            raise RunError(
                f"{stopped}: stopped at point {number} of {len(points)}, {point.name}; "
                "run the same command to continue",
                stopped.exit_code,
            )
        if code:
            how = f"exit code {code}: " if code > 0 else f"killed by signal {-code}; its last line: "
            error = f"{how}{_last_line(folder / LOG, earlier)}"
            if "another run is using" in error and _read(output_dir, point).has_ended:  # of another sweep
                print(f"{where}: finished by another sweep", file=sys.stderr)
                continue
            write_json(folder / RECORD, {**records[point.name], "exit_code": code, "error": error})
            failed.append(f"{point.name}: {error}")
            print(f"{where}: failed: {error}", file=sys.stderr, flush=True)
        if len(failed) == max_failures:
            break
    return failed


def launch(command: list[str], log: Path, signals: StopSignals) -> int:
    """Run a command to its end, with its output in `log`; return its exit code. Signals are passed on to it."""
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    is_passed_on = False
    while True:
        try:
            return process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            # On Windows the console gives Ctrl-C to all its processes, and other signals would end a run at once.
            if signals.received and not is_passed_on and not WINDOWS:
                process.send_signal(signals.received)
                is_passed_on = True


def _wait_until_free(folder: Path) -> None:
    """Wait until no run is using the folder: one whose sweep or launcher was killed may still be saving."""
    is_named = False
    while (folder / ".lock").exists():
        try:
            RunFolder(folder).check_free()
        except UserError as error:
            if "another run" not in str(error):
                raise
            if not is_named:
                print(f"{folder.name}: waiting for a run that is still using it", file=sys.stderr, flush=True)
            is_named = True
            time.sleep(WAIT_SECONDS)
        else:
            return


def _last_line(log: Path, start: int) -> str:
    """Return the last error in a log, or else its last line; `start`: where the newest output begins."""
    lines = log.read_bytes()[start:][-100_000:].decode(errors="replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]  # a launcher's own lines may follow
    errors = errors or [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")[:LONGEST_CAUSE]
