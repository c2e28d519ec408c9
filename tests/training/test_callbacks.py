"""The figures against a clock that only work moves, under a bare loop and under transformers' Trainer."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

from hfgpt.distributed.device_peaks import Peak
from hfgpt.errors import UserError
from hfgpt.model import flops
from hfgpt.training.callbacks import PerplexityCallback, log_line
from hfgpt.training.mfu import MFUCallback

FIGURES = {"step_seconds", "tokens_per_second", "mfu", "peak_tflops", "peak_source"}
ROW = 8  # tokens


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeModel(nn.Module):
    """A configuration and one weight: all that the callback asks of a model."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(1))


class BareLoop:
    """Sends the events of a training loop, as any loop around transformers' callbacks does."""

    def __init__(self, callback: MFUCallback, model: nn.Module | None = None, **args) -> None:
        self.callback, self.args = callback, SimpleNamespace(**args)
        self.state = SimpleNamespace(num_input_tokens_seen=0, log_history=[], global_step=0)
        self.control = SimpleNamespace(should_log=False, should_evaluate=False, should_save=False)
        model = model or FakeModel(GPT2Config(vocab_size=50304))
        callback.on_train_begin(self.args, self.state, self.control, model=model)

    def step(self, seconds: float, tokens: int = 0) -> None:
        self.callback.clock.now += seconds
        self.state.num_input_tokens_seen += tokens
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, self.control)

    def log(self) -> dict:
        logs = {"loss": 2.0}
        self.callback.on_log(self.args, self.state, self.control, logs=logs)
        return logs

    def pause(self, seconds: float, event: str) -> None:
        self.callback.clock.now += seconds
        getattr(self.callback, event)(self.args, self.state, self.control)


def gpt2_mfu(**changes) -> MFUCallback:
    given = {"tokens_per_step": 524_288, "sequence_length": 1024, "peak_tflops": 312.0, "clock": Clock()}
    return MFUCallback(**{**given, **changes})


@pytest.mark.parametrize(("devices", "seconds"), [(1, 2.0), (8, 0.25)])
def test_mfu_is_that_of_the_whole_step_and_all_devices(monkeypatch, devices, seconds):
    for args, environment in (({"world_size": devices}, "1"), ({}, str(devices))):
        monkeypatch.setenv("WORLD_SIZE", environment)
        loop = BareLoop(gpt2_mfu(), **args)
        for _ in range(4):
            loop.step(seconds)
        logs = loop.log()
        assert logs["mfu"] == pytest.approx(0.7187, abs=5e-5)
        assert logs["tokens_per_second"] == pytest.approx(524_288 / seconds)
        assert logs["step_seconds"] == pytest.approx(seconds)
        assert (logs["peak_tflops"], logs["peak_source"]) == (312.0, "given")


def test_warm_up_evaluation_and_saving_are_outside_the_clock():
    loop = BareLoop(gpt2_mfu(warmup_steps=2))
    loop.step(60.0)
    first = loop.log()
    assert first["step_seconds"] is first["tokens_per_second"] is first["mfu"] is None
    loop.step(30.0)
    loop.step(2.0)
    assert loop.log()["step_seconds"] == pytest.approx(2.0)
    loop.pause(500.0, "on_evaluate")
    loop.pause(50.0, "on_save")
    loop.step(3.0)
    loop.pause(50.0, "on_save")
    loop.step(5.0)
    assert loop.log()["step_seconds"] == pytest.approx(4.0)
    assert loop.callback.total_seconds == pytest.approx(2.0 + 3.0 + 5.0)


def test_total_seconds_go_on_from_a_resumed_run():
    callback = gpt2_mfu()
    callback.total_seconds = 1000.0
    loop = BareLoop(callback)
    loop.step(60.0)
    loop.step(2.0)
    assert callback.total_seconds == pytest.approx(1002.0)


def test_tokens_as_the_trainer_counts_them():
    callback = gpt2_mfu(tokens_per_step=None)
    loop = BareLoop(callback, include_num_input_tokens_seen="non_padding")
    loop.step(1.0, tokens=16)
    loop.step(1.0, tokens=11)
    loop.step(1.0, tokens=13)
    assert loop.log()["tokens_per_second"] == pytest.approx(12.0)
    with pytest.raises(UserError, match="tokens_per_step"):
        BareLoop(gpt2_mfu(tokens_per_step=None), include_num_input_tokens_seen="no")


def test_the_device_is_waited_for_only_where_something_is_due(monkeypatch):
    waits = []
    monkeypatch.setattr("hfgpt.training.mfu.synchronize", waits.append)
    loop = BareLoop(gpt2_mfu())
    for _ in range(5):
        loop.step(1.0)
    assert len(waits) == 1  # the end of the warm-up
    loop.control.should_evaluate = True
    loop.step(1.0)
    assert len(waits) == 2
    loop.log()
    assert len(waits) == 3


def test_an_mfu_above_one_warns_once(caplog):
    loop = BareLoop(gpt2_mfu(peak_tflops=100.0))
    for _ in range(4):
        loop.step(1.0)
        loop.log()
    warnings = [record for record in caplog.records if "above 1" in record.message]
    assert len(warnings) == 1 and "100.0 TFLOP/s" in warnings[0].message


@pytest.mark.parametrize(("again", "expected"), [(800.0, True), (80.0, False)])
def test_a_measured_peak_that_is_too_low_is_measured_again(monkeypatch, caplog, again, expected):
    """Other programs were using the CPU. If that does not explain it, there is no MFU."""
    measured = []
    monkeypatch.setattr("hfgpt.training.mfu.device_peak", lambda *_: Peak(100.0, "measured: x"))
    monkeypatch.setattr(
        "hfgpt.distributed.device_peaks.measure_matmul_tflops",
        lambda *asked: measured.append(asked) or Peak(again, "measured: y"),
    )
    loop = BareLoop(gpt2_mfu(peak_tflops=None))
    for _ in range(7):
        loop.step(1.0)
        logs = loop.log()
    assert logs["tokens_per_second"] == 524_288
    if expected:
        assert logs["mfu"] == pytest.approx(524_288 * 855_166_464 / 800e12, rel=1e-2) and len(measured) == 1
        assert logs["peak_tflops"] == 800.0 and logs["peak_source"] == "measured: y" and not caplog.records
    else:
        assert logs["mfu"] is None and logs["peak_tflops"] == 100.0 and len(measured) == 3
        assert sum("above 1" in record.message for record in caplog.records) == 1


def test_no_peak_no_mfu(monkeypatch):
    monkeypatch.setattr("hfgpt.training.mfu.device_peak", lambda *_: Peak(None, "unknown: Abacus 9"))
    loop = BareLoop(gpt2_mfu(peak_tflops=None))
    loop.step(1.0)
    loop.step(2.0)
    logs = loop.log()
    assert logs["mfu"] is None and logs["peak_tflops"] is None
    assert logs["peak_source"] == "unknown: Abacus 9"
    assert logs["tokens_per_second"] == pytest.approx(262_144)


@pytest.mark.parametrize(
    ("args", "dtype", "given", "asked"),
    [
        ({"bf16": True, "fp16": False}, torch.float32, None, "bf16"),
        ({"bf16": False, "fp16": True}, torch.float32, None, "fp16"),
        ({}, torch.bfloat16, None, "bf16"),
        ({}, torch.float32, None, "no"),
        ({"bf16": True}, torch.float32, "no", "no"),
    ],
)
def test_the_peak_is_looked_up_in_the_precision_of_the_run(monkeypatch, args, dtype, given, asked):
    precisions = []

    def peak(device, precision):
        precisions.append(precision)
        return Peak(1.0, "rated: Abacus 9")

    monkeypatch.setattr("hfgpt.training.mfu.device_peak", peak)
    BareLoop(gpt2_mfu(peak_tflops=None, precision=given), FakeModel(GPT2Config()).to(dtype), **args)
    assert precisions == [asked]


def test_wrapped_models_and_recomputation(caplog):
    model = FakeModel(GPT2Config(vocab_size=50304))
    plain, compiled = BareLoop(gpt2_mfu(), model), BareLoop(gpt2_mfu(), nn.DataParallel(torch.compile(model)))
    model.gradient_checkpointing = True
    recomputing = BareLoop(gpt2_mfu(), model)
    records = []
    for loop in (plain, compiled, recomputing):
        loop.step(1.0)
        loop.step(2.0)
        records.append(loop.log())
    assert records[0] == records[1] and "hfu" not in records[0]
    assert records[2]["mfu"] == records[0]["mfu"] < records[2]["hfu"] < records[0]["mfu"] * 4 / 3

    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        callback = gpt2_mfu(sequence_length=None)
        BareLoop(callback, model)
    assert callback.sequence_length == 1024 and "n_positions = 1024" in caplog.text


class Rows(torch.utils.data.Dataset):
    """Rows of equal tokens; reading one takes `seconds`."""

    def __init__(self, count: int, clock: Clock, seconds: float) -> None:
        self.count, self.clock, self.seconds = count, clock, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.clock.now += self.seconds
        ids = [index % 7 + 1] * ROW
        return {"input_ids": ids, "labels": ids, "attention_mask": [1] * (ROW - 1) + [0]}


class Tracker(TrainerCallback):
    """Keeps the logs as a tracker among the constructor's callbacks sees them."""

    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def trainer_run(folder, clock: Clock, callbacks, **options) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=11, n_positions=ROW, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.register_forward_hook(lambda module, *_: setattr(clock, "now", clock.now + 1 + 99 * (not module.training)))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    rows, eval_rows = Rows(64, clock, 0.25), Rows(4, clock, 50.0)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=eval_rows, callbacks=callbacks)


@pytest.mark.parametrize("counted", ["given", "all", "non_padding"])
def test_under_transformers_trainer(tmp_path, counted):
    clock = Clock()
    per_step = 2 * 2 * (ROW - (counted == "non_padding"))
    given = per_step if counted == "given" else None
    options = {} if counted == "given" else {"include_num_input_tokens_seen": counted}
    mfu = MFUCallback(tokens_per_step=given, sequence_length=ROW, peak_tflops=1e-9, clock=clock)
    trainer = trainer_run(tmp_path, clock, [mfu, PerplexityCallback()], **options)
    trainer.train()

    training = [record for record in trainer.state.log_history if "loss" in record]
    evaluation = [record for record in trainer.state.log_history if "eval_loss" in record]
    assert len(training) == len(evaluation) == 3
    per_token = flops.training_flops_per_token(trainer.model.config, ROW)
    for record in training:
        assert record.keys() >= FIGURES
        # Two micro-batches of a second each, and two rows of 0.25 s for each of them.
        assert record["step_seconds"] == pytest.approx(3.0)
        assert record["tokens_per_second"] == pytest.approx(per_step / 3.0)
        assert record["mfu"] == pytest.approx(per_step / 3.0 * per_token / 1e3)
    assert mfu.total_seconds == pytest.approx(5 * 3.0)
    for record in evaluation:
        assert record["eval_perplexity"] == pytest.approx(math.exp(record["eval_loss"]))
        assert not FIGURES & record.keys()
    assert trainer.evaluate()["eval_perplexity"] == evaluation[-1]["eval_perplexity"]


def test_trackers_of_transformers_trainer_see_the_figures(tmp_path):
    clock, tracker = Clock(), Tracker()
    trainer = trainer_run(tmp_path, clock, [tracker])
    mfu = MFUCallback(tokens_per_step=32, sequence_length=ROW, peak_tflops=1e-9, clock=clock)
    trainer.callback_handler.callbacks.insert(1, mfu)
    trainer.callback_handler.callbacks.insert(1, PerplexityCallback())
    trainer.train()
    training = [logs for logs in tracker.logs if "loss" in logs]
    assert len(training) == 3 and all(logs.keys() >= FIGURES - {"peak_source"} for logs in training)
    assert not any(isinstance(value, str) for logs in training for value in logs.values())
    assert all("eval_perplexity" in logs for logs in tracker.logs if "eval_loss" in logs)


def test_perplexity_of_several_splits_and_of_a_diverged_loss():
    state = SimpleNamespace(log_history=[])
    logs = {"eval_loss": 2.0, "eval_wiki_loss": 1000.0, "eval_seconds": 3.0, "loss": 1.0}
    PerplexityCallback().on_log(None, state, None, logs=logs)
    assert logs["eval_perplexity"] == math.exp(2.0)
    assert logs["eval_wiki_perplexity"] == math.inf
    assert set(logs) == {
        "eval_loss", "eval_perplexity", "eval_wiki_loss", "eval_wiki_perplexity", "eval_seconds", "loss",
    }  # fmt: skip
    metrics = {"eval_loss": float("nan")}
    PerplexityCallback().on_evaluate(None, state, None, metrics=metrics)
    assert math.isnan(metrics["eval_perplexity"])


def test_a_line_of_progress_shows_what_is_known():
    state = TrainerState(global_step=50, max_steps=2000)
    logs = {"loss": 2.50123, "learning_rate": 1e-3, "grad_norm": 0.841, "step_seconds": 0.1, "tokens_per_second": 4023}
    logs |= {"mfu": 0.0123, "peak_source": "rated: X", "memory_bytes": 2**29}
    assert log_line(state, logs) == (
        "step   50/2000  loss 2.5012  rate 0.001  norm 0.841  4,023 tokens/s  MFU 1.2%  0.5 GiB  ETA 0:03:15"
    )
    assert log_line(state, {"eval_loss": 1.0, "eval_perplexity": math.e, "eval_bits_per_byte": None}) == (
        "step   50/2000  eval loss 1.0000  perplexity 2.718"
    )
    assert log_line(state, {"loss": math.nan, "mfu": None}) == "step   50/2000  loss nan"
