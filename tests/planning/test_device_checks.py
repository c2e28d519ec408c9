"""The checks of `hfgpt doctor`: a CPU passes them, and each finds the fault it is there for."""

import importlib.metadata

import pytest
import torch
import torch.nn.functional as F

from hfgpt.distributed.device_peaks import Peak
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
from hfgpt.planning import device_checks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch):
    monkeypatch.setattr(device_checks, "VOCABULARY", 1000)


@pytest.fixture
def forward(monkeypatch):
    """Replaces the loss of our model by what a function makes of it."""
    plain = GPT2LMHeadModel.forward

    def replace(change):
        def changed(self, *args, **kwargs):
            output = plain(self, *args, **kwargs)
            output.loss = change(output.loss)
            return output

        monkeypatch.setattr(GPT2LMHeadModel, "forward", changed)

    return replace


def test_a_wrong_loss_or_gradient_is_found(forward):
    assert device_checks.check_step(CPU).passed
    forward(lambda loss: loss + 1e-3)
    assert device_checks.check_step(CPU).passed is False
    forward(lambda loss: loss.detach() + 2 * (loss - loss.detach()))
    failed = device_checks.check_step(CPU)
    assert failed.passed is False and "train on the CPU" in failed.line()
    forward(lambda loss: loss.detach() + (loss - loss.detach()) * float("nan"))
    assert device_checks.check_step(CPU).passed is False


def test_a_product_that_is_wrong_beyond_a_size_is_found(monkeypatch):
    assert device_checks.check_large_matrix(CPU).passed
    plain = F.linear

    def wrong_beyond_200_rows(x, weight):
        return torch.cat([plain(x[:200], weight), plain(x[200:], weight) * 1.5])

    monkeypatch.setattr(F, "linear", wrong_beyond_200_rows)
    failed = device_checks.check_large_matrix(CPU)
    assert failed.passed is False and "right up to 128 rows" in failed.detail
    assert "at 128 tokens or fewer" in failed.fix


def test_sixteen_bits_are_checked_where_they_are_used(monkeypatch, forward):
    monkeypatch.setattr(device_checks, "native_precision", lambda device: "no")
    assert device_checks.check_half_precision(CPU).passed is None
    monkeypatch.setattr(device_checks, "native_precision", lambda device: "bf16")
    assert device_checks.check_half_precision(CPU).passed
    forward(lambda loss: loss * (float("nan") if torch.is_autocast_enabled("cpu") else 1))
    failed = device_checks.check_half_precision(CPU)
    assert failed.passed is False and "not finite" in failed.detail and "--mixed_precision no" in failed.fix


def test_random_numbers_that_do_not_repeat_are_found(monkeypatch):
    assert device_checks.check_dropout(CPU).passed
    monkeypatch.setattr(device_checks, "seed_random_numbers", lambda seed, device: None)
    assert device_checks.check_dropout(CPU).passed is False


def test_memory_that_is_not_counted_is_found(monkeypatch):
    assert device_checks.check_memory(CPU).passed is not False
    monkeypatch.setattr(device_checks, "peak_memory_bytes", lambda device: None)
    assert device_checks.check_memory(CPU).passed is None


@pytest.mark.parametrize(
    ("rated", "measured", "passed", "says"),
    [
        (100.0, 80.0, True, "80% of the rated 100"),
        (100.0, 20.0, False, "another program uses the device"),
        (100.0, 150.0, False, "state --mfu_peak_tflops"),
        (None, 80.0, None, "no rated value is known"),
        (100.0, None, None, "matmul failed"),
    ],
)
def test_the_peak_is_compared_with_the_rated_one(rated, measured, passed, says):
    rated_peak = Peak(rated, "rated: x") if rated else None
    check = device_checks.check_peak(rated_peak, Peak(measured, "unknown: matmul failed on x"))
    assert check.passed is passed and says in check.line()


def test_a_package_that_is_too_old_is_named(monkeypatch):
    assert device_checks.check_versions().passed
    plain = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "accelerate" else plain(name))
    failed = device_checks.check_versions()
    assert failed.passed is False and "accelerate 0.1 does not satisfy" in failed.detail
    assert failed.fix == "pip install -U accelerate"


def test_an_operator_that_the_device_lacks_fails_its_check_alone(monkeypatch):
    def missing(device):
        raise NotImplementedError("aten::cummax is not implemented for this device\nmore")

    monkeypatch.setattr(device_checks, "check_step", missing)
    monkeypatch.setattr(device_checks, "check_compile", lambda device: device_checks.Check("torch.compile", None, ""))
    found = {check.name: check for check in device_checks.check_device(CPU, None, Peak(1.0, "measured: x"))}
    assert found["training step"].passed is False and "aten::cummax" in found["training step"].detail
    assert found["versions"].passed and found["large matrix"].passed and len(found) == 8
