"""Saves that are pushed while a run trains, and runs that continue from the Hub on another machine."""

# ruff: noqa: F811  fixtures are imported by name

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from hub_server import Faults, HubServer
from huggingface_hub.utils import get_session
from pushing import TOKEN, client, verified  # noqa: F401
from running import FORKED, Run, lines, prepared, trained
from transformers import TrainerCallback

from hfgpt.checkpointing.audit import audit
from hfgpt.checkpointing.checkpoint import find_damage
from hfgpt.errors import UserError
from hfgpt.hub.background import SavePusher

REPOSITORY = "models/me/tiny"
PUSHES = {"push_to_hub": True, "hub_model_id": "me/tiny", "save_steps": 1}
POINT = ["manifest.json", "records/ledger.jsonl", "records/metrics.jsonl", "training_state/optimizer.safetensors"]


def sent(server) -> bytes:
    """Everything that a server was sent, decoded."""
    files = [file.content for one in server.commits.values() for commit in one.values() for file in commit.values()]
    return b"\n".join([*server.bodies, *server.uploaded.values(), *files])


def pushed(folder: Path) -> list[int]:
    return [line["checkpoint_step"] for line in lines(folder, "event") if line["event"] == "push"]


class At(TrainerCallback):
    """Calls something after some steps."""

    def __init__(self, **calls):
        self.calls = calls

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.get(f"step_{state.global_step}", str)()


@pytest.fixture
def requests(monkeypatch):
    """The thread of each request, and how many threads were pushing then."""
    client = type(get_session())
    seen, send = [], client.send

    def noted(*arguments, **options):
        pushing = [thread for thread in threading.enumerate() if thread.name.startswith("push-")]
        seen.append((threading.current_thread().name, len(pushing)))
        return send(*arguments, **options)

    monkeypatch.setattr(client, "send", noted)
    return seen


def test_the_newest_save_is_pushed_next_by_one_other_thread_and_not_rotated_away(config, client, verified, requests):
    first_is_pushed, may_go_on, during = threading.Event(), threading.Event(), []

    def hold(method, path, range_):
        if "/commit/" in path and not may_go_on.is_set():
            first_is_pushed.set()
            may_go_on.wait(60)

    def look():
        during.append({path.name for path in run_folder.iterdir()})
        may_go_on.set()
        during.append(len(requests))

    settings = config(**PUSHES, hub_strategy="all_checkpoints", save_total_limit=1)
    run_folder = Path(settings.output_dir)
    # A save is offered when the next one begins, after the end of its step.
    calls = At(step_1=requests.clear, step_3=lambda: first_is_pushed.wait(60), step_6=look)
    with HubServer({}, token=TOKEN, before_answer=hold) as server:
        client(server)
        run = trained(settings, calls)
        files = server.files(REPOSITORY)
        commits = list(server.commits[REPOSITORY].values())
    assert "checkpoint-1" in during[0] and "checkpoint-2" not in during[0]
    assert [path.name for path in run.folder.checkpoints()] == ["checkpoint-6"] and not run.folder.held
    steps = pushed(run_folder)
    assert steps[0] == 1 and 2 not in steps
    in_training = requests[: during[1]]
    assert in_training and {count for _, count in in_training} == {1}
    assert all(name.startswith("push-") for name, _ in in_training)
    assert commits[1]["model.safetensors"] == commits[1]["checkpoint-1/model.safetensors"]  # whole, of one save
    for step in (1, 6):
        assert {f"checkpoint-{step}/{name}" for name in POINT} <= files.keys()
    assert json.loads(files["resume.json"]) == {"folder": "checkpoint-6", "step": 6, "run_id": run.progress.run_id}
    assert files["model.safetensors"] == (run_folder / "checkpoint-6" / "model.safetensors").read_bytes()


def test_a_push_that_fails_is_a_line_and_a_record_and_the_next_save_is_pushed(config, client, verified, caplog):
    refused = iter(["403"])
    faults = lambda method, path, range_: next(refused, None) if "/commit/" in path else None  # noqa: E731
    with HubServer({}, token=TOKEN, faults=faults) as server:
        server.push(REPOSITORY, {"last-checkpoint/of-an-earlier-run.bin": b"", "own.txt": b"", "resume.json": b"{}"})
        client(server)
        pushers = []
        wait = At(step_5=lambda: pushers[0].wait(60))
        settings = config(**PUSHES | {"save_steps": 2}, hub_strategy="checkpoint")
        made = SavePusher.__init__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SavePusher, "__init__", lambda self, *a: (made(self, *a), pushers.append(self))[0])
            run = trained(settings, wait)
        files = server.files(REPOSITORY)
    [failed] = [line for line in lines(run.folder.path, "event") if line["event"] == "push_failed"]
    assert failed["checkpoint"] == "checkpoint-2" and "403" in failed["reason"] and TOKEN not in str(failed)
    assert "checkpoint-2 was not pushed to me/tiny (403" in caplog.text and "Training continues" in caplog.text
    assert lines(run.folder.path, "event")[-1]["fault"] is None
    assert "own.txt" in files and "last-checkpoint/of-an-earlier-run.bin" not in files  # replaced whole
    assert json.loads(files["resume.json"])["step"] == 6
    assert {f"last-checkpoint/{name}" for name in POINT} <= files.keys()


def test_every_save_pushes_the_model_only_and_a_signal_waits_for_it_no_longer_than_it_may(
    config, client, monkeypatch, caplog
):
    monkeypatch.setattr("hfgpt.training.saving.STOP_SECONDS", 0.3)
    hold = threading.Event()
    with HubServer(
        {}, token=TOKEN, before_answer=lambda method, path, _: "/commit/" in path and hold.wait(60)
    ) as server:
        client(server)
        settings = config(**PUSHES, hub_strategy="every_save")

        def stop():
            raise OSError("the machine goes")

        with pytest.raises(OSError, match="the machine goes"):
            trained(settings, At(step_3=stop))
        hold.set()
    run = Path(settings.output_dir)
    assert "a second signal ends at once" in caplog.text
    reasons = [line["reason"] for line in lines(run, "event") if line["event"] == "push_failed"]
    assert reasons == ["the Hub did not answer in time", "the run ended before"]
    assert lines(run, "event")[-1]["event"] == "end"
    assert find_damage(run / "checkpoint-3") is None
    assert b"training_state" not in sent(server)


@pytest.fixture
def on_hub(config, client, verified, tmp_path, document_folder):
    """A finished run on a mixture, whose saves are on the Hub, and settings of the same run in another folder."""
    texts = [{"dataset": str(document_folder / f"{part}.jsonl"), "weight": 0.5} for part in range(2)]
    settings = {"dataset": texts, "tokenizer": "bpe-300", "save_steps": 3, "eval_steps": 3, "eval_tokens": 100}
    with HubServer({}, token=TOKEN) as server:
        client(server)
        run = trained(config(**PUSHES | settings, hub_strategy="all_checkpoints"))

        def elsewhere(wanted, name="elsewhere", **changes):
            return config(name, **{"hub_model_id": "me/tiny", **settings, **changes}, resume_from_checkpoint=wanted)

        yield server, run, elsewhere


def test_a_run_continues_from_what_is_named_on_the_hub(on_hub, tmp_path, caplog, capsys, monkeypatch):
    server, run, elsewhere = on_hub
    for wanted, step in (("hub", 6), ("me/tiny", 6), ("me/tiny/checkpoint-3", 3), ("me/tiny@main", 6)):
        found = prepared(elsewhere(wanted))
        assert found.progress.step == step and found.resumed.origin.startswith("me/tiny@")
        assert found.progress.run_id == run.progress.run_id and not found.resumed.changed_settings
        found.folder.close()
        assert not (tmp_path / "elsewhere").exists()  # nothing is left of what was not used
    again = trained(elsewhere("me/tiny/checkpoint-3"))
    assert again.folder.ledger.read_bytes() == run.folder.ledger.read_bytes()
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        assert (again.folder.checkpoint(6) / name).read_bytes() == (run.folder.checkpoint(6) / name).read_bytes()
    assert [line["loss"] for line in lines(again.folder.path)] == [line["loss"] for line in lines(run.folder.path)]
    assert find_damage(again.folder.checkpoint(3)) is None and not [*again.folder.path.glob(".checkpoint-*")]
    assert not audit(again.folder.path)["problems"]
    for private in (TOKEN, tmp_path.name, "document 1 says"):
        assert private.encode() not in sent(server)
    state = [content for name, content in server.files(REPOSITORY).items() if "/" in name and "README" not in name]
    assert b".jsonl" not in b"".join(state).replace(b"records/ledger.jsonl", b"").replace(b"records/metrics.jsonl", b"")
    [resumed] = [line for line in lines(again.folder.path, "event") if line["event"] == "resume"]
    assert resumed["origin"] == f"me/tiny@{server.commit(REPOSITORY)}"
    assert "resume   from me/tiny@" in capsys.readouterr().out
    # The newest checkpoint wins, here or there.
    shutil.rmtree(run.folder.checkpoint(6))
    older_here = prepared(elsewhere("hub", "run"))
    assert older_here.progress.step == 6 and older_here.resumed.origin
    older_here.folder.close()
    trained(elsewhere("latest", "run", max_steps=8))
    caplog.clear()
    newer_here = prepared(elsewhere("hub", "run", max_steps=8))
    assert newer_here.progress.step == 8 and "is newer than step 6 of me/tiny@" in caplog.text
    # A folder here is never a name on the Hub.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="resume_from_checkpoint=run/other: no such folder; checkpoints in"):
        prepared(elsewhere("run/other"))


def test_what_cannot_be_resumed_from_the_hub_is_one_line(on_hub, config, client, caplog, monkeypatch):
    server, run, elsewhere = on_hub
    trained(config("other", save_steps=3))
    for settings, line in (
        (elsewhere("hub", "other"), "other holds another run than me/tiny@.* choose another output_dir or"),
        (elsewhere("me/tiny@main", "run"), "run already holds a run; choose another output_dir"),
        (elsewhere("me/tiny@nothing"), "resume_from_checkpoint=me/tiny@nothing: 404"),
        (elsewhere("me/none"), "resume_from_checkpoint=me/none: no such folder, and no resume point of that name"),
        (elsewhere("me/tiny/checkpoint-9"), "no such folder, and no resume point of that name on the Hub"),
        (elsewhere("hub", seed=7), "seed"),
    ):
        with pytest.raises(UserError, match=line) as caught:
            prepared(settings)
        assert "\n" not in str(caught.value) and (not Path(settings.output_dir).exists() or "elsewhere" not in line)
    assert not Path(elsewhere("hub").output_dir).exists()
    fresh = prepared(elsewhere("hub", hub_model_id="me/none"))
    assert fresh.resumed is None and "nothing on the Hub to resume from yet; the run starts at step 1" in caplog.text
    server.push(REPOSITORY, {"checkpoint-6/model.safetensors": b"damaged"})
    with pytest.raises(UserError, match=r"checkpoint-6: model.safetensors has 7 bytes.* name an earlier commit"):
        prepared(elsewhere("hub"))
    shutil.rmtree(run.folder.checkpoint(6))
    assert prepared(elsewhere("hub", "run")).progress.step == 3  # what is here is whole
    assert "the run continues from" in caplog.text
    server.token = "hf_OTHER"
    with pytest.raises(UserError, match=r"resume_from_checkpoint=hub: 401 .*hf auth login"):
        prepared(elsewhere("hub", "run"))
    server.token, server.faults = TOKEN, lambda *_: "500"
    with pytest.raises(UserError, match="resume_from_checkpoint=hub: 500"):
        prepared(elsewhere("hub"))
    assert prepared(elsewhere("hub", "run")).progress.step == 3
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="resume_from_checkpoint=hub: HF_HUB_OFFLINE is set"):
        prepared(elsewhere("hub"))


def test_the_resume_point_of_another_run_is_not_replaced(on_hub):
    server, run, elsewhere = on_hub
    commits = len(server.commits["models/me/tiny"])
    pushes = {**PUSHES, "hub_strategy": "checkpoint", "save_steps": 3}
    with pytest.raises(
        UserError, match="hub_model_id=me/tiny: it holds another run, at step 6, whose resume point would"
    ):
        prepared(elsewhere("never", **pushes))
    assert len(server.commits["models/me/tiny"]) == commits
    assert prepared(elsewhere("hub", "on", **pushes)).progress.run_id == run.progress.run_id
    prepared(elsewhere("never", "model", **{**pushes, "hub_strategy": "every_save"}))  # replaces no resume point


def test_another_owner_and_a_strategy_without_a_push_are_refused_before_training(config, client):
    with HubServer({}, token=TOKEN) as server:
        client(server)
        with pytest.raises(UserError, match="hub_model_id=other/tiny: me cannot push to other; give it as me/name"):
            prepared(config(push_to_hub=True, hub_model_id="other/tiny"))
    with pytest.raises(UserError, match="hub_strategy=checkpoint: nothing is pushed; add --push_to_hub true"):
        config(hub_strategy="checkpoint")


@pytest.mark.slow
@pytest.mark.unix_only
def test_a_lost_machine_costs_nothing(tmp_path, document_folder):
    """Kill -9, the folder deleted, and the same command elsewhere, with a Hub that fails now and then."""
    faults = Faults(0.1, ["429", "500", "reset"], on=r"/api/|/resolve/|/storage/")
    home, killed = tmp_path / "home_of_alice", threading.Event()
    shutil.copytree(document_folder, home / "documents")
    flags = ["--dataset", str(home / "documents" / "*.jsonl"), "--eval_steps", "5", "--eval_tokens", "100"]
    flags += ["--max_steps", "12", "--save_steps", "2", "--sample_steps", "3", "--sample_prompt", "my secret prompt"]
    flags += ["--warmup_steps", "2"]
    hub = ["--push_to_hub", "true", "--hub_model_id", "tiny", "--hub_strategy", "checkpoint"]
    hub += ["--resume_from_checkpoint", "hub"]

    def kill(method, path, range_):  # during the second push, before its commit: the first is what is left
        if "/preupload/" in path and "resume.json" in server.files(REPOSITORY) and not killed.is_set():
            lost.kill_all()
            killed.set()

    with HubServer({}, token=TOKEN, faults=faults, retry_after=0, before_answer=kill) as server:
        env = server.environment(home / "hf")
        lost = Run(FORKED, home / "lost", *flags, *hub, env=env)
        assert killed.wait(120), lost.end()
        shutil.rmtree(home / "lost")
        again = Run(FORKED, home / "again", *flags, *hub, env=env)
        said = again.end()
        assert again.process.returncode == 0, said
    whole = Run(FORKED, home / "whole", *flags)
    assert whole.end() is not None and whole.process.returncode == 0
    [resumed] = [record for record in again.records("event") if record["event"] == "resume"]
    assert 0 < resumed["step"] < 12 and server.injected
    assert (again.folder / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes()
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        assert (again.folder / "checkpoint-12" / name).read_bytes() == (
            whole.folder / "checkpoint-12" / name
        ).read_bytes()
    for key in ("loss", "eval_loss"):
        assert [one[key] for one in again.records(key)] == [one[key] for one in whole.records(key)]
    everything = sent(server).decode(errors="ignore") + said
    assert "blocks-" in everything  # the ledger is there
    for private in (TOKEN, "alice", str(tmp_path), "my secret prompt", "says 0 document", "document 1 says"):
        assert private not in everything.replace(str(home / "again"), ""), private
