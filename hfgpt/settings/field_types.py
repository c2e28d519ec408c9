"""Convert text from a command line, or a value from YAML, to the type of a field."""

from __future__ import annotations

import re
import types
import typing
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import yaml

from hfgpt.errors import UserError
from hfgpt.files import local_path, read_text_file
from hfgpt.messages.formats import shown
from hfgpt.settings.step_sizes import EXAMPLE

AUTO = "auto"
NOT_CONVERTIBLE = (ValueError, TypeError, OverflowError)
NO_VALUE: list[Any] = []  # a flag without a value; no list may be empty
WHOLE_BELOW = 2**63  # the largest that JSON readers, torch and numpy support
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
LARGEST_YAML_BYTES = 2**16  # larger files take seconds to read


def convert(value: Any, hint: Any) -> Any:
    """Convert `value` (from a command line, or YAML) to the type `hint`. Raises ValueError if that is impossible."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kind = _collection(value)
        if kind and (collection := next((o for o in options if typing.get_origin(o) is kind), None)):
            return convert(value, collection)  # a broken mapping is not a name
        for option in sorted(options, key=lambda option: option is not type(None)):  # "none" is not a name
            try:
                return convert(value, option)
            except ValueError:
                continue
        raise ValueError
    if origin is Literal:
        text = "no" if value is False or value in ("false", "off") else value  # YAML reads a bare `no` as false
        if text in options:
            return text
        raise ValueError
    if origin in (dict, list):
        try:
            is_text = _collection(value) is origin or (options[0] is not Any and str(value).lstrip().startswith("["))
            parsed = yaml.load(value, YamlSettings) if isinstance(value, str) and is_text else value
        except (yaml.YAMLError, RecursionError):
            raise ValueError from None
        if isinstance(parsed, list) and origin is list and options[0] is not Any:
            parsed = [convert(item, options[0]) for item in parsed]
        if isinstance(parsed, origin) and parsed != NO_VALUE:
            return parsed
        raise ValueError
    if hint is type(None):
        if value is None or value in ("none", "null", "None"):
            return None
        raise ValueError
    if isinstance(value, dict | list) or value is None:
        raise ValueError
    if hint is bool:
        if (word := str(value).lower()) in _TRUE + _FALSE:
            return word in _TRUE
        raise ValueError
    if isinstance(value, bool):
        raise ValueError
    if hint is int:
        return _whole(value)
    if hint is str:
        str(value).encode()  # raises UnicodeEncodeError, a ValueError: bytes that are not UTF-8 cannot be recorded
    return hint(value)


def _collection(value: Any) -> type | None:
    """Return the type that text is written as: {..}, or [{..}, ..]; a glob may begin with a bracket, too."""
    text = re.sub(r"\s", "", value[:1000]) if isinstance(value, str) else ""
    return dict if text.startswith("{") else list if text.startswith("[{") else None


def _whole(value: Any) -> int:
    """Return `value` as an exact whole number; 1e9, 1.5e3 and 9_007_199_254_740_993 are whole numbers too."""
    if not abs(float(value)) <= WHOLE_BELOW:
        raise ValueError
    try:
        number = Decimal(value) if isinstance(value, str) else value
    except ArithmeticError:  # an exponent of twenty digits
        raise ValueError from None
    exact = int(number)
    if exact != number or abs(exact) >= WHOLE_BELOW:
        raise ValueError
    return exact


def describe(hint: Any) -> str:
    names = {int: "a whole number below 2^63", float: "a number", bool: "true or false", str: "text in UTF-8"}
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if hint == list[list[int]]:
        return f"stages such as {EXAMPLE}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in options if option is not type(None))
    if origin is Literal:
        return " or ".join(map(str, options))
    return {dict: "a mapping of fields", list: "a list of mappings"}.get(origin) or names[hint]


class YamlSettings(yaml.SafeLoader):
    """YAML that rejects duplicate keys; otherwise all but the last would be silently lost."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"{shown(twice[0])} is set twice; keep one")
        return node


def read_yaml(path: str) -> dict[str, Any]:
    """Read the `key: value` lines of a settings file. Numbers stay text, as on a command line.

    (Plain YAML would turn the name 1.10 into 1.1, and 010 into 8.) Raises UserError for any other file.
    """
    if not path:
        raise UserError("config: no file is given; use --config FILE.yaml")
    where = f"config={shown(path)}"
    try:
        name = Path(local_path(path))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    try:
        size = name.stat().st_size
        if size > LARGEST_YAML_BYTES:
            raise UserError(f"{where}: {size:,} bytes is too large for a settings file; choose another YAML file")
        loader = YamlSettings(read_text_file(name))
        root = loader.get_single_node()
        for _, node in root.value if isinstance(root, yaml.MappingNode) else []:
            if node.tag.rpartition(":")[2] in ("int", "float", "timestamp", "bool") and isinstance(node.value, str):
                node.tag = "tag:yaml.org,2002:str"
        content = None if root is None else loader.construct_document(root)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; choose an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not YAML: {' '.join(str(error).split())[:300]}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; must contain `key: value` lines") from None
    except (ValueError, OverflowError):  # such as a number of thousands of digits
        raise UserError(f"{where}: contains an impossible number or date") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{where}: must contain `key: value` lines")
    return {str(key): value for key, value in content.items()}
