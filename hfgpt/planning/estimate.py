"""`hfgpt plan`: the batch that fits a device, and what a run takes there, without the device."""

from __future__ import annotations

import dataclasses
import difflib
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from transformers import GPT2Config

from hfgpt.config import POSITIVE, SIZE, Batch, PretrainConfig
from hfgpt.distributed import compiler, cpu
from hfgpt.distributed import device as machine
from hfgpt.distributed.compiler import CompileChoice
from hfgpt.distributed.device import Precision
from hfgpt.distributed.device_peaks import Peak, device_peak, rated_devices, rated_memory_gib, rated_peak
from hfgpt.errors import UserError
from hfgpt.field_types import NOT_CONVERTIBLE, convert, describe, shown
from hfgpt.model.configuration_gpt2 import model_config, model_fields
from hfgpt.model.flops import parameter_counts, training_flops_per_token
from hfgpt.model.memory import Memory, training_memory
from hfgpt.training.plan import setting_of

# What a process takes besides tensors: a CUDA context is some 0.3 to 0.5 GiB, and an allocator leaves gaps.
OUTSIDE_BYTES = 2**29
GAPS = 0.1
LARGEST_MICRO_BATCH = 2**16
GPT2_VOCABULARY = 50257

SHARED_FLAGS = (
    *("model", "tokens_per_step", "sequence_length", "mixed_precision", "torch_compile", "gradient_checkpointing"),
    *("optim", "max_tokens", "mfu_peak_tflops"),
)


@dataclass(frozen=True)
class Asked:
    """Flags of `hfgpt plan` besides those of `PretrainConfig`."""

    device: str | None = None
    vocab_size: int | None = None
    processes: int = 1
    fsdp: bool = False
    memory_gib: float | None = None
    mfu: float = 0.4
    price_per_hour: float | None = None
    watts: float | None = None

    @classmethod
    def of(cls, flags: dict[str, Any]) -> tuple[Asked, list[str]]:
        """The flags by type, and what is wrong with them; a wrong one counts as not given."""
        hints = {"device": str, "vocab_size": int, "processes": int, "fsdp": bool}
        good: dict[str, Any] = {}
        problems = []
        for key, value in flags.items():
            hint = hints.get(key, float)
            try:
                converted = convert(value, hint)
            except NOT_CONVERTIBLE:
                problems.append(f"{key}={shown(value)}: must be {describe(hint)}")
                continue
            if key == "mfu" and not 0 < converted <= 1:
                problems.append(f"{key}={value}: must be above 0 and at most 1")
            elif hint is float and not 1e-30 <= converted <= 1e15:
                problems.append(f"{key}={value}: must be {SIZE}")
            elif hint is int and converted < 1:
                problems.append(f"{key}={value}: must be {POSITIVE}")
            else:
                good[key] = converted
        return cls(**good), problems


@dataclass(frozen=True)
class Device:
    """The device planned for; `gib` and the peak may be unknown."""

    name: str
    type: str
    gib: float | None
    peak: Peak
    precision: Precision
    compile: CompileChoice


@dataclass(frozen=True)
class Cut:
    """One way to cut the step, with its memory on one device."""

    batch: Batch
    memory: Memory
    fits: bool

    @property
    def needed_bytes(self) -> int:
        """What the device must have: tensors, gaps between them, and what is no tensor."""
        return _needed_bytes(self.memory)


@dataclass(frozen=True)
class Forecast:
    """`lines` is what is printed, `to_dict` the JSON object. `cuts` are smallest first."""

    config: PretrainConfig
    asked: Asked
    model: GPT2Config
    device: Device
    gib: float
    cuts: list[Cut]

    @property
    def chosen(self) -> Cut | None:
        """The largest micro-batch that fits, or None."""
        return next((cut for cut in reversed(self.cuts) if cut.fits), None)

    @property
    def tokens_per_second(self) -> float | None:
        """Over all processes, at the MFU asked for."""
        if self.device.peak.tflops is None:
            return None
        flops = training_flops_per_token(self.model, self.config.sequence_length)
        return self.asked.mfu * self.asked.processes * self.device.peak.tflops * 1e12 / flops

    @property
    def steps(self) -> int:
        return self.config.total_steps(self.cuts[0].batch, None)

    def figures(self) -> dict[str, float | None]:
        """Seconds per step, hours to the token budget, kWh and price over all processes; None where unknown."""
        rate, asked = self.tokens_per_second, self.asked
        seconds = rate and self.cuts[0].batch.tokens_per_step / rate
        hours = seconds and seconds * self.steps / 3600
        device_hours = hours and hours * asked.processes
        return {
            "seconds_per_step": seconds,
            "hours": hours,
            "kwh": device_hours * asked.watts / 1000 if device_hours and asked.watts else None,
            "cost": device_hours * asked.price_per_hour if device_hours and asked.price_per_hour else None,
        }

    def lines(self) -> list[str]:
        model, asked, config, device, chosen = self.model, self.asked, self.config, self.device, self.chosen
        name = config.model if isinstance(config.model, str) else "custom"
        shown = chosen or self.cuts[0]
        gib = {part: f"{bytes_ / 2**30:.2f}" for part, bytes_ in asdict(shown.memory).items()}
        recomputed = ", with blocks recomputed" if config.gradient_checkpointing else ""
        sharing = f", with parameters split over {asked.processes} processes" if asked.fsdp else ""
        rows = [
            (
                "model",
                f"{name}: {model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, vocabulary "
                f"{model.vocab_size:,}; {parameter_counts(model).total:,} parameters",
            ),
            ("device", f"{device.name}, {self.gib:.4g} GiB; {device.precision.name} ({device.precision.reason})"),
            ("compile", f"{'on' if device.compile.enabled else 'off'} ({device.compile.reason})"),
            ("step", shown.batch.describe() if chosen else f"no micro-batch fits; smallest: {shown.batch.describe()}"),
            (
                "memory",
                f"{shown.memory.peak / 2**30:.2f} GiB, and {(shown.needed_bytes - shown.memory.peak) / 2**30:.2f} "
                f"besides tensors{recomputed}{sharing}",
            ),
            ("", ", ".join(f"{part} {size}" for part, size in gib.items())),
            *self._table(),
            *self._time(),
        ]
        return [f"{key:<8} {value}" for key, value in rows]

    def _table(self) -> list[tuple[str, str]]:
        """The largest cuts that fit, and those that just do not."""
        rows = [("cuts", "micro-batch x accumulation        GiB")]
        for cut in self.cuts[-8:]:
            fits = "chosen" if cut is self.chosen else "fits" if cut.fits else "too large"
            size = f"{cut.batch.micro_batch:>11,} x {cut.batch.accumulation:<12,}"
            rows.append(("", f"{size} {cut.needed_bytes / 2**30:>11,.2f}  {fits}"))
        return rows

    def _time(self) -> list[tuple[str, str]]:
        peak, asked, figures = self.device.peak, self.asked, self.figures()
        if self.tokens_per_second is None:
            return [("time", f"{peak.source}; state the peak with --mfu_peak_tflops")]
        tokens = self.steps * self.config.batch(asked.processes).tokens_per_step
        seconds, hours = figures["seconds_per_step"] or 0.0, figures["hours"] or 0.0
        rows = [
            (
                "time",
                f"{seconds:,.3g} s per step, {self.tokens_per_second:,.0f} tokens/s at MFU {asked.mfu:.3g} of "
                f"{peak.tflops:,.4g} TFLOP/s ({peak.source})",
            ),
            ("budget", f"{tokens:,} tokens in {self.steps:,} steps: {hours:,.3g} hours, without evaluation and saving"),
        ]
        if figures["kwh"] is not None:
            rows.append(("energy", f"{figures['kwh']:,.3g} kWh at {asked.watts:g} W a device"))
        if figures["cost"] is not None:
            rows.append(("cost", f"{figures['cost']:,.2f} at {asked.price_per_hour:g} an hour and device"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        config, asked, device, chosen = self.config, self.asked, self.device, self.chosen

        def told(cut: Cut) -> dict[str, Any]:
            batch, memory = cut.batch, cut.memory
            sizes = {"micro_batch": batch.micro_batch, "accumulation": batch.accumulation}
            return {**sizes, "memory_bytes": memory.peak, "needed_bytes": cut.needed_bytes, "fits": cut.fits}

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
            "processes": asked.processes,
            "fsdp": asked.fsdp,
            "sequence_length": config.sequence_length,
            "tokens_per_step": config.tokens_per_step,
            "micro_batch": chosen and chosen.batch.micro_batch,
            "accumulation": chosen and chosen.batch.accumulation,
            "memory_bytes": chosen and {**asdict(chosen.memory), "peak": chosen.memory.peak},
            "cuts": [told(cut) for cut in self.cuts],
            "mfu": asked.mfu,
            "peak_tflops": device.peak.tflops,
            "peak_source": device.peak.source,
            "tokens_per_second": self.tokens_per_second,
            "max_tokens": config.max_tokens,
            "steps": self.steps,
            **self.figures(),
        }


def forecast(flags: dict[str, Any]) -> Forecast:
    """The forecast for flags as text by name, those left out at their defaults. Raises UserError with all problems."""
    asked, problems = Asked.of({key: value for key, value in flags.items() if key not in SHARED_FLAGS})
    shared = {key: value for key, value in flags.items() if key in SHARED_FLAGS}
    if "tokens_per_step" not in shared:
        problems.append("tokens_per_step: not given; state the target tokens of a step, such as 524288")
    config = PretrainConfig(max_steps=1)  # with which further faults are looked for where the flags' own has some
    model, device = None, None
    try:
        # The cut is what is sought: with one sequence at a time, any step of whole sequences is possible.
        defaults = {"per_device_train_batch_size": 1, "max_tokens": 10_000_000_000, **length_of(shared)}
        config = PretrainConfig.from_layers(defaults, shared)
        model = _model(config, asked.vocab_size)
        config.batch(asked.processes)
    except UserError as error:
        problems += error.problems
    try:
        device = _device(asked.device, config, asked.memory_gib)
    except UserError as error:
        problems += error.problems
    gib = asked.memory_gib or (device and device.gib)
    if device and not gib:
        problems.append(f"memory_gib: not given, and the memory of {device.name} is not known here; state it")
    if asked.fsdp and asked.processes == 1:
        problems.append("fsdp: one process has none to share with; state --processes, or leave it out")
    if asked.fsdp and device and device.precision.name == "fp16":
        problems.append("fsdp: the loss scaling of fp16 does not serve FSDP2; leave it out")
    if problems or model is None or device is None or not gib:
        raise UserError(*problems)
    return Forecast(config, asked, model, device, gib, _cuts(config, asked, model, device, gib))


def length_of(shared: dict[str, Any]) -> dict[str, int]:
    """The model's own length for `sequence_length`; nothing where the model cannot be read."""
    model = shared.get("model", "gpt2-125m")
    with suppress(*NOT_CONVERTIBLE):
        return {"sequence_length": model_fields(convert(model, str | dict[str, Any])).get("n_positions", 1024)}
    return {}


def _model(config: PretrainConfig, vocab_size: int | None) -> GPT2Config:
    """With GPT-2's vocabulary, unless the model's fields or the flag state another; UserError where both do."""
    stated = model_fields(config.model).get("vocab_size", GPT2_VOCABULARY)
    return model_config(config.model, vocab_size=vocab_size or stated)


def _device(name: str | None, config: PretrainConfig, memory_gib: float | None) -> Device:
    """The device of this name: this machine's, or one that is rated. Raises UserError for any other."""
    here = machine.default_device()
    if name is None or name in (here.type, machine.device_name(here)):
        if here.type == "cpu":
            cpu.use_all_cores(1)
        precision = machine.choose_precision(config.mixed_precision, here)
        compiled = compiler.choose_compile(config.torch_compile, here, compiler.SHORT_RUN_FORWARD_PASSES)
        peak = _stated_peak(config) or device_peak(here, precision.name)
        gib = machine.memory_bytes(here) / 2**30
        return Device(machine.device_name(here), here.type, gib, peak, precision, compiled)
    known, stated = rated_devices(), config.mfu_peak_tflops and memory_gib
    if name not in known and not stated:
        by_lower = {device.lower(): device for device in known}
        near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.3)]
        raise UserError(
            f"device={name}: not known; "
            + (f"near are {', '.join(near)}; " if near else "")
            + "leave it out for this machine, or state --memory_gib and --mfu_peak_tflops"
        )
    precision = _rated_precision(name, config.mixed_precision)
    unknown = Peak(None, f"the rate of {name} in mixed_precision {precision.name} is not known")
    peak = _stated_peak(config) or rated_peak(name, precision.name) or unknown
    requested = config.torch_compile
    compiled = CompileChoice(bool(requested), "requested" if requested != "auto" else "as where there is a compiler")
    return Device(name, "cuda", rated_memory_gib(name), peak, precision, compiled)


def _stated_peak(config: PretrainConfig) -> Peak | None:
    return Peak(config.mfu_peak_tflops, "stated: --mfu_peak_tflops") if config.mfu_peak_tflops else None


def _rated_precision(name: str, requested: str) -> Precision:
    """As `choose_precision` on the device itself, by the rates that are known of it."""
    native = "bf16" if rated_peak(name, "bf16") else "fp16"
    if requested == "bf16" and native == "fp16":
        raise UserError(f"mixed_precision={requested}: {name} has no bf16; use fp16, or auto to choose it")
    reason = "requested" if requested != "auto" else f"the card has {'' if native == 'bf16' else 'no '}bf16"
    return Precision(native if requested == "auto" else requested, reason)


def _cuts(config: PretrainConfig, asked: Asked, model: GPT2Config, device: Device, gib: float) -> list[Cut]:
    """The micro-batches that divide the step, smallest first, up to three that are too large."""
    whole = config.batch(asked.processes)
    blocks = whole.micro_batch * whole.accumulation
    shares = asked.processes if asked.fsdp else 1
    cuts: list[Cut] = []
    for micro_batch in range(1, min(blocks, LARGEST_MICRO_BATCH) + 1):
        if blocks % micro_batch or sum(not cut.fits for cut in cuts) == 3:
            continue
        batch = Batch(micro_batch, whole.sequence_length, blocks // micro_batch, whole.processes)
        setting = setting_of(config, batch, device.precision.name, shares, device.type)
        memory = training_memory(model, dataclasses.replace(setting, compiled=device.compile.enabled))
        cuts.append(Cut(batch, memory, _needed_bytes(memory) <= gib * 2**30))
    return cuts


def _needed_bytes(memory: Memory) -> int:
    return round(memory.peak * (1 + GAPS)) + OUTSIDE_BYTES
