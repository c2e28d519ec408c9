"""The `evaluate` module: sums before means, in batches, in processes and in transformers' Trainer."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked import FORK, Forked, completed
from running import FORKED_TWO, ROOT
from transformers import GPT2Config, Trainer, TrainingArguments
from transformers import GPT2LMHeadModel as StockGPT2

from hfgpt.errors import UserError
from hfgpt.evaluation.loss import loss_metrics
from hfgpt.evaluation.metrics import PERPLEXITY
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

LENGTHS = (7, 2, 16, 5, 11, 3, 9)
V = 61


@pytest.fixture
def metric(tmp_path):
    return evaluate.load(PERPLEXITY, cache_dir=str(tmp_path / "metrics"))


@pytest.fixture(scope="module")
def model() -> StockGPT2:
    return new_model()


def new_model() -> StockGPT2:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": V}
    return StockGPT2(GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=0)).eval()


def rows() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, V, length).tolist() for length in LENGTHS]


def plain_loop(model) -> tuple[float, int]:
    """Sum of nll in nats, and number of tokens, row by row; of the longest row some labels are not scored."""
    total, tokens = 0.0, 0
    for row in rows():
        ids = torch.tensor([row])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].double().log_softmax(-1)
        scored = [t for t in range(1, len(row)) if not hidden(row, t)]
        total -= sum(scores[t - 1, row[t]].item() for t in scored)
        tokens += len(scored)
    return total, tokens


def hidden(row, t) -> bool:
    return len(row) == max(LENGTHS) and 4 <= t < 8


def collated(batch: list[dict]) -> dict[str, torch.Tensor]:
    """Padded at the right to the longest row of the batch, labels with -100."""
    longest = max(len(one["row"]) for one in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for n, row in enumerate(one["row"] for one in batch):
        ids[n, : len(row)] = torch.tensor(row)
        labels[n, : len(row)] = torch.tensor([-100 if hidden(row, t) else token for t, token in enumerate(row)])
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_mean_over_tokens_not_over_means(metric, batch_size):
    # 2 tokens at 1 nat and 8 at 3, in a row each or cut further.
    rows = [[1.0] * 2, *([3.0] * 2 for _ in range(4))]
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        metric.add_batch(predictions=part, references=[[1] * len(row) for row in part])
    found = metric.compute(scored_bytes=20)
    assert found["perplexity"] == pytest.approx(math.exp(2.6), rel=1e-12) and f"{found['perplexity']:.4f}" == "13.4637"
    assert (found["loss"], found["tokens"]) == (pytest.approx(2.6), 10)
    assert found["bits_per_byte"] == pytest.approx(26 / math.log(2) / 20)


def test_padding_is_not_scored(metric):
    found = metric.compute(predictions=[[-100, 2.0, 9.0], [-100, 4.0, -100]], references=[[7, 8, -100], [7, 8, 9]])
    assert found == {"loss": 3.0, "perplexity": math.exp(3), "tokens": 2, "bits_per_byte": None}


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([[1.0, 2.0]], [[1]], "row 0: 2 predictions and 1 references"),
        ([[1.0], [2.0]], [[1]], "number of predictions"),
        ([[1.0]], [[-100]], "no token is scored"),
        ([], [], "no token is scored"),
        ([[1.0], [1.0, math.nan]], [[1], [2, 3]], "row 1: a prediction is NaN"),
        ([[-1.5]], [[1]], "row 0: a prediction is -1.5"),
    ],
)
def test_what_cannot_be_scored_is_named(metric, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=predictions, references=references)


def test_a_likelihood_of_nothing_is_infinite_not_an_error(metric):
    for nll in (710.0, math.inf):
        assert metric.compute(predictions=[[nll]], references=[[1]])["perplexity"] == math.inf
    with pytest.raises(UserError, match="scored_bytes=0"):
        metric.compute(predictions=[[1.0]], references=[[1]], scored_bytes=0)
    with pytest.raises(UserError, match="tokens=0"):
        loss_metrics(0.0, 0)


def trainer_of(model, metric, output_dir, batch_size, compute_metrics=None, **options) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        per_device_eval_batch_size=batch_size,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    return Trainer(
        model,
        arguments,
        data_collator=collated,
        eval_dataset=[{"row": row} for row in rows()],
        preprocess_logits_for_metrics=metric.token_nll,
        compute_metrics=compute_metrics
        or (lambda p: metric.compute(predictions=p.predictions, references=p.label_ids)),
    )


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_trainer_of_transformers_reports_a_plain_loop(model, metric, tmp_path, batch_size, ours):
    total, tokens = plain_loop(model)
    if ours:
        stock, model = model, GPT2LMHeadModel(model.config)
        model.load_state_dict(stock.state_dict())
    trainer = trainer_of(model, metric, tmp_path, batch_size)
    found = trainer.evaluate()
    assert found["eval_tokens"] == tokens
    assert found["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)  # not the Trainer's mean over batches
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)
    kept = trainer.predict(trainer.eval_dataset)
    assert kept.predictions.shape == (len(LENGTHS), max(LENGTHS))  # one number a token, no logits


@pytest.mark.parametrize("option", ["eval_accumulation_steps", "batch_eval_metrics"])
def test_a_trainer_that_gathers_in_parts_reports_the_same(model, metric, tmp_path, option):
    def in_parts(p, compute_result):
        metric.add_batch(predictions=p.predictions, references=p.label_ids)
        return metric.compute() if compute_result else {}

    total, tokens = plain_loop(model)
    compute = in_parts if option == "batch_eval_metrics" else None
    found = trainer_of(model, metric, tmp_path, 2, compute, **{option: 1}).evaluate()
    assert found["eval_tokens"] == tokens
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)


def test_the_shift_against_cross_entropy(metric):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 6, V, dtype=torch.bfloat16), torch.randint(0, V, (3, 6))
    labels[1, 3:] = -100
    nll = metric.token_nll((logits, "a cache"), labels)
    expected = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    shifted = torch.where(labels[:, 1:] == -100, -100.0, expected.view(3, 5))
    assert nll.dtype == torch.float32 and (nll[:, 0] == -100).all()
    torch.testing.assert_close(nll[:, 1:], shifted)


PROCESS = """
import json, sys
import evaluate
from hfgpt.evaluation.metrics import PERPLEXITY
rank, cache = int(sys.argv[1]), sys.argv[2]
metric = evaluate.load(PERPLEXITY, num_process=2, process_id=rank, experiment_id="two", cache_dir=cache)
if rank == 0:
    metric.add_batch(predictions=[[1.0, 1.0]], references=[[1, 1]])
else:
    for _ in range(4):
        metric.add_batch(predictions=[[3.0], [3.0]], references=[[1], [1]])
print(json.dumps(metric.compute()))
"""


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    (tmp_path / "process.py").write_text(PROCESS)
    command = [FORK, str(tmp_path / "process.py")]
    outputs = [tmp_path / "0.out", tmp_path / "1.out"]
    both = [Forked([*command, str(n), str(tmp_path)], os.environ, out.open("w")) for n, out in enumerate(outputs)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    main, other = (json.loads(out.read_text().splitlines()[-1]) for out in outputs)
    assert (main["perplexity"], main["tokens"]) == (pytest.approx(math.exp(2.6)), 10) and other is None


TWO_TRAINERS = """
import json, sys
sys.path[:0] = {folders!r}
import evaluate
from test_perplexity_metric import PERPLEXITY, new_model, trainer_of
metric = evaluate.load(PERPLEXITY, cache_dir=sys.argv[1])
trainer = trainer_of(new_model(), metric, sys.argv[1], 2)
found = trainer.evaluate()
if trainer.is_world_process_zero():
    print("found " + json.dumps(found), flush=True)
"""


@pytest.mark.slow
def test_the_trainer_on_two_processes(model, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_TRAINERS.format(folders=[str(Path(__file__).parent), str(ROOT / "tests")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*FORKED_TWO, str(script), str(tmp_path / "cache")]
    done = completed(command, environment, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    total, tokens = plain_loop(model)
    assert (found["eval_tokens"], found["eval_perplexity"]) == (
        tokens,
        pytest.approx(math.exp(total / tokens), rel=1e-6),
    )
