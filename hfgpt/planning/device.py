"""The device that `hfgpt plan` plans for: this machine's, or one that is named and may be elsewhere."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hfgpt.config import PretrainConfig
from hfgpt.distributed import compiler, cpu
from hfgpt.distributed import device as machine
from hfgpt.distributed.compiler import CompileChoice
from hfgpt.distributed.device import Precision
from hfgpt.distributed.device_peaks import Peak, device_peak, rated_devices, rated_memory_gib, rated_peak
from hfgpt.errors import UserError

KINDS = ("cuda", "mps", "xpu", "cpu")
EXAMPLES = 4  # devices that a message names


@dataclass(frozen=True)
class Device:
    """The device planned for; its memory and its peak may be unknown."""

    name: str
    type: str
    gib: float | None
    peak: Peak
    precision: Precision
    compile: CompileChoice


def find_device(name: str | None, config: PretrainConfig, memory_gib: float | None) -> Device:
    """Return this machine's device, or one of `devices.csv`. Raises UserError for others without memory and peak."""
    stated_peak = Peak(config.mfu_peak_tflops, "stated: --mfu_peak_tflops") if config.mfu_peak_tflops else None
    here = machine.default_device()
    if name is None or name in (here.type, machine.device_name(here)):
        if here.type == "cpu":
            cpu.use_all_cores(1)
        precision = machine.choose_precision(config.mixed_precision, here)
        compiled = compiler.choose_compile(config.torch_compile, here, compiler.SHORT_RUN_FORWARD_PASSES)
        peak = stated_peak or device_peak(here, precision.name)
        gib = machine.memory_bytes(here) / 2**30
        return Device(machine.device_name(here), here.type, gib, peak, precision, compiled)
    if name not in rated_devices() and not (stated_peak and memory_gib):
        raise UserError(f"device={name}: {_explain_unknown(name)}")
    kind = kind_of(name)
    precision = _choose_precision(name, kind, config.mixed_precision)
    unknown = Peak(None, f"the rate of {name} in {precision.label} is unknown")
    peak = stated_peak or rated_peak(name, precision.name) or unknown
    return Device(name, kind, rated_memory_gib(name), peak, precision, _choose_compile(kind, config.torch_compile))


def kind_of(name: str) -> str:
    """Return torch's type of a device by its exact name, which begins with its maker; AMD's cards are "cuda" too."""
    if name in KINDS:
        return name
    return "mps" if name.startswith("Apple ") else "xpu" if name.startswith("Intel(R) ") else "cuda"


def _explain_unknown(name: str) -> str:
    """Return what is wrong with a device that is not in the table, and the fix."""
    known, fix = rated_devices(), "leave it out for this machine, or set --memory_gib and --mfu_peak_tflops"
    if name == "cpu":  # of another machine, as this one has something faster
        return f"not the device of this machine; put ACCELERATE_USE_CPU=true before the command for its CPU; else {fix}"
    if name in KINDS:
        same = [device for device in known if kind_of(device) == name]
        some = ", ".join(same[:: max(1, len(same) // EXAMPLES)][:EXAMPLES])
        return f"this machine has none; name one, for example {some}. Otherwise {fix}"
    words = name.lower().split()
    near = sorted((device for device in known if all(word in device.lower() for word in words)), key=len)
    by_lower = {device.lower(): device for device in known}
    near = near or [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.3)]
    hint = f"did you mean {' or '.join(near[:3])}? Otherwise " if near else ""
    return f"unknown; {hint}{fix}"


def _choose_precision(name: str, kind: str, requested: str) -> Precision:
    """Choose as `choose_precision` would on the device itself, by its known rates."""
    is_known = name in rated_devices()
    without_bf16 = kind == "cuda" and is_known and not rated_peak(name, "bf16")
    native = "no" if kind == "cpu" else "fp16" if without_bf16 else "bf16"
    if requested == "bf16" and native == "fp16":
        raise UserError(f"mixed_precision={requested}: {name} has no bf16; use fp16, or auto to choose it")
    if requested == "fp16" and kind == "cpu":
        raise UserError(f"mixed_precision={requested}: needs a GPU, this is {kind}; use bf16, no or auto")
    if requested != "auto":
        return Precision(requested, "requested")
    if not is_known and kind != "cpu":
        return Precision(native, "as most have it; this one is unknown, so state --mixed_precision if it has not")
    if kind == "mps":
        return Precision(native, "macOS 14 and newer have bf16")
    return Precision(native, f"the {'CPU' if kind == 'cpu' else 'card'} has {'' if native == 'bf16' else 'no '}bf16")


def _choose_compile(kind: str, requested: str | bool) -> CompileChoice:
    """Choose as `choose_compile` would on a machine that has a compiler."""
    if requested == "auto" and kind == "mps":
        return CompileChoice(False, "torch's compiler for mps is a prototype; --torch_compile true tries it")
    return CompileChoice(bool(requested), "requested" if requested != "auto" else "if there is a compiler")
