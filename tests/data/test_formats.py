"""A file that is not what it should be is named for what it is, alone and beside good ones; no file is read twice."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_open_source import read, write_jsonl, write_parquet

from hfgpt.data.open_source import open_source
from hfgpt.errors import UserError

ROWS = [{"text": f"good row {n}", "tags": {"n": n}} for n in range(25)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
PAGE = "<!DOCTYPE html>\n<html><head><title>503</title></head><body>Service unavailable</body></html>\n"
PARQUET = b"PAR1\x15\x04" + bytes(99) + b"PAR1"
KINDS = {
    "object_indented.json": (
        json.dumps({"text": "one", "n": [1, 2]}, indent=2),
        "JSON object that spans several lines",
    ),
    "objects_indented.jsonl": ("\n".join(json.dumps(row, indent=1) for row in ROWS), "spans several lines"),
    "object_of_rows.json": (
        '{"rows": [\n' + ",\n".join(map(json.dumps, ROWS)) + "\n]}",
        r"spans several lines; .* jq -c '\.\"rows\"\[\]' object_of",
    ),
    "texts.jsonl": (json.dumps(["one", "two"]), r"array of strings, .* jq -c '\.\[\] \| {text: \.}' texts"),
    "texts_indented.json": (json.dumps(["one", "two"], indent=1), "array of strings"),
    "numbers.json": ("[1, 2]", "array does not contain objects .*; give one object per line, or one array of objects"),
    "nested.json": (
        '[[{"text": "a"}]]',
        "array does not contain objects .*; give one object per line, or one array of",
    ),
    "rows.jsonl": ("[1, 2]\n[3, 4]\n", "none of its first 2 lines is a JSON object"),
    "mixed.csv": (
        "id;text\n" + "".join(f"{n},row {n}\n" for n in range(40)) + "40;last\n",
        r"its header has 2 columns separated by ';', but 40 of the first 41 rows do not \(with ',', 40 have 2 fields\)",
    ),
    "longer.csv": ("id,text\n" + "1,one,more\n" * 9, "but 9 of the first 9 rows do not .with ',', 9 have 3 fields"),
    "data.json": (
        json.dumps({"version": 1, "data": ROWS}),
        r"data; \"data\" holds 25 rows: .* jq -c '\.\"data\"\[\]' data",
    ),
    "long.json": (json.dumps({"data": ROWS * 3000}), 'its columns are data; "data" holds 75,000 rows'),
    "strings.json": (json.dumps({"data": ["a", "b"]}), r"'\.\"data\"\[\] \| {text: \.}'"),
    "table.json": (json.dumps({"text": {"0": "a", "1": "b"}}), r"with 2 rows under text; .*\[\] \| {text: \.}'"),
    "ids.jsonl": ('{"input_ids": [1, 2]}\n' * 3, "input_ids has lists of integers: .* parquet .* tokens_column"),
    "ids.json": ('[{"input_ids": [1, 2]}]', "input_ids has lists of integers"),
    "python.jsonl": ("{'text': 'a'}\n{'text': 'b'}\n", "none of its first 2 lines is a JSON object"),
    "plain.jsonl": ("Once upon a time\nthere was plain text.\n", "none of its first 2 lines"),
    "latin.jsonl": ('{"text": "café"}\n'.encode("latin-1") * 9, "none of its first 9 lines"),
    "wide.jsonl": (LINES.encode("utf-16"), "zero bytes, as UTF-16 .* iconv"),
    "wide_big.jsonl": (LINES.encode("utf-16-be"), "zero bytes"),
    "wide.txt": ("plain words\n".encode("utf-16-le") * 50, "zero bytes"),
    "wider.txt": ("plain words\n".encode("utf-32"), "zero bytes"),
    "page.txt": (PAGE, "is a web page"),
    "page.jsonl": (PAGE, "is a web page"),
    "denied.txt": ('<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "is a web page"),
    "pointer.jsonl": ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "annex.txt": ("/annex/objects/SHA256E-s9--0.txt\n", "git annex get"),
    "parquet.jsonl": (PARQUET, "is parquet; rename it to .parquet"),
    "lines.parquet": (LINES, "is JSON, not parquet"),
    "compressed.jsonl": (gzip.compress(LINES.encode()), "compressed with gzip; add .gz to its name"),
    "compressed.parquet": (gzip.compress(PARQUET), "compressed with gzip"),
    "uncompressed.jsonl.gz": (LINES, "remove .gz from its name"),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(LINES.encode())), "compressed with gzip"),
    "book.txt": (b"PK\x03\x04" + bytes(99), "office document"),
    "paper.txt": (b"%PDF-1.7\n" + bytes(99), "is a PDF document"),
    "packed.jsonl": (b"\x28\xb5\x2f\xfd" + bytes(99), "compressed with zstd; add .zst"),
    "cut_off.txt": (b"a line of text\n" * 9000 + bytes(5000), "ends in zero bytes"),
    "bytes.txt": (bytes(range(256)), "zero bytes"),
    "latin.txt": (b"\xfcber Land\n" * 20, "is not UTF-8 text"),
    "other_column.jsonl": ('{"body": "b"}\n', "its columns are body"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_named_for_what_it_is_alone_and_beside_a_good_one(tmp_path, name):
    content, message = KINDS[name]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    write_jsonl(tmp_path / "a_good_one.jsonl", ["good"])
    for dataset in (path, tmp_path):
        with pytest.raises(UserError, match=message) as caught:
            read(open_source(str(dataset)))
        assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    source = open_source(str(tmp_path), skip_bad_files=True)
    assert read(source)[0] == ["good"] and source.skipped_files == 1


def test_odd_lines_among_good_ones_are_counted_not_refused(tmp_path):
    first = ['{"text": "half', '[1, {"text": 2}', '{"a": [1,', "[", '["a"]', "{", "null", "12"]
    for start in first:
        path = tmp_path / "a.jsonl"
        path.write_text(start + "\n" + LINES)
        rows, reasons = read(open_source(str(path)))
        assert len(rows) == 25 and sum(reasons.values()) == 1, start
    path.write_text('{"id": 1}\n' * 9000 + LINES)  # the column comes after the first 64 KiB
    assert len(read(open_source(str(path)))[0]) == 25
    path.write_text(json.dumps({"text": "x" * 2_000_000}))  # one line, longer than what is looked at
    assert len(read(open_source(str(path)))[0]) == 1


def test_text_in_a_binary_column_is_read(tmp_path):
    for kind in (pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(["one é", "two", None]).cast(kind)
        pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        assert read(open_source(str(tmp_path))) == (["one é", "two"], {"null": 1})
    pq.write_table(pa.table({"text": pa.array([b"\xff\xd8\xff", b"ok"], pa.binary())}), tmp_path / "a.parquet")
    assert read(open_source(str(tmp_path))) == (["ok"], {"invalid_utf8": 1})


def test_text_that_only_begins_like_another_kind_is_read(tmp_path):
    for words in ("PARENT", "PAR1 x", "BZhang", "FEA1", "ARROW1", "%PDF is a format", "{\\rtf}"):
        (tmp_path / "a.txt").write_text(f"{words} and\tmore\n")
        assert read(open_source(str(tmp_path)))[0] == [f"{words} and\tmore\n"]


NO_DOCUMENT = {
    "empty.jsonl": (b"", "as it has no rows; give other text"),
    "empty.json.gz": (gzip.compress(b""), "as it has no rows"),
    "none.json": (b"[]", "as it has no rows"),
    "nothing.json": (b"{}", "'no_text_column': 1}.; choose another text_column"),
    "empty.csv": (b"", "as it has no rows"),
    "header.csv": (b"id,text\n", "as it has no rows"),
    "latin.csv": ("id,text\n1,café\n".encode("latin-1"), "'invalid_utf8': 1.*not UTF-8: .* iconv -f LATIN1"),
    "latin.json": ('[{"text": "café"}]'.encode("latin-1"), "not UTF-8: .* iconv -f LATIN1"),
    "numbers.jsonl": (b'{"text": 5}\n', "'not_text': 1.*text_column has other values than text"),
}


@pytest.mark.parametrize("name", NO_DOCUMENT)
def test_text_without_documents_is_refused_with_what_to_do(tmp_path, name):
    from hfgpt import PretrainConfig
    from hfgpt.data import prepare_data

    content, message = NO_DOCUMENT[name]
    (tmp_path / name).write_bytes(content)
    write_jsonl(tmp_path / "other.jsonl", ["some other text"] * 9)
    for streaming, other in (("auto", None), (True, None), (True, str(tmp_path / "other.jsonl"))):
        settings = {"tokenizer": "char", "eval_dataset": other, "streaming": streaming, "max_steps": 1}
        config = PretrainConfig(dataset=str(tmp_path / name), **settings)
        with pytest.raises(UserError, match=message) as caught:
            prepare_data(config, 4)
        assert str(tmp_path / name) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv.lz4", "compressed with lz4.*lz4 -d"),
        ("a.bz2", "compressed with bzip2, of an unknown kind; if it is plain text, rename it to a.txt.bz2"),
        ("a.zip", "a zip archive"),
        ("a.arrow.zst", "compressed arrow, which is not supported; unpack it"),
        ("a.pdf", "formatted document"),
        ("a.docx", "formatted document"),
        ("a.html", "markup"),
        ("a.parquet.gz", "compressed parquet"),
        ("a.md", "rename it to a.md.txt"),
        ("a", "rename it to a.txt"),
    ],
)
def test_a_kind_of_file_that_is_not_read_is_named_by_its_ending(tmp_path, name, message):
    (tmp_path / name).write_text("x")
    for dataset in (tmp_path / name, tmp_path, tmp_path / "*"):
        with pytest.raises(UserError, match=message):
            open_source(str(dataset))
    write_jsonl(tmp_path / "good.jsonl", ["good"])
    assert f"1 file of other kinds left out: {name}" in open_source(str(tmp_path)).description


def test_an_empty_folder_or_glob_is_reported(tmp_path):
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    write_jsonl(tmp_path / "sub" / ".hidden" / "a.jsonl", ["a"])
    for dataset, message in (
        (tmp_path / "sub", "no files; give parquet"),
        (tmp_path / "*.jsonl", "no files; give parquet"),
        (tmp_path / "*", "only folders; give parquet"),
    ):
        with pytest.raises(UserError, match=message):
            open_source(str(dataset))


@pytest.mark.unix_only
def test_links_are_not_followed_in_circles_and_no_file_is_read_twice(tmp_path):
    text = tmp_path / "text"
    (text / "sub" / "below").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for n in range(6):
        write_jsonl(text / f"{n}.jsonl", [f"document {n}"])
    write_jsonl(text / "sub" / "below" / "6.jsonl", ["document 6"])
    write_jsonl(tmp_path / "elsewhere" / "7.jsonl", ["document 7"])
    write_jsonl(tmp_path / "beside.jsonl", ["is not below the folder"])
    (text / "latest").symlink_to(".")
    (text / "again").symlink_to(".")
    (text / "sub" / "up").symlink_to("..")
    (text / "sub" / "below" / "top").symlink_to(tmp_path)
    (text / "a_link_to_below").symlink_to(text / "sub" / "below")
    (text / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (text / "one.jsonl").symlink_to("1.jsonl")
    (text / "another.jsonl").symlink_to("one.jsonl")
    os.link(text / "2.jsonl", text / "zwei.jsonl")
    every = sorted(f"document {n}" for n in range(8))
    for dataset in (text, text / "**", text / "**" / "*.jsonl", tmp_path / "te*" / "**" / "*.json*"):
        source = open_source(str(dataset))
        assert sorted(read(source)[0]) == every
        assert source.description.endswith(f"8 files, {source.size_bytes / 1e6:,.1f} MB")
    names = {unit.file for unit in open_source(str(text)).units}
    assert str(text / "sub" / "below" / "6.jsonl") in names and str(text / "1.jsonl") in names
    assert "3 more names for the same files left out" in open_source(str(text)).description
    assert len(read(open_source(str(text / "latest" / "again")))[0]) == 8


@pytest.mark.unix_only
def test_a_broken_link_is_named(tmp_path):
    write_jsonl(tmp_path / "good.jsonl", ["good"])
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    for dataset in (tmp_path, tmp_path / "*.jsonl", tmp_path / "gone.jsonl"):
        with pytest.raises(UserError, match=r"gone.jsonl.* a link to a missing file"):
            open_source(str(dataset))
    assert open_source(str(tmp_path), skip_bad_files=True).skipped_files == 1


@pytest.mark.parametrize(
    ("setting", "value"), [("name", "en"), ("split", "test"), ("revision", "main"), ("text_column", "body")]
)
def test_settings_that_mean_nothing_for_the_text_are_refused_alike(tmp_path, setting, value):
    (tmp_path / "a.txt").write_text("text")
    write_parquet(tmp_path / "a.parquet", ["text"], column=value if setting == "text_column" else "text")
    texts = [tmp_path / "a.txt", tmp_path / "*.txt", "embedded"]
    others = [tmp_path / "a.parquet", tmp_path]
    for dataset in texts if setting == "text_column" else texts + others:
        key = setting if setting == "text_column" else f"dataset_{setting}"
        with pytest.raises(UserError, match=rf"^{key}={value}: dataset=.* leave it out"):
            open_source(str(dataset), **{setting: value})
    if setting == "text_column":  # text files have none beside a file that has
        assert len(read(open_source(str(tmp_path), text_column=value))[0]) == 2


def test_a_name_that_could_not_be_recorded_is_refused(tmp_path):
    for number, name in enumerate((b"\xff\xfe.jsonl", b"two\nlines.jsonl")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "notes.md").write_text("x")
        try:
            write_jsonl(folder / os.fsdecode(name), ["text"])
        except OSError:
            pytest.skip("this file system takes no such name")
        with pytest.raises(UserError, match="name is not a single line of UTF-8; rename it") as caught:
            open_source(str(folder))
        assert str(caught.value).isprintable() and str(caught.value).encode()
        write_jsonl(folder / "good.jsonl", ["good"])
        assert read(open_source(str(folder), skip_bad_files=True))[0] == ["good"]
    write_jsonl(tmp_path / "von Größe\u3000und\xa0Maß, 文.jsonl", ["text"])
    assert read(open_source(str(tmp_path / "von*")))[0] == ["text"]
