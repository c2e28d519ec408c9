"""What is measured of a checkpoint later reaches its card, only its own, and disturbs nothing."""

# ruff: noqa: F811  fixtures are imported by name

from __future__ import annotations

import json
import math
import shutil

import pytest
from hub_server import HubServer
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from pushing import TOKEN, client, folder, original, verified  # noqa: F401
from running import records, trained
from tampering import louder, rewrite, sealed

from hfgpt.checkpointing import checkpoint
from hfgpt.checkpointing.read_training_state import read_state
from hfgpt.comparing import compare, read_runs
from hfgpt.errors import UserError
from hfgpt.evaluation.results import read_evaluations, record_evaluation
from hfgpt.hub import push as hub
from hfgpt.hub.verify import verify

HELLASWAG = {
    "dataset": "Rowan/hellaswag",
    "dataset_split": "validation",
    "dataset_revision": "a" * 40,
    "examples": 10042,
    "accuracy_norm": 0.2955,
    "accuracy_norm_stderr": 0.00455,
    "accuracy": 0.2857,
    "accuracy_stderr": 0.0045,
    "cropped": 0,
    "padded_rows": 0,
    "seconds": 60.0,
}
TEXT = {"dataset": "/home/alice/two_words.txt", "loss": 3.25, "perplexity": math.exp(3.25), "scored_tokens": 12345}


@pytest.mark.slow
def test_what_is_recorded_reaches_the_pushed_card(folder, client):
    latest = folder.parent / "checkpoint-latest"
    assert record_evaluation(latest, "hellaswag", {**HELLASWAG, "accuracy": 0.5}).name == "evaluations.jsonl"
    record_evaluation(folder, "text", {**TEXT, "bits_per_byte": None})
    record_evaluation(folder, "text", {**TEXT, "dataset": "/data/other.txt", "perplexity": math.inf})
    record_evaluation(folder, "hellaswag", HELLASWAG)  # again: the newest counts
    with HubServer({}, token=TOKEN) as server:
        client(server)
        hub.push(folder, "me/tiny")  # verified, as nothing in the folder was changed
        files = server.files("models/me/tiny")
        card = ModelCard(files["README.md"].decode())
        card.validate()
    assert "evaluations.jsonl" not in files and "alice" not in card.content
    evaluation = read_state(folder, "trainer_state")["evaluation"]
    _, results = model_index_to_eval_results(card.data.to_dict()["model-index"])
    found = {(one.dataset_name, one.metric_name): one.metric_value for one in results}
    local = f"HellaSwag (Rowan/hellaswag, split validation, commit {'a' * 40})"
    assert found == {
        ("text.jsonl", "loss of held-out text"): evaluation["eval_loss"],
        ("text.jsonl", "perplexity of held-out text"): evaluation["eval_perplexity"],
        ("text.jsonl", "bits per byte of held-out text"): evaluation["eval_bits_per_byte"],
        ("two_words.txt", "loss"): 3.25,
        ("two_words.txt", "perplexity"): math.exp(3.25),
        ("other.txt", "loss"): 3.25,
        (local, "accuracy by loss per token"): 0.2955,
        (local, "accuracy by loss"): 0.2857,
    }
    [norm] = [one for one in results if one.metric_type == "acc_norm"]
    assert (norm.dataset_type, norm.dataset_split) == ("Rowan/hellaswag", "validation")
    assert (norm.dataset_revision, norm.dataset_args) == ("a" * 40, {"examples": 10042})
    assert "| text | two_words.txt, 12,345 tokens: loss 3.2500 nats per token, perplexity 25.79 |" in card.text
    assert (
        "10,042 examples: accuracy by loss per token 29.55% (standard error 0.46%), accuracy by loss 28.57% ("
        in card.text
    )


def test_a_record_says_what_was_measured_when_of_which_weights(folder):
    path = record_evaluation(folder, "hellaswag", HELLASWAG)
    record_evaluation(folder, "text", {**TEXT, "perplexity": math.inf})
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first.items() >= {"checkpoint": "checkpoint-2", "step": 2, "task": "hellaswag", **HELLASWAG}.items()
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())["files"]
    assert first["weights"] == manifest["model.safetensors"]["xxh3_128"] and first["time"] > 1.7e9
    assert second["perplexity"] is None
    assert read_evaluations(folder) == [first, second]


def test_incomplete_and_unknown_lines_are_ignored(folder):
    path = record_evaluation(folder, "text", TEXT)
    [first] = read_evaluations(folder)
    with open(path, "a") as file:
        others = ({**first, "task": "arc"}, {**first, "weights": "0"}, {**first, "loss": None, "dataset": "b"}, [1], 2)
        file.writelines(json.dumps(line) + "\n" for line in others)
        file.write('{"step": 2, "task": "te')
    record_evaluation(folder, "text", {**TEXT, "dataset": "c"})
    assert [record["dataset"] for record in read_evaluations(folder)] == [TEXT["dataset"], "c"]
    assert path.read_text().endswith("\n")


def test_only_a_checkpoint_of_a_run_has_records(folder, tmp_path):
    alone = shutil.copytree(folder, tmp_path / "alone")
    plain = shutil.copytree(folder, folder.parent / "plain")
    shutil.rmtree(plain / "training_state")
    for other in (alone, plain, folder.parent, tmp_path / "nothing"):
        with pytest.raises(UserError, match="not a checkpoint inside a run folder"):
            record_evaluation(other, "text", TEXT)
        assert read_evaluations(other) == []
    rewrite(louder)(folder)
    with pytest.raises(UserError, match=r"model.safetensors does not match manifest.json"):
        record_evaluation(folder, "text", TEXT)
    assert not (folder.parent / "evaluations.jsonl").exists()


def test_a_file_that_cannot_be_written_is_named(folder):
    (folder.parent / "evaluations.jsonl").mkdir()
    with pytest.raises(UserError, match=r"evaluations.jsonl: cannot be written"):
        record_evaluation(folder, "text", TEXT)
    assert read_evaluations(folder) == []


def test_other_weights_under_the_same_name_are_ignored(folder):
    record_evaluation(folder, "text", TEXT)
    rewrite(louder)(folder)
    sealed(folder)
    assert read_evaluations(folder) == []
    record_evaluation(folder, "text", {**TEXT, "loss": 9.0})
    assert [record["loss"] for record in read_evaluations(folder)] == [9.0]


def test_the_card_of_a_run_without_evaluation_tells_what_was_recorded(config):
    run = trained(config(eval_steps=0, max_steps=2)).folder
    newest = run.checkpoint(2)
    record_evaluation(
        newest, "hellaswag", {**HELLASWAG, "dataset": "rows.jsonl", "dataset_revision": None, "examples": 1}
    )
    card = ModelCard(hub._files(newest, "me/tiny", None, None, None)["README.md"].decode())
    shown = {(one.dataset_type, one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    name = "HellaSwag (rows.jsonl)"
    assert shown == {("hellaswag", name, "acc_norm"): 0.2955, ("hellaswag", name, "acc"): 0.2857}
    assert "was not evaluated" not in card.text and "rows.jsonl, 1 examples" in card.text


@pytest.mark.slow
def test_verify_rotation_resume_and_compare_go_on_as_before(config):
    settings = {"eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    run = trained(config(max_steps=4, **settings)).folder
    for step in (2, 4):
        record_evaluation(run.checkpoint(step), "text", {**TEXT, "loss": float(step)})
    before = run.evaluations.read_bytes()
    assert verify(run.checkpoint(4))["problems"] == [] and checkpoint.find_damage(run.checkpoint(4)) is None
    longer = trained(config(max_steps=8, resume_from_checkpoint="latest", **settings))
    assert [record["step"] for record in records(longer)] == list(range(1, 9))
    assert len(run.checkpoints()) == 2 and run.evaluations.read_bytes() == before
    found = compare(read_runs([run.path]))
    shutil.copy(run.evaluations, run.path / "aside")
    run.evaluations.unlink()
    assert compare(read_runs([run.path])) == found
