"""What the READMEs and CONTRIBUTING.md name: commands, Python, flags, links. Commands go through their own parsers."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from hfgpt import PretrainConfig
from hfgpt.errors import UserError
from hfgpt.settings.grid import read_grid

ROOT = Path(__file__).parent.parent
FOLDERS = ("recipes", "accelerate_configs", "hfgpt", "tests")
TEST_DATA = ROOT / "tests" / "data"  # the cards of models there are not ours to keep
PROGRAMS = ("accelerate", "hfgpt", "python", "pip", "pytest", "torchrun", "git", "hf", "lm_eval", "srun", ".ci/run")
PROGRAMS += (".ci/checks", "pre-commit", "ct2-transformers-converter", "export", "source", "#SBATCH")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
FENCE = re.compile(r" *(```+|~~~+) *(\w*)")
LANGUAGES = {"bash": "shell", "sh": "shell", "shell": "shell", "console": "shell", "python": "python", "py": "python"}
RECIPE = "recipes/quickstart.py"  # completes what is a part of a command


class Block(NamedTuple):
    """Code of a README: of `language` "shell", "python" or "output"."""

    file: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


class WrongCommand(ValueError):
    """A command that its own parser refuses."""


def readmes() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("README.md"))]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for path in found if TEST_DATA not in path.parents)]


def code(path: Path) -> list[Block]:
    """Return the blocks of a README, indented or fenced, and the commands in its sentences and tables."""
    lines, found, prose = path.read_text().splitlines(), [], []
    at = 0
    while at < len(lines):
        start, fence = at, FENCE.match(lines[at])
        at += 1
        if fence:
            while at < len(lines) and not lines[at].strip().startswith(fence[1]):
                at += 1
            text = _dedent(lines[start + 1 : at])
            at += 1
            found.append(Block(path, start + 2, LANGUAGES.get(fence[2]) or language(text, fence[2]), text))
        elif lines[start].startswith("    ") and not lines[start - 1].strip():
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            text = _dedent(lines[start:at])
            found.append(Block(path, start + 1, language(text), text))
        else:
            prose.append((start + 1, lines[start]))
    return found + [Block(path, line, "shell", text) for line, text in _inline(prose) if _is_command(text)]


def language(text: str, stated: str = "") -> str:
    """Guess what a block holds. What looks like a command of an unknown program is one, so that it cannot hide."""
    first = next((line for line in text.splitlines() if line.strip()), "").removeprefix("$ ")
    words = [word for word in first.split() if not ASSIGNMENT.match(word)] or [""]
    is_column = re.match(r"\S+ {2,}[^# ]", first)  # "model    char-cpu: ..."
    if stated or is_column:
        return "output"
    if words[0] in PROGRAMS or " --" in f" {first}" or shutil.which(words[0]):
        return "shell"
    with contextlib.suppress(SyntaxError):
        nodes = list(ast.walk(ast.parse(text)))
        if any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in nodes):
            return "python"
    return "python" if words[0] in ("import", "from") else "output"


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block, each on one line without its comment."""
    text = re.sub(r"\s*\\\n\s*", " ", block.text)
    lines = [re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in text.splitlines()]
    if any(line.startswith("$ ") for line in lines):  # the others are what it prints
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    lines = [line for line in lines if line and not line.startswith("#SBATCH")]
    return [_completed(line) for line in lines]


def parse(command: str) -> list[PretrainConfig]:
    """Parse the flags of the launchers, recipes and `hfgpt` commands in `command`; return the recipes' settings."""
    configs = []
    for words in _simple_commands(command):
        for word in words:
            if word.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and not (ROOT / word).exists():
                raise WrongCommand(f"{word} does not exist")
        try:
            with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
                configs.append(_parse_words(words))
        except SystemExit as end:
            if end.code:
                raise WrongCommand(errors.getvalue().strip().splitlines()[-1]) from None
        except UserError as error:
            raise WrongCommand(str(error)) from error
    return [config for config in configs if config]


def known_flags() -> set[str]:
    """Return the flags of recipes, launchers, `hfgpt` commands and our scripts."""
    flags = {f"--{field}" for field in PretrainConfig.__dataclass_fields__} | {"--config", "--help"}
    for command in _hfgpt().values():
        flags |= {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for parser in (_accelerate(), _torchrun()):
        flags |= {flag.replace("-", "_").replace("__", "--", 1) for flag in parser._option_string_actions}
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    return flags | {flag for source in sources for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)"', source)}


def spans(path: Path) -> list[str]:
    """Return the inline code of a README."""
    return [text for _, text in _inline(list(enumerate(path.read_text().splitlines(), 1)))]


def _inline(prose: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for line, text in prose:
        yield from ((line, span) for span in re.findall(r"`([^`]+)`", text))


def _is_command(text: str) -> bool:
    words = text.split()
    is_name = words[0] in ("hfgpt", "accelerate") and len(words) == 2 and words[1] != "doctor"
    return words[0] in PROGRAMS and len(words) > 1 and "..." not in text and not is_name


def _completed(command: str) -> str:
    """Return a command for what is only its flags, or a launcher with its flags."""
    if command.startswith("--"):
        return f"accelerate launch {RECIPE} {command}"
    is_part = command.startswith(("accelerate launch", "torchrun")) and not re.search(r"\.py\b|--module", command)
    return f"{command} {RECIPE}" if is_part else command


def _dedent(lines: list[str]) -> str:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines).strip("\n") + "\n"


def _simple_commands(command: str) -> Iterator[list[str]]:
    """Split at pipes and `&&`, without settings of the environment; of `srun bash -c '...'`, what it starts."""
    lexer = shlex.shlex(re.sub(r"\$\w+", "0", command), posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word.strip("&|;"):
            words.append(word)
            continue
        while words and ASSIGNMENT.match(words[0]):
            words.pop(0)
        if words and words[0] == "srun":
            yield from _simple_commands(words[-1])
        elif words:
            yield words
        words = []


def _parse_words(words: list[str]) -> PretrainConfig | None:
    program, arguments = words[0], words[1:]
    if program == "hfgpt":
        return _parse_hfgpt(arguments)
    if program == "python" and arguments[0].startswith("recipes/"):
        return _parse_recipe(arguments[0], arguments[1:])
    if program == "accelerate" and arguments[0] == "launch":
        given = _accelerate().parse_args(arguments[1:])
    elif program == "torchrun":
        given = _torchrun().parse_args(arguments)
    else:
        return None
    if given.training_script == "hfgpt.cli":
        return _parse_hfgpt(given.training_script_args)
    return _parse_recipe(given.training_script, given.training_script_args)


def _parse_hfgpt(arguments: list[str]) -> None:
    from hfgpt.cli.evaluate import replace_compile_values

    name, *rest = replace_compile_values(arguments)
    if name not in _hfgpt():
        raise WrongCommand(f"hfgpt has no command {name}")
    try:
        context = _hfgpt()[name].make_context(name, rest)
        if name == "sweep":
            read_grid(context.args)
    except Exception as error:  # which module holds click's exceptions depends on the typer version
        if not hasattr(error, "format_message"):
            raise
        raise WrongCommand(error.format_message()) from error


def _parse_recipe(script: str, arguments: list[str]) -> PretrainConfig:
    specification = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    recipe = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(recipe)
    found = []

    def stop_here(config: PretrainConfig, *_: Any) -> None:
        found.append(config)
        raise SystemExit(0)

    launched = mock.patch.object(sys, "argv", [script, *arguments])
    with launched, mock.patch.object(recipe, "Pretrainer", stop_here), contextlib.suppress(SystemExit):
        recipe.main()
    return found[0] if found else None


@functools.cache
def _hfgpt() -> dict[str, Any]:
    import typer

    from hfgpt.cli import app

    return typer.main.get_command(app).commands


@functools.cache
def _accelerate() -> Any:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


@functools.cache
def _torchrun() -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser()
