"""The table of what differs between kinds of devices, on devices described by what torch says of them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hfgpt.distributed import compiler, device, device_peaks
from hfgpt.distributed.device_kinds import device_kind
from hfgpt.errors import UserError
from hfgpt.training.optimizer import SkippingAdamW
from hfgpt.training.out_of_memory import is_device_out_of_memory

CUDA, XPU, MPS = torch.device("cuda:0"), torch.device("xpu:0"), torch.device("mps:0")
OTHER = torch.device("privateuseone:0")
XPU_PROPERTIES = SimpleNamespace(total_memory=16, gpu_subslice_count=32)


@pytest.fixture
def other(monkeypatch):
    """The module of an accelerator that hfgpt has not heard of."""
    module = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda which: module)
    return module


@pytest.fixture(autouse=True)
def machine(monkeypatch, other):
    """An RTX 4070 Ti, an Arc A770 and an M2 Max in one machine, which runs macOS 14."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda which: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: "NVIDIA GeForce RTX 4070 Ti")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda which: (1, 12))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda which: 3)
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda which: "Intel(R) Arc(TM) A770 Graphics")
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda which: XPU_PROPERTIES)
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda which: 4)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 0))
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2 Max")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 38)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 32)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5)


@pytest.mark.parametrize(
    ("where", "auto", "name", "memory", "peak", "pins", "multiprocessors"),
    [
        (CUDA, "bf16", "NVIDIA GeForce RTX 4070 Ti", 12, 3, True, None),
        (XPU, "bf16", "Intel(R) Arc(TM) A770 Graphics", 16, 4, True, 32),
        (MPS, "bf16", "Apple M2 Max", 32, 5, False, 38),
    ],
)
def test_what_a_device_offers(where, auto, name, memory, peak, pins, multiprocessors):
    kind = device_kind(where)
    assert device.choose_precision("auto", where).name == device.native_precision(where) == auto
    assert device.device_name(where) == name
    assert device.memory_bytes(where) == memory and device.peak_memory_bytes(where) == peak
    assert kind.pins_memory is pins and (where == CUDA or kind.multiprocessors(where) == multiprocessors)


@pytest.mark.parametrize("where", [CUDA, XPU, MPS])
def test_fp16_with_loss_scaling_works_on_request(where):
    assert "loss scaling" in device.choose_precision("fp16", where).reason


def test_an_older_macos_trains_in_float32_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    chosen = device.choose_precision("auto", MPS)
    assert chosen.name == "no" and "macOS 14" in chosen.reason
    with pytest.raises(UserError, match="bf16 on mps needs macOS 14; use fp16 or no"):
        device.choose_precision("bf16", MPS)


@pytest.mark.parametrize(
    ("architecture", "auto"),
    [("gfx1030", "fp16"), ("gfx906", "fp16"), ("gfx90a:sramecc+", "bf16"), ("gfx1100", "bf16")],
)
def test_amd_cards_have_bf16_by_their_architecture(monkeypatch, architecture, auto):
    """torch says yes for all of them."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: SimpleNamespace(gcnArchName=architecture))
    assert device.choose_precision("auto", CUDA).name == auto


def test_several_processes_need_a_device_that_has_them(monkeypatch):
    monkeypatch.setattr(device, "default_device", lambda: MPS)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="several processes cannot train on mps; start one"):
        device.start_accelerator("auto", 10.0)


@pytest.mark.parametrize("value", ["on", "y", "True", "1"])
def test_the_cpu_is_asked_for_as_accelerate_reads_it(monkeypatch, value):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: CUDA)
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    assert device.default_device().type == "cpu"


def test_an_older_intel_card_trains_in_float32(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: False)
    assert device.choose_precision("auto", XPU).name == "no"
    assert "float32 would be faster" in device.choose_precision("bf16", XPU).reason


def test_an_unknown_accelerator_is_asked_for_what_it_has(other, monkeypatch):
    kind = device_kind(OTHER)
    assert kind.name(OTHER) == OTHER.type and kind.auto_precision(OTHER) == "no"
    assert kind.peak_memory_bytes(OTHER) is None  # and not a wrong number
    monkeypatch.setattr("hfgpt.distributed.cpu.memory_bytes", lambda: 7)
    assert kind.memory_bytes(OTHER) == 7
    kind.empty_cache(), kind.reset_peak_memory(OTHER)
    with pytest.raises(UserError, match="loss scaling is not known to work on privateuseone; use bf16 or no"):
        device.choose_precision("fp16", OTHER)

    def fails(*_):
        raise RuntimeError("not on this device")

    other.mem_get_info = other.max_memory_allocated = other.empty_cache = other.is_bf16_supported = fails
    assert kind.memory_bytes(OTHER) == 7 and kind.peak_memory_bytes(OTHER) is None
    assert kind.auto_precision(OTHER) == "no" and kind.empty_cache() is None
    other.get_device_name, other.is_bf16_supported = lambda which: "Card 9", lambda: True
    other.mem_get_info, other.max_memory_allocated = lambda which: (1, 24), lambda which: 2
    assert kind.name(OTHER) == "Card 9" and kind.auto_precision(OTHER) == "bf16"
    assert kind.memory_bytes(OTHER) == 24 and kind.peak_memory_bytes(OTHER) == 2


def test_random_numbers_are_seeded_on_any_device(other):
    seeds = []
    other.manual_seed_all = seeds.append
    device.seed_random_numbers(5, OTHER)
    other.manual_seed = lambda seed: seeds.append(-seed)
    device.seed_random_numbers(6, OTHER)
    assert seeds == [5, -6]


def test_compilation_by_device(monkeypatch):
    monkeypatch.setattr("torch._dynamo.eval_frame.check_if_dynamo_supported", lambda: None)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (7, 5))
    assert compiler.choose_compile("auto", CUDA, 1).enabled and compiler.choose_compile("auto", XPU, 1).enabled
    on_mac = compiler.choose_compile("auto", MPS, 10_000)
    assert not on_mac.enabled and "prototype" in on_mac.reason
    assert compiler.choose_compile(True, MPS, 10_000).enabled
    with pytest.raises(UserError, match=r"torch\.compile is not known to work on privateuseone"):
        compiler.choose_compile(True, OTHER, 10_000)


def test_the_rated_peak_is_asked_with_name_and_cores(monkeypatch):
    monkeypatch.setattr(device_peaks, "rated_peak", lambda *asked: asked)
    assert device_peaks.rated_device_peak(MPS, "bf16") == ("Apple M2 Max", "bf16", 38)
    assert device_peaks.rated_device_peak(XPU, "no") == ("Intel(R) Arc(TM) A770 Graphics", "no", 32)


def test_memory_that_ran_out_is_known_on_each_device():
    assert is_device_out_of_memory(torch.OutOfMemoryError("XPU out of memory."))
    assert is_device_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: ..."))
    assert not is_device_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_adamw_skips_where_the_fused_form_does_not():
    """Two steps, of which the first is skipped, are one step of torch's AdamW, to the bit."""
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    skipping, plain = SkippingAdamW(weights[:1], lr=0.1), torch.optim.AdamW(weights[1:], lr=0.1)
    for weight in weights:
        weight.grad = torch.tensor([1.0, float("nan"), 2.0])
    skipping.found_inf = torch.tensor(1.0)
    skipping.step()
    assert weights[0].tolist() == [1, 1, 1] and not skipping.state
    for weight in weights:
        weight.grad = torch.tensor([1.0, -1.0, 2.0])
    skipping.found_inf = torch.tensor(0.0)
    skipping.step(), plain.step()
    assert torch.equal(*weights) and weights[0].tolist() != [1, 1, 1]
