"""`accelerate_configs/`: each file is what accelerate's launcher reads, and is listed in the README."""

from __future__ import annotations

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from readmes import ROOT

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
BY_NAME = {path.stem: path for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=list(BY_NAME))
def test_the_launcher_reads_it(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the launcher sets it where it is not
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "recipes/quickstart.py"])
    validated, defaults, _ = _validate_launch_command(arguments)
    assert defaults.distributed_type == config.distributed_type
    assert validated.num_processes == config.num_processes
    assert bool(validated.multi_gpu or validated.use_fsdp) == (config.num_processes > 1)
    assert validated.mixed_precision == (config.mixed_precision or "no")


def test_files_for_accelerators_do_not_ask_for_the_cpu():
    configs = {name: load_config_from_file(str(path)) for name, path in BY_NAME.items()}
    assert not any(configs[name].use_cpu for name in ("mps", "xpu", "multi_xpu"))
    assert configs["multi_xpu"].distributed_type == "MULTI_XPU"
    assert configs["mps"].mixed_precision == "no"  # left to the device, as an older macOS has no bf16


def test_each_is_in_the_readme():
    readme = (ROOT / "accelerate_configs" / "README.md").read_text()
    assert [path.name for path in FILES if f"| `{path.name}` |" not in readme] == []
