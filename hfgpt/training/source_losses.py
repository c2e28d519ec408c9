"""The losses of a step of a mixture by source, from the losses of its rows, which the step computes anyway."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hfgpt.data.mixture import MixedStream
from hfgpt.data.stream import StepBatch, StepText
from hfgpt.distributed.ranks import Ranks
from hfgpt.training.progress import Progress
from hfgpt.training.step import StepResult

if TYPE_CHECKING:
    from hfgpt.training.run import TrainingRun


class SourceLosses:
    """What the rows of a step lost, on the device until `read`.

    sources: the number of the source of each row of this process. blocks: the step's rows of each source, by name.
    """

    def __init__(self, sources: np.ndarray | None, result: StepResult, blocks: dict[str, int]) -> None:
        self.sources, self.result, self.blocks = sources, result, blocks

    def read(self, ranks: Ranks, progress: Progress) -> dict[str, Any]:
        """Return `tokens/NAME`, of the run so far, and `loss/NAME`, of this step, for each source.

        A loss is None if the step has no block of the source, or did not compute losses by row. Call on all processes.
        """
        names, total = list(self.blocks), sum(self.blocks.values())
        losses: dict[str, float | None] = dict.fromkeys(names)
        alone = [name for name, count in self.blocks.items() if count == total]
        if alone:
            loss = self.result.loss.item()
            losses[alone[0]] = loss
        elif self.result.row_losses is not None and self.sources is not None:
            # A row's loss is its part of the mean over all rows of the step.
            sums = np.bincount(self.sources, self.result.row_losses.double().cpu().numpy(), len(names))
            of_all = np.sum(ranks.gather(sums), axis=0)
            for name, part in zip(names, of_all.tolist(), strict=True):
                losses[name] = part * total / self.blocks[name] if self.blocks[name] else None
        for name, newest in losses.items():
            if newest is not None and math.isfinite(newest):
                progress.sources[name] |= {"loss": newest, "loss_step": progress.step}
        tokens = {f"tokens/{name}": progress.sources[name]["tokens"] for name in names}
        return tokens | {f"loss/{name}": losses[name] for name in names}


def note_sources(run: TrainingRun, own: StepBatch, text: StepText, result: StepResult) -> dict[str, Any]:
    """Note a step of a mixture by source, before `run.position` moves on. Returns what the ledger has of it."""
    mixture, progress = run.data.train, run.progress
    if not isinstance(mixture, MixedStream):
        return {}
    blocks = mixture.blocks_between(run.position, text.position)
    run.source_losses = SourceLosses(own.sources, result, blocks)
    for name, tokens in text.position["tokens"].items():
        of_source = progress.sources.setdefault(name, {})
        of_source["tokens"] = tokens
        if name not in text.position["over"]:
            of_source.pop("last_step", None)
        elif name not in run.position["over"]:
            of_source["last_step"], limit = progress.step - 1, mixture.max_epochs[name]
            run.record(event="source_exhausted", source=name, max_epochs=limit)
            if run.is_main:
                print(
                    f"Source {name} has had its max_epochs={limit}: without it from step {progress.step} on", flush=True
                )
    return {"blocks": blocks}


def losses_are_due(run: TrainingRun) -> bool:
    """Return whether the next step needs the loss of each row: if it is logged and its rows may differ in their source.

    A compiled model computes them in each step, as it would be compiled for both.
    """
    mixture = run.data.train
    if not isinstance(mixture, MixedStream) or len(mixture.active(run.position)) == 1:
        return False
    step, is_compiled = run.progress.step + 1, run.plan.compile.enabled
    return is_compiled or step in (1, run.plan.max_steps) or step % run.config.logging_steps == 0
