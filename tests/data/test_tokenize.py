"""`hfgpt tokenize` writes the documents of a text, however often it is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import islice

import numpy as np
import pytest

from hfgpt import PretrainConfig
from hfgpt.data import prepare_data, tokenize
from hfgpt.data.encoding import Encoder
from hfgpt.data.loader import iterate
from hfgpt.data.open_source import open_source
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.distributed import cpu
from hfgpt.errors import RunError, UserError

TEXTS = [f"document {n} says " + "la " * (n * 7 % 20) for n in range(200)]


@pytest.fixture
def tokenizer(tmp_path):
    save_tokenizer(load_tokenizer("bpe-300", lambda: TEXTS, 64), tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for part in range(10):
        rows = [*TEXTS[20 * part : 20 * part + 20], "", " "]
        lines = [json.dumps({"text": row}) + "\n" for row in rows]
        (tmp_path / "text" / f"{part}.jsonl").write_text("".join(lines))
    return {"dataset": str(tmp_path / "text")}


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_shards_hold_the_documents_and_name_their_source(tmp_path, tokenizer, text, monkeypatch):
    monkeypatch.setattr(cpu, "_cgroup_values", lambda *names: ["100000 100000"] if names[1] == "cpu.max" else [])
    monkeypatch.setattr(tokenize.concurrent.futures, "ProcessPoolExecutor", None)  # a container's one core: one process
    facts = tokenize.tokenize(text, tmp_path / "out", tokenizer, shard_tokens=500)
    ids = [i for tokens in Encoder(load_tokenizer(tokenizer, lambda: (), 64)).tokens(TEXTS) for i in [0, *tokens]]
    shards = sorted((tmp_path / "out").glob("tokens_train_*.bin"))
    read = [np.fromfile(path, "<u2", offset=1024) for path in shards]
    assert np.concatenate(read).tolist() == ids and [len(part) for part in read[:-1]] == [500] * (len(ids) // 500)
    headers = [np.fromfile(path, "<i4", 256) for path in shards]
    assert [header[:3].tolist() for header in headers] == [[20240520, 1, len(part)] for part in read]
    assert facts == json.loads((tmp_path / "out" / "hfgpt_tokens.json").read_text())
    assert facts["documents"] == 200 and facts["tokens"] == len(ids) and facts["tokenizer"] == tokenizer
    assert facts["left_out"] == {"empty": 10, "whitespace": 10} and facts["dataset"] == text["dataset"]
    again = content(tmp_path / "out")
    assert tokenize.tokenize(text, tmp_path / "out", tokenizer, shard_tokens=500) == facts
    assert content(tmp_path / "out") == again


@pytest.mark.slow
def test_processes_write_what_one_writes(tmp_path, tokenizer, text):
    for workers in (1, 2):
        tokenize.tokenize(text, tmp_path / str(workers), tokenizer, shard_tokens=500, workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "2")


@pytest.mark.parametrize("opened", ["all files", "some files"])
@pytest.mark.parametrize("save_seconds", [0, 1e9])
def test_an_interrupted_run_continues(tmp_path, tokenizer, text, monkeypatch, save_seconds, opened):
    whole = tokenize.tokenize(text, tmp_path / "whole", tokenizer, shard_tokens=300, workers=1)
    monkeypatch.setattr("hfgpt.data.formats.spans.SPAN_BYTES", 500)  # a file has several units
    if opened == "some files":
        monkeypatch.setattr("hfgpt.data.opening.FEW_FILES", 1)
        monkeypatch.setattr("hfgpt.data.opening.IN_MEMORY_BYTES", 0)
        assert open_source(**text).by_file
    monkeypatch.setattr(tokenize, "SAVE_SECONDS", save_seconds)
    add, folder, kills = tokenize._ShardWriter.add, tmp_path / "cut", 0

    for units in (1, 2, 3, 1, 5):
        left = units

        def add_some(self, tokens, *counts):
            nonlocal left
            if left == 0:
                self._file.write(b"torn")
                self._file.flush()
                raise KeyboardInterrupt
            left -= 1
            add(self, tokens, *counts)

        monkeypatch.setattr(tokenize._ShardWriter, "add", add_some)
        try:
            tokenize.tokenize(text, folder, tokenizer, shard_tokens=300, workers=1)
        except KeyboardInterrupt:
            kills += 1
            with pytest.raises(UserError, match="is a set of tokens that is not finished; run hfgpt tokenize again"):
                prepare_data(PretrainConfig(dataset=str(folder), max_steps=1, sequence_length=16), 4)
    monkeypatch.setattr(tokenize._ShardWriter, "add", add)
    assert kills >= 4 and tokenize.tokenize(text, folder, tokenizer, shard_tokens=300, workers=1) == whole
    assert content(folder) == content(tmp_path / "whole")


CLI = """
import sys
from hfgpt.data import opening, tokenize
if __name__ == "__main__":
    from hfgpt.cli import main
    tokenize.SAVE_SECONDS, opening.IN_MEMORY_BYTES = 0.02, 0
    sys.argv = ["hfgpt", "tokenize", *sys.argv[1:], "--shard_tokens", "5000", "--num_workers", "2"]
    sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.unix_only
def test_a_killed_command_leaves_no_process_and_continues(tmp_path, tokenizer, monkeypatch):
    """SIGKILL to the main process alone in mid-work, of many files that are opened in turn."""
    (tmp_path / "text").mkdir()
    for part in range(70):
        rows = [json.dumps({"text": f"{part} {n} " + "la la some more words " * 40}) + "\n" for n in range(60)]
        (tmp_path / "text" / f"{part:02}.jsonl").write_text("".join(rows))
    (tmp_path / "cli.py").write_text(CLI)
    texts, options = {"dataset": str(tmp_path / "text"), "split": "train"}, {"shard_tokens": 5000, "workers": 1}
    tokenize.tokenize(texts, tmp_path / "whole", tokenizer, **options)
    whole, folder = content(tmp_path / "whole"), tmp_path / "killed"
    shards = sum(name.endswith(".bin") for name in whole)
    command = [sys.executable, tmp_path / "cli.py", texts["dataset"], folder, "--tokenizer", tokenizer]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while len(list(folder.glob("*.bin"))) < shards // 3 and child.poll() is None:
            time.sleep(0.01)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while left := subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, check=False).stdout:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    monkeypatch.setattr("hfgpt.data.opening.IN_MEMORY_BYTES", 0)
    tokenize.tokenize(texts, folder, tokenizer, **options)
    killed = content(folder)
    assert killed.pop(".lock") == b"" and killed == whole


def test_training_on_shards_sees_the_documents_of_the_text(tmp_path, tokenizer, text):
    tokenize.tokenize(text, tmp_path / "out", tokenizer, shard_tokens=500, workers=1)
    (tmp_path / "new.txt").write_text("new text")
    settings = {"sequence_length": 32, "max_steps": 1, "eval_dataset": str(tmp_path / "new.txt")}
    of_text = prepare_data(PretrainConfig(**text, tokenizer=tokenizer, **settings), 8)
    ready = prepare_data(PretrainConfig(dataset=str(tmp_path / "out"), **settings), 8)
    assert ready.tokenizer_name == str(tmp_path / "out" / "tokenizer")
    for one, other in islice(zip(iterate(of_text.train, None), iterate(ready.train, None), strict=True), 30):
        assert np.array_equal(one.blocks, other.blocks)
    assert not any("left out" in line for line in ready.description)


def test_what_does_not_fit_is_refused(tmp_path, tokenizer, text, monkeypatch):
    out = tmp_path / "out"
    tokenize.tokenize(text, out, tokenizer, shard_tokens=500, workers=1)
    save_tokenizer(load_tokenizer("bpe-280", lambda: TEXTS, 64), tmp_path / "other")
    with pytest.raises(UserError, match=r"holds tokens of .* with another tokenizer fingerprint; give a new folder"):
        tokenize.tokenize(text, out, str(tmp_path / "other"), shard_tokens=500)
    with pytest.raises(
        UserError, match=r"tokenizer=.*other: the tokens were made with .*out/tokenizer .highest id 299, not"
    ):
        prepare_data(PretrainConfig(dataset=str(out), tokenizer=str(tmp_path / "other"), max_steps=1), 8)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.txt").write_text("a")
    with pytest.raises(UserError, match="is not empty, and not of an earlier hfgpt tokenize"):
        tokenize.tokenize(text, tmp_path / "used", tokenizer)
    monkeypatch.chdir(tmp_path)
    for dataset in (tmp_path / "text", tmp_path / "**" / "*", f"{tmp_path}/**/tokens*", "**/*.json"):
        with pytest.raises(UserError, match=r"text/shards: is inside dataset=.*, all of whose files are text"):
            tokenize.tokenize({"dataset": str(dataset)}, tmp_path / "text" / "shards", tokenizer)
    assert not (tmp_path / "text" / "shards").exists()
    plain = {"dataset": str(tmp_path / "**" / "*.txt")}  # among which shards are not
    assert tokenize.tokenize(plain, tmp_path / "used" / "shards", tokenizer)["documents"] == 1
    with pytest.raises(UserError, match=r"tokenizer=char: .* need a tokenizer that exists"):
        tokenize.tokenize(text, tmp_path / "new", "char")
    with pytest.raises(UserError, match="contains tokens already"):
        tokenize.tokenize({"dataset": str(out)}, tmp_path / "new", tokenizer)
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match="contains no usable document"):
        tokenize.tokenize({"dataset": str(tmp_path / "blank.jsonl")}, tmp_path / "new", tokenizer)
    assert not content(tmp_path / "new")
    (out / "tokens_train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"tokens_train_000001\.bin is missing or incomplete"):
        tokenize.tokenize(text, out, tokenizer, shard_tokens=500)


def test_the_command_keeps_a_second_one_out_of_its_folder(tmp_path, monkeypatch, capsys):
    from hfgpt.checkpointing import lock
    from hfgpt.cli.tokenize import LOCK, tokenize

    monkeypatch.setattr("hfgpt.data.tokenize.tokenize", lambda *_: {"shards": {}, "tokens": 0})
    folder = tmp_path / "shards"
    tokenize("texts", folder, "tok")
    assert not folder.exists()  # as nothing was written
    folder.mkdir()
    with open(folder / LOCK, "ab+") as other:
        lock.acquire(other)
        with pytest.raises(UserError, match="another hfgpt tokenize is writing it"):
            tokenize("texts", folder, "tok")
        assert (folder / LOCK).exists()

    def on_a_full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hfgpt.data.tokenize.tokenize", on_a_full_disk)
    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\); make room"):
        tokenize("texts", folder, "tok")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="choose a writable folder"):
        tokenize("texts", tmp_path / "file", "tok")


def test_shards_of_another_size_than_recorded_are_refused(tmp_path):
    from hfgpt.data.formats.tokens.opening import choose_kind

    shard, sidecar = tmp_path / "tokens_train_000001.bin", tmp_path / "hfgpt_tokens.json"
    shard.write_bytes(bytes(1024 + 2 * 90))
    sidecar.write_text(json.dumps({"finished": True, "dtype": "uint16", "shards": {shard.name: 100}}))
    with pytest.raises(UserError, match=r"has 90 tokens, but hfgpt_tokens\.json records 100"):
        choose_kind([str(shard), str(sidecar)], [], None)
