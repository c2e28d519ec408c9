"""Settings: three layers, checked conversions, every problem in one go."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from hfgpt.config import PretrainConfig
from hfgpt.errors import UserError
from hfgpt.messages.formats import rounded
from hfgpt.model.configuration_gpt2 import model_config
from hfgpt.settings.batch import Batch
from hfgpt.training.lr_schedule import LearningRate

SMALL = {"model": "char-cpu", "sequence_length": 64, "max_steps": 10}


def read(*argv: str, **defaults) -> PretrainConfig:
    return PretrainConfig.from_cli({**SMALL, **defaults}, list(argv))


def problems(*argv: str, **defaults) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read(*argv, **defaults)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def test_command_line_wins_over_yaml_over_recipe(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 6e-4\nweight_decay: 0.2\nmax_steps: '100'\ntorch_compile: 'false'\nadam_epsilon: 1e-8\n"
    )
    config = read("--config", str(path), "--weight_decay", "0.3", learning_rate=1.0, seed=7)
    assert (config.learning_rate, config.weight_decay, config.max_steps, config.seed) == (6e-4, 0.3, 100, 7)
    assert config.torch_compile is False and config.adam_epsilon == 1e-8
    assert isinstance(config.learning_rate, float) and isinstance(config.max_steps, int)


def test_text_becomes_the_type_of_the_field():
    config = read("--max_tokens=1e6", "--torch_compile", "true", "--streaming", "auto", "--eval_tokens", "none")
    assert config.max_tokens == 1_000_000 and config.max_steps is None
    assert config.torch_compile is True and config.streaming == "auto" and config.eval_tokens is None
    assert read("--gradient_checkpointing").gradient_checkpointing is True
    model = read("--model", '{"size": "char-cpu", "n_layer": 2}').model
    assert model == {"size": "char-cpu", "n_layer": 2}
    assert read(mixed_precision=False).mixed_precision == "no"  # a bare `no` in YAML


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max_steps", "ten"),
        ("max_steps", "1.5"),
        ("learning_rate", "fast"),
        ("torch_compile", "maybe"),
        ("mixed_precision", "fp8"),
        ("warmup_steps", "true"),
        ("learning_rate", "nan"),
        ("learning_rate", "0"),
        ("adam_beta2", "1"),
        ("warmup_steps", "-1"),
        ("logging_steps", "0"),
        ("per_device_eval_batch_size", "0"),
    ],
)
def test_a_value_that_cannot_be_is_named(flag, value):
    (problem,) = problems(f"--{flag}", value)
    assert problem.startswith(f"{flag}={value}"), problem


def test_values_given_in_python_are_converted_and_checked_too():
    config = PretrainConfig(**{**SMALL, "max_steps": "10"}, streaming="false", learning_rate="1e-3")
    assert (config.max_steps, config.streaming, config.learning_rate) == (10, False, 1e-3)
    with pytest.raises(UserError, match="max_steps=ten: must be a whole number"):
        PretrainConfig(**{**SMALL, "max_steps": "ten"})


def test_values_of_no_use_are_named_whatever_they_are():
    for key, value in (("max_steps", (1, 2)), ("max_steps", 10**400), ("learning_rate", object()), ("seed", {1})):
        with pytest.raises(UserError, match=f"{key}=.*: must be a"):
            PretrainConfig(**{**SMALL, key: value})
    for field in ("layer_norm_epsilon: -1", "layer_norm_epsilon: .inf", "initializer_range: .nan"):
        assert "must be above 0 and below 1" in problems("--model", f"{{size: char-cpu, {field}}}")[0]


def test_defaults_of_a_model_apply_to_it_alone_and_give_way_to_what_is_stated():
    for_gpu = {"char-gpu": {"sequence_length": 256, "per_device_train_batch_size": 64}}
    for model in ("char-gpu", "{size: char-gpu, n_layer: 2}"):
        config = PretrainConfig.from_cli(SMALL, ["--model", model, "--tokens_per_step", "16384"], for_gpu)
        assert (config.sequence_length, config.batch(1).accumulation) == (256, 1)
    config = PretrainConfig.from_cli(SMALL, ["--model", "char-gpu", "--sequence_length", "128"], for_gpu)
    assert (config.sequence_length, config.per_device_train_batch_size) == (128, 64)
    assert PretrainConfig.from_cli(SMALL, [], for_gpu).sequence_length == 64


def test_unknown_flag_offers_the_nearest():
    (problem,) = problems("--gradient_acumulation_steps", "4")
    assert "--gradient_acumulation_steps" in problem and "--gradient_accumulation_steps?" in problem
    assert problems("--gradient_acumulation_steps=4") == (problem,)
    assert "--max_steps" in problems("--max_step", "4")[0]  # no abbreviations
    assert "train.py" in problems("train.py")[0]


@pytest.mark.parametrize("key", ["output_dir", "init_from", "dataset", "eval_dataset", "tokenizer"])
def test_paths_are_read_as_a_shell_reads_them_wherever_they_stand(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    path = tmp_path / "run.yaml"
    for written, meant in (("~/a", "/home/me/a"), ("$SCRATCH/a", "/scratch/a"), ("${HOME}/a b", "/home/me/a b")):
        path.write_text(f"{key}: {written}\n")
        for config in (read("--config", str(path)), read(f"--{key}={written}"), read(**{key: written})):
            assert getattr(config, key) == meant
    for written, why in (
        ("~nobody-here/a", "no home folder"),
        ("${UNSET_HERE}/a", "no variable UNSET_HERE"),
        ("", "empty"),
    ):
        (problem,) = problems(f"--{key}={written}")
        assert problem.startswith(f"{key}=") and why in problem
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    assert getattr(read(f"--{key}=~"), key) == "~"  # what is there under this very name


@pytest.mark.parametrize(("path", "why"), [("a" * 5000, "too long"), ("a\0b", "zero byte"), ("a\udcff", "UTF-8")])
def test_names_that_no_file_can_have_are_refused(path, why):
    for key in ("output_dir", "dataset", "init_from", "config"):
        (problem,) = problems(f"--{key}={path}")
        assert problem.startswith(f"{key}=") and why in problem and len(problem) < 300


def test_several_files_of_settings_merge_and_of_a_flag_the_last_counts_with_a_warning(tmp_path, caplog):
    for name, text in (("a", "seed: 1\nmax_tokens: 9\nwarmup_steps: 3\n"), ("b", "seed: 2\nmax_steps: 5\n")):
        (tmp_path / name).write_text(text)
    both = ["--config", str(tmp_path / "a"), "--config", str(tmp_path / "b")]
    config = read(*both)
    assert (config.seed, config.warmup_steps, config.max_steps, config.max_tokens) == (2, 3, 5, None)
    assert not caplog.messages
    assert read(*both, "--seed", "3", "--seed=4").seed == 4
    assert caplog.messages == ["--seed: given 2 times; using the last: 4"]


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "{ROMEO}", "", " ", "- x", "--seed", "{", "[1]", "5", "true", "~", "a: b", "é\n"]
)
def test_text_settings_take_any_text(tmp_path, text):
    assert read(f"--sample_prompt={text}").sample_prompt == read(sample_prompt=text).sample_prompt == text
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"sample_prompt": text}))
    assert read("--config", str(tmp_path / "run.yaml")).sample_prompt == text
    assert problems("--sample_prompt") == ("sample_prompt: needs a value",)  # no text at all


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9_007_199_254_740_993", 2**53 + 1),
        ("9007199254740993", 2**53 + 1),
        ("9.007199254740993e15", 2**53 + 1),
        ("9007199254740993.0", 2**53 + 1),
        ("9223372036854775807", 2**63 - 1),
        ("1e18", 10**18),
        ("1_0e2", 1000),
        ("+7", 7),
        ("-0.0", 0),
        ("٣", 3),
        ("010", 10),
        ("9007199254740993.5", None),
        ("9223372036854775808", None),
        ("1e-400", None),
        ("1e400", None),
        ("0x10", None),
        ("1__0", None),
        ("1:30", None),
    ],
)
def test_whole_numbers_are_exact_or_refused(tmp_path, text, number):
    (tmp_path / "run.yaml").write_text(f"seed: {text}\n")
    for argv in ([f"--seed={text}"], ["--config", str(tmp_path / "run.yaml")]):
        if number is None:
            assert problems(*argv)[0].startswith(f"seed={text}: must be a whole number")
        else:
            assert read(*argv).seed == number


def test_a_file_of_settings_says_what_stands_in_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "run_name: 1.10\nhub_language: no\ndataset_revision: 1234567e5\ntorch_compile: no\neval_tokens: null\n"
    )
    config = read("--config", str(path))
    assert (config.run_name, config.hub_language, config.dataset_revision) == ("1.10", "no", "1234567e5")
    assert config.torch_compile is False and config.eval_tokens is None
    path.write_text("seed: 1\nmodel: {size: char-cpu, n_layer: 2, n_layer: 3}\n")
    assert "n_layer is set twice" in problems("--config", str(path))[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ddp_timeout", "1e300"), ("stream_timeout", "1e-300"), ("learning_rate", "1e300"), ("learning_rate", "1e-300"),
        ("adam_epsilon", "1e-300"), ("weight_decay", "1e39"), ("max_grad_norm", "1e-46"), ("num_train_epochs", "1e300"),
        ("dataloader_num_workers", "1e6"), ("mfu_peak_tflops", "1e-300"),
    ],
)  # fmt: skip
def test_numbers_that_clocks_and_float32_lack_are_refused(key, value):
    found = problems(f"--{key}={value}")
    assert any(problem.startswith(f"{key}={float(value):g}".replace("1e+06", "1000000")) for problem in found), found


def test_sizes_beyond_all_machines_are_refused_at_once():
    """Nothing counts up to them."""
    assert "not a multiple" in problems("--tokens_per_step=1e18", "--per_device_train_batch_size=999999999999")[0]
    assert (
        "n_head may be" in problems("--model", "{n_embd: 999999999999, n_head: 7777777777}", "--sequence_length=8")[0]
    )
    assert len(Batch(1, 1, 2**40, 1).splits()) == 41


def test_every_problem_is_told_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rat: 1\nmodel: {n_embd: 30, n_head: 4}\n")
    found = problems("--config", str(path), "--tokens_per_step", "1000", "--seed", "x", "--sequence_length", "2000")
    assert len(found) == 4
    for part in ("learning_rat:", "seed=x", "n_embd=30", "tokens_per_step=1000"):
        assert any(part in problem for problem in found), part


def test_sizes_that_do_not_fit_are_refused_with_both_numbers():
    (problem,) = problems(model={"n_embd": 30, "n_head": 4})
    assert "30" in problem and "4" in problem and "5, 6" in problem
    (problem,) = problems("--sequence_length", "65", "--model", "char-cpu")
    assert "65" in problem and "64" in problem
    (problem,) = problems("--tokens_per_step", "1000")
    assert "tokens_per_step=1000" in problem and "= 512" in problem and "512 or 1024" in problem
    (problem,) = problems(tokens_per_step=1024, gradient_accumulation_steps=3)
    assert "1024" in problem and "1536" in problem
    (problem,) = problems(model="gpt2-124m")
    assert "gpt2-125m" in problem
    (problem,) = problems(model={"n_layers": 2})
    assert "n_layer?" in problem
    (problem,) = problems(model={"n_layers": 2, "n_heads": 2})
    assert problem.startswith("model.n_layers=2, model.n_heads=2: ") and problem.count("fields are") == 1
    assert problems(model="{n_layer:2,n_head:2}") == ("model: write a space after each ':', as in {n_layer: 2}",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_function", "foo"),
        ("resid_pdrop", 2),
        ("n_inner", -3),
        ("n_inner", 64.5),
        ("scale_attn_weights", "maybe"),
        ("n_layer", 0),
        ("size", [1]),
    ],
)
def test_a_model_field_that_cannot_be_is_named(field, value):
    (problem,) = problems(model={field: value})
    assert problem.startswith(f"model.{field}=")


def test_numbers_that_yaml_reads_as_text_reach_the_model():
    config = model_config({"layer_norm_epsilon": "1e-6", "n_layer": "2", "n_head": 2, "n_embd": 32})
    assert (config.layer_norm_epsilon, config.n_layer) == (1e-6, 2)


def test_a_flag_without_its_value_and_broken_mappings_are_refused():
    assert problems("--output_dir") == ("output_dir: needs a value",)
    assert "mapping" in problems("--model", "{n_layer: 2")[0]
    assert "2^63" in problems("--seed", str(2**63))[0]


def test_world_size_counts_when_the_step_is_cut(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert "3 processes" in problems("--tokens_per_step", "1024")[0]
    assert read("--tokens_per_step", "3072").batch(3).accumulation == 2


def test_batch_arithmetic():
    config = PretrainConfig(max_steps=1, tokens_per_step=524_288)
    batch = config.batch(1)
    assert (batch.accumulation, batch.blocks_per_step, batch.tokens_per_step) == (64, 512, 524_288)
    assert config.batch(8).accumulation == 8
    assert PretrainConfig(max_steps=1, gradient_accumulation_steps=4).batch(2).tokens_per_step == 8 * 1024 * 4 * 2


def test_a_run_has_one_length():
    assert "max_steps and max_tokens are both given" in problems("--max_steps", "3", "--max_tokens", "5")[0]
    with pytest.raises(UserError, match="no length is given"):
        PretrainConfig()
    config = read("--num_train_epochs", "2")  # the command line's length replaces the recipe's
    assert (config.max_steps, config.num_train_epochs) == (None, 2.0)


def test_options_that_would_be_ignored_are_refused():
    assert "min_learning_rate" in problems(lr_scheduler_type="linear", min_learning_rate=1e-5)[0]
    assert "constant_with_warmup" in problems(lr_scheduler_type="constant", warmup_steps=5)[0]


RECIPE = {
    **{"model": "char-cpu", "tokenizer": "char", "sequence_length": 64, "tokens_per_step": 8192, "max_steps": 100},
    **{"per_device_train_batch_size": 16, "learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 10},
    **{"eval_steps": 10, "eval_train": True, "save_best": True, "early_stopping_patience": 3},
}


@pytest.mark.parametrize(
    ("recipe", "stated", "expected"),
    [
        ({}, {"learning_rate": 1e-6}, {"min_learning_rate": None}),
        ({}, {"min_learning_rate": 1e-2}, {"learning_rate": 1e-2}),
        ({}, {"lr_scheduler_type": "linear"}, {"min_learning_rate": None, "warmup_steps": 10}),
        ({}, {"lr_scheduler_type": "constant"}, {"min_learning_rate": None, "warmup_steps": 0}),
        (
            {"lr_scheduler_type": "constant", "min_learning_rate": None, "warmup_steps": 0},
            {"warmup_steps": 5},
            {"lr_scheduler_type": "constant_with_warmup"},
        ),
        (
            {"lr_scheduler_type": "linear", "min_learning_rate": None},
            {"min_learning_rate": 1e-5},
            {"lr_scheduler_type": "cosine_with_min_lr"},
        ),
        ({"optim": "muon", "muon_learning_rate": 0.02}, {"optim": "adamw"}, {"muon_learning_rate": None}),
        ({"ema_decay": 0.9}, {"average_last": 0.2}, {"ema_decay": None}),
        ({}, {"eval_steps": 0}, {"eval_train": False, "save_best": False, "early_stopping_patience": None}),
        ({"eval_steps": 0, "eval_train": False, "save_best": False, "early_stopping_patience": None},
         {"early_stopping_patience": 2}, {"eval_steps": 250}),
        ({}, {"per_device_train_batch_size": 7}, {"tokens_per_step": 8064}),
        ({}, {"per_device_train_batch_size": 4096}, {"tokens_per_step": 262_144}),
        ({}, {"tokens_per_step": 1280}, {"per_device_train_batch_size": 10}),
        ({}, {"gradient_accumulation_steps": 3}, {"tokens_per_step": None}),
        ({"tokens_per_step": None, "gradient_accumulation_steps": 3}, {"tokens_per_step": 4096},
         {"gradient_accumulation_steps": None}),
        ({"per_device_train_batch_size": "auto"}, {"gradient_accumulation_steps": 2},
         {"per_device_train_batch_size": 8, "tokens_per_step": None}),
        ({"tokens_per_step": None, "gradient_accumulation_steps": 3},
         {"per_device_train_batch_size": "auto", "tokens_per_step": 4096}, {"gradient_accumulation_steps": None}),
        ({}, {"sequence_length": 60}, {"tokens_per_step": 8640}),
        ({}, {"sequence_length": 256}, {"model": {"size": "char-cpu", "n_positions": 256}}),
        ({}, {"model": {"size": "char-cpu", "n_positions": 32}}, {"sequence_length": 32}),
        ({}, {"ddp_timeout": 600}, {"stream_timeout": 300.0}),
        ({}, {"stream_timeout": 3600}, {"ddp_timeout": 7200.0}),
        ({}, {"max_tokens": 100_000}, {"max_steps": None}),
        ({"tokenizer": "bpe-300"}, {"init_from": "{nanogpt}"}, {"tokenizer": "auto"}),
        ({}, {"init_from": "{nanogpt}"}, {"tokenizer": "char", "model": "auto"}),
        ({}, {"init_from": "{without}"}, {"tokenizer": "char", "model": "auto"}),
        ({}, {"init_from": "some/model"}, {"tokenizer": "auto", "model": "auto"}),
        ({"dataset": "x/y", "dataset_name": "a", "dataset_split": "b"}, {"dataset": "{without}"},
         {"dataset_name": None, "dataset_split": "train"}),
        ({"dataset": "x/y", "dataset_name": "a"}, {"dataset": "x/y"}, {"dataset_name": "a"}),
    ],
)  # fmt: skip
def test_a_recipes_value_never_refuses_what_is_stated(tmp_path, recipe, stated, expected):
    (tmp_path / "ckpt.pt").touch()
    (tmp_path / "weights").mkdir()
    names = {"{nanogpt}": str(tmp_path / "ckpt.pt"), "{without}": str(tmp_path / "weights")}
    recipe = {**RECIPE, **recipe}
    stated = {key: names.get(str(value), value) for key, value in stated.items()}
    argv = [part for key, value in stated.items() for part in (f"--{key}", str(value))]
    PretrainConfig.from_cli(recipe, [])  # nothing is wrong with it alone
    config = PretrainConfig.from_cli(recipe, argv)
    for key, value in {**stated, **expected}.items():
        assert getattr(config, key) == value, key
    changed = {key for key in expected if key in recipe and recipe[key] != expected[key]} - {"max_steps"}
    assert changed <= config.gave_way.keys()
    for key, (was, now) in config.gave_way.items():
        assert key not in stated and now == getattr(config, key)
        assert was == recipe.get(key, PretrainConfig.__dataclass_fields__[key].default)


@pytest.mark.parametrize(
    ("recipe", "stated", "said"),
    [
        ({}, {"learning_rate": 1e-6, "min_learning_rate": 1e-3}, "min_learning_rate=0.001"),
        ({}, {"eval_steps": 0, "save_best": "true"}, "save_best: nothing is evaluated"),
        ({}, {"muon_learning_rate": 0.1}, "muon_learning_rate=0.1"),
        ({}, {"ema_decay": 1}, "ema_decay=1.0: must be above 0 and below 1"),
        ({}, {"ema_decay": 0.9, "average_last": 0.2}, "ema_decay and average_last are both given"),
        ({}, {"average_last": 0.2, "eval_steps": 0}, "average_last: nothing is evaluated"),
        ({}, {"average_last": 0.2, "metric_for_best_model": "eval_loss_ema"}, "that of an average needs ema_decay"),
        ({}, {"rollback_margin": 1, "save_steps": 0}, "rollback_margin=1: needs checkpoints to go back to"),
        ({}, {"rollback_margin": 1, "save_total_limit": 1}, "the only checkpoint may be a bad one"),
        ({}, {"rollback_margin": 1, "tokens_per_step": "[[0, 2048], [4e6, 4096]]"}, "rollback_margin=1: not with a"),
        ({}, {"rollback_margin": 1, "dataset": '[{"dataset": "embedded"}]'}, "rollback_margin=1: not with a mixture"),
        ({}, {"tokens_per_step": 1000}, "tokens_per_step=1000"),
        ({"min_learning_rate": 1e-2}, {"max_steps": 5}, "min_learning_rate=0.01"),
        ({"model": {"size": "char-cpu", "n_embd": 30}}, {"max_steps": 5}, "n_embd=30"),
    ],
)
def test_what_is_stated_and_what_a_recipe_says_alone_must_go_together(recipe, stated, said):
    argv = [part for key, value in stated.items() for part in (f"--{key}", str(value))]
    with pytest.raises(UserError) as caught:
        PretrainConfig.from_cli({**RECIPE, **recipe}, argv)
    (problem,) = caught.value.problems
    assert problem.startswith(said) or said in problem


def test_missing_or_broken_yaml(tmp_path):
    assert "nowhere.yaml" in problems("--config", "nowhere.yaml")[0]
    assert "use --config FILE.yaml" in problems("--config")[0]
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1\n")
    assert "not YAML" in problems("--config", str(path))[0]


@pytest.mark.parametrize("shape", ["cosine_with_min_lr", "warmup_stable_decay", "linear"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 20, 100])
def test_learning_rate_moves_at_once_peaks_and_ends(shape, warmup_steps):
    config = PretrainConfig(max_steps=100, warmup_steps=warmup_steps, lr_scheduler_type=shape, learning_rate=6e-4)
    rate = LearningRate(config, 100)
    rates = [rate(step) for step in range(1, 151)]
    assert rates[0] > 0
    if 0 < warmup_steps < 100:
        assert rates[warmup_steps - 1] == pytest.approx(6e-4)
    if warmup_steps < 100:
        peak = rates.index(max(rates))
        assert all(later <= earlier for earlier, later in itertools.pairwise(rates[peak:]))
        assert rates[99] == pytest.approx(0 if shape == "linear" else 6e-5)
    assert len(set(rates[99:])) == 1  # constant after the end


def test_long_warmup_starts_at_a_part_of_the_peak():
    config = PretrainConfig(max_steps=10_000, warmup_steps=2000, learning_rate=6e-4)
    assert LearningRate(config, 10_000)(1) == pytest.approx(6e-4 / 2000)


def test_a_recipes_choice_within_its_hub_dataset_does_not_count_for_a_local_one(tmp_path):
    recipe = {"dataset": "user/corpus", "dataset_name": "sample", "max_steps": 1}
    for dataset in ("embedded", str(tmp_path), f"{tmp_path}/*.txt"):
        assert PretrainConfig.from_cli(recipe, ["--dataset", dataset]).dataset_name is None
        assert PretrainConfig.from_cli(recipe, ["--dataset", dataset, "--dataset_name", "x"]).dataset_name == "x"
    assert PretrainConfig.from_cli(recipe, ["--dataset", "user/mirror"]).dataset_name == "sample"


def test_an_unknown_setting_of_a_file_is_reported_with_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("max_step: 5\n")
    (problem,) = problems("--config", "run.yaml")
    assert problem == "run.yaml: max_step: no such setting; did you mean max_steps?"
    assert problems("--max_step", "5") == ("--max_step: no such setting; did you mean --max_steps?",)


def test_a_flag_without_a_value_is_named():
    assert problems("--max_steps") == problems("--max_steps=") == ("max_steps: needs a value",)


def test_numbers_are_rounded_without_exponents():
    numbers = (13_012.0, 999.9, 68_949.0, 0.05914, 12.34)
    assert [rounded(number) for number in numbers] == ["13,000", "1,000", "68,900", "0.0591", "12.3"]


@pytest.mark.parametrize(("size", "near"), [("gpt3", ""), ("gpt2-125", "did you mean gpt2-125m? ")])
def test_only_a_near_name_of_a_size_is_suggested(size, near):
    with pytest.raises(UserError, match=f"model={size}: no such size; {re.escape(near)}sizes are "):
        PretrainConfig(model=size, max_steps=1)
