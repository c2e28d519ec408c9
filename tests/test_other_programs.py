"""What other programs read of a checkpoint: names of parameters, special tokens, padding; and older layouts of ours.

`other_programs.py` compares the programs themselves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import other_programs
import pytest
import torch
from running import MODEL, records, trained
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers import GPT2LMHeadModel as StockGPT2

from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.hub.import_export import export
from hfgpt.hub.verify import verify
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel, new_model

HERE = Path(__file__).parent
OLD = HERE / "data" / "prefixed_names"  # a checkpoint whose parameters begin with `transformer.`
TEXT = "".join(f"{n * n % 97} words, line {n}: the {n % 13}th.\n" for n in range(300))
PROMPTS = ["the", "12 words, line 7: the 3th.\n5 words"]


def external(side="right", **special) -> PreTrainedTokenizerFast:
    """Whole words, with these special tokens at the first ids."""
    words = dict.fromkeys(["[UNK]", *special.values(), *sorted(set(TEXT.split()))])
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side=side, model_max_length=64, **special)


KINDS = {
    "bpe": lambda: load_tokenizer("bpe-300", lambda: [TEXT], 64),
    "Llama's": lambda: external(bos_token="<s>", eos_token="</s>", unk_token="[UNK]"),
    "its own pad": lambda: external(bos_token="<s>", eos_token="</s>", pad_token="<pad>"),
    "Qwen's": lambda: external(eos_token="<|endoftext|>"),
    "BERT's": lambda: external(unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"),
    "unk alone": lambda: external(unk_token="[UNK]"),
}


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    """A model of each kind of tokenizer as we save it, and the tokenizer as it was."""
    tokenizer = KINDS[request.param]()
    model = new_model({**MODEL, "n_positions": 64, "initializer_range": 0.2}, tokenizer, seed=0)
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    return tmp_path, tokenizer


def test_prompts_of_different_lengths_are_continued_as_each_alone(saved, caplog, recwarn):
    folder, _ = saved
    tokenizer, model = AutoTokenizer.from_pretrained(folder), StockGPT2.from_pretrained(folder)
    settings = {"max_new_tokens": 12, "do_sample": False}
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert batch.keys() == {"input_ids", "attention_mask"} and 0 in batch["attention_mask"]
    width = batch["input_ids"].shape[1]
    together = tokenizer.batch_decode(model.generate(**batch, **settings)[:, width:], skip_special_tokens=True)
    alone = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :]
        alone.append(tokenizer.decode(new, skip_special_tokens=True))
    assert together == alone and any(alone)
    assert not caplog.records and not [str(w.message) for w in recwarn if w.category is not DeprecationWarning]


def test_the_tokens_that_stand_for_missing_ones_change_no_ids(saved):
    folder, before = saved
    after, config = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    texts = [*PROMPTS, TEXT, "zebra </s>", "a <|endoftext|> b", ""]
    assert [after(text).input_ids for text in texts] == [before(text).input_ids for text in texts]
    assert after.get_vocab() == before.get_vocab() and len(after) == config["vocab_size"]
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(before, name) in (None, getattr(after, name))
    assert after.eos_token == before.eos_token  # it ends texts, so nothing may stand for it
    assert after.pad_token is not None and after.unk_token is not None
    stated = [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert stated == [after.bos_token_id, after.eos_token_id, before.pad_token_id]


def test_a_tokenizer_of_characters_stays_without_special_tokens_and_the_card_says_how_to_use_it(config):
    """A token of text made special would be missing in decoded text, and a new one would be a row more."""
    folder = trained(config(model={**MODEL, "n_positions": 64})).folder.checkpoint(6)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.all_special_tokens == [] and tokenizer.padding_side == "left"
    assert len(tokenizer) == model.config.vocab_size
    ids = tokenizer("12 words\n").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12 words\n"
    card = (folder / "README.md").read_text()
    assert "leaves out characters that it does not know" in card
    assert f"prefix_token_id={tokenizer.get_vocab()[chr(10)]}" in card
    # The card's code, as it stands.
    space = {"tokenizer": tokenizer, "model": model, "prompts": ["the\n", "12 words, line"]}
    exec(card.split("## Tokenizer")[1].split("```python\n")[1].split("```")[0], space)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, text in zip(space["prompts"], space["texts"], strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**inputs, max_new_tokens=20)[0, len(prompt) :]
        assert text == tokenizer.decode(alone)


def test_the_card_of_other_tokenizers_says_nothing_of_characters(config):
    folder = trained(config(tokenizer="bpe-300", max_steps=2)).folder.checkpoint(2)
    assert "## Tokenizer" not in (folder / "README.md").read_text()


@pytest.mark.slow
def test_verify_names_what_gives_a_batch_of_prompts_wrong_text(tmp_path):
    tokenizer = KINDS["Qwen's"]()
    new_model({**MODEL, "n_positions": 64}, tokenizer, seed=0).save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    assert verify(tmp_path)["problems"] == []
    path = tmp_path / "tokenizer_config.json"
    stated = json.loads(path.read_text())
    del stated["pad_token"], stated["model_input_names"]
    path.write_text(json.dumps({**stated, "padding_side": "right"}))
    problems = "; ".join(verify(tmp_path)["problems"])
    assert all(named in problems for named in ("pads on the right", "no pad token", "token_type_ids"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_both_layouts_of_names_load_bit_equal_here_and_in_stock_transformers(tmp_path, tied, prefix):
    tokenizer, ids = KINDS["bpe"](), torch.arange(40)[None]
    model = new_model({**MODEL, "n_positions": 64, "tie_word_embeddings": tied}, tokenizer, seed=0).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, expected = load_file(path), model.state_dict()
    # transformers 4 takes a head beside names without the prefix for a damaged file.
    assert tensors.keys() == set(model.transformer.state_dict() if tied else expected)
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    other = {name if name == "lm_head.weight" else prefix + name: value for name, value in bare.items()}
    save_file(other, path, metadata={"format": "pt"})
    for kind in (GPT2LMHeadModel, StockGPT2, AutoModelForCausalLM):
        loaded, info = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        state = loaded.state_dict()
        assert state.keys() == expected.keys() and all(state[name].equal(expected[name]) for name in expected)
    headless, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and headless.wte.weight.equal(expected["transformer.wte.weight"])
    torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits)


def test_a_checkpoint_of_an_earlier_version_resumes_as_it_would_have_gone_on(config, text_file, monkeypatch):
    """Its text is that of the fixture; the losses are those that the earlier version went on with."""
    monkeypatch.chdir(text_file.parent)
    shutil.copytree(OLD / "checkpoint-4", "old/checkpoint-4")
    said = json.loads((OLD / "checkpoint-4" / "training_state" / "trainer_state.json").read_text())["config"]
    keys = ("model", "sequence_length", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    keys += ("learning_rate", "warmup_steps", "eval_steps", "eval_tokens", "save_steps", "dataset")
    settings = {key: said[key] for key in keys}
    resumed = trained(config("resumed", **settings, resume_from_checkpoint="old/checkpoint-4"))
    losses = json.loads((OLD / "losses.json").read_text())
    found = {str(line["step"]): line["loss"] for line in records(resumed) if line["step"] > 4}
    assert found == pytest.approx({step: loss for step, loss in losses.items() if step != "eval"}, abs=1e-5)
    assert records(resumed, "eval_loss")[-1]["eval_loss"] == pytest.approx(losses["eval"], abs=1e-5)
    new = load_file(resumed.folder.checkpoint(8) / "model.safetensors")
    assert "wte.weight" in new and not any(name.startswith("transformer.") for name in new)


@pytest.mark.slow
def test_an_export_of_an_earlier_version_is_as_those_of_today(tmp_path):
    export(OLD / "checkpoint-4", tmp_path / "out")
    assert verify(tmp_path / "out")["problems"] == []
    old, new = (load_file(folder / "model.safetensors") for folder in (OLD / "checkpoint-4", tmp_path / "out"))
    assert {f"transformer.{name}" for name in new} == old.keys()
    assert all(value.equal(old[f"transformer.{name}"]) for name, value in new.items())


@pytest.mark.slow
@pytest.mark.parametrize("program", other_programs.PROGRAMS)
@pytest.mark.parametrize("tokenizer", ["char", "bpe-300"])
def test_a_program_gives_the_answers_of_stock_transformers(tmp_path, tokenizer, program):
    """With those that are installed."""
    made = load_tokenizer(tokenizer, lambda: [TEXT], 64)
    new_model({**MODEL, "n_positions": 64, "initializer_range": 0.2}, made, seed=0).save_pretrained(tmp_path)
    save_tokenizer(made, tmp_path)
    compare, _, tolerance = other_programs.PROGRAMS[program]
    try:
        difference = compare(other_programs.Checkpoint(tmp_path, TEXT[:60]))
    except other_programs.Skip as reason:
        pytest.skip(str(reason))
    assert difference <= tolerance
