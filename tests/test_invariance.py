"""One sequence of global batches and one end position: for any topology, and over interruptions onto others."""

from __future__ import annotations

import json
import pickle
import random
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import token_files
import torch
from running import FORKED_TWO, Run, StopAt, prepared, records, trained

from hfgpt import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.encoding import Encoder
from hfgpt.data.formats.tokens import reading
from hfgpt.data.loader import iterate
from hfgpt.data.stream import batch_hash, hash_blocks, join_batches
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer

STEPS = 40
TOPOLOGIES = [(world, workers) for world in (1, 2, 4) for workers in (0, 1, 2)]
DOCUMENTS = [f"document {n} says " + "la " * (n * 7 % 20) for n in range(160)]
TEXTS = [
    *(("parquet", True), ("parquet", False), ("jsonl", True), ("jsonl", False), ("txt", True), ("txt", False)),
    *(("embedded", True), ("embedded", False)),
    *((("llm.c", True), ("llm.c", False), ("megatron", True), ("packed-column", True), ("datatrove", False))),
]
TOKENS = {"llm.c", "megatron", "packed-column", "datatrove"}  # layouts of token files


def written(folder, kind) -> str:
    """What `--dataset` is for the documents in files of one kind."""
    if kind == "embedded":
        return kind
    folder.mkdir()
    if kind in TOKENS:
        tokens = Encoder(byte_tokenizer(folder.parent)).tokens(DOCUMENTS)
        for name, content in token_files.files(kind, tokens).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    if kind == "txt":
        for n, text in enumerate(DOCUMENTS):
            (folder / f"{n:03}.txt").write_text(text)
    for part in range(4):
        texts = DOCUMENTS[part::4]
        if kind == "parquet":
            pq.write_table(pa.table({"text": texts}), folder / f"{part}.parquet", row_group_size=15)
        elif kind == "jsonl":
            (folder / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder)


def byte_tokenizer(folder):
    """A tokenizer with end-of-text as id 0, saved in `folder`/tokenizer."""
    tokenizer = load_tokenizer("bpe-300", lambda: DOCUMENTS, 64)
    save_tokenizer(tokenizer, folder / "tokenizer")
    return tokenizer


@pytest.fixture(scope="module", params=TEXTS, ids=[f"{kind}-{'documents' if s else 'memory'}" for kind, s in TEXTS])
def text(request, tmp_path_factory):
    """A stream as a run prepares it, and its uninterrupted steps on one process, which go into a second epoch."""
    kind, streaming = request.param
    settings = {"tokenizer": "char", "sequence_length": 32, "streaming": streaming, "eval_tokens": 100, "max_steps": 1}
    dataset = written(tmp_path_factory.mktemp("text") / kind, kind)
    if kind in TOKENS:
        settings |= {"tokenizer": str(Path(dataset).parent / "tokenizer"), **token_files.STATED.get(kind, {})}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "SPAN_TOKENS", 300)  # many units of a small set
        stream = prepare_data(PretrainConfig(dataset=dataset, **settings), 8).train
    whole = steps(stream, None, STEPS, 1, 0)
    assert len(set(whole[0])) == STEPS and (kind == "embedded" or max(epochs(whole[1])) >= 1)
    return stream, whole


def epochs(position) -> list[int]:
    return [position["epoch"]] if "epoch" in position else [cursor[0] for cursor in position["streams"]]


def steps(stream, position, count, world, workers):
    """The hash of each global batch from `position` on, and the position after the last."""
    with ExitStack() as stack:
        ranks = [iterate(stream, position, rank=rank, world=world, num_workers=workers) for rank in range(world)]
        for rank in ranks:
            stack.enter_context(closing(rank))
        batches = [join_batches([next(rank) for rank in ranks]) for _ in range(count)]
    return [batch_hash(hash_blocks(batch.blocks)) for batch in batches], json.loads(json.dumps(batches[-1].position))


@pytest.mark.parametrize(("world", "workers"), TOPOLOGIES)
def test_the_topology_does_not_change_the_batches(text, world, workers):
    stream, whole = text
    assert steps(stream, None, STEPS, world, workers) == whole


@pytest.mark.parametrize("seed", range(3))
def test_resumes_at_random_steps_onto_other_topologies_do_not_change_the_batches(text, seed):
    stream, whole = text
    draw = random.Random(seed)
    stops = sorted(draw.sample(range(1, STEPS), 5))
    position, hashes, before = None, [], None
    for start, stop in zip([0, *stops], [*stops, STEPS], strict=True):
        before = draw.choice([topology for topology in TOPOLOGIES if topology != before])
        again = pickle.loads(pickle.dumps(stream))  # as another process has it
        more, position = steps(again, position, stop - start, *before)
        hashes += more
    assert (hashes, position) == whole


@pytest.mark.parametrize("schedule", ["cosine_with_min_lr", "warmup_stable_decay"])
def test_a_run_cut_in_the_middle_keeps_its_learning_rates_when_it_goes_on_for_longer(config, schedule):  # C28
    options = {"lr_scheduler_type": schedule, "warmup_steps": 3}
    whole = records(trained(config("whole", max_steps=10, **options)))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut", max_steps=10, **options), StopAt(5))
    longer = records(trained(config("cut", max_steps=20, resume_from_checkpoint="latest", **options)))
    rates, expected = ([record["learning_rate"] for record in run] for run in (longer, whole))
    assert rates[:10] == expected and len(rates) == 20
    assert len(set(rates[:3])) == 3 and rates[2:] == sorted(rates[2:], reverse=True)


def test_the_separator_is_a_target_like_any_token(config, document_folder):  # C26
    run = prepared(config(dataset=str(document_folder), tokenizer="bpe-300"))
    ids, targets = run.step.to_tensors(next(run.batches).blocks)
    tokenizer = run.data.tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and (targets == tokenizer.eos_token_id).any()
    assert targets.min() >= 0 and torch.equal(targets[:, :-1], ids[:, 1:])


def launch(folder, dataset, processes, steps, workers, micro_batch) -> Run:
    """A run, or one more leg of it, of steps of 512 tokens up to step `steps`."""
    flags = ["--dataset", dataset, "--tokens_per_step", "512", "--per_device_train_batch_size", str(micro_batch)]
    flags += ["--dataloader_num_workers", str(workers), "--max_steps", str(steps), "--mixed_precision", "no"]
    flags += ["--lr_scheduler_type", "constant", "--warmup_steps", "0", "--resume_from_checkpoint", "latest"]
    return Run([*FORKED_TWO[:-1], f"--nproc_per_node={processes}"], folder, *flags)


def ended(run) -> Run:
    said = run.end(seconds=200)
    assert run.process.returncode == 0, said
    return run


@pytest.mark.slow
def test_a_run_on_one_then_two_then_one_process_is_the_run_on_one(tmp_path):
    dataset = written(tmp_path / "text", "parquet")
    whole = launch(tmp_path / "whole", dataset, 1, 18, workers=1, micro_batch=16)
    for processes, last, workers, micro_batch in ((1, 5, 0, 8), (2, 11, 2, 4), (1, 18, 1, 2)):
        cut = ended(launch(tmp_path / "cut", dataset, processes, last, workers, micro_batch))
    assert cut.ledger() == ended(whole).ledger() and len(whole.ledger()) == 18
    assert {"step", "batch_hash", "position"} == whole.ledger()[0].keys()
    losses = [[record["loss"] for record in run.records("loss")] for run in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 18
    assert losses[1][-1] < losses[1][0] - 0.1
