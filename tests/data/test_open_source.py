"""Every document of every kind of file is read once; what cannot be read is counted or named."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
import sysconfig
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfgpt.data import embedded
from hfgpt.data.embedded import embedded_documents
from hfgpt.data.formats import spans
from hfgpt.data.formats import text as text_format
from hfgpt.data.open_source import open_source
from hfgpt.data.units import Unusable
from hfgpt.errors import UserError

ODD = Path(__file__).parents[3] / "shared" / "data" / "odd"
TEXTS = [f"document {n}: {'é' * (n % 5)}\nsecond line" for n in range(30)]


def write_parquet(path, texts, rows_per_group=10, column="text"):
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=rows_per_group)


def write_jsonl(path, texts):
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def read(source):
    """Usable documents, and unusable rows by reason."""
    source = pickle.loads(pickle.dumps(source))
    rows = [row for unit in source.units for row in source.read(unit)]
    reasons = Counter(row.reason for row in rows if isinstance(row, Unusable))
    return [row for row in rows if isinstance(row, str)], dict(reasons)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.jsonl.gz", "A.JSONL.gz"])
def test_documents_of_a_file(tmp_path, name):
    path = tmp_path / name
    write_parquet(path, TEXTS) if path.suffix == ".parquet" else write_jsonl(path, TEXTS)
    source = open_source(str(path))
    assert read(source) == (TEXTS, {})
    assert source.size_bytes == path.stat().st_size and source.is_local


@pytest.mark.parametrize("span", [1, 7, 64, 100, 10_000])
def test_spans_cut_between_lines(tmp_path, monkeypatch, span):
    monkeypatch.setattr(spans, "SPAN_BYTES", span)
    path = tmp_path / "a.jsonl"
    write_jsonl(path, TEXTS)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    source = open_source(str(path))
    assert len(source.units) == -(-path.stat().st_size // span)
    assert read(source) == (TEXTS, {})


def test_a_split_on_the_hub_without_readable_files_is_refused_with_the_fix(monkeypatch):
    files = ["hf://datasets/user/tables@c0ffee/data/a.pdf"]
    monkeypatch.setattr("hfgpt.data.converted.hub_files", lambda *_: (files, "c0ffee"))
    monkeypatch.setattr("hfgpt.data.converted._converted_files", lambda *_: None)
    with pytest.raises(
        UserError, match=r"file in split train; a\.pdf is a formatted document, which is not supported; save its text"
    ):
        open_source("user/tables")


def test_folders_and_globs_take_known_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "b.jsonl", ["b"])
    write_jsonl(tmp_path / "sub" / "c.jsonl.gz", ["c"])
    write_parquet(tmp_path / "a.parquet", ["a"])
    (tmp_path / "notes.md").write_text("not text to train on")
    assert read(open_source(str(tmp_path)))[0] == ["a", "b", "c"]
    assert read(open_source(str(tmp_path / "*.jsonl")))[0] == ["b"]


def test_fingerprint_knows_the_text_but_not_the_folder(tmp_path):
    prints = []
    for folder, texts in (("one", ["a", "b"]), ("two", ["a", "b"]), ("three", ["a", "c"])):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "x.jsonl", texts)
        prints.append(open_source(str(tmp_path / folder)).fingerprint)
    assert prints[0] == prints[1] != prints[2]
    assert json.loads(json.dumps(prints)) == prints


def test_small_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert read(open_source(str(path))) == (["one\n\ntwo\n"], {})


def test_large_text_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "IN_MEMORY_BYTES", 1000)
    monkeypatch.setattr(spans, "SPAN_BYTES", 5000)
    monkeypatch.setattr(text_format, "DOCUMENT_CHARACTERS", 500)
    text = "".join(f"line {n}, é\n" for n in range(3000))
    (tmp_path / "a.txt").write_text(text)
    documents, reasons = read(open_source(str(tmp_path / "a.txt")))
    assert "".join(documents) == text and not reasons
    assert all(document.endswith("\n") and len(document) < 520 for document in documents)
    assert len(documents) > len(text) // 1000


def test_unusable_rows_are_counted_by_reason(tmp_path):
    lines = [
        b'{"text": "good"}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": " \\n"}',
        b'{"text": 3}',
        b'{"other": "x"}',
        b"[1]",
        b'{"text": "half',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b"",
        b"  \r",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert read(open_source(str(tmp_path / "a.jsonl"))) == (
        ["good"],
        {
            "null": 1,
            "empty": 1,
            "whitespace": 1,
            "not_text": 1,
            "no_text_column": 1,
            "not_an_object": 1,
            "malformed": 2,
            "invalid_utf8": 1,
            "lone_surrogate": 1,
        },
    )


def test_invalid_utf8_in_parquet_is_counted(tmp_path):
    column = pa.array([b"fine", b"caf\xe9", None], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(open_source(str(tmp_path / "a.parquet"))) == (["fine"], {"invalid_utf8": 1, "null": 1})


def test_docstrings_are_found_wherever_python_has_them_and_other_strings_are_not():
    quote = '"' * 3
    source = f"""# -*- coding: utf-8 -*-

{quote}Of the module.{quote}
text = {quote}no docstring{quote}
class A(B):
    r{quote}Of the class: \\d.{quote}
    async def f(self, x: int = 3) -> int:  # a comment

        {"'" * 3}Of the method,
        in two lines, with \\"quotes\\" and \\x41.{"'" * 3}
        return call({quote}no docstring{quote})
    def g(self):
        {quote}Not \\xZZ Python.{quote}
"""
    found = ["Of the module.", "Of the class: \\d.", 'Of the method,\nin two lines, with "quotes" and A.', ""]
    assert list(embedded._docstrings(source)) == found


@pytest.mark.slow
def test_embedded_text_is_english_in_quantity_and_always_the_same(monkeypatch):
    source = open_source("embedded")
    documents, reasons = read(source)
    assert not reasons and len(set(documents)) == len(documents) > 2000
    assert sum(map(len, documents)) > 1_000_000
    assert any('The "if" statement is used for conditional execution' in text for text in documents)
    # Again, in whatever order the files are listed; of a part of the library, as the whole takes long.
    part, listed = Path(sysconfig.get_path("stdlib"), "asyncio"), Path.rglob
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(part))
    first = embedded_documents.__wrapped__()
    assert len(first) > 200 and set(first) < set(documents)
    monkeypatch.setattr(Path, "rglob", lambda *given: list(listed(*given))[::-1])
    assert embedded_documents.__wrapped__() == first
    assert open_source("embedded").fingerprint == source.fingerprint


def test_missing_file_offers_the_nearest_name(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(UserError, match=r"dataset=.*/corpsu\.txt: no such file .*did you mean .*/corpus\.txt"):
        open_source(str(tmp_path / "corpsu.txt"))
    with pytest.raises(UserError, match=r"dataset=nowhere\.txt: no such file"):
        open_source("nowhere.txt")


@pytest.mark.parametrize(("present", "asked"), [("corpus.pkl", "corpsu.pkl"), ("x.txt", "y.txt")])
def test_missing_file_offers_no_file_that_is_no_help(tmp_path, present, asked):
    (tmp_path / present).write_text("x")
    with pytest.raises(UserError, match="no such file or folder; check the path"):
        open_source(str(tmp_path / asked))


def test_unreachable_hub_is_one_line(monkeypatch):
    import huggingface_hub
    from transformers import AutoTokenizer

    from hfgpt.data.tokenization import load_tokenizer

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    def unreachable(*_, **__):
        client.warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no way there")

    lines, client, handler = [], logging.getLogger("huggingface_hub.utils._http"), Lines()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    client.addHandler(handler)
    try:
        with pytest.raises(UserError, match=r"dataset=user/corpus: .*no way there"):
            open_source("user/corpus", patience_seconds=0)
        with pytest.raises(UserError, match=r"tokenizer=user/corpus: .*no way there"):
            load_tokenizer("user/corpus", lambda: [], 8)
        assert lines == []
        client.warning("heard again")
        assert lines == ["heard again"]
    finally:
        client.removeHandler(handler)


def test_a_folder_that_is_not_there_is_no_matter_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expected = (
        r"^dataset=books: no such local file or folder, and no dataset of that name is cached, .*; check the name"
    )
    with pytest.raises(UserError, match=f"{expected}$"):
        open_source("books")
    (tmp_path / "book").mkdir()
    with pytest.raises(UserError, match=f"{expected}; did you mean book\\?$"):
        open_source("books")


def test_missing_column_lists_the_existing_ones(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS, column="content")
    (tmp_path / "a.jsonl").write_text('{"title": "t", "body": "b"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"title": "t", "body": "b"}\n'))
    with pytest.raises(UserError, match=r"text_column=text: not in .*a\.parquet; its columns are id, content"):
        open_source(str(tmp_path / "a.parquet"))
    for name in ("a.jsonl", "a.jsonl.gz"):
        with pytest.raises(UserError, match=r"text_column=text: not in .*; its columns are title, body"):
            open_source(str(tmp_path / name))
    with pytest.raises(UserError, match="text_column=id: contains int64, not text"):
        open_source(str(tmp_path / "a.parquet"), text_column="id")
    assert read(open_source(str(tmp_path / "a.jsonl"), text_column="body"))[0] == ["b"]


def test_files_of_no_use_are_named(tmp_path):
    (tmp_path / "a.zip").write_text("x")
    for dataset in (tmp_path / "a.zip", tmp_path, tmp_path / "*.zip"):
        with pytest.raises(UserError, match=r"dataset=.*parquet, arrow, jsonl"):
            open_source(str(dataset))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.parquet", b"PAR1....", "cut.parquet cannot be read"),
        ("pointer.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ("pointer.txt", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ("page.jsonl", b"\n<!DOCTYPE html><html>", "a web page"),
        ("plain.jsonl.gz", b'{"text": "a"}\n', "plain.jsonl.gz cannot be read"),
        ("plain.txt.gz", b"plain text", "plain.txt.gz cannot be read"),
        ("cut.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-12], "cut.txt.gz cannot be read"),
        ("latin.txt", "ab\ncafé".encode("latin-1"), "latin.txt is not UTF-8 text .*0xe9 in position 6"),
    ],
)
def test_file_that_is_not_what_it_says_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(open_source(str(tmp_path / name)))


def odd_files():
    return json.loads((ODD / "EXPECTED.json").read_text()) if ODD.is_dir() else {}


@pytest.mark.parametrize("name", odd_files() or ["absent"])
def test_odd_files(name):
    if name == "absent":
        pytest.skip("needs the odd files in ../shared/data/odd")
    expected = odd_files()[name]
    column = "x" if name == "real_bad_ARROW-GH-45185.parquet" else "text"
    refused = (
        "reads" in expected
        or expected.get("valid_utf8") is False
        or name in ("not_gzip.jsonl.gz", "no_text_column.parquet")
    )
    if refused:
        with pytest.raises(UserError, match=name):
            read(open_source(str(ODD / name), text_column=column))
        return
    documents, reasons = read(open_source(str(ODD / name)))
    skipped = sum(reasons.values())
    if "good_rows" in expected:
        assert len(documents) == expected["good_rows"]
    if "rows" in expected:
        assert len(documents) + skipped == expected["rows"]
    assert skipped == expected.get("bad_lines", expected.get("bad_rows", skipped))
    for reason, key in (("null", "null"), ("empty", "empty"), ("whitespace", "whitespace_only")):
        assert reasons.get(reason, 0) == expected.get(key, reasons.get(reason, 0))
    if "chars" in expected:
        characters = [len(document) for document in documents]
        assert characters == (expected["chars"] if isinstance(expected["chars"], list) else [expected["chars"]])
    if name == "empty_docs.jsonl":
        assert {"x", "A real one.", "second wins"} <= set(documents)
    if name == "empty.txt":
        assert (documents, reasons) == ([], {"empty": 1})


@pytest.mark.parametrize("what", ["dataset", "tokenizer", "init_from"])
def test_a_hub_that_is_not_there_is_named_in_seconds_without_waiting_for_it(monkeypatch, tmp_path, what):
    import huggingface_hub
    from huggingface_hub import constants

    from hfgpt.config import PretrainConfig
    from hfgpt.data import prepare_data, remote
    from hfgpt.data.remote import model_files

    def unreachable(*_, **__):
        raise ConnectionError("no way there")

    def never(*_, **__):
        pytest.fail("waited")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote, "CONTACT_SECONDS", 0.2)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: type("Session", (), {"head": unreachable})())
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.setattr("hfgpt.data.run_tokenizer.load_tokenizer", never)
    (tmp_path / "a.txt").write_text("some text\n" * 99)
    with pytest.raises(UserError, match=rf"^{what}=nope/nothing: no .*local file.* the Hub at .* cannot be reached"):
        if what == "dataset":
            open_source("nope/nothing")
        elif what == "tokenizer":
            prepare_data(PretrainConfig(dataset=str(tmp_path), tokenizer="nope/nothing", max_steps=1), 8)
        else:
            model_files("nope/nothing")
