"""Prints how large the library is, and which files and functions are the longest. A report, not a test.

    python tests/sizes.py

Targets: the reading path at most 900 lines, no file above 300 lines but modeling and config, no function above 60.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a newcomer reads to know how training works, from the command to `loss.backward()`.
READING_PATH = (
    "recipes/fineweb_125m.py",
    "hfgpt/training/pretrainer.py",
    "hfgpt/training/setup.py",
    "hfgpt/training/step.py",
    "hfgpt/model/modeling_gpt2.py",
)


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def function_lengths(path: Path) -> list[tuple[int, str]]:
    """Lines and name of each function of a file, decorators and docstring included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append(((node.end_lineno or first) - first + 1, f"{path.relative_to(ROOT)}:{first} {node.name}"))
    return found


def main() -> None:
    files = sorted((ROOT / "hfgpt").rglob("*.py"))
    print(f"hfgpt: {sum(map(count_lines, files)):,} lines in {len(files)} files")
    path = [ROOT / name for name in READING_PATH]
    print(f"reading path: {sum(map(count_lines, path))} lines")
    for file in path:
        print(f"  {count_lines(file):5} {file.relative_to(ROOT)}")
    print("files above 300 lines:")
    for lines, name in sorted(((count_lines(file), file.relative_to(ROOT)) for file in files), reverse=True):
        if lines > 300:
            print(f"  {lines:5} {name}")
    print("functions above 60 lines:")
    for lines, name in sorted((one for file in files for one in function_lengths(file)), reverse=True):
        if lines > 60:
            print(f"  {lines:5} {name}")


if __name__ == "__main__":
    main()
