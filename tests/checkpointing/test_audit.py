"""The audit finds what a ledger hides: another text, a step left out, a document twice."""

from __future__ import annotations

import json

import pytest

from hfgpt.checkpointing.audit import audit
from hfgpt.comparing.reading import read_folder
from hfgpt.config import PretrainConfig
from hfgpt.errors import UserError
from hfgpt.training.pretrainer import Pretrainer


def trained(folder, dataset, **changes):
    settings = {
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 16},
        "dataset": str(dataset),
        "tokenizer": "bpe-300",
        "sequence_length": 16,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "max_steps": 60,
        "learning_rate": 1e-3,
        "eval_steps": 0,
        "mixed_precision": "no",
        "torch_compile": False,
        "streaming": True,
        "dataloader_num_workers": 0,
    }
    Pretrainer(PretrainConfig(output_dir=str(folder), **{**settings, **changes})).train()
    return folder


def rewrite(folder, change):
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


@pytest.mark.parametrize("streaming", [True, False])
def test_an_honest_run_has_no_problem(tmp_path, document_folder, streaming):
    facts = audit(trained(tmp_path / "run", document_folder, streaming=streaming))
    assert facts["problems"] == [] and facts["steps_as_recorded"] == facts["steps"] == 60
    assert facts["tokens"] == 60 * 32 * 16
    if streaming:
        assert 1 <= facts["epochs_completed"] < facts["epochs_begun"] <= facts["epochs_completed"] + 2
        assert facts["documents"] > 500 and facts["leaked"] == 0
        assert facts["validation_documents"] > 0


def test_a_resumed_run_is_one_run(tmp_path, document_folder):
    trained(tmp_path / "run", document_folder, max_steps=7)
    trained(tmp_path / "run", document_folder, max_steps=12, resume_from_checkpoint="latest")
    facts = audit(tmp_path / "run")
    assert facts["problems"] == [] and facts["steps"] == 12


def test_what_is_not_as_recorded_is_found(tmp_path, document_folder):
    run = trained(tmp_path / "run", document_folder, max_steps=6)
    whole = (run / "ledger.jsonl").read_text()
    for change, named in (
        (lambda lines: lines[:2] + lines[3:], "are not steps 1 to 5"),
        (lambda lines: [*lines[:3], {**lines[3], "batch_hash": "0" * 16}, *lines[4:]], "step 4 was not trained"),
        (lambda lines: [*lines[:4], {**lines[4], "position": lines[3]["position"]}, lines[5]], "step 5 was not"),
    ):
        rewrite(run, change)
        assert any(named in problem for problem in audit(run)["problems"])
        (run / "ledger.jsonl").write_text(whole)
    with open(document_folder / "0.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    assert any("the text has changed since the run" in problem for problem in audit(run)["problems"])


def test_repeats_and_leaks_of_a_faulty_stream_are_found(tmp_path, document_folder, monkeypatch):
    """A stream that repeats a document, and one that trains on held-out text, agree with their own ledgers."""
    from hfgpt.data import document_stream as stream
    from hfgpt.data.source import Source

    real = stream.permutation
    monkeypatch.setattr(stream, "permutation", lambda count, *keys: real(count, *keys) // 2 * 2)
    facts = audit(trained(tmp_path / "repeats", document_folder))
    assert any("more than once" in problem for problem in facts["problems"])
    assert any("never appeared" in problem for problem in facts["problems"])
    monkeypatch.setattr(stream, "permutation", real)
    for number in range(3):  # copies of held-out documents in the training part
        last = (document_folder / "2.jsonl").read_text().splitlines()[-1]
        with open(document_folder / f"{number}.jsonl", "r+") as file:
            text = file.read()
            file.seek(0)
            file.write(last + "\n" + text)
    document = Source._document
    monkeypatch.setattr(
        Source, "_document", lambda self, *a, **k: document(Source([], "text", 0, True, {}, ""), *a, **k)
    )
    facts = audit(trained(tmp_path / "leaks", document_folder))
    assert facts["leaked"] > 0 and any("validation text were trained on" in problem for problem in facts["problems"])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="give a run folder"):
        audit(tmp_path)


def test_a_damaged_record_is_named_with_its_line(tmp_path, document_folder):
    run = trained(tmp_path / "run", document_folder, max_steps=3)
    ledger, facts = run / "ledger.jsonl", (run / "run.json").read_text()
    whole = ledger.read_text()
    ledger.write_text(whole + '{"step": 4, "ba')  # as a killed run leaves it
    assert audit(run)["problems"] == []
    first, _, third = whole.splitlines(keepends=True)
    ledger.write_text(first + "{broken\n" + third)
    with pytest.raises(UserError, match=r"line 2 of ledger\.jsonl cannot be read .*; restore the file"):
        audit(run)
    assert "1 broken line of ledger.jsonl skipped" in read_folder(run).notes
    ledger.unlink()
    with pytest.raises(UserError, match=r"no ledger\.jsonl; restore the file"):
        audit(run)
    (run / "run.json").write_text(facts[:40])
    with pytest.raises(UserError, match=r"run\.json cannot be read .*; restore the file"):
        audit(run)


def test_a_relative_path_looked_for_elsewhere_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "there" / "words").mkdir(parents=True)
    lines = (json.dumps({"text": f"a word and the number {n}"}) + "\n" for n in range(400))
    (tmp_path / "there" / "words" / "a.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path / "there")
    trained(tmp_path / "run", "words", max_steps=2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="dataset=words: was a local path when the run began"):
        audit(tmp_path / "run")
