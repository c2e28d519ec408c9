"""`hfgpt export model.gguf`: what the file holds, what llama.cpp makes of it, and what is refused.

Without xllamacpp, the tests that run llama.cpp are skipped.
"""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from kinds import KINDS, ODD
from nanogpt_like import random_state, write_checkpoint
from running import MODEL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from hfgpt.cli import app
from hfgpt.data.encoding import Encoder
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import UserError
from hfgpt.hub import gguf_file
from hfgpt.hub.gguf_file import export_gguf, verify_gguf
from hfgpt.hub.import_export import export, import_nanogpt
from hfgpt.model.modeling_gpt2 import new_model

gguf = pytest.importorskip("gguf")
TEXT = "".join(f"{n * n % 97} words, line {n}: the {n % 13}th — “naïve” é.\n" for n in range(300))
SIZES = {**MODEL, "n_embd": 64, "n_positions": 64}
DTYPES = ["float32", "float16", "bfloat16", "q8_0"]


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast, **fields) -> Path:
    new_model({**SIZES, "initializer_range": 0.1, **fields}, tokenizer, seed=0).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def bpe(size: int = 300) -> PreTrainedTokenizerFast:
    return load_tokenizer(f"bpe-{size}", lambda: [TEXT], 64)


def odd_texts(count: int, tokens: list[str], seed: int = 0) -> list[str]:
    """Texts of words, digits, spaces, line ends, emoji, combining and control characters, and names of tokens."""
    draw = random.Random(seed)
    pool = ["the", " ", "  ", "\n", "\t", "\r\n", "'s", "'LL", "12345", "½Ⅳ²٣", "é", "e\u0301", "日本語", "😀👩‍👩‍👧"]
    pool += ["\u00a0", "\u3000", "\u200b", "\0", "\x1f", "\u0085", "_", "...", "<|user|>", "ß", "ا", "\U0010ffff"]
    pool += ["\ue000", "İ", "ǅ", "\u2028", "don't", "x=1;", "ａ", "\ufeff", *tokens]
    return ["".join(draw.choices(pool, k=draw.randrange(1, 14))) for _ in range(count)]


@pytest.fixture
def llama(tmp_path):
    pytest.importorskip("xllamacpp")
    from llama_cpp import LlamaCpp

    def load(folder: Path, dtype: str = "float32", **options) -> LlamaCpp:
        export_gguf(folder, tmp_path / f"{dtype}.gguf", dtype, **options)
        assert verify_gguf(tmp_path / f"{dtype}.gguf", folder)["problems"] == []
        return LlamaCpp(tmp_path / f"{dtype}.gguf", json.loads((folder / "config.json").read_text())["vocab_size"], 64)

    return load


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_holds_the_checkpoint(tmp_path, dtype, tied):
    tokenizer = bpe()
    tokenizer.chat_template = "{{ messages[0].content }}"
    folder = saved(tmp_path / "model", tokenizer, tie_word_embeddings=tied)
    export_gguf(folder, tmp_path / "m.gguf", dtype)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {key: field.contents() for key, field in reader.fields.items()}
    sizes = {"context_length": 64, "embedding_length": 64, "feed_forward_length": 256, "block_count": 2}
    sizes |= {"attention.head_count": 2, "vocab_size": 300, "attention.layer_norm_epsilon": pytest.approx(1e-5)}
    assert {key: found[f"gpt2.{key}"] for key in sizes} == sizes
    assert found["general.architecture"] == "gpt2" and found["tokenizer.chat_template"] == tokenizer.chat_template
    about = {key: found[f"tokenizer.ggml.{key}"] for key in ("model", "pre", "bos_token_id", "eos_token_id")}
    assert about == {"model": "gpt2", "pre": "gpt-2", "bos_token_id": 0, "eos_token_id": 0}
    assert not found["tokenizer.ggml.add_bos_token"] and not found["tokenizer.ggml.add_eos_token"]
    assert found["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(300))
    assert str(tmp_path) not in (tmp_path / "m.gguf").read_bytes().decode("latin1")

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert ("output.weight" in tensors) != tied and len(tensors) == 28 + (not tied)
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
    allowed = {"float32": 0, "float16": 2e-4, "bfloat16": 2e-3, "q8_0": 3e-3}[dtype]
    for name, other, is_matrix in (
        ("token_embd.weight", state["transformer.wte.weight"], True),
        ("blk.1.attn_qkv.weight", state["transformer.h.1.attn.c_attn.weight"].T, True),
        ("blk.0.ffn_down.weight", state["transformer.h.0.mlp.c_proj.weight"].T, True),
        ("position_embd.weight", state["transformer.wpe.weight"], False),
        ("blk.1.attn_output.bias", state["transformer.h.1.attn.c_proj.bias"], False),
        ("output_norm.weight", state["transformer.ln_f.weight"], False),
    ):
        tensor = tensors[name]
        assert tensor.tensor_type.name == (kinds[dtype] if is_matrix else "F32")
        assert tensor.shape.tolist() == list(other.shape)[::-1]
        np.testing.assert_allclose(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type), other, atol=allowed if is_matrix else 0, rtol=0
        )


@pytest.mark.parametrize("name", ["bpe-300", "char"])
def test_llama_cpp_gives_the_scores_and_text_of_stock_transformers(tmp_path, llama, name):
    folder = saved(tmp_path / "model", load_tokenizer(name, lambda: [TEXT], 64))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    ids_BT = torch.tensor(ids[: len(ids) // 63 * 63]).view(-1, 63)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):  # so that the next token is clear
        some_BT = ids_BT[torch.randint(len(ids_BT), (8,))]
        model(some_BT, labels=some_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    start = tokenizer("the 12 words\n", add_special_tokens=False)["input_ids"][:10]
    made = model.generate(torch.tensor([start]), max_new_tokens=50, do_sample=False)[0]
    with torch.no_grad():
        reference_TV = model(made[None]).logits[0].log_softmax(-1)
    text = tokenizer.decode(made[len(start) :], skip_special_tokens=True)
    for dtype, tolerance in (("float32", 5e-3), ("float16", 1e-2), ("q8_0", 1e-1)):
        other = llama(folder, dtype)
        for size in (1, 7, len(made)):
            difference = (other.scores(made[:size].tolist()) - reference_TV[size - 1]).abs().max()
            assert difference < tolerance, f"{dtype}, {size} tokens: {difference}"
        if dtype != "q8_0":
            assert other.greedy(start, 50) == (made[len(start) :].tolist(), text)


@pytest.mark.parametrize("name", ["bytes", "gaps", "pair of files", "char", "bpe-N", "digits alone", "eos is a merge"])
def test_llama_cpp_gives_the_ids_of_200_odd_texts(tmp_path, llama, name):
    """Also where names of special tokens in a text are text, as in training."""
    if name in KINDS:
        tokenizer = load_tokenizer(KINDS[name](tmp_path / "tokenizer"), lambda: [TEXT], 64)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=ODD[name][0](), eos_token="</s>")
    folder = saved(tmp_path / "model", tokenizer)
    tokenizer, other = AutoTokenizer.from_pretrained(folder), llama(folder)
    encoder = Encoder(tokenizer)
    for text in odd_texts(200, [*tokenizer.get_added_vocab()]):
        text = "".join(c for c in text if c in tokenizer.get_vocab()) if encoder.has_characters else text
        assert other.ids(text, True) == tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)
        assert other.ids(text, True, add_special=True) == tokenizer(text)["input_ids"], repr(text)
        assert other.ids(text, False) == list(*encoder.tokens([text])), repr(text)


@pytest.mark.parametrize("digits", [False, True])
def test_llama_cpp_splits_words_at_each_kind_of_character_as_the_tokenizer_does(tmp_path, llama, digits):
    """By merges of a letter, a digit, a mark and a space with the first byte of whatever follows in the same word."""
    symbols = list(bytes_to_unicode().values())
    heads = ["a", "1", "!", "Ġ"]
    merges = [(head, symbol) for head in heads for symbol in symbols if symbol not in heads]
    entries = [*symbols, *map("".join, merges), "</s>"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(entries)}, merges=merges))
    splits = [pre_tokenizers.Digits(True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    other = llama(saved(tmp_path / "model", tokenizer))
    kinds: dict[str, list[str]] = {}
    for character in map(chr, range(0x20000)):  # those that Unicode had in 2002: its newest ones are not in llama.cpp
        kinds.setdefault(unicodedata.ucd_3_2_0.category(character), []).append(character)
    chosen = [
        c for kind, all_of in kinds.items() if kind not in ("Cn", "Cs") for c in all_of[:: len(all_of) // 200 + 1]
    ]
    for start in range(0, len(chosen), 500):
        patterns = ("a{0}", "1{0}", "!{0}", " {0}", "{0}'s", "  {0}a", "{0}{0} 1")
        text = "\n".join(pattern.format(c) for c in chosen[start : start + 500] for pattern in patterns)
        assert other.ids(text, True) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("fields", [{"tie_word_embeddings": False}, {"n_inner": 96}, {"n_embd": 24}, {}])
def test_llama_cpp_computes_other_heads_sizes_and_padded_rows(tmp_path, llama, fields):
    tokenizer = bpe()
    folder = saved(tmp_path / "model", tokenizer, **fields)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if not fields:
        model.resize_token_embeddings(320)
        model.save_pretrained(tmp_path / "padded")
        save_tokenizer(tokenizer, tmp_path / "padded")
        folder = tmp_path / "padded"
    ids = tokenizer(TEXT)["input_ids"][:40]
    for dtype, tolerance in (("float32", 5e-3), ("q8_0", 1e-1)):
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0, -1, :300].log_softmax(-1)
        other = llama(folder, dtype, untie_head=not fields)
        other.rows = 300
        assert (other.scores(ids) - wanted).abs().max() < tolerance


def refused(folder: Path, match: str, dtype: str = "float16") -> None:
    target = folder.parent / "out" / "refused.gguf"
    with pytest.raises(UserError, match=match):
        export_gguf(folder, target, dtype)
    assert not target.parent.exists()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"activation_function": "gelu"}, "activation_function is gelu .the exact GELU"),
        ({"activation_function": "relu"}, "activation_function is relu"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
    ],
)
def test_what_llama_cpp_would_compute_in_another_way_is_refused(tmp_path, fields, match):
    refused(saved(tmp_path / "model", bpe(), **fields), match)


def test_an_imported_nanogpt_is_refused_for_its_gelu_and_without_a_tokenizer(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", random_state(False), bias=False)
    import_nanogpt(checkpoint, tmp_path / "model", None, None)
    refused(tmp_path / "model", "exact GELU, as nanoGPT's")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"gelu"', '"gelu_new"'))
    (tmp_path / "model" / "manifest.json").unlink()
    refused(tmp_path / "model", "has no tokenizer")


TOKENIZERS = {
    "bytes, not all": "not a byte-level BPE with all 256 bytes",
    "bytes, prefix": "splits text into words in a way of its own",
    "bytes, left on, no eos": "no end-of-text token",
    "unigram": "it is Unigram",
    "llama": "not a byte-level BPE",
    "qwen": r"changes text first \(NFC\)",
    "bert": "it is WordPiece",
    "words": "it is WordLevel",
    "eos is a word": "ignore_merges",
    "in lower case": "changes text first",
    "a letter removed": "splits text into words",
    "an added token takes spaces": "has lstrip and rstrip",
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_whose_ids_would_differ_is_refused(tmp_path, name):
    if name in KINDS:
        tokenizer = load_tokenizer(KINDS[name](tmp_path / "tokenizer"), lambda: [TEXT], 64)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=ODD[name][0](), eos_token="</s>")
    refused(saved(tmp_path / "model", tokenizer), TOKENIZERS[name])


def test_tokens_that_can_overlap_are_refused(tmp_path):
    backend = bpe().backend_tokenizer
    backend.add_tokens(["<ab", "bc>"])
    refused(
        saved(tmp_path / "model", PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")),
        "overlap",
    )


def test_the_command_writes_one_file_or_nothing(tmp_path, monkeypatch):
    folder, file = saved(tmp_path / "model", bpe()), tmp_path / "new" / "model.gguf"
    run = CliRunner().invoke
    done = run(app, ["export", str(folder), str(file), "--dtype", "q8_0"])
    assert done.exit_code == 0 and f"wrote {file}: 2 layers" in done.stdout
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    written = file.read_bytes()
    with pytest.raises(UserError, match="already exists"):
        export_gguf(folder, file)
    assert file.read_bytes() == written
    assert run(app, ["export", str(folder), str(tmp_path / "odd.name"), "--format", "gguf"]).exit_code == 0
    assert (tmp_path / "odd.name").read_bytes()[:4] == b"GGUF"
    with pytest.raises(UserError, match="only GGUF has it"):
        run(app, ["export", str(folder), str(tmp_path / "out"), "--dtype", "q8_0"], catch_exceptions=False)
    assert run(app, ["export", str(folder), str(tmp_path / "short"), "--dtype", "bf16"]).exit_code == 0
    monkeypatch.setattr(gguf_file, "rename", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(UserError, match="No space left"):
        export_gguf(folder, tmp_path / "full" / "model.gguf")
    assert not list((tmp_path / "full").iterdir())


def test_numbers_beyond_the_data_type_are_refused(tmp_path):
    folder = saved(tmp_path / "model", bpe())
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.transformer.wte.weight.data[7, 3] = 1e5
    model.save_pretrained(folder)
    refused(folder, "dtype=float16: transformer.wte.weight contains 100000")
    for dtype in ("bfloat16", "q8_0"):
        export_gguf(folder, tmp_path / f"{dtype}.gguf", dtype)
        assert verify_gguf(tmp_path / f"{dtype}.gguf", folder)["problems"] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_finds_damage_and_another_checkpoint(tmp_path, dtype):
    folder, file = saved(tmp_path / "model", bpe()), tmp_path / "model.gguf"
    export_gguf(folder, file, dtype)
    done = CliRunner().invoke(app, ["verify", str(file), str(folder), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["problems"] == []
    facts = verify_gguf(file, None)
    assert facts["problems"] == [] and "CHECKPOINT" in facts["not_compared"]

    model = AutoModelForCausalLM.from_pretrained(folder)
    weight = model.transformer.h[1].mlp.c_fc.weight.data
    weight[5, 9] += weight.abs().max() / 50
    model.save_pretrained(tmp_path / "other")
    save_tokenizer(bpe(), tmp_path / "other")
    [problem] = verify_gguf(file, tmp_path / "other")["problems"]
    assert problem.startswith("blk.1.ffn_up.weight differs by up to")
    save_tokenizer(load_tokenizer("bpe-300", lambda: [TEXT.upper()], 64), tmp_path / "other")
    assert "tokenizer.ggml.merges is not the checkpoint's" in verify_gguf(file, tmp_path / "other")["problems"]

    content = bytearray(file.read_bytes())
    content[-100] ^= 64
    file.write_bytes(content)
    assert "not what was written" in verify_gguf(file, None)["problems"][0]
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="damaged, or another kind of file than GGUF"):
        verify_gguf(file, None)


def test_only_a_file_is_compared_with_a_checkpoint(tmp_path):
    folder = saved(tmp_path / "model", bpe())
    with pytest.raises(UserError, match="only a GGUF file"):
        CliRunner().invoke(app, ["verify", str(folder), str(folder)], catch_exceptions=False)
    export(folder, tmp_path / "plain")  # as before
    assert (tmp_path / "plain" / "model.safetensors").is_file()
