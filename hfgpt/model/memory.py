"""Memory of a training step, by part, from the model's configuration and how one process trains it.

The bytes are counted from the tensors that exist at three moments of the backward pass: at the loss, at the last block,
and at the embedding; and with Muon, at the update. On a CPU the counts are checked against the tensors that autograd
keeps (tests/model/test_memory.py) and against resident memory (tests/benchmarks/memory.py, which also measures a GPU).
They have not been measured on a GPU yet: whatever only a GPU has is taken from documentation, as noted where it is
counted.

B batch, T sequence, C width, H heads, V vocabulary, N = B * T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from transformers import GPT2Config

from hfgpt.model.cpu_kernels import products_are_faster
from hfgpt.model.flops import parameter_counts
from hfgpt.model.head_loss import HEAD_CHUNK_SIZE

# On Hopper, according to torch's documentation of CUBLAS_WORKSPACE_CONFIG; others 8 MiB.
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
# Elements that Muon orthogonalizes at once: more would use memory and save no time.
BATCH_ELEMENTS = 2**23
FUSED_ATTENTION = ("cpu", "cuda", "xpu")  # attention whose backward pass needs no (T, T) probabilities


@dataclass(frozen=True)
class Setting:
    """What the memory of one process depends on.

    sharded: the model is sharded over all `processes` (FSDP2); else each has a full copy (DDP).
    averaged: an average of the weights is kept as well.
    device: torch's type of device, "cuda", "cpu", "xpu", "mps" or another one.
    head: "" is the trainer's own, compiled with the model or in chunks; "whole" keeps all logits in an eager model;
    "returned" also returns them to the caller of a compiled model, as nanoGPT's does.
    """

    micro_batch: int
    sequence_length: int
    accumulation: int = 1
    precision: str = "no"
    compiled: bool = False
    checkpointing: bool = False
    optim: str = "adamw"
    averaged: bool = False
    processes: int = 1
    sharded: bool = False
    document_masking: bool = False
    device: str = "cuda"
    head: str = ""

    @property
    def shares(self) -> int:
        """Processes over which parameters, gradients and optimizer state are split."""
        return self.processes if self.sharded else 1


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step. `logits`: everything that the head and the loss need."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int

    @property
    def peak(self) -> int:
        return sum(asdict(self).values())


def training_memory(config: GPT2Config, setting: Setting) -> Memory:
    """Return the peak of a step once the optimizer's state exists (from the second step on)."""
    step = StepBytes(config, setting)
    moments = [step.at_loss(), step.at_last_block(), step.at_embedding()]
    moments += [step.at_update()] if setting.optim == "muon" else []
    return max(moments, key=lambda moment: moment.peak)


def average_bytes(config: GPT2Config, setting: Setting) -> int:
    """Return what one process keeps of the average of the weights."""
    return 4 * parameter_counts(config).total // setting.shares if setting.averaged else 0


class StepBytes:
    """Bytes of the tensors in one process's step."""

    def __init__(self, config: GPT2Config, setting: Setting) -> None:
        self.config, self.setting = config, setting
        self.is_cuda, self.is_gpu = setting.device == "cuda", setting.device != "cpu"
        self.is_16_bit = setting.precision != "no"
        self.is_accumulated = setting.accumulation > 1
        self.number = 2 if self.is_16_bit else 4  # bytes per number in the matrix products
        self.T, self.N = setting.sequence_length, setting.micro_batch * setting.sequence_length
        self.C, self.H = config.n_embd, config.n_head
        self.V = config.vocab_size + (-config.vocab_size % 64 if self.is_cuda else 0)  # rows that the head multiplies
        self.inner = config.n_inner or 4 * self.C
        self.embedding = 4 * config.vocab_size * self.C
        self.parameters = parameter_counts(config).total
        self.block_matrices = config.n_layer * (4 * self.C * self.C + 2 * self.C * self.inner)
        self.head = setting.head or (
            "compiled" if setting.compiled else "chunked" if self.N > HEAD_CHUNK_SIZE else "whole"
        )
        # The same choice as in `head_loss`.
        has_fused_loss = hasattr(F, "linear_cross_entropy") and not self.is_16_bit and config.vocab_size == self.V
        # torch's chunked loss computes its gradients in the forward pass, and keeps them as long as the loss exists.
        self.fused_gradients = 0
        if self.head == "chunked" and has_fused_loss:
            self.fused_gradients = 4 * self.C * (config.vocab_size + self.N)

    def at_loss(self) -> Memory:
        """Count at the start of the backward pass, at the loss: all blocks still keep their activations."""
        gradients = 4 * self.parameters if self.is_accumulated else 0  # of earlier micro-batches
        return self._memory(gradients, self.activations(), self._head_peak())

    def at_last_block(self) -> Memory:
        """Count in the backward pass of the last block's MLP: only the head has been freed so far."""
        activations = self.activations()
        if self.setting.checkpointing:
            activations += self.N * (self._block() - 4 * self.C)  # recomputed; its input is already counted
        gradients = 4 * self.parameters if self.is_accumulated else 0
        # Gradients of the residual stream, of the MLP's output if its type differs, and of the MLP's inner layer.
        residual = 4 * self.C + (self.number * self.C if self.is_16_bit else 0)
        temporary = self.N * (residual + self.number * self.inner)
        return self._memory(gradients, activations, self.embedding + self.fused_gradients, temporary)

    def at_embedding(self) -> Memory:
        """Count as the backward pass ends: all gradients exist, and the embedding's is added to the head's gradient."""
        # A compiled backward pass returns all gradients at once; FSDP2 splits it by block.
        at_once = self.setting.compiled and not self.setting.sharded and self.is_accumulated
        new = 4 * self.parameters if at_once else self.embedding
        head = self.fused_gradients
        if self.config.tie_word_embeddings and self.is_accumulated and not at_once:
            head += self.embedding
        return self._memory(4 * self.parameters, 4 * self.N * self.C, head, new)

    def at_update(self) -> Memory:
        """Count while Muon works: the forward and backward passes keep nothing but the gradients."""
        gradients = 4 * self.parameters // (self.setting.shares if self.is_accumulated else 1)
        return self._memory(gradients, 0, 0, self.muon_workspace(), in_backward=False)

    def muon_workspace(self) -> int:
        """Count what exists at once while Muon orthogonalizes a batch of the largest matrices, and others travel.

        Under DDP all processes receive the matrices of all; under FSDP2 each receives its rows of them.
        """
        processes, is_sharded = self.setting.processes, self.setting.sharded
        matrix = self.C * max(3 * self.C, self.inner)
        count = min(max(1, BATCH_ELEMENTS // matrix), -(-self.config.n_layer // processes))
        batch = count * matrix * (2 if self.setting.precision == "bf16" else 4)
        following = 2 * batch if is_sharded else 4 * count * matrix  # sent and received; or updates in float32
        on_its_way = 2 if is_sharded else processes + 1 if processes > 1 else 1
        # The matrices, the iterate and the next one, with products of their rows; or those that are sent after them.
        return following + batch * (on_its_way + max(4, 0 if is_sharded else on_its_way + 1))

    def saved(self) -> int:
        """Count activations and logits kept for the backward pass, without copies of weights."""
        return self.activations() + self._saved_logits()

    def weight_copies(self, only_saved: bool = False) -> int:
        """Count the 16-bit copies of matrices and biases that autocast keeps until the backward pass ends.

        only_saved: count only those that autograd also keeps: the matrices outside recomputed blocks.
        """
        if not self.is_16_bit:
            return 0
        head = 0 if only_saved and self.head == "chunked" else 2 * self.V * self.C
        if self.setting.sharded or (only_saved and self.setting.checkpointing):
            return head  # FSDP2 gathers the blocks in 16 bits, one after the other: see _gathered
        biases = 0 if only_saved else self.config.n_layer * (5 * self.C + self.inner)
        return head + 2 * (self.block_matrices + biases)

    def activations(self) -> int:
        """Count what is kept outside the head: token and position ids, blocks, the final norm and its output."""
        block = 4 * self.C if self.setting.checkpointing else self._block()
        # Our chunked head uses the output as it is and casts each chunk; torch's own keeps the gradient instead.
        output = 0 if self.fused_gradients else 4 if self.head == "chunked" else self.number
        dropped = self.C * (1 if self.is_gpu else 4) if self.config.embd_pdrop else 0
        per_token = self.config.n_layer * block + 4 * self.C + 8 + output * self.C + dropped
        return 8 * (self.N + self.T) + self.N * per_token

    def _memory(
        self, gradients: int, activations: int, logits: int, temporary: int = 0, in_backward: bool = True
    ) -> Memory:
        shares, workspace = self.setting.shares, temporary
        if in_backward:
            workspace += self.weight_copies() + self._gathered()
        if self.setting.processes > 1 and not self.setting.sharded:
            workspace += 4 * self.parameters  # DDP's buckets, for exchanging gradients
        if self.is_cuda:
            workspace += CUBLAS_WORKSPACE_BYTES
        if not self.is_accumulated:  # FSDP2 splits gradients when it exchanges them, after the last micro-batch
            gradients //= shares
        # Two moments for each parameter; Muon has one for the matrices of the blocks.
        optimizer = 8 * self.parameters - (4 * self.block_matrices if self.setting.optim == "muon" else 0)
        weights = 4 * self.parameters // shares + average_bytes(self.config, self.setting)
        return Memory(weights, gradients, optimizer // shares, activations, logits, workspace)

    def _gathered(self) -> int:
        """Count what FSDP2 gathers: embeddings and head for the whole pass, and two blocks, also as flat buffers.

        From FSDP2's design: one block in use, the next prefetched.
        """
        if not self.setting.sharded:
            return 0
        outside = self.parameters - self.block_matrices
        return 4 * outside + 4 * self.number * self.block_matrices // self.config.n_layer

    def _block(self) -> int:
        """Count what one block keeps, per token.

        The two norms keep their inputs in float32, with mean and deviation. The matrix products keep their inputs.
        Attention keeps its queries, keys and values, its output (the projection's input), and the sum of each row in
        float32. GELU keeps its input. That is 64 C in float32 and 36 C in 16 bits. torch.compile keeps the same
        (torch 2.13).
        """
        norms = 2 * (4 * self.C + 8)
        products = self.number * (2 * self.C + 3 * self.C + self.C + 2 * self.inner)
        # A boolean document mask becomes one of numbers, except for flex attention.
        uses_flex = self.setting.compiled and self.is_cuda and self.config.attn_pdrop == 0
        mask = self.number * self.T if self.setting.document_masking and not uses_flex else 0
        attention = 4 * self.H
        if self._keeps_probabilities():  # and the scores, with the maximum and sum of each row
            attention = 2 * self.H * (self.number * self.T + 4)
        return norms + products + attention + mask + self._dropout()

    def _keeps_probabilities(self) -> bool:
        """Return whether attention keeps its probabilities: the same choice as in `modeling_gpt2` and torch."""
        if self.setting.device not in FUSED_ATTENTION:
            return True
        dtype = torch.bfloat16 if self.setting.precision == "bf16" else torch.float32
        is_plain = not self.setting.document_masking and not self.config.attn_pdrop
        return self.setting.compiled and not self.is_gpu and is_plain and products_are_faster(dtype, self.T)

    def _dropout(self) -> int:
        """Count what the dropouts of one block keep, per token: a byte per element on a GPU, a full number on a CPU.

        A GPU regenerates the dropout of attention. A CPU has no fused attention with dropout: it keeps probabilities,
        noise and their product in float32, and in 16-bit training its inputs too.
        """
        total = 2 * self.C * (1 if self.is_gpu else self.number) if self.config.resid_pdrop else 0
        if self.config.attn_pdrop and not self.is_gpu:
            total += 12 * self.H * self.T - 4 * self.H
            total += 6 * self.C if self.is_16_bit else 0
        return total

    def _saved_logits(self) -> int:
        """Count the saved logits.

        Compiled, they are kept in the precision of the product, with two numbers per row; eager, as float32 logarithms.
        "returned" keeps both: chosen to match peaks reported for nanoGPT's model on GPUs. On a CPU, torch 2.13 keeps no
        more for such a model than when compiled.
        """
        NV = self.N * self.V
        by_head = {"compiled": self.number * NV + 8 * self.N, "whole": 4 * NV, "returned": (self.number + 4) * NV}
        return by_head.get(self.head, 0)

    def _head_peak(self) -> int:
        """Count the peak of the head and the loss, with their own gradients."""
        C, V = self.C, self.V
        if self.head in ("compiled", "returned"):  # the saved logits and their gradient
            return self._saved_logits() + self.number * self.N * V
        if self.fused_gradients:
            # Those of the previous micro-batch are freed with its loss. Backward makes two scaled copies (measured).
            before = self.fused_gradients if self.is_accumulated else 0
            forward = 4 * HEAD_CHUNK_SIZE * V + 4 * self.N * C + self.fused_gradients + before
            return max(forward, 3 * self.fused_gradients)
        is_chunked = self.head == "chunked"
        rows = min(self.N, HEAD_CHUNK_SIZE) if is_chunked else self.N
        matrix = 4 * V * C + (self.number * V * C if self.is_16_bit else 0)
        # Log-probabilities, their gradient, and the gradient of the logits; then the gradient of the matrix.
        return max(12 * rows * V + (4 * V * C if is_chunked else 0), (4 + self.number) * rows * V, matrix)
