"""Evaluation against a plain loop over stock GPT-2: every token once, sums before means."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import GPT2LMHeadModel as StockGPT2

from hfgpt.evaluation.loss import evaluate_tokens
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

V, T = 97, 16


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": T, "initializer_range": 0.2}
    return GPT2LMHeadModel(model_config(config, vocab_size=V))


@pytest.mark.parametrize("count", [T // 2, 5 * T + 1, 7 * T - 3])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_loss_and_bits_per_byte_equal_a_plain_loop(model, count, batch_size):
    tokens = np.random.default_rng(0).integers(0, V, count).astype(np.int32)
    token_bytes = np.arange(V, dtype=np.int32) % 3 + 1
    stock = StockGPT2(model.config).eval()
    stock.load_state_dict(model.state_dict())
    nll = 0.0
    for start in range(0, count - 1, T):
        window = torch.from_numpy(tokens[start : start + T + 1]).long()
        with torch.no_grad():
            nll += F.cross_entropy(stock(window[None, :-1]).logits[0], window[1:], reduction="sum").item()
    metrics = evaluate_tokens(
        model,
        tokens,
        accelerator=Accelerator(),
        sequence_length=T,
        batch_size=batch_size,
        scored_bytes=int(token_bytes[tokens[1:]].sum()),
    )
    assert metrics["eval_tokens"] == count - 1
    assert metrics["eval_loss"] == pytest.approx(nll / (count - 1), rel=1e-6)
    scored = token_bytes[tokens[1:]].sum()
    assert metrics["eval_bits_per_byte"] == pytest.approx(nll / math.log(2) / scored, rel=1e-6)


def test_unknown_bytes_give_no_bits_per_byte(model):
    tokens = np.zeros(20, dtype=np.int32)
    options = {"accelerator": Accelerator(), "sequence_length": T, "batch_size": 1}
    assert evaluate_tokens(model, tokens, **options)["eval_bits_per_byte"] is None
    assert model.training  # left as it was
