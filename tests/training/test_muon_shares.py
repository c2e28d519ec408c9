"""Several processes share the work of Muon: the weights and momentum of one process, however the matrices are held."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import FORKS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config

from hfgpt.model import memory
from hfgpt.training import muon, muon_shares
from hfgpt.training.muon_shares import plan_rounds

SHAPES = [(24, 8), (24, 8), (8, 24), (24, 8), (3, 5), (8, 8), (1, 9)]  # 3 and 1 rows: fewer than processes


def matrices(kind: str) -> list[nn.Parameter]:
    """Replicated or sharded weights with gradients: one has none, one is frozen."""
    torch.manual_seed(0)
    made = []
    for number, shape in enumerate(SHAPES):
        whole, gradient = torch.randn(shape), torch.randn(shape)
        if kind == "sharded":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            whole, gradient = (distribute_tensor(one, mesh, [Shard(0)]) for one in (whole, gradient))
        made.append(nn.Parameter(whole, requires_grad=number != 5))
        made[-1].grad = None if number in (1, 5) else gradient
    return made


def stepped(kind: str) -> list[torch.Tensor]:
    """The weights, and the momentum of those that have one, after three steps of Muon."""
    parameters = matrices(kind)
    optimizer = muon.BatchedMuon([one for one in parameters if one.requires_grad], 1e-2, 0.1, 0.9)
    for _ in range(3):
        optimizer.step()
    tensors = [one.detach() for one in parameters]
    tensors += [optimizer.state[one]["momentum_buffer"] for one in parameters if optimizer.state[one]]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]


def work(rank: int, world_size: int, folder: Path, precision: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    muon.native_precision = lambda device: precision
    muon_shares.BATCH_ELEMENTS = 400
    torch.save({kind: stepped(kind) for kind in ("whole", "sharded")}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "precision"), [(2, "bf16"), (3, "no"), (9, "no")])
def test_processes_share_the_work_and_have_the_result_of_one(tmp_path, world_size, precision, monkeypatch):
    monkeypatch.setattr(muon, "native_precision", lambda device: precision)
    expected = stepped("whole")
    assert len(expected) == 2 * len(SHAPES) - 2
    processes = [FORKS.Process(target=work, args=(rank, world_size, tmp_path, precision)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    for kind in ("whole", "sharded"):
        for other in results[1:]:  # to the bit, or the processes would drift apart
            assert all(map(torch.equal, other[kind], results[0][kind]))
        for one, two in zip(results[0][kind], expected, strict=True):
            torch.testing.assert_close(one, two, atol=0 if precision == "bf16" else 1e-6, rtol=0)


def test_the_work_is_shared_out_by_cost():
    with torch.device("meta"):  # those of gpt2-125m
        shapes = [shape for _ in range(12) for shape in ((768, 2304), (768, 768), (768, 3072), (3072, 768))]
        parameters = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    costs = {id(one): muon_shares._cost(one) for one in parameters}
    for world_size in (1, 2, 3, 8, 64):
        rounds = plan_rounds(parameters, world_size)
        shared = [one for now in rounds for batch in now for one in batch]
        assert sorted(map(id, shared)) == sorted(costs)  # each once
        assert all(len({one.shape for one in batch}) <= 1 for now in rounds for batch in now)
        loads = [sum(costs[id(one)] for now in rounds for one in now[rank]) for rank in range(world_size)]
        ideal = max(sum(costs.values()) / world_size, max(costs.values()))
        assert max(loads) <= 1.1 * ideal and math.isclose(sum(loads), sum(costs.values()))


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that exist at once inside the context."""

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self.known = known

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return result

    def free(self, address, size):
        self.known.discard(address)
        self.now -= size


@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_memory_of_an_update_is_that_of_the_plan(world_size, kind, precision, monkeypatch):
    if (world_size, kind) == (1, "sharded"):
        pytest.skip("nothing is sharded")
    monkeypatch.setattr(muon, "native_precision", lambda device: precision)
    for module in (memory, muon_shares):
        monkeypatch.setattr(module, "BATCH_ELEMENTS", 4 * 4 * 32**2)
    config = GPT2Config(n_layer=16, n_embd=32, n_head=1)
    setting = memory.Setting(1, 8, 1, precision, optim="muon", processes=world_size, sharded=kind == "sharded")
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        monkeypatch.setitem(globals(), "SHAPES", 16 * [(32, 96), (32, 32), (32, 128), (128, 32)])
        parameters = matrices(kind)
        optimizer = muon.BatchedMuon([one for one in parameters if one.grad is not None], 1e-2, 0.1, 0.9)
        optimizer.step()
        kept = [
            held for one in parameters for held in (one, one.grad, *optimizer.state[one].values()) if held is not None
        ]
        peak = Peak({muon_shares.held(one).untyped_storage()._cdata for one in kept})
        with peak:
            optimizer.step()
    finally:
        if world_size > 1:
            dist.destroy_process_group()
    assert peak.most == pytest.approx(memory.StepBytes(config, setting).muon_workspace(), rel=0.15)
