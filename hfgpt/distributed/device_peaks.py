"""Peak rates and memory of devices: from `devices.csv`, or a matmul measured on the spot.

`memory_gib` in the table is what torch sees of the card: the maker's size less what drivers and error correction
commonly take (2 % where nothing else is known). None was measured here; `hfgpt plan --memory_gib` overrides it.
"""

from __future__ import annotations

import csv
import time
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

from hfgpt.distributed.device import device_name, synchronize
from hfgpt.distributed.device_kinds import device_kind
from hfgpt.messages.formats import counted

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


class Peak(NamedTuple):
    """Dense rate of a device in TFLOP/s (None: unknown) and its source ("rated: ...", "measured: ...")."""

    tflops: float | None
    source: str


def device_peak(device: torch.device, precision: str) -> Peak:
    """Return the device's dense rate in `precision` ("bf16", "fp16", "no"): rated, else measured once."""
    if rated := rated_device_peak(device, precision):
        return rated
    conditions = device_name(device), torch.get_num_threads(), torch.get_float32_matmul_precision()
    return _measure_once(device, precision, *conditions)


def measure_again(peak: Peak, device: torch.device, precision: str) -> Peak:
    """Return the higher one of a measured peak and a new measurement: other programs may have slowed the first."""
    return max(peak, measure_matmul_tflops(device, precision), key=lambda measured: measured.tflops or 0.0)


@cache
def _measure_once(device: torch.device, precision: str, *conditions: object) -> Peak:
    return measure_matmul_tflops(device, precision)


def rated_device_peak(device: torch.device, precision: str) -> Peak | None:
    """Return `rated_peak` of this device."""
    return rated_peak(device_name(device), precision, device_kind(device).multiprocessors(device))


def rated_peak(name: str, precision: str, multiprocessors: int | None = None) -> Peak | None:
    """Return the dense rate with float32 accumulation of exactly this device name, or None if the table lacks it.

    fp16 has the rate of bf16 unless stated. Where several chips share a name, `multiprocessors` decides; None takes
    the first.
    """
    chips = ("", str(multiprocessors)) if multiprocessors else None
    rows = [row for row in _rows_of(name) if chips is None or row["multiprocessors"] in chips]
    for dtype in ("fp16", "bf16") if precision == "fp16" else (precision,):
        if matching := [row for row in rows if row["dtype"] == dtype]:
            row = matching[0]
            source = f"rated: {name} {'float32' if precision == 'no' else precision} dense"
            if len(matching) > 1:
                source += f" with {row['multiprocessors']} multiprocessors, as others of the name have more"
            if row["confidence"] != "high":
                source += f" ({row['confidence']} confidence)"
            return Peak(float(row["dense_tflops_fp32_accumulate"]), source)
    return None


def rated_devices() -> list[str]:
    """Return the exact names of the devices whose rate is known, each once."""
    return list(dict.fromkeys(row["device_name"] for row in _read_table()))


def rated_memory_gib(name: str) -> float | None:
    """Return the GiB of exactly this device name; None if the table lacks it, for example if cards share the name."""
    return next((float(row["memory_gib"]) for row in _rows_of(name) if row["memory_gib"]), None)


def _rows_of(name: str) -> list[dict[str, str]]:
    return [row for row in _read_table() if row["device_name"] == name]


def _read_table() -> list[dict[str, str]]:
    with files("hfgpt.distributed").joinpath("devices.csv").open(encoding="utf-8") as table:
        return list(csv.DictReader(table))


def measure_matmul_tflops(device: torch.device, precision: str, seconds: float = 0.5) -> Peak:
    """Measure the rate of the fastest square matmul for about `seconds`; `tflops` is None if the device has none.

    Uses this process's threads and its TF32 setting, and nothing of torch's global random state.
    """
    dtype = _DTYPES[precision]
    dtype_name = str(dtype).removeprefix("torch.")
    where = device_name(device)
    if device.type == "cpu":
        where += f", {counted(torch.get_num_threads(), 'thread')}"
    sizes, calls = ((512, 1024, 2048), 1) if device.type == "cpu" else ((4096, 8192), 8)
    best, best_size = 0.0, 0  # FLOP/s
    try:
        generator = torch.Generator(device).manual_seed(0)
        for size in sizes:
            flops = 2 * size**3 * calls
            if best and flops / best > seconds:  # a slow device: the smaller size has to suffice
                break
            a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
            out = torch.matmul(a, b)  # the first call sets the library up
            synchronize(device)
            began = now = time.perf_counter()
            while now - began < seconds / len(sizes):
                start = now
                for _ in range(calls):
                    torch.matmul(a, b, out=out)
                synchronize(device)
                now = time.perf_counter()
                best, best_size = max((best, best_size), (flops / (now - start), size))
    except RuntimeError as error:
        return Peak(None, f"unknown: {dtype_name} matmul failed on {where}: {str(error).splitlines()[0]}")
    return Peak(best / 1e12, f"measured: {best_size} x {best_size} {dtype_name} matmul on {where}")
