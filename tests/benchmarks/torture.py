"""Kill runs a hundred times, anywhere, and compare each end with that of a run left alone, bit for bit:
python tests/benchmarks/torture.py --kills 100 --seed 1 [--optim muon]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(Path(__file__).parents[1]))

from torture import torture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="decides when the runs are killed")
    parser.add_argument("--optim", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--folder", type=Path, help="where the runs stay; without it they are removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        print("\n".join(torture(folder, options.kills, options.seed, options.optim).lines()))


if __name__ == "__main__":
    main()
