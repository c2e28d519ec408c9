"""`hfgpt tokenize`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hfgpt.checkpointing import lock
from hfgpt.cli.options import AsJson, DatasetName, DatasetRevision, DatasetSplit, TextColumn, path, path_or_id, whole
from hfgpt.cli.output import as_json, as_lines, silence_transformers
from hfgpt.errors import RunError, UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"


def tokenize(
    dataset: Annotated[str, Argument(parser=path_or_id, help="File, folder, glob, Hub id or embedded.")],
    folder: Annotated[Path, Argument(parser=path, help="Folder for the shards.")],
    tokenizer: Annotated[
        str, Option("--tokenizer", parser=path_or_id, help="Hub id or folder of the tokenizer.")
    ] = "gpt2",
    dataset_name: DatasetName = None,
    dataset_split: DatasetSplit = "train",
    dataset_revision: DatasetRevision = None,
    text_column: TextColumn = "text",
    shard_tokens: Annotated[
        int, Option("--shard_tokens", parser=whole(1, 2**31 - 1), help="Tokens in each shard.")
    ] = 100_000_000,
    num_workers: Annotated[
        int | None, Option("--num_workers", parser=whole(1, 1024), help="Processes; default: one per core.")
    ] = None,
    is_json: AsJson = False,
) -> None:
    """Write the tokens of a text as shards in llm.c's layout, for --dataset of later runs.

    Continues where it was interrupted. hfgpt_tokens.json beside the shards names tokenizer, source and commit.

    Example: hfgpt tokenize "texts/*.jsonl" shards --tokenizer gpt2
    """
    from hfgpt.data.tokenize import tokenize as write_shards

    silence_transformers()
    source = {"dataset": dataset, "name": dataset_name, "split": dataset_split, "revision": dataset_revision}
    with _locked(folder):
        facts = write_shards({**source, "text_column": text_column}, folder, tokenizer, shard_tokens, num_workers)
    shown = {key: value for key, value in facts.items() if key not in ("text", "finished")}
    print(as_json(facts) if is_json else as_lines({**shown, "shards": len(facts["shards"]), "folder": folder}, "none"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second `hfgpt tokenize` out of the folder. Raises UserError if there is one, or no folder can be made.

    What the system refuses to write, as on a full disk, becomes a RunError in one line.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "ab+")  # noqa: SIM115 closed below
    except OSError as error:
        raise UserError(f"folder={folder}: {error.strerror}; choose a writable folder") from error
    with closing(file):
        try:
            lock.acquire(file)
        except BlockingIOError:
            raise UserError(f"folder={folder}: another hfgpt tokenize is writing it; wait for it, or stop it") from None
        except OSError:  # not every file system has locks
            logger.warning("%s cannot be locked: do not start a second hfgpt tokenize for it", folder)
        try:
            yield
        except OSError as error:
            fix = "make room, or the folder writable, and run it again, which continues"
            raise RunError(f"folder={folder}: cannot be written ({error.strerror or error}); {fix}") from error
        finally:
            (folder / LOCK).unlink()
            if not any(folder.iterdir()):  # nothing could be written
                folder.rmdir()
