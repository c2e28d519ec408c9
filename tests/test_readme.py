"""What the READMEs name is there, and their commands have flags and values that are valid."""

from __future__ import annotations

import re

import pytest
from readmes import ROOT, WrongCommand, code, commands, known_flags, parse, readmes, spans

README = readmes()
NAMES = [str(path.relative_to(ROOT)) for path in README]
OTHERS = {
    "file.yaml",
    "mixture.yaml",
    "train.py",
    "run_clm.py",
    "convert_hf_to_gguf.py",
    "sweep.csv",
}  # the user's, those of other projects, and what hfgpt writes


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", README, ids=NAMES)
def test_each_command_has_valid_flags(path):
    for block in code(path):
        for command in commands(block) if block.language == "shell" else ():
            try:
                parse(command)
            except WrongCommand as error:
                pytest.fail(f"{block.place}: {command}: {error}")


def test_each_flag_is_known():
    flags = known_flags()
    named = {
        (path.name, flag) for path in README for text in spans(path) for flag in re.findall(r"--[a-z][\w-]+", text)
    }
    own = {"--signal", "--include_path", "--model_args", "--index-url"}  # SLURM's, lm-evaluation-harness's, pip's
    assert not {(name, flag) for name, flag in named if flag not in flags | own}


@pytest.mark.parametrize("path", README, ids=NAMES)
def test_each_file_and_link_is_there(path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        file = (path.parent / target) if target else path
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else ()
        assert not anchor or anchor in map(slug, headings), f"{target}#{anchor}"
    places = [path.parent, ROOT, ROOT / "hfgpt", ROOT / "tests", ROOT / "recipes", ROOT / "tests" / "benchmarks"]
    for name in {name for span in spans(path) for name in re.findall(r"^[\w/]+\.(?:py|yaml|csv|jinja)\b", span)}:
        known = [*places, *(ROOT / "hfgpt").iterdir()]
        assert name in OTHERS or any((place / name).exists() for place in known), name


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_commands_are_found_in_each_form(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(
        "A `hfgpt doctor`, `hfgpt plan` and `accelerate estimate-memory`.\n\n"
        "    A=1 torchrun x.py \\\n        --a 1   # why\n\n"
        "```python\nprint(1)\n```\n\n```\n$ hfgpt audit out/x\nsame text\n```\n\n"
        "- Item\n\n      newprogram --flag 1\n\nIt prints\n\n    model    char-cpu\n"
    )
    found = [(block.language, commands(block) if block.language == "shell" else None) for block in code(path)]
    assert found == [
        ("shell", ["A=1 torchrun x.py --a 1"]),
        ("python", None),
        ("shell", ["hfgpt audit out/x"]),
        ("shell", ["newprogram --flag 1"]),
        ("output", None),
        ("shell", ["hfgpt doctor"]),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch recipes/quickstart.py --no_such_flag 1",
        "accelerate launch recipes/quickstart.py --max_steps many",
        "accelerate launch --no_such_flag 1 recipes/quickstart.py",
        "accelerate launch recipes/no_such_recipe.py",
        "A=1 hfgpt plan --no_such_flag",
        "cat a | hfgpt generate out/mine --seed many",
        "srun bash -c 'torchrun --nproc_per_node 2 recipes/quickstart.py --no_such_flag 1'",
        "hfgpt nothing",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(WrongCommand):
        parse(command)
