"""`--init_from`: a run begins as the checkpoint it starts from, and needs it no more once it has begun."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from nanogpt_like import logits_BTV, random_state, write_checkpoint
from running import ROOT, StopAt, prepared, records, same_weights, trained
from safetensors.torch import load_file, save_file
from transformers import GPT2Config
from transformers import GPT2LMHeadModel as StockGPT2

from hfgpt import PretrainConfig
from hfgpt.checkpointing.audit import audit
from hfgpt.errors import UserError
from hfgpt.hub.import_export import export
from hfgpt.model.modeling_gpt2 import to_parameter_names
from hfgpt.training.evaluating import evaluate


def names_nothing(config):
    """Settings without a model and tokenizer of their own."""
    return lambda name="run", **changes: config(name, **{"model": "auto", "tokenizer": "auto", **changes})


@pytest.fixture
def begun(config):
    """A run on characters with an evaluation at its end, and settings for one that starts from it."""
    return trained(config("first", eval_steps=6)), names_nothing(config)


def test_a_run_begins_with_the_loss_and_weights_of_its_checkpoint(begun):
    first, settings = begun
    folder = first.folder.path / "checkpoint-latest"
    run = prepared(settings(init_from=str(folder), seed=5))
    assert same_weights(run, first)
    assert evaluate(run)["eval_loss"] == first.progress.evaluation["eval_loss"]
    assert run.data.tokenizer.get_vocab() == first.data.tokenizer.get_vocab()
    assert run.step.model.config.n_layer == 2 and run.progress.step == 0
    assert run.config.init_from == str(folder.resolve())


def test_the_fact_is_recorded_and_a_resumed_run_does_not_need_the_source(begun, caplog):
    first, settings = begun
    folder, start = first.folder.checkpoint(6), {"init_from": str(first.folder.checkpoint(6))}
    whole = trained(settings("whole", **start))
    with pytest.raises(KeyboardInterrupt):
        trained(settings("part", **start), StopAt(5))
    shutil.rmtree(folder)
    resumed = trained(settings("part", **start, resume_from_checkpoint="latest"))
    assert same_weights(whole, resumed)
    assert [line["loss"] for line in records(whole)] == [line["loss"] for line in records(resumed)]
    run = json.loads(resumed.folder.run_json.read_text())
    assert run["config"]["init_from"] == str(folder) and run["config"]["model"]["n_layer"] == 2
    assert "| initial weights | those of checkpoint-6 |" in (resumed.folder.checkpoint(6) / "README.md").read_text()
    assert f"start from {folder}" in "\n".join(resumed.plan.lines())
    (record,) = records(resumed, "changed_settings")
    assert not record["changed_settings"] and "is not read" not in caplog.text
    assert audit(resumed.folder.path)["problems"] == []
    relative = os.path.relpath(folder)  # as the same command may have it, from the same place
    trained(settings("part", init_from=relative, resume_from_checkpoint="latest", max_steps=7))
    assert "is not read" not in caplog.text
    trained(settings("part", init_from="elsewhere", resume_from_checkpoint="latest", max_steps=8))
    assert f"began from {folder}" in caplog.text
    with pytest.raises(UserError, match="began from random weights; leave it out, or choose another output_dir"):
        trained(settings("first", init_from=str(resumed.folder.checkpoint(6)), resume_from_checkpoint="latest"))


def test_parameters_are_float32_and_old_buffers_and_padding_are_left_behind(begun, tmp_path):
    first, settings = begun
    export(first.folder.checkpoint(6), tmp_path / "half", "bfloat16")
    path = tmp_path / "half" / "model.safetensors"
    tensors = load_file(path)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.ones(1)}
    rows = tensors["wte.weight"]
    padded = torch.cat([rows, torch.ones(-len(rows) % 64, 32, dtype=rows.dtype)])
    save_file({**tensors, **masks, "wte.weight": padded}, path, metadata={"format": "pt"})
    described = json.loads((tmp_path / "half" / "config.json").read_text())
    (tmp_path / "half" / "config.json").write_text(json.dumps({**described, "vocab_size": len(padded)}))
    state = prepared(settings(init_from=str(tmp_path / "half"))).step.model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert all(state[name].equal(value.float()) for name, value in to_parameter_names(tensors).items())
    with pytest.raises(UserError, match="only a model; to start a run from its weights, use --init_from"):
        trained(settings(resume_from_checkpoint=str(tmp_path / "half")))


def test_a_nanogpt_checkpoint_goes_on_with_a_stated_tokenizer(config, tmp_path):
    settings = names_nothing(config)
    text = tmp_path / "characters.txt"
    text.write_text("\n abcdefghijklmnopqrstu." * 50)
    state = random_state()
    checkpoint = str(write_checkpoint(tmp_path / "ckpt.pt", state, "_orig_mod."))
    with pytest.raises(UserError, match="no tokenizer of its own; set --tokenizer"):
        trained(settings(dataset=str(text), init_from=checkpoint))
    run = prepared(settings(dataset=str(text), init_from=checkpoint, tokenizer="char"))
    ids = torch.arange(16)[None]
    with torch.no_grad():
        logits = run.step.model.eval()(ids).logits
    torch.testing.assert_close(logits, logits_BTV(state, ids), atol=1e-5, rtol=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"n_layer": 3}}, r"model\.n_layer=3: init_from=.* has 2; leave out model"),
        ({"model": "char-cpu"}, r"n_layer=4: .*; .*n_embd=128: "),
        ({"sequence_length": 33}, "sequence_length=33: is above the 32 positions of init_from"),
        ({"tokenizer": "bpe-300"}, "tokenizer=bpe-300: a newly trained tokenizer does not fit"),
        ({"init_from": "nowhere/at-all"}, "init_from=nowhere/at-all: no such file or folder, and not usable"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(begun, tmp_path, changes, named):
    first, settings = begun
    with pytest.raises(UserError) as refused:
        trained(settings("second", **{"init_from": str(first.folder.checkpoint(6)), **changes}))
    assert re.search(named, "; ".join(refused.value.problems)) and not (tmp_path / "second").exists()


def test_other_models_and_tokenizers_are_refused_by_name(begun, tmp_path, text_file, caplog):
    first, settings = begun
    folder = Path(shutil.copytree(first.folder.checkpoint(6), tmp_path / "copy"))
    text_file.write_text(text_file.read_text() + "ÄÖÜ")
    rows = first.step.model.config.vocab_size
    with pytest.raises(UserError, match=rf"the model has {rows} rows and the tokenizer {rows + 3} entries"):
        trained(settings(init_from=str(folder), tokenizer="char"))
    text_file.write_text(text_file.read_text().replace("ÄÖÜ", "").replace("w", "Ä"))
    prepared(settings(init_from=str(folder), tokenizer="char"))
    assert "its ids stand for different tokens" in caplog.text
    described = json.loads((folder / "config.json").read_text())
    for changed, named in (({"model_type": "llama"}, "model_type is llama"), ({"n_head": 5}, "not divisible")):
        (folder / "config.json").write_text(json.dumps({**described, **changed}))
        with pytest.raises(UserError, match=named):
            trained(settings(init_from=str(folder)))


def test_dropout_may_be_stated_and_is_else_the_checkpoints(begun):
    first, settings = begun
    source = str(first.folder.checkpoint(6))
    changed = prepared(settings("second", init_from=source, model={"n_layer": 2, "resid_pdrop": 0.1}))
    assert changed.step.model.config.resid_pdrop == 0.1 and changed.step.model.config.n_embd == 32
    later = trained(settings("third", init_from=source, model={"resid_pdrop": 0.1}))
    last = prepared(settings(init_from=str(later.folder.checkpoint(6))))
    assert last.step.model.config.resid_pdrop == 0.1


def test_a_recipes_own_model_and_tokenizer_give_way_to_the_checkpoints():
    recipe = {"model": "char-cpu", "tokenizer": "char", "max_steps": 5}
    config = PretrainConfig.from_cli(recipe, ["--init_from", "some/model"])
    assert (config.model, config.tokenizer, config.max_steps) == ("auto", "auto", 5)
    assert PretrainConfig.from_cli(recipe, ["--init_from", "x/y", "--tokenizer", "char"]).tokenizer == "char"
    for argv in ([], ["--init_from", "none"]):
        assert PretrainConfig.from_cli({**recipe, "sequence_length": 64}, argv).model == "char-cpu"
    usual = PretrainConfig(max_steps=5)
    assert (usual.model, usual.tokenizer) == ("gpt2-125m", "gpt2")


def test_a_recipes_tokenizer_and_lengths_serve_weights_that_have_none(config, tmp_path, capsys):
    (tmp_path / "characters.txt").write_text("\n abcdefghijklmnopqrstu." * 50)
    checkpoint = write_checkpoint(tmp_path / "ckpt.pt", random_state(), "_orig_mod.")
    recipe = {**config().to_dict(), "model": "gpt2-125m", "sequence_length": 64, "tokens_per_step": 4096}
    recipe |= {"gradient_accumulation_steps": None, "max_tokens": None, "num_train_epochs": None, "max_steps": 1}
    flags = ["--init_from", str(checkpoint), "--dataset", str(tmp_path / "characters.txt"), "--save_steps", "0"]
    run = trained(PretrainConfig.from_cli(recipe, flags))
    positions = run.step.model.config.n_positions
    assert run.config.tokenizer == "char" and run.config.sequence_length == positions < 64
    assert run.step.batch.tokens_per_step == 4096
    recorded = run.folder.facts()["gave_way"]
    assert (
        recorded["sequence_length"] == {"recipe": 64, "now": positions} and recorded["model"]["recipe"] == "gpt2-125m"
    )
    assert (
        f"sequence_length: {positions}, because the recipe's 64 conflicts with your settings" in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="sequence_length=64: is above"):
        trained(
            PretrainConfig.from_cli(recipe, [*flags, "--sequence_length", "64", "--output_dir", str(tmp_path / "b")])
        )


def test_a_recipes_document_masking_gives_way_to_a_tokenizer_without_separator(config, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(("a", "b", "[UNK]"))}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    (tmp_path / "words.txt").write_text("a b b a " * 500)
    values = {key: value for key, value in config().to_dict().items() if value is not None}
    recipe = {**values, "document_masking": True, "dataset": str(tmp_path / "words.txt")}
    flags = ["--tokenizer", str(tmp_path / "words")]
    run = prepared(PretrainConfig.from_cli(recipe, flags))
    assert not run.config.document_masking and run.config.gave_way["document_masking"] == (True, False)
    with pytest.raises(UserError, match="document_masking"):
        prepared(PretrainConfig.from_cli(recipe, [*flags, "--document_masking", "true"]))


def test_what_a_recipe_says_of_its_own_text_gives_way_to_the_text_that_is_stated(config, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {n} of a text"}}\n' for n in range(500)))
    values = {key: value for key, value in config().to_dict().items() if value is not None}
    recipe = {**values, "dataset": "user/corpus", "dataset_name": "part", "text_column": "content"}
    recipe["eval_dataset"] = "validation"
    for file in (tmp_path / "a.jsonl", tmp_path / "text.txt"):
        run = prepared(PretrainConfig.from_cli(recipe, ["--dataset", str(file)]))
        gave_way = {key: now for key, (_, now) in run.config.gave_way.items()}
        assert gave_way == {"dataset_name": None, "text_column": "text", "eval_dataset": None}
    with pytest.raises(UserError, match="text_column=content"):
        prepared(PretrainConfig.from_cli(recipe, ["--dataset", str(file), "--text_column", "content"]))


HUB_RUN = """
import sys
from hfgpt import PretrainConfig, Pretrainer, run_recipe

def main():
    Pretrainer(PretrainConfig.from_cli({"model": "gpt2-125m"})).train()

if __name__ == "__main__":
    run_recipe(main)
"""


@pytest.mark.slow
def test_a_model_of_the_hub_is_pinned_and_fetched_by_the_main_process_alone(tmp_path, text_file):
    """Two processes; the model is as OpenAI's: keys without a prefix, mask buffers, vocab.json and merges.txt."""
    from hfgpt.data.tokenization import load_tokenizer

    tokenizer = load_tokenizer("bpe-300", lambda: [text_file.read_text()], 32)
    folder = tmp_path / "source"
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": len(tokenizer)}
    stock = StockGPT2(GPT2Config(**sizes, **ids))
    stock.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, folder / "model.safetensors", {"format": "pt"})
    tokenizer.backend_tokenizer.model.save(str(folder))
    (folder / "training.bin").write_bytes(b"not wanted")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    recipe = tmp_path / "recipe.py"
    recipe.write_text(HUB_RUN)
    flags = ["--dataset", str(text_file), "--sequence_length", "16", "--per_device_train_batch_size", "2"]
    flags += ["--eval_steps", "0", "--logging_steps", "1", "--torch_compile", "false", "--mixed_precision", "no"]
    flags += ["--init_from", "user/model", "--output_dir", str(tmp_path / "run"), "--learning_rate", "1e-9"]
    flags += ["--mfu_peak_tflops", "1"]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with HubServer({"models/user/model": files}) as hub:
        env = {**os.environ, **hub.environment(tmp_path / "home"), "ACCELERATE_USE_CPU": "true"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*two, str(recipe), *flags, "--max_steps", "2"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
        assert done.returncode == 0, done.stderr
        asked = [path for method, path, _ in hub.requests if method == "GET" and path.endswith("/model.safetensors")]
        assert len(asked) == 1 and not any("training.bin" in path for _, path, _ in hub.requests)
        commit, before = hub.commit("models/user/model"), len(hub.requests)
        command = [sys.executable, str(recipe), *flags, "--max_steps", "3", "--resume_from_checkpoint", "latest"]
        command += ["--gradient_accumulation_steps", "2"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
        assert done.returncode == 0, done.stderr
        assert "is not read" not in done.stderr and hub.requests[before:] == []
    weights = to_parameter_names(load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors"))
    assert all(torch.allclose(weights[name], value, atol=1e-6) for name, value in tensors.items())
    card = (tmp_path / "run" / "checkpoint-3" / "README.md").read_text()
    assert f"initial weights | those of user/model@{commit}" in card and "base_model: user/model\n" in card
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["init_from"] == f"user/model@{commit}"
