"""What differs between kinds of devices: one `DeviceKind` each. Everything else goes by `torch.accelerator`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hfgpt.distributed import cpu

# Architectures of Vega, RDNA 1 and RDNA 2. MI100 (gfx908) and newer and RDNA 3 and newer have bf16.
AMD_WITHOUT_BF16 = ("gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx90c", "gfx10")


@dataclass(frozen=True)
class DeviceKind:
    """How one kind of device differs. Functions take the device.

    label: in messages ("this GPU").
    auto_precision: the smallest precision that the device trains in with its own instructions: bf16, fp16 or no.
    refused: precisions that do not work, and why.
    memory_bytes, peak_memory_bytes: memory that one process may use; the most it held since `reset_peak_memory`, None
        if the device does not count that.
    compiler: what torch.compile needs: "triton", "c++", "metal" (a prototype, used on request only), or "" for none.
    pins_memory: copies from page-locked memory run while the device works.
    has_fused_skip: the fused AdamW leaves the weights alone if its `found_inf` is 1. On others it ignores that.
    """

    label: str
    name: Callable[[torch.device], str]
    auto_precision: Callable[[torch.device], str]
    refused: Callable[[torch.device], dict[str, str]]
    memory_bytes: Callable[[torch.device], int]
    peak_memory_bytes: Callable[[torch.device], int | None]
    reset_peak_memory: Callable[[torch.device], None]
    empty_cache: Callable[[], None]
    multiprocessors: Callable[[torch.device], int | None] = field(default=lambda device: None)
    compiler: str = ""
    pins_memory: bool = False
    has_fused_skip: bool = False


def _cpu() -> DeviceKind:
    return DeviceKind(
        label="CPU",
        name=lambda device: cpu.model_name(),
        auto_precision=lambda device: "bf16" if cpu.has_bf16() else "no",
        refused=lambda device: {"fp16": "fp16 needs a GPU, this is cpu"},
        memory_bytes=lambda device: cpu.memory_bytes(),
        peak_memory_bytes=lambda device: cpu.peak_memory_bytes(),
        reset_peak_memory=lambda device: cpu.reset_peak_memory(),
        empty_cache=lambda: None,
        compiler="c++",
        has_fused_skip=True,
    )


def _cuda() -> DeviceKind:
    """NVIDIA, and AMD under ROCm, which torch calls cuda too."""

    def has_bf16(device: torch.device) -> bool:
        if torch.version.hip is not None:  # torch says yes for all of AMD's
            return not torch.cuda.get_device_properties(device).gcnArchName.startswith(AMD_WITHOUT_BF16)
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)

    def refused(device: torch.device) -> dict[str, str]:
        return {} if has_bf16(device) else {"bf16": f"{torch.cuda.get_device_name(device)} has no bf16"}

    return DeviceKind(
        label="GPU",
        name=torch.cuda.get_device_name,
        auto_precision=lambda device: "bf16" if has_bf16(device) else "fp16",
        refused=refused,
        memory_bytes=lambda device: torch.cuda.mem_get_info(device)[1],
        peak_memory_bytes=torch.cuda.max_memory_allocated,
        reset_peak_memory=torch.cuda.reset_peak_memory_stats,
        empty_cache=torch.cuda.empty_cache,
        multiprocessors=lambda device: torch.cuda.get_device_properties(device).multi_processor_count,
        compiler="triton",
        pins_memory=True,
        has_fused_skip=True,
    )


def _xpu() -> DeviceKind:
    """Intel cards."""
    return DeviceKind(
        label="GPU",
        name=torch.xpu.get_device_name,
        auto_precision=lambda device: "bf16" if torch.xpu.is_bf16_supported(including_emulation=False) else "no",
        refused=lambda device: {},
        memory_bytes=lambda device: torch.xpu.get_device_properties(device).total_memory,
        peak_memory_bytes=torch.xpu.max_memory_allocated,
        reset_peak_memory=torch.xpu.reset_peak_memory_stats,
        empty_cache=torch.xpu.empty_cache,
        multiprocessors=lambda device: torch.xpu.get_device_properties(device).gpu_subslice_count,  # Xe cores
        compiler="triton",
        pins_memory=True,
        has_fused_skip=True,
    )


def _mps() -> DeviceKind:
    """Apple's GPUs, which share the machine's memory. They count no peak: the driver's pool stands for it."""

    def refused(device: torch.device) -> dict[str, str]:
        return {} if torch.backends.mps.is_macos_or_newer(14, 0) else {"bf16": "bf16 on mps needs macOS 14"}

    return DeviceKind(
        label="GPU",
        name=lambda device: torch.backends.mps.get_name(),
        auto_precision=lambda device: "no" if refused(device) else "bf16",
        refused=refused,
        memory_bytes=lambda device: torch.mps.recommended_max_memory(),
        # The pool keeps what tensors have freed, so it only grows between two calls of empty_cache.
        peak_memory_bytes=lambda device: torch.mps.driver_allocated_memory(),
        reset_peak_memory=lambda device: torch.mps.empty_cache(),
        empty_cache=torch.mps.empty_cache,
        multiprocessors=lambda device: torch.backends.mps.get_core_count(),
        compiler="metal",
    )


def _other(device_type: str) -> DeviceKind:
    """Any other accelerator, by what its module in torch has."""
    module = torch.get_device_module(device_type)

    def call(name: str, *args: Any) -> Any:
        try:
            return getattr(module, name)(*args)
        except Exception:  # it does not have the function, or not for this device
            return None

    def memory_bytes(device: torch.device) -> int:
        return (call("mem_get_info", device) or (0, cpu.memory_bytes()))[1]

    return DeviceKind(
        label=device_type,
        name=lambda device: call("get_device_name", device) or device_type,
        auto_precision=lambda device: "bf16" if call("is_bf16_supported") else "no",
        refused=lambda device: {"fp16": f"loss scaling is not known to work on {device_type}"},
        memory_bytes=memory_bytes,
        peak_memory_bytes=lambda device: call("max_memory_allocated", device),
        reset_peak_memory=lambda device: call("reset_peak_memory_stats", device),
        empty_cache=lambda: call("empty_cache"),
    )


_KINDS = {"cpu": _cpu, "cuda": _cuda, "xpu": _xpu, "mps": _mps}


def device_kind(device: torch.device) -> DeviceKind:
    """Return how a device's kind differs from others."""
    return _KINDS[device.type]() if device.type in _KINDS else _other(device.type)
