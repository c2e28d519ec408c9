"""A small model of the kind that nanoGPT trains, and the checkpoint file that it would write, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ARGS = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 24, "dropout": 0.0}


def random_state(bias: bool = True, **args: Any) -> dict[str, Tensor]:
    """Parameters under nanoGPT's names: Linear weights (out, in), no biases with `bias` False, the head tied."""
    given = {**ARGS, **args}
    C, generator = given["n_embd"], torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    state = {"transformer.wte.weight": draw(given["vocab_size"], C), "transformer.wpe.weight": draw(16, C)}
    for block in (f"transformer.h.{i}" for i in range(given["n_layer"])):
        shapes: dict[str, tuple[int, ...]] = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
        shapes |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C), "ln_1": (C,), "ln_2": (C,)}
        state |= {f"{block}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        state |= {f"{block}.{name}.bias": draw(shape[0]) for name, shape in shapes.items() if bias}
        state[f"{block}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # the mask of versions without flash attention
    state |= {"transformer.ln_f.weight": draw(C), **({"transformer.ln_f.bias": draw(C)} if bias else {})}
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def logits_BTV(state: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
    """What nanoGPT's model answers, with exact GELU, written out anew."""
    n_head = ARGS["n_head"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

    T = ids_BT.shape[1]
    x = state["transformer.wte.weight"][ids_BT] + state["transformer.wpe.weight"][:T]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    for block in (f"transformer.h.{i}" for i in range(ARGS["n_layer"])):
        q, k, v = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        x = x + linear(f"{block}.attn.c_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        inner = linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x))
        x = x + linear(f"{block}.mlp.c_proj", inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
    return norm("transformer.ln_f", x) @ state["transformer.wte.weight"].T


def write_checkpoint(
    path: Path, state: dict[str, Tensor], prefix: str = "", bias: bool = True, args: dict[str, Any] | None = None
) -> Path:
    """ckpt.pt as nanoGPT's train.py saves it."""
    moments = {"state": {0: {"step": torch.tensor(9.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]}
    content = {
        "model": {f"{prefix}{name}": value for name, value in state.items()},
        "optimizer": moments,
        "model_args": {**ARGS, "bias": bias, **(args or {})},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char", "compile": True, "learning_rate": 1e-3},
    }
    torch.save(content, path)
    return path
