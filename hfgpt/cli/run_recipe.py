"""How recipes and commands end: exit codes, one-line errors."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hfgpt import safe_output as output
from hfgpt.distributed.launcher import ranks
from hfgpt.distributed.stop_signals import Interrupted, StopSignals
from hfgpt.errors import RunError, UserError, first_line

# How long another process leaves the main one to tell what both have met.
SECONDS_FOR_MAIN = 10.0


def run_recipe(main: Callable[[], Any]) -> None:
    """Runs `main` and ends the process as users expect: `if __name__ == "__main__": run_recipe(main)`.

    Returns when `main` does. UserError: all its problems on one line of stderr, and exit code 2. Any other exception:
    one line with the cause last, 1; its traceback is where that line says, else before it, and before it in any case
    with HFGPT_DEBUG=1. Signals: 128 + their number, at once where `main` does not wait for something better. Of several
    processes the main one speaks, another one only of what the main one does not meet. Output that cannot be written
    is dropped.
    """
    output.make_safe()
    _run(main)


def run_command(main: Callable[[], Any]) -> None:
    """As `run_recipe`, for a command, whose output is what it is for: a closed pipe ends it."""
    output.make_safe(must_write=True)

    def written() -> None:
        main()
        sys.stdout.flush()

    _run(written)


def _run(main: Callable[[], Any]) -> None:
    try:
        rank, world = ranks()
    except UserError:  # a fault of its own, for who needs them
        rank, world = 0, 1
    debug = os.environ.get("HFGPT_DEBUG", "0") not in ("", "0")
    me = "" if world == 1 else f"process {rank} of {world}: "
    signals = StopSignals(besides=[signal.SIGINT])  # which is a KeyboardInterrupt, as everywhere in Python
    try:
        with signals, signals.waiting():
            main()
    except (UserError, RunError) as error:
        if debug:
            traceback.print_exc()
        message = "; ".join(getattr(error, "problems", [str(error)]))
        if rank and not getattr(error, "everywhere", False):
            time.sleep(SECONDS_FOR_MAIN)  # the launcher ends this process as soon as the main one has told the same
            message = me + message
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except Interrupted:
        fault = signals.fault() or RunError("ended", 1)
        print(f"error: {me}{fault}", file=sys.stderr)
        sys.exit(fault.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        end = getattr(error, "end_of_run", None)
        if debug or getattr(error, "traceback_file", None) is None:
            traceback.print_exc()
        if me:
            from hfgpt.distributed.ranks import tell

            tell(error)
        print(f"error: {me}{first_line(error)}{f'; {end}' if end else ''}", file=sys.stderr)
        sys.exit(1)
