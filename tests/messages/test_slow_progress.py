"""Progress of slow work: on a terminal, in a file, of fast work, and where it is shown."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from running import trained

from hfgpt.data import prepare_data
from hfgpt.evaluation.loss import evaluate_tokens
from hfgpt.hub import push, verify
from hfgpt.messages import slow_progress
from hfgpt.messages.slow_progress import SlowWork


class Shown(io.StringIO):
    """A stderr that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def write(self, text: str) -> int:
        with self.changed:
            count = super().write(text)
            self.changed.notify_all()
        return count

    def wait_for(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), 20), f"{text} is not in {self.getvalue()}"


def captured(monkeypatch) -> Shown:
    """Have slow work shown at once, and once, in a file."""
    monkeypatch.setattr(slow_progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(slow_progress, "LINE_SECONDS", 1e6)
    monkeypatch.setattr(sys, "stderr", shown := Shown())
    return shown


def test_a_line_says_how_far_the_work_is_and_how_long_it_will_take():
    now = [100.0]
    with SlowWork("tokenizing", "documents", 1200, clock=lambda: now[0]) as work:
        for number in work.count(range(1200)):
            if number == 300:
                now[0] += 35
                assert work.line() == "tokenizing: 300 of 1,200 documents, 0:00:35 so far, 0:01:45 left"
    with SlowWork("reading", "documents", clock=lambda: now[0]) as work:
        work.done, now[0] = 12_000, now[0] + 5
        assert work.line() == "reading: 12,000 documents, 0:00:05 so far"
    with SlowWork("uploading", clock=lambda: now[0]) as work:
        now[0] += 65
        assert work.line() == "uploading: 0:01:05 so far"
    with SlowWork("nothing", "batches", 0, clock=lambda: now[0]) as work:
        assert list(work.count([])) == [] and work.line() == "nothing: 0 batches, 0:00:00 so far"


def test_fast_work_and_other_processes_show_nothing(monkeypatch):
    stderr = captured(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(slow_progress, "DELAY_SECONDS", 1e6)
        with SlowWork("fast", "steps", 3) as work:
            assert list(work.count("abc")) == ["a", "b", "c"]
    before = threading.active_count()
    monkeypatch.setenv("RANK", "1")
    with SlowWork("not the main process"):
        assert threading.active_count() == before
    assert stderr.getvalue() == ""


def test_work_that_fails_is_shown_no_more(monkeypatch):
    stderr = captured(monkeypatch)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt), SlowWork("failing", "steps", 2) as work:
        for _ in work.count("ab"):
            stderr.wait_for("failing")
            raise KeyboardInterrupt
    assert threading.active_count() == threads
    assert re.fullmatch(r"failing: 0 of 2 steps, 0:00:\d\d so far\n", stderr.getvalue())


def test_a_terminal_gets_a_bar_that_is_gone_in_the_end(monkeypatch):
    monkeypatch.setattr(slow_progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(slow_progress, "BAR_SECONDS", 0.001)
    monkeypatch.setattr(slow_progress, "has_room_for_bar", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown := Shown())
    with SlowWork("tokenizing", "documents", 4) as work:
        for number, _ in enumerate(work.count("abcd")):
            shown.wait_for(f" {number}/4 [")
    with SlowWork("uploading"):
        shown.wait_for("uploading: 00:00")
    text = shown.getvalue()
    assert "tokenizing:  50%|" in text and "documents/s" in text and "\n" not in text
    assert text.endswith("\r") and text.rsplit("\r", 2)[1].isspace()


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout and stderr a terminal, and returns a function that returns what was written to it."""
    fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))
    leader, follower = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # at its end
            while part := os.read(leader, 65536):
                parts.append(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    screen = os.fdopen(follower, "w")

    def written() -> str:
        screen.close()
        reader.join(20)
        return b"".join(parts).decode()

    def connect(rows: int = 40, columns: int = 100):
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(sys, "stdout", screen)
        return written

    yield connect
    os.close(leader)


def test_training_on_a_terminal_is_a_bar_with_loss_speed_mfu_and_eta(config, terminal):
    written = terminal()
    settings = {"eval_steps": 4, "eval_tokens": 200, "save_steps": 4, "mfu_peak_tflops": 1.0, "sample_steps": 5}
    trained(config(**settings))
    trained(config(**settings | {"max_steps": 8, "resume_from_checkpoint": "latest"}))
    screens = re.split("[\r\n]+", written())
    bars = [bar for line in screens if (bar := re.fullmatch(r"step (\d)/(\d) \|.*\| ?(.*?) *", line))]
    steps = {(int(bar[1]), int(bar[2])) for bar in bars}
    assert {(0, 6), (6, 6), (6, 8), (8, 8)} <= steps and (0, 8) not in steps
    full = r"loss \d\.\d{4}  [\d,]+ tokens/s  MFU \d+\.\d%  ETA 0:00:\d\d"
    assert any(re.fullmatch(full, bar[3]) for bar in bars)
    evaluations = [line for line in screens if line.startswith("step ") and "eval loss" in line and "|" not in line]
    assert [line[:8] for line in evaluations] == ["step 4/6", "step 6/6", "step 8/8"]
    assert not [line for line in screens if "  loss " in line and "|" not in line]
    assert [line for line in screens if line.startswith("sample at step 5: ")]


def test_training_with_stdout_in_a_file_has_its_lines_there(config, terminal, monkeypatch, tmp_path):
    written = terminal()
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        trained(config())
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("step ")]
    assert [line[:8] for line in lines if "loss" in line] == [f"step {step}/6" for step in range(1, 7)]
    assert "step 6/6 |" in written()


def test_training_on_a_terminal_without_a_size_prints_lines(config, terminal):
    written = terminal(0, 0)
    trained(config())
    assert re.findall(r"^step (\d)/6  loss \d", written(), re.M) == [*"123456"]


def wait_in(monkeypatch, module, name: str, stderr: Shown, text: str) -> None:
    """Have a function wait until `text` was shown."""
    original = getattr(module, name)

    def waiting(*arguments, **options):
        stderr.wait_for(text)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, waiting)


def test_an_evaluation_is_shown(monkeypatch):
    stderr = captured(monkeypatch)
    model = torch.nn.Linear(1, 1)
    model.forward = lambda **_: stderr.wait_for("evaluation") or type("Output", (), {"loss": torch.ones(())})
    evaluate_tokens(model, np.zeros(81, np.int32), accelerator=Accelerator(cpu=True), sequence_length=4, batch_size=2)
    assert re.fullmatch(r"evaluation: 0 of 10 batches, 0:00:\d\d so far\n", stderr.getvalue())


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_tokenizing_and_training_a_tokenizer_are_shown(monkeypatch, capsys, config, streaming):
    from hfgpt.data import encoding, prepare_text, run_tokenizer

    stderr = captured(monkeypatch)
    wait_in(monkeypatch, prepare_text, "hold_out", stderr, "reading the held-out text: 0:00:")
    wait_in(monkeypatch, run_tokenizer, "load_tokenizer", stderr, "training the tokenizer bpe-300: 0 documents, 0:00:")
    wait_in(monkeypatch, encoding, "_encode_batch", stderr, "tokenizing: 0 of ")
    monkeypatch.setattr(encoding, "fast_encoding", lambda backend: None)
    if not streaming:
        wait_in(monkeypatch, prepare_text, "read_documents", stderr, "reading the text: 0 documents, 0:00:")
    prepare_data(config(tokenizer="bpe-300", streaming=streaming), 16)
    assert capsys.readouterr().out == ""


def test_verify_and_push_are_shown(monkeypatch, config, capsys):
    run = trained(config())
    folder, stderr = run.folder.checkpoint(6), captured(monkeypatch)
    capsys.readouterr()

    def loading(command, **_):
        stderr.wait_for("verifying with stock transformers: 0:00:")
        return subprocess.CompletedProcess(command, 1, stderr="stopped by the test")

    def upload(*_):
        stderr.wait_for("uploading to me/tiny: 0:00:")
        return "address"

    monkeypatch.setattr(verify.subprocess, "run", loading)
    assert verify.verify(folder)["problems"] == ["stock transformers does not load it: stopped by the test"]
    for name, result in {"verify": {"problems": [], "loss_not_checked": ""}, "check_access": "token"}.items():
        monkeypatch.setattr(push, name, lambda *_, result=result: result)
    monkeypatch.setattr(push, "_upload", upload)
    assert push.push(folder, "me/tiny") == "address"
    assert capsys.readouterr().out == ""
