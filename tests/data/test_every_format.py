"""The same documents from every format, written by other programs; a broken file is refused in one line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tarfile
from collections import Counter

import pandas
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import xxhash
from test_open_source import read

from hfgpt.data.formats import arrow, borders, inspect_file, spans
from hfgpt.data.open_source import open_source
from hfgpt.errors import UserError

ODD = [
    "",
    " ",
    "é ü 文 🎉",
    'a "quoted" word, and a comma',
    "two\nlines",
    "win\r\nline",
    "tab\tand\\n",
    "]},[{",
    '"',
    "x" * 9000,
]
TEXTS = [f"{ODD[n % 10]}{n if n >= 20 else ''}" for n in range(60)]
GOOD = [text for text in TEXTS if text.strip()]
SKIPPED = Counter("empty" if not text else "whitespace" for text in TEXTS if not text.strip())
LINES = "".join(json.dumps({"id": n, "text": text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(TEXTS))
TABLE = pa.table({"id": range(60), "text": TEXTS})


def zstd(data: bytes) -> bytes:
    """Two frames, as parallel compressors and `cat` make them."""
    half = len(data) // 2
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:]))


def xz(data: bytes) -> bytes:
    return lzma.compress(data[:99]) + lzma.compress(data[99:])


PACK = {".gz": gzip.compress, ".zst": zstd, ".xz": xz, ".bz2": bz2.compress}


def csv_text(separator: str = ",", line_end: str = "\r\n") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=separator, lineterminator=line_end)
    writer.writerow(["id", "text"])
    writer.writerows(enumerate(TEXTS))
    return out.getvalue().encode()


def tar_of(suffix: str, long_names: bool = False, written: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.PAX_FORMAT if long_names else tarfile.GNU_FORMAT
    ) as archive:
        for number, text in enumerate(TEXTS):
            encoding = "utf-8-sig" if number % 9 else "utf-8"
            data = (text if suffix == ".txt" else json.dumps({"text": text})).encode(encoding)
            for name, content in ((f"{number:05}{written or suffix}", data), (f"{number:05}.cls", b"7")):
                member = tarfile.TarInfo("folder/" * (30 if long_names else 1) + name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def stream(table: pa.Table, new=pa.ipc.new_stream, **options: object) -> bytes:
    out = io.BytesIO()
    with new(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(max_chunksize=7):
            writer.write_batch(batch)
    return out.getvalue()


def feather(**options: object) -> bytes:
    out = io.BytesIO()
    frame = pandas.DataFrame({"text": TEXTS, "kind": pandas.Categorical(["a", "b"] * 30)})
    pyarrow.feather.write_feather(frame, out, chunksize=13, **options)
    return out.getvalue()


def parquet(codec: str) -> bytes:
    out = io.BytesIO()
    pq.write_table(TABLE, out, compression=codec, row_group_size=9)
    return out.getvalue()


ARRAY = json.dumps([{"id": n, "text": text} for n, text in enumerate(TEXTS)], ensure_ascii=False)
PLAIN = {
    "a.jsonl": LINES.encode(),
    "lines.json": LINES.encode(),
    "array.json": ARRAY.encode(),
    "array_indented.json": json.dumps(json.loads(ARRAY), indent=2).encode("utf-8-sig"),
    "pandas.json": pandas.DataFrame({"text": TEXTS}).to_json(orient="records").encode(),
    "a.csv": csv_text(),
    "pandas.csv": pandas.DataFrame({"id": range(60), "text": TEXTS}).to_csv(index=False).encode(),
    "marked.csv": "\ufeff".encode() + csv_text(";"),
    "a.tsv": csv_text("\t", "\n"),
    "text.tar": tar_of(".txt"),
    "json.tar": tar_of(".json", long_names=True),
}
FILES = {
    **PLAIN,
    **{f"{name}{suffix}": pack(data) for name, data in PLAIN.items() for suffix, pack in PACK.items()},
    "a.tgz": gzip.compress(tar_of(".txt")),
    "stream.arrow": stream(TABLE),
    "packed.arrow": stream(TABLE, compression="zstd"),
    "old.arrow": stream(TABLE, use_legacy_format=True),
    "file.arrow": stream(TABLE, pa.ipc.new_file),
    "words.arrow": stream(TABLE.set_column(1, "text", TABLE["text"].combine_chunks().dictionary_encode())),
    "lz4.feather": feather(),
    "plain.feather": feather(compression="uncompressed"),
    **{f"{codec}.parquet": parquet(codec) for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4")},
}


@pytest.mark.parametrize("small_units", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_documents(tmp_path, monkeypatch, name, small_units):
    if small_units:
        for module in (borders, spans, arrow):
            monkeypatch.setattr(module, "SPAN_BYTES", 1000)
            monkeypatch.setattr(module, "GZIP_SPAN_BYTES", 15_000, raising=False)
    (tmp_path / name).write_bytes(FILES[name])
    source = open_source(str(tmp_path / name))
    assert read(source) == (GOOD, SKIPPED)
    assert small_units <= (len(source.units) >= 3)
    assert [source.read(unit) for unit in reversed(source.units)] == [source.read(unit) for unit in source.units][::-1]


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_text_file_is_one_document(tmp_path, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(PACK[suffix]("\ufeffé one\r\ntwo\n".encode()))
    assert read(open_source(str(tmp_path))) == (["é one\ntwo\n"], {})


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".parquet")])
def test_a_file_that_is_cut_off_is_refused_in_one_line(tmp_path, name):
    data = FILES[name]
    for share in (0.3, 0.7, *([] if name.endswith(".tar") else [0.98])):  # the last 10 kB of an archive are empty
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        cut_lines = name.endswith((".jsonl", "lines.json"))  # the last line is one bad row, as it is today
        cut_rows = name in ("a.csv", "pandas.csv", "marked.csv", "a.tsv")  # seen only inside quotes
        if cut_lines or cut_rows:
            continue
        with pytest.raises(UserError, match=r"cut off|cannot be read|not an Arrow file|broken") as caught:
            read(open_source(str(tmp_path / name)))
        assert str(tmp_path / name) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def checked_zstd(data: bytes) -> bytes:
    """One frame with a checksum, as the command zstd writes it and pyarrow does not."""
    frame = bytearray(pa.compress(data, codec="zstd", asbytes=True))
    frame[4] |= 4
    return bytes(frame) + (xxhash.xxh64_intdigest(data) % 2**32).to_bytes(4, "little")


def test_damage_inside_a_compressed_file_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "GZIP_SPAN_BYTES", 15_000)
    rng, words = random.Random(7), LINES.split()
    data = "".join(json.dumps({"text": " ".join(rng.choices(words, k=40))}) + "\n" for _ in range(400)).encode()
    for suffix, pack in {**PACK, ".zst": checked_zstd}.items():
        whole, path = pack(data), tmp_path / f"a.jsonl{suffix}"
        for size in (1, 99, 99, 999):
            at = rng.randrange(30, len(whole) - size - 30)
            path.write_bytes(whole[:at] + bytes(255 - byte for byte in whole[at : at + size]) + whole[at + size :])
            with pytest.raises(UserError, match=r"cannot be read") as caught:
                read(open_source(str(path)))
            assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("suffix", PACK)
def test_broken_rows_of_a_compressed_file_are_counted_if_a_checksum_rules_out_damage(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((checked_zstd if suffix == ".zst" else PACK[suffix])(LINES.encode() + b'{"text": "cut'))
    assert read(open_source(str(path))) == (GOOD, SKIPPED + Counter(malformed=1))
    path = tmp_path / "b.jsonl.zst"
    path.write_bytes(zstd(LINES.encode() + b'{"text": "cut'))
    with pytest.raises(UserError, match=r"b\.jsonl\.zst has broken rows, and no checksum .* zstd --check"):
        read(open_source(str(path)))


BROKEN = {
    "quoted.csv": (b'id,text\n1,"good"\n2,"cut o', "ends inside quotes"),
    "column.csv": (b"id,body\n1,x\n", "its columns are id, body"),
    "column.json": (b'[{"body": "b"}]', "its columns are body"),
    "middle.json": (
        b'[{"text": "a"}, {"text": nope}, {"text": "b"}' + b', {"text": "c"}' * 99 + b"]",
        "broken in the el.* byte 16",
    ),
    "comma.json": (ARRAY.replace("}, {", "} {", 1).encode(), "its JSON array has no comma at byte 23"),
    "commas.json": (ARRAY.replace("}, {", "},, {", 1).encode(), "its JSON array is broken in the element at byte 23"),
    "last_comma.json": (f"{ARRAY[:-1]},]".encode(), "its JSON array is broken in the element at byte"),
    "first_comma.json": (f"[,{ARRAY[1:]}".encode(), "its line is not a JSON object"),
    "after.json": (f"{ARRAY}\n, garbage".encode(), "its JSON array ends before byte"),
    "two.json": (f"{ARRAY}\n{ARRAY}".encode(), "its JSON array ends before byte"),
    "after_empty.json": (b"[] garbage", "its JSON array ends before byte 3"),
    "members.tar": (tar_of(".txt", written=".jpg"), "has no .txt or .json members"),
    "two.tar": (tar_of(".txt") * 2, r"its archive ends at byte .*, but the file does not; unpack it"),
    "two.tar.gz": (gzip.compress(tar_of(".json")) * 2, "but the file does not; unpack it"),
    "column.arrow": (stream(TABLE.rename_columns(["id", "body"])), "its columns are id, body"),
    "number.arrow": (stream(pa.table({"text": [1, 2]})), "contains int64, not text"),
    "wrong.jsonl.zst": (LINES.encode(), "cannot be read as zstd, because it is not compressed; remove .zst"),
    "gzip.jsonl.xz": (gzip.compress(LINES.encode()), "compressed with gzip"),
    "zstd.jsonl": (zstd(LINES.encode()), "compressed with zstd; add .zst"),
    "tar.jsonl": (tar_of(".txt"), "is a tar archive; rename it to .tar"),
    "arrow.parquet": (stream(TABLE, pa.ipc.new_file), "is Arrow; rename it"),
    "lines.arrow": (LINES.encode(), "is cut off or damaged"),
}


@pytest.mark.parametrize("small_units", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_right_is_refused_with_the_fix(tmp_path, monkeypatch, name, small_units):
    if small_units:
        monkeypatch.setattr(borders, "SPAN_BYTES", 1000)
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(open_source(str(tmp_path / name)))
    assert len(str(caught.value).splitlines()) == 1


def test_rows_that_do_not_fit_are_counted(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2\n\n3,three,more\n4,"\xff"\n5,"5"" disk"\n6,6" disk\n')
    reasons = {"no_text_column": 1, "malformed": 1, "invalid_utf8": 1}
    assert read(open_source(str(tmp_path))) == (["one", '5" disk', '6" disk'], reasons)
    # Quotes escaped by a backslash, and a column that is not quoted: neither is the text that a reader of CSV gets.
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"says \\"hi\\" there"\n2,"two"\n3,"open\n4,three "end"\n5,five\n')
    assert read(open_source(str(tmp_path))) == (["two", "five"], {"malformed": 2})
    (tmp_path / "a.csv").write_bytes(b"text,\none, two\nthree, four; five\nsix")  # an empty name at the end
    assert read(open_source(str(tmp_path))) == (["one", "three", "six"], {})
    (tmp_path / "a.csv").write_bytes(b"text\none, two\nthree, four\nsix")  # not separated by commas
    assert read(open_source(str(tmp_path))) == (["one, two", "three, four", "six"], {})
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"}, {"id": 1}, {"text": "\xff"}, 5, {"text": null}]')
    reasons = {"no_text_column": 1, "invalid_utf8": 1, "not_an_object": 1, "null": 1}
    assert read(open_source(str(tmp_path))) == (["one"], reasons)


def test_a_file_that_unpacks_to_far_more_than_it_seems_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "LARGEST_REST_BYTES", 10**6)
    for suffix in (".zst", ".xz", ".bz2"):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(PACK[suffix](LINES.encode() + b" " * 3 * 10**6))
        with pytest.raises(UserError, match="unpacks to far more than its beginning suggests"):
            read(open_source(str(path)))


def test_the_head_of_a_large_compressed_file_is_all_that_opening_reads(tmp_path, monkeypatch):
    text = "".join(f'{{"text": "{n:064x}"}}\n' for n in range(60_000)).encode()
    for suffix in (".zst", ".xz", ".bz2"):
        monkeypatch.setattr("hfgpt.data.heads.PACKED_HEAD_BYTES", 2**18)
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(PACK[suffix](text))
        units, size = inspect_file(str(path), "text")
        assert size == path.stat().st_size and 0.5 < sum(unit.size_bytes for unit in units) / len(text) < 2, suffix


def test_a_large_gzip_file_of_several_members_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("hfgpt.data.heads.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("hfgpt.data.heads.UNSTATED_BYTES", 10**4)
    monkeypatch.setattr(spans, "GZIP_SPAN_BYTES", 2000)
    path = tmp_path / "of::members.jsonl.gz"
    path.write_bytes(gzip.compress(LINES.encode()) + gzip.compress(b'{"text": "last"}\n'))
    source = open_source(str(path))
    assert read(source)[0] == [*GOOD, "last"]
    assert len(source.units) == pytest.approx(len(LINES) / 2000, rel=1) and len(source.units) > 4


def test_whole_rows_of_an_array(tmp_path):
    from hfgpt.data.rows import read_rows

    for name in ("array.json", "array_indented.json.zst", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(FILES[name])
        assert [row["text"] for _, row in read_rows(str(tmp_path / name))] == TEXTS
