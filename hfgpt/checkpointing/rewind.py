"""Return a run folder to a checkpoint: when a run resumes from it, or rolls back to it after a divergence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hfgpt.checkpointing.checkpoint import link, remove_checkpoint, rotate
from hfgpt.checkpointing.read_records import parse_record, read_records
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.files import remove, rename, replace, sync, write_whole
from hfgpt.links import LATEST

logger = logging.getLogger(__name__)


def rewind_run(
    run: RunFolder, checkpoint: Path | None, step: int, keep: int | None, rollback: dict[str, Any] | None = None
) -> None:
    """Reset the run folder to `step`, where the run resumes with `checkpoint` (None: it starts at step 1).

    rollback: what the ledger keeps of it, if the run itself goes back.
    Also completes a link or rotation that a killed process left undone.
    """
    if checkpoint and run.room and checkpoint.is_relative_to(run.room):
        checkpoint = _adopt(run, checkpoint)
    own = [folder for folder in run.checkpoints() if checkpoint and folder.samefile(checkpoint)]
    if checkpoint and not own:
        run.copy_records(checkpoint.resolve().parent)
    is_linked = all([link(run, LATEST, folder) for folder in own])  # before later checkpoints are renamed
    rewind_records(run, step if checkpoint else -1, rollback)
    for folder in own if is_linked else []:
        rotate(run, folder, keep)


def _adopt(run: RunFolder, downloaded: Path) -> Path:
    """Move a downloaded checkpoint into the run folder, with the records beside it, and return its new place."""
    final = run.path / downloaded.name
    if final.exists():  # a damaged one
        remove_checkpoint(final)
    for path in (run.metrics, run.ledger):
        if (source := downloaded.parent / path.name).exists():
            replace(source, path)
    rename(downloaded, final)
    sync(run.path)
    return final


def rewind_records(run: RunFolder, step: int, rollback: dict[str, Any] | None = None) -> None:
    """Drop incomplete lines and the records of later steps, which the run writes again.

    Later checkpoints are renamed, so that none of them is taken for the newest. Unfinished ones are deleted.
    rollback: is noted in the ledger's line of the step, by the same write that drops later lines: a run that is killed
    before repeats these, one that is killed after goes on from the rollback. Dropped records of the metrics are then
    kept in abandoned.jsonl, because no step repeats them.
    """
    if not run.writes:
        return
    for unfinished in run.path.glob(".checkpoint-*"):
        remove(unfinished)
    for folder in run.checkpoints():
        if int(folder.name.split("-")[1]) > step:
            logger.warning("%s is set aside as %s", folder, run.abandon(folder).name)
    run.drop_unwritten(step)
    for path in filter(Path.exists, (run.metrics, run.ledger)):
        content = path.read_bytes()
        kept: list[bytes] = []
        dropped: list[bytes] = []
        for line in content.splitlines(keepends=True):
            record = parse_record(line)
            if record is not None and line.endswith(b"\n"):
                (kept if record["step"] <= step else dropped).append(line)
        if rollback and path == run.metrics:
            _keep_abandoned(run, rollback["number"], dropped)
        elif rollback and kept:
            last = json.loads(kept[-1])
            last["rollbacks"] = [*last.get("rollbacks", []), rollback]
            kept[-1] = _line(last)
        if (rest := b"".join(kept)) != content:
            write_whole(path, rest)


def _keep_abandoned(run: RunFolder, number: int, lines: list[bytes]) -> None:
    """Keep the records that rollback `number` drops, once, even if the rollback itself is repeated."""
    earlier = [record for record in read_records(run.abandoned) if record.get("rollback") != number]
    records = earlier + [{**json.loads(line), "rollback": number} for line in lines]
    write_whole(run.abandoned, b"".join(map(_line, records)))


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
