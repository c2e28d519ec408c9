"""Faults that users of other streams met: ours does not have them."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import time
from collections import Counter
from email.utils import formatdate
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_stream import LAYOUTS, TOKENIZER, assert_same, document_stream, memory_blocks, source_of, take, texts

from hfgpt.config import PretrainConfig
from hfgpt.data import file_access, prepare_data
from hfgpt.data.document_stream import DocumentStream, _read
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats import parquet
from hfgpt.data.loader import iterate
from hfgpt.data.open_source import open_source
from hfgpt.data.remote import read_with_retries, take_retries
from hfgpt.data.stream import join_batches
from hfgpt.data.units import Unusable
from hfgpt.errors import RunError, UserError


def read_epochs(stream, epochs, world, workers):
    """The texts of each epoch as they stand in the blocks, which are those that the steps name."""
    ranks = [iterate(stream, None, rank=rank, world=world, num_workers=workers) for rank in range(world)]
    steps = []
    while not steps or min(origins[-1][0] for origins in steps[-1].documents) < epochs:
        steps.append(join_batches([next(rank) for rank in ranks]))
    for rank in ranks:
        rank.close()
    rows = [stream.source.read(unit) for unit in stream.source.units]
    each = stream.sizes.common // stream.streams
    found = [[] for _ in range(epochs)]
    for i in range(stream.streams):
        run = np.concatenate([step.blocks[i * each : (i + 1) * each, :-1].ravel() for step in steps])
        named = steps[0].documents[i][:1] + [origin for step in steps for origin in step.documents[i][1:]]
        for text, (epoch, unit, row, *_) in zip(stream.encoder._tokenizer.decode(run).split("\n"), named, strict=False):
            if epoch < epochs:
                assert text == rows[unit][row]
                found[epoch].append(text)
    return found


@pytest.mark.parametrize("layout", [*LAYOUTS, "one huge row group"])
def test_blocks_of_two_epochs_hold_each_document_once_an_epoch(tmp_path, layout):  # C04, C07, C08
    """On two processes of two workers, which are more than some layouts have files."""
    files = {**LAYOUTS, "one huge row group": [[3000]]}[layout]
    first, second = read_epochs(document_stream(tmp_path / "text", files), 2, world=2, workers=2)
    assert sorted(first) == sorted(second) == sorted(texts(sum(map(sum, files))))
    assert first != second


def test_resume_within_a_large_row_group_goes_on_with_the_next_document(tmp_path):  # C02
    stream = document_stream(tmp_path / "text", [[3000]], blocks_per_step=1)
    documents = list(islice(stream.documents(0, [0, 0, 0, 0]), 800))  # of three parts of the row group
    for at in (1, 7, 8, 9, 200, 375):  # also within and between the documents that are encoded together
        again = list(islice(stream.documents(0, [*documents[at].place, 0]), 800 - at))
        assert [document.origin for document in again] == [document.origin for document in documents[at:]]


def test_resume_of_one_process_of_four_gives_the_rest_of_its_own_rows(tmp_path):  # C02
    stream = document_stream(tmp_path / "text", [[6]] * 4)
    for rank in range(4):
        whole = take_rank(stream, None, rank, 12)
        for stop in (1, 3, 7):
            position = take(stream, None, stop, world=4)[-1][1]
            again = take_rank(stream, position, rank, 12 - stop)
            assert [batch.documents for batch in again] == [batch.documents for batch in whole[stop:]]
            assert all(np.array_equal(*pair) for pair in zip(blocks_of(again), blocks_of(whole[stop:]), strict=True))


def take_rank(stream, position, rank, steps):
    return list(islice(iterate(stream, position, rank=rank, world=4), steps))


def blocks_of(batches):
    return [batch.blocks for batch in batches]


@pytest.mark.parametrize("together", [1, 2, 1000])
def test_documents_encoded_together_do_not_change_the_blocks(tmp_path, monkeypatch, together):  # C22
    stream = document_stream(tmp_path / "text")
    expected = take(stream, None, 30)
    monkeypatch.setattr("hfgpt.data.document_stream.ENCODED_TOGETHER", together)
    assert_same(take(stream, None, 30), expected)


def test_a_step_of_a_text_in_memory_cuts_one_order_of_all_blocks():  # C29
    """Blocks at the border of two epochs are neither left out nor repeated."""
    one, eight = memory_blocks(1003, blocks_per_step=1), memory_blocks(1003)
    singles = np.concatenate([blocks for blocks, *_ in take(one, None, 160)])
    steps = take(eight, None, 20)
    assert np.array_equal(np.concatenate([blocks for blocks, *_ in steps]), singles)
    assert steps[-1][1]["epoch"] == 2 and one.blocks_per_epoch % 8
    for stop in (5, 13):  # in the first epoch, and in the second
        assert_same(take(eight, steps[stop - 1][1], 20 - stop), steps[stop:])


@pytest.mark.parametrize("world", [1, 2])
def test_held_out_documents_are_in_no_block_of_three_epochs_on_any_process(tmp_path, world):  # C09, C10
    held_out, path = [f"held out {n}" for n in range(10)], tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in held_out))
    (tmp_path / "text").mkdir()
    for part in range(4):
        rows = [*texts(100)[part::4], *held_out[part::4]]
        pq.write_table(pa.table({"text": rows}), tmp_path / "text" / f"{part}.parquet", row_group_size=9)
    settings = {"eval_dataset": str(path), "tokenizer": "char", "sequence_length": 16, "streaming": True}
    data = prepare_data(PretrainConfig(dataset=str(tmp_path / "text"), max_steps=1, **settings), 8)
    assert data.tokenizer.decode(data.validation).split("\n")[:10] == held_out
    epochs = read_epochs(data.train, 3, world, 0)
    assert [sorted(epoch) for epoch in epochs] == [sorted(texts(100))] * 3


def read(source):
    return [row for unit in source.units for row in source.read(unit)]


def damaged(folder, number, how):
    """Three files of ten rows, one of them damaged; and its name."""
    folder.mkdir()
    for part in range(3):
        file = io.BytesIO()
        pq.write_table(pa.table({"text": texts(30)[10 * part : 10 * part + 10]}), file)
        data = file.getvalue()
        if part == number:
            data = data[: len(data) // 2] if how == "cut" else data[:4] + b"\xff" * 56 + data[60:]
        (folder / f"{part}.parquet").write_bytes(data)
    return str(folder), f"{number}.parquet"


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", ["cut", "overwritten"])
def test_a_broken_file_stops_by_name_or_is_left_out_and_counted(tmp_path, number, how):  # C11
    folder, name = damaged(tmp_path / "text", number, how)
    with pytest.raises(UserError, match=name):
        read(open_source(folder))
    source = open_source(folder, skip_bad_files=True)
    rows = read(source)
    assert [row for row in rows if isinstance(row, str)] == [
        text for n, text in enumerate(texts(30)) if n // 10 != number
    ]
    assert source.skipped_files + rows.count(Unusable("bad_file")) == 1


class TransportError(Exception):
    """What the Hub's HTTP client, whichever it is, calls its faults."""


def answered(status, headers=None):
    error = OSError(f"answer {status}")
    error.response = SimpleNamespace(status_code=status, headers=headers or {})
    return error


def from_timeout():
    """As fsspec puts it: a file that is not found because the answer did not come in time."""
    error = FileNotFoundError("no answer")
    error.__cause__ = TimeoutError("timed out")
    return error


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A source of three files, faults that reading a file raises in turn (by its name), and the pauses made."""
    source = source_of(tmp_path / "text", [[10]] * 3)
    units = [unit._replace(file=f"file://{unit.file}") for unit in source.units]
    faults, pauses, opened = {}, [], file_access.url_to_fs

    def failing(file):
        for name, errors in faults.items():
            if name in file and errors:
                raise errors.pop(0)
        return opened(file)

    monkeypatch.setattr(file_access, "url_to_fs", failing)
    monkeypatch.setattr("hfgpt.retry.time.sleep", pauses.append)
    monkeypatch.setattr(parquet, "_footers", parquet._FooterCache())
    take_retries()
    return dataclasses.replace(source, units=units), faults, pauses


@pytest.mark.parametrize("error", [lambda: TransportError("late"), from_timeout, lambda: answered(504)])
@pytest.mark.parametrize("skip_bad_files", [False, True])
def test_faults_on_the_way_are_waited_out_and_repeat_no_row(far, error, skip_bad_files):  # C11, C12
    source, faults, pauses = far
    source = dataclasses.replace(source, skip_bad_files=skip_bad_files)
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 8, "fingerprint": {}}
    expected = take(DocumentStream(source, Encoder(TOKENIZER), **options), None, 9)
    _read.cache_clear()
    faults["001.parquet"] = [error(), error()]
    steps = list(islice(iterate(DocumentStream(source, Encoder(TOKENIZER), **options), None), 9))
    assert all(np.array_equal(step.blocks, blocks) for step, (blocks, *_) in zip(steps, expected, strict=True))
    events = [event for step in steps for event in step.retries]
    assert len(events) == len(pauses) == 2 and all("001.parquet" in event["what"] for event in events)
    assert sum((step.skipped for step in steps), Counter()) == {}


def test_a_fault_on_the_way_that_stays_is_no_bad_file(far):  # C11
    source, faults, _ = far
    faults["001.parquet"] = [TransportError("late")] * 3
    with pytest.raises(RunError, match=r"001\.parquet could not be read"):
        dataclasses.replace(source, skip_bad_files=True, patience_seconds=0).read(source.units[1])


def test_a_missing_file_is_reported_at_once(far):  # C12
    source, faults, pauses = far
    for error in (FileNotFoundError(2, "No such file"), answered(404)):
        faults["001.parquet"] = [error]
        with pytest.raises(UserError, match=r"001\.parquet"):
            source.read(source.units[1])
    assert not pauses


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(far):  # C12
    _, _, pauses = far
    answers = [answered(429, {"Retry-After": "7"}), answered(429, {"Retry-After": "7"})]

    def read():
        if answers:
            raise answers.pop()
        return "text"

    assert read_with_retries(read, "a file", 900) == "text"
    assert len(pauses) == 2 and min(pauses) >= 7


def test_a_server_cannot_ask_for_more_patience_than_there_is(far):
    _, _, pauses = far
    later = formatdate(time.time() + 30, usegmt=True)
    for asked in (later, "3600", "1e9", "soon"):
        answers = [answered(429, {"Retry-After": asked})]
        read_with_retries(lambda answers=answers: answers and (_ for _ in ()).throw(answers.pop()), "a file", 20)
    assert pauses == pytest.approx([10, 10, 1, 1], abs=0.5)  # then one more try, in the time that is left


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "I/O error")])
def test_what_the_system_refuses_of_a_local_file_is_no_bad_file(tmp_path, monkeypatch, error):
    (tmp_path / "a.txt").write_text("text")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(file_access, "open", refuse, raising=False)
    with pytest.raises(UserError, match=f"a.txt cannot be read.*{error.strerror}") as caught:
        open_source(str(tmp_path), skip_bad_files=True)
    assert type(caught.value) is UserError


def test_streams_that_find_nothing_in_one_epoch_go_on_with_the_next(tmp_path):
    """Few usable rows for so many streams: enough for all, though not in each part of every epoch."""
    rows = [json.dumps({"text": text if n % 5 == 0 else None}) + "\n" for n, text in enumerate(texts(1000))]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 64}
    stream = DocumentStream(open_source(str(tmp_path / "a.jsonl")), Encoder(TOKENIZER), fingerprint={}, **options)
    steps = take(stream, None, 60)
    assert_same(take(stream, steps[20][1], 10), steps[21:31])


def test_a_change_in_the_middle_of_a_large_file_is_seen(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"line {n}"}) for n in range(300_000)]
    path.write_text("\n".join(lines))
    before = open_source(str(path)).fingerprint
    lines[150_001] = lines[150_001].replace("line", "LINE")
    path.write_text("\n".join(lines))
    after = open_source(str(path)).fingerprint
    assert after["bytes"] == before["bytes"] and after["hash"] != before["hash"]
