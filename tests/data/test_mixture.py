"""Mixtures: exact shares of tokens, the same blocks for any processes, workers and resumes, and where sources end."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random
import threading
from collections import Counter
from contextlib import ExitStack, closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from hfgpt import PretrainConfig
from hfgpt.data import document_stream, mixture_plan, prepare_data
from hfgpt.data.loader import iterate
from hfgpt.data.mixture import step_counts
from hfgpt.data.source import read_documents
from hfgpt.data.stream import batch_hash, join_batches
from hfgpt.errors import TextEnded, UserError

SETTINGS = {"tokenizer": "char", "sequence_length": 16, "eval_tokens": 50, "max_steps": 1}
STEPS = 30


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three files of documents; their names."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in {"wiki": 200, "code": 120, "mail": 70}.items():
        lines = [json.dumps({"text": f"{name} {n} says " + "la " * (n * 7 % 20)}) + "\n" for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return {path.stem: str(path) for path in folder.iterdir()}


def mixed(texts, weights=(0.65, 0.25, 0.1), **settings) -> PretrainConfig:
    names = ("wiki", "code", "mail")[: len(weights)]
    sources = [{"dataset": texts[name], "weight": weight} for name, weight in zip(names, weights, strict=True)]
    limits = settings.pop("max_epochs", {})
    sources = [{**one, "max_epochs": limits.get(name)} for one, name in zip(sources, names, strict=True)]
    return PretrainConfig(**{**SETTINGS, "dataset": sources, **settings})


def parts(stream, position, count, world=1, workers=0):
    """`count` whole steps from `position` on."""
    with ExitStack() as stack:
        ranks = [iterate(stream, position, rank=rank, world=world, num_workers=workers) for rank in range(world)]
        for rank in ranks:
            stack.enter_context(closing(rank))
        return [join_batches([next(rank) for rank in ranks]) for _ in range(count)]


def facts(batches):
    """The hash of each step, its blocks of each source, and the last position."""
    counts = [np.bincount(batch.sources, minlength=3).tolist() for batch in batches]
    return [batch_hash(batch.blocks) for batch in batches], counts, json.loads(json.dumps(batches[-1].position))


@pytest.fixture(scope="module", params=["memory", "documents", "both"])
def stream(request, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfgpt.data.prepare_text.IN_MEMORY_BYTES", 6000)  # wiki has more
        streaming = {"memory": False, "documents": True, "both": "auto"}[request.param]
        stream = prepare_data(mixed(texts, streaming=streaming), 8).train
    kinds = {type(source).__name__ for source in stream.sources.values()}
    assert len(kinds) == 1 + (request.param == "both")
    return stream, facts(parts(stream, None, STEPS))


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 60, 512])
def test_shares_are_exact_to_one_block_in_each_step_and_in_total(blocks):
    for trial in range(20):
        draw = random.Random(trial)
        weights = [Fraction(draw.randint(0, draw.choice([3, 20, 1000]))) for _ in range(draw.randint(1, 6))]
        weights[0] += 1
        weights = tuple(weight / sum(weights) for weight in weights)
        totals = [0] * len(weights)
        for step in range(100):
            counts = step_counts(blocks, weights, totals, step)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
            assert sum(counts) == blocks
            for count, total, weight in zip(counts, totals, weights, strict=True):
                assert math.floor(blocks * weight) <= count <= math.ceil(blocks * weight)
                assert abs(total - (step + 1) * blocks * weight) < 1


def test_the_logical_streams_of_a_source_advance_evenly(texts):
    stream = prepare_data(mixed(texts, (0.9, 0.03, 0.07), streaming=True), 24).train
    position, dealt = stream.start, np.zeros((3, stream.streams), int)
    for _ in range(400):
        counts, counters = stream.plan_step(position)
        of_step, ahead = stream.deal(counts, position)
        position, dealt = {**position, **counters, "ahead": ahead}, dealt + of_step
        assert (of_step.sum(0) == 24 // stream.streams).all() and (of_step.sum(1) == counts).all()
        assert (np.ptp(dealt, axis=1) <= 8).all()
    assert dealt.min() > 5


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (2, 2), (4, 0)])
def test_processes_and_workers_do_not_change_the_blocks(stream, world, workers):
    mixture, whole = stream
    assert facts(parts(mixture, None, STEPS, world, workers)) == whole


def test_resumes_onto_other_processes_do_not_change_the_blocks(stream):
    mixture, whole = stream
    position, batches = None, []
    for count, world, workers in ((7, 2, 0), (1, 4, 0), (13, 1, 0), (9, 2, 2)):
        batches += parts(pickle.loads(pickle.dumps(mixture)), position, count, world, workers)
        position = json.loads(json.dumps(batches[-1].position))
    assert facts(batches) == whole


def test_remote_sources_read_the_text_of_their_first_step_together(texts, monkeypatch):
    train = prepare_data(mixed(texts, streaming=True), 8).train
    expected, inside, together = facts(parts(train, None, 5)), set(), threading.Event()
    for stream in train.sources.values():
        stream.source = dataclasses.replace(stream.source, is_local=False)
    read = document_stream._read

    def read_slowly(source, unit):
        if threading.current_thread() is not threading.main_thread():  # where the first unit is read alone
            inside.add(unit.file)
            if len(inside) > 1:
                together.set()
            assert together.wait(20)
        return read(source, unit)

    monkeypatch.setattr(document_stream, "_read", read_slowly)
    assert facts(parts(train, None, 5)) == expected
    assert together.is_set()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("weights", [(1,), (5,), (1, 0)])
def test_a_mixture_of_one_source_is_that_source(texts, streaming, weights):
    data = prepare_data(mixed(texts, weights, streaming=streaming), 8)
    alone, tokenizer = data.train, data.tokenizer
    plain = prepare_data(PretrainConfig(dataset=texts["wiki"], streaming=streaming, **SETTINGS), 8, tokenizer)
    for one, other in zip(parts(alone, None, STEPS), parts(plain.train, None, STEPS), strict=True):
        assert batch_hash(one.blocks) == batch_hash(other.blocks)
        assert one.position["sources"]["wiki"] == other.position
        assert [origins[0] for origins in one.documents] == other.documents or not streaming


@pytest.mark.parametrize("streaming", [False, True])
def test_blocks_are_those_of_their_source(texts, streaming):
    data = prepare_data(mixed(texts, streaming=streaming), 8)
    for batch in parts(data.train, None, 4):
        for found in data.train.locate_rows(data.tokenizer.decode, batch, list(range(8))):
            assert found["source"] in found.get("file", found["source"])
        for row, number in zip(batch.blocks, batch.sources, strict=True):
            others = {"wiki", "code", "mail"} - {data.train.names[number]}
            assert not any(f"{name} " in data.tokenizer.decode(row) for name in others)


def test_stages_change_the_weights_at_their_step(texts):
    stages = [
        {"until_tokens": 8 * 16 * 3 - 5},
        {"weights": {"mail": 1}, "until_tokens": 8 * 16 * 5},
        {"weights": [0, 1, 1]},
    ]
    train = prepare_data(mixed(texts, (0.5, 0.5, 0), stages=stages), 8).train
    assert [first for first, _ in train.schedule] == [0, 3, 5]
    _, counts, position = facts(parts(train, None, 7))
    assert counts == [[4, 4, 0]] * 3 + [[0, 0, 8]] * 2 + [[0, 4, 4]] * 2
    assert position["tokens"] == {"wiki": 192, "code": 320, "mail": 384}


def test_weights_that_change_count_from_the_next_step(texts):
    first, second = (prepare_data(mixed(texts, weights), 8).train for weights in ((0.5, 0.5, 0), (0, 0.5, 0.5)))
    assert not first.follow(first.fingerprint["weights"], 4, [(4, first.schedule[0][1])]) and len(first.schedule) == 1
    before = parts(first, None, 4)
    assert second.follow(first.fingerprint["weights"], 4, [(4, second.schedule[0][1])])
    assert second.fingerprint["weights"] == [[0, ["1/2", "1/2", "0"]], [4, ["0", "1/2", "1/2"]]]
    after = parts(second, before[-1].position, 4)
    replayed = facts(parts(second, None, 8))
    assert facts(before + after) == replayed and replayed[1] == [[4, 4, 0]] * 4 + [[0, 4, 4]] * 4


def test_validation_text_of_a_source_is_training_text_of_none(texts, tmp_path):
    wiki, copy = Path(texts["wiki"]).read_text().splitlines(keepends=True), tmp_path / "copy.jsonl"
    copy.write_text("".join(wiki[-10:] + wiki[:100]))  # the end of wiki is its validation text
    whole = {**SETTINGS, "eval_tokens": None, "dataset": [texts["wiki"], str(copy)]}
    for streaming in (False, True):
        data = prepare_data(PretrainConfig(**whole, streaming=streaming), 8)
        held_out = [json.loads(line)["text"] for line in wiki[-9:]]
        if not streaming:
            text = data.tokenizer.decode(data.train.sources["copy"].tokens)
            assert data.skipped["in_validation"] >= 9 and not any(document in text for document in held_out)
        else:
            assert data.train.sources["wiki"].source.exclude == data.train.sources["copy"].source.exclude
            assert len(data.train.sources["copy"].source.exclude) >= 20
        assert set(data.named_validation) == {"wiki", "copy"}


def test_a_source_in_memory_ends_after_its_epochs(texts):
    whole = prepare_data(mixed(texts, (1, 1), streaming=False), 8).train
    limit = whole.sources["code"].blocks_left(whole.start["sources"]["code"], 2)
    train = prepare_data(mixed(texts, (1, 1), streaming=False, max_epochs={"code": 2}), 8).train
    batches = []
    with pytest.raises(TextEnded, match="source code: it has had its max_epochs=2"):
        for batch in iterate(train, None):
            batches.append(batch)
    assert len(batches) == limit // 4 and batches[-1].position["sources"]["code"]["epoch"] == 1
    options = {"max_epochs": {"code": 2}, "on_exhausted": "renormalise", "streaming": False}
    others = prepare_data(mixed(texts, (1, 1), **options), 8).train
    counts = facts(parts(others, None, limit // 4 + 3))[1]
    assert counts == [[4, 4, 0]] * (limit // 4) + [[8, 0, 0]] * 3
    assert facts(parts(others, None, limit // 4 + 3, world=4)) == facts(parts(others, None, limit // 4 + 3))


def test_a_step_counts_only_the_epochs_that_it_needs(texts):
    source = prepare_data(mixed(texts, (1, 1), streaming=False), 8).train.sources["code"]
    for position in ({"epoch": 0, "block": 0}, {"epoch": 1, "block": 5}):
        left = source.blocks_left(position, 3)
        assert source.has_blocks(left, position, 3)
        assert not source.has_blocks(left + 1, position, 3)
        assert source.has_blocks(left + 1, position, 10**15)  # would not return if it counted all of them


def test_a_streamed_source_ends_after_its_epochs_on_any_number_of_processes(texts):
    train = prepare_data(mixed(texts, (1, 1), streaming=True, max_epochs={"code": 2}), 8).train
    steps, last = [], None
    for world in (1, 2):
        ranks = [iterate(train, None, rank=rank, world=world) for rank in range(world)]
        made = 0
        with pytest.raises(TextEnded, match="source code: it has had its max_epochs=2"):
            while True:
                batch = join_batches([next(rank) for rank in ranks])
                made += 1
        steps.append(made)
        last = batch.position["sources"]["code"]["streams"]
    assert steps[0] == steps[1] > 10 and {cursor[0] for cursor in last} <= {0, 1, 2} and max(last)[0] >= 1
    with pytest.raises(UserError, match="source code: max_epochs=2 with on_exhausted=renormalise"):
        prepare_data(mixed(texts, (1, 1), streaming=True, max_epochs={"code": 2}, on_exhausted="renormalise"), 8)


def test_all_sources_that_cannot_be_opened_are_named_at_once(tmp_path, texts):
    sources = [{"dataset": texts["wiki"], "text_column": "body"}, str(tmp_path / "none.txt"), texts["code"]]
    with pytest.raises(UserError) as error:
        prepare_data(PretrainConfig(**SETTINGS, dataset=sources), 8)
    first, second = error.value.problems
    assert first.startswith("source wiki: text_column=body") and second.startswith("source none: dataset=")


def test_named_evaluation_texts_are_held_out_of_nothing(texts):
    named = {"eval_dataset": {"notes": texts["mail"], "code": {"dataset": texts["code"]}}}
    for dataset in (texts["wiki"], [texts["wiki"]]):
        data = prepare_data(PretrainConfig(**{**SETTINGS, "tokenizer": "bpe-300"}, dataset=dataset, **named), 8)
        assert {name: len(tokens) for name, (tokens, _) in data.named_validation.items()} == {"notes": 51, "code": 51}
        assert len(data.validation) == 102 and "eval_dataset" in data.train.fingerprint["held_out"]
    with pytest.raises(UserError, match=r"eval_dataset\.notes=.*no such"):
        prepare_data(PretrainConfig(**SETTINGS, dataset=texts["wiki"], eval_dataset={"notes": "none.txt"}), 8)


def test_the_plan_estimates_the_tokens_of_streams_and_not_of_their_files(tmp_path):
    rows = [f"row {n}: é\n" + "la " * (n * 7 % 20) for n in range(3000)]
    (tmp_path / "keys.jsonl").write_text("".join(json.dumps({"url": "x" * 99, "text": row}) + "\n" for row in rows))
    (tmp_path / "list.json").write_text(json.dumps([{"text": row} for row in rows], indent=2))
    texts = {"wiki": str(tmp_path / "keys.jsonl"), "code": str(tmp_path / "list.json")}
    data = prepare_data(mixed(texts, (1, 1), streaming=True, eval_tokens=None), 8)
    position = {"step": 0, "tokens": dict.fromkeys(data.train.names, 0), "over": []}
    lines = mixture_plan.describe_mixture(data.train, data, position, 10_000)
    for name, source in data.train.sources.items():
        documents = read_documents(source.source, source.source.units, Counter())
        right = sum(len(tokens) + 1 for tokens in source.encoder.tokens(list(documents)))
        [line] = [line for line in lines if line.startswith(f"{name}: ")]
        assert "epochs (judging by its held-out text)" in line
        assert float(line.split("about ")[1].split()[0]) == pytest.approx(640_000 / right, rel=0.03)
