"""A checkpoint in the tools of others: in this environment, and in one of older packages where one is named.

    python -m venv older && older/bin/pip install torch 'transformers==4.57.*' 'lm-eval[hf]' gguf
    HFGPT_OTHER_PYTHON=older/bin/python pytest -n0 -rs tests/hub/test_elsewhere.py

What a tool would need and is not installed is skipped, and -rs says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from running import trained_on_documents

from hfgpt.distributed.ranks import Ranks
from hfgpt.evaluation.hellaswag import hellaswag
from hfgpt.evaluation.loading import load_checkpoint
from hfgpt.evaluation.loss import evaluate_tokens

OTHER = os.environ.get("HFGPT_OTHER_PYTHON")
T = 32
TEXT = " ".join(f"document {n} says {n * n % 101} and {n % 7}" for n in range(400, 408))

START = """
import importlib.util, json, os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"
sys.modules["hfgpt"] = None
folder, text = sys.argv[1:]
for name in {needs}:
    if importlib.util.find_spec(name) is None:
        sys.exit(print(json.dumps({{"skip": name + " is not installed"}})))
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
found = {{"transformers": transformers.__version__}}
"""

LOADED = """
tokenizer = AutoTokenizer.from_pretrained(folder)
model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
found["lost"] = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in loading[kind]]
ids = tokenizer(text, return_tensors="pt").input_ids
found["ids"] = ids[0].tolist()
found["class"], found["dtype"] = type(model).__name__, str(model.dtype)
with torch.no_grad():
    found["logits"] = model(ids[:, :32]).logits[0].tolist()
out = model.generate(ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), max_new_tokens=16, do_sample=False)
found["greedy"] = out[0].tolist()
made = pipeline("text-generation", model=folder)("document 7", min_new_tokens=5, max_new_tokens=5, do_sample=False)
found["pipeline"] = made[0]["generated_text"]
# The sum of log-likelihoods of a text longer than the model's positions: each token once, after those of its window.
ids = [tokenizer.eos_token_id, *ids[0].tolist()]
size, total = model.config.n_positions, 0.0
for start in range(0, len(ids) - 1, size):
    window = torch.tensor([ids[start : start + size + 1]])
    with torch.no_grad():
        logits = model(window[:, :-1]).logits.double().log_softmax(-1)
    total += logits.gather(-1, window[:, 1:, None]).sum().item()
found["rolling"] = total
"""

HARNESS = """
import logging
logging.disable(logging.WARNING)
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

harness = HFLM(pretrained=folder, device="cpu", batch_size=2)
found["max_length"], found["prefix"] = harness.max_length, harness.prefix_token_id
[found["rolling"]] = harness.loglikelihood_rolling(
    [Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True
)
rows = [{"question": f"document {n} says", "choices": [" 7 and", " zebra zebra"], "gold": 0} for n in range(4)]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
task = {
    "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": os.path.abspath("rows.jsonl")}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}],
}
result = simple_evaluate(harness, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)
found["task"] = result["results"]["local"]["acc,none"]
"""

# As in hfgpt/README.md: a folder of tasks, and the command itself.
COMMAND = """
import glob, subprocess
rows = json.loads(text)
os.makedirs("tasks")
with open("tasks/rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
with open("tasks/scenes.yaml", "w") as file:
    file.write('''task: scenes
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
''')
command = ["-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder}", "--include_path", "tasks"]
command += ["--tasks", "scenes", "--batch_size", "8", "--device", "cpu", "--output_path", "results"]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
assert done.returncode == 0, done.stderr
[results] = glob.glob("results/**/*.json", recursive=True)
with open(results) as file:
    found |= json.load(file)["results"]["scenes"]
"""

CONVERTED = """
import gguf
from safetensors import safe_open
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 1)
with safe_open(folder + "/model.safetensors", "pt") as file:
    found["names"] = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in file.keys()}
    rows = file.get_slice("wte.weight").get_shape()[0]
config = json.load(open(folder + "/config.json"))
read_by_the_converter = ("n_ctx", "n_embd", "n_layer", "n_head", "layer_norm_epsilon", "vocab_size")
found["config"] = {key: config.get(key) for key in read_by_the_converter}
found["inner"] = config.get("n_inner")
vocabulary = gguf.SpecialVocab(folder, load_merges=True)
found["special"], found["merges"] = vocabulary.special_token_ids, len(vocabulary.merges)
found["rows"], found["entries"] = rows, len(AutoTokenizer.from_pretrained(folder))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a byte-level BPE tokenizer, as GPT-2 has it."""
    model = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": T}
    flags = {"model": model, "max_steps": 20, "learning_rate": 1e-2, "eval_steps": 0}
    return trained_on_documents(tmp_path_factory.mktemp("elsewhere"), **flags) / "checkpoint-20"


@pytest.fixture(params=["here", "older"])
def used(request, folder, tmp_path):
    """Runs a script on the checkpoint in a process without this package; what it found."""
    if request.param == "older" and not OTHER:
        pytest.skip("HFGPT_OTHER_PYTHON is not set: the Python of an environment with older packages")

    def run(script: str, *needs: str, text: str = TEXT) -> dict:
        python = sys.executable if request.param == "here" else OTHER
        body = START.format(needs=list(needs)) + script + "\nprint(json.dumps(found))"
        environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "data")}
        command = [python, "-c", body, str(folder), text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        if "skip" in found:
            pytest.skip(found["skip"])
        return found

    return run


def rolling(folder, full_context: bool = False) -> float:
    """Our own sum of log-likelihoods of the text; with the positions before the last window filled, as some do."""
    model, tokenizer = load_checkpoint(folder)
    ids = np.array([tokenizer.eos_token_id, *tokenizer(TEXT).input_ids])
    rest = (len(ids) - 1) % T if full_context else 0
    settings = {"accelerator": Accelerator(cpu=True), "sequence_length": T, "batch_size": 2}
    metrics = evaluate_tokens(model, ids[: len(ids) - rest], **settings)
    assert 2 * T <= metrics["eval_tokens"] == len(ids) - 1 - rest
    total = -metrics["eval_loss"] * metrics["eval_tokens"]
    if rest:
        window = torch.from_numpy(ids[-T - 1 :])
        with torch.no_grad():
            scores = model(window[None, :-1]).logits[0].log_softmax(-1)
        total += scores[-rest:].gather(-1, window[-rest:, None]).sum().item()
    return total


@pytest.mark.slow
def test_stock_transformers(folder, used):
    found = used(LOADED)
    model, tokenizer = load_checkpoint(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert not found["lost"] and found["class"] == "GPT2LMHeadModel" and found["dtype"] == "torch.float32"
    assert found["ids"] == ids[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found["logits"]), model(ids[:, :T]).logits[0], atol=1e-5, rtol=0)
    ours = model.generate(ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), max_new_tokens=16, do_sample=False)
    assert found["greedy"] == ours[0].tolist()
    assert found["pipeline"].startswith("document 7") and len(found["pipeline"]) > len("document 7")
    assert found["rolling"] == pytest.approx(rolling(folder), abs=1e-5 * len(found["ids"]))


@pytest.mark.slow
def test_the_evaluation_harness(folder, used):
    found = used(HARNESS, "lm_eval")
    assert found["max_length"] == T and found["prefix"] == load_checkpoint(folder)[1].eos_token_id
    assert found["rolling"] == pytest.approx(rolling(folder, full_context=True), abs=1e-3)
    assert found["task"] == 1.0


@pytest.mark.slow
def test_the_evaluation_harness_by_its_command(folder, used, tmp_path):
    numbers = [(n, [f"{(n * k) % 101} and {n % 7}" for k in (n, n + 1, 3, 5)]) for n in range(60)]
    rows = [{"ctx": f"document {n} says", "endings": endings, "label": n % 4} for n, endings in numbers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = used(COMMAND, "lm_eval", text=json.dumps(rows))
    model, tokenizer = load_checkpoint(folder)
    processes = {"accelerator": Accelerator(cpu=True), "ranks": Ranks(60.0)}
    ours = hellaswag(model, tokenizer, str(tmp_path / "rows.jsonl"), batch_size=8, **processes)
    assert ours["cropped"] == 0 and 0 < ours["accuracy"] < 1
    assert (found["acc,none"], found["acc_stderr,none"]) == pytest.approx((ours["accuracy"], ours["accuracy_stderr"]))


@pytest.mark.slow
def test_what_a_conversion_to_gguf_reads(used):
    found = used(CONVERTED, "gguf")
    assert all(found["names"].values()) and "lm_head.weight" not in found["names"]  # tied: the embedding serves
    assert all(value is not None for value in found["config"].values()) and found["inner"] is None
    assert found["config"]["n_ctx"] == T
    assert found["rows"] == found["entries"] == found["config"]["vocab_size"] == 300
    assert found["special"].get("eos") is not None and found["merges"] > 0
