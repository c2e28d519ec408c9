"""`hfgpt plan`: estimate which micro-batch fits a device, and how long a run takes there, without the device."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from transformers import GPT2Config

from hfgpt.config import PretrainConfig
from hfgpt.errors import UserError
from hfgpt.messages.formats import counted, rounded
from hfgpt.model.configuration_gpt2 import model_config, model_fields
from hfgpt.model.flops import TYPICAL_MFU, parameter_counts, training_flops_per_token
from hfgpt.model.memory import Memory, training_memory
from hfgpt.planning.device import Device, find_device
from hfgpt.settings.batch import Batch, splits_of_stages
from hfgpt.settings.field_types import NOT_CONVERTIBLE, convert
from hfgpt.settings.step_sizes import StepSizes, step_sizes, total_steps
from hfgpt.training.averaging import describe_average
from hfgpt.training.plan import setting_of

# What a process needs besides tensors: a CUDA context is 0.3 to 0.5 GiB, and the allocator leaves gaps.
OUTSIDE_BYTES = 2**29
GAPS = 0.1
LARGEST_MICRO_BATCH = 2**16
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Split:
    """One way to split the step into micro-batches, with its memory on one device."""

    batch: Batch
    memory: Memory
    available_bytes: float

    @property
    def needed_bytes(self) -> int:
        """Bytes that the device must have: for tensors, gaps between them, and everything else."""
        return round(self.memory.peak * (1 + GAPS)) + OUTSIDE_BYTES

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes

    def accumulations(self, stages: list[tuple[int, int, int]]) -> list[int]:
        """Return the accumulation in each of the `stages`; one number if steps do not grow."""
        return [self.batch.of(blocks).accumulation for *_, blocks in stages] or [self.batch.accumulation]

    def to_dict(self, stages: list[tuple[int, int, int]]) -> dict[str, Any]:
        each = self.accumulations(stages)
        split = {"accumulation": None, "accumulation_of_stages": each} if stages else {"accumulation": each[0]}
        memory = {"memory_bytes": self.memory.peak, "needed_bytes": self.needed_bytes, "fits": self.fits}
        return {"micro_batch": self.batch.micro_batch, **split, **memory}


@dataclass(frozen=True)
class Forecast:
    """A forecast: `lines` is printed, `to_dict` is the JSON object. `splits` are smallest first."""

    config: PretrainConfig
    model: GPT2Config
    device: Device
    gib: float
    splits: list[Split]
    fsdp: bool
    mfu: float
    price_per_hour: float | None  # of one device
    watts: float | None  # of one device

    @property
    def chosen(self) -> Split | None:
        """The largest micro-batch that fits, or None."""
        return next((split for split in reversed(self.splits) if split.fits), None)

    @property
    def batch(self) -> Batch:  # of the smallest split; tokens and processes are the same for all
        return self.splits[0].batch

    @property
    def tokens_per_second(self) -> float | None:
        """Over all processes, at `mfu`; None if the peak is unknown."""
        if self.device.peak.tflops is None:
            return None
        flops = training_flops_per_token(self.model, self.config.sequence_length)
        return self.mfu * self.batch.processes * self.device.peak.tflops * 1e12 / flops

    @property
    def sizes(self) -> StepSizes:
        return step_sizes(self.config, self.batch.tokens_per_step)

    @property
    def steps(self) -> int:
        return total_steps(self.config, self.sizes, None)

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """The stages (first step, end, blocks per step), if steps grow."""
        found = self.sizes.stages_before(self.steps)
        return found if len(found) > 1 else []

    def costs(self) -> dict[str, float | None]:
        """Return seconds per step, hours to the token budget, kWh and price over all processes; None where unknown.

        The seconds of a step are None if steps grow.
        """
        rate = self.tokens_per_second
        seconds = rate and not self.stages and self.sizes.tokens(0) / rate
        hours = rate and self.sizes.tokens_after(self.steps) / rate / 3600
        device_hours = hours and hours * self.batch.processes
        return {
            "seconds_per_step": seconds or None,
            "hours": hours,
            "kwh": device_hours * self.watts / 1000 if device_hours and self.watts else None,
            "cost": device_hours * self.price_per_hour if device_hours and self.price_per_hour else None,
        }

    def lines(self) -> list[str]:
        model, config, device = self.model, self.config, self.device
        split = self.chosen or self.splits[0]
        name = config.model if isinstance(config.model, str) else "custom"
        parts = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in asdict(split.memory).items())
        tensors, outside = split.memory.peak / 2**30, (split.needed_bytes - split.memory.peak) / 2**30
        recomputed = ", with blocks recomputed" if config.gradient_checkpointing else ""
        sharded = f", with parameters sharded over {self.batch.processes} processes" if self.fsdp else ""
        rows = [
            (
                "model",
                f"{name}: {counted(model.n_layer, 'layer')}, {counted(model.n_head, 'head')}, {model.n_embd} wide, "
                f"vocabulary {model.vocab_size:,}; {parameter_counts(model).total:,} parameters",
            ),
            (
                "device",
                f"{device.name}, {rounded(self.gib, 4)} GiB; {device.precision.label} ({device.precision.reason})",
            ),
            ("compile", f"{'on' if device.compile.enabled else 'off'} ({device.compile.reason})"),
            *(("step", line) for line in self._describe_steps(split.batch)),
            *([("average", average)] if (average := self._average()) else []),
            ("memory", f"{tensors:.2f} GiB, plus {outside:.2f} besides tensors{recomputed}{sharded}"),
            ("", parts),
            *self._split_rows(),
            *self._time_rows(),
        ]
        return [f"{key:<8} {value}" for key, value in rows]

    def _describe_steps(self, batch: Batch) -> list[str]:
        missing = "" if self.chosen else "no micro-batch fits; smallest: "
        rate = self.tokens_per_second
        lines = [
            f"{missing}steps {first + 1:,} to {last:,}: {(step := batch.of(blocks)).describe()}"
            + (f"; {rounded(step.tokens_per_step / rate)} s per step" if rate else "")
            for first, last, blocks in self.stages
        ]
        return lines or [missing + batch.of(self.sizes.blocks(0)).describe()]

    def _average(self) -> str:
        shares = self.batch.processes if self.fsdp else 1
        setting = setting_of(self.config, self.batch, self.device.precision.name, shares, self.device.type)
        return describe_average(self.config, self.steps, self.model, setting)

    def _split_rows(self) -> list[tuple[str, str]]:
        each = [", ".join(f"{number:,}" for number in split.accumulations(self.stages)) for split in self.splits[-8:]]
        title = "accumulation of each stage" if self.stages else "accumulation"
        width = max(map(len, [*each, title]))
        rows = [("splits", f"micro-batch x {title:<{width}} {'GiB':>10}")]
        for split, accumulation in zip(self.splits[-8:], each, strict=True):
            verdict = "chosen" if split is self.chosen else "fits" if split.fits else "too large"
            size = f"{split.batch.micro_batch:>11,} x {accumulation:<{width}}"
            rows.append(("", f"{size} {split.needed_bytes / 2**30:>10,.2f}  {verdict}"))
        return rows

    def _time_rows(self) -> list[tuple[str, str]]:
        peak, costs = self.device.peak, self.costs()
        if self.tokens_per_second is None:
            return [("time", f"{peak.source}; set the peak with --mfu_peak_tflops")]
        rate = f"{self.tokens_per_second:,.0f} tokens/s at MFU {self.mfu:.3g} of {rounded(peak.tflops or 0, 4)} TFLOP/s"
        budget = f"{self.sizes.tokens_after(self.steps):,} tokens in {counted(self.steps, 'step')}"
        each = "" if self.stages else f"{rounded(costs['seconds_per_step'] or 0)} s per step, "
        rows = [
            ("time", f"{each}{rate} ({peak.source})"),
            ("budget", f"{budget}: {rounded(costs['hours'] or 0)} hours, without evaluation and saving"),
        ]
        if costs["kwh"] is not None:
            rows.append(("energy", f"{rounded(costs['kwh'])} kWh at {rounded(self.watts or 0, 6)} W per device"))
        if costs["cost"] is not None:
            rows.append(("cost", f"{costs['cost']:,.2f} at {rounded(self.price_per_hour or 0, 6)} per hour and device"))
        return rows

    def _stages_as_json(self) -> list[dict[str, Any]]:
        rate, split = self.tokens_per_second, (self.chosen or self.splits[0]).batch
        stages = splits_of_stages(split, self.sizes, self.steps)
        return [
            {
                **stage,
                "accumulation": self.chosen and stage["accumulation"],
                "seconds_per_step": rate and stage["tokens_per_step"] / rate,
            }
            for stage in stages
        ]

    def to_dict(self) -> dict[str, Any]:
        config, device, chosen = self.config, self.device, self.chosen
        return {
            "model": config.model,
            "parameters": parameter_counts(self.model).total,
            "vocab_size": self.model.vocab_size,
            "device": device.name,
            "memory_gib": self.gib,
            "precision": device.precision.name,
            "torch_compile": device.compile.enabled,
            "gradient_checkpointing": config.gradient_checkpointing,
            "optim": config.optim,
            "processes": self.batch.processes,
            "fsdp": self.fsdp,
            "sequence_length": config.sequence_length,
            "tokens_per_step": config.tokens_per_step,
            "micro_batch": chosen and chosen.batch.micro_batch,
            "accumulation": None if self.stages else chosen and chosen.batch.of(self.sizes.blocks(0)).accumulation,
            **({"stages": self._stages_as_json()} if self.stages else {}),
            "memory_bytes": chosen and {**asdict(chosen.memory), "peak": chosen.memory.peak},
            "average": self._average() or None,
            "cuts": [split.to_dict(self.stages) for split in self.splits],
            "mfu": self.mfu,
            "peak_tflops": device.peak.tflops,
            "peak_source": device.peak.source,
            "tokens_per_second": self.tokens_per_second,
            "max_tokens": config.max_tokens,
            "steps": self.steps,
            **self.costs(),
        }


def forecast(
    *,
    device: str | None = None,
    vocab_size: int | None = None,
    processes: int = 1,
    fsdp: bool = False,
    memory_gib: float | None = None,
    mfu: float = TYPICAL_MFU,
    price_per_hour: float | None = None,
    watts: float | None = None,
    **settings: Any,
) -> Forecast:
    """Forecast a run with these `settings` of PretrainConfig. Raises UserError with all problems."""
    problems: list[str] = []
    config = PretrainConfig(max_steps=1)  # for finding the device if the settings have problems, too
    model, target = None, None
    try:
        # With a micro-batch of 1, any step of whole sequences is possible; the largest that fits is found below.
        defaults = {"per_device_train_batch_size": 1, "max_tokens": 10_000_000_000}
        config = PretrainConfig.from_layers(defaults | default_length(settings), settings)
        stated = model_fields(config.model).get("vocab_size", GPT2_VOCABULARY)
        model = model_config(config.model, vocab_size=vocab_size or stated)  # raises if two sizes disagree
        config.batch(processes)
    except UserError as error:
        problems += error.problems
    try:
        target = find_device(device, config, memory_gib)
    except UserError as error:
        problems += error.problems
    gib = memory_gib or (target and target.gib)
    if target and not gib:
        problems.append(f"memory_gib: not given, and the memory of {target.name} is unknown; set it")
    if fsdp and processes == 1:
        problems.append("fsdp: needs several processes; set --processes, or leave it out")
    if fsdp and target and target.precision.name == "fp16":
        problems.append("fsdp: does not work with fp16 (loss scaling); leave it out")
    if problems or model is None or target is None or not gib:
        raise UserError(*problems)
    splits = _find_splits(config, processes, fsdp, model, target, gib)
    return Forecast(config, model, target, gib, splits, fsdp, mfu, price_per_hour, watts)


def default_length(settings: dict[str, Any]) -> dict[str, int]:
    """Return a `sequence_length` of all of the model's positions; empty if the model cannot be read."""
    with suppress(*NOT_CONVERTIBLE):
        model = convert(settings.get("model", "gpt2-125m"), str | dict[str, Any])
        return {"sequence_length": model_fields(model).get("n_positions", 1024)}
    return {}


def _find_splits(
    config: PretrainConfig, processes: int, fsdp: bool, model: GPT2Config, device: Device, gib: float
) -> list[Split]:
    """Return the micro-batches that divide the step, smallest first, including up to three that are too large."""
    whole = config.batch(processes)
    blocks = whole.micro_batch * whole.accumulation
    splits: list[Split] = []
    for micro_batch in range(1, min(blocks, LARGEST_MICRO_BATCH) + 1):
        if blocks % micro_batch or sum(not split.fits for split in splits) == 3:
            continue
        batch = dataclasses.replace(whole, micro_batch=micro_batch, accumulation=blocks // micro_batch)
        choices = (device.precision.name, processes if fsdp else 1, device.type, device.compile.enabled)
        memory = training_memory(model, setting_of(config, batch, *choices))
        splits.append(Split(batch, memory, gib * 2**30))
    return splits
