"""Our loop against a bare torch loop with the same compiled model: python tests/benchmarks/loop_overhead.py

Ours is what a recipe runs: text, seeds, clipping, guard, ledger line of every step, callbacks, records. The bare one
draws rows from memory, and takes forward, backward, clipping and fused AdamW, with nothing recorded; it has our setting
of the C library too, without which it is the slower one. All take turns, as processes of their own. `--sizes` are
micro-batches of char-cpu (T = 64): 26 make a step of some 30 ms on two cores, 18 on one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import train_step
from side_by_side import Candidate, Gate, at_least_one, keep, machine, parser, ratios, side_by_side, told, use_cores

BARE = "bare loop, same compiled model"
DETERMINISTIC = "bare loop, deterministic as ours"


def bare_ours(gate: Gate, case: dict[str, Any], deterministic: bool = False) -> None:
    import torch

    from hfgpt import GPT2LMHeadModel, PretrainConfig
    from hfgpt.distributed.cpu import keep_freed_memory
    from hfgpt.training.parameter_groups import parameter_groups

    def forward(model: Any, ids: Any, labels: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, shift_labels=labels, num_items_in_batch=targets).loss

    keep_freed_memory()
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    targets = torch.tensor(float(case["B"] * case["T"]))
    model = GPT2LMHeadModel(train_step.stock_config(case)).train()
    model.compile(dynamic=False)
    groups = parameter_groups(model, PretrainConfig(max_steps=1, learning_rate=1e-3))
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    train_step.bare(gate, case, model, optimizer, forward)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", type=at_least_one, default=[26], help="micro-batches of char-cpu")
    options.add_argument("--rounds", type=at_least_one, default=15)
    options.add_argument("--candidate", nargs="+", help="(the other end)")
    given = options.parse_args()
    if given.candidate:
        name, size, folder = given.candidate
        case, gate = {**train_step.CASES["char-cpu"], "B": int(size)}, Gate()
        import torch

        from hfgpt.distributed.cpu import available_cores

        torch.set_num_threads(available_cores())
        if name == "ours":
            return train_step.hfgpt(gate, case, Path(folder))
        return bare_ours(gate, case, deterministic=name == DETERMINISTIC)
    use_cores(given.threads)
    facts, results = machine(given.threads), {}
    with tempfile.TemporaryDirectory() as folder:
        train_step.write_text(Path(folder), train_step.CASES["char-cpu"]["vocabulary"])
        for size in given.sizes:
            names = ("ours", BARE, DETERMINISTIC)
            running = [Candidate(name, [__file__, "--candidate", name, str(size), folder]) for name in names]
            found = side_by_side(running, given.rounds, 20, warm_up=20)
            for one in running:
                one.end()
            over = {name: ratios(found, name, "process")["ours"] for name in names[1:]}
            print(f"micro-batch {size} of char-cpu", *told(found, BARE), sep="\n", flush=True)
            print(
                *(f"  ours takes {ratio['median']:.3f} of the CPU time of: {name}" for name, ratio in over.items()),
                sep="\n",
            )
            results[str(size)] = {"seconds_per_step": found, "ours_over_bare": over}
    keep("loop_overhead", facts, results)


if __name__ == "__main__":
    main()
