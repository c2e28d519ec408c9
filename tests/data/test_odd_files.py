"""Every odd file through the command line: trained on with all rows accounted for, or refused in one line."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from conftest import ROOT, SHARED

ODD = SHARED / "odd"
EXPECTED = json.loads((ODD / "EXPECTED.json").read_text()) if ODD.exists() else {}
UNREADABLE = {  # of each, a word that its one line has
    "all_null_text.parquet": "no usable document",
    "empty.txt": "no usable document",
    "latin1.txt": "not UTF-8",
    "lfs_pointer.parquet": "Git LFS pointer",
    "no_text_column.parquet": "its columns are",
    "not_gzip.jsonl.gz": "cannot be read",
    "one_char.txt": "fewer than one block",
    "real_bad_ARROW-GH-45185.parquet": "its columns are",
    "real_chinese_legacy.txt": "not UTF-8",
    "truncated.jsonl.gz": "cannot be read",
    "truncated.parquet": "cannot be read",
    "zero_rows.parquet": "no usable document",
}
SKIPPED_WITH_COMPANY = {
    name for name, word in UNREADABLE.items() if word not in ("no usable document", "fewer than one block")
}


def launched(folder: Path, dataset: Path, monkeypatch, capsys, *flags: str) -> tuple[int, list[str], dict[str, int]]:
    """Exit code, lines of stderr, and the rows left out by reason, of two steps of a recipe."""
    AcceleratorState._reset_state(reset_partial_state=True)
    model = '{"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8}'
    command = ["quickstart.py", "--dataset", str(dataset), "--output_dir", str(folder), "--model", model]
    command += ["--sequence_length", "4", "--per_device_train_batch_size", "1", "--max_steps", "2", "--eval_steps", "0"]
    command += ["--tokenizer", "bpe-257", "--torch_compile", "false", "--eval_tokens", "2", *flags]
    monkeypatch.setattr(sys, "argv", command)
    code = 0
    try:
        runpy.run_path(str(ROOT / "recipes" / "quickstart.py"), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    skipped = {}
    if code == 0:
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        [skipped] = [record["skipped_rows"] for record in records if record.get("event") == "end"]
    return code, capsys.readouterr().err.strip().splitlines(), skipped


@pytest.mark.skipif(not ODD.exists(), reason="needs the odd files in ../shared/data/odd")
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_odd_file_is_read_rightly_or_refused_by_name(name, tmp_path, monkeypatch, capsys):
    expected = EXPECTED[name]
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"text": "held out: quite another text"}\n')
    flags = ["--eval_dataset", str(held_out)]
    code, lines, skipped = launched(tmp_path / "alone", ODD / name, monkeypatch, capsys, *flags)
    table = f"{name:45} exit {code}  {skipped or ' '.join(lines)[:150]}"
    if name in UNREADABLE:
        assert code == 2 and not (tmp_path / "alone").exists(), table
        assert [UNREADABLE[name] in line for line in lines] == [True], lines
    else:
        assert code == 0, lines
        rows = expected.get(
            "rows", expected.get("good_rows", 0) + expected.get("bad_lines", expected.get("bad_rows", 0))
        )
        if "good_rows" in expected:
            assert sum(skipped.values()) == rows - expected["good_rows"], table
        for reason, key in (("null", "null"), ("empty", "empty"), ("whitespace", "whitespace_only")):
            assert skipped.get(reason, 0) == expected[key] if key in expected else True, table

    company = tmp_path / "company"
    company.mkdir()
    shutil.copy(ODD / name, company)
    (company / "good.jsonl").write_text("".join(f'{{"text": "good row {n}"}}\n' for n in range(30)))
    flags += ["--on_bad_files", "skip"]
    code, lines, skipped = launched(tmp_path / "together", company, monkeypatch, capsys, *flags)
    assert code == 0, lines
    assert skipped.get("bad_file", 0) == (name in SKIPPED_WITH_COMPANY), skipped
    with capsys.disabled():
        print(f"\n{table}\n{'':37}together: exit {code}  {skipped}", end="")
