"""`hfgpt doctor`: does this device compute what it should? Each check compares it with an independent computation."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config
from transformers import GPT2LMHeadModel as StockGPT2

from hfgpt.distributed.compiler import choose_compile
from hfgpt.distributed.device import (
    device_name,
    memory_bytes,
    native_precision,
    peak_memory_bytes,
    reset_peak_memory,
    seed_random_numbers,
)
from hfgpt.distributed.device_peaks import Peak
from hfgpt.errors import first_line
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

# How far results may be apart: float32 sums in another order; 16-bit numbers have 3 digits.
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
ROWS, WIDTH, VOCABULARY = 16 * 1024, 768, 50_304  # of the head at GPT-2's size: a micro-batch of 16 x 1,024 tokens
SAMPLED_ROWS = 64
ALLOCATION = 64 * 2**20  # bytes
NO_HALF = "train with --mixed_precision no"
NO_DROPOUT = "train without dropout (the default): resumed runs would differ"
NO_COMPILE = "train with --torch_compile false"
USE_CPU = "train on the CPU (--config_file accelerate_configs/cpu.yaml), or update torch and the driver"


@dataclass(frozen=True)
class Check:
    """The result of one check. `passed` is None if it could not be made, for the reason in `detail`."""

    name: str
    passed: bool | None
    detail: str
    fix: str = ""

    def line(self) -> str:
        state = {True: "ok", False: "FAILED", None: "skipped"}[self.passed]
        return f"{state:8} {self.name}: {self.detail}" + (f"; {self.fix}" if self.passed is False else "")


def check_device(device: torch.device, rated: Peak | None, measured: Peak) -> Iterator[Check]:
    """Yield the result of each check of `device`. rated, measured: its peak rate, for the same precision."""
    checks: list[tuple[str, Callable[[], Check], str]] = [
        ("versions", check_versions, "install hfgpt again, with pip install -e ."),
        ("training step", lambda: check_step(device), USE_CPU),
        ("large matrix", lambda: check_large_matrix(device), USE_CPU),
        ("16-bit step", lambda: check_half_precision(device), NO_HALF),
        ("dropout", lambda: check_dropout(device), NO_DROPOUT),
        ("memory", lambda: check_memory(device), "train all the same; memory is not known on this device"),
        ("peak rate", lambda: check_peak(rated, measured), "state --mfu_peak_tflops"),
        ("torch.compile", lambda: check_compile(device), NO_COMPILE),
    ]
    for name, check, fix in checks:
        try:
            yield check()
        except Exception as error:  # whatever an operator that the device lacks raises
            yield Check(name, False, first_line(error), fix)


def check_versions() -> Check:
    """Compare installed packages with the versions that hfgpt needs."""
    problems, seen = [], []
    for line in importlib.metadata.requires("hfgpt") or []:
        requirement = Requirement(line)
        if requirement.marker is not None:  # of an extra
            continue
        seen.append(requirement.name)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} does not satisfy {requirement.specifier}")
    fix = "pip install -U " + " ".join(problem.split()[0] for problem in problems)
    return Check("versions", not problems, "; ".join(problems) or f"{len(seen)} packages are new enough", fix)


def check_step(device: torch.device) -> Check:
    """Compare loss and gradients of one step in float32 with stock transformers' GPT-2 on the CPU."""
    reference, ids = _reference()
    stock_loss = cross_entropy(reference(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    stock_loss.backward()
    expected_loss, (loss, gradients) = stock_loss.item(), _step(device, reference, ids)
    errors = {}  # relative to the largest value
    for name, parameter in reference.named_parameters():
        largest = parameter.grad.abs().max().clamp(min=1e-12)
        errors[name] = ((gradients[name] - parameter.grad).abs().max() / largest).nan_to_num(math.inf).item()
    worst = max(errors, key=lambda name: errors[name])
    passed = abs(loss - expected_loss) <= FLOAT32_TOLERANCE and errors[worst] <= 10 * FLOAT32_TOLERANCE
    detail = (
        f"float32 loss {loss:.6f}, by stock transformers on the CPU {expected_loss:.6f}; gradients differ by at most "
        f"{errors[worst]:.1e} of their largest value" + ("" if passed else f" ({worst})")
    )
    return Check("training step", passed, detail, USE_CPU)


def _reference() -> tuple[StockGPT2, Tensor]:
    """Return a tiny stock model on the CPU and token ids (4, 64) for it, the same ones at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=64, vocab_size=512, **ends)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return StockGPT2(config), torch.randint(512, (4, 64))


def _step(
    device: torch.device, reference: StockGPT2, ids: Tensor, dtype: torch.dtype | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients by parameter name, on the CPU, of our model with the reference's weights."""
    model: Any = GPT2LMHeadModel(reference.config)
    model.load_state_dict(reference.state_dict())
    model = model.to(device).train()
    model.tie_weights()
    with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def check_large_matrix(device: torch.device) -> Check:
    """Compare some rows of a product as large as GPT-2's logits, and of its gradient, with the CPU in float64.

    Some versions of mps compute wrong values beyond some number of rows.
    """
    rows = min(ROWS, memory_bytes(device) // 4 // (4 * VOCABULARY)) if device.type != "cpu" else 512
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5
    x = torch.randn(rows, WIDTH, generator=generator)
    on_device = x.to(device).requires_grad_(), weight.to(device)
    right, size = 0, rows
    while size >= SAMPLED_ROWS and not right:
        if _rows_are_right(*on_device, size, x, weight):
            right = size
        size //= 2
    detail = f"{rows:,} x {WIDTH} times {WIDTH} x {VOCABULARY:,}, against float64"
    if right == rows:
        return Check("large matrix", True, detail)
    fix = f"keep micro-batch x sequence_length at {right:,} tokens or fewer" if right else USE_CPU
    return Check("large matrix", False, f"{detail}: wrong; right up to {right:,} rows", fix)


def _rows_are_right(x: Tensor, weight: Tensor, size: int, x_cpu: Tensor, weight_cpu: Tensor) -> bool:
    sample = torch.linspace(0, size - 1, SAMPLED_ROWS).long()
    product = torch.nn.functional.linear(x[:size], weight)
    (gradient,) = torch.autograd.grad(product.sum(), x)
    expected = x_cpu[sample].double() @ weight_cpu.double().mT
    error = (product[sample.to(x.device)].cpu().double() - expected).abs().max()
    gradient_error = (gradient[sample.to(x.device)].cpu().double() - weight_cpu.double().sum(0)).abs().max()
    # Sums of 768 and of 50,304 float32 products of size 1; TF32, if the user has asked for it, has three digits.
    return bool(error < 1e-2 and gradient_error < 1e-1)


def check_half_precision(device: torch.device) -> Check:
    """Compare the loss in the device's 16-bit precision with float32, and look for NaN in the gradients."""
    precision = native_precision(device)
    if precision == "no":
        return Check("16-bit step", None, f"{device_name(device)} trains in float32")
    reference, ids = _reference()
    expected, _ = _step(device, reference, ids)
    loss, gradients = _step(device, reference, ids, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    passed = finite and abs(loss - expected) <= HALF_TOLERANCE * expected
    detail = f"{precision}: loss {loss:.4f}, in float32 {expected:.4f}; gradients are {'' if finite else 'not '}finite"
    return Check("16-bit step", passed, detail, NO_HALF)


def check_dropout(device: torch.device) -> Check:
    """Draw random numbers twice from one seed, as a resumed run does."""
    before, draws = torch.random.get_rng_state(), []
    for seed in (1, 1, 2):
        seed_random_numbers(seed, device)
        draws.append(torch.nn.functional.dropout(torch.ones(4096, device=device)).cpu())
    torch.random.set_rng_state(before)
    kept = float((draws[0] > 0).float().mean())
    passed = torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2]) and 0.4 < kept < 0.6
    detail = f"one seed draws the same numbers twice; {kept:.0%} of values are kept at p = 0.5"
    return Check("dropout", passed, detail, NO_DROPOUT)


def check_memory(device: torch.device) -> Check:
    """Allocate a known number of bytes and look whether the peak that is recorded rises by as much."""
    total = f"{memory_bytes(device) / 2**30:.1f} GiB for this process"
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    block = torch.ones(ALLOCATION, dtype=torch.uint8, device=device)
    after = peak_memory_bytes(device)
    del block
    if before is None or after is None:
        return Check("memory", None, f"{total}; {device.type} does not count the memory in use")
    rise = after - before
    detail = f"{total}; {ALLOCATION / 2**20:.0f} MiB allocated, {rise / 2**20:.0f} MiB counted"
    # Resident memory rises by less if the process had free memory left, so a CPU is not judged by it.
    passed = None if device.type == "cpu" and rise < 0.9 * ALLOCATION else rise >= 0.9 * ALLOCATION
    return Check("memory", passed, detail, "the memory in metrics.jsonl is too low on this device")


def check_peak(rated: Peak | None, measured: Peak) -> Check:
    """Compare the measured rate of a large matrix product with the rated one."""
    if measured.tflops is None:
        return Check("peak rate", None, f"{measured.source}; MFU is null, unless --mfu_peak_tflops is stated")
    if rated is None or rated.tflops is None:
        detail = f"{measured.tflops:.3g} TFLOP/s measured; no rated value is known, so MFU is against the measured one"
        return Check("peak rate", None, detail)
    share = measured.tflops / rated.tflops
    detail = f"{measured.tflops:.3g} TFLOP/s measured, {share:.0%} of the rated {rated.tflops:.4g}"
    fix = (
        "another program uses the device, or its power or clock is limited"
        if share < 1
        else "this is not the device that its name says; state --mfu_peak_tflops"
    )
    return Check("peak rate", 0.4 <= share <= 1.1, detail, fix)


def check_compile(device: torch.device) -> Check:
    """Compile a small function with its gradient and compare it with the same one uncompiled."""
    choice = choose_compile("auto", device, 10**9)
    if not choice.enabled:
        return Check("torch.compile", None, f"off: {choice.reason}")

    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ x.mT, approximate="tanh").square().mean()

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator).to(device).requires_grad_()
    (expected,) = torch.autograd.grad(function(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(function)(x), x)
    error = float((compiled - expected).abs().max() / expected.abs().max())
    detail = f"gradients differ from uncompiled ones by {error:.1e}"
    return Check("torch.compile", error <= FLOAT32_TOLERANCE, detail, NO_COMPILE)
