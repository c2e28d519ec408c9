"""Muon beside AdamW: the update of each is torch's own, every parameter has exactly one."""

from __future__ import annotations

import pytest
import torch
from running import MODEL
from transformers import GPT2Config

from hfgpt import PretrainConfig, UserError
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel
from hfgpt.training import muon, muon_shares
from hfgpt.training.optimizer import build_optimizer

RATES = {"learning_rate": 1e-2, "muon_learning_rate": 3e-2, "weight_decay": 0.2}


def built(**changes):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**MODEL, vocab_size=64, bos_token_id=0, eos_token_id=0))
    return model, build_optimizer(model, PretrainConfig(max_steps=1, **{"optim": "muon", **RATES, **changes}))


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr_scale", 1.0) * 1e-2
    optimizer.step()


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else():
    model, optimizer = built()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, embeddings, vectors = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert len(matrices) == 4 * MODEL["n_layer"]
    assert all(".h." in name and name.endswith(".weight") for name in matrices)
    assert embeddings == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert sorted([*matrices, *embeddings, *vectors]) == sorted(names.values())


@pytest.mark.parametrize("batch_elements", [2**23, 2 * 3 * MODEL["n_embd"] ** 2, 1])
def test_each_update_is_torchs_own(batch_elements, monkeypatch):
    monkeypatch.setattr(muon_shares, "BATCH_ELEMENTS", batch_elements)
    monkeypatch.setattr(muon, "native_precision", lambda device: "bf16")  # torch's Muon knows no other
    model, optimizer = built()
    other, _ = built()
    matrices = [p for name, p in other.named_parameters() if ".h." in name and p.dim() == 2]
    rest = [p for p in other.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.2}]
    groups += [{"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0}]
    torchs = torch.optim.Muon(matrices, 3e-2, 0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(groups, 1e-2, (0.9, 0.95), fused=True)
    for seed in range(3):
        step(model, optimizer, seed)
        step(other, adamw, seed)
        torchs.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_group_has_its_rate_and_decay(name):
    """With gradients of 0 an update is decay alone, and without decay the first one of AdamW is the rate."""
    rates = {"learning_rate": 1e-2, "embedding_learning_rate": 3e-2, "vector_learning_rate": 2e-3}
    decays = {"weight_decay": 0.2, "embedding_weight_decay": 0.05, "vector_weight_decay": 0.5}
    model, optimizer = built(optim=name, **rates, **decays, **dict.fromkeys(["muon_learning_rate"]))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = group["lr_scale"] * 0.5e-2  # half of the peak
    optimizer.step()
    for key, parameter in model.named_parameters():
        own = 1e-3 * 0.5 if parameter.dim() < 2 else 5e-3 * 0.2 if ".h." in key else 15e-3 * 0.05
        torch.testing.assert_close(parameter.data, before[key] * (1 - own), msg=key)
    model, optimizer = built(optim="adamw", **rates, weight_decay=0, muon_learning_rate=None)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for key, parameter in model.named_parameters():
        own = 2e-3 if parameter.dim() < 2 else 1e-2 if ".h." in key else 3e-2
        torch.testing.assert_close(before[key] - parameter.data, torch.full_like(parameter, own), msg=key)


def test_a_step_is_left_out_whole():
    model, optimizer = built()
    step(model, optimizer, 0)
    before = [parameter.clone() for parameter in model.parameters()]
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    optimizer.found_inf = torch.ones(())
    step(model, optimizer, 1)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(map(torch.equal, moments, [value for state in optimizer.state.values() for value in state.values()]))
    optimizer.found_inf = torch.zeros(())
    step(model, optimizer, 1)
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_rate_for_muon_alone_is_refused_with_adamw():
    with pytest.raises(UserError, match=r"muon_learning_rate=0\.03: only used with optim=muon"):
        built(optim="adamw")


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 512, 128), (3, 96, 32), (2, 32, 96), (1, 7, 1)])
def test_orthogonalised_together_or_alone_each_is_torchs_own(count, rows, columns, monkeypatch):
    monkeypatch.setattr(muon, "native_precision", lambda device: "bf16")
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(rows, columns)) for _ in range(count)]
    others = [torch.nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    ours = muon.BatchedMuon(matrices, 1e-2, 0.1, 0.9)
    torchs = torch.optim.Muon(others, 1e-2, 0.1, 0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        for one, two in zip(matrices, others, strict=True):
            one.grad = torch.randn(rows, columns)
            two.grad = one.grad.clone()
        ours.step()
        torchs.step()
    assert all(map(torch.equal, matrices, others))


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_without_bf16_instructions_muon_computes_in_float32(precision, monkeypatch):
    """Near to bf16, whose three digits five rounds of the iteration leave."""
    monkeypatch.setattr(muon, "native_precision", lambda device: precision)
    matrix = torch.nn.Parameter(torch.zeros(96, 32))
    torchs = torch.nn.Parameter(torch.zeros(96, 32))
    matrix.grad = torchs.grad = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    muon.BatchedMuon([matrix], 1e-2, 0.1, 0.9).step()
    torch.optim.Muon([torchs], 1e-2, 0.1, 0.9, adjust_lr_fn="match_rms_adamw").step()
    assert not torch.equal(matrix, torchs)
    assert (matrix - torchs).norm() < 0.02 * torchs.norm()
    exact = muon.orthogonalize(matrix.grad[None].double(), (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert (matrix / matrix.norm() + exact[0] / exact.norm()).norm() < 1e-5
