"""What is pushed to the Hub, what is retried, and that no failure harms the run."""

# ruff: noqa: F811  fixtures are imported by name

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import FORK, completed
from hub_server import Faults, HubServer
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.repocard_data import model_index_to_eval_results
from pushing import TOKEN, client, folder, original, verified  # noqa: F401
from running import ALONE, ROOT, TINY, TWO, trained
from tampering import edit, louder, rewrite, sealed
from transformers import AutoTokenizer

from hfgpt.checkpointing import checkpoint
from hfgpt.checkpointing.read_training_state import read_state
from hfgpt.data.remote import model_files as files_of
from hfgpt.errors import RunError, UserError
from hfgpt.hub import client as requests_of
from hfgpt.hub import push as hub
from hfgpt.hub.import_export import export
from hfgpt.hub.model_card import model_card
from hfgpt.retry import requested_pause

MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
PUSHED = MODEL | {"README.md", "loss.png", "metrics.jsonl"}
LOADED = """
import json, sys
sys.modules["hfgpt"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = AutoTokenizer.from_pretrained(sys.argv[1])("document 3 says", return_tensors="pt")
print(json.dumps(AutoModelForCausalLM.from_pretrained(sys.argv[1])(**ids).logits.tolist()))
"""


def state_of(folder: Path) -> dict[str, str]:
    """What is in a folder, by name; the link as where it points."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def command(server, home, *arguments, **environment) -> subprocess.CompletedProcess:
    python = sys.executable if arguments[0] == "-c" else FORK  # code of its own comes without this package
    env = {**os.environ, "PYTHONPATH": str(ROOT), **server.environment(home / "hf"), **environment}
    return completed([python, *arguments], env, timeout=120, cwd=home)


@pytest.mark.slow
def test_pushed_model_loads_anywhere_with_the_same_logits(folder, tmp_path):
    before = state_of(folder.parent)
    with HubServer({}, token=TOKEN) as server:
        push = ["-m", "hfgpt.cli", "push", str(folder.parent / "checkpoint-latest"), "me/tiny"]
        options = ["--private", "--tag", "v1", "--license", "mit", "--language", "en,de"]
        first = command(server, tmp_path, *push, *options)
        warnings = [line for line in first.stderr.splitlines() if " so far" not in line]  # progress of a slow machine
        assert (first.returncode, warnings) == (0, []) and first.stdout.startswith(f"pushed to {server.url}/me/tiny")
        assert server.count("POST /api/repos/create") == server.count("POST .*/commit/") == 1
        assert "models/me/tiny" in server.private
        assert server.refs["models/me/tiny"]["tags"] == {"v1": server.commit("models/me/tiny")}
        again = command(server, tmp_path, *push, *options)
        assert again.returncode == 0 and server.count("POST .*/commit/") == 1 and server.count("PUT /storage/") == 2
        loaded = command(server, tmp_path, "-c", LOADED, "me/tiny")
        files = server.files("models/me/tiny")
    assert loaded.returncode == 0, loaded.stderr
    here = command(server, tmp_path, "-c", LOADED, str(folder), HF_HUB_OFFLINE="1")
    assert torch.equal(torch.tensor(json.loads(loaded.stdout)), torch.tensor(json.loads(here.stdout)))
    assert files.keys() == PUSHED | {".gitattributes"}
    expected = b"".join([*server.bodies, *server.uploaded.values(), *files.values()]).decode(errors="ignore")
    expected += first.stdout + first.stderr + again.stdout + again.stderr
    assert TOKEN not in expected
    assert "alice" not in expected and "not for others" not in expected
    assert state_of(folder.parent) == before and TOKEN not in "".join(
        path.read_text(errors="ignore") for path in folder.parent.rglob("*") if path.is_file()
    )
    card = ModelCard(files["README.md"].decode())
    assert (card.data.license, card.data.language) == ("mit", ["en", "de"])


def test_the_card_says_what_was_measured_and_is_valid(folder, client, verified):
    evaluation = read_state(folder, "trainer_state")["evaluation"]
    with HubServer({}, token=TOKEN) as server:
        client(server)
        hub.push(folder, "me/tiny")
        files = server.files("models/me/tiny")
        card = ModelCard(files["README.md"].decode())
        card.validate()
        card.data.license = "homemade"
        with pytest.raises(ValueError, match="license"):
            card.validate()
    metrics = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert metrics == {
        "loss": evaluation["eval_loss"],
        "perplexity": evaluation["eval_perplexity"],
        "bits_per_byte": evaluation["eval_bits_per_byte"],
    }
    name, results = model_index_to_eval_results(card.data.to_dict()["model-index"])
    assert name == "me/tiny" and {result.dataset_name for result in results} == {"text.jsonl"}
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert "language" not in card.data.to_dict() and "datasets" not in card.data.to_dict()
    for expected in ("text.jsonl", "TFLOP/s per device (measured", "tokens per second", 'from_pretrained("me/tiny")'):
        assert expected in card.text
    assert "![Loss over tokens](loss.png)" in card.text and files["loss.png"].startswith(b"\x89PNG")
    records = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    assert [record["step"] for record in records] == [1, 2, 2] and not any("event" in record for record in records)
    assert folder.joinpath("README.md").read_text().count("eval") == 0  # nothing but prose and metadata


def facts(folder, **changes):
    trainer, data = read_state(folder, "trainer_state"), read_state(folder, "data_state")
    trainer["config"] |= changes
    return trainer, data["fingerprint"]


def test_the_card_of_a_hub_dataset_names_its_commit(folder):
    trainer, fingerprint = facts(
        folder, dataset="user/corpus", dataset_name="sample", hub_license="apache-2.0", hub_language="en, de"
    )
    card = ModelCard(model_card({}, {**fingerprint, "dataset.commit": "abc123"}, trainer))
    assert card.data.datasets == ["user/corpus"] and card.data.language == ["en", "de"]
    assert card.data.license == "apache-2.0"
    (where,) = {(r.dataset_type, r.dataset_config, r.dataset_revision) for r in card.data.eval_results}
    assert where == ("user/corpus", "sample", "abc123")
    assert "user/corpus, configuration sample, split train, commit abc123" in card.text


def test_the_card_has_no_metric_of_another_step_and_no_path(folder):
    paths = {"tokenizer": "/home/alice/tokenizer", "dataset": "/home/alice/*.txt", "init_from": "/home/alice@b/model"}
    trainer, fingerprint = facts(folder, **paths)
    fingerprint = {key: value for key, value in fingerprint.items() if not key.startswith("dataset.file ")}
    card = ModelCard(model_card({}, fingerprint, {**trainer, "evaluation_step": 1}))
    assert card.data.eval_results is None and "during the run. The weights of step 1, on " in card.text
    assert "alice" not in card.content and card.data.base_model is None
    assert "| initial weights | those of model |" in card.text
    none = {**trainer, "evaluation": None}
    assert "was not evaluated." in model_card({}, fingerprint, {**none, "evaluation_step": 0})
    assert "at this step was not finite" in model_card({}, fingerprint, none)


@pytest.mark.parametrize(
    ("kinds", "on"),
    [
        (["429"], "POST /api/repos/create"),
        (["reset"], "POST /api/repos/create"),
        (["503"], "POST /api/validate-yaml"),
        (["reset"], "POST .*/preupload/"),
        (["cut"], "PUT /storage/"),
        (["500"], "PUT /storage/"),
        (["cut"], "POST .*/commit/"),
        (["reset"], "POST .*/commit/"),  # it is made, and the answer is lost
        (["429", "500"], "POST .*/commit/"),
        (["429"], "POST .*/tag/"),
    ],
)
def test_a_passing_fault_ends_in_one_complete_commit(folder, client, verified, kinds, on):
    plan = iter(kinds)
    faults = lambda method, path, range_: next(plan, None) if Faults(1, "x", on=on)(method, path, range_) else None  # noqa: E731
    before = state_of(folder.parent)
    with HubServer({}, token=TOKEN, faults=faults) as server:
        pauses = client(server)
        hub.push(folder, "me/tiny", tag="v1")
        assert server.files("models/me/tiny").keys() == PUSHED | {".gitattributes"}
        assert len(server.commits["models/me/tiny"]) == 2  # the first is the repository's own
        assert sum(server.injected.values()) == len(kinds)
    assert all(pause <= 2 for pause in pauses) and state_of(folder.parent) == before


def test_a_server_that_does_not_answer_is_tried_again(folder, client, verified, monkeypatch):
    monkeypatch.setattr(requests_of, "TRY_SECONDS", 4.0)
    with HubServer({}, token=TOKEN, faults=Faults(1, ["stall"], on="POST .*/(create|commit)")) as server:
        client(server)
        hub.push(folder, "me/tiny")
        assert server.files("models/me/tiny").keys() >= PUSHED and len(server.commits["models/me/tiny"]) == 2


@pytest.mark.parametrize(
    ("kind", "tries"), [("429", requests_of.TRIES), ("500", requests_of.TRIES), ("403", 1), ("401", 1), ("404", 1)]
)
def test_a_lasting_fault_is_one_line_with_the_fix(folder, client, verified, kind, tries):
    before = state_of(folder.parent)
    faults = Faults(1, [kind], on="POST .*/commit/", repeat=math.inf)
    with HubServer({}, token=TOKEN, faults=faults, retry_after=3600) as server:
        pauses = client(server)
        with pytest.raises(RunError) as caught:
            hub.push(folder, "tiny", private=True, revision="dev", license="mit")
    message = str(caught.value)
    assert kind in message and "\n" not in message and caught.value.exit_code == 1
    assert message.endswith(f"try again: hfgpt push {folder} tiny --private --revision dev --license mit")
    assert ("HF_TOKEN" in message) == (tries == 1) and TOKEN not in message
    assert server.count("POST .*/commit/") == tries and len(pauses) == tries - 1
    assert max(pauses, default=0) <= requests_of.LONGEST_PAUSE_SECONDS and state_of(folder.parent) == before
    assert checkpoint.find_damage(folder) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (rewrite(louder), "was recorded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: edit(folder / "config.json", dtype="bfloat16"), "bfloat16"),
    ],
)
def test_what_does_not_verify_is_not_sent(folder, client, damage, named):
    damage(folder)
    if named != "tokenizer.json is missing":
        sealed(folder)
    with HubServer({}, token=TOKEN) as server:
        client(server)
        with pytest.raises(RunError, match=r"was not pushed: .*" + named):
            hub.push(folder, "me/tiny")
        assert server.requests == []


def test_branch_tag_and_private_are_what_they_say(folder, client, verified):
    with HubServer({}, token=TOKEN) as server:
        client(server)
        hub.push(folder, "tiny", revision="dev", tag="v1")  # a name alone is the user's
        name = "models/me/tiny"
        assert server.files(name, "dev").keys() >= PUSHED and server.files(name).keys() == {".gitattributes"}
        with pytest.raises(RunError, match="is public, so nothing was pushed"):
            hub.push(folder, "me/tiny", private=True)
        assert server.count("POST .*/commit/") == 1
        with pytest.raises(RunError, match="but tag v1 already names commit"):
            hub.push(folder, "me/tiny", tag="v1")
        with pytest.raises(RunError, match=r"403 .*write access to other/tiny"):
            hub.push(folder, "other/tiny")
        with pytest.raises(UserError, match=r"license=homemade.* must be one of"):
            hub.push(folder, "me/tiny", license="homemade")
        text = server.files(name, "dev")["README.md"].decode()
    assert 'from_pretrained("me/tiny", revision="dev")' in text and "# me/tiny\n" in text


def test_a_folder_without_training_state_brings_its_own_card(folder, client, verified):
    shutil.rmtree(folder / "training_state")
    (folder / "README.md").write_text("---\ntags:\n- mine\n---\n# Mine\n")
    with HubServer({}, token=TOKEN) as server:
        client(server)
        hub.push(folder, "me/tiny", license="mit")
        files = server.files("models/me/tiny")
    assert files.keys() == MODEL | {"README.md", ".gitattributes"}
    card = ModelCard(files["README.md"].decode())
    assert (card.data.tags, card.data.license) == (["mine"], "mit") and "# Mine" in card.text
    (folder / "README.md").unlink()
    assert hub._files(folder, "me/tiny", None, None, None).keys() == MODEL
    assert b"license: mit" in hub._files(folder, "me/tiny", None, "mit", None)["README.md"]


def test_the_card_of_an_export_says_so(folder, client, verified, tmp_path, monkeypatch):
    export(folder, tmp_path / "plain", "bfloat16", untie_head=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}  # as after training on chats
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "manifest.json").unlink()
    with HubServer({}, token=TOKEN) as server:
        client(server)
        hub.push(tmp_path / "plain", "me/tiny")
        card = ModelCard(server.files("models/me/tiny")["README.md"].decode())
        pushed = server.files("models/me/tiny").keys()
    templates = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    assert pushed == MODEL | templates | {"README.md", ".gitattributes"}
    wanted: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, allow_patterns, **__: wanted.extend(allow_patterns) or tmp_path
    )
    monkeypatch.setattr("hfgpt.data.remote.check_hub", lambda *_: None)
    files_of("me/tiny")  # as `--init_from me/tiny` downloads it
    assert all(any(fnmatch(name, pattern) for pattern in wanted) for name in MODEL | templates)
    rows = 16 * 300  # the head's own matrix
    assert f"{8624 + rows:,} parameters in bfloat16" in card.text and card.data.eval_results is None
    assert "# me/tiny\n" in card.text and 'from_pretrained("me/tiny")' in card.text and "this folder" not in card.text


@pytest.mark.unix_only
def test_a_file_that_is_not_of_the_checkpoint_stays_even_under_a_name_of_the_model(folder, tmp_path):
    (tmp_path / "secrets").write_text("not for others")
    (folder / "vocab.json").symlink_to(tmp_path / "secrets")
    (folder / "merges.txt").write_text("not for others")
    assert hub._files(folder, "me/tiny", None, None, None).keys() == PUSHED


@pytest.mark.parametrize("reason", [None, "the text has changed since the run: held_out differs"])
def test_a_loss_that_could_not_be_checked_is_named(folder, client, monkeypatch, caplog, reason):
    monkeypatch.setattr(hub, "verify", lambda folder: {"problems": [], "loss_not_checked": reason})
    with HubServer({}, token=TOKEN) as server:
        client(server)
        hub.push(folder, "me/tiny")
    assert ("its loss was not checked" in caplog.text) == bool(reason) and (reason or "") in caplog.text


def test_other_weights_in_the_repository_are_reported(folder, client, verified, caplog):
    with HubServer({}, token=TOKEN) as server:
        client(server)
        api = HfApi(endpoint=server.url, token=TOKEN)
        api.create_repo("me/tiny")
        api.upload_file(path_or_fileobj=b"old", path_in_repo="model-00001-of-00002.safetensors", repo_id="me/tiny")
        hub.push(folder, "me/tiny")
    assert "me/tiny also contains ['model-00001-of-00002.safetensors']" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"), [("a/b/c", "give it as user/name"), ("me/ti ny", "give it as user/name")]
)
def test_wrong_names_are_refused_before_anything(folder, client, name, expected):
    with HubServer({}, token=TOKEN) as server:
        client(server)
        with pytest.raises(UserError, match=expected):
            hub.push(folder, name)
        assert server.requests == []


def test_no_token_and_no_network_are_refused_before_anything(folder, client, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.push(folder, "me/tiny")
    with HubServer({}, token=TOKEN) as server:
        client(server)
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        with pytest.raises(UserError, match="hf auth login"):
            hub.push(folder, "me/tiny")
        with pytest.raises(UserError, match="missing: no such folder"):
            hub.push(tmp_path / "missing", "me/tiny")


def test_a_run_pushes_its_last_checkpoint(config, client, verified):
    with HubServer({}, token=TOKEN) as server:
        client(server)
        run = trained(config(push_to_hub=True, hub_private_repo=True, hub_license="mit", eval_steps=3))
        files = server.files("models/me/run")  # by the folder's name
        assert "models/me/run" in server.private and server.count("POST .*/commit/") == 1
        before = state_of(run.folder.path)
        trained(config(push_to_hub=True, resume_from_checkpoint="latest", hub_license="mit", eval_steps=3))
        assert server.count("POST .*/commit/") == 1  # the same command again pushes what is not there
    assert files["model.safetensors"] == (run.folder.path / "checkpoint-6" / "model.safetensors").read_bytes()
    assert ModelCard(files["README.md"].decode()).data.license == "mit"
    assert TOKEN not in "".join(map(str, before)) and TOKEN not in run.folder.run_json.read_text()


def test_a_push_that_fails_leaves_a_finished_run(config, client, verified):
    faults = Faults(1, ["500"], on="POST .*/commit/", repeat=math.inf)
    with HubServer({}, token=TOKEN, faults=faults) as server:
        client(server)
        settings = config(push_to_hub=True, hub_model_id="me/tiny")
        with pytest.raises(RunError, match=r"try again: hfgpt push .*checkpoint-6 me/tiny$"):
            trained(settings)
    run = Path(settings.output_dir)
    assert checkpoint.find_damage(run / "checkpoint-6") is None
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["fault"]) == ("end", None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hub_model_id": "a/b/c"}, "give it as user/name"),
        ({"hub_license": "homemade"}, "license"),
        ({"hub_license": "mit", "hub_language": "en, english"}, "language"),
        ({"role": "read"}, "is read-only"),
        ({"token": "hf_OTHER"}, "hf auth login"),
        ({"offline": True}, "HF_HUB_OFFLINE"),
    ],
)
def test_what_would_prevent_a_push_is_refused_before_training(config, client, monkeypatch, changes, expected):
    settings = config(push_to_hub=True, **{key: value for key, value in changes.items() if key.startswith("hub_")})
    with HubServer({}, token=TOKEN) as server:
        client(server)
        server.role = changes.get("role", "write")
        monkeypatch.setenv("HF_TOKEN", changes.get("token", TOKEN))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "offline" in changes)
        with pytest.raises(UserError, match=expected):
            trained(settings)
    assert not Path(settings.output_dir).exists()


def test_a_hub_that_is_down_does_not_stop_a_run_from_starting(config, client, caplog):
    with HubServer({}, token=TOKEN, faults=lambda *_: "500") as server:
        client(server)
        hub.check_push(config(push_to_hub=True))
    assert "cannot be reached now" in caplog.text


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"RateLimit": '"api"; r=0; t=55'}, 55),
        ({"RateLimit": '"api";r=10;t=55'}, 0),
        ({}, 0),
    ],
)
def test_a_server_is_left_alone_as_long_as_it_asks(headers, seconds):
    busy = type("Busy", (Exception,), {"response": SimpleNamespace(headers=headers)})()
    assert requested_pause(busy) == seconds


def test_signed_addresses_and_tokens_are_not_shown():
    error = RuntimeError(f"failed for https://s3.example/a?X-Amz-Signature=1234&b=2 with Bearer {TOKEN}")
    cause = requests_of.cause_of(error, "me/x", TOKEN)
    assert cause == "RuntimeError: failed for https://s3.example/a with Bearer (token)"
    refused = SimpleNamespace(status_code=403, reason_phrase="Forbidden", url="https://hub/x?token=1")
    error = type("Refused", (Exception,), {"response": refused})()
    assert requests_of.cause_of(error, "me/x", TOKEN).startswith("403 Forbidden from https://hub/x; log in")


@pytest.mark.slow
def test_a_recipe_on_two_processes_makes_one_repository_and_one_commit(document_folder, tmp_path):
    flags = [*TINY, "--dataset", str(document_folder), "--max_steps", "2", "--push_to_hub", "--hub_model_id", "tiny"]
    recipe = [str(ROOT / "recipes" / "quickstart.py"), "--output_dir", str(tmp_path / "run"), *flags]
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with HubServer({}, token=TOKEN) as server:
        done = command(server, tmp_path, *TWO[1:], *recipe, **environment)
        assert done.returncode == 0, done.stderr
        assert server.count("POST /api/repos/create") == server.count("POST .*/commit/") == 1
        assert server.files("models/me/tiny").keys() == PUSHED | {".gitattributes"}
        assert TOKEN not in done.stdout + done.stderr
    with HubServer({}, token=TOKEN, faults=Faults(1, ["403"], on="POST .*/commit/", repeat=math.inf)) as server:
        again = command(server, tmp_path, *ALONE[1:], *recipe, "--per_device_train_batch_size", "8", **environment)
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].endswith(f"try again: hfgpt push {tmp_path}/run/checkpoint-2 tiny")
