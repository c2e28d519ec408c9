"""`hfgpt evaluate` against plain loops over stock transformers: each token once, in any batches, on any processes."""

from __future__ import annotations

import functools
import gzip
import json
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED
from forked import FORK, completed
from running import CPU, LAUNCH, ROOT
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hfgpt import cli
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import UserError
from hfgpt.evaluation.evaluate import evaluate_checkpoint, score_text
from hfgpt.evaluation.loss import scored_blocks, windows

EMOJI = ["café 😀🚀 naïve résumé 你好，世界 👨‍👩‍👧 " * 20, "🇩🇪 👍🏽 plain words between 😀\n" * 20, "🧪"]


def counts(parts: np.ndarray) -> list[int]:
    return (parts[:, 2] - parts[:, 1]).tolist()


def test_window_arithmetic_counted_by_hand():
    ten = [10]
    assert counts(windows(ten, 3, 2)) == [3, 2, 2, 2]  # blocks of 4 tokens, each 2 after the one before
    assert counts(windows(ten, 4, 2)) == [4, 2, 2, 1]
    assert counts(windows(ten, 4)) == [4, 4, 1]  # the first token of each later window is scored, too
    assert counts(windows(ten, 3)) == [3, 3, 3]
    assert counts(windows(ten, 9)) == counts(windows(ten, 20, 7)) == [9]  # one pass
    assert windows([4, 1, 3], 2).tolist() == [[0, 0, 2], [2, 2, 3], [5, 5, 7]]  # a run of one token has none
    assert counts(windows([], 4)) == counts(windows([0, 1], 4)) == []


@pytest.mark.parametrize("seed", range(20))
def test_windows_score_each_token_but_the_first_of_a_run_once(seed):
    numbers = np.random.default_rng(seed)
    lengths = numbers.integers(0, 40, 5).tolist()
    length = int(numbers.integers(1, 12))
    stride = int(numbers.integers(1, length + 1))
    tokens = np.arange(sum(lengths), dtype=np.int32)
    parts = windows(lengths, length, stride)
    inputs, targets = scored_blocks(tokens, parts, length) if len(tokens) else ([], np.zeros(0))
    kept = targets != -100
    begins = np.cumsum([0, *lengths[:-1]])
    assert sorted(targets[kept]) == sorted(np.delete(tokens, [b for b, n in zip(begins, lengths, strict=True) if n]))
    if len(tokens):
        assert (inputs[kept] + 1 == targets[kept]).all()
    run_of = np.repeat(begins, lengths)
    for begin, first, _ in parts:  # what is before it: all of its run, or a full window less the stride
        assert first - begin >= min(length - stride, first - run_of[begin])


def saved(path, tokenizer):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "initializer_range": 0.2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(path)
    save_tokenizer(tokenizer, path)
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bpe-300", lambda: EMOJI, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return saved(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory, tokenizer):
    """With GPT-2's own vocabulary, where it is at hand."""
    if (SHARED / "gpt2_tokenizer").exists():
        tokenizer = load_tokenizer(str(SHARED / "gpt2_tokenizer"), lambda: (), 64)
    return saved(tmp_path_factory.mktemp("gpt2"), tokenizer)


def written(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(params=["emoji", "wikitext", "fineweb_edu"])
def documents(request) -> list[str]:
    """Documents of one of three texts, a few thousand characters."""
    if request.param == "emoji":
        return EMOJI
    if not SHARED.exists():
        pytest.skip("needs the real text beside the project")
    if request.param == "wikitext":
        with gzip.open(SHARED / "wikitext" / "wikitext2_test_articles.jsonl.gz", "rt") as file:
            found = [json.loads(line)["text"] for line, _ in zip(file, range(3), strict=False)]
    else:
        import pyarrow.parquet as pq

        found = pq.read_table(SHARED / "fineweb_edu" / "000_00000.parquet")["text"].to_pylist()[:3]
    return [text[:2000] for text in found]


def plain_nll(folder, runs: list[list[int]], length: int, stride: int) -> tuple[float, int]:
    """Stock transformers, a window at a time: nats and number of scored tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nll, scored = 0.0, 0
    for ids in runs:
        done = 0  # targets so far
        for begin in range(0, len(ids), stride):
            end = min(begin + length, len(ids) - 1)
            if end <= done:
                break
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin:end]])).logits[0]
            new = end - done
            nll += F.cross_entropy(
                logits[-new:].double(), torch.tensor(ids[done + 1 : end + 1]), reduction="sum"
            ).item()
            scored, done = scored + new, end
    return nll, scored


@functools.cache
def stock_tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def ids_of(folder, text: str) -> list[int]:
    return stock_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]


def evaluated(folder, dataset, **options):
    return evaluate_checkpoint(str(folder), lambda subject: score_text(subject, {"dataset": str(dataset)}, **options))


@pytest.mark.parametrize("stride", [None, 24])
def test_three_texts_equal_a_plain_loop_on_stock_transformers(gpt2_folder, documents, tmp_path, stride):
    folder = gpt2_folder
    path = written(tmp_path / "text.jsonl", documents)
    separator = stock_tokenizer(folder).eos_token_id
    run = [i for text in documents for i in [separator, *ids_of(folder, text)]]
    nll, scored = plain_nll(folder, [run], 64, stride or 64)
    found = evaluated(folder, path, stride=stride, batch_size=5)
    assert found["scored_tokens"] == scored == len(run) - 1
    assert found["scored_bytes"] == sum(len(text.encode()) for text in documents)
    assert found["loss"] == pytest.approx(nll / scored, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nll / scored), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / found["scored_bytes"], rel=1e-6)


def test_the_batch_size_does_not_change_the_result(folder, tmp_path):
    path = written(tmp_path / "text.jsonl", EMOJI)
    losses = [evaluated(folder, path, batch_size=size, stride=24)["loss"] for size in (1, 2, 7, 64)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_a_batch_is_no_larger_than_the_text(folder, tmp_path):
    path = written(tmp_path / "t.jsonl", EMOJI)
    found = evaluated(folder, path, batch_size=2**40)  # rows of padding would not fit any machine
    assert found["loss"] == pytest.approx(evaluated(folder, path, batch_size=1)["loss"], abs=1e-6)


@pytest.mark.slow
def test_processes_and_the_compiler_change_nothing(folder, tmp_path):
    path = written(tmp_path / "text.jsonl", EMOJI)
    alone = evaluated(folder, path, stride=24)
    command = [FORK, *LAUNCH[1:-1], CPU.replace("cpu.yaml", "cpu_2proc.yaml"), "--module", "hfgpt.cli", "evaluate"]
    command += [str(folder), "--dataset", str(path), "--stride", "24"]
    command += ["--per_device_eval_batch_size", "3", "--torch_compile", "--json"]
    done = completed(command, dict(os.environ), timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["processes"] == 2 and found["torch_compile"]
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert found[key] == pytest.approx(alone[key], rel=1e-6)
    for key in ("scored_tokens", "scored_bytes", "windows", "start_token", "documents"):
        assert found[key] == alone[key]


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(folder, tokenizer, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.resize_token_embeddings(-(-len(tokenizer) // 64) * 64 + 64)  # rows without a token take part
    torch.nn.init.zeros_(model.transformer.wte.weight)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    rows = model.config.vocab_size
    for stride in (1, 10, None):
        found = evaluated(tmp_path / "model", written(tmp_path / "t.jsonl", EMOJI[1:]), stride=stride)
        assert found["perplexity"] == pytest.approx(rows, rel=1e-6)
    assert f"{rows - len(tokenizer)} rows without a token, which take part" in found["vocabulary"]


def test_text_of_one_window_is_one_forward_pass(folder, tmp_path):
    ids = [stock_tokenizer(folder).eos_token_id, *ids_of(folder, "plain words")]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0, :-1]
    found = evaluated(folder, written(tmp_path / "t.jsonl", ["plain words"]), stride=5)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, torch.tensor(ids[1:])).item(), rel=1e-6)


def test_documents_on_their_own_see_nothing_of_each_other(folder, tmp_path):
    separator = stock_tokenizer(folder).eos_token_id
    runs = [[separator, *ids_of(folder, text)] for text in EMOJI]
    nll, scored = plain_nll(folder, runs, 64, 64)
    found = evaluated(folder, written(tmp_path / "t.jsonl", EMOJI), by_document=True)
    assert found["scored_tokens"] == scored == sum(map(len, runs)) - len(runs)
    assert found["loss"] == pytest.approx(nll / scored, rel=1e-6)


def test_another_kind_of_model_begins_each_document_with_its_own_start_token(tmp_path, tokenizer):
    backend = tokenizer.backend_tokenizer
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=len(other), max_position_embeddings=64, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    other.save_pretrained(tmp_path / "llama")
    found = evaluated(tmp_path / "llama", written(tmp_path / "t.jsonl", EMOJI), stride=50)
    runs = [[other.bos_token_id, *ids_of(tmp_path / "llama", text)] for text in EMOJI]
    nll, scored = plain_nll(tmp_path / "llama", runs, 64, 50)
    assert found["scored_tokens"] == scored and found["loss"] == pytest.approx(nll / scored, rel=1e-6)
    assert found["scored_bytes"] == sum(len(text.encode()) for text in EMOJI)
    assert found["start_token"].startswith("<s>") and found["joined"] == "each document on its own"


def test_characters_have_no_start_token_and_the_report_says_so(tmp_path):
    text = "\u00e9t\u00e9 \U0001f600 ab\n" * 30
    tokenizer = load_tokenizer("char", lambda: [text], 16)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_head=1, n_embd=8, n_positions=16)
    ).save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    (tmp_path / "t.txt").write_text(text)
    found = evaluated(tmp_path / "model", tmp_path / "t.txt")
    assert found["scored_tokens"] == len(text) - 1 and found["start_token"].startswith("none; the first token")
    assert found["scored_bytes"] == len(text.encode()) - 2
    for documents, joined in ((["ab", "b\n", "a"], "ab\nb\na"), (["ab"], "ab")):  # a line end between, none at the end
        path = written(tmp_path / "t.jsonl", documents)
        ids = stock_tokenizer(tmp_path / "model")(joined)["input_ids"]
        nll, scored = plain_nll(tmp_path / "model", [ids], 16, 16)
        found = evaluated(tmp_path / "model", path)
        assert found["scored_tokens"] == scored == len(joined) - 1 == found["scored_bytes"]
        assert found["loss"] == pytest.approx(nll / scored, rel=1e-6)
        assert evaluated(tmp_path / "model", path, by_document=True)["scored_tokens"] == sum(map(len, documents)) - len(
            documents
        )


def test_a_limit_scores_so_many_tokens_and_their_bytes(folder, tmp_path):
    path = written(tmp_path / "t.jsonl", ["ab " * 30, "plain words " * 30])
    found = evaluated(folder, path, eval_tokens=50)
    assert found["scored_tokens"] == 50 < evaluated(folder, path)["scored_tokens"]
    assert 0 < found["scored_bytes"] <= len("ab " * 30 + "plain words " * 30)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "TEXT", "--sequence_length", "65"], "sequence_length=65: is above the model's 64 positions"),
        (["--dataset", "TEXT", "--sequence_length", "8", "--stride", "9"], "stride=9: is above sequence_length=8"),
        (["--dataset", "TEXT", "--stride", "0"], "--stride"),
        ([], "dataset: no text is given"),
        (["--dataset", "nowhere.txt"], "nowhere.txt"),
        (["--dataset", "TEXT", "--text_column", "body"], "text_column"),
        (["--dataset", "TEXT", "--task", "arc"], "arc"),
        (["--dataset", "TEXT", "--record"], "not a checkpoint inside a run folder"),
    ],
)
def test_wrong_use_is_refused_in_one_line(folder, tmp_path, monkeypatch, flags, message):
    path = written(tmp_path / "t.jsonl", EMOJI)
    flags = [str(path) if flag == "TEXT" else flag for flag in flags]
    monkeypatch.setattr("sys.argv", ["hfgpt", "evaluate", str(folder), *flags])
    with pytest.raises(UserError) as refused:
        cli.run_app()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_no_model_is_refused(tmp_path, folder):
    path = written(tmp_path / "t.jsonl", EMOJI)
    with pytest.raises(UserError, match=r"checkpoint .*nowhere"):
        evaluated(tmp_path / "nowhere", path)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="causal language model"):
        evaluated(tmp_path / "bert", path)
    with pytest.raises(UserError, match="no token to score"):
        evaluated(folder, written(tmp_path / "blank.jsonl", ["", ""]))


def test_a_task_and_a_record_from_the_command_line(tmp_path, document_folder, monkeypatch, capsys):
    from hfgpt import PretrainConfig, Pretrainer
    from hfgpt.evaluation.results import read_evaluations

    settings = {"tokenizer": "bpe-300", "dataset": str(document_folder), "sequence_length": 16, "mixed_precision": "no"}
    model = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}
    config = PretrainConfig(
        output_dir=str(tmp_path / "run"), model=model, max_steps=2, torch_compile=False, eval_steps=0, **settings
    )
    Pretrainer(config).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    task = tmp_path / "task.jsonl"
    rows = [{"ctx": f"{n} says", "endings": [f"{n}", "says", "document 3", "x"], "label": n % 4} for n in range(8)]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*flags) -> None:
        monkeypatch.setattr("sys.argv", ["hfgpt", "evaluate", str(checkpoint), "--json", "--record", *flags])
        capsys.readouterr()
        cli.main()
        out, err = capsys.readouterr()
        assert json.loads(out)["checkpoint"] == str(checkpoint) and "evaluations.jsonl" in err

    run("--task", "hellaswag", "--dataset", str(task), "--limit", "6")
    run("--dataset", str(document_folder), "--eval_tokens", "300")
    by_task = {record["task"]: record for record in read_evaluations(checkpoint)}
    assert by_task["hellaswag"]["examples"] == 6 and 0 <= by_task["hellaswag"]["accuracy_norm"] <= 1
    assert by_task["text"]["scored_tokens"] == 300 and by_task["text"]["sequence_length"] == 16  # as trained
    for flags, problem in (
        (["--task", "hellaswag", "--stride", "3"], "--stride: cannot be used with --task hellaswag; leave it out"),
        (
            ["--task", "hellaswag", "--eval_tokens", "9", "--packed"],
            "--by_document/--packed, --eval_tokens: cannot be used with --task hellaswag; leave them out",
        ),
        (["--dataset", str(document_folder), "--limit", "3"], "--limit: only used with --task; leave it out"),
    ):
        monkeypatch.setattr("sys.argv", ["hfgpt", "evaluate", str(checkpoint), *flags])
        with pytest.raises(UserError) as wrong:
            cli.run_app()
        assert str(wrong.value) == problem

    (checkpoint.parent / "evaluations.jsonl").unlink()
    (checkpoint.parent / "evaluations.jsonl").mkdir()
    recorded = ["--dataset", str(task), "--limit", "6", "--json", "--record"]
    monkeypatch.setattr("sys.argv", ["hfgpt", "evaluate", str(checkpoint), "--task", "hellaswag", *recorded])
    with pytest.raises(
        UserError, match=r"evaluations.jsonl: cannot be written .*, so nothing was recorded; make it writable"
    ):
        cli.run_app()
    assert json.loads(capsys.readouterr().out)["examples"] == 6  # the result is not lost
