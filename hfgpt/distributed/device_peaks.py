"""What devices can do at most: dense rates and memory from `devices.csv`, or a matmul measured on the spot.

`memory_gib` in the table is what torch sees of the card: the size its maker states less what drivers and error
correction commonly take (2 % where nothing else is known). None was measured here; `hfgpt plan --memory_gib` overrules.
"""

from __future__ import annotations

import csv
import time
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

from hfgpt.distributed.device import device_name, synchronize

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


class Peak(NamedTuple):
    """Dense rate of a device in TFLOP/s (None: unknown) and what says so ("rated: ...", "measured: ...")."""

    tflops: float | None
    source: str


def device_peak(device: torch.device, precision: str) -> Peak:
    """The device's dense rate in `precision` ("bf16", "fp16", "no"): rated if in the table, else measured, once."""
    if rated := rated_device_peak(device, precision):
        return rated
    way = device_name(device), torch.get_num_threads(), torch.get_float32_matmul_precision()
    return _measured(device, precision, *way)  # anew where one of these has changed


@cache
def _measured(device: torch.device, precision: str, *way: object) -> Peak:
    return measure_matmul_tflops(device, precision)


def rated_device_peak(device: torch.device, precision: str) -> Peak | None:
    """`rated_peak` of this device."""
    multiprocessors = None
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return rated_peak(device_name(device), precision, multiprocessors)


def rated_peak(name: str, precision: str, multiprocessors: int | None = None) -> Peak | None:
    """Dense rate with float32 accumulation of exactly this device name, or None if the table lacks it.

    fp16 has the rate of bf16 unless stated. Where one name covers several chips, `multiprocessors` tells which; None
    takes the first.
    """
    rows = [row for row in _rated_rows() if row["device_name"] == name]
    count = str(multiprocessors or "")
    rows = [row for row in rows if not count or row["multiprocessors"] in ("", count)]
    for dtype in ("fp16", "bf16") if precision == "fp16" else (precision,):
        for row in rows:
            if row["dtype"] == dtype:
                several = len([other for other in rows if other["dtype"] == dtype]) > 1
                chip = (
                    f" with {row['multiprocessors']} multiprocessors, as others of the name have more"
                    if several
                    else ""
                )
                doubt = "" if row["confidence"] == "high" else f" ({row['confidence']} confidence)"
                return Peak(float(row["dense_tflops_fp32_accumulate"]), f"rated: {name} {precision} dense{chip}{doubt}")
    return None


def rated_devices() -> list[str]:
    """The exact names of the devices whose rate is known, each once."""
    return list(dict.fromkeys(row["device_name"] for row in _rated_rows()))


def rated_memory_gib(name: str) -> float | None:
    """GiB of exactly this device name, or None if the table does not say (or several cards share the name)."""
    return next(
        (float(row["memory_gib"]) for row in _rated_rows() if row["device_name"] == name and row["memory_gib"]), None
    )


def _rated_rows() -> list[dict[str, str]]:
    with files("hfgpt.distributed").joinpath("devices.csv").open() as table:
        return list(csv.DictReader(table))


def measure_matmul_tflops(device: torch.device, precision: str, seconds: float = 0.5) -> Peak:
    """The fastest square matmul of about `seconds` of trying, as this process would run it.

    A CPU is measured with the threads in use, float32 on a CUDA card with the TF32 setting in use. Draws
    nothing from torch's global random state. A device that cannot do it gives None.
    """
    dtype = _DTYPES[precision]
    kind = str(dtype).removeprefix("torch.")
    where = device_name(device)
    if device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    sizes, calls = ((512, 1024, 2048), 1) if device.type == "cpu" else ((4096, 8192), 8)
    generator = torch.Generator(device).manual_seed(0)
    best, best_size = 0.0, 0  # FLOP/s
    try:
        for size in sizes:
            flops = 2 * size**3 * calls
            if best and flops / best > seconds:  # a slow device: the smaller size has to do
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
        return Peak(None, f"unknown: {kind} matmul failed on {where}: {str(error).splitlines()[0]}")
    return Peak(best / 1e12, f"measured: {best_size} x {best_size} {kind} matmul on {where}")
