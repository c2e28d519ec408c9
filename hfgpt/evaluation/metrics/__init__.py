"""Modules for the `evaluate` library: folders that `evaluate.load` loads by path, without a network."""

from pathlib import Path

PERPLEXITY = str(Path(__file__).parent / "perplexity")
