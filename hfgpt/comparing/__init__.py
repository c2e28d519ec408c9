"""Compare runs: settings that differ, speed, progress, and loss at equal steps, tokens, FLOPs and seconds."""

from hfgpt.comparing.comparison import compare
from hfgpt.comparing.reading import read_runs

__all__ = ["compare", "read_runs"]
