"""`hfgpt audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from hfgpt.cli.options import AsJson, path
from hfgpt.cli.output import print_check
from hfgpt.links import follow


def audit(run: Annotated[Path, Argument(help="Run folder.", parser=path)], is_json: AsJson = False) -> None:
    """Prove from its ledger what a run was trained on: nothing repeated, skipped, or leaked into validation.

    The text is read again, without training, and compared step by step.

    Example: hfgpt audit out/run
    """
    from hfgpt.checkpointing.audit import audit as audit_run

    print_check(audit_run(follow(run)), f"run {run}", is_json)
