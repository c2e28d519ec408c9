"""The test hub's faults and commits, as the unmodified client meets them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from hub_server import API, FILES, Faults, HubServer

REPOSITORY = "datasets/user/corpus"
CLIENT = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download

def read(path):
    with HfFileSystem().open(path, "rb", block_size=2**16, cache_type="none") as file:
        return len(file.read(1000))

def download(name):
    return len(open(hf_hub_download("user/corpus", name, repo_type="dataset"), "rb").read())

def sha(name):
    return HfApi().dataset_info(name).sha

def attempt(call):
    start = time.monotonic()
    try:
        result = {"read": read, "download": download, "sha": sha}[call[0]](call[1])
    except Exception as error:
        result = type(error).__name__
    return result, time.monotonic() - start

with ThreadPoolExecutor(16) as pool:
    print(json.dumps(list(pool.map(attempt, json.loads(sys.argv[1])))))
"""


def client(hub, home, calls, **environment):
    """[result or name of the exception, seconds] of each call, all made at once by one process."""
    run = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps(calls)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **hub.environment(home), **environment},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_plan_depends_on_the_seed_and_the_request_alone():
    requests = [("GET", "/datasets/a/b/resolve/main/f", f"bytes={n}-{n + 9}") for n in range(1000)]
    kinds = ["reset", "500"]
    one, two, other = (Faults(0.2, kinds, seed) for seed in (1, 1, 2))
    first = [one(*request) for request in requests]
    assert first == [two(*request) for request in reversed(requests)][::-1]
    assert first != [other(*request) for request in requests]
    assert 150 < sum(kind is not None for kind in first) < 250 and {*first} == {None, *kinds}
    assert not any(one(*request) for request in requests)  # the second time, each is served
    assert one("HEAD", *requests[0][1:]) is one("GET", "/api/datasets/a/b", "") is None
    thrice, forever = Faults(1, ["500"], repeat=3), Faults(1, ["500"], repeat=math.inf)
    assert [thrice(*requests[0]) for _ in range(5)] == ["500"] * 3 + [None, "500"]
    assert [forever(*requests[0]) for _ in range(5)] == ["500"] * 5


@pytest.mark.slow
def test_each_fault_is_what_it_says(tmp_path):
    retried = ["reset", "truncated", "stall", "429", "500", "502", "503"]
    names = [*retried, "short", "404", "403"]
    plans = {name: Faults(1, [name], on=f"{FILES}.*/{name}") for name in names}
    with HubServer(
        {REPOSITORY: dict.fromkeys([*names, "sound"], bytes(range(250)) * 4)},
        faults=lambda method, path, range_: plans.get(path.rpartition("/")[2], lambda *_: None)(method, path, range_),
        stall_seconds=60,
    ) as hub:
        calls = [("read", f"{REPOSITORY}/{name}") for name in names]
        results = client(hub, tmp_path, calls, HF_HUB_DOWNLOAD_TIMEOUT="1")
        gets = Counter(path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET")
    found = dict(zip(names, results, strict=True))
    for name in retried:
        assert found[name][0] == 1000 and found[name][1] > 1 and gets[name] == 2, (name, found, gets)
    assert found["429"][1] > 2  # waits the second that it is told, and one more
    assert found["short"][0] == 500 and gets["short"] == 1
    assert found["404"][0].endswith("EntryNotFoundError") and gets["404"] == 1
    assert found["403"][0] == "GatedRepoError" and gets["403"] == 1
    assert hub.injected == Counter(names)
    # Half of the body went out before a fault of the connection; "stall" is counted when it ends.
    assert 3 * 500 + 7 * 1000 <= hub.bytes_sent <= 3 * 500 + 8 * 1000


@pytest.mark.slow
def test_faults_for_good_and_of_the_api(tmp_path):
    api, gated = Faults(1, ["429"], on=API), Faults(1, ["403"], on="/resolve/.*/gated", repeat=math.inf)
    with HubServer(
        {REPOSITORY: {"gated": b"x", "sound": b"x" * 9}},
        token="hf_secret",
        faults=lambda *request: api(*request) or gated(*request),
    ) as hub:
        calls = [("sha", "user/corpus"), ("download", "gated"), ("download", "sound")]
        info, denied, sound = client(hub, tmp_path, calls)
        assert (info[0], denied[0], sound[0]) == ("HfHubHTTPError", "GatedRepoError", 9)
        assert client(hub, tmp_path, calls[:1])[0][0] == hub.commit(REPOSITORY)
        assert client(hub, tmp_path, calls[:1], HF_TOKEN="hf_other")[0][0] == "HfHubHTTPError"
    assert hub.injected == Counter({"429": 1, "403": 1})


@pytest.mark.slow
def test_a_commit_stays_served_after_a_push(tmp_path):
    with HubServer({REPOSITORY: {"a": b"old", "b": b"stays"}}) as hub:
        before = hub.commit(REPOSITORY)
        after = hub.push(REPOSITORY, {"a": b"newer", "c": b"new file", "b": None})
        calls = [
            ("read", f"{REPOSITORY}{revision}/{name}") for revision in (f"@{before}", "") for name in ("a", "b", "c")
        ]
        results = client(hub, tmp_path, [*calls, ("sha", "user/corpus")])
        assert hub.push(REPOSITORY, {"a": b"old"}) not in (before, after)
    assert [result for result, _ in results] == [3, 5, "FileNotFoundError", 5, "FileNotFoundError", 8, after]
