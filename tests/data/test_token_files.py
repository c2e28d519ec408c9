"""Tokens that are ready give the documents that they were made of, whatever their layout, and are checked."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from itertools import islice

import numpy as np
import pytest
import torch
from test_every_format import PACK
from token_files import END, LAYOUTS, STATED, after_each, before_each, files, header, npy

from hfgpt import PretrainConfig
from hfgpt.data import heads, prepare_data
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats.tokens import layouts, reading
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.loader import iterate
from hfgpt.data.open_source import open_source
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


GOOD = list(range(1, 60))
NEW_HEADER = header(20240520, 1, 59) + struct.pack("<59H", *GOOD)
INDEX = files("megatron", [[1, 2], [3, 4, 5]])["set_text_document.idx"]
ZIP = io.BytesIO()
with zipfile.ZipFile(ZIP, "w") as archive:
    archive.writestr("model/data.pkl", "x")
BAD = {
    "magic": ({"a.bin": header(20240521, 1, 59) + struct.pack("<59H", *GOOD)}, {}, "magic 20240521, which is none of"),
    "version": (
        {"a.bin": header(20240520, 2, 59) + struct.pack("<59H", *GOOD)},
        {},
        "version 2 of the layout of llm.c",
    ),
    "width": ({"a.bin": header(278895051, 1, 59, 3) + b"\1" * 177}, {}, "says 3 bytes a token; only 2 and 4"),
    "unfinished": (
        {"a.bin": NEW_HEADER[:-10]},
        {},
        "its header says 59 tokens, but its 1,132 bytes hold 54; it is not fin",
    ),
    "odd count": ({"a.bin": NEW_HEADER + b"\0"}, {}, "its header says 59 tokens, but its 1,143 bytes hold 59.5"),
    **{
        f"header cut at {size}": (
            {"a.bin": NEW_HEADER[:size]},
            {},
            f"header of .* cut off after {size:,} of 1,024 bytes",
        )
        for size in (4, 8, 12, 1000)
    },
    "no count": ({"a.bin": header(20240520, 1, 0)}, {}, "contains no tokens; finish writing it"),
    "odd": ({"a.bin": b"\1\0\2"}, {}, "3 bytes are not a whole number of uint16 tokens; finish copying"),
    "odd for uint32": (
        {"a.bin": b"\1\0\2\0\3\0"},
        {"tokens_dtype": "uint32"},
        "6 bytes are not a whole number of uint32",
    ),
    "uint32 of 128,256 ids": (
        {"a.bin": struct.pack("<64I", *(2001 * i % 128_256 for i in range(64)))},
        {},
        "every second uint16 of .* is 1 or less, so its tokens are uint32; set it to uint32",
    ),
    "uint32 as uint16": ({"a.bin": struct.pack("<59I", *GOOD)}, {}, "every second uint16 of .* set it to uint32"),
    "empty": ({"a.bin": b""}, {}, "is empty; finish writing"),
    "not stated": (
        {"a.npy": struct.pack("<59H", *GOOD)},
        {},
        "states the type of its tokens; set --tokens_dtype: uint16",
    ),
    "stated": (
        {"a.bin": NEW_HEADER},
        {"tokens_dtype": "uint32"},
        "tokens_dtype=uint32: .* itself says uint16; leave it",
    ),
    "a model": ({"a.bin": ZIP.getvalue()}, {}, "is a zip archive"),
    "parquet": ({"a.bin": b"PAR1" + bytes(range(100)) + b"PAR1"}, {}, "is parquet; rename it to .parquet"),
    **{
        f"packed {suffix}": ({"a.bin": pack(struct.pack("<590H", *GOOD * 10))}, {}, f"add {suffix} to its name")
        for suffix, pack in PACK.items()
    },
    "floats": ({"a.npy": npy(GOOD, "float32")}, {}, "an array of float32 and shape .59,."),
    "npy cut": ({"a.npy": npy(GOOD, "uint16")[:-2]}, {}, "its header says 59 tokens, but"),
    "no idx": ({"a_text_document.bin": b"\1\0"}, {}, "needs its index a_text_document.idx next to it"),
    "no bin": ({"a.idx": INDEX}, {}, "needs the tokens a.bin next to it"),
    "short bin": ({"a.idx": INDEX, "a.bin": b"\1\0"}, {}, "a.idx points outside of the 1 tokens of a.bin"),
    "short idx": ({"a.idx": INDEX[:-1], "a.bin": b"\1\0"}, {}, "need 106 bytes, but it has 105"),
    "other idx": ({"a.idx": b"MMIDIDX\0\1" + INDEX[9:], "a.bin": b""}, {}, "does not begin with MMIDIDX"),
    "floats idx": ({"a.idx": INDEX[:17] + b"\7" + INDEX[18:], "a.bin": b""}, {}, "version 1 with tokens of type 7"),
    "index ahead": (
        {"a.ds": b"\1\0" * 9, "a.ds.index": struct.pack("<3Q", 4, 12, 9)},
        {},
        "a.ds.index points outside of the 9 tokens",
    ),
    "index back": ({"a.ds": b"\1\0" * 9, "a.ds.index": struct.pack("<3Q", 4, 2, 9)}, {}, "points outside of the 9"),
    "index count": ({"a.ds": b"\1\0" * 9, "a.ds.index": struct.pack("<2Q", 4, 8)}, {}, "its index says 8 tokens, but"),
    "index cut": ({"a.ds": b"\1\0" * 9, "a.ds.index": b"\1"}, {}, "1 bytes are not a whole number of uint64"),
    "column": (
        {"a.parquet": files("column", [[1]]).popitem()[1]},
        {"tokens_column": "ids"},
        "tokens_column=ids: not in",
    ),
    "text column": (
        {"a.parquet": files("column", [[1]]).popitem()[1]},
        {"text_column": "input_ids"},
        "give it as tokens_c",
    ),
    "dtype of text": (
        {"a.txt": b"text"},
        {"tokens_dtype": "uint16"},
        "tokens_dtype=uint16: .* has no token files; leave it",
    ),
    "column of text": (
        {"a.txt": b"text"},
        {"tokens_column": "ids"},
        "a.txt is neither parquet nor Arrow, so it has no lists of ids",
    ),
    "column of tokens": (
        {"a.bin": NEW_HEADER},
        {"tokens_column": "ids"},
        "tokens_column=ids: .* has no columns; leave it",
    ),
    "metadata": (
        {"a.ds": b"\1\0", "a.ds.metadata": b"\0\1x"},
        {},
        "a.ds.metadata cannot be read .*; copy it again, or",
    ),
    "sidecar": ({"a.bin": NEW_HEADER, "hfgpt_tokens.json": b"[]"}, {}, "hfgpt_tokens.json is not a JSON object; copy"),
    "two tokenizers": (
        {"a.ds": b"\1\0", "a.ds.metadata": b"x|2\n1", "b.ds": b"\1\0", "b.ds.metadata": b"y|2\n1"},
        {},
        "of one tokenizer",
    ),
}


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".ds"])
def test_ids_may_begin_like_any_kind_of_file(tmp_path, suffix):
    beginnings = [beginning for beginning in heads._BEGINNINGS if len(beginning) < 8]
    for beginning in [*beginnings, b"\x1f\x8b\x08\0", b"MMIDIDX\0\0", struct.pack("<3i", 20240520, 1, 59)]:
        data = beginning + bytes(len(beginning) % 2) + struct.pack("<118H", *[301, *GOOD[1:]] * 2)
        (tmp_path / f"a{suffix}").write_bytes(data)
        found = layouts.recognize(str(tmp_path / f"a{suffix}"), "uint16", os.path.exists)
        assert (found.dtype, found.offset, found.count) == ("<u2", 0, len(data) // 2), beginning


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path, name):
    content, stated, expected = BAD[name]
    with pytest.raises(UserError, match=expected) as caught:
        open_source(written(tmp_path / "set", content), **stated)
    assert len(str(caught.value).splitlines()) == 1


def test_ids_are_checked_against_the_tokenizer_with_both_numbers(tmp_path, tokenizer):
    number = 3 * reading.SPAN_TOKENS  # in the middle, where no sample is
    ids = np.ones(number, "<u2")
    path = tmp_path / "a.bin"
    ids.tofile(path)
    source = open_source(str(path)).with_vocabulary(VOCABULARY)
    ids[number // 2 + 999] = 300
    ids.tofile(path)
    with pytest.raises(
        UserError, match=r"tokenizer=ours: its highest id is 299, but token 787,431 of .* is id 300; give"
    ):
        [source.read(unit) for unit in source.units]
    ids[-1] = 301
    ids.tofile(path)
    with pytest.raises(
        UserError, match=r"its highest id is 299, but token 1,572,863 of .* is id 301; give the tokenizer"
    ):
        blocks(tokenizer, str(path))
    with pytest.raises(UserError, match=r"tokenizer=char: dataset=.* contains tokens; give the folder or Hub id"):
        blocks("char", str(path))


@pytest.mark.parametrize("form", ["npy", "headerless", "column"])
def test_ids_below_zero_are_damage_whatever_the_tokenizer(tmp_path, tokenizer, form):
    stated = {"npy": {}, "headerless": {"tokens_dtype": "int32"}, "column": {"tokens_column": "input_ids"}}[form]
    content = {"npy": {"a.npy": npy([1, 2, -3] * 99, "int32")}, "column": files("column", [[1, 2, -3]] * 99)}
    content["headerless"] = {"a.bin": np.array([1, 2, -3] * 99, "<i4").tobytes()}
    message = r"^dataset: .* id -3, but ids below 0 come from damage.*; write or copy the tokens again"
    with pytest.raises(UserError, match=message) as caught:
        blocks(tokenizer, written(tmp_path / "set", content[form]), **stated)
    assert ("--tokens_dtype" in str(caught.value)) == (form == "headerless")


def test_megatron_files_are_found_by_their_prefix(tmp_path, documents, monkeypatch):
    written(tmp_path, files("megatron", documents))
    [index] = tmp_path.rglob("*.idx")
    monkeypatch.chdir(index.parent.parent)
    relative = os.path.join(index.parent.name, index.stem)  # which could also be the name of a set on the Hub
    for prefix in (str(index.with_suffix("")), relative):
        assert read(open_source(prefix)) == documents
    index.unlink()
    with pytest.raises(UserError, match=rf"needs its index {index.name} next to it"):
        open_source(relative)


def test_files_that_shrink_are_reported(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\1\0" * 100)
    source = open_source(str(path)).with_vocabulary(VOCABULARY)
    path.write_bytes(b"\1\0" * 50)
    with pytest.raises(UserError, match="is shorter than when it was opened"):
        source.read(source.units[0])


def test_files_that_the_set_calls_validation_are_held_out(tmp_path, tokenizer, documents):
    for names in (
        ("s_val_000000.bin", "s_train_000001.bin"),
        ("val.bin", "train.bin"),
        ("s_000000.bin", "s_000001.bin"),
    ):
        folder = tmp_path / names[0]
        for name, part in zip(names, (documents[:20], documents[20:]), strict=True):
            ids = before_each(part)
            written(folder, {name: header(20240520, 1, len(ids)) + struct.pack(f"<{len(ids)}H", *ids)})
        data, _ = blocks(tokenizer, str(folder))
        assert data.validation.tolist() == before_each(documents[:20])
        assert data.validation_bytes == sum(len(text.encode()) for text in TEXTS[:20])
        assert names[0] in data.train.fingerprint["held_out"]
        kept = [ids for ids in documents[20:] if ids not in documents[:20]]
        assert data.train.tokens.tolist() == before_each(kept)
        data, _ = blocks(tokenizer, str(folder), eval_tokens=30)
        assert data.validation.tolist() == before_each(documents[:20])[:31]


def test_a_part_of_the_tokens_is_held_out_otherwise(tmp_path, tokenizer, documents):
    folder = written(tmp_path / "set", files("nanogpt", documents))
    for streaming in (True, False):
        data, _ = blocks(tokenizer, folder, streaming=streaming)
        assert abs(len(data.validation) - len(before_each(documents)) / 10) < 5
        assert data.validation.tolist()[-100:] == before_each(documents)[-100:]
        assert any("of the tokens" in line for line in data.description)


def test_tokens_without_separators_are_read_in_pieces_by_a_stream(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_TOKENS", 50)
    ids = np.random.default_rng(0).integers(1, 300, 5000).tolist()
    (tmp_path / "a.bin").write_bytes(struct.pack("<5000H", *ids))
    data, _ = blocks(tokenizer, str(tmp_path / "a.bin"), streaming=True)
    assert data.train.fingerprint["dataset.token_pieces"] == 50 and len(data.validation) == 500 + 10
    data, _ = blocks(tokenizer, str(tmp_path / "a.bin"), streaming=False)
    assert data.train.tokens.tolist() == [END, *ids[:4500]]


def test_the_tokenizer_is_stated_or_named_by_the_files(tmp_path, tokenizer, documents):
    content = files("datatrove", documents)
    count = f"{len(after_each(documents))}\n1".encode()
    content["00000_shuffled.ds.metadata"] = f"{tokenizer}|2\n".encode() + count
    folder = written(tmp_path / "named", content)
    settings = {"sequence_length": 32, "max_steps": 1}
    for config in (
        PretrainConfig(dataset=folder, **settings),
        PretrainConfig.from_layers({"dataset": folder}, settings),
    ):
        assert prepare_data(config, 8).tokenizer_name == tokenizer
    config = PretrainConfig.from_layers({"dataset": folder}, recipe=[{**settings, "tokenizer": "char"}])
    assert prepare_data(config, 8).tokenizer_name == tokenizer
    other = written(tmp_path / "other", content | {"00000_shuffled.ds.metadata": b"someone/other|2\n" + count})
    damaged = written(tmp_path / "damaged", content | {"00000_shuffled.ds.metadata": b"\0\1nonsense"})
    for dataset, note in (
        (folder, None),
        (
            other,
            f"note: the files of dataset={other} name someone/other as their tokenizer; --tokenizer {tokenizer} is",
        ),
        (damaged, f"note: {damaged}/00000_shuffled.ds.metadata cannot be read; it names the tokenizer"),
    ):
        lines = prepare_data(PretrainConfig(dataset=dataset, tokenizer=tokenizer, **settings), 8).description
        assert [line.startswith(note or "") for line in lines if line.startswith("note")] == [True] * bool(note)
    with pytest.raises(UserError, match=r"but .*ds.metadata, which names their tokenizer, cannot be read; set --tok"):
        prepare_data(PretrainConfig(dataset=damaged, **settings), 8)
    recipe = [{**settings, "tokenizer": "char"}]
    with pytest.raises(
        UserError, match=r"^tokenizer=someone/other: .*recipe's char: state .* --tokenizer PATH, or as `t"
    ):
        prepare_data(PretrainConfig.from_layers({"dataset": other}, recipe=recipe), 8)
    for layout in ("nanogpt", "nemo-2"):
        folder = written(tmp_path / layout, files(layout, documents))
        with pytest.raises(
            UserError, match=r"tokenizer: dataset=.* whose files do not name their tokenizer; set --token"
        ):
            prepare_data(PretrainConfig(dataset=folder, **settings), 8)


@pytest.mark.parametrize("width", [2, 4])
def test_files_of_datatrove_itself_give_their_documents(tmp_path, documents, width):
    """Its own writer, plain and in the order that it shuffles documents to."""
    writer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer", reason="needs datatrove")
    options = {"save_final_metadata": True, "tokenizer_name_or_path": "gpt2", "token_size": width}
    file = writer.TokenizedFile(str(tmp_path / "plain"), "a.ds", **options)
    for document in documents:
        file.write([*document, END], None)
    order = np.random.default_rng(0).permutation(len(documents))
    file.close()
    file.copy("a.ds", order, writer.get_datafolder(str(tmp_path / "shuffled")))
    source = open_source(str(tmp_path / "plain"))
    assert read(source) == documents and source.made_with.name == "gpt2"
    assert read(open_source(str(tmp_path / "shuffled"))) == [documents[i] for i in order]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_files_of_megatron_itself_give_their_documents(tmp_path, documents, dtype):
    """Its own writer: documents of one sequence, and documents of several sentences."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core")
    for name, sentences in (("whole", 1), ("split", 3)):
        (tmp_path / name).mkdir()
        prefix = str(tmp_path / name / "a_text_document")
        builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
        for document in documents:
            parts = np.array_split(np.array([*document, END]), sentences)
            builder.add_document(torch.tensor(np.concatenate(parts)), [len(part) for part in parts])
        builder.finalize(f"{prefix}.idx")
        assert read(open_source(str(tmp_path / name))) == documents
