"""`hfgpt plan`: hand-computed time, energy and cost, the micro-batch that fits, and wrong flags."""

import json
import sys
from dataclasses import replace

import pytest

from hfgpt import PretrainConfig, UserError, cli
from hfgpt.distributed.compiler import CompileChoice
from hfgpt.distributed.device import Precision
from hfgpt.distributed.device_peaks import rated_memory_gib
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.model.memory import training_memory
from hfgpt.planning.estimate import forecast
from hfgpt.settings.step_sizes import step_sizes
from hfgpt.training.plan import Plan, setting_of

CARD = "NVIDIA GeForce RTX 4070 Ti"
STEP = {"device": CARD, "tokens_per_step": 524288}
GPT2_FLOPS = 855_166_464  # per token, at 1,024


def needed_gib(micro_batch: int, **flags) -> float:
    splits = forecast(**{**STEP, "memory_gib": 1000.0, **flags}).splits
    return next(split.needed_bytes for split in splits if split.batch.micro_batch == micro_batch) / 2**30


def test_time_energy_and_cost_by_hand():
    planned = forecast(**{**STEP, "mfu": 0.5, "watts": 285, "price_per_hour": 0.25, "max_tokens": "10e9"})
    seconds = 524_288 * GPT2_FLOPS / (0.5 * 80.2e12)  # 11.18
    hours = 19_073 * seconds / 3600  # 59.2
    assert planned.steps == 19_073  # 10e9 / 524,288 and no part of one
    costs = planned.costs()
    assert costs["seconds_per_step"] == pytest.approx(seconds) == pytest.approx(11.181, abs=1e-3)
    assert costs["hours"] == pytest.approx(hours) == pytest.approx(59.24, abs=0.01)
    assert costs["kwh"] == pytest.approx(16.88, abs=0.01)
    assert costs["cost"] == pytest.approx(14.81, abs=0.01)
    assert planned.tokens_per_second == pytest.approx(524_288 / seconds)


def test_the_reference_run_takes_the_time_it_took():
    planned = forecast(**{**STEP, "vocab_size": 50304, "mfu": 0.598})
    assert planned.costs()["seconds_per_step"] == pytest.approx(9.34, abs=0.02)


def test_several_processes_take_less_time_and_the_same_energy():
    power = {"watts": 285, "price_per_hour": 0.25}
    one, four = (forecast(**{**STEP, **power, "processes": count}) for count in (1, 4))
    assert four.costs()["hours"] == pytest.approx(one.costs()["hours"] / 4)
    for key in ("kwh", "cost"):
        assert four.costs()[key] == pytest.approx(one.costs()[key])
    for split in four.splits:
        assert split.batch.tokens_per_step == 524_288 and split.batch.processes == 4


def test_the_largest_micro_batch_that_fits_is_chosen():
    eight, sixteen = needed_gib(8), needed_gib(16)
    for memory, chosen in ((eight - 0.001, 4), (eight, 8), (sixteen - 0.001, 8), (sixteen, 16)):
        batch = forecast(**{**STEP, "memory_gib": memory}).chosen.batch
        assert (batch.micro_batch, batch.accumulation) == (chosen, 512 // chosen)


def test_only_micro_batches_that_divide_the_step_are_offered():
    splits = forecast(**{**STEP, "tokens_per_step": str(26 * 1024), "processes": 2}).splits
    assert [(split.batch.micro_batch, split.batch.accumulation) for split in splits] == [(1, 13), (13, 1)]
    huge = forecast(**{**STEP, "tokens_per_step": "1024e12"})  # looked at no longer than until three are too large
    assert [split.fits for split in huge.splits[-3:]] == [False] * 3 and len(huge.splits) < 40


def test_settings_that_take_less_let_more_fit():
    alone = forecast(**STEP).chosen.batch.micro_batch
    assert forecast(**{**STEP, "gradient_checkpointing": "true"}).chosen.batch.micro_batch > alone
    large = {**STEP, "model": "gpt2-1.5b", "memory_gib": 24, "tokens_per_step": "8192"}
    assert forecast(**large).chosen is None
    assert forecast(**{**large, "processes": 8, "fsdp": True}).chosen is not None


def test_nothing_fits():
    planned = forecast(**{**STEP, "memory_gib": 2})
    assert planned.chosen is None and planned.to_dict()["micro_batch"] is None
    assert "no micro-batch fits; smallest: 524,288 tokens = micro-batch 1 x" in "\n".join(planned.lines())


def wrong_use(monkeypatch, capsys, *flags: str) -> str:
    """The one line on stderr of `hfgpt plan` with wrong flags."""
    monkeypatch.setattr(sys, "argv", ["hfgpt", "plan", *flags])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out and len(err.splitlines()) == 1
    return err


def test_all_problems_are_in_one_line(monkeypatch, capsys):
    wrong = {"--model": "gpt2-125", "--tokens_per_step": "-5", "--device": "RTX 4070 ti", "--mfu_peak_tflops": "nan"}
    err = wrong_use(monkeypatch, capsys, *(part for pair in wrong.items() for part in pair), "--fsdp")
    for key, value in wrong.items():
        assert f"{key[2:]}={value}: " in err
    assert "did you mean gpt2-125m?" in err and "did you mean NVIDIA GeForce RTX 4070 Ti " in err
    assert "fsdp: needs several processes" in err


@pytest.mark.parametrize(
    "flag",
    [
        "--tokens_per_step=many", "--mfu=1.5", "--watts=-3", "--optim=sgd", "--processes=1.5", "--memory_gib=inf",
        "--price_per_hour=x", "--vocab_size=0", "--torch_compile=maybe",
    ],
)  # fmt: skip
def test_a_flag_of_the_wrong_type_is_named(monkeypatch, capsys, flag):
    name, value = flag.split("=")
    err = wrong_use(monkeypatch, capsys, "--tokens_per_step", "1024", flag)
    assert f"'{name}'" in err and value in err


def test_a_step_must_be_stated(monkeypatch, capsys):
    assert "--tokens_per_step" in wrong_use(monkeypatch, capsys, "--device", CARD)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tokens_per_step": "1000"}, "tokens_per_step=1000 is not a multiple"),
        ({"tokens_per_step": "1024", "processes": 2}, "2 processes = 2048"),
        ({"sequence_length": "2048"}, "sequence_length=2048 is above the model's n_positions=1024"),
        ({"device": "Tesla T4", "mixed_precision": "bf16"}, "Tesla T4 has no bf16; use fp16"),
        ({"device": "NVIDIA GeForce RTX 3080"}, "memory_gib: not given, and the memory of NVIDIA GeForce RTX 3080"),
        ({"device": "Tesla T4", "processes": 2, "fsdp": True}, "does not work with fp16"),
        ({"model": '{"size": "gpt2-40m", "vocab_size": 300}', "vocab_size": 200}, "model.vocab_size=300"),
        ({"model": "{oops"}, "model={oops"),
    ],
)
def test_settings_that_do_not_fit_are_named(flags, problem):
    with pytest.raises(UserError) as error:
        forecast(**{**STEP, **flags})
    assert len(error.value.problems) == 1 and problem in error.value.problems[0]


def test_the_command_prints_one_object(monkeypatch, capsys):
    flags = ["--model", "gpt2-125m", "--device", CARD, "--tokens_per_step", "524288"]
    monkeypatch.setattr(sys, "argv", ["hfgpt", "plan", *flags, "--json"])
    cli.main()
    printed = json.loads(capsys.readouterr().out)
    parts = printed["memory_bytes"]
    assert parts.pop("peak") == sum(parts.values())
    assert set(parts) == {"weights", "gradients", "optimizer", "activations", "logits", "workspace"}
    assert printed["micro_batch"] * printed["accumulation"] * 1024 == printed["tokens_per_step"] == 524_288
    assert printed["peak_source"].startswith(f"rated: {CARD}") and printed["peak_tflops"] == 80.2
    assert printed["max_tokens"] == 10_000_000_000 and printed["kwh"] is None
    monkeypatch.setattr(sys, "argv", ["hfgpt", "plan", *flags])
    cli.main()
    out = capsys.readouterr().out
    assert f"device   {CARD}, 11.7 GiB; bf16" in out and "chosen" in out and "0.4 of 80.2 TFLOP/s" in out


def test_growing_steps_have_an_accumulation_for_each_stage_and_an_average_its_steps():
    stages = [[0, 65536], [1_000_000_000, 131072], [3_000_000_000, 524288]]
    planned = forecast(**{**STEP, "tokens_per_step": stages, "average_last": 0.2, "processes": 2})
    lines = [" ".join(line.split()) for line in planned.lines()]
    assert "8 x 4, 8, 32 8.37 chosen" in lines and "splits micro-batch x accumulation of each stage GiB" in lines
    cut = next(one for one in planned.to_dict()["cuts"] if one["micro_batch"] == 8)
    assert cut["accumulation"] is None and cut["accumulation_of_stages"] == [4, 8, 32]
    first = planned.steps - round(0.2 * planned.steps) + 1
    [average] = [line for line in lines if line.startswith("average")]
    assert f"after steps {first:,} to {planned.steps:,}, evenly (average_last); 0.46 GiB on each device" in average
    sharded = forecast(**{**STEP, "ema_decay": 0.9999, "max_tokens": 524288 * 9, "fsdp": True, "processes": 8})
    assert "about the last 10,000, which is more than the 9 here; 0.058 GiB" in sharded.to_dict()["average"]
    assert forecast(**STEP).to_dict()["average"] is None


def test_precision_and_peak_follow_the_device():
    planned = forecast(**{**STEP, "device": "Tesla T4"})
    assert planned.device.precision.name == "fp16" and planned.device.peak.tflops == 65.0
    unrated = forecast(**{**STEP, "mixed_precision": "no"})  # by the TF32 setting, so not in the table
    assert unrated.costs()["hours"] is None and "--mfu_peak_tflops" in "\n".join(unrated.lines())
    stated = forecast(**{**STEP, "mixed_precision": "no", "mfu_peak_tflops": "40"})
    assert stated.costs()["seconds_per_step"] == pytest.approx(524_288 * GPT2_FLOPS / (0.4 * 40e12))


def test_this_machine_is_planned_for_where_no_device_is_named():
    planned = forecast(model="char-cpu", vocab_size=65, tokens_per_step=768, torch_compile=False)
    assert planned.config.sequence_length == 64
    assert planned.chosen.batch.micro_batch == 12
    assert planned.device.peak.source.startswith("measured: ")


def test_memory_of_cards_by_name():
    assert rated_memory_gib(CARD) == 11.7 and rated_memory_gib("NVIDIA A800 80GB PCIe") == pytest.approx(78.4)
    assert rated_memory_gib("NVIDIA GeForce RTX 3080") is None  # two cards of that name


def test_the_plan_of_a_run_has_the_same_memory():
    config = PretrainConfig(model="gpt2-125m", max_steps=1, gradient_checkpointing=True)
    batch, model = config.batch(1), model_config("gpt2-125m")
    setting = setting_of(config, batch, "bf16", 1, "cuda")
    choices = Precision("bf16", ""), CompileChoice(False, "")
    plan = Plan(
        config,
        model,
        batch,
        step_sizes(config, batch.tokens_per_step),
        1,
        *choices,
        "card",
        [],
        "out/checkpoint-1",
        setting,
        peak_tflops=100.0,
    )
    expected = training_memory(model, setting).peak / 2**30
    assert f"memory   about {expected:.2g} GiB expected" in plan.lines()
    on_cpu = replace(plan, setting=setting_of(config, batch, "bf16", 1, "cpu")).lines()
    (memory,) = (line for line in on_cpu if line.startswith("memory"))
    # Steps report the memory of the whole process there.
    assert memory.endswith(" GiB expected for tensors, and about 0.5 GiB for the program")


@pytest.mark.parametrize(
    ("steps", "shown"),
    [(10, "about 49 seconds"), (500, "about 41 minutes"), (19_073, "about 26 hours"), (10**6, "about 56 days")],
)
def test_the_plan_of_a_run_says_how_long_it_takes(steps, shown):
    """524,288 tokens a step at 40 % of 230 TFLOP/s: 524288 * 855166464 / 0.4 / 230e12 = 4.87 s."""
    config = PretrainConfig(model="gpt2-125m", max_steps=steps, tokens_per_step=524_288)
    batch, model = config.batch(1), model_config("gpt2-125m")
    setting, choices = setting_of(config, batch, "bf16", 1, "cuda"), (Precision("bf16", ""), CompileChoice(False, ""))
    plan = Plan(
        config,
        model,
        batch,
        step_sizes(config, batch.tokens_per_step),
        steps,
        *choices,
        "card",
        [],
        "out/checkpoint-1",
        setting,
        peak_tflops=230.0,
    )
    assert any(line.startswith(f"time     {shown} of training on this GPU") for line in plan.lines())
    assert not any(line.startswith("time ") for line in replace(plan, peak_tflops=None).lines())
