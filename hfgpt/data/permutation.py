"""Keyed hashes and permutations of integers, identical on every machine and with every version of numpy."""

from __future__ import annotations

import numpy as np


def permutation(count: int, *keys: int) -> np.ndarray:
    """Return a permutation of range(count), int64, that depends only on `keys` (numpy's own may change)."""
    return np.argsort(hashes(np.arange(count), *keys), kind="stable")


def hash_of(*keys: int) -> int:
    """Return one hash of all keys, using plain integers, which are faster than `hashes` for so few."""
    state, mask = 0, 2**64 - 1
    for key in keys:
        state = ((state ^ key % 2**64) + 1) * 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return state


def hashes(values: np.ndarray, *keys: int) -> np.ndarray:
    """Return 64 well-mixed bits per value: splitmix64 (Steele, Lea and Flood, 2014) seeded with `keys`."""
    bits = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(hash_of(*keys))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
