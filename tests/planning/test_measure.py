"""`hfgpt plan --measure`: each micro-batch trains whole steps, until one does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hfgpt.cli import app
from hfgpt.errors import UserError
from hfgpt.planning.benchmark import Measured, measure
from hfgpt.settings.batch import Batch
from hfgpt.training.out_of_memory import MemoryRanOut
from hfgpt.training.step import TrainStep


@pytest.fixture
def settings(config):
    return config(per_device_train_batch_size="auto", tokens_per_step=96, gradient_accumulation_steps=None)


def test_each_split_is_a_whole_step_of_training(settings, monkeypatch):
    taken = []

    def counted(self, ids, labels, step):
        taken.append((self.batch.micro_batch, tuple(ids.shape)))
        return original(self, ids, labels, step)

    original = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", counted)
    found, peak = measure(settings, 50, steps=2)
    assert [row.batch for row in found] == [Batch(1, 16, 6, 1), Batch(2, 16, 3, 1), Batch(6, 16, 1, 1)]
    assert taken == [(size, (6, 16)) for size in (1, 2, 6)] + 2 * [(size, (6, 16)) for size in (1, 2, 6)]
    for row in found:
        assert row.tokens_per_second == pytest.approx(96 / row.step_seconds)
        assert row.mfu == pytest.approx(found[0].mfu * row.tokens_per_second / found[0].tokens_per_second)
        assert row.memory_bytes > 2**20
    assert peak.source.startswith("measured: ")


def test_what_does_not_fit_ends_the_list(settings, monkeypatch):
    def step(self, ids, labels, number):
        if self.batch.micro_batch > 1:
            raise MemoryRanOut

    monkeypatch.setattr(TrainStep, "__call__", step)
    found, _ = measure(settings, 50, steps=1)
    assert found[1:] == [Measured(Batch(2, 16, 3, 1))] and found[0].step_seconds > 0


def test_one_process_is_measured(settings, monkeypatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("hfgpt.distributed.ranks._open_store", lambda *_: None)
    with pytest.raises(UserError, match="measures one process"):
        measure(settings, 50)


def test_peak_memory_starts_again():
    from hfgpt.distributed.device import peak_memory_bytes, reset_peak_memory

    cpu = torch.device("cpu")
    large = torch.ones(100 * 2**18)  # 100 MiB
    with_it = peak_memory_bytes(cpu)
    del large
    reset_peak_memory(cpu)
    assert peak_memory_bytes(cpu) < with_it - 50 * 2**20


def test_the_command_measures_and_draws(monkeypatch, tmp_path):
    model = '{"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}'
    flags = ["plan", "--measure", "--model", model, "--tokens_per_step", "64", "--vocab_size", "50"]
    shown = CliRunner().invoke(app, [*flags, "--torch_compile", "false", "--output", str(tmp_path / "cuts.png")])
    assert shown.exit_code == 0 and "fastest: micro-batch " in shown.stdout and "2 x 2" in shown.stdout
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(CliRunner().invoke(app, [*flags, "--torch_compile", "false", "--json"]).stdout)
    assert [row["micro_batch"] for row in found["cuts"]] == [1, 2, 4] and found["peak_source"]
    wrong = CliRunner().invoke(app, [*flags, "--watts", "300", "--output", str(tmp_path / "none" / "cuts.png")])
    assert "watts: cannot be used with --measure" in str(wrong.exception)
    wrong = CliRunner().invoke(app, ["plan", "--tokens_per_step", "1024", "--output", "cuts.png"])
    assert "only --measure draws a plot" in str(wrong.exception)
