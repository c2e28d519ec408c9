"""From a data set's name to streams: what is held out, what the plan says, and a data set on the Hub."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer

from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.loader import iterate
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.errors import UserError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "nobody",
    "else",
    "looks",
    "at",
    "it",
]


def texts(count):
    return [" ".join([f"document {n}:", *(WORDS[(n * k) % 15] for k in range(n % 20 + 3))]) for n in range(count)]


def prepare(dataset, **options):
    tokenizer = options.pop("given_tokenizer", None)
    settings = {"tokenizer": "char", "seed": 1, "sequence_length": 16, "max_steps": 1, **options}
    return prepare_data(PretrainConfig(dataset=str(dataset), **settings), 8, tokenizer)


def write(path, documents, rows_per_group=10):
    if path.suffix == ".txt":
        path.write_text("\n".join(documents))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    else:
        pq.write_table(pa.table({"text": documents}), path, row_group_size=rows_per_group)
    return path


def lines_of(data, tokens):
    return data.tokenizer.decode(tokens).strip("\n").split("\n")


def training_lines(data, epochs):
    """All texts of the training stream over `epochs` epochs (of single-line documents without separator)."""
    if isinstance(data.train, MemoryBlocks):
        return lines_of(data, data.train.tokens)
    lines = []
    for i in range(data.train.streams):
        for document in data.train.documents(i, [0, 0, 0, 0]):
            if document.place[0] == epochs:
                break
            lines += lines_of(data, document.ids)
    return lines


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("rows_per_group", [8, 40])
def test_validation_is_never_trained_on(tmp_path, streaming, rows_per_group):
    path = write(tmp_path / "a.parquet", texts(120), rows_per_group)
    data = prepare(path, streaming=streaming)
    validation, training = lines_of(data, data.validation), training_lines(data, 3)
    border = [text for text in texts(120) if text.endswith(validation[0])][-1]
    head = border.removesuffix(validation[0])
    assert len(validation) > 3 and head
    assert {border, *validation[1:]} | set(training) - {head} == set(texts(120))
    assert not set(validation) & set(training) and border not in training and head in training
    assert lines_of(prepare(path, streaming=streaming, seed=2), data.validation) == validation


@pytest.mark.parametrize("streaming", [True, False])
def test_copies_of_validation_documents_are_dropped_and_counted(tmp_path, streaming):
    documents = texts(60)
    data = prepare(write(tmp_path / "a.jsonl", [documents[-1], *documents]), streaming=streaming)
    assert documents[-1] in lines_of(data, data.validation)
    assert documents[-1] not in training_lines(data, 2)
    skipped = data.skipped
    if streaming:
        for batch in islice(iterate(data.train, None), 40):
            skipped.update(batch.skipped)
    assert skipped["in_validation"] >= 1


def test_last_tenth_of_a_single_document_is_held_out(tmp_path):
    text = "".join(f"line {n * n}\n" for n in range(500)) + "the end"
    (tmp_path / "a.txt").write_text(text)
    data = prepare(tmp_path / "a.txt")
    cut = int(0.9 * len(text))
    assert data.tokenizer.decode(data.train.tokens) == text[:cut]
    assert data.tokenizer.decode(data.validation) == text[cut:]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    "lengths", [[7] * 100, [1000] * 20, [3000, *[10] * 30], [*[10] * 30, 3000], [400, *range(1, 60), 900, 5]]
)
def test_a_tenth_of_the_characters_is_held_out_whatever_the_sizes_of_documents(tmp_path, streaming, suffix, lengths):
    documents = [(f"{n} " + "abc def " * length)[:length] for n, length in enumerate(lengths)]
    path = write(tmp_path / f"a{suffix}", documents, 7)
    if streaming and lengths[0] == 3000:  # nearly all is one document, and 8 streams need one each
        with pytest.raises(UserError, match="too few training documents"):
            prepare(path, streaming=streaming)
        return
    data = prepare(path, streaming=streaming, given_tokenizer=prepare(path).tokenizer)
    text = "".join(documents)
    held_out = text[int(0.9 * len(text)) :]
    assert data.tokenizer.decode(data.validation).replace("\n", "") == held_out
    assert sum(map(len, training_lines(data, 1))) == len(text) - len(held_out)
    share = f"({100 * len(held_out) / len(text):.3g} % of the characters)"
    assert share in "\n".join(data.description)


def test_a_tenth_of_two_text_files_is_held_out(tmp_path):
    for sizes in ((100_000, 100_000), (1000, 105_000), (105_000, 1000)):
        for name, size in zip("ab", sizes, strict=True):
            (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n * n}\n" for n in range(size))[:size])
        whole = (tmp_path / "a.txt").read_text() + (tmp_path / "b.txt").read_text()
        data = prepare(tmp_path)
        held_out = data.tokenizer.decode(data.validation)
        assert held_out.replace("\n", "") == whole[int(0.9 * len(whole)) :].replace("\n", "")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_copy_of_the_document_that_is_cut_at_the_border_is_left_out(tmp_path, streaming):
    documents = [f"{n * n % 97} is of document {n} and so is {n * 7 % 89}" for n in range(60)]
    first = prepare(write(tmp_path / "a.jsonl", [*documents[:1], *documents]))
    tail = lines_of(first, first.validation)[0]
    [cut] = [text for text in documents if text.endswith(tail) and text != tail]
    data = prepare(write(tmp_path / "a.jsonl", [cut, *documents]), streaming=streaming)
    tail = lines_of(data, data.validation)[0]
    assert cut.endswith(tail) and cut != tail
    assert cut not in training_lines(data, 2) and cut.removesuffix(tail) in training_lines(data, 2)


def test_the_end_of_a_large_stream_is_held_out_and_its_share_is_in_the_plan(tmp_path, monkeypatch):
    for module in ("prepare_text", "held_out"):
        monkeypatch.setattr(f"hfgpt.data.{module}.IN_MEMORY_BYTES", 1000)
    documents = texts(2000)
    total = sum(map(len, documents))
    for name, most, tenths in (("a.parquet", 10**9, 1), ("a.jsonl", 10**9, 1), ("b.parquet", 2000, 20_000 / total)):
        monkeypatch.setattr("hfgpt.data.held_out.MAX_HELD_OUT_CHARACTERS", most)
        data = prepare(write(tmp_path / name, documents, 30), streaming=True)
        validation = lines_of(data, data.validation)
        assert validation[1:] == documents[1 - len(validation) :]
        assert sum(map(len, validation)) == pytest.approx(total / 10 * tenths, rel=0.03)
        assert "% of the characters)" in "\n".join(data.description)


def test_a_run_of_an_earlier_version_holds_out_the_whole_documents_that_it_held_out_then(tmp_path):
    documents = texts(200)
    path = write(tmp_path / "a.parquet", documents, 50)
    config = PretrainConfig(dataset=str(path), tokenizer="char", seed=1, sequence_length=16, max_steps=1)
    data = prepare_data(config, 8, saved={"held_out": "last tenth"})
    assert data.train.fingerprint["held_out"] == "last tenth"
    validation = lines_of(data, data.validation)
    assert validation == documents[-len(validation) :]
    assert sum(map(len, validation[1:])) < sum(map(len, documents)) / 10 <= sum(map(len, validation))
    now = prepare_data(config, 8)
    again = prepare_data(config, 8, saved=now.train.fingerprint)
    assert again.train.fingerprint == now.train.fingerprint


@pytest.mark.parametrize(
    ("files", "name"), [({"a": 2}, "a.txt"), ({"a": 1, "b": 1}, "*.txt"), ({"a": 0.4, "b": 0.3, "c": 0.5}, "*.txt.gz")]
)
def test_text_files_are_streamed_in_pieces(tmp_path, monkeypatch, files, name):
    """Files that are one document in memory train as a stream, too."""
    monkeypatch.setattr("hfgpt.data.prepare_text.IN_MEMORY_BYTES", 100_000)
    monkeypatch.setattr("hfgpt.data.formats.text.DOCUMENT_CHARACTERS", 2000)
    monkeypatch.setattr("hfgpt.data.formats.spans.SPAN_BYTES", 30_000)
    whole = ""
    for file, size in files.items():
        text = "".join(f"{file}, line {n}: {n * n % 97} é\n" for n in range(20_000))[: int(100_000 * size)]
        data = text.encode()
        path = tmp_path / f"{file}.{name.partition('.')[2]}"
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        whole += text
    data = prepare(tmp_path / name, streaming=True, sequence_length=64)
    next(iterate(data.train, None))
    pieces = [data.tokenizer.decode(document.ids) for document in epoch(data)]
    held_out = data.tokenizer.decode(data.validation)
    assert len(pieces) > len(whole) / 4500
    assert sum(len(piece.rstrip("\n")) for piece in pieces) > 0.89 * len(whole)
    found, expected = Counter("".join(pieces) + held_out), Counter(whole)
    assert held_out[-50:] == whole[-50:] and found.keys() == expected.keys()
    assert all(found[character] == expected[character] for character in expected if character != "\n")


def epoch(data):
    for i in range(data.train.streams):
        for document in data.train.documents(i, [0, 0, 0, 0]):
            if document.place[0]:
                break
            yield document


@pytest.mark.parametrize("streaming", [True, False])
def test_evaluation_file(tmp_path, streaming):
    train, other = texts(80), texts(95)[80:]
    eval_path = write(tmp_path / "eval.jsonl", [*other, train[0]])
    data = prepare(write(tmp_path / "a.jsonl", train), eval_dataset=str(eval_path), streaming=streaming)
    assert lines_of(data, data.validation) == [*other, train[0]]
    assert sorted(training_lines(data, 1)) == sorted(train[1:])


def test_an_evaluation_file_among_streamed_text_files_is_not_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(texts(400)))
    (tmp_path / "copy.txt").write_text("".join(f"{text} evaluated\n" for text in texts(150)))
    (tmp_path / "val.txt").write_bytes((tmp_path / "copy.txt").read_bytes())
    for evaluated in (str(tmp_path / "val.txt"), {"own": str(tmp_path / "val.txt")}):
        data = prepare(tmp_path, eval_dataset=evaluated, streaming=True)
        assert sum("evaluated" in line for line in lines_of(data, data.validation)) == 150
        assert not any("evaluated" in line for line in training_lines(data, 2))


def test_evaluation_tokens_cut_the_run(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(100))
    whole, cut = prepare(path), prepare(path, eval_tokens=50)
    assert len(cut.validation) == 51
    assert np.array_equal(cut.validation, whole.validation[:51])
    assert np.array_equal(cut.train.tokens, whole.train.tokens)


def test_kind_of_stream_by_size_and_by_request(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts(100))
    assert isinstance(prepare(path).train, MemoryBlocks)
    assert isinstance(prepare(path, streaming=True).train, DocumentStream)
    monkeypatch.setattr("hfgpt.data.prepare_text.IN_MEMORY_BYTES", 1000)
    assert isinstance(prepare(path).train, DocumentStream)
    assert isinstance(prepare(path, streaming=False).train, MemoryBlocks)


def test_character_vocabulary_knows_the_validation_text_and_bpe_does_not(tmp_path):
    path = write(tmp_path / "a.jsonl", [*texts(100), "zyzzyva é " * 40])
    for streaming in (True, False):
        assert "é" in prepare(path, streaming=streaming).tokenizer.get_vocab()
        tokens = prepare(path, tokenizer="bpe-300", streaming=streaming).tokenizer.get_vocab()
        assert not any("zz" in token for token in tokens)


def test_unusable_rows_are_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", [*texts(50), None, ""])
    assert prepare(path).skipped == {"null": 1, "empty": 1}


@pytest.mark.parametrize("streaming", [True, False])
def test_the_plan_notes_that_most_rows_are_unusable(tmp_path, streaming):
    other = str(write(tmp_path / "other.jsonl", [f"other {text}" for text in texts(30)]))
    some = [row for text in texts(40) for row in (text, None, "")]
    for path, eval_dataset, what in (
        (write(tmp_path / "a.jsonl", some), other, "the text"),
        (write(tmp_path / "a.jsonl", some), None, "the text"),
        (other, str(tmp_path / "a.jsonl"), "the validation text"),
    ):
        lines = prepare(path, eval_dataset=eval_dataset, streaming=streaming).description
        assert f"note: 80 of the 120 rows of {what} read so far are unusable: 40 null, 40 empty" in lines
    assert not any(line.startswith("note") for line in prepare(other, streaming=streaming).description)


def test_tokenizer_object_is_taken_as_it_is(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(100))
    first = prepare(path)
    again = prepare(path, given_tokenizer=first.tokenizer)
    assert again.tokenizer is first.tokenizer
    assert again.train.fingerprint == first.train.fingerprint
    assert json.loads(json.dumps(first.train.fingerprint)) == first.train.fingerprint


def test_fingerprint_does_not_depend_on_the_folder(tmp_path):
    prints = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", texts(100))
        prints.append(prepare(tmp_path / name, streaming=True).train.fingerprint)
    assert prints[0] == prints[1]


def test_the_plan_shows_what_is_trained_on(tmp_path):
    lines = prepare(write(tmp_path / "a.jsonl", texts(100))).description
    assert lines[0].startswith(str(tmp_path))  # the plan puts "text" in front of it
    description = "\n".join(lines)
    for fact in ("a.jsonl: 1 file", "char, ", " entries", "in memory", "blocks an epoch", "held out"):
        assert fact in description


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["ab"], {}, "fewer than one block.*sequence_length=16"),
        ([None, ""], {}, "contains no usable document"),
        ([None, ""], {"streaming": True}, "contains no usable document"),
        (texts(30), {"eval_dataset": "nowhere.txt"}, r"^eval_dataset=nowhere\.txt: no such file"),
        (texts(30), {"tokenizer": "bpe-1"}, "^tokenizer=bpe-1"),
        (texts(5), {"streaming": True}, "too few training documents"),
        (["same"] * 30, {}, "0 training tokens .*27 documents are also in the validation text; .*eval_dataset"),
    ],
)
def test_impossible_text_is_refused(tmp_path, documents, options, message):
    with pytest.raises(UserError, match=message):
        prepare(write(tmp_path / "a.jsonl", documents), **options)


@pytest.mark.parametrize("streaming", [True, False])
def test_training_text_that_is_all_in_the_evaluation_text_is_named(tmp_path, streaming):
    path = write(tmp_path / "a.jsonl", texts(30))
    data = None
    with pytest.raises(UserError, match=r"also in the validation text.* give another eval_dataset"):
        data = prepare(path, eval_dataset=str(path), streaming=streaming)
        next(iterate(data.train, None))
    assert (data is not None) == streaming


def test_too_short_evaluation_text_is_named_by_where_it_comes_from(tmp_path):
    one, other = write(tmp_path / "one.txt", ["nine words"]), write(tmp_path / "x.txt", ["x"])
    with pytest.raises(UserError, match=r"^dataset: fewer than two tokens .*held out.*; give an eval_dataset"):
        prepare(one, sequence_length=4)
    with pytest.raises(UserError, match=r"^eval_dataset: fewer than two tokens"):
        prepare(write(tmp_path / "a.jsonl", texts(30)), eval_dataset=str(other))


@pytest.mark.parametrize("streaming", [True, False])
def test_character_of_the_evaluation_text_alone_is_refused(tmp_path, streaming):
    path, other = write(tmp_path / "a.jsonl", texts(50)), write(tmp_path / "b.jsonl", ["a naïve dog"])
    with pytest.raises(UserError, match=r"'ï' \(U\+00EF\) is not in the character vocabulary"):
        prepare(path, eval_dataset=str(other), streaming=streaming)


HUB = """
import json, sys
from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.formats import spans
from hfgpt.data.open_source import open_source
from hfgpt.errors import UserError

def prepare(**options):
    return prepare_data(PretrainConfig(tokenizer="char", seed=1, sequence_length=16, max_steps=1, **options), 8)

from itertools import islice
from hfgpt.data.loader import iterate
data = prepare(dataset="user/corpus", eval_dataset="validation")
problems = []
for options in (
    {"dataset": "user/corpus", "dataset_split": "trian"},
    {"dataset": "user/corpus", "eval_dataset": "valid"},
    {"dataset": "user/corpus", "dataset_name": "other"},
    {"dataset": "user/corpus", "dataset_revision": "v9"},
    {"dataset": "user/corpus", "text_column": "body"},
    {"dataset": "user/absent"},
):
    try:
        prepare(**options)
    except UserError as error:
        problems.append(str(error))
spans.SPAN_BYTES = 300
lines = open_source("user/lines")
print(json.dumps({
    "lines": [row for unit in lines.units for row in lines.read(unit)],
    "spans": len(lines.units),
    "text": [row for unit in data.train.source.units for row in data.train.source.read(unit)],
    "kind": data.train.fingerprint["stream"],
    "commit": data.train.fingerprint["dataset.commit"],
    "validation": data.tokenizer.decode(data.validation),
    "blocks": [batch.blocks.tolist() for batch in islice(iterate(data.train, None, num_workers=1), 5)],
    "problems": problems,
}))
"""


@pytest.mark.slow
def test_hub_dataset_gives_the_same_documents_as_local_files(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train-00000-of-00002.parquet", texts(60)[:40])
    write(folder / "train-00001-of-00002.parquet", texts(60)[40:])
    write(folder / "validation-00000-of-00001.parquet", texts(70)[60:])
    files = {f"data/{path.name}": path.read_bytes() for path in folder.iterdir()}
    lines = write(tmp_path / "a.jsonl", texts(30)).read_bytes()
    lines_files = {"a.jsonl": lines, "b.jsonl.gz": gzip.compress(lines), "README.md": b"# Lines"}
    repositories = {"datasets/user/corpus": files, "datasets/user/lines": lines_files}
    with HubServer(repositories, token="hf_secret") as hub:
        result = subprocess.run(
            [sys.executable, "-c", HUB],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "0"},
        )
        commit = hub.commit("datasets/user/corpus")
        row_groups = [path for method, path, range_ in hub.requests if method == "GET" and range_]
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["text"] == texts(60)
    assert found["lines"] == texts(30) * 2 and found["spans"] == -(-len(lines) // 300) + 1
    assert found["kind"] == "documents" and found["commit"] == commit
    assert found["validation"].split("\n") == texts(70)[60:]
    local = prepare(str(folder / "train-*"), eval_dataset=str(folder / "validation-*"), streaming=True)
    assert found["blocks"] == [batch.blocks.tolist() for batch in islice(iterate(local.train, None), 5)]
    # Whatever moves meanwhile, reads are of the commit.
    assert all(f"/resolve/{commit}/data/" in path for path in row_groups if "user/corpus" in path)
    split, eval_split, name, revision, column, absent = found["problems"]
    assert "dataset_split=trian: user/corpus has no such split; it has train, validation" in split
    assert "eval_dataset=valid: user/corpus has no such split; it has train, validation" in eval_split
    assert "dataset_name=other" in name and "default" in name
    assert "dataset_revision=v9" in revision
    assert "text_column=body: not in " in column and "its columns are text" in column
    assert "dataset=user/absent: " in absent and len(absent.splitlines()) == 1


def test_missing_local_text_column_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path / "a.jsonl", texts(20))
    before = sorted(Path(tmp_path).rglob("*"))
    with pytest.raises(UserError, match=r"text_column=body: not in .*; its columns are text"):
        prepare(tmp_path / "a.jsonl", text_column="body")
    assert sorted(Path(tmp_path).rglob("*")) == before


@pytest.mark.parametrize("end", ["\n", " ", "é ", "\r"])
def test_a_text_without_line_ends_is_streamed_in_pieces(tmp_path, monkeypatch, end):
    monkeypatch.setattr("hfgpt.data.formats.spans.SPAN_BYTES", 30_000)
    text = "".join(f"word {n}, {n * n % 97}{end}" for n in range(20_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    data = prepare(tmp_path / "a.txt", streaming=True, sequence_length=64)
    pieces = [data.tokenizer.decode(document.ids) for document in epoch(data)]
    held_out = data.tokenizer.decode(data.validation)
    assert 100 < len(pieces) < 1100 and max(map(len, pieces)) < 3000
    assert len(held_out) > 0.099 * len(text)
    found, expected = Counter("".join(pieces) + held_out), Counter(text)
    assert all(found[character] == expected[character] for character in expected if character != "\n")


@pytest.mark.parametrize("changes", [{"dataset_name": "en"}, {"dataset_split": "test"}, {"dataset_revision": "main"}])
def test_settings_of_a_hub_dataset_are_refused_for_a_local_one(tmp_path, changes):
    path = write(tmp_path / "a.jsonl", texts(60))
    [(key, value)] = changes.items()
    for dataset in (path, tmp_path, tmp_path / "*", "embedded"):
        with pytest.raises(UserError, match=rf"^{key}={value}: dataset=.*; leave it out"):
            prepare(dataset, **changes)


def test_an_evaluation_text_that_is_nowhere_is_named_at_once(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: pytest.fail("the Hub was asked"))
    path = write(tmp_path / "a.jsonl", texts(60))
    for name in ("nope", "nope.txt", "./user/nope"):
        with pytest.raises(UserError, match=rf"^eval_dataset={name}: no such file or folder"):
            prepare(path, eval_dataset=name)
    (tmp_path / "eval.txt").write_text("a text without columns\n" * 9)
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts(60))
    path.write_text(rows)
    assert len(
        prepare(path, tokenizer="bpe-300", text_column="body", eval_dataset=str(tmp_path / "eval.txt")).validation
    )


def test_the_plan_names_eval_tokens_where_they_leave_text_out(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(60))
    other = write(tmp_path / "b.jsonl", texts(50))
    for given in ({}, {"eval_dataset": str(other)}):
        description = prepare(path, tokenizer="bpe-300", eval_tokens=50, **given).description
        assert any("the first 50 tokens (eval_tokens)" in line for line in description)
        assert "(eval_tokens)" not in str(prepare(path, tokenizer="bpe-300", **given).description)
