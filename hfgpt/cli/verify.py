"""`hfgpt verify`."""

from __future__ import annotations

from hfgpt.cli.options import AsJson, Checkpoint
from hfgpt.cli.output import print_check


def verify(checkpoint: Checkpoint, is_json: AsJson = False) -> None:
    """Check in a clean process that stock transformers loads a checkpoint and reproduces its recorded loss.

    Example: hfgpt verify out/run/checkpoint-latest
    """
    from hfgpt.hub.verify import verify as verify_checkpoint

    print_check(verify_checkpoint(checkpoint), f"checkpoint {checkpoint}", is_json)
