"""The `hfgpt` command. Each command is one file; heavy imports wait until its function runs, so that --help is fast."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from hfgpt import __version__
from hfgpt.cli import audit, compare, doctor, evaluate, export, generate, import_, plan, push, sweep, tokenize, verify
from hfgpt.cli.run_recipe import run_command
from hfgpt.errors import UserError
from hfgpt.messages.formats import enumerated

INTERRUPTED = 130  # typer's exit code after Ctrl-C

app = typer.Typer(
    name="hfgpt",
    help="Pretrain a GPT-2-style model on the machine you have.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(plan.plan)
app.command()(compare.compare)
app.command(context_settings=sweep.CONTEXT)(sweep.sweep)
app.command()(generate.generate)
app.command()(evaluate.evaluate)
app.command()(verify.verify)
app.command()(push.push)
app.command()(audit.audit)
app.command()(export.export)
app.command("import")(import_.import_)
app.command()(tokenize.tokenize)
app.command()(doctor.doctor)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hfgpt {__version__}")


def main() -> None:
    """Run the command line in `sys.argv`: the console entry point."""
    run_command(run_app)


def run_app() -> None:
    """Run the command line in `sys.argv`. Raises UserError for wrong use of it."""
    try:
        if app(evaluate.replace_compile_values(sys.argv[1:]) or ["--help"], standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except typer.Abort as error:  # older versions of typer
        raise KeyboardInterrupt from error
    except Exception as error:
        # Wrong use of the command line. Which module holds click's exceptions depends on the typer version.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "hfgpt"
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        if found := re.fullmatch(r"(.*) is not one of ('.*')", message, re.DOTALL):
            choices = re.findall("'(.*?)'", found[2])
            message = f"{found[1]} must be {enumerated(choices, 'or')}"
        raise UserError(f"{message}; see {command} --help") from error
