"""Optimizers on cuda, mps and xpu, with tensors that have a device and a shape but no memory.

An operator on tensors of two devices is an error there. Without these devices torch can neither index such tensors nor
differentiate: `test_fake_accelerator.py` does both, on a device of its own.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hfgpt import PretrainConfig
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
from hfgpt.training.optimizer import SkippingAdamW, build_optimizer


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("device_type", ["cuda", "mps", "xpu"])
def test_clipping_and_the_optimizer_stay_on_the_device(monkeypatch, device_type, optim):
    monkeypatch.setattr("hfgpt.training.muon.native_precision", lambda device: "bf16")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device(device_type, 0)
    with torch.device("meta"):
        size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16}
        model = GPT2LMHeadModel(model_config(size, vocab_size=100, bos_token_id=0, eos_token_id=0))
    with FakeTensorMode(allow_non_fake_inputs=False), torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, device=device)))
        model.tie_weights()
        optimizer = build_optimizer(model, PretrainConfig(max_steps=1, optim=optim))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).device == device
        assert isinstance(optimizer, SkippingAdamW) is (optim == "adamw" and device_type == "mps")
        if optim == "muon":
            assert optimizer.adamw.defaults["fused"] is (None if device_type == "mps" else True)
        if optim == "adamw" and device_type != "mps":  # elsewhere the value is read, which these tensors lack
            assert optimizer.defaults["fused"]
            optimizer.found_inf = torch.empty((), device=device)
        optimizer.step()
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        assert moments and all(moment.device == device for moment in moments)
