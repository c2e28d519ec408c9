"""The device of a run, and the choices that follow from it."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import transformers
import xxhash
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env
from torch import Tensor

from hfgpt.distributed import cpu
from hfgpt.distributed.device_kinds import device_kind
from hfgpt.distributed.launcher import rank_and_world_size
from hfgpt.errors import UserError

# Types of device on which Accelerate starts a process group.
WITH_SEVERAL_PROCESSES = ("cpu", "cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron")


@dataclass(frozen=True)
class Precision:
    """`name` as Accelerate's `mixed_precision` spells it (bf16, fp16, or no for float32), and why it was chosen."""

    name: str
    reason: str

    @property
    def label(self) -> str:
        """The name in plain words."""
        return "float32" if self.name == "no" else self.name


def default_device() -> torch.device:
    """Return the accelerator that torch finds; the CPU without one, or if the accelerate configuration asks for it."""
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the exact name of a device, for example "NVIDIA GeForce RTX 4070 Ti"; of a CPU its model."""
    return device_kind(device).name(device)


def native_precision(device: torch.device) -> str:
    """Return the smallest precision that the device trains in with its own instructions: bf16, fp16 or no."""
    return device_kind(device).auto_precision(device)


def memory_bytes(device: torch.device) -> int:
    """Return the memory that this process may use: the device's, or its share of the machine's or container's."""
    return device_kind(device).memory_bytes(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory held since the last reset: of the device, resident on a CPU. None if not counted."""
    return device_kind(device).peak_memory_bytes(device)


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_bytes` start again from what is held now; for a CPU only Linux can."""
    device_kind(device).reset_peak_memory(device)


def release_memory(device: torch.device) -> None:
    """Give memory that is no longer used back to the device."""
    gc.collect()
    device_kind(device).empty_cache()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, without waiting for it where the device can."""
    tensor, pins = torch.from_numpy(array), device_kind(device).pins_memory
    return (tensor.pin_memory() if pins else tensor).to(device, non_blocking=pins)


def choose_precision(requested: str, device: torch.device) -> Precision:
    """Choose the precision to compute in; weights and optimizer state always stay float32.

    `requested` is "auto", "bf16", "fp16" or "no". "auto" follows the accelerate configuration if that names bf16 or
    fp16, else the hardware. Raises UserError for what the device cannot do.
    """
    kind = device_kind(device)
    native, refused = kind.auto_precision(device), kind.refused(device)
    name, reason = requested, "requested"
    if requested == "auto":
        name, reason = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "from the accelerate configuration"
        if name == "no":
            name = native
            reason = refused.get("bf16") or f"the {kind.label} has {'' if native == 'bf16' else 'no '}bf16 instructions"
    where = f"mixed_precision {name} ({reason})"
    if name not in ("bf16", "fp16", "no"):
        raise UserError(f"{where}: not one of auto, bf16, fp16, no")
    if name in refused:
        working = [other for other in ("bf16", "fp16", "no") if other not in refused]
        raise UserError(f"{where}: {refused[name]}; use {' or '.join(working)}, or auto, which selects {native}")
    if name == "fp16":
        reason += ", with loss scaling"
    if name == "bf16" and native == "no":
        reason += f"; this {kind.label} has no bf16 instructions, float32 would be faster"
    return Precision(name, reason)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a process's random numbers in a step, so that no generator state is needed to resume."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {rank}".encode()) >> 1


def seed_random_numbers(seed: int, device: torch.device) -> None:
    """Seed the CPU and one device. `torch.manual_seed` also records a traceback for each device that is not in use."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        seed_device = getattr(module, "manual_seed", None) or getattr(module, "manual_seed_all", None)
        if seed_device is not None:
            seed_device(seed)


def start_accelerator(mixed_precision: str, timeout_seconds: float) -> tuple[Accelerator, Precision]:
    """Return the Accelerator as `accelerate launch` or torchrun configured it, and the precision chosen for it.

    A process gives up after waiting `timeout_seconds` for the others.
    """
    transformers.utils.logging.disable_progress_bar()
    device = default_device()
    precision = choose_precision(mixed_precision, device)
    _, world_size = rank_and_world_size()
    if world_size > 1 and device.type not in WITH_SEVERAL_PROCESSES:
        raise UserError(
            f"several processes cannot train on {device.type}; start one, or put ACCELERATE_USE_CPU=true before it"
        )
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_seconds))
    # An earlier run of this process may have had another precision or device, which Accelerate keeps for all.
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    # The launcher does not pass `use_cpu` on to several processes, so the CPU is named here.
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision.name, kwargs_handlers=[group])
    if accelerator.num_processes != world_size:
        raise UserError(f"the launcher started {world_size} processes, but accelerate sees {accelerator.num_processes}")
    if accelerator.device.type != device.type:  # an accelerator that Accelerate does not know
        accelerator.state.device = PartialState().device = device
    accelerator.gradient_accumulation_steps = 1  # the step accumulates by itself; backward() must not divide
    if accelerator.device.type == "cpu":
        cpu.keep_freed_memory()
        torch.set_num_threads(threads)  # Accelerate takes all cores where OMP_NUM_THREADS alone is not set
        cpu.use_all_cores(cpu.local_processes())
    _set_determinism(accelerator.device.type == "cpu")
    return accelerator, precision


_is_deterministic = False  # set by a run of this process


def _set_determinism(is_cpu: bool) -> None:
    """Have a CPU add up gradients in a fixed order: otherwise a resumed run differs in the last bits.

    A later run on a card takes this back, as cuBLAS refuses it.
    """
    global _is_deterministic
    if is_cpu or _is_deterministic:
        torch.use_deterministic_algorithms(is_cpu)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _is_deterministic = is_cpu
