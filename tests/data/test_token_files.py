"""Tokens that are ready give the documents that they were made of, whatever their layout, and are checked."""

from __future__ import annotations

import json
import pickle
import struct
from itertools import islice

import numpy as np
import pytest
from token_files import END, LAYOUTS, STATED, after_each, before_each, files, header, npy, shards

from hfgpt import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats.tokens import reading
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.loader import iterate
from hfgpt.data.sources import open_source
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import UserError

TEXTS = [f"document {n} says " + "la " * (n * 7 % 20) for n in range(160)]
VOCABULARY = Vocabulary(END, 300, "ours")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer whose end-of-text is id 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(load_tokenizer("bpe-300", lambda: TEXTS, 64), folder)
    return str(folder)


@pytest.fixture(scope="module")
def documents(tokenizer):
    return Encoder(load_tokenizer(tokenizer, lambda: (), 64)).tokens(TEXTS)


def written(folder, content):
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


def read(source, vocabulary=VOCABULARY):
    source = pickle.loads(pickle.dumps(source.with_vocabulary(vocabulary)))
    return [row.tolist() for unit in source.units for row in source.read(unit)]


@pytest.mark.parametrize("span", [7, 64, 10_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_its_documents(tmp_path, monkeypatch, documents, layout, span):
    monkeypatch.setattr(reading, "SPAN_TOKENS", span)
    monkeypatch.setattr(reading, "MORE_TOKENS", 3)
    source = open_source(written(tmp_path / "set", files(layout, documents)), **STATED.get(layout, {}))
    assert source.has_tokens and read(source) == documents
    assert len(source.units) > 10 or span > 64 or "column" in layout


def test_documents_may_cross_several_files_and_empty_ones_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MORE_TOKENS", 2)
    documents = [[1, 2, 3], list(range(1, 40)), [4], [5, 6]]
    ids = [*before_each(documents[:2]), END, *before_each(documents[2:]), END]
    parts = [ids[:6], ids[6:20], ids[20:44], ids[44:46], ids[46:47], ids[47:]]
    for number, part in enumerate(parts, 1):
        (tmp_path / f"s_train_{number:06}.bin").write_bytes(
            header(20240520, 1, len(part)) + struct.pack(f"<{len(part)}H", *part)
        )
    assert read(open_source(str(tmp_path))) == documents
    (tmp_path / "s_train_000003.bin").unlink()  # without it, nothing continues in the fourth
    assert read(open_source(str(tmp_path))) == [[1, 2, 3], ids[5:20], [4], [5, 6]]


def test_layouts_are_found_by_content_and_beside_files_of_text(tmp_path, documents):
    [(_, data), *_] = files("llm.c", documents).items()
    (tmp_path / "tokens.data").write_bytes(data)
    (tmp_path / "README.txt").write_text("about them")
    source = open_source(str(tmp_path))
    assert source.has_tokens and "README.txt" in source.description and "llm.c" in source.description
    (tmp_path / "text").mkdir()  # as in nanoGPT's folders: the text, and .bin files that could be anything
    (tmp_path / "text" / "input.txt").write_text("the text")
    (tmp_path / "text" / "train.bin").write_bytes(b"\1\2\3")
    assert not open_source(str(tmp_path / "text")).has_tokens
    (tmp_path / "text" / "train.bin").write_bytes(b"\1\0\2\0")
    assert open_source(str(tmp_path / "text"), tokens_dtype="uint16").has_tokens


def blocks(tokenizer, dataset, count=30, **settings):
    settings = {"sequence_length": 32, "max_steps": 1, "tokenizer": tokenizer, **settings}
    data = prepare_data(PretrainConfig(dataset=dataset, **settings), 8)
    return data, [batch.blocks for batch in islice(iterate(data.train, None), count)]


@pytest.mark.parametrize("layout", ["nanogpt", "datatrove", "megatron", "column", "packed-column", "llm.c"])
@pytest.mark.parametrize("streaming", [True, False])
def test_tokens_and_their_text_give_equal_blocks(tmp_path, tokenizer, documents, layout, streaming):
    if streaming and layout == "llm.c":
        pytest.skip("several files, which a stream shuffles")
    written(tmp_path / "set", files(layout, documents))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": TEXTS[3]}) + "\n" + json.dumps({"text": "new"}) + "\n")
    shared = {"eval_dataset": str(tmp_path / "other.jsonl"), "streaming": streaming}
    of_text, expected = blocks(tokenizer, str(tmp_path / "text.jsonl"), **shared)
    ready, found = blocks(tokenizer, str(tmp_path / "set"), **shared, **STATED.get(layout, {}))
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
    assert ready.skipped == of_text.skipped and ready.skipped["in_validation"] == (0 if streaming else 1)
    assert ready.validation.tolist() == of_text.validation.tolist()
    assert ready.validation_bytes == of_text.validation_bytes == len((TEXTS[3] + "new").encode())
