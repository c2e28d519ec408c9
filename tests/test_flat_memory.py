"""Memory does not grow with the length of an evaluation, of training, or of a text that is written."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from running import trained
from transformers import TrainerCallback

from hfgpt.distributed.cpu import keep_freed_memory
from hfgpt.evaluation.evaluate import SummedLoss
from hfgpt.evaluation.generate import generate_ids
from hfgpt.evaluation.loss import sum_nll, windows
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.head_loss import HEAD_CHUNK_SIZE
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of the process")

T, V, BATCH = 16, 50_257, 8
LOGITS_MIB = BATCH * T * V * 4 / 2**20  # 25


def resident_mib() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


@pytest.fixture
def model() -> GPT2LMHeadModel:
    keep_freed_memory()
    fields = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 2 * T}
    model = GPT2LMHeadModel(model_config(fields, vocab_size=V))
    model.head_chunk_size = HEAD_CHUNK_SIZE
    return model


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_an_evaluation_takes_no_more_memory_the_longer_it_is(model, kind):
    held = []

    def stop() -> bool:
        held.append(resident_mib())
        return False

    tokens = np.random.default_rng(0).integers(0, V, 24 * BATCH * T + 1).astype(np.int32)
    subject = model if kind == "ours" else SummedLoss(model)
    parts = windows([len(tokens)], T)
    sum_nll(subject, tokens, parts, accelerator=Accelerator(), sequence_length=T, batch_size=BATCH, stop=stop)
    assert len(held) == 24 and held[-1] - held[3] < 6 * LOGITS_MIB, held


class Held(TrainerCallback):
    def __init__(self) -> None:
        self.mib: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.mib.append(resident_mib())


def test_training_takes_no_more_memory_the_longer_it_is(config, tmp_path):
    """Losses of steps and micro-batches wait to be read by the next record."""
    (tmp_path / "characters.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 20_000))))
    held = Held()
    model = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
    changes = {"max_steps": 24, "logging_steps": 1000, "save_steps": 0, "gradient_accumulation_steps": 4}
    changes |= {"dataset": str(tmp_path / "characters.txt"), "per_device_train_batch_size": BATCH}
    trained(config(model=model, **changes), held)
    micro_batch_mib = BATCH * 16 * 20_000 * 4 / 2**20  # 10
    assert held.mib[-1] - held.mib[3] < 6 * micro_batch_mib, held.mib


@torch.no_grad()
def test_writing_takes_no_more_memory_the_longer_it_is(model):
    held = []
    picks = [lambda logits_V: int(logits_V.argmax())] * BATCH
    for _ in generate_ids(model, [[1]] * BATCH, picks, 5 * T, 2 * T, None):
        held.append(resident_mib())
    assert len(held) == 5 * T * BATCH and held[-1] - held[3 * BATCH] < 20, (held[3 * BATCH], held[-1])
