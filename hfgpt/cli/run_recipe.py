"""Run recipes and commands so that they end with one-line errors and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.distributed.stop_signals import Interrupted, StopSignals
from hfgpt.errors import RunError, UserError, first_line
from hfgpt.messages import safe_output

# How long other processes wait for the main process to print an error that they share.
SECONDS_FOR_MAIN = 10.0


def run_recipe(main: Callable[[], Any]) -> None:
    """Run `main` and end the process as users expect: `if __name__ == "__main__": run_recipe(main)`.

    Returns when `main` does. UserError: all its problems on one line of stderr, exit code 2. Any other exception: one
    line that ends with the cause, exit code 1; the traceback is in the file named there, or else above that line (with
    HFGPT_DEBUG=1 always above it). Signals: exit code 128 + the signal's number. An error that all processes share is
    printed by the main process. Output that cannot be written is dropped.
    """
    safe_output.make_safe()
    _run(main)


def run_command(main: Callable[[], Any]) -> None:
    """Like `run_recipe`, but for a command: a closed pipe ends it, because its output is its purpose."""
    safe_output.make_safe(must_write=True)

    def run_and_flush() -> None:
        main()
        sys.stdout.flush()

    _run(run_and_flush)


def _run(main: Callable[[], Any]) -> None:
    try:
        rank, world_size = rank_and_world_size()
    except UserError:  # `main` raises the error again if it needs them
        rank, world_size = 0, 1
    is_debugging = os.environ.get("HFGPT_DEBUG", "0") not in ("", "0")
    process = f"process {rank} of {world_size}: " if world_size > 1 else ""
    signals = StopSignals(except_for=[signal.SIGINT])  # stays a KeyboardInterrupt, as everywhere in Python
    try:
        with signals, signals.interruptible():
            main()
    except (UserError, RunError) as error:
        if is_debugging:
            traceback.print_exc()
        message = "; ".join(getattr(error, "problems", [str(error)]))
        if rank and not getattr(error, "everywhere", False):
            time.sleep(SECONDS_FOR_MAIN)  # the launcher ends this process once the main process has failed
            message = process + message
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except Interrupted:
        stopped = signals.to_error() or RunError("ended", 1)
        print(f"error: {process}{stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if is_debugging or getattr(error, "traceback_file", None) is None:
            traceback.print_exc()
        if world_size > 1:
            from hfgpt.distributed.ranks import report_failure  # imports torch

            report_failure(error)
        end = getattr(error, "end_of_run", None)
        print(f"error: {process}{first_line(error)}{f'; {end}' if end else ''}", file=sys.stderr)
        sys.exit(1)
