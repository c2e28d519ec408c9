"""Our model against stock GPT-2: same weights, same numbers, in both directions of loading."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers import GPT2LMHeadModel as StockGPT2
from transformers.activations import ACT2FN

from hfgpt import PerplexityCallback, PretrainConfig
from hfgpt.errors import UserError
from hfgpt.model import head_loss as head_loss_module
from hfgpt.model import modeling_gpt2
from hfgpt.model.attention_masks import document_attention
from hfgpt.model.configuration_gpt2 import MODEL_SIZES, model_config
from hfgpt.model.cpu_kernels import product_attention
from hfgpt.model.flops import parameter_counts
from hfgpt.model.head_loss import head_loss
from hfgpt.model.modeling_gpt2 import GELU, GPT2LMHeadModel
from hfgpt.training.parameter_groups import parameter_groups

V, T = 97, 32


def tiny(seed: int = 0, **fields) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": T, **fields}
    return GPT2LMHeadModel(model_config(config, vocab_size=V, eos_token_id=V - 1, bos_token_id=V - 1)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, V, (3, T), generator=torch.Generator().manual_seed(1))


def reloaded(model, folder, **options):
    model.save_pretrained(folder)
    stock, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return stock.eval()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_inner": 48},
        {"activation_function": "gelu"},
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        {"tie_word_embeddings": False},
    ],
)
def test_stock_transformers_loads_ours_with_equal_logits_and_loss(tmp_path, ids, fields):
    model = tiny(**fields)
    stock = reloaded(model, tmp_path)
    assert isinstance(stock, StockGPT2)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(ids, labels=ids).loss, stock(ids, labels=ids).loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        stock.set_attn_implementation("eager") or stock(ids).logits, model(ids).logits, atol=1e-5, rtol=0
    )


def test_attention_scaling_flags_are_saved_and_matter(tmp_path, ids):
    flags = {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
    model = tiny(initializer_range=0.2, **flags)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: saved[key] for key in flags} == flags
    assert (model(ids).logits - tiny(initializer_range=0.2)(ids).logits).abs().max() > 1e-3


def test_we_load_stock_folders(tmp_path, ids):
    stock = StockGPT2(model_config({"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": T}, vocab_size=V)).eval()
    stock.save_pretrained(tmp_path)
    model, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)


def test_folder_is_plain_gpt2_and_loads_without_this_package(tmp_path, ids):
    model = tiny()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gpt2", ["GPT2LMHeadModel"])
    assert "auto_map" not in config and config["dtype"] == "float32" and config["n_ctx"] == T
    torch.save({"ids": ids, "logits": model(ids).logits.detach()}, tmp_path / "expected.pt")
    script = (
        "import sys; sys.modules['hfgpt'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        f"want = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"model, info = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, output_loading_info=True)\n"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "assert (model(want['ids']).logits - want['logits']).abs().max() < 1e-5"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_file_holds_the_names_of_openais_with_one_tied_matrix(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    keys = set(load_file(tmp_path / "model.safetensors"))
    assert keys == set(StockGPT2(model.config).transformer.state_dict())
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_old_mask_buffers_are_ignored_and_nothing_else(tmp_path, prefix):
    model = tiny()
    model.save_pretrained(tmp_path)
    weights = {prefix + name: value for name, value in load_file(tmp_path / "model.safetensors").items()}
    bias = torch.randn_like(weights[f"{prefix}h.0.attn.c_attn.bias"])
    weights[f"{prefix}h.0.attn.c_attn.bias"] = bias.clone()
    weights[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, T, T)
    weights[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    torch.testing.assert_close(loaded.transformer.h[0].attn.c_attn.bias.data, bias)


def test_precision_of_the_file_is_as_saved(tmp_path):
    model = tiny()
    assert reloaded(model, tmp_path / "fp32").dtype == torch.float32
    assert reloaded(model.to(torch.bfloat16), tmp_path / "bf16", dtype="auto").dtype == torch.bfloat16
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


def test_labels_are_shifted_once(ids):
    model = tiny()
    logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, expected, atol=1e-6, rtol=0)
    targets = torch.randint(0, V, ids.shape)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(ids, shift_labels=targets).loss, expected, atol=1e-6, rtol=0)


def test_training_on_a_cycle_learns_the_next_token():
    model = tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = torch.arange(8 * T + 1) % 16
    for _ in range(150):
        loss = model(stream[:-1].view(8, T), shift_labels=stream[1:].view(8, T)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.eval()(torch.tensor([[3, 4, 5]])).logits[0, -1].argmax() == 6


@pytest.mark.parametrize("chunk_size", [None, 16, 1000])
@pytest.mark.parametrize("has_torch_function", [True, False])
def test_head_loss_equals_cross_entropy_in_value_and_gradient(monkeypatch, chunk_size, has_torch_function):
    if not has_torch_function:
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    x, w = torch.randn(50, 32, dtype=torch.float32), torch.randn(V, 32)
    target = torch.randint(0, V, (50,))
    target[::7] = -100
    expected_grads, grads = [], []
    for function, out in ((head_loss, grads), (None, expected_grads)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        if function:
            loss = function(a, b, target, chunk_size)
        else:
            loss = expected = F.cross_entropy(a @ b.t(), target, reduction="sum")
        loss.backward()
        out += [loss.detach(), a.grad, b.grad]
    assert expected.isfinite()
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_head_loss_keeps_float32_digits_under_bf16_autocast():
    torch.manual_seed(0)
    x, w, target = torch.randn(256, 32), torch.randn(V, 32), torch.randint(0, V, (256,))
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunked = head_loss(x, w, target), head_loss(x, w, target, 64)
    assert whole.dtype == chunked.dtype == torch.float32
    torch.testing.assert_close(whole, chunked, rtol=1e-6, atol=0)


def test_rows_padded_inside_the_head_take_no_probability(monkeypatch):
    x, w, target = torch.randn(20, 32), torch.randn(V, 32), torch.randint(0, V, (20,))
    expected = F.cross_entropy(x @ w.t(), target, reduction="sum")
    monkeypatch.setattr(head_loss_module, "_pads", lambda weight: True)
    torch.testing.assert_close(head_loss(x, w, target), expected)
    torch.testing.assert_close(head_loss(torch.zeros(20, 32), w, target) / 20, torch.tensor(math.log(V)))


def test_attention_is_causal_and_crosses_document_borders_as_in_gpt2(ids):
    model = tiny(initializer_range=0.2)
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % V
    for mask in (None, torch.ones_like(ids)):
        torch.testing.assert_close(
            model(ids, attention_mask=mask).logits[:, :10], model(changed, attention_mask=mask).logits[:, :10]
        )
        earlier = ids.clone()
        earlier[:, :10] = (earlier[:, :10] + 1) % V
        assert (model(ids).logits[:, 10:] - model(earlier, attention_mask=mask).logits[:, 10:]).abs().max() > 1e-3


def test_left_padding_does_not_change_the_answer(ids):
    model = tiny(initializer_range=0.2)
    padded = torch.cat([torch.zeros(3, 5, dtype=torch.long), ids[:, :10]], dim=1)
    mask = (torch.arange(15) >= 5).long().expand(3, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = model(padded, attention_mask=mask, position_ids=positions).logits
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, 5:], model(ids[:, :10]).logits, atol=1e-5, rtol=0)


def test_generation_with_cache_equals_no_cache_and_stock(tmp_path, ids):
    model = tiny(initializer_range=0.2)
    stock = reloaded(model, tmp_path)
    prompt, mask = ids[:, :8], torch.ones(3, 8, dtype=torch.long)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": V - 1}
    cached = model.generate(prompt, **options)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))
    assert torch.equal(cached, stock.generate(prompt, **options))
    assert torch.equal(cached, model.generate(prompt, **options))  # a cached call leaves nothing behind

    past, step_logits = None, []
    for position in range(12):
        output = model(ids[:, position : position + 1], use_cache=True, **{modeling_gpt2.CACHE_NAME: past})
        past = output[modeling_gpt2.CACHE_NAME]
        step_logits.append(output.logits)
    torch.testing.assert_close(torch.cat(step_logits, 1), model(ids[:, :12]).logits, atol=1e-5, rtol=0)


def test_first_loss_is_near_log_v():
    torch.manual_seed(0)
    config = model_config({"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64}, vocab_size=65)
    ids = torch.randint(0, 65, (16, 65))
    loss = GPT2LMHeadModel(config)(ids[:, :-1], shift_labels=ids[:, 1:]).loss
    assert abs(loss.item() - 4.200) < 0.1


@pytest.mark.parametrize("from_meta", [False, True])
def test_initialisation_is_gpt2s(from_meta):
    config = model_config({"n_layer": 8, "n_head": 4, "n_embd": 128, "n_positions": 64}, vocab_size=1000)
    torch.manual_seed(0)
    if from_meta:
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        model.to_empty(device="cpu")
        model.init_weights()
        assert model.lm_head.weight is model.transformer.wte.weight
    else:
        model = GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif ".ln_" in name:
            assert (parameter == 1).all()
        else:
            expected = 0.02 / math.sqrt(16) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_seed_alone_decides_the_weights():
    first, same, other = tiny(1).state_dict(), tiny(1).state_dict(), tiny(2).state_dict()
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_sizes_have_the_published_parameter_counts():
    expected = {
        "gpt2-125m": 124_439_808,
        "gpt2-350m": 354_823_168,
        "gpt2-774m": 774_030_080,
        "gpt2-1.5b": 1_557_611_200,
    }
    for name in MODEL_SIZES:
        config = model_config(name)
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        counted = sum(parameter.numel() for parameter in model.parameters())
        assert counted == parameter_counts(config).total == expected.get(name, counted)
        assert counted - model.transformer.wpe.weight.numel() == parameter_counts(config).without_positions


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_groups_partition_the_model(tied):
    with torch.device("meta"):
        model = GPT2LMHeadModel(model_config({"size": "gpt2-125m", "tie_word_embeddings": tied}))
    groups = parameter_groups(model, PretrainConfig(max_steps=1))
    sizes = [(len(group["params"]), sum(p.numel() for p in group["params"])) for group in groups]
    table = 50_257 * 768  # an untied head is one more embedding
    embeddings = (2, table + 1024 * 768) if tied else (3, 2 * table + 1024 * 768)
    assert sizes == [(48, 12 * 12 * 768**2), embeddings, (98, 121_344)]
    each = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(each) == len(set(each)) and set(each) == {id(parameter) for parameter in model.parameters()}


def test_decay_shrinks_matrices_and_leaves_norms():
    model = tiny()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, PretrainConfig(max_steps=1, learning_rate=0.01)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.01 * 0.1 if parameter.dim() >= 2 else 1
        torch.testing.assert_close(parameter.data, before[name] * factor)


def test_gradient_checkpointing_gives_the_same_gradients(ids):
    gradients = []
    for checkpointed in (False, True):
        model = tiny(resid_pdrop=0.1).train()
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(5)
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_compiled_in_place_the_keys_are_clean_and_graphs_few(tmp_path, ids):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = tiny().train()
    model.compile(backend=backend, dynamic=False)
    one = torch.ones(())
    for step in range(6):
        model(ids, shift_labels=ids, num_items_in_batch=one).loss.backward()
        if step in (2, 4):
            model.eval()
            with torch.no_grad():
                model(ids, shift_labels=ids, num_items_in_batch=one, use_cache=False)
            model.train()
    assert len(calls) == 2  # one for training, one for evaluation
    assert not any("_orig_mod" in key or key.startswith("module.") for key in model.state_dict())
    reloaded(model.eval(), tmp_path)


def test_one_block_compiled_by_itself_saves_under_its_own_names(tmp_path, ids):  # C51
    model = tiny().eval()
    expected, names = model(ids).logits, set(model.transformer.state_dict())
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    torch.testing.assert_close(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names
    assert torch.equal(GPT2LMHeadModel.from_pretrained(tmp_path)(ids).logits, expected)


def test_the_forms_that_a_compiled_cpu_model_takes_are_the_same_functions():
    """GELU within 1e-6 of transformers' own in float32, attention equal to torch's, both with their gradients."""
    x = (4 * torch.randn(4000, generator=torch.Generator().manual_seed(0))).requires_grad_()
    outputs = [torch.compile(GELU(), backend="eager", fullgraph=True)(x), ACT2FN["gelu_new"](x)]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in outputs), rtol=1e-6, atol=2e-6)
    qkv = [torch.randn(2, 3, 20, 8, requires_grad=True) for _ in range(3)]
    outputs = [product_attention(*qkv, 0.3), F.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.3)]
    torch.testing.assert_close(*outputs)
    for one, two in zip(*(torch.autograd.grad(y.square().sum(), qkv) for y in outputs), strict=True):
        torch.testing.assert_close(one, two)


def test_a_compiled_bf16_model_multiplies_and_gives_the_same_loss(ids, monkeypatch):
    model = tiny()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=ids, labels=ids).loss
        taken = []
        monkeypatch.setattr(modeling_gpt2, "product_attention", lambda *a: taken.append(1) or product_attention(*a))
        loss = torch.compile(model, backend="eager")(input_ids=ids, labels=ids).loss
    assert taken
    assert loss.item() == pytest.approx(expected.item(), abs=2e-3)


def test_one_compiled_block_does_not_change_the_keys(tmp_path):
    model = tiny()
    expected = set(model.state_dict())
    model.transformer.h[0].compile(backend="eager")
    assert set(model.state_dict()) == expected
    reloaded(model, tmp_path)


def test_accelerate_saves_and_loads_the_tied_matrix_once(tmp_path, ids):
    def prepared(seed):
        model = tiny(seed)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    accelerator = Accelerator()
    first, _ = prepared(0)
    accelerator.save_state(tmp_path)
    accelerator.free_memory()
    second, optimizer = prepared(1)
    accelerator.load_state(tmp_path)
    assert second.lm_head.weight is second.transformer.wte.weight
    assert torch.equal(second.lm_head.weight, first.lm_head.weight)
    second(ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(second.lm_head.weight, second.transformer.wte.weight)
    assert not torch.equal(second.lm_head.weight, first.lm_head.weight)


def test_transformers_trainer_gives_the_losses_of_stock_gpt2(tmp_path, ids):
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    options = {"max_steps": 3, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "learning_rate": 0.01}
    results = []
    stock = StockGPT2(tiny().config)
    stock.load_state_dict(tiny().state_dict())
    for model in (stock, tiny()):
        arguments = TrainingArguments(str(tmp_path), **options)
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[PerplexityCallback()])
        results.append((trainer.train().training_loss, trainer.evaluate()))
    (stock_loss, stock_evaluation), (loss, evaluation) = results
    assert loss == pytest.approx(stock_loss, rel=1e-5)
    for key in ("eval_loss", "eval_perplexity"):
        assert evaluation[key] == pytest.approx(stock_evaluation[key], rel=1e-5)


def test_what_it_cannot_give_is_refused_and_what_asks_for_nothing_is_not(ids):
    model = tiny()
    asked = {"shift_lables": ids, "token_type_ids": ids, "output_attentions": True, "output_hidden_states": True}
    for name, value in asked.items():
        with pytest.raises(TypeError, match=name):
            model(ids, **{name: value})
    nothing = {"token_type_ids": None, "output_attentions": False, "output_hidden_states": False}
    assert torch.equal(model(ids, **nothing).logits, model(ids).logits)


def test_more_tokens_than_positions_are_refused_with_both_numbers(ids):
    model = tiny()
    too_many = f"{T + 1} tokens, but n_positions is {T}"
    longer = torch.cat([ids, ids[:, :1]], dim=1)
    cache = model(ids, use_cache=True)[modeling_gpt2.CACHE_NAME]
    with pytest.raises(UserError, match=too_many):
        model(longer)
    with pytest.raises(UserError, match=too_many):
        model(ids[:, :1], **{modeling_gpt2.CACHE_NAME: cache})
    for use_cache in (True, False):
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": use_cache}
        assert model.generate(ids[:, :-3], max_new_tokens=4, **options).shape[1] == T + 1
        with pytest.raises(UserError, match=too_many):
            model.generate(ids[:, :-3], max_new_tokens=5, **options)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids, shift_labels=ids).loss, model(ids, shift_labels=ids).loss)


@torch.no_grad()
def test_masked_documents_are_alone_and_plain_causal_ones_are_not():
    """Packed [A | B]: B's logits do not depend on A, and equal those of B by itself (cases of packed attention)."""
    model, separator = tiny().eval(), 96
    a, b = torch.randint(0, 96, (2, 7)), torch.randint(0, 96, (2, 9))
    start = torch.full((2, 1), separator)
    packed, other = (torch.cat([start, first, start, b], 1) for first in (a, (a + 1) % 96))
    alone = model(torch.cat([start, b], 1)).logits
    for flex in (False, True):
        masked = [model(ids, **document_attention(ids, separator, flex)).logits[:, 8:] for ids in (packed, other)]
        torch.testing.assert_close(masked[0], masked[1], atol=0, rtol=0)
        torch.testing.assert_close(masked[0], alone, atol=1e-5, rtol=0)
    for mask in (None, torch.ones_like(packed)):  # an all-ones mask says nothing of documents
        plain = [model(ids, attention_mask=mask).logits[:, 8:] for ids in (packed, other)]
        assert (plain[0] - plain[1]).abs().max() > 1e-3
    cut = packed[:, 3:]  # a block that begins inside a document
    positions = document_attention(cut, separator)["position_ids"]
    assert positions[0].tolist() == [*range(5), *range(10)]
