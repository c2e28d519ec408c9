"""A stream of many files and processes: what is exchanged, requested, read and held stays small."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hfgpt.data.stream import StepBatch, batch_hash, hash_blocks, join_texts, summarize


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
