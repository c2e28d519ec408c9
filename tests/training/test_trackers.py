"""Trackers: each with its real library, and by reading what transformers' callbacks ask of their arguments."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import logging
import os
import random
import sqlite3
import struct
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from running import BrokenText, StopAt, lines, prepared, records, rows_of_steps, trained
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hfgpt import Pretrainer
from hfgpt.errors import UserError
from hfgpt.training import trackers
from hfgpt.training.callback_handler import callback_arguments, callback_states, restore_callbacks
from hfgpt.training.progress import Progress
from hfgpt.training.run import TrainingRun
from hfgpt.training.trackers import TRACKER_EXTRAS

LOGS = 12
NOT_SENT = {"step", "time"}  # trackers have their own


@pytest.fixture
def offline(monkeypatch, tmp_path, tmp_path_factory):
    """Trackers that keep all in the test's folder, where the process now is."""
    monkeypatch.chdir(tmp_path)
    uri = f"file:{tmp_path / 'mlruns'}"
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path_factory.getbasetemp() / "trackio"),  # read once, when it is imported
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_ALLOW_FILE_STORE": "1",  # a database takes half a minute to make
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "board"),
    }.items():
        monkeypatch.setenv(name, value)
    if "mlflow" in sys.modules:  # which has kept the place of an earlier test
        sys.modules["mlflow"].set_tracking_uri(uri)


def logged(config, name, **changes) -> tuple[list[dict], list[dict]]:
    """The training and evaluation records of a run of LOGS logs."""
    run = trained(config(max_steps=LOGS, report_to=name, eval_steps=6, eval_tokens=200, **changes))
    return records(run), records(run, "eval_loss")


def sent(record: dict) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float) and key not in NOT_SENT}


def test_trackio_has_a_row_for_each_log_with_all_metrics(config, offline, tmp_path, caplog):
    pytest.importorskip("trackio", reason="pip install 'hfgpt[trackio]'")
    training, evaluations = logged(config, "trackio", run_name="all metrics")
    (rows,) = trackio_rows("all metrics").values()
    ours = [row for row in rows if "train/loss" in row]
    assert len(ours) == len(training) == LOGS and len(rows) == LOGS + len(evaluations)
    for row, record in zip(ours, training, strict=True):
        assert row.pop("train/global_step") == record["step"]
        assert row == pytest.approx({f"train/{key}": value for key, value in sent(record).items()})
    assert [row["eval/loss"] for row in rows if "eval/loss" in row] == [one["eval_loss"] for one in evaluations]


def test_tensorboard_has_all_metrics_and_no_text(config, offline, tmp_path, caplog):
    pytest.importorskip("tensorboard", reason="pip install 'hfgpt[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training, _ = logged(config, "tensorboard")
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    for key in sent(training[-1]):
        assert len(events.Scalars(f"train/{key}")) == len([one for one in training if one[key] is not None])
        values = {event.step: event.value for event in events.Scalars(f"train/{key}")}
        assert values == pytest.approx({one["step"]: one[key] for one in training if one[key] is not None}, rel=1e-5)
    assert not [tag for tag in events.Tags()["tensors"] if "args" not in tag and "model_config" not in tag]
    assert "attempting to log" not in caplog.text


def test_mlflow_has_all_metrics_and_does_not_warn(config, offline, tmp_path, caplog):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'hfgpt[mlflow]'")
    logging.getLogger("transformers").propagate = True
    training, _ = logged(config, "mlflow")
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FINISHED" and run.data.params["learning_rate"] == "0.01"
    for key in sent(training[-1]):
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, key)
        values = {metric.step: metric.value for metric in history}
        assert len(values) == len(history)
        assert values == pytest.approx({one["step"]: one[key] for one in training if one[key] is not None}), key
    assert "attempting to log" not in caplog.text


def wandb_rows(file: Path) -> list[dict]:
    """What a run logged, from its file: records of protobuf in the blocks of a LevelDB log, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts, rows = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if kind == 0:  # what fills a block up
            place += 32768 - place % 32768
            continue
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            items = record.history.item
            rows += [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}]
    return [row for row in rows if row]


def test_wandb_offline_has_all_metrics(config, offline, tmp_path):
    wandb = pytest.importorskip("wandb", reason="pip install 'hfgpt[wandb]'")
    training, _ = logged(config, "wandb")
    wandb.finish()
    wandb.teardown()  # waits until all is written
    (file,) = (path for path in tmp_path.rglob("run-*.wandb") if "latest" not in str(path))
    rows = [row for row in wandb_rows(file) if "train/loss" in row]
    assert [row["train/global_step"] for row in rows] == [one["step"] for one in training]
    for row, record in zip(rows, training, strict=True):
        assert {key: row[f"train/{key}"] for key in sent(record)} == pytest.approx(sent(record))
        assert not any(isinstance(value, str) for value in row.values())


KEPT = {"max_steps": 9, "save_steps": 4, "eval_steps": 3, "eval_tokens": 200}
# (step, is an evaluation) of all logs of such a run.
EACH_LOG_ONCE = sorted([(step, False) for step in range(1, 10)] + [(step, True) for step in (3, 6, 9)])


def killed_and_resumed(config, name, between=lambda: None, run_name=None, **changes) -> TrainingRun:
    """A run that ends in step 8 and is continued from step 4."""
    fixed = {"report_to": name, "run_name": run_name}
    with pytest.raises(KeyboardInterrupt):
        trained(config(**fixed, **KEPT), StopAt(8))
    between()
    assert [one["step"] for one in lines(Path(config().output_dir)) if one["step"] > 4] == [5, 6, 7]
    return trained(config(**fixed, resume_from_checkpoint="latest", **{**KEPT, **changes}))


def board(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def in_board(folder: Path) -> list[tuple[int, bool]]:
    events = board(folder)
    found = [(event.step, False) for event in events.Scalars("train/loss")]
    return sorted(found + [(event.step, True) for event in events.Scalars("eval/loss")])


def trackio_store() -> Path:
    from trackio.utils import TRACKIO_DIR

    (store,) = Path(TRACKIO_DIR).rglob("*.db")
    return store


def trackio_rows(run_name: str) -> dict[str, list[dict]]:
    """Of each run whose name begins so."""
    found: dict[str, list[dict]] = {}
    with sqlite3.connect(trackio_store()) as database:
        for name, text in database.execute("select run_name, metrics from metrics order by id"):
            if name.startswith(run_name):
                found.setdefault(name, []).append(json.loads(text))
    return found


def marked(rows: list[dict]) -> list[tuple[int, bool]]:
    return sorted((row["train/global_step"], "eval/loss" in row) for row in rows)


def in_mlflow(mlflow) -> list[list[tuple[int, bool]]]:
    """Of each run."""
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    client, found = mlflow.MlflowClient(), []
    for run in mlflow.search_runs(search_all_experiments=True, output_format="list"):
        keys = {"loss": False, "eval_loss": True}
        history = [
            (m.step, is_eval) for key, is_eval in keys.items() for m in client.get_metric_history(run.info.run_id, key)
        ]
        found.append(sorted(history))
    return found


def test_tensorboard_has_each_step_once_after_a_kill_and_a_resume(config, tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'hfgpt[tensorboard]'")
    run = killed_and_resumed(config, "tensorboard", learning_rate=2e-2)
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    assert in_board(folder) == EACH_LOG_ONCE and len(list(folder.iterdir())) == 2
    losses = {event.step: event.value for event in board(folder).Scalars("train/loss")}
    assert losses == pytest.approx({one["step"]: one["loss"] for one in records(run)})  # those of the resumed run


def test_tensorboard_has_each_step_once_after_a_rollback(config, tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'hfgpt[tensorboard]'")
    broken = BrokenText(rows_of_steps(config("rows"), range(20, 24)))
    settings = {"rollback_margin": 1, "rollback_steps": 4, "save_steps": 6, "max_steps": 26}
    run = trained(config(report_to="tensorboard", **settings), broken)
    assert len(records(run, "from_step")) == 1
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    losses = [(event.step, event.value) for event in board(folder).Scalars("train/loss")]
    assert losses == [(one["step"], pytest.approx(one["loss"])) for one in records(run)]
    assert [step for step, _ in losses] == list(range(1, 27))


def test_tensorboard_in_a_folder_of_the_users_continues_there(config, offline, tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'hfgpt[tensorboard]'")
    killed_and_resumed(config, "tensorboard")
    assert in_board(tmp_path / "board") == EACH_LOG_ONCE and not (tmp_path / "run" / "runs").exists()


def test_a_tracker_that_joins_at_a_resume_gets_the_records_before(config, tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'hfgpt[tensorboard]'")
    with pytest.raises(KeyboardInterrupt):
        trained(config(**KEPT), StopAt(8))
    again = {"report_to": "tensorboard", "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-4")}
    trained(config("other", **KEPT, **again))
    (folder,) = (tmp_path / "other" / "runs").iterdir()
    assert in_board(folder) == EACH_LOG_ONCE


def test_trackio_continues_its_run_with_each_step_once(config, offline):
    trackio = pytest.importorskip("trackio", reason="pip install 'hfgpt[trackio]'")
    killed_and_resumed(config, "trackio", trackio.finish, run_name="continued")
    ((name, rows),) = trackio_rows("continued").items()
    assert marked(rows) == EACH_LOG_ONCE and name.startswith("continued-")
    trained(config("new", report_to="trackio", run_name="continued", **KEPT))  # of the same name, and another run
    assert [marked(rows) for rows in trackio_rows("continued").values()] == [EACH_LOG_ONCE] * 2


def test_logs_that_a_tracker_lost_when_the_process_was_killed_are_sent_again(config, offline, tmp_path):
    trackio = pytest.importorskip("trackio", reason="pip install 'hfgpt[trackio]'")

    def lose() -> None:
        trackio.finish()
        with sqlite3.connect(trackio_store()) as database:
            of_the_run = "(select id from metrics where run_name like 'lost-%' order by id limit 3)"
            database.execute(f"delete from metrics where run_name like 'lost-%' and id not in {of_the_run}")

    killed_and_resumed(config, "trackio", lose, run_name="lost")
    ((_, rows),) = trackio_rows("lost").items()
    assert marked(rows) == EACH_LOG_ONCE
    losses = {row["train/global_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {one["step"]: one["loss"] for one in lines(tmp_path / "run")}


def test_mlflow_continues_its_run_with_each_step_once(config, offline, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'hfgpt[mlflow]'")
    killed_and_resumed(config, "mlflow", lambda: mlflow.end_run("FAILED"))
    assert in_mlflow(mlflow) == [EACH_LOG_ONCE]
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FINISHED" and "MLFLOW_RUN_ID" not in os.environ


def test_repeated_steps_with_other_settings_are_a_new_run_with_all_steps(config, offline, tmp_path, caplog):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'hfgpt[mlflow]'")
    killed_and_resumed(config, "mlflow", mlflow.end_run, learning_rate=2e-2, save_steps=3)
    before = [mark for mark in EACH_LOG_ONCE if mark[0] < 8]
    assert sorted(in_mlflow(mlflow), key=len) == [before, EACH_LOG_ONCE]
    assert "report_to=mlflow: starting a new run, because the settings of the steps after 4 have changed" in caplog.text


def test_an_mlflow_run_that_is_gone_is_replaced(config, offline, tmp_path, caplog):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'hfgpt[mlflow]'")

    def remove() -> None:
        mlflow.end_run()
        (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
        mlflow.delete_run(run.info.run_id)

    killed_and_resumed(config, "mlflow", remove)
    assert in_mlflow(mlflow) == [EACH_LOG_ONCE] and "is gone (deleted)" in caplog.text


def test_wandb_continues_its_run_with_each_step_once(config, offline, tmp_path):
    """Offline, where W&B loses what is not yet in its file and cannot add to it, the newest file has all steps."""
    wandb = pytest.importorskip("wandb", reason="pip install 'hfgpt[wandb]'")
    run = killed_and_resumed(config, "wandb", lambda: wandb.finish(1))
    wandb.finish()
    wandb.teardown()  # waits until all is written
    files = [path for path in tmp_path.rglob("offline-run-*/run-*.wandb") if not path.is_symlink()]
    assert [path.stem for path in files] == [f"run-{run.progress.trackers['wandb']}"] * 2
    assert marked(wandb_rows(max(files, key=lambda path: path.stat().st_mtime))) == EACH_LOG_ONCE


def test_wandb_does_not_get_again_what_its_server_has(config, offline, tmp_path):
    """The run as the server of W&B returns it when it resumes: with its last summary."""
    wandb = pytest.importorskip("wandb", reason="pip install 'hfgpt[wandb]'")

    def as_resumed() -> None:
        wandb.finish(1)
        wandb.init(id=(run_id := "resumed"), dir=tmp_path / run_id)
        wandb.run.summary["train/global_step"] = 3  # later ones were in a queue

    killed_and_resumed(config, "wandb", as_resumed)
    wandb.finish()
    wandb.teardown()
    (file,) = tmp_path.rglob("offline-run-*/run-resumed.wandb")
    assert marked(wandb_rows(file)) == [mark for mark in EACH_LOG_ONCE if mark[0] > 3]


def test_a_run_of_the_users_own_wins_in_wandb_and_another_pretrainer_has_another(
    config, offline, tmp_path, monkeypatch
):
    wandb = pytest.importorskip("wandb", reason="pip install 'hfgpt[wandb]'")
    first, second = (trained(config(name, report_to="wandb", **KEPT)) for name in ("one", "two"))
    wandb.finish()
    wandb.init(id="mine")
    third = trained(config("three", report_to="wandb", **KEPT))
    assert wandb.run.id == third.progress.trackers["wandb"] == "mine"
    wandb.finish()
    assert len({run.progress.trackers["wandb"] for run in (first, second, third)}) == 3


def test_the_ids_of_trackers_are_in_checkpoints_and_older_checkpoints_resume(config, tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'hfgpt[tensorboard]'")
    with pytest.raises(KeyboardInterrupt):
        trained(config(report_to="tensorboard", **KEPT), StopAt(8))
    state = tmp_path / "run" / "checkpoint-4" / "training_state" / "trainer_state.json"
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    content = json.loads(state.read_text())
    assert content.pop("trackers") == {"tensorboard": folder.name}
    assert Progress.from_json(content).trackers == {}


def attributes_read(kind: type) -> set[str]:
    """What the class, and those it is made of, read of `args`."""
    found = set()
    for part in kind.__mro__:
        if part not in (TrainerCallback, object):
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
            reads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            found |= {node.attr for node in reads if isinstance(node.value, ast.Name) and node.value.id == "args"}
    return found


@pytest.fixture
def run(config):
    return prepared(config(eval_steps=3, save_steps=2))


def test_what_transformers_trackers_read_of_their_arguments_is_there(run):
    wanted = {name: attributes_read(kind) for name, kind in INTEGRATION_TO_CALLBACK.items()}
    assert "project" in wanted["trackio"] and "resume_from_checkpoint" in wanted["swanlab"]
    missing = {name: {key for key in keys if not hasattr(run.callbacks.args, key)} for name, keys in wanted.items()}
    assert not any(missing.values()), missing


def test_callback_arguments_are_training_arguments_with_the_values_of_the_run(run):
    args = run.callbacks.args
    assert isinstance(args, TrainingArguments)
    assert (args.device, args.world_size, args.process_index, args.n_gpu) == (run.machine.accelerator.device, 1, 0, 0)
    assert args.should_log and args.should_save
    assert (args.max_steps, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (6, 8, 2)
    assert (args.eval_steps, args.save_steps, args.run_name) == (3, 2, "run")
    assert args.output_dir == os.path.abspath(run.config.output_dir)
    assert args.resume_from_checkpoint is None  # trackers take a value for a run that goes on
    assert args.to_dict() == run.config.to_dict() == json.loads(args.to_json_string())
    assert args.to_sanitized_dict()["learning_rate"] == 1e-2
    again = copy.deepcopy(args)
    assert again.max_steps == 6 and again.device == args.device
    assert "max_steps=6" in str(args)


def test_callback_arguments_leave_the_process_as_it_is(run, recwarn, caplog):
    def state():
        generators = random.getstate(), torch.random.get_rng_state().tolist(), np.random.get_state()[1].tolist()
        flags = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
        return dict(PartialState._shared_state), dict(os.environ), generators, flags, torch.get_num_threads()

    before = state()
    config = dataclasses.replace(run.config, optim="muon", gradient_checkpointing=True, eval_steps=0, save_steps=0)
    for precision in ("no", "bf16", "fp16"):
        args = callback_arguments(config, run.step.batch, 6, precision, True, Path("out/run/checkpoint-2"))
        assert (args.bf16, args.fp16, args.torch_compile) == (precision == "bf16", precision == "fp16", True)
        assert args.resume_from_checkpoint == "out/run/checkpoint-2"
    assert state() == before
    assert not recwarn.list and not caplog.records


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({**logs, "epoch": state.epoch})


def test_callbacks_get_the_numbers_of_a_log_with_the_tokens_seen_and_the_record_has_all(config):
    seen = Seen()
    run = trained(config(eval_steps=3, eval_tokens=100), seen)
    assert len(seen.logs) == 8 and not any(isinstance(v, str) or v is None for log in seen.logs for v in log.values())
    assert [log["num_input_tokens_seen"] for log in seen.logs if "loss" in log] == [256 * n for n in range(1, 7)]
    assert all(0 < log["epoch"] <= 1 for log in seen.logs)
    first = records(run)[0]
    assert first["peak_source"] and {"step_seconds", "mfu", "memory_bytes"} <= first.keys()
    assert run.progress.evaluation.keys() >= {"eval_loss", "eval_perplexity"}
    assert "step" not in run.progress.evaluation


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", "report_to=tensorbord: no such tracker; did you mean tensorboard?"),
        ("WandB", "report_to=WandB: no such tracker; did you mean wandb?"),
        ("zzz", "report_to=zzz: no such tracker; there are azure_ml, "),
        ("none, x_y", "report_to=x_y: no such tracker"),
    ],
)
def test_an_unknown_tracker_is_named_before_anything_is_written(config, tmp_path, name, said):
    with pytest.raises(UserError) as caught:
        Pretrainer(config(report_to=name)).train()
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted(set(INTEGRATION_TO_CALLBACK) - {"kubeflow"}))
def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(config, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trackers, "find_spec", lambda module: None)
    with pytest.raises(UserError) as caught:
        Pretrainer(config(report_to=f"none,{name}")).train()
    package = f"'hfgpt[{name}]'" if name in TRACKER_EXTRAS else trackers._PACKAGES.get(name, name)
    assert str(caught.value) == f"report_to={name}: not installed; pip install {package}"
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_installed_and_cannot_be_used_says_why(config, tmp_path, monkeypatch):
    def broken(self):
        raise ImportError("needs protobuf\nbelow 5")

    monkeypatch.setattr(trackers, "find_spec", lambda module: object())
    monkeypatch.setattr(INTEGRATION_TO_CALLBACK["swanlab"], "__init__", broken)
    with pytest.raises(UserError) as caught:
        Pretrainer(config(report_to="swanlab,wanbd")).train()
    assert caught.value.problems[0] == "report_to=swanlab: cannot start: needs protobuf below 5"
    assert "did you mean wandb?" in caught.value.problems[1]
    assert not (tmp_path / "run").exists()


def test_all_trackers_are_those_that_are_installed(config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: [])
    with pytest.raises(UserError, match=r"report_to=all: no tracker is installed; pip install 'hfgpt\[trackers\]'"):
        Pretrainer(config(report_to="all")).train()
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["mlflow", "wandb"])
    assert trackers.tracker_names("wandb, all,wandb") == ["wandb", "mlflow"]
    assert trackers.tracker_names("none") == trackers.tracker_names("") == []


class Never(EarlyStoppingCallback):
    """Counts evaluations, with the patience of an EarlyStoppingCallback: a stateful class of a user's own."""

    def check_metric_value(self, *_):
        self.early_stopping_patience_counter += 1


@pytest.mark.parametrize("swapped", [False, True])
def test_callbacks_of_one_class_each_keep_their_own_state_over_a_resume(config, swapped):
    def several():
        return [Never(50), Never(60), EarlyStoppingCallback(70, 1e9), EarlyStoppingCallback(80)]

    settings = {"eval_steps": 1, "eval_tokens": 100, "max_steps": 6}
    alone = several()
    trained(config("alone", **settings), *alone)
    first = several()
    with pytest.raises(KeyboardInterrupt):
        trained(config(**settings), *first, StopAt(5))
    resumed = several()
    order = list(reversed(resumed)) if swapped else resumed
    trained(config(**settings, resume_from_checkpoint="latest"), *order)
    counts = [one.early_stopping_patience_counter for one in resumed]
    assert counts == [one.early_stopping_patience_counter for one in alone]
    assert counts[0] == counts[1] == 6 and counts[2] > counts[3]


def test_saved_states_of_one_class_find_their_callbacks():
    def counted(patience, count):
        one = EarlyStoppingCallback(patience)
        one.early_stopping_patience_counter = count
        return one

    saved = json.loads(json.dumps(callback_states([counted(3, 1), counted(5, 2)])))
    for patiences, expected in (((3, 5), [1, 2]), ((5, 3), [2, 1]), ((7, 3), [2, 1]), ((8, 9), [1, 2]), ((5,), [2])):
        now = [EarlyStoppingCallback(patience) for patience in patiences]
        restore_callbacks(now, saved)
        assert [one.early_stopping_patience_counter for one in now] == expected
    older = {"EarlyStoppingCallback": {"early_stopping_patience_counter": 4}}  # as versions before wrote it
    restore_callbacks(now := [EarlyStoppingCallback(3)], older)
    assert now[0].early_stopping_patience_counter == 4
