"""A run on tokens that are ready: trained, resumed, audited, evaluated, and described as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import token_files
from running import StopAt, records, trained

from hfgpt.checkpointing.audit import audit
from hfgpt.data.encoding import Encoder
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.evaluation.text import read_text

TEXTS = [f"document {n} says " + "la " * (n * 7 % 20) for n in range(160)]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_on_tokens(config, tmp_path, streaming):
    save_tokenizer(load_tokenizer("bpe-300", lambda: TEXTS, 64), tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"), lambda: (), 64)
    (tmp_path / "set").mkdir()
    for name, content in token_files.files("datatrove", Encoder(tokenizer).tokens(TEXTS)).items():
        text = content.replace(b"gpt2", str(tmp_path / "tokenizer").encode()) if name.endswith("metadata") else content
        (tmp_path / "set" / name).write_bytes(text)
    settings = {"dataset": str(tmp_path / "set"), "tokenizer": "auto", "streaming": streaming, "model": {"n_layer": 1}}
    settings["model"] |= {"n_embd": 16, "n_head": 2, "n_positions": 16}
    whole = trained(config("whole", **settings))
    with pytest.raises(KeyboardInterrupt):
        trained(config("cut", **settings), StopAt(3))
    cut = trained(config("cut", resume_from_checkpoint="latest", **settings))
    losses = [[record["loss"] for record in records(run)] for run in (whole, cut)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    run = Path(cut.config.output_dir)
    found = audit(run)
    assert found["problems"] == [] and found["steps_as_recorded"] == 6
    facts = json.loads((run / "run.json").read_text())
    assert facts["config"]["tokenizer"] == str(tmp_path / "tokenizer")
    assert facts["data"]["dataset.tokens"] == "datatrove"
    assert any("ready tokens" in line for line in cut.data.description)
    assert "| tokenized | before the run: token ids were read (datatrove) |" in (
        (run / "checkpoint-latest" / "README.md").read_text()
    )
    scored = read_text(tokenizer, {"dataset": str(tmp_path / "set")}, None, None, True)
    assert scored.scored_bytes == sum(len(text.encode()) for text in TEXTS) and scored.facts["documents"] == 160
