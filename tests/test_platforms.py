"""What only Unix has is not needed: hfgpt imports, trains, saves and resumes without it."""

from __future__ import annotations

import ast
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import without_unix
from forked import FORK, completed
from running import ROOT, lines, same_weights, trained
from typer.testing import CliRunner

from hfgpt import files
from hfgpt.checkpointing import lock
from hfgpt.checkpointing.checkpoint import find_checkpoint, find_damage
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.cli import app
from hfgpt.cli.output import as_json_line
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import Encoder
from hfgpt.data.loader import iterate
from hfgpt.data.open_source import open_source
from hfgpt.data.remote import model_files
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.distributed import launcher
from hfgpt.distributed.stop_signals import StopSignals, stop_signals
from hfgpt.errors import RunError, UserError
from hfgpt.evaluation.loading import load_checkpoint
from hfgpt.evaluation.results import check_recordable
from hfgpt.links import follow
from hfgpt.messages import safe_output

MODULES = sorted((ROOT / "hfgpt").rglob("*.py"))


# Without Unix


def run_without(piece: list[str], folder: Path) -> dict:
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [FORK, str(ROOT / "tests" / "without_unix.py"), str(folder), *piece]
    done = completed(command, environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("piece", [["resource"], ["fcntl"], ["libc"], ["affinity"], ["links"], []], ids=str)
def test_every_module_imports_and_a_run_trains_and_resumes_without(piece, tmp_path):
    found = run_without(piece, tmp_path)
    assert found["steps"] == [1, 2, 3, 4, 5]
    assert found["modules"] >= len(MODULES) - 4  # all but hfgpt itself, two scripts, and the metric for `evaluate`
    latest = tmp_path / "run" / "checkpoint-latest"
    assert latest.is_symlink() != (not piece or piece == ["links"])
    assert find_damage(follow(latest).resolve()) is None and follow(latest).resolve().name == "checkpoint-5"


OF_UNIX_OR_WINDOWS = {
    "resource",
    "fcntl",
    "msvcrt",
    "winreg",
    "pwd",
    "grp",
    "termios",
    "tty",
    "pty",
    "syslog",
    "curses",
}


def unguarded(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run whenever a module is imported, but for those in `try` and `if`."""
    return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def test_modules_name_encodings_and_import_nothing_that_one_system_lacks():
    """Windows' own encoding is not UTF-8."""
    found = []
    for module in MODULES:
        tree, where = ast.parse(module.read_text(encoding="utf-8")), module.relative_to(ROOT).as_posix()
        for node in unguarded(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if OF_UNIX_OR_WINDOWS.intersection(name.split(".")[0] for name in names):
                found.append(f"{where}:{node.lineno}: {ast.unparse(node)}")
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found += [f"{where}:{call.lineno}: {ast.unparse(call)}" for call in calls if is_text_without_encoding(call)]
    assert found == []


def is_text_without_encoding(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg for keyword in call.keywords}
    if "encoding" in given or None in given:
        return False
    if name == "read_text":  # ours, of other classes, take a unit or a path
        return isinstance(call.func, ast.Attribute) and not call.args
    if name == "write_text":
        return len(call.args) < 2
    if name in ("run", "Popen", "check_output") and isinstance(call.func, ast.Attribute):
        return bool(given & {"text", "universal_newlines"})
    if name not in ("open", "fdopen") or ast.unparse(call.func) in (
        "os.open",
        "Image.open",
        "filesystem.open",
        "tarfile.open",
    ):
        return False
    arguments = call.args if isinstance(call.func, ast.Attribute) and name == "open" else call.args[1:]
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + arguments[:1]
    return not any(values and all("b" in value for value in values) for values in map(strings_of, modes))


def strings_of(mode: ast.expr) -> list[str]:
    """The mode of a file, of which there may be two: "ab" if there is something else "wb"."""
    branches = [mode.body, mode.orelse] if isinstance(mode, ast.IfExp) else [mode]
    return [str(branch.value) for branch in branches if isinstance(branch, ast.Constant)]


@pytest.mark.parametrize(
    ("code", "is_wrong"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("path.open()", True),
        ("path.open('rb')", False),
        ("open(path, mode='rb')", False),
        ("open(path, 'w', encoding='utf-8')", False),
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("path.write_text(text, 'utf-8', newline='')", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command)", False),
        ("os.fdopen(number, 'ab+')", False),
    ],
)
def test_the_search_for_encodings_finds_them(code, is_wrong):
    assert is_text_without_encoding(ast.parse(code).body[0].value) is is_wrong


# Links


@pytest.fixture
def no_links(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "A required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)


def test_where_links_are_not_allowed_text_files_name_the_checkpoints(config, no_links, tmp_path, monkeypatch):
    changes = {"eval_steps": 2, "eval_tokens": 100, "save_total_limit": 2, "save_best": True}
    trained(config(max_steps=4, **changes))
    run = tmp_path / "run"
    assert (run / "checkpoint-latest").read_bytes() == b"checkpoint-4\n"
    assert follow(run / "checkpoint-best") in RunFolder(run).checkpoints()
    second = trained(config("second", resume_from_checkpoint=str(run / "checkpoint-latest"), **changes))
    assert second.resumed.folder == run / "checkpoint-4" and second.progress.step == 6
    assert [line["step"] for line in lines(tmp_path / "second")] == [*range(1, 7)]
    monkeypatch.undo()
    resumed = trained(config(resume_from_checkpoint="latest", **changes))  # where links work again
    assert same_weights(resumed, second) and (run / "checkpoint-latest").is_symlink()


@pytest.fixture
def linked(config, no_links, tmp_path) -> Path:
    """`checkpoint-latest`, a text file, of a run of two steps with an evaluation."""
    trained(config(max_steps=2, eval_steps=2, eval_tokens=100))
    return tmp_path / "run" / "checkpoint-latest"


def output_of(*command: str) -> str:
    done = CliRunner().invoke(app, [*command])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def printed(*command: str) -> dict:
    return json.loads(output_of(*command))


def test_commands_and_functions_take_such_a_file_for_the_folder(linked, text_file, config, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    folder = linked.with_name("checkpoint-2")
    text = ["--dataset", str(text_file), "--eval_tokens", "50", "--json"]
    scores = [printed("evaluate", str(path), *text, "--record")["loss"] for path in (linked, folder)]
    assert scores[0] == scores[1]
    assert check_recordable(linked) == check_recordable(folder)
    assert {record["step"] for record in RunFolder(linked.parent).evaluation_records()} == {2}
    options = ["--prompt", "words", "--max_new_tokens", "3", "--seed", "1", "--json"]
    assert printed("generate", str(linked), *options) == printed("generate", str(folder), *options)
    assert "wrote" in output_of("export", str(linked), str(tmp_path / "plain"))
    assert load_checkpoint(tmp_path / "plain")[0].config.n_layer == load_checkpoint(linked)[0].config.n_layer
    begun = trained(config("begun", model="auto", init_from=str(linked), tokenizer=str(linked), max_steps=1))
    assert begun.config.init_from == str(folder.resolve())
    again = config("begun", model="auto", init_from=str(linked), tokenizer=str(linked), resume_from_checkpoint="latest")
    assert trained(again).progress.step == 6


@pytest.mark.slow
def test_verify_takes_such_a_file_for_the_folder(linked):
    recorded = lines(linked.parent, "eval_loss")[-1]["eval_loss"]
    verified = printed("verify", str(linked), "--json")
    assert verified["loss"] == pytest.approx(recorded, abs=1e-3) and verified["problems"] == []


def test_a_push_sends_the_folder_that_such_a_file_names(linked, monkeypatch):
    from hfgpt.hub import push

    sent = []
    monkeypatch.setattr(push, "check_access", lambda repo_id: "token")
    monkeypatch.setattr(push, "verify", lambda folder: {"problems": []})
    monkeypatch.setattr(push, "_upload", lambda api, folder, *_: sent.append(folder) or "address")
    assert push.push(linked, "me/mine") == "address" and sent == [linked.with_name("checkpoint-2").resolve()]


@pytest.mark.parametrize(
    ("content", "followed"),
    [
        (b"checkpoint-7\n", "checkpoint-7"),
        (b"checkpoint-7\r\n", "checkpoint-7"),
        (b"checkpoint-7", "checkpoint-7"),  # as git writes a link
        (b"../checkpoint-7", None),
        (b"checkpoint-7/../..", None),
        (b"checkpoint-latest", None),
        (b"\xff\xfe", None),
        (b"", None),
        (b"checkpoint-7" + b" " * 10**6 + b"x", "checkpoint-7"),
    ],
)
def test_such_a_file_leads_only_to_a_checkpoint_beside_it(tmp_path, content, followed):
    path = tmp_path / "checkpoint-latest"
    path.write_bytes(content)
    assert follow(path) == (tmp_path / followed if followed else path)
    other = tmp_path / "story.txt"
    other.write_bytes(content)
    assert follow(other) == other
    with pytest.raises(UserError, match=r"no such folder|no config"):
        load_checkpoint(follow(path) if followed else tmp_path / "nowhere")
    with pytest.raises(UserError, match="checkpoint-latest: no such folder"):
        find_checkpoint(RunFolder(tmp_path / "run"), str(path))


# Files that are open elsewhere


def test_a_link_to_a_folder_that_cannot_be_replaced_is_removed_first(tmp_path, monkeypatch):
    """As on Windows, where no name of a folder can be replaced."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "new").symlink_to("two")
    real = os.replace

    def replace(source, target):
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Access is denied")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    files.replace(tmp_path / "new", tmp_path / "link")
    assert (tmp_path / "link").resolve().name == "two" and not (tmp_path / "new").is_symlink()


def test_a_file_that_another_program_has_open_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    refusals, real = [PermissionError(errno.EACCES, "in use")] * 3, os.replace

    def replace(source, target):
        if refusals:
            raise refusals.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(files, "OPEN_ELSEWHERE_SECONDS", 60)
    files.write_whole(tmp_path / "run.json", b"{}")
    assert (tmp_path / "run.json").read_bytes() == b"{}" and not refusals
    refusals[:] = [PermissionError(errno.EACCES, "in use")] * 1000
    monkeypatch.setattr(files, "OPEN_ELSEWHERE_SECONDS", 0.1)
    with pytest.raises(PermissionError):
        files.write_whole(tmp_path / "run.json", b"{1}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_an_old_checkpoint_that_is_being_read_is_kept_until_it_can_be_deleted(config, monkeypatch, tmp_path, caplog):
    real, read = os.rename, {"checkpoint-2"}

    def rename(source, target):
        if Path(source).name in read:
            raise PermissionError(errno.EACCES, "The process cannot access the file")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    run = trained(config(max_steps=4, save_total_limit=1)).folder
    assert [path.name for path in run.checkpoints()] == ["checkpoint-4", "checkpoint-2"]
    assert "checkpoint-2 could not be deleted" in caplog.text and not lines(run.path, "reason")
    read.clear()
    run = trained(config(max_steps=6, save_total_limit=1, resume_from_checkpoint="latest")).folder
    assert [path.name for path in run.checkpoints()] == ["checkpoint-6"]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's list of mapped files")
def test_a_resumed_run_holds_no_file_of_its_checkpoint(config, tmp_path):
    """Windows could not delete it, and elsewhere its room on the disk would stay taken until the run ends."""
    trained(config(max_steps=2, optim="adamw"))
    resumed = trained(config(max_steps=4, optim="adamw", resume_from_checkpoint="latest"))
    assert resumed.resumed is not None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert [line for line in maps.splitlines() if str(tmp_path) in line] == []


# The lock


class Msvcrt:
    """The module of Windows, for one byte of one file: an open file holds the lock, and others are refused."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self):
        self.held: dict[tuple[int, int], int] = {}

    def locking(self, number: int, mode: int, count: int) -> None:
        assert count == 1
        byte = os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR)
        if mode == self.LK_UNLCK:
            if self.held.get(byte) != number:
                raise OSError(errno.EACCES, "Permission denied")
            del self.held[byte]
        elif self.held.setdefault(byte, number) != number:
            raise PermissionError(errno.EACCES, "Permission denied")


def test_a_folder_in_use_is_refused_by_the_lock_of_windows(tmp_path, monkeypatch):
    fake = Msvcrt()
    monkeypatch.setattr(lock, "fcntl", None)
    monkeypatch.setattr(lock, "msvcrt", fake)
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.claim()
    [(_, byte)] = fake.held
    assert byte > (tmp_path / "run" / ".lock").stat().st_size > 0  # others can read who holds it
    for refused in (second.check_free, second.claim):
        with pytest.raises(UserError, match=rf"another run is using it \(process {os.getpid()} on"):
            refused()
    first.close()
    assert not fake.held
    second.check_free()
    second.claim()
    assert (tmp_path / "run" / ".lock").read_text(encoding="utf-8").startswith(f"process {os.getpid()} on ")
    second.close()


def test_a_system_or_disk_without_locks_is_no_fault(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "fcntl", None)
    run = RunFolder(tmp_path / "run")
    for module in (None, SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=lambda *_: refuse_lock())):
        monkeypatch.setattr(lock, "msvcrt", module)
        run.claim()
        run.check_free()
        run.close()
    assert "cannot be locked (Invalid argument)" in caplog.text


def refuse_lock():
    raise OSError(errno.EINVAL, "Invalid argument")


# Signals and processes


def test_ctrl_break_stops_as_ctrl_c_does(monkeypatch):
    """SIGBREAK, which only Windows has, stands in for another number here."""
    number = next(n for n in (signal.SIGINT, signal.SIGTERM) if n)
    monkeypatch.setattr(signal, "SIGBREAK", getattr(signal, "SIGUSR2", number), raising=False)
    assert signal.SIGBREAK in stop_signals()
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGBREAK)
        assert signals.received == signal.SIGBREAK
        assert signals.to_error().exit_code == 128 + signal.SIGBREAK


FOLLOWER = """
import os, signal, sys, time
import psutil
from hfgpt.data.open_source import open_source
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.distributed import launcher
launcher.WINDOWS = sys.argv[2] == "win32"
sys.platform = sys.argv[2]
launcher.PARENT, launcher.PARENT_IS_LAUNCHER = os.getppid(), True
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + "/stopped", "w").close(), os._exit(0)))
launcher.stop_with_launcher()
open(sys.argv[1] + "/ready", "w").close()
for _ in range(600):
    time.sleep(0.1)
"""


@pytest.mark.unix_only
@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_process_stops_when_its_launcher_is_killed(tmp_path, platform):
    """On Linux by its signal; elsewhere by a thread, which runs here but for the system's own calls."""
    if platform == "linux" != sys.platform:
        pytest.skip("only Linux sends the signal")
    child = [sys.executable, "-c", FOLLOWER, str(tmp_path), platform]
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({child!r})"])
    wait_for(lambda: (tmp_path / "ready").exists())
    parent.kill()
    parent.wait()
    wait_for(lambda: (tmp_path / "stopped").exists())


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_real_python_of_a_virtual_environment_on_windows_has_its_launcher_one_further(monkeypatch):
    """There `python` is a small program that starts the real one with the same arguments."""
    commands = {os.getpid(): ["C:/Python/python.exe", "recipe.py"], os.getppid(): ["C:/venv/python.exe", "recipe.py"]}
    monkeypatch.setattr(launcher, "_command_line", lambda pid: commands.get(pid, []))
    assert launcher._find_parent() == os.getppid()
    monkeypatch.setattr(launcher, "WINDOWS", True)
    assert launcher._find_parent() == psutil.Process(os.getppid()).ppid()
    commands[os.getppid()] = ["C:/venv/Scripts/python.exe", "C:/venv/Scripts/accelerate.exe", "launch", "recipe.py"]
    assert launcher._find_parent() == os.getppid()


def test_the_command_line_of_another_process_without_proc(monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(FileNotFoundError()))
    assert launcher._command_line(os.getpid()) == psutil.Process().cmdline()
    assert launcher._command_line(2**22 + 1) == []


@pytest.mark.slow
def test_workers_that_are_started_and_not_forked_give_the_same_batches(tmp_path):
    """As on Windows and macOS."""
    texts = [{"text": f"document {n} says {n * n % 101}"} for n in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, texts)), encoding="utf-8")
    tokenizer = load_tokenizer("char", lambda: ["abcdefghijklmnopqrstuvwxyz 0123456789"], 64)
    options = {"seed": 1, "sequence_length": 16, "blocks_per_step": 4}
    stream = DocumentStream(open_source(str(tmp_path / "text.jsonl")), Encoder(tokenizer), fingerprint={}, **options)
    alone = [batch.blocks for batch in islice(iterate(stream, None), 6)]
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        steps = iterate(stream, None, num_workers=1)
        assert all(np.array_equal(a, b.blocks) for a, b in zip(alone, islice(steps, 6), strict=True))
        steps.close()
    finally:
        multiprocessing.set_start_method(before, force=True)


# Names and output


def test_a_name_that_windows_allows_for_no_file_is_left_to_who_uses_it(monkeypatch):
    def stat(path, **_):
        error = OSError(errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect")
        error.winerror = 123
        raise error

    monkeypatch.setattr(os, "stat", stat)
    assert files.local_path("texts/*.txt") == "texts/*.txt"


@pytest.mark.parametrize("name", [r"C:\models\mine", r"out\mine", "C:/models/mine"])
def test_a_path_of_windows_is_no_name_on_the_hub(name):
    with pytest.raises(UserError) as raised:
        model_files(name)
    assert str(raised.value) == f"init_from={name}: no such file or folder"


def test_json_is_exact_on_a_console_without_utf_8(monkeypatch):
    for encoding in ("cp1252", "utf-8", None):
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding=encoding))
        line = as_json_line({"text": "für 世界"})
        assert json.loads(line.encode(encoding or "ascii")) == {"text": "für 世界"}
    assert "世界" not in line


def test_a_pipe_that_was_closed_ends_a_command_quietly_on_windows(monkeypatch):
    def write(text):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(safe_output, "lost", {})
    stream = SimpleNamespace(write=write, encoding="cp1252")
    with pytest.raises(RunError):
        safe_output.SafeStream(stream, "stdout", must_write=True).write("text")
    monkeypatch.setattr(safe_output, "WINDOWS", True)
    with pytest.raises(SystemExit) as ended:
        safe_output.SafeStream(stream, "stdout", must_write=True).write("text")
    assert ended.value.code == safe_output.BROKEN_PIPE


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_this_system_has_the_pieces_that_are_removed():
    """Otherwise their removal would prove nothing."""
    assert all(hasattr(signal, name) for name in without_unix.SIGNALS)
    assert hasattr(os, "sched_getaffinity") and hasattr(psutil.Process, "cpu_affinity")
