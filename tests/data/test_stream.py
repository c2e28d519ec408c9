"""The same tokens in the same order: over interruptions, processes and workers, each document once an epoch."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import Encoder
from hfgpt.data.loader import iterate
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.open_source import open_source
from hfgpt.data.permutation import permutation
from hfgpt.data.position import resumed_position
from hfgpt.data.source import text_hash
from hfgpt.data.stream import merge_positions
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.errors import UserError

ALPHABET = "0123456789 abcdefghijklmnopqrstuvwxyz\n"
TOKENIZER = load_tokenizer("char", lambda: [ALPHABET], 64)


def texts(count):
    return [f"{n} " + "x" * (n * 7 % 40) for n in range(count)]


def source_of(folder, layout):
    """A source of documents 0, 1, ... over files; `layout`: for each file the rows of its row groups."""
    folder.mkdir()
    all_texts = iter(texts(sum(map(sum, layout))))
    for number, groups in enumerate(layout):
        with pq.ParquetWriter(folder / f"{number:03}.parquet", pa.schema({"text": pa.string()})) as writer:
            for rows in groups:
                writer.write_table(pa.table({"text": list(islice(all_texts, rows))}))
    return open_source(str(folder))


def document_stream(folder, layout=((25, 25, 22), (25, 25, 22)), units=None, exclude=(), **options):
    settings = {"seed": 1, "sequence_length": 16, "blocks_per_step": 8, "fingerprint": {}}
    source = source_of(folder, layout)
    source = dataclasses.replace(
        source, units=(units or list)(source.units), exclude=frozenset(map(text_hash, exclude))
    )
    return DocumentStream(source, Encoder(TOKENIZER), **{**settings, **options})


def memory_blocks(count=500, **options):
    settings = {"seed": 1, "sequence_length": 16, "blocks_per_step": 8, "fingerprint": {}}
    return MemoryBlocks(np.arange(count, dtype=np.int32), **{**settings, **options})


@pytest.fixture(params=["memory", "documents", "one unit"])
def stream(request, tmp_path):
    if request.param == "memory":
        return memory_blocks()
    if request.param == "one unit":
        return document_stream(tmp_path / "text", [[200]])
    return document_stream(tmp_path / "text")


def take(stream, position, steps, world=1, workers=0):
    """(blocks of all processes, whole position, skipped rows) of the next steps."""
    ranks = [
        islice(iterate(stream, position, rank=rank, world=world, num_workers=workers), steps) for rank in range(world)
    ]
    result = []
    for parts in zip(*ranks, strict=True):
        position = json.loads(json.dumps(merge_positions([part.position for part in parts])))
        skipped = sum((Counter(part.skipped) for part in parts), Counter())
        result.append((np.concatenate([part.blocks for part in parts]), position, skipped))
    return result


def assert_same(one, other):
    assert len(one) == len(other)
    for (blocks, position, skipped), (other_blocks, other_position, other_skipped) in zip(one, other, strict=True):
        assert np.array_equal(blocks, other_blocks)
        assert position == other_position
        assert skipped == other_skipped


def test_batches_have_the_stated_shape(stream):
    batch = next(iterate(stream, None, rank=1, world=2))
    assert batch.blocks.shape == (4, 17) and batch.blocks.dtype == np.int32


def test_resume_at_every_step_equals_no_interruption(stream):
    whole = take(stream, None, 40)
    for step in range(39):
        fresh = pickle.loads(pickle.dumps(stream))
        assert_same(take(fresh, whole[step][1], 40 - step - 1), whole[step + 1 :])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_processes_and_workers_do_not_change_the_text(stream, world, workers):
    whole = take(stream, None, 12)
    assert_same(take(stream, None, 12, world, workers), whole)


def test_interrupted_again_and_again_on_changing_topologies(stream):
    whole, position, legs = take(stream, None, 30), None, []
    for steps, world, workers in ((3, 1, 1), (5, 4, 0), (1, 2, 2), (9, 1, 0), (2, 8, 0), (10, 1, 2)):
        legs += take(stream, position, steps, world, workers)
        position = legs[-1][1]
    assert_same(legs, whole)


def test_order_depends_on_the_seed_and_on_nothing_else(tmp_path):
    for make in (memory_blocks, lambda **options: document_stream(tmp_path / f"{options}", **options)):
        first = [blocks for blocks, *_ in take(make(seed=1), None, 5)]
        again = [blocks for blocks, *_ in take(pickle.loads(pickle.dumps(make(seed=2))), None, 5)]
        assert not np.array_equal(first, again)


LAYOUTS = {
    "one row group": [[90]],
    "fewer units than streams": [[30, 25, 20]],
    "one file": [[9] * 12],
    "ten files": [[4, 5]] * 10,
    "many units": [[1]] * 70 + [[3, 2]],
    "large and small": [[120, 40], [90]],
}


def epoch_texts(stream, epochs):
    """Texts by epoch, over all logical streams."""
    found = [[] for _ in range(epochs)]
    for i in range(stream.streams):
        for document in stream.documents(i, [0, 0, 0, 0]):
            if document.place[0] >= epochs:
                break
            found[document.place[0]].append(TOKENIZER.decode(document.ids).removesuffix("\n"))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_document_once_an_epoch(tmp_path, layout):
    rows = sum(map(sum, LAYOUTS[layout]))
    first, second = epoch_texts(document_stream(tmp_path / "text", LAYOUTS[layout]), 2)
    assert sorted(first) == sorted(second) == sorted(texts(rows))
    assert sum(map(str.__eq__, first, second)) < rows / 3 and first != texts(rows)


def test_rows_within_a_unit_are_shuffled_anew_each_epoch(tmp_path):
    stream = document_stream(tmp_path / "text", [[160]], blocks_per_step=1)
    orders = [{}, {}]
    for document in stream.documents(0, [0, 0, 0, 0]):
        epoch, place, *_ = document.place
        if epoch == 2:
            break
        orders[epoch].setdefault(place, []).append(TOKENIZER.decode(document.ids))
    by_text = [{min(part): part for part in order.values()} for order in orders]
    assert by_text[0].keys() == by_text[1].keys() and len(by_text[0]) == 8
    assert all(by_text[0][key] != by_text[1][key] for key in by_text[0])


def test_jsonl_documents_once_an_epoch(tmp_path):
    lines = [json.dumps({"text": text}) + "\n" for text in texts(50)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 8}
    stream = DocumentStream(open_source(str(tmp_path / "a.jsonl")), Encoder(TOKENIZER), fingerprint={}, **options)
    first, second = epoch_texts(stream, 2)
    assert sorted(first) == sorted(second) == sorted(texts(50)) and first != second


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_are_near_equal(tmp_path, layout):
    stream = document_stream(tmp_path / "text", LAYOUTS[layout])
    counts = [0] * stream.streams
    for i in range(stream.streams):
        for document in stream.documents(i, [0, 0, 0, 0]):
            if document.place[0]:
                break
            counts[i] += 1
    assert min(counts) > 0 and max(counts) <= 2 * min(counts) + 2, counts


def test_blocks_are_the_documents_end_to_end(tmp_path):
    """Every token is a target once, and nothing is dropped."""
    stream = document_stream(tmp_path / "text", blocks_per_step=16)
    steps = [blocks for blocks, *_ in take(stream, None, 60)]
    each = 16 // stream.streams
    for i in range(stream.streams):
        blocks = np.concatenate([step[i * each : (i + 1) * each] for step in steps])
        assert np.array_equal(blocks[:-1, -1], blocks[1:, 0])
        run = np.concatenate([blocks[:, :-1].ravel(), blocks[-1, -1:]])
        documents = stream.documents(i, [0, 0, 0, 0])
        expected = np.concatenate([document.ids for document in islice(documents, 600)])[: len(run)]
        assert np.array_equal(run, expected)


def test_packing_carries_the_rest(tmp_path):
    tokenizer = load_tokenizer("bpe-257", lambda: [], 64)
    lengths = [3, 1, 4, 1, 5]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(n) * n}) + "\n" for n in lengths))
    options = {"seed": 1, "sequence_length": 4, "blocks_per_step": 1}
    stream = DocumentStream(open_source(str(path)), Encoder(tokenizer), fingerprint={}, **options)
    steps = take(stream, None, 5)
    run = np.concatenate([blocks[0, :-1] for blocks, *_ in steps])
    separator = tokenizer.eos_token_id
    assert (run[:19] == separator).sum() == 5 and run[0] == separator
    documents = tokenizer.decode(run[:19]).split("<|endoftext|>")[1:]
    assert sorted(documents) == sorted(str(n) * n for n in lengths)
    # 19 tokens make 4 blocks of 4 targets and their first token; 3 are left, and begin the fifth block.
    assert [position["streams"][0][0] for _, position, _ in steps] == [0, 0, 0, 0, 1]
    assert run[19] == separator
    for stop in range(4):
        assert_same(take(stream, steps[stop][1], 4 - stop), steps[stop + 1 :])


def test_memory_blocks_cover_the_text_once_an_epoch():
    tokens, length = 1003, 16
    stream = memory_blocks(tokens, blocks_per_step=1)
    epochs, phases = [[], [], []], set()
    for batch in iterate(stream, None):
        if batch.position["epoch"] == 3:
            break
        epochs[batch.position["epoch"]].append(batch.blocks[0])
    for blocks in epochs:
        starts = [int(block[0]) for block in blocks]
        assert all(np.array_equal(block, np.arange(block[0], block[0] + length + 1)) for block in blocks)
        phase = min(starts)
        assert sorted(starts) == list(range(phase, tokens - length, length))  # each token a target once
        assert starts != sorted(starts) and phase < length
        assert stream.blocks_per_epoch <= len(starts) <= stream.blocks_per_epoch + 1
        phases.add(phase)
    assert len(phases) > 1
    fewest = stream.blocks_per_epoch
    orders = [[n for n in (int(block[0]) // length for block in blocks) if n < fewest] for blocks in epochs]
    assert sum(map(int.__eq__, orders[0], orders[1])) < fewest / 3


def test_steps_cross_epochs_of_a_very_short_text():
    stream = memory_blocks(40, blocks_per_step=8)  # one or two blocks an epoch
    whole = take(stream, None, 6)
    assert all(blocks.shape == (8, 17) for blocks, *_ in whole)
    assert_same(take(stream, whole[2][1], 3), whole[3:])
    single = memory_blocks(17)
    assert np.array_equal(next(iterate(single, None)).blocks, np.tile(np.arange(17), (8, 1)))


def test_ranks_read_different_text(stream):
    for _ in range(3):
        one, other = (next(iterate(stream, None, rank=rank, world=2)).blocks for rank in (0, 1))
        assert not np.array_equal(one, other)


def test_held_out_and_excluded_documents_stay_out(tmp_path):
    layout = [[10, 10], [10, 10]]
    excluded = texts(40)[3]

    def units(every):
        return [*every[:3], every[3]._replace(rows=4)]

    stream = document_stream(tmp_path / "text", layout, units=units, exclude=[excluded])
    for epoch in epoch_texts(stream, 3):
        assert sorted(epoch) == sorted(set(texts(34)) - {excluded})
    skipped = sum((skipped for *_, skipped in take(stream, None, 40)), Counter())
    assert set(skipped) == {"in_validation"} and skipped["in_validation"] >= 2


def test_skipped_rows_are_counted_once_each_epoch(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": {json.dumps(text)}}}\n{{"text": null}}\nbad\n' for text in texts(64)))
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 2}
    stream = DocumentStream(open_source(str(path)), Encoder(TOKENIZER), fingerprint={}, **options)
    steps = take(stream, None, 80)
    epoch_end = next(i for i, (_, position, _) in enumerate(steps) if all(c[0] == 1 for c in position["streams"]))
    assert all(cursor[0] <= 1 for cursor in steps[epoch_end][1]["streams"])
    skipped = sum((skipped for *_, skipped in steps[: epoch_end + 1]), Counter())
    assert 64 <= skipped["null"] < 72 and 64 <= skipped["malformed"] < 72
    for step in range(0, 40, 3):
        assert_same(take(stream, steps[step][1], 5), steps[step + 1 : step + 6])


def test_skipped_rows_before_the_first_document_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n' * 40 + '{"text": "the only one"}\n' + '{"text": null}\n' * 23)
    options = {"sequence_length": 4, "blocks_per_step": 1}
    for seed in range(5):
        stream = DocumentStream(open_source(str(path)), Encoder(TOKENIZER), seed=seed, fingerprint={}, **options)
        steps = take(stream, None, 5)
        epoch = steps[-1][1]["streams"][0][0]
        assert epoch >= 1 and sum((skipped for *_, skipped in steps), Counter())["null"] >= 63 * epoch


def test_number_of_streams_fits_many_worlds(tmp_path):
    for blocks, streams in ((1, 1), (8, 8), (12, 12), (97, 1), (480, 96), (512, 64), (120, 60)):
        assert document_stream(tmp_path / str(blocks), [[100]], blocks_per_step=blocks).streams == streams


def test_workers_have_something_to_do(tmp_path):
    stream = document_stream(tmp_path / "text")
    steps = iterate(stream, None, world=4, num_workers=16)
    next(steps)
    assert len(multiprocessing.active_children()) == 2
    steps.close()
    in_memory = iterate(memory_blocks(), None, num_workers=4)
    next(in_memory)
    assert not multiprocessing.active_children()
    assert_same(take(stream, None, 3, 4, 16), take(stream, None, 3))


def test_world_that_does_not_divide_is_named(stream):
    with pytest.raises(UserError, match=r"cannot be split over 3 processes; .* fit: 1, 2, 4, 8"):
        iterate(stream, None, world=3)


def test_too_little_text_is_named(tmp_path):
    with pytest.raises(UserError, match=r"16 training tokens .* sequence_length=16"):
        memory_blocks(16)
    with pytest.raises(UserError, match=r"too few training documents for 8 streams.* there are 7; .*streaming=false"):
        document_stream(tmp_path / "few", [[3, 4]])
    (tmp_path / "null.jsonl").write_text('{"text": null}\n' * 30)
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 8}
    with pytest.raises(UserError, match=r"contains no usable document .skipped: .'null': 30"):
        DocumentStream(open_source(str(tmp_path / "null.jsonl")), Encoder(TOKENIZER), fingerprint={}, **options)
    pq.write_table(pa.table({"text": pa.array([None] * 30, pa.string())}), tmp_path / "null.parquet")
    source = open_source(str(tmp_path / "null.parquet"))
    stream = DocumentStream(source, Encoder(TOKENIZER), fingerprint={}, **options)
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"stream 0 found none .*'null'"):
            next(iterate(stream, None, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_fault_in_a_worker_arrives_as_itself(tmp_path, workers):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "no É here {n}"}}\n' for n in range(30)))
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 8}
    source = open_source(str(tmp_path / "a.jsonl"))
    stream = DocumentStream(source, Encoder(TOKENIZER), fingerprint={}, **options)
    with pytest.raises(UserError) as error:
        next(iterate(stream, None, num_workers=workers))
    assert str(error.value).startswith("tokenizer: the character 'É' (U+00C9) is not")
    assert "\n" not in str(error.value)


@pytest.mark.unix_only
def test_workers_leave_signals_to_the_main_process(tmp_path):
    stream = document_stream(tmp_path / "text")
    steps = iterate(stream, None, num_workers=2)
    found = [next(steps)]
    for worker in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
    found += islice(steps, 9)
    for batch, (blocks, position, _) in zip(found, take(stream, None, 10), strict=True):
        assert np.array_equal(batch.blocks, blocks) and batch.position == position


KILLED = """
import os, sys, time
from pathlib import Path
from hfgpt.data.loader import iterate
from test_stream import Encoder, document_stream

def slow(self, texts):
    Path(sys.argv[1], f"{os.getpid()}.worker").touch()
    time.sleep(60)

Encoder.documents = slow
next(iterate(document_stream(Path(sys.argv[1], "text")), None, num_workers=2))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_workers_end_with_a_killed_main_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    main = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment)
    try:
        assert wait_for(lambda: len(list(tmp_path.glob("*.worker"))) == 2, 60)
    finally:
        main.kill()
        main.wait()
    workers = [path.stem for path in tmp_path.glob("*.worker")]
    assert wait_for(lambda: not any(running(worker) for worker in workers), 60), workers


def running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_changed_settings_are_named(stream):
    assert resumed_position(stream, json.loads(json.dumps(stream.fingerprint)), stream.start) == (stream.start, "")
    saved = {"seed": 1, "blocks_per_step": 64, "dataset.hash": "y", "dataset.name": None, "held_out": "last tenth"}
    changed = {"seed": 2, "blocks_per_step": 32, "dataset.hash": "x", "dataset.name": "en", "held_out": "other"}
    with pytest.raises(UserError) as error:
        now = dataclasses.replace(stream, fingerprint={**stream.fingerprint, **changed})
        resumed_position(now, {**stream.fingerprint, **saved}, stream.start)
    for named in (
        ": seed (1 then, 2 now); tokens_per_step, in blocks of sequence_length (64 then, 32 now)",
        "; dataset hash (y then, x now)",
        "dataset_name (None then, en now); eval_dataset or the hold-out rule (last tenth then, other now)",
    ):
        assert named in str(error.value)


def test_position_of_another_number_of_streams_is_refused(tmp_path):
    stream = document_stream(tmp_path / "text")
    with pytest.raises(UserError, match="position of 2 streams"):
        next(iterate(stream, {"streams": [[0, 0, 0, 0]] * 2}))


def test_permutations_never_change():
    """The order of all text depends on these bits: a change would break every saved position."""
    assert permutation(10, 1, 2, 3).tolist() == [9, 8, 5, 7, 1, 3, 2, 4, 6, 0]
    assert sorted(permutation(1000, 5)) == list(range(1000))
    assert permutation(1000, 0).tolist() != permutation(1000, 1).tolist()
    assert permutation(1000, 0, 1).tolist() != permutation(1000, 1, 0).tolist()
    assert permutation(5, -1).tolist() != permutation(5, 1).tolist()


FORKED = """
import sys
from itertools import islice
from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.loader import iterate

config = PretrainConfig(dataset=sys.argv[1], tokenizer="bpe-300", sequence_length=16, streaming=True, max_steps=1)
data = prepare_data(config, 8)
data.tokenizer(["one", "two", "three"] * 10)  # as a batch, which tokenizers encodes in threads
one = [batch.position for batch in islice(iterate(data.train, None, num_workers=2), 5)]
assert one == [batch.position for batch in islice(iterate(data.train, None), 5)]
"""


@pytest.mark.slow
def test_no_fork_warning_after_tokenising_in_the_parent(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    source_of(tmp_path / "text", [[60, 60]])
    result = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "text")], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "forked" not in result.stderr


def test_training_random_state_is_left_alone(tmp_path):
    import torch

    stream = document_stream(tmp_path / "text")
    before = torch.get_rng_state()
    next(iterate(stream, None, num_workers=1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("then", "now", "named"), [(1, None, "is gone"), (None, 1, "is new"), (1, 2, "changed")])
def test_a_file_that_changed_since_is_named(then, now, named):
    stream = SimpleNamespace(fingerprint={"dataset.file a.b.jsonl": now}, streams=1)
    with pytest.raises(UserError, match=rf"order has changed: file a\.b\.jsonl {named};"):
        resumed_position(stream, {"dataset.file a.b.jsonl": then}, {"epoch": 0, "block": 0})
