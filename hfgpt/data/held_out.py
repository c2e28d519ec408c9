"""Choose the text that is held out for evaluation: another dataset, or the last tenth of the characters."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hfgpt.config import PretrainConfig
from hfgpt.data.eval_source import open_eval_source, source_options
from hfgpt.data.file_hashes import is_earlier_hash
from hfgpt.data.open_source import Earlier, open_source
from hfgpt.data.source import Source, read_documents, text_hash
from hfgpt.data.threads import for_each
from hfgpt.data.units import IN_MEMORY_BYTES, Row, Unit, Unusable
from hfgpt.data.unusable import no_documents
from hfgpt.errors import UserError

# Largest number of characters, or tokens, held out of a large streamed text.
MAX_HELD_OUT_CHARACTERS = 8 * 2**20
# Of many files, at most the last ones of their units are held out; each is a request or two before the first step.
MAX_HELD_OUT_UNITS = 16
# Runs of an earlier version held out whole documents: the last ones, with a tenth of the characters in total.
WHOLE_DOCUMENTS = "last tenth"

Rows = list[Row | Unusable]


@dataclass
class HeldOut:
    """Validation documents, and the units or documents (of a text in memory) that remain for training.

    `rule` is recorded, so that a resumed run holds out the same text. `origin` is shown in the plan. `split_document`
    is the whole document that the border of the held-out part splits. `skipped`: rows skipped while reading. `size`:
    about how large the text of a stream is that remains, judging by what was read; see `_size_of`. `source`: where
    the documents are from, if not from the training text.
    """

    validation: list[Row]
    rule: str
    origin: str
    units: list[Unit]
    documents: list[Row]
    split_document: Row | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    size: float | None = None
    source: Source | None = None

    @functools.cached_property
    def hashes(self) -> frozenset[int]:
        return frozenset(map(text_hash, self.validation))

    @property
    def exclude(self) -> frozenset[int]:
        """Hashes of documents that training must not see: held-out ones, and the one that was split."""
        return self.hashes | (set() if self.split_document is None else {text_hash(self.split_document)})

    @property
    def whole_documents(self) -> list[Row]:
        """The documents of `exclude`."""
        return self.validation + ([] if self.split_document is None else [self.split_document])


def hold_out(
    config: PretrainConfig,
    source: Source,
    documents: list[Row] | None,
    saved_rule: str | None,
    readable: Callable[[Source, str], Source],
) -> HeldOut:
    """Hold out validation text.

    `documents`: all of the text if it is in memory, None for a stream. `saved_rule`: the rule of a run being resumed.
    `readable`: returns a source that can be read, for an `eval_dataset` of tokens, and a name of it for messages.
    """
    if isinstance(config.eval_dataset, dict):  # named texts, which are read once for all sources
        return HeldOut([], "eval_dataset", "eval_dataset", source.units, documents or [])
    if config.eval_dataset is not None:
        # A document has at least one token, so these are enough documents.
        enough = None if config.eval_tokens is None else config.eval_tokens + 1
        earlier, skipped = Earlier(hashes=saved_rule is not None and is_earlier_hash(saved_rule)), Counter[str]()
        eval_source = open_eval_source(config.eval_dataset, source, config, earlier)
        eval_source = readable(eval_source, f"eval_dataset={config.eval_dataset}")
        validation = list(islice(read_documents(eval_source, eval_source.units, skipped), enough))
        rule = f"eval_dataset {eval_source.fingerprint.get('hash', config.eval_dataset)}"
        origin, units = eval_source.description, source.units
        return HeldOut(validation, rule, origin, units, documents or [], skipped=skipped, source=eval_source)
    if source.validation:
        return _hold_out_named(source, documents, config.eval_tokens)
    if documents is not None:
        return _hold_out_in_memory(source, documents, saved_rule)
    return _hold_out_of_stream(source)


def open_evaluation_text(
    name: str,
    settings: dict[str, Any],
    config: PretrainConfig,
    source: Source | None,
    readable: Callable[[Source, str], Source],
) -> HeldOut:
    """Read a named evaluation text. `source`: the training text, if there is one, whose splits are names, too.

    `readable`: see `hold_out`.
    """
    where = f"eval_dataset.{name}" if name else "eval_dataset"
    skipped, enough = Counter[str](), None if config.eval_tokens is None else config.eval_tokens + 1
    try:
        if source is not None and settings.keys() == {"dataset"}:
            opened = open_eval_source(settings["dataset"], source, config)
        else:
            own = config.of_text(settings)
            assert isinstance(own.dataset, str)  # noqa: S101
            hub = own.dataset_name, own.dataset_split, own.dataset_revision
            opened = open_source(own.dataset, *hub, **source_options(own))
    except UserError as error:
        raise UserError(re.sub("^(eval_)?dataset(_split)?", where, str(error))) from error
    opened = readable(opened, f"{where}={settings['dataset']}")
    validation = list(islice(read_documents(opened, opened.units, skipped), enough))
    fingerprint = opened.fingerprint
    rule = f"eval_dataset {fingerprint.get('hash') or [fingerprint.get(key) for key in ('dataset', 'split', 'commit')]}"
    return HeldOut(validation, rule, opened.description, [], [], skipped=skipped, source=opened)


def _hold_out_named(source: Source, documents: list[Row] | None, eval_tokens: int | None) -> HeldOut:
    """Hold out what the names of the files call validation, up to `eval_tokens` or 8 Mi tokens."""
    files = sorted({unit.file for unit in source.validation})
    rule = f"held out: {', '.join(os.path.basename(file) for file in files)}"
    held_out = HeldOut([], rule, rule, source.units, documents or [])
    wanted = MAX_HELD_OUT_CHARACTERS if eval_tokens is None else eval_tokens + 1
    for document in read_documents(source, source.validation, held_out.skipped):
        held_out.validation.append(document)
        wanted -= len(document)
        if wanted <= 0:
            break
    if not held_out.validation:
        raise no_documents(f"dataset={source.description}: {rule}", held_out.skipped)
    return held_out


def _hold_out_in_memory(source: Source, documents: list[Row], saved_rule: str | None) -> HeldOut:
    split_document = None
    if saved_rule == WHOLE_DOCUMENTS and len(documents) > 1:
        rule = WHOLE_DOCUMENTS
        characters = np.cumsum([len(text) for text in reversed(documents)])
        first = max(1, len(documents) - 1 - int(np.searchsorted(10 * characters, characters[-1])))
        training, validation = documents[:first], documents[first:]
    else:
        rule = saved_rule if saved_rule == WHOLE_DOCUMENTS else f"last tenth of the {_unit(source)}"
        ends = np.cumsum([len(text) for text in documents])
        border = int(0.9 * int(ends[-1]))
        first = int(np.searchsorted(ends, border, "right"))
        split_document = documents[first]
        character = border - int(ends[first - 1] if first else 0)
        head = [split_document[:character]] if character else []
        training, validation = documents[:first] + head, [split_document[character:], *documents[first + 1 :]]
    share = _percent(sum(map(len, validation)), sum(map(len, documents)))
    origin = f"held out: the last tenth of the text ({share} of the {_unit(source)})"
    return HeldOut(validation, rule, origin, source.units, training, split_document)


class _Place(NamedTuple):
    """A unit that is read, by its number; with `by_file` by those of the file, and of the unit in it."""

    unit: int
    of_file: int = 0


class _Border(NamedTuple):
    """Where the held-out end of a stream begins; `share`: its part of the text, in words."""

    place: _Place
    row: int
    character: int = 0
    share: str = ""

    def rule(self, source: Source) -> str:
        unit, of_file = self.place
        where = f"file {unit}, unit {of_file}" if source.by_file else f"unit {unit}"
        character = f", {_unit(source)[:-1]} {self.character}" if self.character else ""
        return f"held out: {where} from row {self.row}{character} on"

    def units_before(self, source: Source) -> list[Unit]:
        """Return the units for training. That of the border is split between training and validation."""
        unit, of_file = self.place
        rows, characters = self.row + bool(self.character), self.character or None
        head = source.units[unit]._replace(rows=rows, characters=characters)
        if source.by_file:
            head = source.units[unit]._replace(stop=of_file) if not rows else head._replace(stop=of_file + 1)
        return source.units[:unit] + ([head] if rows or of_file else [])


def _hold_out_of_stream(source: Source) -> HeldOut:
    read = functools.cache(source.read)
    if source.by_file and not source.is_local:
        for_each(read, _probable_units(source))  # in threads, because each takes a request or two
    border, units, share_read = _find_border(source, read)
    rule = border.rule(source)
    held_out = HeldOut([], rule, rule + border.share, border.units_before(source), [])
    for place in sorted(place for place in units if place >= border.place):
        for row in read(units[place])[border.row if place == border.place else 0 :]:
            if isinstance(row, Unusable):
                held_out.skipped[row.reason] += 1
            else:
                held_out.validation.append(row)
    if border.character and held_out.validation:
        held_out.split_document = held_out.validation[0]
        held_out.validation[0] = held_out.split_document[border.character :]
    whole = sum(_size_of(row) for unit in units.values() for row in read(unit)) / share_read
    held_out.size = whole - sum(map(_size_of, held_out.validation))
    return held_out


def _size_of(row: Row | Unusable) -> int:
    """Return the UTF-8 bytes of a text, or the number of tokens and a separator. (Files also have keys and escapes.)"""
    if isinstance(row, Unusable):
        return 0
    return len(row.encode()) if isinstance(row, str) else len(row) + 1


def _from_the_end(source: Source) -> Iterator[tuple[_Place, Unit, int]]:
    """Yield the units that are read, from the last to the first, and their parts of the sum of all `size_bytes`."""
    for number in reversed(range(len(source.units))):
        whole = source.units[number]
        units = source.units_of(whole)
        total = sum(unit.size_bytes for unit in units) or 1
        for of_file in reversed(range(len(units))):
            size = whole.size_bytes * units[of_file].size_bytes // total  # the whole, if it is the unit itself
            yield _Place(number, of_file), units[of_file], size


def _probable_units(source: Source) -> list[Unit]:
    """Return the units that `_find_border` reads if sizes in bytes are about those in characters."""
    units, total = list[Unit](), 0
    for _, unit, _ in _from_the_end(source):
        if len(units) == MAX_HELD_OUT_UNITS or total >= MAX_HELD_OUT_CHARACTERS:
            break
        units.append(unit)
        total += unit.size_bytes
    return units


def _find_border(source: Source, read: Callable[[Unit], Rows]) -> tuple[_Border, dict[_Place, Unit], float]:
    """Find where the last tenth of the characters begins. Also returns the units that were read, and their share.

    Of a remote source, or one above 16 MiB, only the end is read; it also gives the ratio of characters to bytes.
    """
    units: dict[_Place, Unit] = {}
    lengths: dict[_Place, list[int]] = {}  # characters of the rows of the units that were read
    is_small = source.is_local and source.size_bytes <= IN_MEMORY_BYTES
    total_bytes = sum(unit.size_bytes for unit in source.units)
    read_bytes, characters, wanted, total, is_whole = 0, 0, 0, 0, True
    skipped = Counter[str]()
    for place, unit, size in _from_the_end(source):
        rows = read(unit)
        units[place] = unit
        lengths[place] = [0 if isinstance(row, Unusable) else len(row) for row in rows]
        skipped.update(row.reason for row in rows if isinstance(row, Unusable))
        read_bytes += size
        characters += sum(lengths[place])
        total = characters if place == (0, 0) else characters * total_bytes // max(read_bytes, 1)
        wanted = total - int(0.9 * total)
        if not is_small:
            wanted = min(wanted, MAX_HELD_OUT_CHARACTERS)
            if source.by_file and len(units) >= MAX_HELD_OUT_UNITS:
                wanted = min(wanted, characters)
            if 0 < wanted <= characters:
                is_whole = place == (0, 0)
                break
    if not characters:
        raise no_documents(f"dataset={source.description}", skipped)
    share = f" ({'' if is_whole else 'about '}{_percent(wanted, total)} of the {_unit(source)})"
    for place, of_unit in lengths.items():
        for row in reversed(range(len(of_unit))):
            if of_unit[row] >= wanted:
                return (
                    _Border(place, row, of_unit[row] - wanted, share),
                    units,
                    max(read_bytes, 1) / max(total_bytes, 1),
                )
            wanted -= of_unit[row]
    raise AssertionError("the text has fewer characters than were counted")


def _unit(source: Source) -> str:
    return "tokens" if source.has_tokens else "characters"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"
