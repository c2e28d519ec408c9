"""A tiny run that is killed again and again, in a fork each time, and compared with one that was left alone.

The parent must be a process that has only imported: a fork of one that has computed can hang.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from hfgpt import PretrainConfig, Pretrainer, files, links
from hfgpt.checkpointing import checkpoint, rewind, saver
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.distributed.device_peaks import Peak
from hfgpt.links import LATEST
from hfgpt.training import mfu

MAX_STEPS, SAVE_STEPS, EVAL_STEPS = 45, 3, 4
# Where a process is, as it says in memory shared with its parent: what it trains, and what its saver does.
SETTING_UP, REWINDING, TRAINING, ENDING = "setting up", "rewinding the records", "training, no save", "ending"
IDLE, WRITING, RENAMED, LINKED = "idle", "save: writing", "save: renamed, not linked", "save: linked, rotating"
PLACES = (SETTING_UP, REWINDING, TRAINING, ENDING, IDLE, WRITING, RENAMED, LINKED)
AIMS = (REWINDING, TRAINING, ENDING, WRITING, RENAMED, LINKED)
LONGEST_LIVES = (0.06, 0.15, 0.5)  # seconds
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Places:
    """Where a process is, for one that may be killed at any moment."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 2)
        self.run(SETTING_UP)
        self.saver(IDLE)

    def run(self, place: str) -> None:
        self.shared[0] = PLACES.index(place)

    def saver(self, place: str) -> None:
        self.shared[1] = PLACES.index(place)

    def within_save(self, place: str) -> None:
        """The saver's place if it is at work: a run that resumes may do the same by itself."""
        if PLACES[self.shared[1]] != IDLE:
            self.saver(place)

    def now(self) -> str:
        saver = PLACES[self.shared[1]]
        return PLACES[self.shared[0]] if saver == IDLE else saver


@dataclass
class Summary:
    """What befell the runs of one torture."""

    optim: str
    killed: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    ends: int = 0
    starts: int = 0
    looks: int = 0
    moved: int = 0
    seconds: float = 0.0

    def in_a_save(self) -> int:
        return sum(self.killed[place] for place in (WRITING, RENAMED, LINKED))

    def lines(self) -> list[str]:
        kills = self.killed.total()
        return [
            f"{self.optim}: {kills} kills, {self.starts} starts, {self.ends} runs to their end, {self.seconds:.0f} s",
            *(f"  {self.killed[place]:4} {place}" for place in PLACES if place != IDLE),
            f"  {self.in_a_save()} of {kills} inside a save; after {self.unfinished} an unfinished folder lay there",
            f"  checkpoint-latest was whole after each kill and in {self.looks:,} looks at the living run "
            f"({self.moved:,} more saw it move and could not judge)",
            f"  weights, optimizer, text position, {MAX_STEPS} losses, evaluations, ledger, files: equal",
        ]


class Process:
    """`work` in a fork that leads a group of its own; its output goes to `log`."""

    def __init__(self, work: Callable[[], None], log: Path) -> None:
        self.log = log
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            code = 1
            try:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]

    def expect_none_left(self, seconds: float = 60) -> None:
        """Its workers, now children of this process, end by themselves."""
        until = time.monotonic() + seconds
        while True:
            try:
                pid, _ = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                assert time.monotonic() < until, "a worker outlived its run"
                time.sleep(0.001)

    def expect_success(self) -> None:
        assert self.status == 0, f"the run failed:\n{self.log.read_text()[-4000:]}"


def torture(folder: Path, kills: int, seed: int, optim: str) -> Summary:
    """Kill runs in `folder` that many times, each until it has ended, and check all that is promised."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    torch.set_num_threads(1)
    began, rng, summary = time.monotonic(), random.Random(seed), Summary(optim)
    documents = folder / "documents"
    write_documents(documents)
    reference, log = RunFolder(folder / "alone" / "run"), folder / "log"
    alone = Process(lambda: train(settings(reference.path, documents, optim, 0)), log)
    while not alone.ended():
        time.sleep(0.01)
    alone.expect_success()
    while summary.killed.total() < kills:
        run = RunFolder(folder / f"killed-{summary.ends}" / "run")
        while not killed_or_ended(run, documents, kills, rng, summary, log):
            pass
        summary.ends += 1
        assert not (found := differences(reference, run)), f"{run.path}: " + "; ".join(found)
    assert summary.in_a_save() >= kills // 5, summary.lines()  # of six kills one, as few land where they aim
    summary.seconds = time.monotonic() - began
    return summary


def killed_or_ended(
    run: RunFolder, documents: Path, kills: int, rng: random.Random, summary: Summary, log: Path
) -> bool:
    """Start the run once more and kill it at some moment; whether it came to its end before that."""
    places, config = Places(), settings(run.path, documents, summary.optim, rng.randrange(2))
    pauses = random.Random(rng.random())
    reachable = [aim for aim in AIMS if aim != REWINDING or run.metrics.exists()]
    aim, life = rng.choice([None, *reachable]), rng.choice(LONGEST_LIVES) * rng.random()
    saves, after_aim = rng.randrange(3), rng.choice((0.0, 0.02)) * rng.random()
    spared = summary.killed.total() == kills

    def work() -> None:
        slow_down(places, pauses)
        train(config, Tell(places))

    process, last = Process(work, log), places.now()
    summary.starts += 1
    deadline = None if aim or spared else time.monotonic() + life
    while not process.ended() and (deadline is None or time.monotonic() < deadline):
        look(run, summary)
        now = places.now()
        if now != last and now == aim and deadline is None and not spared:
            saves -= 1
            if saves < 0 or aim in (REWINDING, ENDING):
                deadline = time.monotonic() + after_aim
        last = now
    process.kill()
    process.expect_none_left()
    assert (fault := latest_fault(run)) is None, f"{run.path}: killed {places.now()}: {fault}"
    if process.status == signal.SIGKILL:
        summary.killed[places.now()] += 1
        summary.unfinished += any(run.path.glob(".checkpoint-*.tmp"))
        return False
    process.expect_success()
    return True


def look(run: RunFolder, summary: Summary) -> None:
    """Judge what `latest` points at while it does: where it has moved meanwhile, rotation may take the old one."""
    before = target(run)
    fault = latest_fault(run)
    if target(run) == before:
        assert fault is None, f"{run.path}: {fault}"
        summary.looks += before is not None
    else:
        summary.moved += 1


def target(run: RunFolder) -> str | None:
    link = run.path / LATEST
    return os.readlink(link) if link.is_symlink() else None


def latest_fault(run: RunFolder) -> str | None:
    """What is wrong with the folder that `latest` points at; there is none before the first checkpoint."""
    if (name := target(run)) is None:
        return f"no {LATEST} beside checkpoints that were linked" if len(run.checkpoints()) > 1 else None
    fault = checkpoint.find_damage(run.path / name)
    return f"{LATEST} points at {name}: {fault}" if fault else None


def settings(folder: Path, documents: Path, optim: str, workers: int) -> PretrainConfig:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return PretrainConfig(
        output_dir=str(folder),
        model={"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, **dropout},
        dataset=str(documents),
        tokenizer="bpe-300",
        streaming=True,
        dataloader_num_workers=workers,
        sequence_length=16,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        optim=optim,
        learning_rate=1e-2,
        warmup_steps=2,
        max_steps=MAX_STEPS,
        logging_steps=1,
        eval_steps=EVAL_STEPS,
        eval_tokens=100,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        resume_from_checkpoint="latest",
        mixed_precision="no",
        torch_compile=False,
    )


def write_documents(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part in range(3):
        texts = [" ".join(f"document {n} says {n * k % 101}" for k in range(1 + n % 9)) for n in range(200)]
        lines = [json.dumps({"text": f"part {part}: {text}"}) + "\n" for text in texts]
        (folder / f"{part}.jsonl").write_text("".join(lines))


def train(config: PretrainConfig, *told: TrainerCallback) -> None:
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])  # one thread: a step is too short for more
    mfu.device_peak = lambda *_: Peak(None, "not measured: it takes longer than the run")
    Pretrainer(config, told).train()


class Tell(TrainerCallback):
    """Tells the parent when training begins and ends."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def on_train_begin(self, args, state, control, **kwargs):
        self.places.run(TRAINING)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            self.places.run(ENDING)


def slow_down(places: Places, rng: random.Random) -> None:
    """Have this process tell where it is, and pause at random around each thing it does to the run folder."""
    share = rng.choice((0.0, 0.2))

    def pause(share: float) -> None:
        if rng.random() < share:
            time.sleep(0.02 * rng.random())

    def pausing(function: Callable[..., Any], share: float = share, place: str | None = None) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            pause(share)
            result = function(*args, **kwargs)
            if place:
                places.within_save(place)
            pause(share)
            return result

        return paused

    def telling(function: Callable[..., Any], tell: Callable[[str], None], begun: str, done: str) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            tell(begun)
            result = function(*args, **kwargs)
            tell(done)
            return result

        return told

    to_checkpoint, aside = pausing(files.rename, 1.0, RENAMED), pausing(files.rename)
    files.os = SimpleNamespace(**{**vars(os), "fsync": pausing(os.fsync), "replace": pausing(os.replace, 0.5)})
    files.shutil = SimpleNamespace(rmtree=pausing(shutil.rmtree))
    links.replace = pausing(files.replace, 1.0, LINKED)
    checkpoint.rename = lambda old, new: (aside if new.name.startswith(".") else to_checkpoint)(old, new)
    saver.write_checkpoint = telling(saver.write_checkpoint, places.saver, WRITING, IDLE)
    rewind.rewind_records = telling(rewind.rewind_records, places.run, REWINDING, TRAINING)


def differences(alone: RunFolder, killed: RunFolder) -> list[str]:
    """In what the end of one run is not that of the other; run id, clock readings and folder apart."""
    found = []
    left, expected = ({path.name for path in run.path.iterdir()} for run in (killed, alone))
    if left != expected:
        found.append(f"files in the run folder: {sorted(left)} instead of {sorted(expected)}")
    if target(killed) != target(alone):
        found.append(f"{LATEST} points at {target(killed)}")
    ours, theirs = (run.checkpoint(MAX_STEPS) for run in (alone, killed))
    names = {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()}
    if names != {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}:
        return [*found, f"files of {theirs.name}"]
    different = [name for name in sorted(names) if content(ours / name) != content(theirs / name)]
    unlike = {Path(checkpoint.MANIFEST), Path(checkpoint.STATE, "trainer_state.json")}
    found += [f"{theirs.name}/{name}" for name in different if name not in unlike]
    if trainer_state(ours) != trainer_state(theirs):
        found.append("trainer_state.json")
    for key in ("loss", "eval_loss"):
        if records(alone, key) != records(killed, key):
            found.append(f"{key} in {killed.metrics.name}")
    steps = [json.loads(line)["step"] for line in killed.metrics.read_text().splitlines()]
    if steps != sorted(steps) or [record["step"] for record in records(killed, "loss")] != [*range(1, MAX_STEPS + 1)]:
        found.append(f"steps of {killed.metrics.name}")
    if alone.ledger.read_bytes() != killed.ledger.read_bytes():
        found.append(killed.ledger.name)
    return found


def content(path: Path) -> bytes:
    """What the file holds, without the clock readings of a card."""
    text = path.read_bytes()
    return re.sub(rb"(?m)^\| seconds of training .*$", b"", text) if path.suffix == ".md" else text


def trainer_state(folder: Path) -> dict[str, Any]:
    state = checkpoint.read_state(folder, "trainer_state")
    del state["evaluation"]["eval_seconds"]
    return {key: value for key, value in state.items() if key not in ("run_id", "wall_seconds", "config")}


def records(run: RunFolder, key: str) -> list[dict[str, Any]]:
    """The records with `key`, without what is read off a clock or the memory in use."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    measured = ("time", "wall_seconds", "step_seconds", "tokens_per_second", "memory_bytes", "eval_seconds")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines if key in line]
