"""What autograd keeps is what the memory model counts; the known peaks of GPT-2 124M on cards."""

import pytest
import torch
from transformers import GPT2Config

from hfgpt.model.attention_masks import document_attention
from hfgpt.model.head_loss import HEAD_CHUNK_SIZE
from hfgpt.model.memory import Setting, StepBytes, training_memory
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

DEEP = {"n_layer": 5, "n_head": 4, "n_embd": 64, "vocab_size": 300, "n_positions": 64}
WIDE = {"n_layer": 2, "n_head": 3, "n_embd": 192, "vocab_size": 1000, "n_positions": 128}
UNTIED = {"n_layer": 1, "n_head": 8, "n_embd": 96, "n_inner": 200, "vocab_size": 2000, "tie_word_embeddings": False}


def gpt2(pdrop: float = 0.0, attn_pdrop: float = 0.0, **fields) -> GPT2Config:
    dropout = {"resid_pdrop": pdrop, "embd_pdrop": pdrop, "attn_pdrop": attn_pdrop}
    return GPT2Config(**{**dropout, "bos_token_id": None, "eos_token_id": None, **fields})


def measured_bytes(config: GPT2Config, setting: Setting) -> int:
    """Bytes that a forward pass saves for backward, each storage once, parameters left out."""
    model = GPT2LMHeadModel(config).train()
    model.head_chunk_size = HEAD_CHUNK_SIZE
    if setting.checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}  # held, so that no address is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(config.vocab_size, (setting.micro_batch, setting.sequence_length))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=setting.precision == "bf16")
    masking = document_attention(ids, separator_id=0) if setting.document_masking else {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        output = model(input_ids=ids, shift_labels=ids, **masking)
    assert output.loss.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("fields", "micro_batch", "length"), [(DEEP, 16, 64), (WIDE, 3, 128), (UNTIED, 4, 50), (DEEP, 40, 64)]
)
def test_what_autograd_keeps_is_what_is_counted(fields, micro_batch, length, precision, checkpointing):
    """The last setting has more tokens than the head takes at a time."""
    setting = Setting(micro_batch, length, precision=precision, checkpointing=checkpointing, device="cpu")
    config = gpt2(**fields)
    step = StepBytes(config, setting)
    expected = step.saved() + step.weight_copies(only_saved=True)
    assert measured_bytes(config, setting) == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("dropout", [{"pdrop": 0.1}, {"attn_pdrop": 0.1}, {}])
def test_dropout_and_the_mask_of_documents_are_counted(precision, dropout):
    setting = Setting(8, 64, precision=precision, device="cpu", document_masking=not dropout)
    config = gpt2(**dropout, **DEEP)
    step = StepBytes(config, setting)
    expected = step.saved() + step.weight_copies(only_saved=True)
    assert measured_bytes(config, setting) == pytest.approx(expected, rel=0.002)


def test_parts_of_gpt2_by_hand():
    """124,475,904 parameters with 50,304 rows; 8 x 1,024 tokens."""
    parts = training_memory(gpt2(vocab_size=50304), gpu(8, accumulation=2))
    assert parts.weights == parts.gradients == parts.optimizer // 2 == 4 * 124_475_904
    N, C = 8192, 768
    block = 36 * C + 2 * 8 + 4 * 12
    assert parts.activations == 8 * (N + 1024) + N * (12 * block + 4 * C + 8 + 2 * C)
    assert parts.logits == N * (2 * 50304 + 8 + 2 * 50304)
    assert parts.peak == sum((parts.weights, parts.gradients, parts.optimizer, parts.activations, parts.logits)) + (
        2 * (50304 * C + 12 * (12 * C * C + 9 * C)) + 32 * 2**20
    )


def gpu(micro_batch: int, **changes) -> Setting:
    return Setting(micro_batch, 1024, **{"precision": "bf16", "compiled": True, **changes})


@pytest.mark.parametrize(("micro_batch", "lowest", "highest"), [(8, 7.6, 7.6), (16, 12.6, 13.0)])
def test_known_peaks_with_all_logits_in_memory(micro_batch, lowest, highest):
    """Reported for nanoGPT's model, taken as one micro-batch a step: 16-bit logits go back to the caller, and their
    logarithms in float32 and 16-bit gradients are there besides. That split was chosen to meet these two values, so
    that they hold shows only that the rest (weights, activations) leaves room for a plausible one.
    """
    for rows in (50257, 50304):
        gib = training_memory(gpt2(vocab_size=rows), gpu(micro_batch, head="returned")).peak / 2**30
        assert 0.95 * lowest < gib < 1.05 * highest
    assert (gib > 12) == (micro_batch == 16)


def test_known_peak_with_a_compiled_loss():
    """18.4 GiB reported at 32 x 1,024: taken for a loss compiled with the model, as the trainer does, which keeps
    16-bit logits alone. How that value came about is not known; the count was made from a CPU's compiled graph.
    """
    for accumulation in (1, 2):
        gib = training_memory(gpt2(vocab_size=50304), gpu(32, accumulation=accumulation)).peak / 2**30
        assert gib == pytest.approx(18.4, rel=0.05)
    assert training_memory(gpt2(), gpu(32, head="returned")).peak > 23 * 2**30


def test_less_memory_by_recomputing_by_muon_and_by_more_processes():
    config = gpt2(vocab_size=50304)
    plain = training_memory(config, gpu(8, accumulation=2))
    recomputed = training_memory(config, gpu(8, accumulation=2, checkpointing=True))
    assert recomputed.activations < plain.activations / 4 and recomputed.peak < plain.peak - 2 * 2**30
    muon = training_memory(config, gpu(8, accumulation=2, optim="muon"))
    assert plain.optimizer - muon.optimizer == 4 * 12 * 12 * 768**2
    averaged = training_memory(config, gpu(8, accumulation=2, averaged=True))
    assert averaged.weights == 2 * plain.weights and averaged.peak - plain.peak == plain.weights
    # The matrices that travel between 256 processes are larger than what the backward pass of one sequence keeps.
    large = gpt2(n_layer=48, n_head=25, n_embd=1600)
    setting = gpu(1, accumulation=2, optim="muon", processes=256)
    matrix, many = 2 * 4 * 1600**2, training_memory(large, setting)  # bytes in bf16
    update = StepBytes(large, setting).muon_workspace()
    assert update == 2 * matrix + 257 * matrix + 258 * matrix
    assert many.activations == many.logits == 0 and many.workspace == many.weights + update + 32 * 2**20
    alone, shared = (training_memory(config, gpu(8, processes=4, sharded=sharded)) for sharded in (False, True))
    assert alone.weights == 4 * shared.weights and alone.optimizer == 4 * shared.optimizer
    # Gradients are exchanged, and so shared, after the last micro-batch only.
    held = training_memory(config, gpu(8, processes=4, sharded=True, accumulation=2))
    assert held.gradients == alone.weights
