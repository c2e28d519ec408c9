"""The text that every Python has: its own documentation."""

from __future__ import annotations

import ast
import contextlib
import functools
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

# Shorter docstrings say little.
DOCSTRING_CHARACTERS = 80


@functools.lru_cache(maxsize=1)
def embedded_documents() -> tuple[str, ...]:
    """The topics of `pydoc`, then each longer docstring of the standard library, parsed from its files, once."""
    documents: list[str] = []
    with contextlib.suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics

        documents += [topics[topic] for topic in sorted(topics)]
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nodes = [node for node in _statements(ast.parse(path.read_bytes())) if isinstance(node, documented)]
                documents += [ast.get_docstring(node) or "" for node in nodes]
    return tuple(dict.fromkeys(text for text in documents if len(text) >= DOCSTRING_CHARACTERS))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As `ast.walk`, without the expressions, which take five times as long and hold no docstring."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        for name in node._fields:
            inner = getattr(node, name)
            if (
                isinstance(inner, list)
                and inner
                and isinstance(inner[0], ast.stmt | ast.excepthandler | ast.match_case)
            ):
                todo.extend(inner)
