"""Settings and commands with odd values, and damaged files: one line and an exit code, never a traceback or a hang.

Many more tries than the suite makes: HFGPT_FUZZ_TRIES=2000 pytest -n0 tests/test_fuzzing.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nanogpt_like import random_state, write_checkpoint
from running import MODEL

from hfgpt import PretrainConfig, Pretrainer, cli
from hfgpt.checkpointing.checkpoint import file_facts
from hfgpt.errors import RunError, UserError

pytestmark = pytest.mark.unix_only  # pipes, devices and circles of links are among the odd files

TRIES = int(os.environ.get("HFGPT_FUZZ_TRIES", "0"))
HANGS_AFTER_SECONDS = int(os.environ.get("HFGPT_FUZZ_HANG", "300"))


def tries(suite: int, part: float = 1.0):
    """So many of the same tries in the suite; faults are gathered, so nothing is shrunk."""
    number = int(TRIES * part) or suite
    checks = list(HealthCheck)
    options = {"derandomize": not TRIES, "deadline": None, "database": None, "phases": [Phase.generate]}
    return settings(max_examples=number, suppress_health_check=checks, **options)


NUMBERS = """
0 -0 -0.0 1 2 -1 1.5 1e9 1e-46 1e-300 1e300 1e400 -1e400 1e-400 nan -nan inf -inf Infinity 2147483648 65536
9223372036854775807 9223372036854775808 -9223372036854775809 18446744073709551616 9_007_199_254_740_993 1_0
1__0 0x10 1e 1e5000 ١٢ ½ ² 1,5 .5 5. +3 1e3 1e18 0e99999999999999999999 1e-99999999999999999999 1000000000000
""".split()  # noqa: SIM905
WORDS = """
none None null true false yes no on off auto latest never embedded char gpt2 bpe-300 bpe-0 bpe--1 bpe-٣٠٠
bpe-1e9 char-cpu gpt2-125m adamw muon bf16 fp16 linear constant cosine_with_min_lr - -- ~ ~/x ~nobody/x
$HOME/x ${UNSET_NAME}/x $UNSET_NAME . .. / /dev/null /dev/zero /dev/stdin /proc/self/mem user/name
user/name@main a/b/c hf://x/y * **/* [ ] [a- {} { {a {size:char-cpu} {n_layer:1} {n_layer:1000000000}
{n_head:7} {"n_embd":1e400} {"size":[]} {vocab_size:-1} {&a:*a} {<<:1} [1] !!python/object:os.system !!binary
tensorboard wandb,none , en,,de @ user@ name@@ %s %(x)s
""".split()  # noqa: SIM905
ODD_TEXT = [
    "",
    " ",
    "\n",
    "a\nb",
    "\0",
    "a\0b",
    "\udcff",
    "a\udc80b",
    "\ud800",
    "\u202e",
    "🎉",
    "é",
    "\x1b[31m",
    "\ufeff",
]
ODD_TEXT += ["a" * 5000, "a/" * 3000, "9" * 5000, "{" * 2000, "[" * 2000, "-" * 300, '{"a": 1}', "{ROMEO}", "a b"]
ODD = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.sampled_from(ODD_TEXT), st.text(max_size=20))
SETTINGS = [spec.name for spec in dataclasses.fields(PretrainConfig)]
PATHS = {"output_dir", "init_from", "dataset", "eval_dataset", "tokenizer", "resume_from_checkpoint"}


class Faults(dict):
    """What failed, by the place in the code, with one input each."""

    @contextlib.contextmanager
    def noted(self, what: object):
        faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True, file=sys.__stderr__)
        try:
            yield
        except (UserError, RunError) as error:
            if not str(error).strip():
                self["an empty message"] = what
        except Exception as error:
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            own = [frame for frame in frames if "/hfgpt/" in frame][-1:]
            self[f"{type(error).__name__}: {str(error)[:150]} {own} {frames[-1:]}"] = what
        finally:
            faulthandler.cancel_dump_traceback_later()

    def __str__(self) -> str:
        return "\n".join(f"{fault}\n    {str(what)[:600]}" for fault, what in self.items())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Odd names are made below here."""
    for name in ("here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RANK", raising=False)


def forget_processes() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# Settings.

YAML_FILES = [
    b"", b"---\n---\n", b"- a\n- b\n", b"5", b"null", b"a: &x [*x]\n", b"seed: 1\nseed: 2\n", b"\tseed: 1\n",
    b"seed:\t1",
    bytes(range(256)), b"\xff\xfe", b"? [a]\n: b\n", b"{a: b", b"seed: !!python/object/apply:os.system [id]\n",
    b"1: 2\n",
    b"model: &m {n_layer: *m}\n", b"seed: 2024-99-99\n", b"model: {n_layer: 2024-99-99, n_head: 1:30}\n", b"~: 1\n",
    b"<<: {seed: 3}\nmax_steps: 4\n", b"<<: 5\n", b"seed: " + b"9" * 5000, b"model: {n_layer: " + b"9" * 5000 + b"}",
    b"a: " + b"[" * 3000, b"%YAML 9.9\n---\na: 1\n", b"x: 1\n" * 20_000, b"x" * 10_000_000,
    b"model: {size: {a: {b: c}}}",
    b"output_dir: ~\n", b"output_dir: ~/x\nrun_name: 1.10\nhub_language: no\n", b"seed: {}\nmax_steps: []\nmodel: 5\n",
]  # fmt: skip
FLAGS = st.lists(st.tuples(st.sampled_from([*SETTINGS, "config", "n", "", "max-steps"]), ODD), max_size=4)


@tries(suite=150)
@given(
    flags=FLAGS, content=st.one_of(st.none(), st.sampled_from(YAML_FILES), st.binary(max_size=60)), equals=st.booleans()
)
def settings_are_read(folder: Path, faults: Faults, flags, content, equals) -> None:
    argv = []
    if content is not None:
        (folder / "settings.yaml").write_bytes(content)
        argv = ["--config", str(folder / "settings.yaml")]
    for key, value in flags:
        argv += [f"--{key}={value}"] if equals else [f"--{key}", value]
    with faults.noted(argv), contextlib.redirect_stderr(io.StringIO()):
        config = PretrainConfig.from_cli({"model": "char-cpu", "sequence_length": 64, "max_steps": 2}, argv)
        json.dumps(config.to_dict(), allow_nan=False, ensure_ascii=False).encode()
        again = PretrainConfig.from_layers(json.loads(json.dumps(config.to_dict())))
        assert again == config or "$" in str(config) or "~" in str(config)


def test_settings_are_read_or_refused(tmp_path, monkeypatch, caplog):
    """In files that never end, are pipes, folders or links in circles, too."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    faults = Faults()
    for path in ("pipe", "circle", ".", "nowhere", "a" * 300):
        with faults.noted(path), pytest.raises(UserError, match="config="):
            PretrainConfig.from_cli({}, ["--config", str(tmp_path / path)])
    with contextlib.suppress(SystemExit):
        settings_are_read(tmp_path, faults)
    assert not faults, f"\n{faults}"
    caplog.text.encode()  # what is logged can be written


# Runs: what the check lets pass also trains, or is refused in one line before the first step.

EXTREMES = ["1e-30", "1e15", "9223372036854775807", "1e18", "1e12", "1e9", "0", "0.999999999", "1e-300", "65536"]
LONG = {
    "max_steps",
    "max_tokens",
    "num_train_epochs",
    "model",
    "output_dir",
    "torch_compile",
    "push_to_hub",
    "report_to",
}
RUN_FLAGS = st.dictionaries(st.sampled_from(sorted(set(SETTINGS) - LONG)), st.sampled_from(EXTREMES) | ODD, max_size=2)
MODELS = st.sampled_from([
    json.dumps({**MODEL, **change})
    for change in ({}, {}, {}, {}, {"n_layer": 10**9}, {"n_positions": 10**12}, {"n_embd": 2**40}, {"n_inner": 10**12},
                   {"layer_norm_epsilon": 1e-30}, {"initializer_range": 0.999}, {"initializer_range": 1e-30},
                   {"activation_function": "relu"}, {"attn_pdrop": 0.999999}, {"scale_attn_weights": False},
                   {"reorder_and_upcast_attn": True}, {"n_positions": 10**12, "n_layer": 10**15})
])  # fmt: skip


@tries(suite=20, part=0.2)
@given(flags=RUN_FLAGS, model=MODELS, lengths=st.sampled_from([{"max_steps": 2}, {"num_train_epochs": 0.01}]))
def a_run_trains(folder: Path, text: Path, faults: Faults, flags, model, lengths) -> None:
    argv = [f"--{key}={value}" for key, value in flags.items()]
    defaults = {
        "dataset": str(text), "tokenizer": "char", "model": model, "sequence_length": 16, "torch_compile": False,
        "per_device_train_batch_size": 2, "eval_steps": 2, "eval_tokens": 64, "logging_steps": 1, "sample_steps": 2,
        "mixed_precision": "no", "output_dir": str(folder / "run"), "mfu_peak_tflops": 1.0, **lengths,
    }  # fmt: skip
    shutil.rmtree(folder / "run", ignore_errors=True)
    forget_processes()
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with faults.noted((argv, model)), quiet[0], quiet[1]:
        config = PretrainConfig.from_cli(defaults, argv)
        pretrainer = Pretrainer(config)
        pretrainer.train()
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


def test_what_the_check_lets_pass_trains(tmp_path, text_file):
    faults = Faults()
    a_run_trains(tmp_path, text_file, faults)
    assert not faults, f"\n{faults}"


# Commands: of each part what works, and what may be odd.

TEXT = "{folder}/text.txt"
PLACES = ["{run}/checkpoint-4", "{run}/checkpoint-2", "{run}", "{run}/checkpoint-latest", "{folder}", "{folder}/pipe"]
PLACES += ["{folder}/circle", "{folder}/nowhere", "{folder}/endless", "{folder}/new/deep", TEXT, "{folder}/log"]
PLACES += ["{run}/checkpoint-4/config.json", "{run}/ckpt.pt"]
NUMBER = (st.sampled_from(["1", "2", "3", "8", "1e1"]), ODD | st.sampled_from(NUMBERS))
ENDLESS = st.sampled_from(["0", "-1", "1.5", "2e0", "x", "nan", "1e400", "9223372036854775808", "2147483649"])
PORTION = (st.sampled_from(["0.5", "1", "0.01"]), ODD | st.sampled_from(NUMBERS))
WORD, FLAG = (st.sampled_from(["a", "text", "en"]), ODD), (st.none(), st.none())
PLACE = st.one_of(st.sampled_from(PLACES), st.sampled_from(PLACES), ODD)
MODEL_FOLDER = (st.just("{run}/checkpoint-4"), PLACE)
NEW, DATA = (st.just("{folder}/new"), PLACE), (st.sampled_from([TEXT, "{folder}/*.txt", "{folder}/rows.jsonl"]), PLACE)
RUN = (st.sampled_from(["{run}", "{run}", "{run}/metrics.jsonl"]), PLACE | st.just("{other}"))
PROMPTS = (st.just("{folder}/prompts.jsonl"), st.just("{folder}/bad.jsonl") | PLACE)
CARD = (st.just("Tesla T4"), st.sampled_from(["cpu", "NVIDIA 0GB", "NVIDIA 99999999999999999999GB"]) | ODD)
Parts = dict[str, tuple[st.SearchStrategy, st.SearchStrategy]]
COMMANDS: dict[str, tuple[list, Parts, Parts]] = {  # arguments, options that are always there, others
    "generate": (
        [MODEL_FOLDER], {"--max_new_tokens": (st.just("2"), ENDLESS)},
        {"--prompt": WORD, "--prompt_file": PROMPTS, "--temperature": PORTION, "--top_k": NUMBER, "--top_p": PORTION,
         "--num_samples": (st.just("2"), ENDLESS),
         "--seed": NUMBER, "--batch_size": NUMBER, "--json": FLAG},
    ),
    "evaluate": (
        [MODEL_FOLDER], {"--dataset": DATA, "--eval_tokens": (st.just("50"), ODD)},
        {"--dataset_name": WORD, "--dataset_split": WORD, "--dataset_revision": WORD, "--text_column": WORD,
         "--json": FLAG,
         "--sequence_length": NUMBER, "--stride": NUMBER, "--by_document": FLAG, "--record": FLAG, "--limit": NUMBER,
         "--per_device_eval_batch_size": NUMBER, "--task": (st.just("hellaswag"), ODD)},
    ),
    "import": ([(st.just("{run}/ckpt.pt"), PLACE), NEW], {}, {"--tokenizer": (st.just("char"), ODD), "--text": DATA}),
    "export": (
        [MODEL_FOLDER, NEW], {}, {"--dtype": (st.sampled_from(["float16", "bfloat16"]), ODD), "--untie_head": FLAG}
    ),
    "plan": (
        [], {"--device": CARD, "--tokens_per_step": (st.just("524288"), NUMBER[1])},
        {"--model": (st.just("char-cpu"), MODELS | ODD), "--sequence_length": NUMBER, "--vocab_size": NUMBER,
         "--mixed_precision": (st.just("bf16"), ODD), "--torch_compile": (st.just("auto"), ODD), "--processes": NUMBER,
         "--gradient_checkpointing": (st.just("true"), ODD), "--optim": (st.just("muon"), ODD), "--fsdp": FLAG,
         "--memory_gib": NUMBER, "--mfu": PORTION, "--mfu_peak_tflops": NUMBER, "--max_tokens": NUMBER,
         "--price_per_hour": NUMBER, "--watts": NUMBER, "--json": FLAG, "--output": NEW},
    ),
    "audit": ([RUN], {}, {"--json": FLAG}),
    "compare": (
        [RUN, (st.just("{other}"), PLACE)], {},
        {"--output": NEW, "--tokens_per_step": NUMBER, "--json": FLAG, "--verbose": FLAG},
    ),
    "verify": ([MODEL_FOLDER], {}, {"--json": FLAG}),
    "push": (
        [MODEL_FOLDER, (st.just("me/tiny"), ODD)], {},
        {"--private": FLAG, "--revision": WORD, "--tag": WORD, "--license": WORD, "--language": WORD},
    ),
}  # fmt: skip
VALUES = [
    None,
    True,
    -1,
    0,
    0.5,
    2**62,
    2**63,
    10**400,
    -(10**30),
    float("inf"),
    float("nan"),
    "",
    "x",
    "\0",
    "a/../..",
    [],
]
VALUES += [{}, [None], [[1, 2]], {"a": None}, "\ud800", 1e300, 1e-300, "9" * 400, ["x"] * 5]
WAYS = [
    "cut",
    "remove",
    "folder",
    "circle",
    "dangling",
    "pipe",
    "endless",
    "empty",
    "flip",
    "bytes",
    "json",
    "json",
    "json",
]
WAYS += ["json", "key", "key", "lines", "nested"]
FILES = ["ckpt.pt", "run.json", "metrics.jsonl", "ledger.jsonl", "evaluations.jsonl", "checkpoint-4/config.json"]
FILES += [f"checkpoint-4/{name}" for name in ("manifest.json", "tokenizer.json", "tokenizer_config.json", "README.md")]
FILES += [f"checkpoint-4/{name}" for name in ("model.safetensors", "generation_config.json", "training_state")]
FILES += [f"checkpoint-4/training_state/{name}_state.json" for name in ("trainer", "data")]
DAMAGE = st.tuples(st.sampled_from(FILES), st.sampled_from(WAYS), st.integers(0, 10**6), st.sampled_from(VALUES))


def damage(run: Path, name: str, way: str, at: int, value: object) -> None:
    path = run / name
    content = path.read_bytes() if path.is_file() else b""
    if way in ("cut", "empty", "flip", "bytes") and path.is_file():
        place = at % max(1, len(content))
        flipped = content[:place] + bytes([content[place] ^ (1 + at % 255)]) + content[place + 1 :] if content else b""
        path.write_bytes({"cut": content[:place], "empty": b"", "flip": flipped, "bytes": b"\xff\xfe\0" * 9}[way])
    elif way in ("json", "key", "lines", "nested") and path.suffix in (".json", ".jsonl") and path.is_file():
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        chosen = at % len(lines) if lines else 0
        if way == "nested":
            lines[chosen : chosen + 1] = [b"[" * 100_000]
        elif way == "lines":
            lines.insert(chosen, json.dumps(value).encode())
        elif lines:
            lines[chosen] = json.dumps(changed(json.loads(lines[chosen]), at, value, way == "key")).encode()
        path.write_bytes(b"\n".join(lines) + b"\n" * (path.suffix == ".jsonl"))
    elif way in ("remove", "folder", "circle", "dangling", "pipe", "endless"):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if way == "folder":
            path.mkdir()
        elif way == "pipe":
            os.mkfifo(path)
        elif way != "remove":
            path.symlink_to({"circle": path.name, "dangling": "nowhere", "endless": "/dev/zero"}[way])


def changed(content, at: int, value, drop: bool):
    """`content` with one of its values, however deep, another one or left out."""
    if not isinstance(content, dict | list) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key, rest = keys[at % len(keys)], at // len(keys)
    if isinstance(content[key], dict | list) and rest % 3:
        content[key] = changed(content[key], rest // 3, value, drop)
    elif drop:
        del content[key]
    else:
        content[key] = value
    return content


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from(list(COMMANDS)))
    arguments, always, others = COMMANDS[name]
    damages = draw(st.lists(DAMAGE, min_size=1, max_size=3)) if draw(st.booleans()) and name != "plan" else []
    chosen = [*always, *draw(st.lists(st.sampled_from(list(others)), max_size=4, unique=True))]
    parts = [(None, part) for part in arguments] + [(option, {**always, **others}[option]) for option in chosen]
    odd = draw(st.sets(st.integers(0, len(parts) - 1), max_size=2, min_size=0 if damages else 1)) if parts else ()
    line = [name]
    for number, (option, part) in enumerate(parts):
        value = draw(part[number in odd])
        line += [option] if value is None else [value] if option is None else [f"{option}={value}"]
    return line, damages, draw(st.booleans())


def in_this_process(command, **_) -> subprocess.CompletedProcess:
    """What `verify` starts as a process of its own, which would take seconds."""
    out, argv, code, ours = io.StringIO(), sys.argv, 0, sys.modules["hfgpt"]
    sys.argv = command[2:]  # what follows `python -I`
    err = ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(command[2], run_name="__main__")
    except BaseException as error:
        code, err = 1, f"{type(error).__name__}: {error}"
    finally:
        sys.argv, sys.modules["hfgpt"] = argv, ours  # which it shuts out
    return subprocess.CompletedProcess(command, code, out.getvalue(), err)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a run of four steps, its text, and what else commands take."""
    folder = tmp_path_factory.mktemp("sound")
    text = "".join(f"{n * n % 97} words, line {n}: the {n % 13}th of {n // 7}.\n" for n in range(300))
    (folder / "text.txt").write_text(text)
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"no": 1}\n[]\n"x"\n{"text": "\\ud800"}\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "12"}\n{"prompt": ""}\n')
    (folder / "bad.jsonl").write_text('{"prompt": 5}\n')
    (folder / "log").write_text("".join(f"iter {n}: loss {4 - n / 10:.4f}, time 9.9ms, mfu 5.00%\n" for n in range(9)))
    config = PretrainConfig(
        output_dir=str(folder / "run"), dataset=str(folder / "text.txt"), tokenizer="bpe-300", model=MODEL,
        sequence_length=16, per_device_train_batch_size=4, max_steps=4, eval_steps=2, eval_tokens=100, save_steps=2,
        logging_steps=1, mixed_precision="no", torch_compile=False, mfu_peak_tflops=1.0,
    )  # fmt: skip
    forget_processes()
    Pretrainer(config).train()
    write_checkpoint(folder / "run" / "ckpt.pt", random_state())
    shutil.copytree(folder / "run", folder / "other", symlinks=True)
    os.mkfifo(folder / "pipe")
    (folder / "circle").symlink_to("circle")
    (folder / "endless").symlink_to("/dev/zero")
    return folder


@tries(suite=60)
@given(what=command_lines())
def a_command_ends(sound: Path, faults: Faults, monkeypatch, what) -> None:
    line, damages, is_listed = what
    run = sound / "run"
    shutil.rmtree(run, ignore_errors=True)
    for rest in sound.glob("new*"):
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
    shutil.copytree(sound / "other", run, symlinks=True)
    for one in damages:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # of what is damaged already
            damage(run, *one)
    if is_listed and (manifest := run / "checkpoint-4" / "manifest.json").is_file():  # as if it had been written so
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            files = json.loads(manifest.read_bytes())["files"]
            there = {name: manifest.parent / name for name in files if (manifest.parent / name).is_file()}
            manifest.write_text(json.dumps({"files": {name: file_facts(path) for name, path in there.items()}}))
    names = {"run": run, "other": sound / "other", "folder": sound}
    for key, path in names.items():
        line = [part.replace(f"{{{key}}}", str(path)) for part in line]
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8"),
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace"),
    )
    monkeypatch.setattr(sys, "argv", ["hfgpt", *line])
    forget_processes()
    code: object = 0
    told = json.dumps(what)
    with faults.noted(told):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code
        out.flush(), err.flush()
        printed, said = out.buffer.getvalue().decode(), err.buffer.getvalue().decode()
        if "Traceback" in said or code not in (0, 1, 2):
            where = [
                part
                for part in said.splitlines()
                if "/hfgpt/" in part and "cli.py" not in part and "ending" not in part
            ]
            faults[f"{line[0]} {code}: {said.strip().splitlines()[-1][:200]} {where[-1:]}"] = told
        elif code and not said.strip().splitlines()[-1].startswith("error: "):
            faults[f"{line[0]} {code}: no cause last: {said[-200:]}"] = told
        elif code == 0 and "--json" in line and line[0] != "generate":
            json.loads(printed, parse_constant=lambda word: faults.update({f"{line[0]} prints {word}": told}))


def test_commands_end_in_one_line(sound, monkeypatch):
    monkeypatch.setattr("hfgpt.hub.verify.subprocess.run", in_this_process)
    monkeypatch.setattr("sys.stdin", io.StringIO("text"))
    monkeypatch.setattr("hfgpt.hub.push.check_access", lambda repository: "no token")
    monkeypatch.setattr("hfgpt.retry.time.sleep", lambda seconds: None)  # there is no Hub, however long one waits
    faults = Faults()
    a_command_ends(sound, faults, monkeypatch)
    assert not faults, f"\n{faults}"
