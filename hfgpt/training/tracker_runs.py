"""Keep a single tracker run across resumes: TensorBoard, Weights & Biases, trackio and MLflow.

metrics.jsonl determines what a tracker's run should contain. When training begins, the tracker gets the records that it
lacks, such as logs that were still queued when the process was killed. Repeated steps that it already has are not sent
again. Other trackers start a new run at each resume.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import patch_environment
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.errors import first_line
from hfgpt.training.mfu import only_numbers
from hfgpt.training.progress import Progress
from hfgpt.training.resume import Resumed

logger = logging.getLogger(__name__)

# Keys with a number in every training log and every evaluation log.
KINDS = ("learning_rate", "eval_tokens")
# Trackers that keep a curve of each value. Others keep a row of each log, which needs its own counters.
OF_CURVES, COUNTERS = ("tensorboard", "mlflow"), ("num_input_tokens_seen", "wall_seconds")
Mark = tuple[int, str]  # identifies a log: its step and its kind

# If one of these changes, repeated steps have different results.
OF_TRAINING = {
    "learning_rate", "min_learning_rate", "lr_scheduler_type", "lr_schedule_on_resume", "warmup_steps", "weight_decay",
    "muon_learning_rate", "embedding_learning_rate", "vector_learning_rate", "embedding_weight_decay",
    "vector_weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "ema_decay", "average_last", "tokens_per_step", "skip_spikes", "rollback_margin", "rollback_steps",
}  # fmt: skip


def mark_of(step: int, logs: dict[str, Any]) -> Mark | None:
    return next(((step, kind) for kind in KINDS if kind in logs and "event" not in logs), None)


@dataclass(frozen=True)
class Earlier:
    """What a resumed run recorded earlier: up to its checkpoint, and the later steps that it repeats."""

    step: int = 0  # of the checkpoint
    records: Sequence[dict[str, Any]] = ()  # training and evaluation records, before the later ones are dropped
    has_changed: bool = False  # repeated steps have different results

    @classmethod
    def of(cls, resumed: Resumed | None) -> Earlier:
        if resumed is None:
            return cls()
        records = RunFolder(resumed.folder.resolve().parent, writes=False).records()
        has_changed = bool(resumed.changed_text or OF_TRAINING & resumed.changed_settings.keys())
        return cls(resumed.progress.step, [one for one in records if mark_of(one["step"], one)], has_changed)

    def marks(self, last_step: float = float("inf")) -> set[Mark | None]:
        return {mark_of(record["step"], record) for record in self.records if record["step"] <= last_step}

    @property
    def is_repeated(self) -> bool:
        return any(record["step"] > self.step for record in self.records)


class Opened(NamedTuple):
    run_id: str  # identifies the run; harmless, and kept in checkpoints
    sent: set[Mark | None]  # logs that the tracker's run already has


# Each opens the tracker's run `run_id` (None: a new one). `begin(args)` calls the callback's own `on_train_begin`.
Begin = Callable[[Any], Any]


def open_tensorboard(callback: Any, args: Any, run_id: str | None, earlier: Earlier, begin: Begin) -> Opened:
    """The id is the name of the folder in `output_dir/runs`, unless TENSORBOARD_LOGGING_DIR is set."""
    name = run_id or time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(callback.logging_dir or Path(args.output_dir, "runs", name))
    continues = run_id is not None and any(folder.glob("events.*"))
    # Readers drop what was written earlier for this step and later ones.
    purge_step = earlier.step + 1 if continues else None
    callback.tb_writer = callback._SummaryWriter(str(folder), purge_step=purge_step)
    begin(args)
    return Opened(name, earlier.marks(earlier.step) if continues else set())


_opened_in_wandb: set[str] = set()


def open_wandb(callback: Any, args: Any, run_id: str | None, earlier: Earlier, begin: Begin) -> Opened:
    """WANDB_RUN_ID and WANDB_RESUME take precedence, and so does a run that the user has opened."""
    import wandb

    if wandb.run is not None and wandb.run.id in _opened_in_wandb:
        wandb.finish()  # opened by another Pretrainer in this process
    if wandb.run is None:
        own = wandb.init(
            project=os.getenv("WANDB_PROJECT", "huggingface"),
            name=args.run_name,
            id=os.getenv("WANDB_RUN_ID") or run_id,
            resume=os.getenv("WANDB_RESUME") or "allow",
        )
        _opened_in_wandb.add(own.id)
    begin(args)
    # What the server has. Offline this is unknown, so everything is sent, and the newest folder of the run is complete.
    last = wandb.run.summary.get("train/global_step")
    return Opened(wandb.run.id, set() if last is None else earlier.marks(last))


def open_trackio(callback: Any, args: Any, run_id: str | None, earlier: Earlier, begin: Begin) -> Opened:
    """The id is the run's name, because trackio finds runs by name; so names must be unique."""
    from trackio import context_vars
    from trackio.sqlite_storage import SQLiteStorage

    named = copy.copy(args)
    named.run_name = run_id or f"{args.run_name}-{secrets.token_hex(3)}"
    begin(named)
    if context_vars.current_server.get() is not None:  # a Space or server, which cannot list its logs
        return Opened(named.run_name, earlier.marks() if run_id else set())
    rows = SQLiteStorage.get_logs(args.project, named.run_name)
    kinds = {"train/learning_rate": KINDS[0], "eval/tokens": KINDS[1]}
    return Opened(
        named.run_name, {(row["train/global_step"], kinds[key]) for row in rows for key in kinds if key in row}
    )


def open_mlflow(callback: Any, args: Any, run_id: str | None, earlier: Earlier, begin: Begin) -> Opened:
    """MLFLOW_RUN_ID takes precedence, and so does a run that the user has opened."""
    import mlflow

    client = mlflow.MlflowClient()
    is_chosen = bool(os.getenv("MLFLOW_RUN_ID") or mlflow.active_run())
    if run_id and not is_chosen and _exists_in_mlflow(client, run_id):
        # The run already has its parameters, and MLflow rejects other values.
        with patch_environment(MLFLOW_RUN_ID=run_id, MLFLOW_MAX_LOG_PARAMS="0"):
            begin(args)
    else:
        begin(args)
    opened = mlflow.active_run().info.run_id
    sent = {(metric.step, kind) for kind in KINDS for metric in client.get_metric_history(opened, kind)}
    return Opened(opened, {*sent})


def _exists_in_mlflow(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        if client.get_run(run_id).info.lifecycle_stage == "active":
            return True
        reason = "deleted"
    except MlflowException as error:
        reason = first_line(error)
    logger.warning("report_to=mlflow: starting a new run, because run %s is gone (%s)", run_id, reason)
    return False


OPEN: dict[str, Callable[[Any, Any, str | None, Earlier, Begin], Opened]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
    "mlflow": open_mlflow,
}


class KeptRun:
    """A tracker's callback that continues its run. Other events and attributes are the callback's own."""

    def __init__(self, name: str, callback: TrainerCallback, run_ids: dict[str, str], earlier: Earlier) -> None:
        """run_ids: by tracker, from the checkpoint; the run that is opened is added."""
        self.name, self.callback, self.run_ids, self.earlier = name, callback, run_ids, earlier
        self.sent: set[Mark | None] = set()
        self.last_training_step: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.callback, name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def begin(args: Any) -> None:
            self.callback.on_train_begin(args, state, control, **kwargs)

        earlier, run_id = self.earlier, self.run_ids.get(self.name)
        # Only TensorBoard can replace what it has.
        if run_id and self.name != "tensorboard" and earlier.is_repeated and earlier.has_changed:
            message = "report_to=%s: starting a new run, because the settings of the steps after %d have changed"
            logger.warning(message, self.name, earlier.step)
            run_id = None
        self.run_ids[self.name], self.sent = OPEN[self.name](self.callback, args, run_id, earlier, begin)
        past = copy.copy(state)
        for record in earlier.records:
            past.global_step = record["step"]
            if record["step"] <= earlier.step and mark_of(past.global_step, record) not in self.sent:
                logs = {key: value for key, value in only_numbers(record).items() if key not in ("step", "time")}
                self._send(args, past, control, logs, kwargs)

    def return_to(self, step: int) -> None:
        """Send later steps again, which a rollback repeats. Only TensorBoard can replace what it has."""
        self.sent = {mark for mark in self.sent if mark is None or mark[0] <= step}
        if self.name == "tensorboard" and (writer := self.callback.tb_writer) is not None:
            writer.close()
            self.callback.tb_writer = self.callback._SummaryWriter(str(writer.log_dir), purge_step=step + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if mark_of(state.global_step, logs) not in self.sent:
            self._send(args, state, control, logs, kwargs)

    def _send(self, args: Any, state: Any, control: Any, logs: dict[str, Any], kwargs: dict[str, Any]) -> None:
        """Send a log. A curve has no second point at a step that is evaluated too."""
        if KINDS[0] in logs:
            self.last_training_step = state.global_step
        elif self.name in OF_CURVES and self.last_training_step == state.global_step:
            logs = {key: value for key, value in logs.items() if key not in COUNTERS}
        self.callback.on_log(args, state, control, logs=logs, **kwargs)


def keep_runs(callbacks: Sequence[TrainerCallback], progress: Progress, resumed: Resumed | None) -> list[Any]:
    """Make the trackers' `callbacks` continue their runs where the tracker supports it. Call on the main process."""
    earlier = Earlier.of(resumed)
    names = {INTEGRATION_TO_CALLBACK[name]: name for name in OPEN}
    return [
        KeptRun(names[type(one)], one, progress.trackers, earlier) if type(one) in names else one for one in callbacks
    ]
