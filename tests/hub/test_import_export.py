"""`hfgpt import` and `hfgpt export`: the same function on both sides, plain folders, nothing run and nothing lost."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nanogpt_like import ARGS, logits_BTV, random_state, write_checkpoint
from running import trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import GPT2LMHeadModel as StockGPT2
from typer.testing import CliRunner

from hfgpt.cli import app
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import UserError
from hfgpt.evaluation.generate import generate
from hfgpt.evaluation.loading import load_checkpoint
from hfgpt.hub.import_export import export, import_nanogpt
from hfgpt.hub.verify import verify
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel, new_model

IDS = torch.arange(30).view(2, 15) % 20
CHARACTERS = "\n abcdefghijklmnopqrstu."  # 24 of them


@pytest.fixture
def characters(tmp_path) -> Path:
    path = tmp_path / "input.txt"
    path.write_text(CHARACTERS)
    return path


def stock_logits(folder, ids=IDS):
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_an_imported_model_answers_as_nanogpts_did(tmp_path, characters, bias, prefix):
    state = random_state(bias)
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", state, prefix, bias)
    report = "\n".join(import_nanogpt(checkpoint, tmp_path / "model", "char", characters))
    assert "step 2,000, best validation loss 1.5000" in report and "with its tokenizer" in report
    torch.testing.assert_close(stock_logits(tmp_path / "model"), logits_BTV(state, IDS), atol=1e-5, rtol=0)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors["h.1.attn.c_proj.weight"].equal(state["transformer.h.1.attn.c_proj.weight"].T)
    assert "h.0.attn.bias" not in tensors and "lm_head.weight" not in tensors
    given = state["transformer.h.0.attn.c_attn.bias"] if bias else torch.zeros(96)
    assert tensors["h.0.attn.c_attn.bias"].equal(given)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["activation_function"] == "gelu" and config["dtype"] == "float32" and config["resid_pdrop"] == 0


@pytest.mark.slow
def test_an_imported_folder_is_verified_and_writes_text(tmp_path, characters):
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", random_state())
    folder, arguments = tmp_path / "model", ["--tokenizer", "char", "--text", str(characters)]
    done = CliRunner().invoke(app, ["import", str(checkpoint), str(folder), *arguments])
    assert done.exit_code == 0 and f"wrote {folder}: 2 layers, 4 heads, 32 wide, 24 rows" in done.stdout
    assert verify(folder)["problems"] == []
    assert "the nanoGPT checkpoint ckpt.pt (step 2,000" in (folder / "README.md").read_text()
    model, tokenizer = load_checkpoint(folder, torch.device("cpu"))
    assert tokenizer("cab.", return_tensors="pt").input_ids.tolist() == [
        [5, 3, 4, 2]
    ]  # in sorted order, as nanoGPT has them
    (text,) = generate(model, tokenizer, "abc", max_new_tokens=20, seed=1)
    assert len(text) == 20 and set(text) <= set(CHARACTERS)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert "bytes instead of" in verify(folder)["problems"][0]


def test_padded_rows_are_left_out_and_other_numbers_refused(tmp_path, characters):
    state = random_state(vocab_size=64)
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", state, args={"vocab_size": 64})
    report = "\n".join(import_nanogpt(checkpoint, tmp_path / "model", "char", characters))
    assert "left out 40 rows" in report
    folder = tmp_path / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(AutoTokenizer.from_pretrained(folder)) == 24
    rows = load_file(folder / "model.safetensors")["wte.weight"]
    assert rows.equal(state["transformer.wte.weight"][:24])
    torch.testing.assert_close(stock_logits(folder), logits_BTV(state, IDS)[..., :24], atol=1e-5, rtol=0)
    checkpoint = write_checkpoint(tmp_path / "odd.pt", random_state(vocab_size=27), args={"vocab_size": 27})
    with pytest.raises(UserError, match="27 rows and the tokenizer 24 entries"):
        import_nanogpt(checkpoint, tmp_path / "odd", "char", characters)
    characters.write_text(CHARACTERS + "xyz!")
    checkpoint = write_checkpoint(tmp_path / "few.pt", random_state())
    with pytest.raises(UserError, match="24 rows and the tokenizer 28 entries"):
        import_nanogpt(checkpoint, tmp_path / "few", "char", characters)
    assert not list(tmp_path.glob("*odd")) and not list(tmp_path.glob("*few"))


def test_without_a_tokenizer_the_model_alone_is_written_and_reported(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", random_state())
    report = "\n".join(import_nanogpt(checkpoint, tmp_path / "model", None, None))
    assert "contains only the model, with all its 24 rows" in report and "without a tokenizer" in report
    assert stock_logits(tmp_path / "model").shape == (2, 15, 24)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_checkpoint(tmp_path / "model")


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_never_run(tmp_path):
    proof = tmp_path / "ran"
    content = {"model": random_state(), "model_args": ARGS, "config": RunsCode(proof)}
    torch.save(content, tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(RunsCode(proof)))
    fine = write_checkpoint(tmp_path / "fine.pt", random_state())
    for arguments, named in (
        ((tmp_path / "ckpt.pt", tmp_path / "model", None, None), "mkdir, and code in a file is never run"),
        ((tmp_path / "meta.pkl", tmp_path / "model", None, None), "never run"),
        ((fine, tmp_path / "model", str(tmp_path / "meta.pkl"), None), "--tokenizer char --text"),
    ):
        with pytest.raises(UserError, match=named):
            import_nanogpt(*arguments)
    assert not proof.exists() and not (tmp_path / "model").exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)  # the file would have run it
    assert proof.exists()


def changed(name, change):
    def apply(state):
        return {**state, name: change(state[name])}

    return apply


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


WTE, PROJECTION = "transformer.wte.weight", "transformer.h.1.attn.c_proj.weight"


@pytest.mark.parametrize(
    ("damage", "args", "named"),
    [
        (without(PROJECTION), {}, f"{PROJECTION} is missing"),
        (without(WTE), {}, f"{WTE} is missing"),
        (without("transformer.ln_f.bias"), {}, "transformer.ln_f.bias is missing"),
        (changed(PROJECTION, lambda value: value[:5]), {}, r"c_proj.weight has shape \(5, 32\)"),
        (changed(PROJECTION, lambda value: value * torch.nan), {}, "c_proj.weight contains NaN or infinity"),
        (changed(PROJECTION, lambda value: value.int()), {}, "c_proj.weight is not a tensor of floating-point"),
        (changed(WTE, lambda value: "text"), {}, f"{WTE} is not a tensor"),
        (
            lambda state: {**state, "transformer.h.0.rotary": torch.ones(3)},
            {},
            "unexpected tensors: transformer.h.0.rotary",
        ),
        (dict, {"n_layer": 10**9}, "n_layer=1000000000, but the tensors are those of 2 layers"),
        (dict, {"n_head": 5}, "n_embd=32 is not divisible by model.n_head=5"),
        (dict, {"vocab_size": 50304}, r"wte.weight has shape \(24, 32\), but model_args implies \(50304, 32\)"),
        (dict, {"vocab_size": "many"}, "vocab_size=many"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_in_one_line(tmp_path, damage, args, named):
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", damage(random_state()), args=args)
    with pytest.raises(UserError, match=named) as refused:
        import_nanogpt(checkpoint, tmp_path / "model", None, None)
    assert str(checkpoint) in refused.value.problems[0] and not (tmp_path / "model").exists()


@pytest.mark.parametrize("content", [b"", b"hello world" * 9, b"PK\x03\x04" + b"0" * 99])
def test_files_that_are_none_of_nanogpts_are_refused(tmp_path, content):
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"ckpt\.pt"):
        import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "model", None, None)
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="not a nanoGPT checkpoint"):
        import_nanogpt(tmp_path / "other.pt", tmp_path / "model", None, None)
    with pytest.raises(UserError, match="no such file"):
        import_nanogpt(tmp_path / "none.pt", tmp_path / "model", None, None)


@pytest.mark.unix_only
def test_nothing_is_overwritten(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", random_state())
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("model", "link"):
        with pytest.raises(UserError, match="already exists"):
            import_nanogpt(checkpoint, tmp_path / name, None, None)
        with pytest.raises(UserError, match="already exists"):
            export(tmp_path, tmp_path / name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a run with GPT-2's rarer attention settings."""
    from hfgpt import PretrainConfig

    root = tmp_path_factory.mktemp("exchange")
    (root / "text.txt").write_text("".join(f"{n * n % 97} words, line {n}.\n" for n in range(600)))
    model = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "scale_attn_by_inverse_layer_idx": True}
    model |= {"scale_attn_weights": False}
    settings = {"sequence_length": 16, "max_steps": 2, "eval_steps": 0, "mixed_precision": "no", "torch_compile": False}
    settings |= {"dataset": str(root / "text.txt"), "tokenizer": "bpe-300", "learning_rate": 1e-2}
    return trained(PretrainConfig(output_dir=str(root / "run"), model=model, **settings)).folder.checkpoint(2)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "untie_head"), [("float32", True), ("bfloat16", False)])
def test_an_exported_folder_is_plain_and_says_what_it_is(checkpoint, tmp_path, dtype, untie_head):
    folder = tmp_path / "model"
    command = ["export", str(checkpoint), str(folder), "--dtype", dtype, *(["--untie_head"] if untie_head else [])]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and f"in {dtype}, with its tokenizer" in done.stdout
    assert not (folder / "training_state").exists() and verify(folder)["problems"] == []
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = StockGPT2.from_pretrained(folder)
    expected = set(model.state_dict() if untie_head else model.transformer.state_dict())
    assert stored.keys() == expected and {value.dtype for value in stored.values()} == {getattr(torch, dtype)}
    assert (model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()) != untie_head
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == dtype and config["tie_word_embeddings"] != untie_head
    assert config["scale_attn_by_inverse_layer_idx"] and not config["scale_attn_weights"]
    for name in ("tokenizer.json", "generation_config.json"):
        assert (folder / name).read_text() == (checkpoint / name).read_text()
    assert f"parameters in {dtype}." in (folder / "README.md").read_text()
    if dtype == "float32":
        assert stock_logits(folder).equal(stock_logits(checkpoint))


CLEAN = """
import sys, warnings
sys.modules["hfgpt"] = None
warnings.simplefilter("error")
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=sys.argv[2])
assert len(AutoTokenizer.from_pretrained(sys.argv[1])) == config.vocab_size and not hasattr(config, "auto_map")
torch.save(model(torch.arange(30).view(2, 15) % 20).logits.detach(), sys.argv[3])
"""


@pytest.mark.slow
def test_stock_transformers_gives_our_logits_in_both_kinds_of_attention(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "model")
    ours = GPT2LMHeadModel.from_pretrained(checkpoint)(IDS).logits.detach()
    for kind in ("eager", "sdpa"):
        command = [sys.executable, "-c", CLEAN, str(tmp_path / "model"), kind, str(tmp_path / "logits.pt")]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), ours, atol=1e-5, rtol=0)


def test_float16_that_would_overflow_and_broken_checkpoints_are_refused(tmp_path):
    tokenizer = load_tokenizer("char", lambda: [CHARACTERS], 16)
    model = new_model({"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}, tokenizer, seed=0)
    model.transformer.ln_f.weight.data[3] = -70000.0
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    with pytest.raises(UserError, match=r"transformer\.ln_f\.weight contains 70000, above the limit of 65504"):
        export(tmp_path / "model", tmp_path / "out", "float16")
    export(tmp_path / "model", tmp_path / "out", "bfloat16")
    (tmp_path / "out" / "README.md").write_text("changed")
    with pytest.raises(UserError, match=r"README\.md has 7 bytes"):
        export(tmp_path / "out", tmp_path / "again")


def test_what_an_export_reads_from_elsewhere_is_made_whole(tmp_path):
    """Old mask buffers and padded rows are left behind; the stock folder says no model_max_length."""
    tokenizer = load_tokenizer("bpe-300", lambda: [CHARACTERS], 10**30)
    model = new_model({"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}, tokenizer, seed=0)
    model.resize_token_embeddings(-(-len(tokenizer) // 64) * 64)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    buffers = {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.ones(1)}
    save_file({**tensors, **buffers}, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    entries = len(tokenizer)
    dropped = len(model.transformer.wte.weight) - entries
    assert dropped and f"left out {dropped} rows" in export(tmp_path / "model", tmp_path / "out")[0]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys() and len(written["wte.weight"]) == entries
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 16
    assert (tmp_path / "out" / "README.md").read_text().count("exported with hfgpt from model") == 1
