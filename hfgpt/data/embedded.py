"""The embedded text: the documentation that comes with every Python."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from hfgpt.data.units import Unit

HAS_COLUMNS, UNIT_START = False, "from_byte"  # see `Format`
NAME = "embedded"
# Shorter docstrings contain little text.
DOCSTRING_CHARACTERS = 80
# A string in triple quotes at the beginning of a file or of an indented block. Parsing the files would find some ten
# more, in single quotes, and takes ten times as long: three seconds of each start.
_DOCSTRING = re.compile(
    r"""
    (?: \A (?: [ \t]* (?:\#.*)? \n )*  # comments and empty lines at most
      | : [ \t]* (?:\#.*)? \n \s*
    )
    ( [rR]? (\"{3}|'{3}) (?s: \\. | . )*? \2 )
    """,
    re.VERBOSE,
)


def find_units(file: str, head: Any, text_column: str) -> list[Unit]:
    documents = embedded_documents()
    return [Unit(NAME, rows=len(documents), size_bytes=sum(len(text.encode()) for text in documents))]


def read_rows(unit: Unit, text_column: str) -> list[str]:
    return list(embedded_documents())


@functools.lru_cache(maxsize=1)
def embedded_documents() -> tuple[str, ...]:
    """Return the topics of `pydoc` and the longer docstrings of the standard library, each once, in a mixed order.

    They are ordered by a hash of the text. In order of names, the held-out last tenth would come from other modules
    than the training text, and differ in kind.
    """
    documents: list[str] = []
    with contextlib.suppress(ImportError):  # packaged separately by some distributions
        from pydoc_data.topics import topics

        documents += [topics[topic] for topic in sorted(topics)]
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in left_out]  # site-packages has most of all files
        for file in files:
            if file.endswith(".py"):
                documents += _docstrings(Path(folder, file).read_text(encoding="utf-8", errors="replace"))
    longer = {text for text in documents if len(text) >= DOCSTRING_CHARACTERS}
    return tuple(sorted(longer, key=lambda text: xxhash.xxh3_64_hexdigest(text.encode())))


def _docstrings(source: str) -> Iterator[str]:
    for literal, _ in _DOCSTRING.findall(source):
        text = ""
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            text = ast.literal_eval(literal)
        yield inspect.cleandoc(text)
