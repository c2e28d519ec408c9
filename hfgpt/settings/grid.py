"""The points of a sweep: flags whose values are separated by commas, and a short name for each combination."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import re
from typing import Any, NamedTuple, get_type_hints

from hfgpt.config import PretrainConfig
from hfgpt.errors import UserError
from hfgpt.messages.formats import shown
from hfgpt.model.configuration_gpt2 import model_fields
from hfgpt.settings.checks import out_of_range
from hfgpt.settings.field_types import AUTO, NO_VALUE, NOT_CONVERTIBLE, convert, describe
from hfgpt.settings.layers import LENGTHS, FileLayer, merge_layers, read_flags

# Settings whose value may have commas of its own. They are the same in all points.
WITH_COMMAS = ("report_to", "reserved_tokens", "hub_language", "sample_prompt", "run_name")
MOST_POINTS = 1000
LONGEST_NAME = 80  # of a folder; Windows allows 260 characters for a whole path
# Brackets, commas and quoted text; a quote after a letter is an apostrophe, as in it's.txt.
_PARTS = re.compile(r"""[,\[\](){}]|(?<!\w)(?:"(?:\\.|[^"\\])*"|'[^']*')""")


class Point(NamedTuple):
    """A run of a sweep. values: of the swept settings. settings: all that were stated. flags: for the recipe."""

    name: str
    values: dict[str, Any]
    settings: dict[str, Any]
    flags: list[str]


def read_grid(argv: list[str]) -> tuple[list[Point], list[str]]:
    """Return the points that flags describe, the first flag changing slowest, and notes on what is not swept.

    If no flag has several values, there is one point, named by all of them. Raises UserError, with all problems, for
    values that no run can have.
    """
    *files, given = read_flags(PretrainConfig, {}, argv)
    notes = [f"{key}={given[key]}: a list itself, the same in all points; not swept" for key in _commas(given)]
    texts: dict[str, list[Any]] = {key: _alternatives(key, value) for key, value in given.items()}
    problems = merge_layers(PretrainConfig, [*files, given], []).problems
    fixed = {key: value for layer in files for key, value in layer.items() if key not in given}
    known = PretrainConfig.__dataclass_fields__
    values = {key: [_read(key, text, problems) for text in alternatives] for key, alternatives in texts.items()
              if key in known}  # fmt: skip
    fixed = {key: _read(key, value, problems) for key, value in fixed.items() if key in known}
    problems += _find_unfit(fixed, values)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    pairs = {key: _different(key, texts[key], found) for key, found in values.items()}
    swept = {key: different for key, different in pairs.items() if len(different) > 1} or pairs
    if math.prod(map(len, swept.values())) > MOST_POINTS:
        raise UserError(f"the grid has more than {MOST_POINTS:,} points; leave out values")
    fixed |= {key: found[0] for key, found in values.items() if key not in swept}
    same = [f"--config={file.path}" for file in files if isinstance(file, FileLayer)]
    same += [f"--{key}={text[0]}" for key, text in texts.items() if key not in swept]
    return [_point(dict(zip(swept, chosen, strict=True)), fixed, same)
            for chosen in itertools.product(*swept.values())], notes  # fmt: skip


def _commas(given: dict[str, Any]) -> list[str]:
    return [key for key in WITH_COMMAS if key in given and len(split(str(given[key]))) > 1]


def _alternatives(key: str, value: Any) -> list[Any]:
    """Return the values of a flag; a file whose name has a comma, and a list of sources, are one value."""
    if not isinstance(value, str) or key in WITH_COMMAS or os.path.lexists(os.path.expanduser(value)):
        return [value]
    return split(value)


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes. Quotes around a whole part are removed."""
    depth, start, parts = 0, 0, []
    for found in _PARTS.finditer(text):
        if found[0] == "," and depth <= 0:
            parts.append(text[start : found.start()])
            start = found.end()
        depth += (found[0] in "[({") - (found[0] in "])}")
    parts = [part.strip() for part in (*parts, text[start:])]
    is_quoted = [len(part) > 1 and part[0] == part[-1] and part[0] in "'\"" for part in parts]
    if len(parts) == 1 and not is_quoted[0]:
        return [text]
    return [part[1:-1] if quoted else part for part, quoted in zip(parts, is_quoted, strict=True)]


def _read(key: str, text: Any, problems: list[str]) -> Any:
    """Return a value of a setting; adds a line to `problems` if it is none."""
    hint, spec = _hints()[key], PretrainConfig.__dataclass_fields__[key]
    if text in (NO_VALUE, ""):
        problems.append(f"{key}: needs a value; commas must have one on both sides")
        return None
    try:
        value = convert(text, hint)
        if key == "model" and value != AUTO:
            model_fields(value)
        match key, value:
            case "tokens_per_step", [[0, tokens]]:  # one stage is the whole run
                value = tokens
    except UserError as error:
        problems += error.problems
    except NOT_CONVERTIBLE:
        problems.append(f"{key}={shown(text)}: must be {describe(hint)}")
    else:
        problems += filter(None, [out_of_range(spec, value)])
        return value
    return None


_hints = functools.cache(functools.partial(get_type_hints, PretrainConfig))  # takes a while


def _find_unfit(fixed: dict[str, Any], values: dict[str, list[Any]]) -> list[str]:
    """Find settings that the sweep decides itself, and lengths of which a run can have one."""
    stated = {**{key: [value] for key, value in fixed.items()}, **values}
    problems = []
    if any(value != "latest" for value in stated.get("resume_from_checkpoint", [])):
        problems.append("resume_from_checkpoint: an unfinished point of a sweep resumes by itself; leave it out")
    if len(lengths := [key for key in LENGTHS if key in values]) > 1:
        problems.append(f"{' and '.join(lengths)} are both given; keep one")
    if any(stated.get("push_to_hub", [])):
        problems.append("push_to_hub=true: a sweep pushes nothing; leave it out, and push the best point's checkpoint")
    return problems


def _different(key: str, texts: list[Any], values: list[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of text and value, without those of an equal value (1e-3 and 0.001)."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for text, value in zip(texts, values, strict=True):
        equal = model_fields(value) if key == "model" and value != AUTO else value
        pairs.setdefault(json.dumps(equal, sort_keys=True), (text, value))
    return list(pairs.values())


def _point(chosen: dict[str, tuple[Any, Any]], fixed: dict[str, Any], same: list[str]) -> Point:
    values = {key: value for key, (_, value) in chosen.items()}
    name = ",".join(f"{key}={label(value)}" for key, value in sorted(values.items())) or "recipe"
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9].rstrip('. ')}-{_hash(name, 8)}"
    flags = [*same, *(f"--{key}={text}" for key, (text, _) in chosen.items())]
    return Point(name, values, {**fixed, **values}, flags)


def label(value: Any) -> str:
    """Return a value as a part of a folder's name, valid on every system, and different for different values."""
    if isinstance(value, dict):
        layers, width = value.get("n_layer"), value.get("n_embd")
        shape = f"{layers}x{width}" if layers and width else label(str(value.get("size", "custom")))
        return f"{shape}-{_hash(json.dumps(value, sort_keys=True))}"
    text = json.dumps(value) if not isinstance(value, str) else value
    plain = re.sub(r"[^a-z0-9_.+-]+", "-", text[-30:].lower()).strip(".-") or "empty"
    if isinstance(value, bool | int | float) or value is None:
        return text
    return text if plain == text else f"{plain}-{_hash(text)}"


def _hash(text: str, digits: int = 6) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
