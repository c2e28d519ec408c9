"""Public sets of tokens by name, in the layouts that they have on the Hub, from a Hub on loopback."""

from __future__ import annotations

import io
import json
import os
import zipfile

import pytest
from forked import FORK, completed
from hub_server import Faults, HubServer
from token_files import STATED, before_each, files, header, parquet

# Reads 20 steps of each set in the arguments, and prints their hashes and what it knows of the set.
CLIENT = """
import json, logging, sys, time
real_sleep = time.sleep
time.sleep = lambda seconds: real_sleep(min(seconds, 0.01))
logging.getLogger("hfgpt").setLevel(logging.ERROR)
from itertools import islice
from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data
from hfgpt.data.formats.tokens import reading
from hfgpt.data.loader import iterate
from hfgpt.data.stream import batch_hash
reading.SPAN_TOKENS = 2000
for settings in json.loads(sys.argv[1]):
    config = PretrainConfig(**{**dict(sequence_length=32, max_steps=1, streaming=True), **settings})
    try:
        data = prepare_data(config, 8)
        batches = list(islice(iterate(data.train, None, num_workers=settings.get("dataloader_num_workers", 0)), 20))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        continue
    print(json.dumps({
        "hashes": [batch_hash(batch.blocks) for batch in batches], "description": data.description,
        "validation": data.validation.tolist(), "fingerprint": data.train.fingerprint,
    }))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from hfgpt.data.tokenization import load_tokenizer, save_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(load_tokenizer("bpe-300", lambda: [f"words{n * n}" for n in range(999)], 64), folder)
    return str(folder)


def documents(first, count):
    return [[1 + n * k % 290 for k in range(1, 2 + n * 7 % 60)] for n in range(first, first + count)]


def named(prefix, size):
    """llm.c's shards under the names of a public set: one of validation, and two that a document crosses."""
    shards = {"val_000000": before_each(documents(900, 10))}
    ids = before_each(documents(0, size))
    shards |= {"train_000001": ids[: len(ids) // 2 + 3], "train_000002": ids[len(ids) // 2 + 3 :]}
    return {
        "README.md": b"---\nlicense: mit\n---\n",
        **{
            f"{prefix}_{name}.bin": header(20240520, 1, len(ids)) + b"".join(i.to_bytes(2, "little") for i in ids)
            for name, ids in shards.items()
        },
    }


SETS = {
    "kjj0/fineweb10B-gpt2": (named("fineweb", 120), {}),
    "kjj0/finewebedu10B-gpt2": (named("finewebedu", 130), {}),
    "karpathy/fineweb-edu-100B-gpt2-token-shards": (named("edu_fineweb", 140), {}),
    "apollo-research/Skylion007-openwebtext-tokenizer-gpt2": (
        {f"data/train-0000{n}-of-00002.parquet": parquet(documents(200 * n, 200), is_packed=True) for n in range(2)},
        STATED["column"],
    ),
    "user/megatron": (files("megatron", documents(0, 200)), {}),
    "user/datatrove": (files("datatrove", documents(0, 200)), {}),
}


def read(hub, folder, runs):
    (client := folder / "client.py").parent.mkdir(exist_ok=True)
    client.write_text(CLIENT)
    environment = {**os.environ, **hub.environment(folder / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    done = completed([FORK, str(client), json.dumps(runs)], timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_public_sets_by_name_and_by_range_requests(tmp_path, tokenizer):
    runs = [{"dataset": name, "tokenizer": tokenizer, **stated} for name, (_, stated) in SETS.items()]
    repositories = {f"datasets/{name}": content for name, (content, _) in SETS.items()}
    with HubServer(repositories) as hub:
        found = dict(zip(SETS, read(hub, tmp_path, runs), strict=True))
        assert not any("error" in one for one in found.values()), found
        whole = [path for _, path, range_ in hub.requests if path.endswith((".bin", ".ds")) and not range_]
        assert not [path for method, path, _ in hub.requests if method == "GET" and path in whole]
        [again] = read(hub, tmp_path, [{**runs[0], "dataset_split": "validation", "eval_tokens": 9}])
        assert "1 file," in again["description"][0]
    for name, one in found.items():
        if name.startswith(("kjj0", "karpathy")):
            assert one["validation"] == before_each(documents(900, 10))
            assert one["fingerprint"]["held_out"].endswith("_val_000000.bin")
        else:
            assert one["validation"][-20:] == (before_each(documents(0, 400 if "apollo" in name else 200)))[-20:]
        assert one["fingerprint"]["dataset.commit"] and "ready tokens" in one["description"][0]


@pytest.mark.slow
def test_faults_are_waited_out(tmp_path, tokenizer):
    runs = [{"dataset": name, "tokenizer": tokenizer} for name in ("kjj0/fineweb10B-gpt2", "user/megatron")]
    repositories = {f"datasets/{run['dataset']}": SETS[run["dataset"]][0] for run in runs}
    with HubServer(repositories) as hub:
        expected = read(hub, tmp_path / "clean", runs)
    plan = Faults(0.3, ["reset", "short", "truncated", "429", "500"], 1, repeat=2)
    with HubServer(repositories, faults=plan) as hub:
        found = read(hub, tmp_path / "faulty", [{**run, "dataloader_num_workers": 2} for run in runs])
        assert hub.injected.total() > 5
    assert [one.get("hashes") for one in found] == [one["hashes"] for one in expected], found


def test_a_hub_set_that_is_damaged_is_refused(tmp_path, tokenizer):
    content = named("s", 50)
    shorter = {**content, "s_train_000002.bin": content["s_train_000002.bin"][:-2]}
    beyond = {**content, "s_train_000002.bin": content["s_train_000002.bin"][:-2] + b"\x2c\x01"}
    archive = io.BytesIO()  # as torch.save writes
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", bytes(99))
    no_bin = {key: value for key, value in files("megatron", documents(0, 20)).items() if key.endswith("idx")}
    sets = {"a": shorter, "b": beyond, "c": no_bin, "d": {"model.bin": archive.getvalue()}}
    expected = ["its header says", "is id 300", "needs the tokens set_text_document.bin", "zip archive"]
    with HubServer({f"datasets/user/{name}": one for name, one in sets.items()}) as hub:
        found = read(hub, tmp_path, [{"dataset": f"user/{name}", "tokenizer": tokenizer} for name in sets])
    for one, part in zip(found, expected, strict=True):
        assert part in one["error"] and one["error"].startswith(("UserError", "BadFile")) and "\n" not in one["error"]
