"""Text from a Hub that fails: the same blocks as without faults, or one clear line and a checkpoint."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import FORK, completed
from hub_server import API, FILES, Faults, HubServer
from running import FORKED, TWO, Run

from hfgpt import retry
from hfgpt.checkpointing.checkpoint import find_damage
from hfgpt.data.remote import read_with_retries
from hfgpt.errors import RunError

# Reads 40 steps and prints their hashes, the end position and the retries; sleeps are cut short.
CLIENT = """
import json, sys, time
real_sleep = time.sleep
time.sleep = lambda seconds: real_sleep(min(seconds, 0.01))
import logging
logging.getLogger("hfgpt").setLevel(logging.ERROR)
from itertools import islice
from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.loader import iterate
from hfgpt.data.remote import take_retries
from hfgpt.data.stream import batch_hash, hash_blocks

settings = dict(tokenizer="bpe-300", sequence_length=32, max_steps=1, streaming=True, eval_tokens=500)
config = PretrainConfig(**{**settings, **json.loads(sys.argv[1])})
try:
    data = prepare_data(config, 16)
    events = take_retries()
    batches = list(islice(iterate(data.train, None, num_workers=config.dataloader_num_workers), 40))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}", "events": take_retries()}))
else:
    events += [event for batch in batches for event in batch.retries]
    hashes = [batch_hash(hash_blocks(batch.blocks)) for batch in batches]
    print(json.dumps({
        "hashes": hashes, "position": batches[-1].position, "events": events, "skipped": data.skipped,
        "commit": data.train.fingerprint.get("dataset.commit"),
    }))
"""


def documents(first, count):
    return [
        {
            "text": " ".join(f"document {n} says {n * k % 101}" for k in range(1 + n % 17)),
            "id": f"<{n}>",
            "score": n / 7,
        }
        for n in range(first, first + count)
    ]


def parquet(rows) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=25)
    return file.getvalue()


@pytest.fixture
def repositories():
    lines = ["\n".join(map(json.dumps, documents(n, 150))).encode() for n in (0, 150)]
    return {
        "datasets/user/fineweb": {
            "README.md": b"---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n"
            b"    path: sample/10BT/*\n---\n",
            **{f"sample/10BT/{n:03}_00000.parquet": parquet(documents(100 * n, 100)) for n in range(4)},
        },
        "datasets/user/lines": {"a.jsonl": lines[0], "b.jsonl.gz": gzip.compress(lines[1], mtime=0)},
    }


def read(hub, tmp_path, dataset="user/fineweb", environment=None, **settings):
    """What the client printed."""
    name = {"dataset_name": "sample-10BT"} if dataset == "user/fineweb" else {}
    (client := tmp_path / "client.py").parent.mkdir(exist_ok=True)
    client.write_text(CLIENT)
    done = completed(
        [FORK, str(client), json.dumps({"dataset": dataset, **name, **settings})],
        timeout=200,
        env={**os.environ, **hub.environment(tmp_path / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "1", **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["user/fineweb", "user/lines"])
def test_faults_on_a_fifth_of_the_requests_change_nothing(repositories, tmp_path, dataset):
    with HubServer(repositories) as hub:
        clean = read(hub, tmp_path, dataset)
    kinds = ["reset", "short", "truncated", "429", "500", "502", "503", "stall"]
    seen, retried, faults = set(), [], 0
    plans = [Faults(0.2, kinds, 1, f"{FILES}|{API}", repeat=2), Faults(0.5, ["short"], 2, FILES)]
    for number, plan in enumerate(plans):
        with HubServer(repositories, faults=plan, stall_seconds=2) as hub:
            found = read(hub, tmp_path / str(number), dataset, dataloader_num_workers=2)
            seen |= hub.injected.keys()
            faults += sum(hub.injected.values())
        assert "error" not in found, found
        assert found["hashes"] == clean["hashes"] and found["position"] == clean["position"], hub.injected
        retried += found["events"]
    assert len(seen) >= 3 and len(retried) >= 0.6 * faults, (len(retried), faults)
    assert all({"what", "reason", "tries", "waited_seconds"} == event.keys() for event in retried)


@pytest.mark.slow
def test_a_refusal_is_told_at_once_with_the_way_out(repositories, tmp_path):
    for kind, on, named in (
        ("404", r"GET .*002_00000", "cannot be opened"),
        ("403", FILES, "gated dataset"),
        ("401", r"/api/datasets/user/fineweb", "not usable from the Hub"),
    ):
        with HubServer(repositories, faults=Faults(1, [kind], on=on, repeat=math.inf)) as hub:
            found = read(hub, tmp_path / kind)
            refused = Counter(hub.requests)
        assert found["error"].startswith("UserError") and named in found["error"], found
        assert found["events"] == [] and max(refused.values()) == 1, refused
        assert "\n" not in found["error"]


@pytest.mark.slow
def test_a_commit_is_kept_while_the_data_set_moves_and_serves_offline(repositories, tmp_path):
    with HubServer(repositories) as hub:
        first = read(hub, tmp_path)
        download = "from huggingface_hub import snapshot_download as s; s('user/fineweb', repo_type='dataset')"
        environment = {**os.environ, **hub.environment(tmp_path / "cached")}
        subprocess.run([sys.executable, "-c", download], env=environment, check=True, capture_output=True, timeout=100)
        hub.push("datasets/user/fineweb", {"sample/10BT/009_00000.parquet": parquet(documents(900, 100))})
        moved = read(hub, tmp_path)
        pinned = read(hub, tmp_path, dataset_revision=first["commit"])
        assert moved["commit"] != first["commit"] and moved["hashes"] != first["hashes"]
        assert pinned == first
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cached")}
    cached = read(hub, tmp_path, environment=offline)
    assert cached["hashes"] == first["hashes"] and cached["commit"] == first["commit"]
    absent = read(hub, tmp_path, "user/other", environment=offline)
    assert "HF_HUB_OFFLINE is set" in absent["error"]


@pytest.mark.slow
def test_a_broken_file_on_the_hub_stops_the_run_or_is_left_out_and_counted(repositories, tmp_path):
    files = repositories["datasets/user/fineweb"]
    files["sample/10BT/001_00000.parquet"] = files["sample/10BT/001_00000.parquet"][:-300]
    with HubServer(repositories) as hub:
        stopped = read(hub, tmp_path)
        skipped = read(hub, tmp_path, on_bad_files="skip")
    assert "001_00000.parquet cannot be read" in stopped["error"]
    assert skipped["skipped"]["bad_file"] == 1 and len(skipped["hashes"]) == 40


def fineweb(launcher, folder, hub, tmp_path, *flags) -> Run:
    flags = ["--dataset", "user/fineweb", "--tokens_per_step", "512", *flags]
    flags += ["--learning_rate", "1e-3", "--min_learning_rate", "1e-4", "--save_steps", "5", "--mixed_precision", "no"]
    environment = {**hub.environment(tmp_path / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    return Run(launcher, folder, *flags, recipe="fineweb_125m", env=environment)


@pytest.mark.slow
def test_a_run_killed_twice_under_faults_trains_on_the_same_text_as_one_left_alone(repositories, tmp_path):
    with HubServer(repositories) as hub:
        whole = fineweb(FORKED, tmp_path / "whole", hub, tmp_path, "--max_steps", "30")
        whole.end()
    with HubServer(repositories, faults=Faults(0.2, ["reset", "short", "500"], 5)) as hub:
        for _ in range(2):
            run = fineweb(FORKED, tmp_path / "killed", hub, tmp_path, "--resume_from_checkpoint", "latest")
            run.wait_for_steps(8)
            run.wait_for((run.folder / "checkpoint-latest").exists)
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
            hub.push("datasets/user/fineweb", {"sample/10BT/008_00000.parquet": parquet(documents(900, 30))})
        last = max(record["step"] for record in run.records())
        steps = ["--max_steps", str(max(last + 5, 30))]
        run = fineweb(FORKED, tmp_path / "killed", hub, tmp_path, "--resume_from_checkpoint", "latest", *steps)
        said = run.end()
        assert run.process.returncode == 0, said
        assert run.ledger()[:30] == whole.ledger()
        hub.faults = None
        command = [sys.executable, "-c", "from hfgpt.cli import main; main()", "audit", str(run.folder), "--json"]
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        audit = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    facts = json.loads(audit.stdout)
    assert audit.returncode == 0 and facts["problems"] == [] and facts["steps_as_recorded"] == len(run.ledger())


@pytest.mark.slow
def test_text_that_stays_away_ends_all_processes_with_a_checkpoint(repositories, tmp_path):
    gone = []
    with HubServer(repositories, faults=lambda *_: "500" if gone else None) as hub:
        run = fineweb(TWO, tmp_path / "run", hub, tmp_path, "--stream_timeout", "15", "--save_steps", "100000")
        run.wait_for_steps(3)
        gone.append(True)
        said = run.end(seconds=200)
    assert run.process.returncode == 1
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "could not be read for" in line and "--resume_from_checkpoint latest" in line
    step = run.records()[-1]["step"]
    assert find_damage((run.folder / "checkpoint-latest").resolve()) is None
    assert (run.folder / "checkpoint-latest").resolve().name == f"checkpoint-{step}"
    assert run.records()[-1]["event"] == "end" and "could not be read" in run.records()[-1]["fault"]


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_text_that_stays_away(repositories, tmp_path):
    gone = []
    with HubServer(repositories, faults=lambda *_: "500" if gone else None) as hub:
        run = fineweb(FORKED, tmp_path / "run", hub, tmp_path, "--save_steps", "100000")
        run.wait_for_steps(3)
        gone.append(True)
        run.wait_for(lambda: "trying again" in run.errors.read_text() or "retrying" in run.errors.read_text())
        time.sleep(3)  # no blocks made ahead are left
        run.process.send_signal(signal.SIGTERM)
        said = run.end(seconds=200)
    assert run.process.returncode == 143
    assert "SIGTERM; ended after step" in said.splitlines()[-1]
    assert find_damage((run.folder / "checkpoint-latest").resolve()) is None


@pytest.mark.slow
def test_a_reader_that_is_killed_ends_the_run_with_a_checkpoint(start):
    run = start(FORKED, "--dataloader_num_workers", "1", "--save_steps", "100000")
    workers = [child for child in psutil.Process(run.process.pid).children() if child.status() != "zombie"]
    workers[-1].kill()
    said = run.end()
    assert run.process.returncode == 1
    assert "a process that reads the text was killed" in said.splitlines()[-1] and "Traceback" not in said
    step = run.records()[-1]["step"]
    assert (run.folder / "checkpoint-latest").resolve().name == f"checkpoint-{step}" and len(run.ledger()) == step


def test_a_trickle_of_bytes_is_no_reading():
    def trickle():
        for _ in range(1000):
            time.sleep(0.05)
            bytes_read.append(0)

    bytes_read: list[int] = []
    with pytest.raises(RunError, match=r"could not be read for \d+ s \(it took more than 1 s\)"):
        read_with_retries(trickle, "a file", 1)
    assert len(bytes_read) < 1000


@pytest.mark.parametrize("first_failure_seconds", [0.1, 1.4])
def test_one_stream_timeout_bounds_all_tries_together(first_failure_seconds):
    """A read that fails late and then hangs: each try gets what is left."""
    limits, tries = [], []
    real = retry.deadline

    def noted(seconds, **given):
        limits.append(seconds)
        return real(seconds, **given)

    def read():
        tries.append(time.monotonic())
        if len(tries) == 1:
            time.sleep(first_failure_seconds)
            raise ConnectionError("reset")
        for _ in range(1000):
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "deadline", noted)
        with pytest.raises(RunError, match=r"could not be read for \d s"):
            read_with_retries(read, "a file", 1.5)
    # What a try may take, counted from the beginning, is never beyond the end.
    ends = [begun - tries[0] + limit for begun, limit in zip(tries, limits, strict=True)]
    assert len(tries) >= 2 and ends == pytest.approx([1.5] * len(tries), abs=0.05)


@pytest.mark.slow
def test_each_footer_is_fetched_once_however_many_files_there_are(tmp_path):
    files = {f"data/{n:03}.parquet": parquet(documents(30 * n, 30)) for n in range(40)}
    code = """
import json, sys
from hfgpt.data.open_source import open_source
source = open_source("user/many")
for unit in source.units[::-1] + source.units:
    source.read(unit)
print(len(source.units))
"""
    with HubServer({"datasets/user/many": files}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
        )
        gets = [path for method, path, range_ in hub.requests if method == "GET" and range_]
    assert done.returncode == 0, done.stderr
    units = int(done.stdout)
    assert units == 80
    # The head of each file when it is opened, its footer, and each row group twice.
    assert len(gets) <= 40 + 40 + 2 * units, len(gets)
