"""How recipes and commands end: exit codes, one-line errors."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hfgpt.errors import RunError, UserError
from hfgpt.signals import follow_launcher

# How long another process leaves the main one to tell what both have met.
SECONDS_FOR_MAIN = 10.0


def run_recipe(main: Callable[[], Any]) -> None:
    """Runs `main` and ends the process as users expect: `if __name__ == "__main__": run_recipe(main)`.

    Returns when `main` does. UserError: all its problems on one line of stderr, and exit code 2. KeyboardInterrupt:
    130. Any other exception: traceback, one line with the cause last, 1. Of several processes the main one speaks,
    another one only of what the main one does not meet.
    """
    follow_launcher()  # it may die while everything is still being loaded
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    me = "" if world == "1" else f"process {rank} of {world}: "
    try:
        main()
    except (UserError, RunError) as error:
        message = "; ".join(getattr(error, "problems", [str(error)]))
        if rank != "0" and not getattr(error, "everywhere", False):
            time.sleep(SECONDS_FOR_MAIN)  # the launcher ends this process as soon as the main one has told the same
            message = me + message
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        if me:
            from hfgpt.distributed import tell

            tell(error)
        cause = (str(error).strip() or "no message").splitlines()[0]
        print(f"error: {me}{type(error).__name__}: {cause}", file=sys.stderr)
        sys.exit(1)
