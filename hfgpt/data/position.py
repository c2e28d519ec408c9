"""Where a resumed run continues in its text, and whether the text is still the same."""

from __future__ import annotations

from typing import Any

from hfgpt.data.stream import Stream
from hfgpt.errors import UserError

# What the user knows a key of the fingerprint as, if it is not a setting of the same name.
SETTINGS = {
    "dataset.dataset": "dataset",
    "dataset.name": "dataset_name",
    "dataset.split": "dataset_split",
    "dataset.commit": "dataset_revision, as commit",
    "dataset.text_column": "text_column",
    "dataset.text_pieces": "characters per piece of a txt file",
    "dataset.tokens": "layout of the token files",
    "held_out": "eval_dataset or the hold-out rule",
    "held_out.hash": "validation text (eval_tokens, eval_dataset)",
    "blocks_per_step": "tokens_per_step, in blocks of sequence_length",
    "stream": "streaming",
}
SOURCE = ": "  # after the name of a source of a mixture, before its keys
FILE = "dataset.file "  # prefix of the keys of single files


def resumed_position(
    stream: Stream, fingerprint: dict[str, Any], position: dict[str, Any], accept_changes: bool = False
) -> tuple[dict[str, Any], str]:
    """Return where `stream` continues after a saved position, and what has changed since, in words.

    Raises UserError, naming each setting, if the text or its order has changed, unless that is accepted. If only the
    step size has changed, a position of the same form is still valid. After any other change the text starts over, in
    the epoch after the saved one, which has another order.
    """
    keys = dict.fromkeys([*fingerprint, *stream.fingerprint])
    keys.pop("weights", None)  # of a mixture: they may change
    if not any(FILE in key for key in fingerprint):  # of a resume point on the Hub: only the hash of all files
        keys = {key: None for key in keys if FILE not in key}
    changed = [key for key in keys if fingerprint.get(key) != stream.fingerprint.get(key)]
    words = "; ".join(_describe_changes(changed, fingerprint, stream.fingerprint))
    if changed and not accept_changes:
        raise UserError(
            f"resume_from_checkpoint: the text or its order has changed: {words}; restore these values, start a "
            "new run in another output_dir, or continue with the text as it is now: --accept_changed_text true"
        )
    if not _is_position(position):
        raise UserError(
            f"resume_from_checkpoint: not a valid position in the text: {position!s:.80}; use another checkpoint"
        )
    places, own = position.get("sources", {"": position}), getattr(stream, "sources", {"": stream})
    has_same_form = places.keys() == own.keys() and all(
        [*map(len, place.get("streams", []))] == [*map(len, own[name].start.get("streams", []))]
        for name, place in places.items()
    )
    if not changed and not has_same_form:
        raise UserError("resume_from_checkpoint: the position does not fit this text; use another checkpoint")
    if not changed or (changed == ["blocks_per_step"] and has_same_form):
        return position, words
    epoch = max(cursor[0] for place in places.values() for cursor in place.get("streams") or [[place.get("epoch")]])
    return stream.start_of_epoch(epoch + 1), words


def streams_of(position: dict[str, Any]) -> int | None:
    """Return the number of logical streams of a saved position; None if it has none."""
    sources = position.get("sources", {"": position})
    found = [of.get("streams") for of in sources.values() if isinstance(of, dict)] if isinstance(sources, dict) else []
    return next((len(streams) for streams in found if streams and isinstance(streams, list)), None)


def of_source(fingerprint: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Return the part of a mixture's fingerprint that is that of a source, None if it has none."""
    prefix = f"{name}{SOURCE}"
    return {
        key.removeprefix(prefix): value for key, value in (fingerprint or {}).items() if key.startswith(prefix)
    } or None


def _describe_changes(changed: list[str], then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each change once: of sources that are gone or new, only their names."""
    names = [dict.fromkeys(key.partition(SOURCE)[0] for key in one if SOURCE in key) for one in (then, now)]
    words, other = [], names[0].keys() ^ names[1].keys()
    if then.get("stream") == now.get("stream") == "mixture" and other:
        words.append(f"names of the sources ({', '.join(names[0])} then, {', '.join(names[1])} now)")
        changed = [key for key in changed if key.partition(SOURCE)[0] not in other]
    return words + [_describe_change(key, then.get(key), now.get(key)) for key in changed]


def _describe_change(key: str, then: Any, now: Any) -> str:
    name, colon, of_source = key.partition(SOURCE)
    if colon:
        return f"dataset {name}: {_describe_change(of_source, then, now)}"
    if key.startswith(FILE):
        return f"file {key.removeprefix(FILE)} {'is new' if then is None else 'is gone' if now is None else 'changed'}"
    if key == "blocks_per_step" and (isinstance(then, list) or isinstance(now, list)):
        stages = " then, ".join([_stages_in_words(then), _stages_in_words(now)])
        return f"{SETTINGS[key]} ({stages} now; only stages that begin after the checkpoint may change)"
    return f"{SETTINGS.get(key, key.replace('.', ' '))} ({then} then, {now} now)"


def _stages_in_words(value: Any) -> str:
    """Return a recorded number of blocks per step, or stages of [first step from 0, blocks]."""
    stages = value if isinstance(value, list) else [[0, value]]
    return ", ".join(f"{blocks}" + (f" from step {first + 1} on" if first else "") for first, blocks in stages)


def _is_position(position: dict[str, Any]) -> bool:
    """Return whether this has the form of a stream's position: a place in an epoch, or numbers for each stream.

    Of a mixture: counters, and such a position for each source.
    """
    if "sources" in position:
        sources, keys = position["sources"], ("blocks", "tokens", "ahead", "sources")
        counters = [position.get("step"), position.get("since"), *map(position.get, keys[:2])]
        numbers = [n for one in counters for n in (one.values() if isinstance(one, dict) else [one])]
        return (
            all(isinstance(position.get(key), dict) for key in keys)
            and isinstance(position.get("over"), list)
            and all(position[key].keys() == sources.keys() for key in keys[:2])
            and all(isinstance(number, int) and number >= 0 for number in numbers)
            and all(isinstance(one, dict) and "sources" not in one and _is_position(one) for one in sources.values())
            and bool(sources)
        )
    in_memory = position.keys() == {"epoch", "block"}
    cursors = [list(position.values())] if in_memory else position.get("streams")
    if not isinstance(cursors, list) or not all(isinstance(cursor, list) for cursor in cursors):
        return False
    numbers = [number for cursor in cursors for number in cursor]
    lengths = {len(cursor) for cursor in cursors}
    return (lengths == {2} if in_memory else lengths in ({4}, {5})) and all(
        isinstance(number, int) and number >= 0 for number in numbers
    )
