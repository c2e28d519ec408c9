"""A stream of many files and processes: what is exchanged, requested, read and held stays small."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from itertools import islice, takewhile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import FILES, HubServer
from running import hashes, trained

from hfgpt import PretrainConfig
from hfgpt.checkpointing.audit import audit
from hfgpt.data import opening, prepare_data, threads
from hfgpt.data.file_hashes import hash_files
from hfgpt.data.formats import parquet
from hfgpt.data.loader import iterate
from hfgpt.data.open_source import Earlier, open_source
from hfgpt.data.stream import StepBatch, batch_hash, hash_blocks, join_batches, join_texts, summarize
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.data.units import Unit
from hfgpt.errors import UserError


@pytest.mark.parametrize("world", [1, 2, 4, 32])
def test_processes_exchange_hashes_instead_of_tokens(world):
    """A step of 524,288 tokens. Each process receives what all of them send."""
    blocks = np.random.default_rng(0).integers(0, 50257, (512, 1025), dtype=np.int32)
    cursors = [[0, 25, 17, 900, 512]] * 64
    shares = []
    for part, streams in zip(np.split(blocks, world), np.array_split(np.array(cursors), world), strict=True):
        shares.append(summarize(StepBatch(part, {"streams": streams.tolist()}, documents=[[(0, 1, 2, 3)]] * 700)))
    assert sum(len(pickle.dumps(share)) for share in shares) < 12_000
    whole = join_texts(shares)
    assert batch_hash(whole.hashes) == batch_hash(hash_blocks(blocks)) and whole.position == {"streams": cursors}


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(load_tokenizer("bpe-300", lambda: ["abcdef 0123456789 " * 20], 64), str(path))
    return path


CLIENT = """
import gc, json, sys
import pyarrow.parquet as pq
from itertools import islice
from hfgpt import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.formats import parquet
from hfgpt.data.loader import iterate
from hfgpt.data.stream import batch_hash, hash_blocks, join_batches

def tell(**facts):
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()

def steps(stream, position, world, workers, count=4):
    ranks = [iterate(stream, position, rank, world, workers) for rank in range(world)]
    batches = [join_batches([next(rank) for rank in ranks]) for _ in range(count)]
    return [batch_hash(hash_blocks(batch.blocks)) for batch in batches], batches

config = PretrainConfig(dataset="user/corpus", tokenizer=sys.argv[1], sequence_length=16, max_steps=1)
data = prepare_data(config, 96)
parts = iterate(data.train, None)
next(parts)
footers = sum(isinstance(one, pq.FileMetaData) for one in gc.get_objects())
tell(streams=data.train.streams, footers=footers, kept=sum(c.chunks.nbytes for c in parquet._footers._footers.values()))
whole, batches = steps(data.train, None, 1, 0)
others = [steps(data.train, None, *topology)[0] for topology in ((2, 0), (4, 0), (2, 2))]
tell(whole=whole, others=others, position=batches[1].position)
parquet._footers = parquet._FooterCache()
again = prepare_data(config, 96, saved=data.train.fingerprint)
rest, _ = steps(again.train, batches[1].position, 1, 0, 1)
tell(rest=rest, same=again.train.fingerprint == data.train.fingerprint)
"""


def many_files(count):
    rng = random.Random(0)
    for number in range(count):
        texts = [f"{number} {row} " + "".join(rng.choices("abcdef ", k=20)) for row in range(24)]
        file = io.BytesIO()
        pq.write_table(pa.table({"id": range(24), "text": texts}), file, row_group_size=12)
        yield f"data/{number // 1000}/{number:05d}.parquet", file.getvalue()


@pytest.mark.slow
def test_many_files_on_the_hub_take_few_requests(tmp_path, trained_tokenizer):
    with HubServer({"datasets/user/corpus": dict(many_files(2400))}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        command = [sys.executable, "-c", CLIENT, str(trained_tokenizer)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            requests = []

            def answer():
                facts = json.loads(child.stdout.readline())
                requests.append((len(hub.requests), hub.count(FILES)))
                child.stdin.write("\n")
                child.stdin.flush()
                return facts

            first, topologies, resumed = answer(), answer(), answer()
    assert first["streams"] == 96 and first["footers"] == 0 and first["kept"] < 2**20
    assert requests[0][0] <= 300
    assert all(other == topologies["whole"] for other in topologies["others"])
    assert resumed["rest"] == topologies["whole"][2:3] and resumed["same"]
    assert requests[2][0] - requests[1][0] <= 300


@pytest.fixture
def many_local(tmp_path, monkeypatch):
    """A folder of 30 files that counts as many and large."""
    monkeypatch.setattr(opening, "FEW_FILES", 8)
    monkeypatch.setattr(opening, "INSPECTED", 4)
    monkeypatch.setattr(opening, "IN_MEMORY_BYTES", 0)
    folder, rng = tmp_path / "many", random.Random(1)
    folder.mkdir()
    for number in range(30):
        rows = [f"{number} {row} " + "".join(rng.choices("abcdef ", k=rng.randrange(150))) for row in range(40)]
        if number % 3:
            pq.write_table(pa.table({"text": rows}), folder / f"{number:02d}.parquet", row_group_size=number + 3)
        else:
            (folder / f"{number:02d}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def small(folder, tokenizer, **settings) -> PretrainConfig:
    stated = {"tokenizer": str(tokenizer), "sequence_length": 32, "streaming": True, "max_steps": 6}
    return PretrainConfig(dataset=str(folder), **stated | settings)


def test_each_document_of_many_files_comes_once_an_epoch(many_local, trained_tokenizer):
    data = prepare_data(small(many_local, trained_tokenizer), 12)
    stream = data.train
    assert stream.source.by_file and stream.fingerprint["dataset.order"] == "files"
    text = dataclasses.replace(stream.source, by_file=False)
    rows = [row for unit in stream.source.units for one in stream.source.units_of(unit) for row in text.read(one)]
    expected = sorted(stream.encoder.documents([row])[0].ids.tolist() for row in rows if isinstance(row, str))
    seen, files = [], []
    for i in range(stream.streams):
        start = stream.start["streams"][i]
        documents = list(takewhile(lambda document: document.place[0] == 0, stream.documents(i, start)))
        seen += [document.ids.tolist() for document in documents]
        files.append([document.origin[1][0] for document in documents])
        for at in (1, len(documents) // 2, len(documents) - 1):  # and any place is found again
            resumed = islice(stream.documents(i, [*documents[at].place, 0]), 3)
            assert [one.ids.tolist() for one in resumed][: len(documents) - at] == [
                one.ids.tolist() for one in documents[at : at + 3]
            ]
    assert sorted(seen) == expected and len(seen) > 900
    assert all(of_stream != sorted(of_stream) for of_stream in files)
    everything = open_source(str(many_local), as_earlier=Earlier(order=True))
    whole = [row for unit in everything.units for row in everything.read(unit) if isinstance(row, str)]
    # The document at the border is split; its head is trained on.
    assert len(whole) <= len(seen) + data.validation_documents <= len(whole) + 1 and data.validation_documents > 20


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_on_many_files_resumes_in_the_order_that_it_began_with(config, many_local, monkeypatch, earlier):
    stated = {"dataset": str(many_local), "streaming": True, "tokenizer": "bpe-300", "save_steps": 3}
    with monkeypatch.context() as before:
        if earlier:  # as before there was another order
            before.setattr(opening, "FEW_FILES", 1000)
        whole = trained(config("whole", **stated))
        trained(config("run", **{**stated, "max_steps": 3}))
    resumed = trained(config("run", **{**stated, "resume_from_checkpoint": "latest"}))
    assert resumed.data.train.source.by_file is not earlier
    assert hashes(resumed) == hashes(whole) and len(set(hashes(whole))) == 6
    facts = audit(resumed.folder.path)
    assert facts["problems"] == [] and facts["leaked"] == 0 and facts["documents"] > 20


def test_the_same_blocks_of_many_files_for_any_topology(many_local, trained_tokenizer):
    stream = prepare_data(small(many_local, trained_tokenizer), 12).train

    def steps(world, workers, position=None, count=4):
        ranks = [iterate(stream, position, rank, world, workers) for rank in range(world)]
        batches = [join_batches([next(rank) for rank in ranks]) for _ in range(count)]
        return [batch_hash(hash_blocks(batch.blocks)) for batch in batches], batches[-1].position

    whole, last = steps(1, 0, count=200)  # more than an epoch
    assert max(cursor[0] for cursor in last["streams"]) > 0
    for world, workers in ((2, 0), (4, 0), (1, 2)):
        position = None if workers else steps(1, 0, count=100)[1]
        assert steps(world, workers, position)[0] == (whole[:4] if workers else whole[100:104])


def test_a_broken_file_among_many_is_found_when_it_is_read(many_local, trained_tokenizer):
    (many_local / "13.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match=r"13\.parquet is a Git LFS pointer"):
        list(islice(iterate(prepare_data(small(many_local, trained_tokenizer), 12).train, None), 200))
    stream = prepare_data(small(many_local, trained_tokenizer, on_bad_files="skip"), 12).train
    skipped = sum((batch.skipped["bad_file"] for batch in islice(iterate(stream, None), 200)), 0)
    assert skipped >= 1
    pq.write_table(pa.table({"text": ["a"]}), many_local / "00.jsonl")  # the first file is always inspected
    with pytest.raises(UserError, match="is parquet; rename it"):
        open_source(str(many_local))


def test_text_files_of_many_are_split_into_pieces(many_local, trained_tokenizer):
    for path in many_local.iterdir():
        path.unlink()
    for number in range(12):
        (many_local / f"{number}.txt").write_text(f"line of file {number}\n" * 400)
    stream = prepare_data(small(many_local, trained_tokenizer), 12).train
    assert stream.source.by_file and len(stream.source.units_of(stream.source.units[0])) == 1
    rows = stream.source.read(stream.source.unit((0, 0)))
    assert len(rows) > 3 and "".join(rows) == "line of file 0\n" * 400


def test_a_sample_of_each_local_file_recognizes_it(tmp_path):
    path, size = tmp_path / "large.txt", 100 * 2**20
    with open(path, "wb") as file:
        file.truncate(size)
    seen = {hash_files([str(path)])["hash"]}
    for place in (0, size // 3, size - 1):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(hash_files([str(path)])["hash"])
    with open(path, "ab") as file:
        file.write(b"\0")
    seen.add(hash_files([str(path)])["hash"])
    assert len(seen) == 5
    if os.path.exists("/proc/self/io"):
        before = _bytes_read()
        hash_files([str(path)])
        assert _bytes_read() - before < 2**20


def _bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


KINDS = {
    "string": pa.string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "ids": pa.list_(pa.int32()),
    "required ids": pa.list_(pa.field("item", pa.int64(), nullable=False)),
}


@pytest.mark.parametrize(
    ("kind", "codec"),
    [*itertools.product(KINDS, ["zstd"]), *(("string", c) for c in ("none", "snappy", "gzip", "lz4"))],
)
def test_a_column_of_a_row_group_is_read_without_the_footer(kind, codec, tmp_path):
    rng = random.Random(0)
    texts = [None if rng.random() < 0.1 else "".join(rng.choices("abcé ", k=rng.randrange(50))) for _ in range(500)]
    ids = [None if rng.random() < 0.1 else [rng.randrange(50257) for _ in range(rng.randrange(9))] for _ in range(500)]
    values = pa.array(ids, KINDS[kind]) if "ids" in kind else pa.array(texts).cast(KINDS[kind])
    table = pa.table({"id": range(500), "text": values, "meta": [{"text": "x"}] * 500})
    for number, options in enumerate(itertools.product([True, False], ["1.0", "2.0"])):
        dictionary, pages = options
        path = str(tmp_path / f"{number}.parquet")
        layout = {"use_dictionary": dictionary, "data_page_version": pages, "data_page_size": 500}
        pq.write_table(table, path, row_group_size=150, compression=codec, **layout)
        assert parquet.open_column(path, "text").leaf is not None
        read = [row for group in range(4) for row in parquet.read_column(Unit(path, group), "text").to_pylist()]
        assert [row.decode() if isinstance(row, bytes) else row for row in read] == (ids if "ids" in kind else texts)


def test_what_threads_raise_is_raised_and_those_of_a_reader_take_turns():
    running, most = set(), [0]

    def count(number):
        for turn in itertools.count():
            assert number % 3 not in running
            running.add(number % 3)
            most[0] = max(most[0], len(running))
            running.discard(number % 3)
            yield number, turn

    started = threads.start_together([count(i) for i in range(30)], [i % 3 for i in range(30)])
    assert [[next(one), next(one)] for one in started] == [[(i, 0), (i, 1)] for i in range(30)]

    def fail(number):
        if number == 20:
            raise UserError("number 20")

    with pytest.raises(UserError, match="number 20"):
        threads.for_each(fail, range(100))
