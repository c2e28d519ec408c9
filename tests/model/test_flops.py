"""Counts against the real model and torch's own counter, MFU against the reference runs, peaks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from hfgpt.distributed import device_peaks
from hfgpt.model import flops

SMALL = {"vocab_size": 97, "n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 4, "bos_token_id": 0}


def gpt2(**changes) -> GPT2Config:
    return GPT2Config(**{**SMALL, "eos_token_id": 0, **changes})


@pytest.mark.parametrize("changes", [{}, {"n_inner": 40}, {"tie_word_embeddings": False}, {"n_layer": 1}])
def test_counts_are_those_of_the_model(changes):
    model = GPT2LMHeadModel(gpt2(**changes))
    counts = flops.parameter_counts(model.config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.total - counts.without_positions == model.transformer.wpe.weight.numel()


def test_gpt2_sizes():
    assert flops.parameter_counts(GPT2Config()).total == 124_439_808
    assert flops.parameter_counts(GPT2Config()).without_positions == 123_653_376
    assert flops.parameter_counts(GPT2Config(tie_word_embeddings=False)).total == 163_037_184
    assert flops.training_flops_per_token(GPT2Config(), 1024) == 855_166_464
    assert flops.training_flops_per_token(GPT2Config(vocab_size=50304), 1024) == 855_383_040


@pytest.mark.parametrize("changes", [{}, {"n_inner": 40}, {"tie_word_embeddings": False}])
def test_flops_are_what_torch_counts_in_the_matmuls(changes):
    model = GPT2LMHeadModel(gpt2(attn_implementation="eager", **changes))
    B, T = 2, 32
    ids = torch.zeros(B, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    # 6 N also holds biases and layer norms, which are no matmuls.
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    expected = flops.training_flops_per_token(model.config, T) - 6 * vectors
    assert counter.get_total_flops() == B * T * expected


def test_recomputation_adds_what_torch_counts():
    # Without dropout and in training mode, so that checkpointing is active and changes nothing else.
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(gpt2(attn_implementation="eager", **no_dropout))
    B, T = 2, 32
    ids = torch.zeros(B, T, dtype=torch.long)

    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=ids).loss.backward()
        return counter.get_total_flops()

    plain = counted()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    extra = flops.recomputed_flops_per_token(model.config, T)
    # torch stops recomputing once it has what it needs, which spares the last matmul of each block.
    last_matmul = 2 * model.config.n_layer * 4 * model.config.n_embd**2
    recomputed = counted() - plain
    assert B * T * (extra - 2 * vectors - last_matmul) <= recomputed <= B * T * extra


def test_flops_do_not_depend_on_tying_and_grow_with_the_sequence():
    tied, untied = gpt2(), gpt2(tie_word_embeddings=False)
    assert flops.training_flops_per_token(tied, 16) == flops.training_flops_per_token(untied, 16)
    longer = flops.training_flops_per_token(tied, 32) - flops.training_flops_per_token(tied, 16)
    assert longer == 12 * tied.n_layer * tied.n_embd * 16
    more_positions = gpt2(n_positions=64)
    assert flops.training_flops_per_token(more_positions, 16) == flops.training_flops_per_token(tied, 16)
    wider_head = gpt2(vocab_size=98)
    assert flops.training_flops_per_token(wider_head, 16) - flops.training_flops_per_token(tied, 16) == 6 * 24


@pytest.mark.parametrize(
    ("width", "heads", "step_seconds", "against_312", "against_80"),
    [(768, 12, 9.34, 0.154, 0.598), (384, 6, 3.90, 0.129, 0.503)],
)
def test_mfu_of_the_reference_runs(width, heads, step_seconds, against_312, against_80):
    config = GPT2Config(n_embd=width, n_head=heads)
    per_token = flops.training_flops_per_token(config, 1024)
    assert flops.mfu(524_288 / step_seconds, per_token, 312, 1) == pytest.approx(against_312, abs=1e-3)
    assert flops.mfu(524_288 / step_seconds, per_token, 80.2, 1) == pytest.approx(against_80, abs=1e-3)


def test_mfu_counts_the_devices():
    per_token = flops.training_flops_per_token(GPT2Config(vocab_size=50304), 1024)
    assert flops.mfu(524_288 / 2.0, per_token, 312, 1) == pytest.approx(0.7187, abs=5e-5)
    assert flops.mfu(524_288 / 0.25, per_token, 312, 8) == pytest.approx(0.7187, abs=5e-5)


def test_rated_peaks_go_by_the_exact_name_and_precision():
    def rated(name, precision="bf16", multiprocessors=None):
        peak = device_peaks.rated_peak(name, precision, multiprocessors)
        return peak and peak.tflops

    assert rated("NVIDIA A100-SXM4-40GB") == 312.0
    assert rated("NVIDIA H100 80GB HBM3") == 989.4
    assert rated("NVIDIA GeForce RTX 4070 Ti") == rated("NVIDIA GeForce RTX 4070 Ti", "fp16") == 80.2
    assert rated("NVIDIA GeForce RTX 4070 Ti SUPER") == 88.2
    assert rated("NVIDIA GeForce RTX 4070") == 58.3
    assert rated("NVIDIA GeForce RTX 40") is None and rated("nvidia geforce rtx 4070") is None
    assert rated("NVIDIA A100-SXM4-40GB", "no") is None  # by the TF32 setting: measured
    assert rated("Tesla T4") is None and rated("Tesla T4", "fp16") == 65.0  # no bf16 there
    assert rated("AMD Instinct MI100", "fp16") == 184.6  # not that of its bf16
    assert "low confidence" in device_peaks.rated_peak("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16").source


def test_one_name_of_two_chips_goes_by_the_multiprocessors():
    def rated(multiprocessors):
        return device_peaks.rated_peak("NVIDIA GeForce RTX 3080", "bf16", multiprocessors)

    assert (rated(68).tflops, rated(70).tflops, rated(None).tflops) == (59.5, 61.3, 59.5)
    assert rated(72) is None  # a third chip of the name: measured


def test_a_known_device_is_rated_and_any_other_measured(monkeypatch):
    cpu = torch.device("cpu")
    device_peaks._measure_once.cache_clear()
    state = torch.get_rng_state()
    measured = device_peaks.device_peak(cpu, "no")
    assert device_peaks.device_peak(cpu, "no") is measured  # once is enough
    assert torch.equal(torch.get_rng_state(), state)
    assert measured.source.startswith("measured: ") and "float32" in measured.source
    assert f"{torch.get_num_threads()} threads" in measured.source
    assert measured.tflops is not None and 0 < measured.tflops < 100

    monkeypatch.setattr(device_peaks, "device_name", lambda device: "NVIDIA GeForce RTX 4070 Ti")
    assert device_peaks.device_peak(cpu, "bf16") == device_peaks.Peak(
        80.2, "rated: NVIDIA GeForce RTX 4070 Ti bf16 dense"
    )

    def fails(*args, **kwargs):
        raise RuntimeError("not implemented\nfor this type")

    monkeypatch.setattr(device_peaks, "device_name", lambda device: "Abacus 9")
    monkeypatch.setattr(torch, "matmul", fails)
    unknown = device_peaks.device_peak(cpu, "bf16")
    assert unknown.tflops is None and "Abacus 9" in unknown.source and "\n" not in unknown.source


def test_the_measured_rate_is_the_best_of_the_sizes(monkeypatch):
    """On a device that does 1 TFLOP/s, 2 at size 1024."""
    now = 0.0

    def matmul(a, b, out=None):
        nonlocal now
        now += 2 * len(a) ** 3 / (2e12 if len(a) == 1024 else 1e12)
        return a

    monkeypatch.setattr(torch, "matmul", matmul)
    monkeypatch.setattr(device_peaks.time, "perf_counter", lambda: now)
    peak = device_peaks.measure_matmul_tflops(torch.device("cpu"), "bf16")
    assert peak.tflops == pytest.approx(2.0)
    assert peak.source.startswith("measured: 1024 x 1024 bfloat16 matmul on ")
    assert now < 1.0
