"""`hfgpt plan --device`: what a device of another machine would do, by its kind."""

import sys

import pytest
import torch

from hfgpt import UserError, cli
from hfgpt.distributed import device as machine
from hfgpt.planning.device import _choose_precision, kind_of
from hfgpt.planning.estimate import forecast

MAC, ARC = "Apple M2 Max", "Intel(R) Arc(TM) B580 Graphics"
STEP = {"tokens_per_step": 524288, "memory_gib": 32.0}


def test_a_mac_is_planned_for(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["hfgpt", "plan", "--device", MAC, "--memory_gib", "32", "--tokens_per_step", "524288"]
    )
    cli.main()
    out = capsys.readouterr().out
    assert f"{MAC}, 32 GiB; bf16 (macOS 14 and newer have bf16)" in out and "10.74 TFLOP/s (rated: " in out
    assert "compile  off (torch's compiler for mps is a prototype" in out


@pytest.mark.parametrize(
    ("name", "kind", "compiles"),
    [(MAC, "mps", False), (ARC, "xpu", True), ("AMD Instinct MI300X", "cuda", True), ("NVIDIA B200", "cuda", True)],
)
def test_kind_precision_and_compilation_follow_the_name(name, kind, compiles):
    device = forecast(device=name, **STEP).device
    assert (device.name, device.type, device.precision.name) == (name, kind, "bf16")
    assert device.compile.enabled is compiles and device.peak.source.startswith("rated: ")
    assert forecast(device=name, torch_compile=True, **STEP).device.compile.enabled


def test_float32_has_its_own_rate_or_none():
    plans = [forecast(device=name, mixed_precision="no", **STEP) for name in (MAC, "AMD Instinct MI210", ARC)]
    assert [planned.device.peak.tflops for planned in plans] == [10.74, 45.3, None]
    assert "--mfu_peak_tflops" in "\n".join(plans[2].lines())


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        ("mps", ["this machine has none", "Apple M1, "]),
        ("xpu", ["this machine has none", "Intel(R) "]),
        ("cuda", ["this machine has none", "NVIDIA "]),
        ("M4 Max", ["did you mean Apple M4 Max?"]),
        ("A770", ["did you mean Intel(R) Arc(TM) A770 Graphics?"]),
        (MAC, ["memory_gib: not given"]),
    ],
)
def test_a_kind_or_part_of_a_name_gets_names_that_are_known(monkeypatch, device, parts):
    monkeypatch.setattr(machine, "default_device", lambda: torch.device("cpu"))
    with pytest.raises(UserError) as error:
        forecast(device=device, tokens_per_step=524288)
    assert len(error.value.problems) == 1
    assert all(part in error.value.problems[0] for part in parts), error.value.problems[0]
    assert "\n" not in error.value.problems[0]


def test_the_cpu_of_a_machine_with_a_card_is_asked_for_by_the_environment(monkeypatch):
    monkeypatch.setattr(machine, "default_device", lambda: torch.device("mps"))
    monkeypatch.setattr(machine, "device_name", lambda device: "Apple M1")
    with pytest.raises(UserError, match="ACCELERATE_USE_CPU=true"):
        forecast(device="cpu", tokens_per_step=524288)


def test_fp16_is_for_gpus():
    for name in (MAC, ARC):
        assert forecast(device=name, mixed_precision="fp16", **STEP).device.precision.name == "fp16"
    with pytest.raises(UserError, match="fp16: needs a GPU, this is cpu"):
        _choose_precision("cpu", "cpu", "fp16")


def test_a_device_that_no_table_has_goes_by_its_maker():
    assert [kind_of(name) for name in ("Apple M9", "Intel(R) Arc(TM) Z1 Graphics", "NVIDIA X1", "mps", "cpu")] == [
        "mps", "xpu", "cuda", "mps", "cpu",
    ]  # fmt: skip
    stated = forecast(device="Apple M9", mfu_peak_tflops=20, **STEP).device
    assert (stated.type, stated.precision.name, stated.peak.tflops) == ("mps", "bf16", 20)
    assert forecast(device="mps", mfu_peak_tflops=20, **STEP).device.type == "mps"
