"""What `hfgpt verify` promises of a folder, and what it names."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from running import trained_on_documents
from tampering import edit, louder, rewrite, sealed
from typer.testing import CliRunner

from hfgpt.checkpointing.audit import audit
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.cli import app
from hfgpt.errors import RunError, UserError
from hfgpt.hub import verify as verify_module
from hfgpt.hub.verify import verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with an evaluation, on documents."""
    flags = {"eval_steps": 4, "max_steps": 4, "learning_rate": 1e-2, "streaming": True}
    return trained_on_documents(tmp_path_factory.mktemp("verify"), **flags) / "checkpoint-4"


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.clean_process
def test_a_checkpoint_is_plain_gpt2_and_gives_its_loss_again(folder, caplog):
    facts = verify(folder)
    assert not caplog.records  # the libraries have nothing to warn of
    assert facts["problems"] == [] and abs(facts["loss"] - facts["recorded_loss"]) < 1e-5
    assert facts["class"] == "GPT2LMHeadModel" and facts["dtype"] == "float32"
    printed = CliRunner().invoke(app, ["verify", str(folder), "--json"])
    assert printed.exit_code == 0 and json.loads(printed.stdout)["loss"] == facts["loss"]


@pytest.mark.slow
def test_warnings_of_the_libraries_are_shown_and_no_problem(folder, tmp_path, monkeypatch, caplog):
    script, line = verify_module.SCRIPT.read_text(), 'warnings.simplefilter("always")\n'
    assert line in script
    (tmp_path / "script.py").write_text(script.replace(line, f'{line}        warnings.warn("this will change")\n'))
    monkeypatch.setattr(verify_module, "SCRIPT", tmp_path / "script.py")
    facts = verify(folder)
    assert facts["problems"] == [] and "warnings" not in facts and "this will change" in caplog.text


@pytest.mark.slow
def test_a_folder_without_training_state_is_checked_but_for_its_loss(copy):
    shutil.rmtree(copy / "training_state")
    (copy / "manifest.json").unlink()
    facts = verify(copy)
    assert facts["problems"] == [] and "no training_state" in facts["loss_not_checked"]


def without(tensors):
    return {name: value for name, value in tensors.items() if name != "h.0.ln_1.weight"}


def broken(tensors):
    return {**tensors, "ln_f.bias": torch.full_like(tensors["ln_f.bias"], float("nan"))}


def narrower(tensors):
    return {**tensors, "ln_f.bias": tensors["ln_f.bias"][:-1]}


def surprising(folder):
    """Whatever still loads."""
    rewrite(broken)(folder)
    edit(folder / "config.json", dtype="bfloat16", pad_token_id=3)
    edit(folder / "tokenizer_config.json", model_max_length=64, auto_map={"AutoTokenizer": ["tokens.Own", None]})
    edit(folder / "generation_config.json", eos_token_id=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (rewrite(without), ["missing keys: ['transformer.h.0.ln_1.weight']"]),
        (rewrite(narrower), ["mismatched keys", "transformer.ln_f.bias"]),
        (rewrite(louder), ["was recorded"]),
        (
            surprising,
            [
                *("finite is False", "declared_dtype bfloat16", "model_max_length 64", "pad_token_id is 3"),
                *("eos_token_id is 5 in generation_config.json", "tokenizer_config.json requires code from elsewhere"),
            ],
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json is missing"]),
        (lambda folder: edit(folder / "config.json", tie_word_embeddings=False), ["missing keys: ['lm_head.weight']"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), ["stock transformers does not load it"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors is missing"]),
        (lambda folder: (folder / "generation_config.json").unlink(), ["generation_config.json is missing"]),
    ],
)
def test_what_is_wrong_is_named(copy, damage, named):
    damage(copy)
    if "tokenizer" not in named[0]:
        sealed(copy)
    problems = "; ".join(verify(copy)["problems"])
    assert [name for name in named if name not in problems] == []


def test_a_folder_without_a_tokenizer_is_named_in_short(copy):
    (copy / "tokenizer.json").unlink()
    assert all(len(line) < 100 and "\n" not in line for line in map(str, verify(copy)["problems"]))


def test_the_command_fails_by_the_problems(copy):
    (copy / "model.safetensors").unlink()
    result = CliRunner().invoke(app, ["verify", str(copy)])
    assert isinstance(result.exception, RunError) and "model.safetensors is missing" in str(result.exception)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        verify(tmp_path)


@pytest.fixture
def of_two(folder, tmp_path):
    """The run as two processes that state all of their step would have recorded it."""
    run = shutil.copytree(folder.parent, tmp_path / "run", symlinks=True)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "tokens_per_step": 128}
    facts, state = run / "run.json", run / "checkpoint-4" / "training_state" / "trainer_state.json"
    recorded = json.loads(facts.read_text())
    assert recorded["plan"]["tokens_per_step"] == 128
    plan = {**recorded["plan"], "micro_batch": 2, "accumulation": 2, "processes": 2}
    edit(facts, config={**recorded["config"], **cut}, plan=plan)
    edit(state, config={**recorded["config"], **cut}, micro_batch=2)
    sealed(run / "checkpoint-4")
    return run


@pytest.mark.parametrize("world", [None, "2", "3"])
def test_a_run_of_other_processes_is_checked_by_what_it_recorded(of_two, monkeypatch, world):
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
    assert audit(of_two)["problems"] == []
    recorded, _, (inputs, _) = verify_module._evaluation(of_two / "checkpoint-4")
    assert recorded == RunFolder(of_two).evaluation(4)["eval_loss"] and len(inputs)


@pytest.mark.slow
def test_a_recorded_loss_changed_by_hand_is_found_by_one_process(of_two):
    assert verify(of_two / "checkpoint-4")["problems"] == []
    state = of_two / "checkpoint-4" / "training_state" / "trainer_state.json"
    evaluation = json.loads(state.read_text())["evaluation"]
    edit(state, evaluation={**evaluation, "eval_loss": evaluation["eval_loss"] / 2})
    sealed(of_two / "checkpoint-4")
    facts = verify(of_two / "checkpoint-4")
    assert any("was recorded" in problem for problem in facts["problems"]) and "loss_not_checked" not in facts
