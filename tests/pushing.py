"""A run to push, and a client of the Hub that talks to `hub_server`: fixtures, to be imported by name."""

from __future__ import annotations

import shutil

import pytest
from hub_server import HubServer
from huggingface_hub import constants
from running import trained_on_documents

from hfgpt.hub import push as hub

TOKEN = "hf_SECRETSECRETSECRET"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of two steps with an evaluation, below a folder with a telling name."""
    root = tmp_path_factory.mktemp("home_of_alice")
    return trained_on_documents(root, eval_steps=2, max_steps=2, logging_steps=1)


@pytest.fixture
def folder(original, tmp_path):
    """The run's newest checkpoint, in a copy of the run, with files of other programs beside the model."""
    checkpoint_folder = shutil.copytree(original, tmp_path / "run", symlinks=True) / "checkpoint-2"
    for name in ("optimizer.bin", "random_states_0.pkl", "scheduler.pt", ".env", "notes.txt", "pytorch_model.bin"):
        (checkpoint_folder / name).write_text("not for others")
    return checkpoint_folder


@pytest.fixture
def client(monkeypatch):
    """Has the Hub client of this process talk to a server, once given one; pauses between tries are only noted."""
    pauses: list[float] = []
    monkeypatch.setattr("hfgpt.retry.time.sleep", pauses.append)

    def use(server: HubServer) -> list[float]:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        return pauses

    return use


@pytest.fixture
def verified(monkeypatch):
    """Takes every folder for sound: what `verify` finds is for other tests."""
    monkeypatch.setattr(hub, "verify", lambda folder: {"problems": []})
