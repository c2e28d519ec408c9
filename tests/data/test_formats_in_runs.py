"""Formats in streams and runs: any number of processes, workers and interruptions; saved and given sets; the Hub."""

from __future__ import annotations

import dataclasses
import json
import os

import datasets
import pytest
from forked import FORK, completed
from hub_server import HubServer
from test_every_format import FILES, GOOD
from test_open_source import read
from test_stream import assert_same, take

from hfgpt import Pretrainer
from hfgpt.checkpointing.audit import audit
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats import arrow, borders, spans
from hfgpt.data.open_source import open_source
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.errors import UserError

ROWS = [{"text": f"document {n} says {n * n % 101}" + " word" * (n % 9), "n": n} for n in range(120)]


@pytest.mark.parametrize("name", ["stream.arrow", "a.csv", "array.json.zst", "text.tar", "a.jsonl.xz"])
def test_a_stream_of_any_format_is_the_same_however_it_is_read(tmp_path, monkeypatch, name):
    for module, key in ((borders, "SPAN_BYTES"), (borders, "GZIP_SPAN_BYTES"), (arrow, "SPAN_BYTES")):
        monkeypatch.setattr(module, key, 9000)
    monkeypatch.setattr(spans, "GZIP_SPAN_BYTES", 9000)
    (tmp_path / name).write_bytes(FILES[name])
    encoder = Encoder(load_tokenizer("char", lambda: GOOD, 64))
    source = open_source(str(tmp_path))
    stream = DocumentStream(source, encoder, seed=1, sequence_length=64, blocks_per_step=8, fingerprint={})
    whole = take(stream, None, 12)
    assert len(source.units) > 3 and stream.streams == 8
    assert_same(take(stream, None, 12, world=2, workers=2), whole)
    assert_same(take(stream, whole[4][1], 7, world=2) if name != "a.csv" else whole[5:], whole[5:])
    located = stream.locate_rows(lambda ids: "", next(iter(stream.steps(stream.start, 0, 8))), range(8))
    assert located and all({"from_byte", "row", "file"} <= one.keys() for one in located)


def test_a_folder_of_save_to_disk_is_read_by_split(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"), num_shards=3)
    splits = datasets.DatasetDict({"train": one.select(range(100)), "test": one.select(range(100, 120))})
    splits.save_to_disk(str(tmp_path / "splits"))
    texts = [row["text"] for row in ROWS]
    (tmp_path / "one" / "cache-1234.arrow").write_bytes(b"not a part of it")
    source = open_source(str(tmp_path / "one"))
    assert read(source) == (texts, {}) and source.description.count("3 files") == 1
    assert read(open_source(str(tmp_path / "splits"))) == (texts[:100], {})
    assert read(open_source(str(tmp_path / "splits"), split="test")) == (texts[100:], {})
    with pytest.raises(UserError, match=r"dataset_split=dev: .* has no such split; it has train, test"):
        open_source(str(tmp_path / "splits"), split="dev")
    with pytest.raises(UserError, match=r"dataset_split=test: .* is local and has none; leave it out"):
        open_source(str(tmp_path / "one"), split="test")
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError, match=r"state.json lists data-00001-of-00003.arrow, which is not there"):
        open_source(str(tmp_path / "one"))


def test_a_split_of_a_saved_set_is_the_evaluation_text(tmp_path, config):
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one.select(range(5))}).save_to_disk(str(tmp_path / "splits"))
    trainer = Pretrainer(config(dataset=str(tmp_path / "splits"), eval_dataset="test", max_steps=1))
    trainer.train()
    assert trainer.run.data.validation_documents == 5


def test_sets_given_in_python_are_trained_on_and_resumed(tmp_path, config):
    train, other = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[1:])
    evaluation = datasets.Dataset.from_list([{"text": "document 7 says words"}])
    given = {"train_dataset": train.shuffle(seed=1), "eval_dataset": evaluation}
    for streaming in (True, False):
        name, options = f"given-{streaming}", {"streaming": streaming, "eval_steps": 3}
        settings = {"dataset": "embedded", "per_device_train_batch_size": 2, **options}
        Pretrainer(config(f"{name}-whole", **settings), **given).train()
        Pretrainer(config(name, **settings, max_steps=3), **given).train()
        resumed = {**settings, "resume_from_checkpoint": "latest"}
        trainer = Pretrainer(config(name, **resumed), [], train_dataset=given["train_dataset"], eval_dataset=evaluation)
        trainer.train()
        ledgers = [
            [json.loads(line)["batch_hash"] for line in (tmp_path / folder / "ledger.jsonl").read_text().splitlines()]
            for folder in (f"{name}-whole", name)
        ]
        assert len(ledgers[0]) == 6 and ledgers[0] == ledgers[1]
        facts = json.loads((tmp_path / name / "run.json").read_text())
        assert "120 rows given in Python" in (tmp_path / name / "checkpoint-6" / "README.md").read_text()
        assert facts["config"]["dataset"] == "train_dataset" and facts["data"]["dataset.rows"] == 120
        with pytest.raises(UserError, match=r"dataset hash .*dataset rows \(120 then, 119 now\)"):
            Pretrainer(config(name, **resumed, max_steps=9), [], other, evaluation).train()
        with pytest.raises(UserError, match="given its text in Python"):
            Pretrainer(config(name, **resumed, max_steps=9), [], None, evaluation).train()
        with pytest.raises(UserError, match="given its text in Python"):
            audit(tmp_path / name)


def test_several_evaluation_texts_given_in_python_are_those_of_files(tmp_path, config):
    train, files, sets = datasets.Dataset.from_list(ROWS), {}, {}
    for name, column in (("wiki", "text"), ("code", "body")):
        texts = datasets.Dataset.from_list([{column: f"document {n} says {name[:1]}"} for n in range(5)])
        texts.to_parquet(tmp_path / f"{name}.parquet")
        files[name] = {"dataset": str(tmp_path / f"{name}.parquet"), "text_column": column}
        sets[name] = texts if column == "text" else {"dataset": texts, "text_column": column}
    settings = {"dataset": "embedded", "max_steps": 1, "eval_steps": 1}
    found = []
    for evaluation in (files, sets, {"wiki": sets["wiki"], "code": files["code"]}):
        trainer = Pretrainer(config(str(len(found)), **settings), (), train, evaluation)
        found.append({**trainer.train(), "eval_seconds": 0})
    assert found[0] == found[1] == found[2] and {"eval_loss/wiki", "eval_loss/code"} <= found[0].keys()
    assert trainer.config.eval_dataset == {"wiki": "eval_dataset.wiki", "code": files["code"]}
    with pytest.raises(UserError, match=r"given its text in Python \(eval_dataset.wiki\)"):
        Pretrainer(dataclasses.replace(trainer.config, resume_from_checkpoint="latest"), (), train).train()


def test_unusable_given_sets_are_refused_in_one_line(config):
    one = datasets.Dataset.from_list(ROWS)
    settings = config(dataset="embedded")
    for given, message in (
        (one.to_iterable_dataset(), "train_dataset: an IterableDataset cannot be read from the middle"),
        (datasets.DatasetDict({"a": one}), "is a DatasetDict; give one of its splits: a"),
        (ROWS, "train_dataset: is a list, not a datasets.Dataset"),
        (one.with_transform(lambda rows: rows), "apply it with map"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            Pretrainer(settings, train_dataset=given)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match=r"dataset=.*: train_dataset is given too; leave one of them out"):
        Pretrainer(config(), train_dataset=one)
    with pytest.raises(UserError, match="text_column=body: not in train_dataset; its columns are text, n"):
        Pretrainer(config(dataset="embedded", text_column="body"), train_dataset=one).train()
    with pytest.raises(UserError, match="text_column=n: contains int64, not text, in train_dataset"):
        Pretrainer(config(dataset="embedded", text_column="n"), train_dataset=one).train()


CLIENT = """
import json, sys
from collections import Counter
from hfgpt.data.open_source import open_source
from hfgpt.data.units import Unusable

for options in json.loads(sys.argv[1]):
    try:
        source = open_source(**options, patience_seconds=5)
        rows = [row for unit in source.units for row in source.read(unit)]
        texts = [row for row in rows if isinstance(row, str)]
        print(json.dumps([texts, source.description, source.fingerprint.get("commit")]))
    except Exception as error:
        print(json.dumps([None, f"{type(error).__name__}: {error}", None]))
"""


@pytest.mark.slow
def test_formats_on_the_hub_and_parquet_that_it_made(tmp_path):
    names = ["a.csv", "array.json.zst", "stream.arrow", "text.tar"]
    repositories = {f"datasets/user/{name.replace('.', '-')}": {name: FILES[name]} for name in names}
    repositories["datasets/user/papers"] = {"README.md": b"---\nlicense: mit\n---\n", "a.pdf": b"%PDF-1.4"}
    repositories["datasets/user/scans"] = {"a.pdf": b"%PDF-1.4"}
    folder = tmp_path / "client.py"
    folder.write_text(CLIENT)
    with HubServer(repositories) as hub:
        converted = {f"default/{split}/0000.parquet": FILES["zstd.parquet"] for split in ("train", "test")}
        commit = hub.push("datasets/user/papers", converted, "refs/convert/parquet")
        calls = [{"dataset": name.removeprefix("datasets/")} for name in repositories]
        calls += [
            {"dataset": "user/papers", "revision": f"refs/convert/parquet@{commit}"},
            {"dataset": "user/papers", "split": "dev", "revision": "refs/convert/parquet"},
        ]
        command = [FORK, str(folder), json.dumps(calls)]
        done = completed(command, timeout=100, env={**os.environ, **hub.environment(tmp_path / "home")})
    results = list(map(json.loads, done.stdout.splitlines()))
    for name, (texts, description, _) in zip(names, results, strict=False):
        assert texts == GOOD, (name, description)
    papers, scans, again, dev = results[len(names) :]
    for texts, description, found in (papers, again):
        assert texts == GOOD and found == f"refs/convert/parquet@{commit}", description
        assert f"as parquet that the Hub made of it, at commit {commit[:8]}" in description
    assert scans[0] is None and "nor has the Hub converted it to parquet" in scans[1]
    assert "dataset_split=dev: user/papers has no such split; it has test, train" in dev[1]
