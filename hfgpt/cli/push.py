"""`hfgpt push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hfgpt.cli.options import path


def push(
    checkpoint: Annotated[Path, Argument(help="Checkpoint folder.", parser=path)],
    repository: Annotated[str, Argument(help="user/name on the Hub; without user/: your own account.")],
    private: Annotated[bool, Option("--private", help="Make the repository private; refuses a public one.")] = False,
    revision: Annotated[
        str | None, Option("--revision", help="Branch to push to; created if it does not exist.")
    ] = None,
    tag: Annotated[str | None, Option("--tag", help="Tag for the commit.")] = None,
    license: Annotated[str | None, Option("--license", help="For the card, such as apache-2.0.")] = None,
    language: Annotated[str | None, Option("--language", help="For the card, such as en.")] = None,
) -> None:
    """Verify a checkpoint and upload its model files and a card with the run's facts to the Hub, in one commit.

    The training state stays here.

    Example: hfgpt push out/run/checkpoint-latest me/tiny --private
    """
    from hfgpt.hub.push import push as push_checkpoint

    print(f"pushed to {push_checkpoint(checkpoint, repository, private or None, revision, tag, license, language)}")
