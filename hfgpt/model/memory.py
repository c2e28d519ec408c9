"""Memory of a training step, by part, from the model's configuration and how one process trains it.

Every figure is counted from the tensors that exist at three moments: when the loss is differentiated, when the last
block is, and when the embedding is. The counts for eager and compiled training are checked on a CPU against the
tensors that autograd keeps (tests/model/test_memory.py) and against resident memory (tests/benchmarks/memory.py). On a
card nothing has been measured yet: the same counts are taken to hold, and what only a card has is from documentation,
as is said where it is counted. The same benchmark measures it there.

B batch, T sequence, C width, H heads, V vocabulary, N = B * T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from transformers import GPT2Config

from hfgpt.model.flops import parameter_counts
from hfgpt.model.modeling_gpt2 import HEAD_CHUNK_SIZE, products_are_faster

CUBLAS_WORKSPACE_BYTES = 32 * 2**20  # torch's documentation of CUBLAS_WORKSPACE_CONFIG, for Hopper; others 8 MiB


@dataclass(frozen=True)
class Setting:
    """How one of `processes` trains; `sharded` is FSDP2, else each holds the whole model (DDP).

    `device` is "cuda" or "cpu". `head` is "" for the trainer's own: compiled with the model, or in chunks. "whole" has
    all logits in an eager model, "returned" in a compiled one that hands them to its caller, as nanoGPT's does.
    """

    micro_batch: int
    sequence_length: int
    accumulation: int = 1
    precision: str = "no"
    compiled: bool = False
    checkpointing: bool = False
    optim: str = "adamw"
    processes: int = 1
    sharded: bool = False
    document_masking: bool = False
    device: str = "cuda"
    head: str = ""

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence_length

    @property
    def shares(self) -> int:
        return self.processes if self.sharded else 1

    @property
    def width(self) -> int:
        """Bytes of a number in the matrix products."""
        return 4 if self.precision == "no" else 2

    @property
    def head_kind(self) -> str:
        if self.head or self.compiled:
            return self.head or "compiled"
        return "chunked" if self.tokens > HEAD_CHUNK_SIZE else "whole"


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the moment when they are most. `logits` holds all that the head and loss need."""

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
    """The most that a step takes from the second step on, when the optimizer's state exists."""
    moments = [_at_loss(config, setting), _at_last_block(config, setting), _at_embedding(config, setting)]
    return max(moments, key=lambda moment: moment.peak)


def saved_bytes(config: GPT2Config, setting: Setting) -> int:
    """Activations and logits that a forward pass keeps for the backward pass, without copies of weights."""
    return _activations(config, setting) + _saved_logits(config, setting)


def weight_copy_bytes(config: GPT2Config, setting: Setting, saved: bool = False) -> int:
    """16-bit copies of the matrices and their biases, which autocast makes once and keeps to the end of the backward
    pass; `saved`: those alone that autograd keeps too, the matrices outside recomputed blocks.
    """
    if setting.precision == "no":
        return 0
    C, inner, head = config.n_embd, _inner(config), 2 * _head_rows(config, setting) * config.n_embd
    if setting.head_kind == "chunked" and saved:
        head = 0
    biases = 0 if saved else 5 * C + inner
    blocks = 0 if saved and setting.checkpointing else config.n_layer * (4 * C * C + 2 * C * inner + biases)
    # FSDP2 gathers the blocks in 16 bits, one after the other: see _gathered.
    return head if setting.sharded else 2 * blocks + head


def _at_loss(config: GPT2Config, setting: Setting) -> Memory:
    """All blocks have kept their activations, and the loss is being differentiated."""
    held = 4 * _parameters(config) if setting.accumulation > 1 else 0  # by the micro-batches before
    return _memory(config, setting, held, _activations(config, setting), _head_peak(config, setting))


def _at_last_block(config: GPT2Config, setting: Setting) -> Memory:
    """The MLP of the last block is being differentiated: nothing but the head has been freed yet."""
    C, N, width = config.n_embd, setting.tokens, setting.width
    activations, head = _activations(config, setting), 4 * config.vocab_size * C + _fused_gradients(config, setting)
    if setting.checkpointing:
        activations += N * (_block_bytes(config, setting) - 4 * C)  # computed anew; its input is there
    held = 4 * _parameters(config) if setting.accumulation > 1 else 0
    # Gradients of the residual stream, of the MLP's output where that has another type, and of its inner layer.
    temporary = N * (4 * C + (width * C if width < 4 else 0) + width * _inner(config))
    return _memory(config, setting, held, activations, head, temporary)


def _at_embedding(config: GPT2Config, setting: Setting) -> Memory:
    """The end of the backward pass: all gradients exist, the embedding's is being added to the head's."""
    C, N = config.n_embd, setting.tokens
    matrix = 4 * config.vocab_size * C
    # A compiled pass returns all gradients at once; FSDP2 breaks it up by block.
    at_once = setting.compiled and not setting.sharded
    new = 4 * _parameters(config) if at_once and setting.accumulation > 1 else matrix
    head = matrix if config.tie_word_embeddings and not at_once and setting.accumulation > 1 else 0
    head += _fused_gradients(config, setting)
    return _memory(config, setting, 4 * _parameters(config), 4 * N * C, head, new)


def _memory(
    config: GPT2Config, setting: Setting, gradients: int, activations: int, logits: int, temporary: int = 0
) -> Memory:
    shares, parameters = setting.shares, _parameters(config)
    workspace = temporary + weight_copy_bytes(config, setting) + _gathered(config, setting)
    if setting.processes > 1 and not setting.sharded:
        workspace += 4 * parameters  # DDP's buckets, in which gradients are exchanged
    if setting.device == "cuda":
        workspace += CUBLAS_WORKSPACE_BYTES
    # FSDP2 shares out gradients only when it exchanges them, after the last micro-batch.
    gradients = gradients // shares if setting.accumulation == 1 else gradients
    optimizer = 8 * parameters
    if setting.optim == "muon":  # one moment for the matrices of the blocks
        optimizer -= 4 * config.n_layer * (4 * config.n_embd**2 + 2 * config.n_embd * _inner(config))
    return Memory(4 * parameters // shares, gradients, optimizer // shares, activations, logits, workspace)


def _gathered(config: GPT2Config, setting: Setting) -> int:
    """What FSDP2 gathers: embeddings and head for the whole pass, and two blocks, each also as one flat buffer.

    From FSDP2's design: one block in use, the next prefetched.
    """
    if not setting.sharded:
        return 0
    C = config.n_embd
    blocks = config.n_layer * (4 * C * C + 2 * C * _inner(config))
    outside = _parameters(config) - blocks
    return 4 * outside + 4 * setting.width * blocks // config.n_layer


def _block_bytes(config: GPT2Config, setting: Setting) -> int:
    """Kept per token by one block.

    The two norms keep their inputs in float32, with mean and deviation; the matrix products their inputs; attention
    its queries, keys and values, its output (the projection's input), and the sum of each row in float32; GELU its
    input. So 64 C in float32 and 36 C in 16 bits. torch.compile keeps the same (torch 2.13).
    """
    C, width = config.n_embd, setting.width
    norms = 2 * (4 * C + 8)
    products = width * (2 * C + 3 * C + C + 2 * _inner(config))
    # A mask of documents becomes one of numbers, but for flex attention.
    flex = setting.compiled and setting.device == "cuda" and config.attn_pdrop == 0
    mask = width * setting.sequence_length if setting.document_masking and not flex else 0
    attention = 4 * config.n_head
    if _keeps_probabilities(config, setting):  # and the scores, with maximum and sum of each row
        attention = 2 * config.n_head * (width * setting.sequence_length + 4)
    return norms + products + attention + mask + _dropout_bytes(config, setting)


def _keeps_probabilities(config: GPT2Config, setting: Setting) -> bool:
    """As `modeling_hfgpt.Attention` decides."""
    dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float32
    plain = setting.compiled and not setting.document_masking and not config.attn_pdrop
    return plain and setting.device == "cpu" and products_are_faster(dtype, setting.sequence_length)


def _dropout_bytes(config: GPT2Config, setting: Setting) -> int:
    """A card keeps a byte per element dropped or not, a CPU a number; attention's own is drawn anew on a card.

    A CPU has no fused attention with dropout: it keeps probabilities, noise and their product in float32, and in 16-bit
    training its inputs too.
    """
    element = 1 if setting.device == "cuda" else setting.width
    total = 2 * config.n_embd * element if config.resid_pdrop else 0
    if config.attn_pdrop and setting.device != "cuda":
        total += 12 * config.n_head * setting.sequence_length - 4 * config.n_head
        total += 6 * config.n_embd if setting.width < 4 else 0
    return total


def _activations(config: GPT2Config, setting: Setting) -> int:
    """Kept for the backward pass outside the head: token and position ids, blocks, final norm with its output."""
    C, N = config.n_embd, setting.tokens
    block = 4 * C if setting.checkpointing else _block_bytes(config, setting)
    # In chunks the head takes the output as it is, and casts each chunk; torch's own keeps the gradient instead.
    out = 4 if setting.head_kind == "chunked" else setting.width
    if setting.head_kind == "chunked" and _has_fused_loss(config, setting):
        out = 0
    dropped = C * (1 if setting.device == "cuda" else 4) if config.embd_pdrop else 0
    return 8 * (N + setting.sequence_length) + N * (config.n_layer * block + 4 * C + 8 + out * C + dropped)


def _saved_logits(config: GPT2Config, setting: Setting) -> int:
    """Compiled: the logits as the product gives them, two numbers per row. Eager: their logarithms in float32.

    "returned" keeps both: inferred from reported peaks of nanoGPT's model on cards, which it was chosen to meet; of
    such a model torch 2.13 keeps no more than "compiled" on a CPU.
    """
    NV = setting.tokens * _head_rows(config, setting)
    return {
        "chunked": 0,
        "compiled": setting.width * NV + 8 * setting.tokens,
        "whole": 4 * NV,
        "returned": (setting.width + 4) * NV,
    }[setting.head_kind]


def _head_peak(config: GPT2Config, setting: Setting) -> int:
    """The most that head and loss take at once, their own gradients included, for V rows of C."""
    C, N, width, kind = config.n_embd, setting.tokens, setting.width, setting.head_kind
    V = _head_rows(config, setting)
    if kind in ("compiled", "returned"):  # what is saved, and the gradient of the logits
        return _saved_logits(config, setting) + width * N * V
    if kind == "chunked" and _has_fused_loss(config, setting):
        gradients = _fused_gradients(config, setting)
        before = gradients if setting.accumulation > 1 else 0  # those of the micro-batch before go with its loss
        return max(4 * HEAD_CHUNK_SIZE * V + 4 * N * C + gradients + before, 3 * gradients)
    rows = min(N, HEAD_CHUNK_SIZE) if kind == "chunked" else N
    matrix = 4 * V * C + (width * V * C if width < 4 else 0)
    # Logarithms of the probabilities, their gradient and that of the logits; then the gradient of the matrix.
    return max(12 * rows * V + (4 * V * C if kind == "chunked" else 0), (4 + width) * rows * V, matrix)


def _fused_gradients(config: GPT2Config, setting: Setting) -> int:
    """torch's own chunked loss computes its gradients in the forward pass and keeps them as long as the loss; in the
    backward pass there are two scaled copies (measured).
    """
    if setting.head_kind != "chunked" or not _has_fused_loss(config, setting):
        return 0
    return 4 * config.n_embd * (config.vocab_size + setting.tokens)


def _has_fused_loss(config: GPT2Config, setting: Setting) -> bool:
    """As `modeling_hfgpt.head_loss` decides."""
    pads = setting.device == "cuda" and config.vocab_size % 64 != 0
    return hasattr(F, "linear_cross_entropy") and setting.precision == "no" and not pads


def _head_rows(config: GPT2Config, setting: Setting) -> int:
    """Rows of the head as it is multiplied: a card wants a multiple of 64."""
    return config.vocab_size + (-config.vocab_size % 64 if setting.device == "cuda" else 0)


def _inner(config: GPT2Config) -> int:
    return config.n_inner or 4 * config.n_embd


def _parameters(config: GPT2Config) -> int:
    return parameter_counts(config).total
