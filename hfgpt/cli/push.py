"""`hfgpt push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfgpt.cli.options import path


def push(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.", parser=path)],
    repository: Annotated[str, typer.Argument(help="user/name on the Hub; a name alone is the token's user's.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private; refuses one that is public.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch; created if it does not exist.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Name for the commit.")] = None,
    license: Annotated[str | None, typer.Option("--license", help="For the card, such as apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option("--language", help="For the card, such as en.")] = None,
) -> None:
    """Verify a checkpoint and upload its model files and a card with the run's facts to the Hub, in one commit.

    The training state stays here.

    Example: hfgpt push out/run/checkpoint-latest me/tiny --private
    """
    from hfgpt.hub.push import push as push_checkpoint

    print(f"pushed to {push_checkpoint(checkpoint, repository, private or None, revision, tag, license, language)}")
