"""Parameters and FLOPs of a GPT-2-style model from its configuration, and MFU: plain arithmetic, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import GPT2Config

TYPICAL_MFU = 0.4  # assumed by estimates before anything is measured


class ParameterCounts(NamedTuple):
    """`without_positions` leaves out the T x C position table, which is not multiplied with any token."""

    total: int
    without_positions: int


def parameter_counts(config: GPT2Config) -> ParameterCounts:
    """Count the parameters of GPT2LMHeadModel: V*C + T*C + L*(12*C^2 + 13*C) + 2*C for an MLP of width 4*C.

    A tied head counts once, as it is the same matrix as the embedding.
    """
    C, T, L, V = config.n_embd, config.n_positions, config.n_layer, config.vocab_size
    inner = config.n_inner or 4 * C
    attention, mlp, layer_norms = 4 * C * C + 4 * C, 2 * C * inner + inner + C, 4 * C
    matrices = 1 if config.tie_word_embeddings else 2
    without_positions = matrices * V * C + L * (attention + mlp + layer_norms) + 2 * C
    return ParameterCounts(without_positions + T * C, without_positions)


def training_flops_per_token(config: GPT2Config, sequence_length: int) -> int:
    """Return the FLOPs to train on one token, forward and backward: 6 N + 12 L H Q T (PaLM, appendix B; nanoGPT).

    N leaves out the position table and counts the V x C matrix once: the head multiplies by it, the embedding only
    looks rows up, so tied and untied models cost the same. The second term is attention over all T positions, causal or
    not. Recomputed activations do not count.
    """
    C, L = config.n_embd, config.n_layer
    N = parameter_counts(config).without_positions
    if not config.tie_word_embeddings:
        N -= config.vocab_size * C
    return 6 * N + 12 * L * C * sequence_length  # H * Q = C


def recomputed_flops_per_token(config: GPT2Config, sequence_length: int) -> int:
    """Return the FLOPs per token added by gradient checkpointing: the forward pass of the blocks, without the head."""
    return training_flops_per_token(config, sequence_length) // 3 - 2 * config.vocab_size * config.n_embd


def mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float, devices: int) -> float:
    """Return the model FLOPs utilization, a fraction. `tokens_per_second` is over all devices, `peak_tflops` of one."""
    return tokens_per_second * flops_per_token / (devices * peak_tflops * 1e12)
