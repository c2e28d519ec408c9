"""Parameters and FLOPs of a GPT-2-style model from its configuration, the peak rate of a device, and MFU."""

from __future__ import annotations

import csv
import time
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from transformers import GPT2Config

from hfgpt.distributed.device import device_name, synchronize

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


class ParameterCounts(NamedTuple):
    """`without_positions` leaves out the T x C position table, which no token multiplies."""

    total: int
    without_positions: int


class Peak(NamedTuple):
    """Dense rate of a device in TFLOP/s (None: unknown) and what says so ("rated: ...", "measured: ...")."""

    tflops: float | None
    source: str


def parameter_counts(config: GPT2Config) -> ParameterCounts:
    """Parameters of GPT2LMHeadModel: V*C + T*C + L*(12*C^2 + 13*C) + 2*C for an MLP of width 4*C.

    A tied head counts once, as it is the same matrix as the embedding.
    """
    C, T, L, V = config.n_embd, config.n_positions, config.n_layer, config.vocab_size
    inner = config.n_inner or 4 * C
    attention, mlp, layer_norms = 4 * C * C + 4 * C, 2 * C * inner + inner + C, 4 * C
    matrices = 1 if config.tie_word_embeddings else 2
    without_positions = matrices * V * C + L * (attention + mlp + layer_norms) + 2 * C
    return ParameterCounts(without_positions + T * C, without_positions)


def training_flops_per_token(config: GPT2Config, sequence_length: int) -> int:
    """FLOPs to train on one token, forward and backward: 6 N + 12 L H Q T (PaLM, appendix B; nanoGPT).

    N leaves out the position table, and holds the V x C matrix once: the head multiplies by it, the embedding
    only looks rows up, so tied and untied models cost the same. The second term is attention over all T
    places, causal or not. Recomputed activations do not count.
    """
    C, L = config.n_embd, config.n_layer
    N = parameter_counts(config).without_positions
    if not config.tie_word_embeddings:
        N -= config.vocab_size * C
    return 6 * N + 12 * L * C * sequence_length  # H * Q = C


def recomputed_flops_per_token(config: GPT2Config, sequence_length: int) -> int:
    """FLOPs per token that gradient checkpointing adds: the forward pass of the blocks, not of the head."""
    return training_flops_per_token(config, sequence_length) // 3 - 2 * config.vocab_size * config.n_embd


def mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float, devices: int) -> float:
    """Model FLOPs utilisation, a fraction; `tokens_per_second` over all devices, `peak_tflops` of one."""
    return tokens_per_second * flops_per_token / (devices * peak_tflops * 1e12)


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


def _rated_rows() -> list[dict[str, str]]:
    with files("hfgpt").joinpath("device_peaks.csv").open() as table:
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
