"""Text from a command line, or a value from YAML, as the type that a field has."""

from __future__ import annotations

import types
import typing
from datetime import timedelta
from typing import Any, Literal

import yaml

NOT_CONVERTIBLE = (ValueError, TypeError, OverflowError)


def convert(value: Any, hint: Any) -> Any:
    """`value` (text from a command line, or YAML) as the type `hint`; ValueError where it is not one."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(options, key=lambda option: option is not type(None)):  # "none" is no name
            try:
                return convert(value, option)
            except ValueError:
                continue
        raise ValueError
    if origin is Literal:
        text = "no" if value is False else value  # YAML reads a bare `no` as false
        if text in options:
            return text
        raise ValueError
    if origin is dict:
        try:
            parsed = yaml.safe_load(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        except yaml.YAMLError:
            raise ValueError from None
        if isinstance(parsed, dict):
            return parsed
        raise ValueError
    if hint is type(None):
        if value is None or value in ("none", "null", "None"):
            return None
        raise ValueError
    if hint is bool:
        known = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
        if str(value).lower() in known:
            return known[str(value).lower()]
        raise ValueError
    if isinstance(value, bool | dict | list) or value is None:
        raise ValueError
    if hint is int:
        if not float(value).is_integer():  # 1e9 and 524_288 are whole numbers too
            raise ValueError
        return int(value) if str(value).lstrip("-").isdigit() else int(float(value))
    if hint is str and (not str(value) or str(value).lstrip().startswith("{")):
        raise ValueError
    return hint(value)


def duration(seconds: float) -> str:
    """`1:02:03` or `5 days, 1:02:03`; what no clock shows is `over 1000 years`."""
    if not seconds < 1000 * 365.25 * 86400:
        return "over 1000 years"
    return str(timedelta(seconds=round(seconds)))


def describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in options if option is not type(None))
    if origin is Literal:
        return " or ".join(map(str, options))
    return "a mapping of fields" if origin is dict else names[hint]
