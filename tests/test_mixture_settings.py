"""A mixture as settings: in YAML, on a command line, and everything that is wrong with it at once."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from hfgpt import PretrainConfig
from hfgpt.errors import UserError
from hfgpt.settings.step_sizes import StepSizes

AB = [{"dataset": "a.txt", "weight": 0.7}, {"dataset": "b.txt", "weight": 0.3}]
YAML = """
dataset:
  - {dataset: HuggingFaceFW/fineweb-edu, dataset_name: sample-10BT, weight: 0.7}
  - {dataset: "texts/*.jsonl.zst", text_column: body, weight: 0.2, max_epochs: 4}
  - {dataset: shards/, tokenizer: gpt2, weight: 1e-1}
stages:
  - {until_tokens: 9e9}
  - {weights: [0.2, 0.3, 0.5]}
max_steps: 5
"""


def problems_of(**settings) -> list[str]:
    with pytest.raises(UserError) as error:
        PretrainConfig(**{"max_steps": 1, **settings})
    return list(error.value.problems)


def test_a_mixture_in_yaml_over_a_recipe(tmp_path):
    (tmp_path / "mixture.yaml").write_text(YAML)
    recipe = {"dataset": "other/set", "dataset_name": "part", "text_column": "text"}
    config = PretrainConfig.from_cli(recipe, ["--config", str(tmp_path / "mixture.yaml")])
    assert [source.name for source in config.mixture.sources] == ["fineweb-edu", "texts", "shards"]
    assert [source.max_epochs for source in config.mixture.sources] == [None, 4, None]
    assert config.dataset_name is None and config.tokenizer == "gpt2"
    first, second = config.mixture.stages
    assert first.weights == (Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)) and first.until_tokens == 9 * 10**9
    assert second.weights == (Fraction(1, 5), Fraction(3, 10), Fraction(1, 2)) and second.until_tokens is None
    assert [step for step, _ in config.mixture.schedule(StepSizes.plan([[0, 10**6]], 1))] == [0, 9000]
    assert [
        step for step, _ in config.mixture.schedule(StepSizes.plan([[0, 10**6]], 1, 8000, 8 * 10**9 + 1), 8000)
    ] == [8000, 9000]
    assert [step for step, _ in config.mixture.schedule(StepSizes.plan([[0, 10**6]], 1), 9500)] == [9500]
    numbers = [config.dataset[2]["weight"], config.stages[0]["until_tokens"], config.stages[1]["weights"]]
    assert numbers == [0.1, 9 * 10**9, [0.2, 0.3, 0.5]]  # YAML 1.1 takes 1e-1 and 9e9 for text
    own = config.of_text(config.mixture.sources[0].settings)
    assert (own.dataset, own.dataset_name) == ("HuggingFaceFW/fineweb-edu", "sample-10BT")


def test_a_mixture_on_the_command_line_is_that_of_yaml():
    flags = ["--dataset", json.dumps(AB), "--stages", "[{until_tokens: 100}, {weights: {b: 1}}]", "--max_steps", "1"]
    config = PretrainConfig.from_cli({"dataset": "embedded"}, flags)
    assert config.dataset == AB and config.mixture.stages[1].weights == (0, 1)
    assert PretrainConfig.of_run(json.loads(json.dumps(config.to_dict()))).mixture == config.mixture
    assert PretrainConfig(dataset="[ab]*.txt", max_steps=1).mixture is None  # a glob


def test_names_are_unique_and_weights_equal_by_default():
    mixture = PretrainConfig(
        dataset=["x/a.txt", "y/a.jsonl.gz", "*.txt", {"dataset": "c", "name": "a-2"}], max_steps=1
    ).mixture
    assert [source.name for source in mixture.sources] == ["a", "a-3", "text", "a-2"]
    assert mixture.stages[0].weights == (Fraction(1, 4),) * 4


def test_all_problems_are_named_at_once():
    wrong = [{"dataset": "a", "weight": -1}, {"dataset": "b", "weight": "x", "max_epochs": 0}, {"weihgt": 1}, 3]
    found = problems_of(dataset=wrong, model="nope")
    for words in (
        "dataset[0].weight=-1: must be a number, 0 or more",
        "dataset[1].weight=x: must be a number",
        "dataset[1].max_epochs=0: must be a whole number above 0",
        "dataset[2].weihgt: no such setting of a source",
        "dataset[2]: has no dataset",
        "dataset[3]=3: must be a name or a mapping",
        "model=nope",
    ):
        assert sum(words in problem for problem in found) == 1, (words, found)
    assert problems_of(dataset=[{"dataset": name, "weight": 0} for name in "ab"]) == [
        "dataset: all weights are 0; give one a weight above 0"
    ]
    assert "1 of 2 sources have a weight" in problems_of(dataset=[AB[0], "b"])[0]
    for one in (
        {"dataset": [{**AB[0], "weight": "x"}, AB[1]]},
        {"dataset": [{"dataset": "a", "weihgt": 1}, AB[1]]},
        {"dataset": [{"dataste": "a", "weight": 1}, AB[1]]},
        {"dataset": [{**AB[0], "name": "b"}, AB[1]], "stages": [{"weights": {"a": 1}}]},
        {"eval_dataset": {"a": {"dataste": "a"}}},
        {"dataset": [{"dataset": None, "weight": 1}, AB[1]]},
    ):
        assert len(problems_of(**one)) == 1, problems_of(**one)
    stages = [{"until_tokens": 9}, {"weights": [1]}, {"until_tokens": 5, "weights": {"c": 1}}, {"weights": [0, 0]}]
    found = problems_of(dataset=AB, stages=stages)
    for words in (
        "stages[1].weights: 1 weight for 2 sources",
        "stages[1]: has no until_tokens",
        "stages[2].weights: no source c; the sources are a, b",
        "stages[2].until_tokens=5: must be above 9",
        "stages[3].weights: all are 0",
    ):
        assert sum(words in problem for problem in found) == 1, (words, found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": [{"dataset": "a", "tokenizer": "x"}, {"dataset": "b", "tokenizer": "y"}]}, "x and y differ"),
        ({"dataset": AB, "tokenizer": "char", "text_column": "body"}, "text_column=body: dataset is a list"),
        ({"dataset": [{**AB[0], "tokenizer": "x"}], "tokenizer": "char"}, "char and x differ"),
        ({"dataset": AB, "max_steps": None, "num_train_epochs": 2}, "num_train_epochs=2.0: a mixture has no epoch"),
        ({"dataset": "a.txt", "stages": [{"weights": [1]}]}, "stages: only for a mixture"),
        ({"dataset": [{**AB[0], "name": "a/b"}]}, "dataset[0].name=a/b: must be letters"),
        ({"dataset": [{**AB[0], "name": "a"}, {**AB[1], "name": "a"}]}, "two sources have the name a"),
        ({"metric_for_best_model": "loss/wiki"}, "metric_for_best_model=eval_loss/wiki: must be one of eval_loss"),
        ({"eval_dataset": {}}, "eval_dataset: the mapping is empty"),
        ({"eval_dataset": {"x": {"dataset_name": "q"}}}, "eval_dataset.x: has no dataset"),
        ({"dataset": "[{"}, "dataset=[{: must be text in UTF-8 or a list of mappings"),
        ({"dataset": []}, "dataset: needs a value"),
    ],
)
def test_a_wrong_setting_is_one_line(settings, words):
    found = problems_of(**settings)
    assert sum(words in problem for problem in found) == 1 and "\n" not in "".join(found), found


def test_the_metric_that_is_best_may_be_of_a_source_or_a_named_text():
    config = PretrainConfig(dataset=AB, metric_for_best_model="loss/b", max_steps=1)
    assert config.metric_for_best_model == "eval_loss/b"
    PretrainConfig(eval_dataset={"wiki": "w.txt"}, metric_for_best_model="eval_bits_per_byte/wiki", max_steps=1)
