"""Where a resumed run goes on in its text, and whether that is still the text it was."""

from __future__ import annotations

from typing import Any

from hfgpt.data.stream import MemoryBlocks, Stream
from hfgpt.errors import UserError

# Fingerprint keys in the user's words, where they are not settings by their own name.
SETTINGS = {
    "dataset.dataset": "dataset",
    "dataset.name": "dataset_name",
    "dataset.split": "dataset_split",
    "dataset.commit": "dataset_revision, as commit",
    "dataset.text_column": "text_column",
    "dataset.text_pieces": "characters of a piece of a txt file",
    "held_out": "eval_dataset or the rule to hold out",
    "held_out.hash": "validation text (eval_tokens, eval_dataset)",
    "blocks_per_step": "tokens_per_step, in blocks of sequence_length",
    "stream": "streaming",
}


def resumed_position(
    stream: Stream, fingerprint: dict[str, Any], position: dict[str, Any], accept_changes: bool = False
) -> tuple[dict[str, Any], str]:
    """Where `stream` goes on from a saved position, and what has changed since, in words.

    Raises UserError naming each setting that is not the one the position was saved with, unless these are accepted:
    with another step size the position holds where its form does, with any other change the text starts anew, in the
    epoch after the saved one, whose order is another.
    """
    keys = dict.fromkeys([*fingerprint, *stream.fingerprint])
    changes = {key: (fingerprint.get(key), stream.fingerprint.get(key)) for key in keys}
    changes = {key: (then, now) for key, (then, now) in changes.items() if then != now}
    words = "; ".join(
        f"{SETTINGS.get(key, key.replace('.', ' '))} ({then} then, {now} now)" for key, (then, now) in changes.items()
    )
    if changes and not accept_changes:
        raise UserError(
            f"resume_from_checkpoint: text and order are not those of this run: {words}; restore these values, go on "
            "with it as it is now by --accept_changed_text true, or start a new run in another output_dir"
        )
    if not _is_position(position):
        raise UserError(f"resume_from_checkpoint: no position in a text: {position!s:.80}; take another checkpoint")
    cursors = position.get("streams", [])
    same_form = len(cursors) == getattr(stream, "streams", 0)
    if not changes and not same_form:
        raise UserError("resume_from_checkpoint: its position is not of this text's form; take another checkpoint")
    if not changes or (changes.keys() == {"blocks_per_step"} and same_form):
        return position, words
    epoch = 1 + max(cursor[0] for cursor in cursors) if cursors else 1 + position["epoch"]
    if isinstance(stream, MemoryBlocks):
        return {"epoch": epoch, "block": 0}, words
    return {"streams": [[epoch, 0, 0, 0] for _ in range(stream.streams)]}, words


def _is_position(position: dict[str, Any]) -> bool:
    """Whether it has one of the two forms that streams give: a place in an epoch, or four numbers for each stream."""
    in_memory = position.keys() == {"epoch", "block"}
    cursors = [list(position.values())] if in_memory else position.get("streams")
    if not isinstance(cursors, list) or not all(isinstance(cursor, list) for cursor in cursors):
        return False
    numbers = [number for cursor in cursors for number in cursor]
    return {len(cursor) for cursor in cursors} == {2 if in_memory else 4} and all(
        isinstance(number, int) and number >= 0 for number in numbers
    )
