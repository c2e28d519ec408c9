"""Modules for the `evaluate` library, each a folder that `evaluate.load` takes by its path, without a network."""

from pathlib import Path

PERPLEXITY = str(Path(__file__).parent / "perplexity")
