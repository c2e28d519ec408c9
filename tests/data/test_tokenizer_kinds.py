"""What holds for any tokenizer that transformers loads: rows, separators, completeness, bytes, losses, samples."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from kinds import END, KINDS, ODD, WORDS, byte_level, folder_of, gaps, word_level
from running import MODEL, hashes, prepared, records, trained
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import hfgpt.evaluation.generate as generation
from hfgpt import PretrainConfig, Pretrainer
from hfgpt.data.encoding import Encoder
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.errors import UserError
from hfgpt.evaluation.evaluate import evaluate_checkpoint, score_text
from hfgpt.evaluation.generate import generate
from hfgpt.evaluation.loading import load_checkpoint
from hfgpt.hub.import_export import export
from hfgpt.hub.verify import verify
from hfgpt.model.configuration_gpt2 import model_rows
from hfgpt.training.callbacks import SampleCallback
from hfgpt.training.run import TrainingRun

SPECIAL_TEXT = " ".join(
    ["<unk>", "<s>", "</s>", "[UNK]", "[SEP]", "[CLS]", "<pad>", "<extra_id_0>", END, "<|im_start|>"]
)
# Some lines end without a line end, some are short, some hold what names a special token.
TEXTS = [text if n % 3 else text.strip() for n, text in enumerate(WORDS)]
TEXTS[::50] = [f"{text.strip()} {SPECIAL_TEXT}" for text in TEXTS[::50]]
HELD_OUT = [f"the {n}th costs {n % 5}, MENENIUS" for n in range(1, 40)] + [f"{SPECIAL_TEXT} {SPECIAL_TEXT}"]
CHARACTERS = "".join(sorted({*"".join(TEXTS + HELD_OUT)}))
WITHOUT_EOS = {"bytes, left on, no eos", "bert", "char"}
LOSSY = {"bytes, not all", "unigram", "t5", "bert", "words"}


def written(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def settings(folder: Path, tokenizer: str, **changes) -> PretrainConfig:
    return PretrainConfig(
        **{
            "output_dir": str(folder / "run"),
            "model": MODEL,
            "dataset": written(folder / "text.jsonl", [CHARACTERS, *TEXTS]),
            "eval_dataset": written(folder / "held_out.jsonl", HELD_OUT),
            "tokenizer": tokenizer,
            "sequence_length": 16,
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "logging_steps": 1,
            "eval_steps": 3,
            "save_steps": 0,
            "mixed_precision": "no",
            "torch_compile": False,
            **changes,
        }
    )


@dataclass
class Trained:
    kind: str
    folder: Path
    run: TrainingRun

    @property
    def checkpoint(self) -> Path:
        return self.run.folder.checkpoint(3)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.run.data.tokenizer


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory) -> Trained:
    """A run of three steps with a tokenizer of each kind, which all properties share."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    folder = tmp_path_factory.mktemp("kind")
    tokenizer = KINDS[request.param](folder / "tokenizer")
    return Trained(request.param, folder, trained(settings(folder, tokenizer)))


def plan(run: TrainingRun) -> str:
    return "\n".join(run.plan.lines())


def test_the_model_has_a_row_for_each_id(kind):
    rows = max(kind.tokenizer.get_vocab().values()) + 1
    model = AutoModelForCausalLM.from_pretrained(kind.checkpoint)
    assert model.config.vocab_size == len(model.transformer.wte.weight) == rows
    assert int(kind.run.data.train.tokens.max()) < rows


def test_text_never_makes_a_special_token(kind):
    data, tokenizer = kind.run.data, kind.tokenizer
    unknown = Encoder(tokenizer).unknown_id  # stands for what the tokenizer lacks, and is counted
    special = {*tokenizer.all_special_ids} - {unknown}
    if kind.kind in WITHOUT_EOS:
        assert special.isdisjoint(data.train.tokens) and special.isdisjoint(data.validation)
    else:
        for tokens, texts in ((data.train.tokens, [CHARACTERS, *TEXTS]), (data.validation, HELD_OUT)):
            assert (tokens == tokenizer.eos_token_id).sum() == len(texts)
            assert special & {*tokens.tolist()} == {tokenizer.eos_token_id}


def test_encoding_is_complete_or_what_it_lacks_is_counted(kind, capsys):
    data, tokenizer = kind.run.data, kind.tokenizer
    encoder = Encoder(load_tokenizer(str(kind.checkpoint), lambda: (), 32))
    lost = {reason.removeprefix("eval_") for reason in data.skipped}
    assert bool(lost) == (kind.kind in LOSSY)
    assert ("text that the tokenizer does not represent" in plan(kind.run)) == (kind.kind in LOSSY)
    assert records(kind.run, "skipped_rows")[-1]["skipped_rows"] == dict(data.skipped)
    if kind.kind not in LOSSY:
        for text in ["Item 3", " what  say\nyou ", "?"]:
            [document] = encoder.documents([text])
            ids = document.ids[int(encoder.separator_id is not None) :]
            decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            assert decoded.removesuffix("\n" * document.joints) in (text, f" {text}")


def test_bits_per_byte_are_over_the_bytes_of_the_text_or_null_with_a_reason(kind):
    [record] = records(kind.run, "eval_loss")
    if kind.kind in LOSSY:
        assert record["eval_bits_per_byte"] is None and "bits per byte: null, because the tokenizer does not" in plan(
            kind.run
        )
        return
    size = sum(len(text.encode()) for text in HELD_OUT)
    if kind.kind in WITHOUT_EOS:  # the line ends that join the documents, without the first character
        size += len(HELD_OUT) - 1 - len(kind.tokenizer.decode(kind.run.data.validation[:1]))
    assert record["eval_bits_per_byte"] == pytest.approx(
        record["eval_loss"] * record["eval_tokens"] / math.log(2) / size, rel=1e-9
    )


def evaluated(checkpoint: Path, dataset: str, **options):
    return evaluate_checkpoint(str(checkpoint), lambda subject: score_text(subject, {"dataset": dataset}, **options))


def test_evaluate_gives_the_loss_of_the_run(kind):
    [record] = records(kind.run, "eval_loss")
    found = evaluated(kind.checkpoint, str(kind.folder / "held_out.jsonl"))
    assert found["loss"] == pytest.approx(record["eval_loss"], rel=1e-5)
    assert found["scored_tokens"] == record["eval_tokens"]
    assert ("bits_per_byte_is_null" in found) == (found["bits_per_byte"] is None) == (kind.kind in LOSSY)
    if record["eval_bits_per_byte"]:
        assert found["bits_per_byte"] == pytest.approx(record["eval_bits_per_byte"], rel=1e-5)


def test_equal_runs_have_equal_ledgers_and_the_saved_tokenizer_gives_the_same_ids(kind):
    again = load_tokenizer(str(kind.checkpoint), lambda: (), 32)
    for one, other in zip(Encoder(kind.tokenizer).encode(TEXTS), Encoder(again).encode(TEXTS), strict=True):
        np.testing.assert_array_equal(one, other)
    assert Encoder(again).fingerprint == Encoder(kind.tokenizer).fingerprint
    same = prepared(settings(kind.folder, kind.run.config.tokenizer, output_dir=str(kind.folder / "again")))
    assert same.data.train.fingerprint == kind.run.data.train.fingerprint


def test_generated_text_is_what_decoding_adds_to_the_prompt(kind):
    model, tokenizer = load_checkpoint(kind.checkpoint)
    stock = AutoModelForCausalLM.from_pretrained(kind.checkpoint)
    options = {"temperature": 0, "max_new_tokens": 12}
    for prompt in ("what say you", "Item 3:"):
        pieces: list[str] = []
        [text] = generate(model, tokenizer, prompt, stream=lambda _, piece, to=pieces: to.append(piece), **options)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        new, used = ids, sorted(tokenizer.get_vocab().values())
        for _ in range(12):
            with torch.no_grad():
                likely = used[int(stock(new).logits[0, -1, used].argmax())]
            if likely == tokenizer.eos_token_id:
                break
            new = torch.cat([new, torch.tensor([[likely]])], 1)
        before, whole = (tokenizer.decode(row[0], clean_up_tokenization_spaces=False) for row in (ids, new))
        assert before + text == whole and "".join(pieces) == text


def test_documents_are_joined_as_stated_and_no_token_is_cut(kind):
    data, encoder = kind.run.data, Encoder(kind.tokenizer)
    alone = [*map(len, encoder.tokens(HELD_OUT))]
    if kind.kind == "bert":
        assert "documents: one after another with nothing between" in plan(kind.run)
        assert len(data.validation) == sum(alone)
    elif kind.kind in WITHOUT_EOS:
        assert "documents: a line end after each that has none" in plan(kind.run)
        assert len(data.validation) == sum(alone) + len(alone) - 1
    else:
        assert f"documents: {kind.tokenizer.eos_token} ({kind.tokenizer.eos_token_id}) before each" in plan(kind.run)
        assert len(data.validation) == sum(alone) + len(alone)


def test_an_empty_prompt_needs_a_token_to_begin_with(kind):
    model, tokenizer = load_checkpoint(kind.checkpoint)
    config = settings(kind.folder, kind.run.config.tokenizer, output_dir=str(kind.folder / "sampled"), sample_steps=2)
    if kind.kind in WITHOUT_EOS - {"char"}:
        for write in (lambda: generate(model, tokenizer, ""), lambda: Pretrainer(config).train()):
            with pytest.raises(UserError, match=r"^prompt: is empty, and the tokenizer has no end-of-text"):
                write()
        assert not (kind.folder / "sampled").exists()
    else:
        assert len(list(generate(model, tokenizer, "", max_new_tokens=3))) == 1


# One after another, what a single kind has of its own.


def loaded(backend: Tokenizer, path: Path, **tokens: str) -> PreTrainedTokenizerFast:
    return load_tokenizer(folder_of(lambda: backend, **tokens)(path), lambda: (), 32)


def test_bytes_without_a_token_are_counted_in_a_stream_and_over_a_resume(tmp_path):
    """Each document is counted once, when the run comes to it."""
    tokenizer = folder_of(lambda: byte_level(alphabet=[]), eos_token=END)(tmp_path / "tokenizer")
    texts = [f"Item {n}: the café costs 12€ in {n}" for n in range(400)]

    def count(name: str, *steps: int) -> tuple[dict[str, int], list[str], str]:
        for max_steps in steps:
            changes = {"dataset": written(tmp_path / "cafes.jsonl", texts), "streaming": True, "max_steps": max_steps}
            changes |= {"output_dir": str(tmp_path / name), "lr_scheduler_type": "constant", "warmup_steps": 0}
            if max_steps != steps[0]:
                changes["resume_from_checkpoint"] = "latest"
            run = trained(settings(tmp_path, tokenizer, **changes))
        return records(run, "skipped_rows")[-1]["skipped_rows"], hashes(run), plan(run)

    whole, ledger, told = count("whole", 6)
    lacking = {*texts[0].encode()} - {*"".join(WORDS).encode()}
    each = sum(byte in lacking for byte in texts[0].encode())  # two of é, three of €, and some letters
    assert whole["dropped_bytes"] == each * whole["changed_documents"] > 0
    assert count("resumed", 3, 6)[:2] == (whole, ledger)
    assert "bits per byte: null, because the tokenizer does not represent" in told


def test_dropout_of_merges_is_off(tmp_path):
    backend = byte_level(dropout=0.5)
    folder = folder_of(lambda: backend, eos_token=END)(tmp_path / "tokenizer")
    runs = [trained(settings(tmp_path, folder, output_dir=str(tmp_path / name))) for name in ("one", "other")]
    assert hashes(runs[0]) == hashes(runs[1])
    saved = Tokenizer.from_file(str(runs[0].folder.checkpoint(3) / "tokenizer.json"))
    assert len({tuple(saved.encode(WORDS[0]).ids) for _ in range(20)}) == 1


def test_a_space_before_each_document_is_no_byte_of_the_text(tmp_path):
    folder = folder_of(lambda: byte_level(prefix=True), eos_token=END)(tmp_path / "tokenizer")
    texts = [f"{n:03} costs 3" + "!" * (n < 34) for n in range(400)]
    assert sum(map(len, texts)) == 4434
    run = trained(settings(tmp_path, folder, eval_dataset=written(tmp_path / "short.jsonl", texts)))
    [record] = records(run, "eval_loss")
    bits = record["eval_loss"] * record["eval_tokens"] / math.log(2)
    assert record["eval_bits_per_byte"] == pytest.approx(bits / 4434, rel=1e-9)
    found = evaluated(run.folder.checkpoint(3), str(tmp_path / "short.jsonl"))
    assert found["scored_bytes"] == 4434 and found["bits_per_byte"] == pytest.approx(bits / 4434, rel=1e-5)


def test_ids_beyond_the_number_of_entries_reach_no_missing_row(tmp_path):
    folder = folder_of(gaps, eos_token="</s>")(tmp_path / "tokenizer")
    run = trained(settings(tmp_path, folder))
    tokenizer, rows = run.data.tokenizer, run.step.model.config.vocab_size
    assert rows == max(tokenizer.get_vocab().values()) + 1 > len(tokenizer)
    export(run.folder.checkpoint(3), tmp_path / "plain")
    stock, theirs = (loader.from_pretrained(tmp_path / "plain") for loader in (AutoModelForCausalLM, AutoTokenizer))
    assert stock(**theirs(WORDS[0] + "</s>", return_tensors="pt")).logits.shape[-1] == rows
    model, loaded = load_checkpoint(tmp_path / "plain")
    used = {*tokenizer.get_vocab().values()}
    with torch.no_grad():
        model.transformer.wte.weight[sorted({*range(rows)} - used)] *= 1000  # would take nearly all the mass
    picked = []
    loaded.decode = lambda ids, **_: picked.append({*ids}) or ""
    list(generate(model, loaded, "what", max_new_tokens=40, temperature=5.0, seed=1))
    assert set.union(*picked) <= used
    start = settings(
        tmp_path, "auto", init_from=str(tmp_path / "plain"), model="auto", output_dir=str(tmp_path / "next")
    )
    stock.resize_token_embeddings(-(-rows // 64) * 64)  # padded, as others do
    stock.save_pretrained(tmp_path / "plain")
    assert trained(start).step.model.config.vocab_size == rows


@pytest.mark.slow
def test_verify_names_a_tokenizer_with_an_id_that_has_no_row(tmp_path):
    run = trained(settings(tmp_path, folder_of(gaps, eos_token="</s>")(tmp_path / "tokenizer")))
    export(run.folder.checkpoint(3), tmp_path / "plain")
    path = tmp_path / "plain" / "tokenizer.json"
    specification = json.loads(path.read_text())
    specification["model"]["vocab"]["q"] = run.step.model.config.vocab_size
    path.write_text(json.dumps(specification))
    rows = run.step.model.config.vocab_size
    assert f"vocab_size is {rows}, tokenizer_rows {rows + 1}" in verify(tmp_path / "plain")["problems"]
    with pytest.raises(UserError, match=r"entries and the model .* rows"):
        load_checkpoint(tmp_path / "plain")


def test_unknown_text_never_ends_a_document(tmp_path):
    tokenizer = loaded(word_level(), tmp_path / "tokenizer", eos_token="[UNK]", unk_token="[UNK]")
    [document] = Encoder(tokenizer).documents(["Item unheard-of costs [UNK]"])
    assert document.lost["unknown_tokens_left_out"] == 2
    assert tokenizer.convert_ids_to_tokens(document.ids) == ["[UNK]", "Item", "costs"]


def test_special_tokens_that_a_normalizer_changes_keep_their_names_and_ids(tmp_path):
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("</S>", normalized=True, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</S>").save_pretrained(tmp_path / "tokenizer")
    run = trained(settings(tmp_path, tmp_path / "tokenizer"))
    model, tokenizer = load_checkpoint(run.folder.checkpoint(3))
    assert tokenizer.eos_token == "</S>" and tokenizer.eos_token_id == model.config.eos_token_id
    assert model_rows(tokenizer) == model.config.vocab_size
    assert any("</S>" in line for line in run.data.description)


def test_impossible_tokenizers_are_refused_in_one_line(tmp_path):
    def refusal(tokenizer: str) -> str:
        with pytest.raises(UserError) as refused:
            Pretrainer(settings(tmp_path, tokenizer)).train()
        assert not (tmp_path / "run").exists() and "\n" not in str(refused.value)
        return str(refused.value)

    shared = json.loads(byte_level(special=()).to_str())
    shared["model"]["vocab"] = {token: i + (i >= 50) for token, i in shared["model"]["vocab"].items()}
    folder = folder_of(lambda: Tokenizer.from_str(json.dumps(shared)), eos_token="</s>")(tmp_path / "shared")
    assert "stands for" in refusal(folder) and "'</s>'" in refusal(folder)
    ordinary = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    ordinary.decoder = decoders.Fuse()
    assert "its end-of-text (eos) is 't'" in refusal(folder_of(lambda: ordinary, eos_token="t")(tmp_path / "ordinary"))
    unknown = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="none"))
    assert "cannot encode the text" in refusal(folder_of(lambda: unknown, eos_token="</s>")(tmp_path / "unknown"))
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert "is a slow tokenizer" in refusal(str(slow))


def test_characters_of_several_tokens_are_streamed_whole(tmp_path):
    """Also bytes of their own, of which a further one makes others of those before."""
    tokenizer = load_tokenizer(KINDS["llama"](tmp_path / "llama"), lambda: (), 32)
    model = trained(settings(tmp_path, KINDS["llama"](tmp_path / "again"))).step.model
    wanted = tokenizer("é", add_special_tokens=False)["input_ids"][1:]
    ids = [*wanted, wanted[0], *tokenizer("a", add_special_tokens=False)["input_ids"]]
    pieces: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "generate_ids", lambda *_: ((0, i) for i in ids))
        [text] = generate(model, tokenizer, "say", stream=lambda _, piece: pieces.append(piece))
    prompt = tokenizer("say", add_special_tokens=False)["input_ids"]
    assert "".join(pieces) == text == tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))


def test_a_run_with_document_masking_is_evaluated_as_it_was_trained(tmp_path):
    run = trained(settings(tmp_path, "bpe-300", document_masking=True))
    [record] = records(run, "eval_loss")
    found = evaluated(run.folder.checkpoint(3), str(tmp_path / "held_out.jsonl"))
    assert found["loss"] == pytest.approx(record["eval_loss"], rel=1e-5) and "only to itself" in found["joined"]


def test_no_text_is_cut_off_by_a_top_k_of_0_in_samples(tmp_path):
    run = Pretrainer(settings(tmp_path, "bpe-300"), [SampleCallback(1, ["what"], top_k=0)])
    assert run.train()["eval_tokens"] > 0


@pytest.mark.parametrize("name", ODD)
def test_odd_tokenizers(name, tmp_path):
    """Each property once more, on tokenizers that few have."""
    make, tokens, is_lossy = ODD[name]
    tokenizer_name = folder_of(make, **{"eos_token": "</s>", **tokens})(tmp_path / "tokenizer")
    run = trained(settings(tmp_path, tokenizer_name))
    data, tokenizer = run.data, run.data.tokenizer
    assert run.step.model.config.vocab_size == max(tokenizer.get_vocab().values()) + 1
    for ids, texts in ((data.train.tokens, [CHARACTERS, *TEXTS]), (data.validation, HELD_OUT)):
        assert (ids == tokenizer.eos_token_id).sum() == len(texts)
    assert bool(data.skipped) == is_lossy
    [record] = records(run, "eval_loss")
    is_lossy = "bits per byte: null" in plan(run)
    assert is_lossy == any(reason.startswith("eval_") for reason in data.skipped)
    size = sum(len(text.encode()) for text in HELD_OUT)
    bits = record["eval_loss"] * record["eval_tokens"] / math.log(2)
    assert record["eval_bits_per_byte"] == (None if is_lossy else pytest.approx(bits / size, rel=1e-9))
    found = evaluated(run.folder.checkpoint(3), str(tmp_path / "held_out.jsonl"))
    assert found["loss"] == pytest.approx(record["eval_loss"], rel=1e-5)
    model, loaded = load_checkpoint(run.folder.checkpoint(3))
    picked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        remembered = generation.generate_ids
        patch.setattr(
            generation, "generate_ids", lambda *given: (picked.append(i) or (r, i) for r, i in remembered(*given))
        )
        [text] = generate(model, loaded, "say you", temperature=3.0, seed=2, max_new_tokens=20)
    ids = loaded("say you", add_special_tokens=False)["input_ids"]
    before, whole = (loaded.decode(some, clean_up_tokenization_spaces=False) for some in (ids, ids + picked))
    assert whole == before + text


def test_a_run_reserves_tokens_and_refuses_tokenizers_that_lack_them(config, tmp_path):
    """The ids of the model's generation are the tokenizer's: pad is not the end of a text."""
    chat = "<|user|>, <|assistant|>"
    folder = trained(config(tokenizer="bpe-300", reserved_tokens=chat, max_steps=2)).folder.checkpoint(2)
    stated = json.loads((folder / "config.json").read_text())
    assert (stated["vocab_size"], stated["eos_token_id"], stated["pad_token_id"]) == (300, 0, 1)
    trained(config("given", tokenizer=str(folder), reserved_tokens=chat, max_steps=1))  # it has them
    trained(
        config("resumed", tokenizer="bpe-300", reserved_tokens=chat, max_steps=3, resume_from_checkpoint=str(folder))
    )
    for changes, match in (
        ({"tokenizer": str(folder), "reserved_tokens": "<|user|>,<|tool|>"}, r"has no special token <\|tool\|>"),
        ({"tokenizer": "char", "reserved_tokens": chat}, "tokenizer=char has characters alone"),
        ({"tokenizer": "bpe-300", "reserved_tokens": "<|user|>,<|user|>"}, "give different names"),
        ({"tokenizer": "bpe-300", "reserved_tokens": "<|pad|>"}, "give different names"),
        ({"tokenizer": "bpe-300", "reserved_tokens": "a"}, "give different names"),
        ({"tokenizer": "bpe-300", "reserved_tokens": "<|user|>,"}, "give different names"),
    ):
        with pytest.raises(UserError, match=match):
            trained(config("refused", max_steps=1, **changes))
    assert not (tmp_path / "refused").exists()
