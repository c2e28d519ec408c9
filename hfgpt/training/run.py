"""`TrainingRun`: all parts of a run, complete before its first step. setup.py builds it, pretrainer.py uses it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.checkpointing.saver import Saver
from hfgpt.config import PretrainConfig
from hfgpt.data import TextData
from hfgpt.data.loader import iterate
from hfgpt.data.stream import StepBatch
from hfgpt.distributed.device import Precision
from hfgpt.distributed.ranks import Ranks
from hfgpt.distributed.stop_signals import StopSignals
from hfgpt.hub.background import SavePusher
from hfgpt.model.memory import Setting
from hfgpt.settings.batch import Batch
from hfgpt.training.averaging import WeightAverage
from hfgpt.training.callback_handler import Callbacks
from hfgpt.training.non_finite import NonFiniteGuard
from hfgpt.training.plan import Plan, setting_of
from hfgpt.training.progress import Progress
from hfgpt.training.resume import Resumed
from hfgpt.training.source_losses import SourceLosses
from hfgpt.training.step import TrainStep


@dataclass(frozen=True)
class Machine:
    """The processes of a run and their devices."""

    ranks: Ranks
    accelerator: Accelerator
    precision: Precision
    is_sharded: bool  # FSDP2: parameters and optimizer state are sharded over the processes

    def memory_setting(self, config: PretrainConfig, batch: Batch, compiled: bool = False) -> Setting:
        shares = self.ranks.world_size if self.is_sharded else 1
        return setting_of(config, batch, self.precision.name, shares, self.accelerator.device.type, compiled)


@dataclass
class TrainingRun:
    """All parts of a run."""

    config: PretrainConfig
    plan: Plan  # what was derived from the settings, and why
    machine: Machine
    signals: StopSignals
    folder: RunFolder
    resumed: Resumed | None
    data: TextData
    batches: Generator[StepBatch, None, None]
    position: dict[str, Any]  # position in the text after the last finished step
    step: TrainStep
    average: WeightAverage | None
    progress: Progress
    callbacks: Callbacks
    non_finite: NonFiniteGuard
    saver: Saver
    pusher: SavePusher | None  # of the main process, if saves are pushed to the Hub
    facts: dict[str, Any]  # the content of run.json
    has_started: bool = False  # the folder is locked, and records are written
    has_ended: bool = False
    text_ended: str = ""  # why there is no more text, if the run ends for that
    source_losses: SourceLosses | None = None  # of the newest step of a mixture
    has_warned_of_report: bool = False  # a failure to write the report was logged
    lost_output: set[str] = field(default_factory=set)  # output streams whose failure has been recorded

    @property
    def is_main(self) -> bool:
        return self.machine.ranks.rank == 0

    @property
    def is_complete(self) -> bool:
        return self.progress.step >= self.plan.max_steps

    def read_from(self, position: dict[str, Any]) -> None:
        """Continue with the text from another position on."""
        ranks = self.machine.ranks
        self.batches.close()
        self.position = position
        workers = self.config.dataloader_num_workers
        self.batches = iterate(self.data.train, position, ranks.rank, ranks.world_size, workers, self.progress.step)

    def close(self) -> None:
        """End the processes that read the text, and release the folder."""
        try:
            self.batches.close()
        finally:
            self.folder.close()

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl."""
        self.progress.wall_seconds = self.callbacks.mfu.total_seconds
        counters = {key: getattr(self.progress, key) for key in ("step", "num_input_tokens_seen", "wall_seconds")}
        self.folder.record(**{**counters, **values})
