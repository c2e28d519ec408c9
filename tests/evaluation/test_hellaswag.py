"""HellaSwag against a scorer of its own: one text at a time, no padding, stock GPT-2."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from conftest import SHARED
from forked import completed
from hub_server import HubServer
from running import FORKED_TWO, ROOT
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers import GPT2LMHeadModel as StockGPT2

from hfgpt.data.tokenization import load_tokenizer
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import RunError, UserError
from hfgpt.evaluation.hellaswag import hellaswag
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

REAL, TOKENIZER = SHARED / "hellaswag" / "hellaswag_val_100.jsonl", SHARED / "gpt2_tokenizer"
POSITIONS = 48
WORDS = "the a man woman dog ball throws takes runs sits walks on under of roof river and then slowly again"


def made_up_rows(count: int = 30) -> list[dict]:
    """Of different lengths, some too long for the model; with the further fields of the real ones."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS.split()) for _ in range(draw.randint(least, most)))

    return [
        {
            "ind": n,
            "ctx": words(2, 40),
            "endings": [words(1, 12) + "." for _ in range(4)],
            "label": str(draw.randrange(4)) if n % 2 else draw.randrange(4),
            "split": "val",
        }
        for n in range(count)
    ]


def written(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def new_tokenizer():
    return load_tokenizer("bpe-300", lambda: [WORDS], POSITIONS)


def new_model(rows: int, positions: int = POSITIONS) -> StockGPT2:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": positions, "vocab_size": rows}
    return StockGPT2(GPT2Config(**sizes, initializer_range=0.3, bos_token_id=0, eos_token_id=0)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer()


@pytest.fixture
def source(tmp_path) -> str:
    return written(tmp_path / "rows.jsonl", made_up_rows())


@functools.cache
def met() -> Ranks:
    host = Ranks(60.0)
    host.rendezvous()
    return host


def scored(model, tokenizer, source, batch_size=7, **options):
    options |= {"ranks": met(), "accelerator": Accelerator(cpu=True)}
    options["ranks"].connect()
    return hellaswag(model, tokenizer, source, batch_size=batch_size, **options)


@torch.no_grad()
def independent(model, tokenizer, rows: list[dict]) -> dict[str, float]:
    """The results, one text at a time, of a stock model that has a row for each entry of the tokenizer or more."""
    positions = model.config.max_position_embeddings
    right_by_mean, right_by_sum, cropped = [], [], 0
    for row in rows:
        sums, means = [], []
        for ending in row["endings"]:
            context, continuation = tokenizer(row["ctx"]).input_ids, tokenizer(" " + ending).input_ids
            ids = context + continuation
            if len(ids) > positions:
                cropped += 1
                ids = ids[len(ids) - positions :]
            log_probabilities = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            first = max(len(ids) - len(continuation), 1)
            total = 0.0
            for place in range(first, len(ids)):
                total -= log_probabilities[place - 1, ids[place]].item()
            sums.append(total)
            means.append(total / (len(ids) - first))
        label = int(row["label"])
        right_by_mean.append(min(range(4), key=means.__getitem__) == label)
        right_by_sum.append(min(range(4), key=sums.__getitem__) == label)
    norm, plain = torch.tensor(right_by_mean).double(), torch.tensor(right_by_sum).double()
    return {
        "examples": len(rows),
        "accuracy_norm": norm.mean().item(),
        "accuracy_norm_stderr": norm.std().item() / len(rows) ** 0.5,
        "accuracy": plain.mean().item(),
        "accuracy_stderr": plain.std().item() / len(rows) ** 0.5,
        "cropped": cropped,
    }


def same(found: dict, expected: dict) -> bool:
    return {key: found[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 1000])
def test_equals_a_scorer_of_one_text_at_a_time(tokenizer, source, batch_size):
    stock = new_model(len(tokenizer))
    expected = independent(stock, tokenizer, made_up_rows())
    assert expected["cropped"] > 0 and expected["accuracy"] != expected["accuracy_norm"]
    ours = GPT2LMHeadModel(stock.config)
    ours.load_state_dict(stock.state_dict())
    for model in (stock, ours.train()):
        found = scored(model, tokenizer, source, batch_size)
        assert same(found, expected) and found["padded_rows"] == 0
    assert ours.training  # left as it was
    assert found["dataset"] == "rows.jsonl" and "dataset_revision" not in found


def test_any_causal_model_of_transformers(tokenizer, source, tmp_path):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    assert same(scored(model, tokenizer, source), independent(model, tokenizer, made_up_rows()))


def test_padded_rows_take_part_and_are_counted(tokenizer, source):
    model = new_model(len(tokenizer) + 20)
    with torch.no_grad():
        model.transformer.wte.weight[len(tokenizer) :] *= 50  # they would take nearly all the mass
    found = scored(model, tokenizer, source)
    assert same(found, independent(model, tokenizer, made_up_rows())) and found["padded_rows"] == 20
    with pytest.raises(UserError, match="entries and the model"):
        scored(new_model(len(tokenizer) - 1), tokenizer, source)


def test_an_ending_longer_than_the_model_is_scored_as_far_as_it_has_context(tokenizer, source):
    model = new_model(len(tokenizer), positions=6)
    expected = independent(model, tokenizer, made_up_rows())
    assert expected["cropped"] > 50 and same(scored(model, tokenizer, source), expected)


def test_the_first_examples_alone(tokenizer, source):
    model = new_model(len(tokenizer))
    assert same(scored(model, tokenizer, source, limit=9), independent(model, tokenizer, made_up_rows()[:9]))
    one = scored(model, tokenizer, source, limit=1)
    assert one["examples"] == 1 and one["accuracy_stderr"] is None
    for options in ({"limit": 0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="=0: at least 1"):
            scored(model, tokenizer, source, **options)


def test_a_parquet_file_and_a_folder_of_several_files(tokenizer, tmp_path):
    model, rows = new_model(len(tokenizer)), made_up_rows()
    folder = tmp_path / "rows"
    folder.mkdir()
    labelled = [{**row, "label": str(row["label"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(labelled[:11]), folder / "a.parquet")
    written(folder / "b.jsonl", rows[11:])
    found = scored(model, tokenizer, str(folder))
    assert same(found, independent(model, tokenizer, rows)) and found["dataset"] == "rows"


ROW = {"ctx": "the man", "endings": ["sits.", "runs.", "walks.", "throws."], "label": "3"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "4"}, r"row 2: label is '4'; it must be 0 to 3$"),
        ({"label": ""}, "row 2: label is ''.*test split"),
        ({"label": None}, "row 2: label is None"),
        ({"label": True}, "row 2: label is True"),
        ({"ctx": " "}, "row 2: ctx is ' '"),
        ({"ctx": "\ud800"}, "row 2: ctx is "),
        ({"ctx": 3}, "row 2: ctx is 3"),
        ({"endings": ["a", "b", "c"]}, "row 2: endings is .*4 texts"),
        ({"endings": ["a", "b", "c", ""]}, "row 2: endings is "),
        ({"endings": "abcd"}, "row 2: endings is 'abcd'"),
        ({"endings": ["a" * 500] * 3}, r"row 2: endings is .{60}; it must"),
    ],
)
def test_a_broken_row_is_named(tokenizer, tmp_path, changes, message):
    source = written(tmp_path / "rows.jsonl", [ROW, {**ROW, **changes}])
    with pytest.raises(UserError, match=message) as caught:
        scored(new_model(len(tokenizer)), tokenizer, source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no examples"),
        ("\n \n", "has no examples"),
        (json.dumps(ROW) + "\n\n{nonsense\n", "row 3: not JSON"),
        (json.dumps(ROW) + "\n[1]\n", "row 2: not a JSON object"),
        (json.dumps({"text": "a", "label": 1}), "row 1: has no ctx, endings; its fields are text, label"),
        ("<html>", "rows.jsonl is a web page"),
    ],
)
def test_a_broken_file_is_named(tokenizer, tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        scored(new_model(len(tokenizer)), tokenizer, str(tmp_path / "rows.jsonl"))
    assert "\n" not in str(caught.value)


def test_other_files_are_named(tokenizer, tmp_path):
    model = new_model(len(tokenizer))
    (tmp_path / "rows.txt").write_text("text")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not for long")
    (tmp_path / "latin.jsonl").write_bytes(b'{"ctx": "\xe9"}')
    messages = {"rows.txt": "no rows", "rows.parquet": "cannot be read", "latin.jsonl": "not a JSON object"}
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            scored(model, tokenizer, str(tmp_path / name))
    with pytest.raises(UserError, match=r"did you mean .*rows.txt"):
        scored(model, tokenizer, str(tmp_path / "row.txt"))


def test_text_that_a_tokenizer_of_characters_would_drop_is_named(tmp_path):
    tokenizer = load_tokenizer("char", lambda: ["the man sits runs walks throw."], POSITIONS)
    model = new_model(len(tokenizer))
    rows = [ROW, {**ROW, "endings": ["is 7.", *ROW["endings"][1:]]}]
    assert scored(model, tokenizer, written(tmp_path / "one.jsonl", rows[:1]))["examples"] == 1
    with pytest.raises(UserError, match="row 2: the tokenizer has no '7'"):
        scored(model, tokenizer, written(tmp_path / "two.jsonl", rows))


def test_a_loss_that_is_not_finite_is_no_accuracy(tokenizer, source):
    model = new_model(len(tokenizer))
    with torch.no_grad():
        model.transformer.ln_f.weight[:] = float("nan")
    with pytest.raises(RunError, match="row 1: the loss is not finite"):
        scored(model, tokenizer, source)


FOLDERS = [str(Path(__file__).parent), str(ROOT / "tests")]
TWO_PROCESSES = """
import json, os, sys
sys.path[:0] = {folders!r}
import torch
from test_hellaswag import UserError, new_model, new_tokenizer, scored
tokenizer = new_tokenizer()
model = new_model(len(tokenizer))
found = []
for source, limit in json.loads(sys.argv[1]):
    try:
        found.append(scored(model, tokenizer, source, limit=limit))
    except UserError as error:
        found.append(str(error))
with open(f"found-{{os.environ['RANK']}}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()  # else a process may be aborted at its end
"""


@pytest.mark.slow
def test_two_processes_are_one(tokenizer, source, tmp_path):
    model = new_model(len(tokenizer))
    broken = written(tmp_path / "broken.jsonl", [ROW, {}])
    asked = [(source, None), (source, 7), (source, 1), (broken, None)]
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(folders=FOLDERS))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*FORKED_TWO, str(script), json.dumps(asked)]
    done = completed(command, environment, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = [scored(model, tokenizer, source, limit=limit) for source, limit in asked[:3]]
    for rank in range(2):
        *found, refused = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert [{**one, "seconds": 0} for one in found] == [{**one, "seconds": 0} for one in alone]
        assert "row 2: has no ctx, endings, label" in refused


FROM_THE_HUB = """
import json, sys
sys.path[:0] = {folders!r}
from test_hellaswag import new_model, new_tokenizer, scored
tokenizer = new_tokenizer()
print("found " + json.dumps(scored(new_model(len(tokenizer)), tokenizer, None)))
"""


@pytest.mark.slow
def test_from_the_hub(tokenizer, tmp_path):
    rows = [{**row, "label": str(row["label"])} for row in made_up_rows()]
    files = {}
    for split, part in (("train", rows[:1]), ("validation", rows)):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "rows.parquet")
        files[f"data/{split}-00000-of-00001.parquet"] = (tmp_path / "rows.parquet").read_bytes()
    with HubServer({"datasets/Rowan/hellaswag": files}) as server:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **server.environment(tmp_path / "home")}
        command = [sys.executable, "-c", FROM_THE_HUB.format(folders=FOLDERS)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        commit = server.commit("datasets/Rowan/hellaswag")
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    assert same(found, independent(new_model(len(tokenizer)), tokenizer, made_up_rows()))
    place = (found["dataset"], found["dataset_split"], found["dataset_revision"])
    assert place == ("Rowan/hellaswag", "validation", commit)


@pytest.mark.skipif(not REAL.exists(), reason="shared/data/hellaswag is not here")
def test_real_rows():
    tokenizer = load_tokenizer(str(TOKENIZER), lambda: (), 1024)
    model = new_model(len(tokenizer), positions=1024)
    rows = [json.loads(line) for line in REAL.read_text(encoding="utf-8").splitlines()]
    found = scored(model, tokenizer, str(REAL), 33)
    assert found["examples"] == 100 and same(found, independent(model, tokenizer, rows))


def test_special_tokens_in_a_text_stay_text_and_what_has_no_token_is_counted(tmp_path):
    from kinds import KINDS

    row = {"ctx": "what say you </s>", "endings": ["Item", "costs </s>", "the é", "you"], "label": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = load_tokenizer(KINDS["unigram"](tmp_path / "tokenizer"), lambda: (), POSITIONS)
    found = scored(new_model(len(tokenizer)), tokenizer, str(tmp_path / "rows.jsonl"))
    assert found["not_represented"]["unknown_tokens"] > 0
    tokenizer = load_tokenizer("bpe-300", lambda: [WORDS + " </s>"], POSITIONS)
    assert "not_represented" not in scored(new_model(len(tokenizer)), tokenizer, str(tmp_path / "rows.jsonl"))
