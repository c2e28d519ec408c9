"""Tokens beside text: columns of ids in every format with columns, mixtures of both, and runs on them."""

from __future__ import annotations

import json
import struct

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from running import MODEL, StopAt, same_weights, trained
from test_mixture import facts, parts
from token_files import END, after_each, before_each, files, header

from hfgpt import PretrainConfig, Pretrainer
from hfgpt.checkpointing.audit import audit
from hfgpt.data import prepare_data
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats import arrow
from hfgpt.data.formats.given import TRAINING, given_datasets
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.open_source import open_source
from hfgpt.data.position import SOURCE
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.data.units import Unusable
from hfgpt.errors import UserError

TEXTS = [f"document {n} says " + "la " * (n * 7 % 20) for n in range(160)]
OTHERS = [f"another one is {n * n % 101} and {n}" for n in range(150)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer whose end-of-text is id 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(load_tokenizer("bpe-300", lambda: TEXTS + OTHERS, 64), folder)
    return str(folder)


@pytest.fixture(scope="module")
def documents(tokenizer):
    return Encoder(load_tokenizer(tokenizer, lambda: (), 64)).tokens(TEXTS)


def column(kind, documents):
    """A table with `input_ids`: a row each document, or rows of 50 ids of a list type."""
    rows = documents
    if kind == "fixed":
        ids = after_each(documents)
        rows = [ids[start : start + 50] for start in range(0, len(ids) // 50 * 50, 50)]
    of_kind = {"list": pa.list_(pa.int32()), "large": pa.large_list(pa.int64()), "fixed": pa.list_(pa.uint16(), 50)}
    return pa.table({"id": list(map(str, range(len(rows)))), "input_ids": pa.array(rows, of_kind[kind])})


def stream_file(table, path):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)


WRITERS = {
    "parquet": lambda table, folder: pq.write_table(table, folder / "a.parquet", row_group_size=10**6),
    "arrow": lambda table, folder: stream_file(table, folder / "a.arrow"),
    "feather": lambda table, folder: pyarrow.feather.write_feather(table, folder / "a.feather"),
    "saved": lambda table, folder: datasets.Dataset(table).save_to_disk(str(folder)),
}


@pytest.mark.parametrize("kind", ["list", "large", "fixed"])
@pytest.mark.parametrize("form", [*WRITERS, "given"])
def test_a_column_of_ids_is_read_from_every_format_with_columns(tmp_path, documents, form, kind):
    table, name = column(kind, documents), TRAINING if form == "given" else str(tmp_path / "set")
    (tmp_path / "set").mkdir()
    WRITERS.get(form, lambda *_: None)(table, tmp_path / "set")
    with given_datasets({TRAINING: datasets.Dataset(table)} if form == "given" else {}):
        source = open_source(name, tokens_column="input_ids").with_vocabulary(Vocabulary(END, 300, "ours"))
        with pytest.raises(UserError, match=r"text_column=input_ids: contains .*, not text, .*give it as tokens_c"):
            open_source(name, text_column="input_ids")
        with pytest.raises(UserError, match="tokens_column=id: contains string, not lists of integers"):
            open_source(name, tokens_column="id")
        with pytest.raises(UserError, match="tokens_column=ids: not in "):
            open_source(name, tokens_column="ids")
        with pytest.raises(UserError, match=r"tokens_dtype=uint16: .* has no token files; leave it out"):
            open_source(name, tokens_column="input_ids", tokens_dtype="uint16")
    found = [row.tolist() for unit in source.units for row in source.read(unit)]
    if kind == "fixed":  # the pieces of a unit are joined; the last ids do not fill a row
        found, whole = after_each(found), after_each(documents)
        assert found[:1000] == whole[:1000]
    else:
        assert found == documents
    assert source.has_tokens and source.fingerprint["tokens"] == "column input_ids"


@pytest.fixture
def pair(tmp_path, documents):
    """The same two sources as texts, and as tokens in an index and text."""
    for name, texts in (("texts", TEXTS), ("others", OTHERS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ids = after_each(documents)
    (tmp_path / "tokens.bin").write_bytes(struct.pack(f"<{len(ids)}I", *ids))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": TEXTS[3]}) + "\n" + json.dumps({"text": "new"}) + "\n")
    stream_file(column("list", documents), tmp_path / "column.arrow")
    others = {"dataset": str(tmp_path / "others.jsonl"), "weight": 0.4}
    tokens = {"dataset": str(tmp_path / "tokens.bin"), "tokens_dtype": "uint32"}
    in_column = {"dataset": str(tmp_path / "column.arrow"), "tokens_column": "input_ids"}
    texts = {"dataset": str(tmp_path / "texts.jsonl")}
    return {
        key: [{**one, "name": "texts", "weight": 0.6}, others]
        for key, one in {"text": texts, "file": tokens, "column": in_column}.items()
    }


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("form", ["file", "column"])
def test_a_mixture_of_tokens_and_text_gives_the_blocks_of_a_mixture_of_texts(
    tmp_path, monkeypatch, tokenizer, pair, form, streaming
):
    monkeypatch.setattr(arrow, "SPAN_BYTES", 2**30)  # as few units as the text has
    shared = {
        "sequence_length": 32,
        "max_steps": 1,
        "streaming": streaming,
        "eval_dataset": str(tmp_path / "eval.jsonl"),
    }
    of_text, ready = (
        prepare_data(PretrainConfig(dataset=sources, tokenizer=tokenizer, **shared), 8)
        for sources in (pair["text"], pair[form])
    )
    whole = facts(parts(ready.train, None, 20))
    assert whole == facts(parts(of_text.train, None, 20)) and len({tuple(counts) for counts in whole[1]}) > 1
    assert ready.validation.tolist() == of_text.validation.tolist() and ready.skipped == of_text.skipped
    layout = "headerless uint32" if form == "file" else "column input_ids"
    assert ready.train.fingerprint[f"texts{SOURCE}dataset.tokens"] == layout
    for world, workers in ((2, 0), (2, 1), (4, 0)):
        first = parts(ready.train, None, 7, world, workers)
        assert facts(first + parts(ready.train, first[-1].position, 13, 1, workers)) == whole


def test_what_one_source_is_validated_on_is_left_out_of_the_other_in_its_own_form(tmp_path, tokenizer, pair, documents):
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[::-1]))
    shared = {"tokenizer": tokenizer, "sequence_length": 16, "max_steps": 1}
    both = [{"dataset": str(turned), "weight": 1}, pair["file"][0]]
    for streaming in (False, True):
        data = prepare_data(PretrainConfig(dataset=both, streaming=streaming, **shared), 8)
        as_text, tokens = data.train.sources.values()
        if streaming:
            left = [[row for unit in one.source.units for row in one.source.read(unit)] for one in (as_text, tokens)]
            found = {row for row in left[0] if isinstance(row, str)}
            assert [TEXTS[n] in found for n in (0, 80, 159)] == [False, True, False]
            found = {str(row.tolist()) for row in left[1] if not isinstance(row, Unusable)}
            assert [str(documents[n]) in found for n in (0, 80, 159)] == [False, True, False]
        else:
            assert data.skipped["in_validation"] > 20
            for one in (as_text.tokens, tokens.tokens):
                in_use = f"{one.tolist()}, {END}"
                assert [f"{[END, *documents[n], END]}"[1:-1] in in_use for n in (0, 80, 159)] == [False, True, False]


def test_the_tokenizer_of_a_mixture_is_stated_or_named_by_all_token_files(tmp_path, tokenizer, pair, documents):
    def named(folder, name):
        (tmp_path / folder).mkdir()
        content = files("datatrove", documents)
        content["00000_shuffled.ds.metadata"] = f"{name}|2\n{len(after_each(documents))}\n1".encode()
        for file, data in content.items():
            (tmp_path / folder / file).write_bytes(data)
        return {"dataset": str(tmp_path / folder), "weight": 1}

    def name_of(*sources, **settings):
        values = {"sequence_length": 32, "max_steps": 1, **settings}
        config = PretrainConfig.from_layers({"dataset": list(sources)}, values)
        return prepare_data(config, 8).tokenizer_name

    one, same, other = named("one", tokenizer), named("same", tokenizer), named("other", "gpt2")
    text, unnamed = pair["text"][1], pair["file"][0]
    assert name_of(text, one, same) == tokenizer
    assert name_of(text, unnamed | {"tokenizer": tokenizer}) == tokenizer
    with pytest.raises(UserError, match=r"^tokenizer: source texts contains tokens, whose files do not name their tok"):
        name_of(text, unnamed)
    with pytest.raises(UserError, match=r"^tokenizer: source one was made with .* and source other was made with gp"):
        name_of(one, other)
    with pytest.raises(UserError, match=r"tokenizer=char: source texts contains tokens; give the folder or Hub id"):
        name_of(text, unnamed | {"tokenizer": "char"})
    with pytest.raises(UserError, match=r"tokens_dtype=uint32: dataset is a list; set it in the source that it is for"):
        name_of(text, unnamed, tokens_dtype="uint32")
    with pytest.raises(UserError, match=r"^source others: tokens_dtype=uint16: .* has no token files; leave it out"):
        name_of({**text, "tokens_dtype": "uint16"}, one)
    with pytest.raises(UserError, match=r"source texts: tokens_dtype: every second uint16 of .* set it to uint32"):
        name_of(
            text, {key: value for key, value in unnamed.items() if key != "tokens_dtype"} | {"tokenizer": tokenizer}
        )
    beyond = [END, 1, 400]
    (tmp_path / "beyond.bin").write_bytes(header(20240520, 1, 3) + struct.pack("<3H", *beyond))
    with pytest.raises(UserError, match=r"^source beyond: tokenizer=.*: its highest id is 299, but token 2 of .* is"):
        name_of(text, {"dataset": str(tmp_path / "beyond.bin"), "weight": 1, "tokenizer": tokenizer})


def test_named_evaluation_texts_may_be_tokens(tokenizer, pair, documents):
    named = {"ready": pair["file"][0], "text": pair["text"][0]["dataset"], "column": pair["column"][0]}
    named = {
        key: {k: v for k, v in one.items() if k not in ("weight", "name")} if isinstance(one, dict) else one
        for key, one in named.items()
    }
    for dataset in (pair["text"][1]["dataset"], [pair["text"][1]]):
        config = PretrainConfig(
            dataset=dataset, tokenizer=tokenizer, eval_dataset=named, sequence_length=32, max_steps=1
        )
        found = prepare_data(config, 8).named_validation
        tokens, size = found["text"]
        assert tokens.tolist() == before_each(documents) and size == sum(len(text.encode()) for text in TEXTS)
        assert all(one[0].tolist() == tokens.tolist() and one[1] == size for one in found.values())
    config = PretrainConfig(dataset=dataset, tokenizer="bpe-280", eval_dataset=named, sequence_length=32, max_steps=1)
    with pytest.raises(UserError, match=r"tokenizer=bpe-280: eval_dataset.ready=.* contains tokens; give the folder"):
        prepare_data(config, 8)


def test_a_run_on_tokens_and_text_resumes_and_is_audited(monkeypatch, config, tokenizer, pair):
    monkeypatch.setenv("OURS", tokenizer)

    def build(name, **settings):
        sources = [{**pair["file"][0], "tokenizer": "$OURS"}, pair["text"][1]]
        return config(name, dataset=sources, tokenizer="auto", streaming=True, model={**MODEL}, **settings)

    whole = trained(build("whole"))
    with pytest.raises(KeyboardInterrupt):
        trained(build("cut"), StopAt(5))
    again = trained(build("cut", resume_from_checkpoint="latest"))
    assert whole.folder.ledger.read_text() == again.folder.ledger.read_text() and same_weights(whole, again)
    assert whole.config.tokenizer == tokenizer
    found = audit(again.folder.path)
    assert not found["problems"] and found["steps_as_recorded"] == found["steps"]
    card = (again.folder.checkpoint(6) / "README.md").read_text()
    assert "of the tokens: tokens.bin, token ids that were ready (headerless uint32); " in card


def test_a_given_set_of_tokens_is_trained_on_and_resumed(config, tokenizer, documents):
    given = {"train_dataset": datasets.Dataset(column("list", documents)).shuffle(seed=1)}
    settings = {"dataset": "embedded", "tokenizer": tokenizer, "tokens_column": "input_ids", "streaming": True}
    settings |= {"model": {**MODEL}, "max_steps": 4}
    Pretrainer(config("whole", **settings), **given).train()
    Pretrainer(config("cut", **settings | {"max_steps": 2}), **given).train()
    trainer = Pretrainer(config("cut", **settings, resume_from_checkpoint="latest"), **given)
    trainer.train()
    folder = trainer.run.folder.path
    assert (folder / "ledger.jsonl").read_text() == (folder.parent / "whole" / "ledger.jsonl").read_text()
    with pytest.raises(UserError, match=r"tokenizer: dataset=train_dataset contains tokens, whose files do not name"):
        Pretrainer(config("other", **settings | {"tokenizer": "auto"}), **given).train()


def test_tokens_are_evaluated_on_text_and_a_set_of_tokens_alone_says_what_to_set(
    tmp_path, config, tokenizer, documents
):
    ready = datasets.Dataset(column("list", documents))
    ready.to_parquet(tmp_path / "ids.parquet")
    text, pairs = datasets.Dataset.from_list([{"body": "document 7 says words"}]), []
    text.to_parquet(tmp_path / "text.parquet")
    settings = {"tokenizer": tokenizer, "model": {**MODEL}, "max_steps": 1, "eval_steps": 1, "text_column": "body"}
    of_ids = {**settings, "dataset": "embedded", "tokens_column": "input_ids"}
    pairs.append(Pretrainer(config("given", **of_ids), (), ready, text).train())
    pairs.append(Pretrainer(config("named", **of_ids), (), ready, {"one": text}).train())
    file = {**of_ids, "dataset": str(tmp_path / "ids.parquet"), "eval_dataset": str(tmp_path / "text.parquet")}
    pairs.append(trained(config("file", **file)).progress.evaluation)
    assert len({(one["eval_loss"], one["eval_bits_per_byte"]) for one in pairs}) == 1 and pairs[0]["eval_tokens"] > 0
    hint = "its columns are .*input_ids.*; input_ids has lists of token ids: set tokens_column to input_ids"
    with pytest.raises(UserError, match=f"text_column=body: not in train_dataset; {hint}"):
        Pretrainer(config("no", **{**of_ids, "tokens_column": None}), (), ready, text).train()
    with pytest.raises(UserError, match=f"text_column=body: not in .*ids.parquet; {hint}"):
        trained(config("no", **{**file, "tokens_column": None}))
    with pytest.raises(UserError, match=r"^tokens_column=input_ids: not in eval_dataset; its columns are other"):
        Pretrainer(config("no", **of_ids), (), ready, text.rename_column("body", "other")).train()
