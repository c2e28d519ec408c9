"""`tokens_per_step` in stages: the sizes of the steps, the text in them, and runs that are cut, resumed and changed."""

from __future__ import annotations

import json
import math
import random
from contextlib import ExitStack, closing
from itertools import accumulate, pairwise

import numpy as np
import pytest
from forked import FORK
from running import FORKED_TWO, Run, StopAt, hashes, lines, prepared, records, same_weights, trained
from test_invariance import written
from token_files import STATED

from hfgpt import PretrainConfig, UserError
from hfgpt.checkpointing.audit import audit
from hfgpt.comparing.comparison import compare
from hfgpt.comparing.reading import read_runs
from hfgpt.data import prepare_data
from hfgpt.data.loader import iterate
from hfgpt.data.stream import join_batches
from hfgpt.planning.estimate import forecast
from hfgpt.settings.batch import largest_step
from hfgpt.settings.step_sizes import StepSizes, find_stage_problem, step_sizes, total_steps

GROWING = StepSizes.plan([[0, 4 * 16], [9 * 64, 12 * 16], [17 * 64, 20 * 16]], 16)
STEPS = 20
STAGES = [[0, 64], [192, 128], [448, 256]]  # from steps 4 and 6 on


def step_by_step(stages, count):
    """The tokens per step of each step, and the tokens before it, from the definition alone."""
    sizes, seen = [], [0]
    for _ in range(count):
        sizes.append(next(size for start, size in reversed(stages) if start <= seen[-1]))
        seen.append(seen[-1] + sizes[-1])
    return sizes, seen


@pytest.mark.parametrize("seed", range(20))
def test_sizes_are_those_of_the_tokens_before_each_step(seed):
    draw = random.Random(seed)
    starts = [0, *sorted(draw.sample(range(1, 2000), draw.randrange(5)))]
    stages = list(zip(starts, accumulate(draw.choice([8, 16, 40]) for _ in starts), strict=True))
    sizes, (wanted, seen) = StepSizes.plan(stages, 8), step_by_step(stages, 100)
    assert [sizes.tokens(step) for step in range(100)] == wanted
    assert [sizes.tokens_after(step) for step in range(101)] == seen
    assert [sizes.steps_at(tokens) for tokens in seen] == list(range(101))
    for tokens in draw.sample(range(seen[-1]), 20):
        assert seen[math.floor(sizes.steps_at(tokens))] <= tokens <= seen[math.ceil(sizes.steps_at(tokens))]
    assert StepSizes.read(json.loads(json.dumps(sizes.to_json())), 8).stages == sizes.stages
    at = draw.randrange(1, 50)  # a resume there has planned the same steps
    again = sizes.followed_by(StepSizes.plan(stages, 8, at, seen[at]))
    assert again.stages == sizes.stages and again.tokens_after(99) == seen[99]


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([[1, 64], [64, 128]], "first stage begins at 1 tokens; it must begin at 0"),
        ([[0, 64], [128, 128], [64, 256]], "stage from 64 tokens comes after that from 128; sort"),
        ([[0, 64], [64, 128], [64, 256]], "two stages begin at 64 tokens"),
        ([[0, 128], [640, 64]], "stage from 640 tokens does not grow (64 after 128)"),
        ([[0, 64], [640, 64]], "does not grow"),
        ([[0, -64], [640, 64]], "must be greater than 0"),
        ([[0, 0], [640, 64]], "must be greater than 0"),
        ([[0, 64, 1], [640, 128]], "a stage is two numbers"),
        ([[0, 64], []], "stages such as"),
        ([[0, 64], [640, 100]], "tokens_per_step=100 in the stage from 640 tokens is not a multiple of"),
        ([[0, 64], [640, 1.5]], "must be a whole number below 2^63 or stages such as"),
        ([[0, 64], [640, True]], "stages such as"),
        ([[0, 64], "x"], "stages such as"),
        ("[[0, 64], [640, 128]", "stages such as"),
        ("[0, 64]", "stages such as"),
        ([[0, 64], [2**63, 128]], "below 2^63"),
    ],
)
def test_impossible_stages_are_refused_in_one_line(stages, problem):
    for value in (stages, json.dumps(stages)):
        with pytest.raises(UserError) as error:
            PretrainConfig.from_layers({"tokens_per_step": value, **ROWS, "max_steps": 1})
        assert len(error.value.problems) == 1 and problem in str(error.value), error.value


ROWS = {"sequence_length": 16, "per_device_train_batch_size": 4}


def test_stages_are_read_as_text_yaml_and_python(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("tokens_per_step: [[0, 64], [1e3, 1.28e2]]\n")
    wanted = [[0, 64], [1000, 128]]
    plain = ROWS | {"max_tokens": 2000}
    for flags in (["--config", str(tmp_path / "run.yaml")], ["--tokens_per_step=[[0, 64], [1e3, 128]]"]):
        assert PretrainConfig.from_cli(plain, flags).tokens_per_step == wanted
    config = PretrainConfig(**plain, tokens_per_step=[[0, 64], [1e3, 128]])
    batch = config.batch(1)
    assert (
        config.tokens_per_step == wanted
        and total_steps(config, step_sizes(config, batch.tokens_per_step), None) == 16 + 7
    )
    assert (batch.micro_batch, batch.accumulation, largest_step(config, batch).accumulation) == (4, 1, 2)
    assert PretrainConfig(**plain, tokens_per_step=[[0, 64]]).tokens_per_step == 64
    with pytest.raises(UserError, match="gradient_accumulation_steps=2: follows from tokens_per_step"):
        PretrainConfig(**plain, tokens_per_step=wanted, gradient_accumulation_steps=2)
    assert find_stage_problem(wanted) is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="tokens_per_step=64 in the stage from 0 tokens is not a multiple of"):
        PretrainConfig(**plain, tokens_per_step=wanted)
    monkeypatch.delenv("WORLD_SIZE")
    recipe = plain | {"tokens_per_step": 640, "per_device_train_batch_size": 5}  # gives way to the stages of the user
    config = PretrainConfig.from_cli(recipe, ["--tokens_per_step", json.dumps(wanted)])
    assert config.per_device_train_batch_size == 4 and config.gave_way
    recipe = plain | {"tokens_per_step": wanted}
    assert PretrainConfig.from_cli(recipe, ["--sequence_length", "20"]).tokens_per_step == [[0, 80], [1000, 160]]


@pytest.fixture(scope="module", params=["memory", "documents", "tokens", "mixed in memory", "mixed", "mixed documents"])
def stream(request, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp("text")
    settings = {"tokenizer": "char", "sequence_length": 16, "eval_tokens": 50, "max_steps": 1}
    texts = {name: written(folder / name, form) for name, form in (("wiki", "txt"), ("code", "parquet"))}
    settings |= {"dataset": texts["code"], "streaming": kind.endswith("documents")}
    if kind.startswith("mixed"):
        settings["dataset"] = [{"dataset": texts[name], "name": name} for name in texts]
        settings["stages"] = [{"until_tokens": 6 * 64, "weights": [0.3, 0.7]}, {"weights": [0.85, 0.15]}]
    if kind == "tokens":
        settings |= {"dataset": written(folder / "llm.c", "llm.c"), "streaming": True, **STATED.get("llm.c", {})}
        settings["tokenizer"] = str(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        if kind == "mixed":  # one in memory, one streamed
            sizes = [sum(file.stat().st_size for file in (folder / name).iterdir()) for name in texts]
            patch.setattr("hfgpt.data.prepare_text.IN_MEMORY_BYTES", min(sizes))
            settings["streaming"] = "auto"
        return prepare_data(PretrainConfig(**settings), GROWING).train


def steps(stream, position, count, world=1, workers=0, first=0):
    with ExitStack() as stack:
        ranks = [iterate(stream, position, rank, world, workers, first) for rank in range(world)]
        for rank in ranks:
            stack.enter_context(closing(rank))
        return [join_batches([next(rank) for rank in ranks]) for _ in range(count)]


def test_the_text_of_growing_steps_does_not_depend_on_processes_workers_and_resumes(stream):
    whole = steps(stream, None, STEPS)
    assert [len(batch.blocks) for batch in whole] == [GROWING.blocks(step) for step in range(STEPS)]
    for world, workers in ((2, 0), (4, 0), (1, 2), (2, 1)):
        for batch, other in zip(whole, steps(stream, None, STEPS, world, workers), strict=True):
            assert np.array_equal(batch.blocks, other.blocks) and batch.position == other.position
    for at in range(1, STEPS):  # in each stage, and at both borders
        position = json.loads(json.dumps(whole[at - 1].position))
        rest = steps(stream, position, min(3, STEPS - at), 1 + at % 2, 0, at)
        assert all(np.array_equal(one.blocks, batch.blocks) for one, batch in zip(rest, whole[at:], strict=False))


def test_growing_steps_take_the_text_that_equal_steps_take(stream, tmp_path):
    """Each logical stream, or the run of blocks in memory, goes on where it was."""
    if hasattr(stream, "sources"):
        pytest.skip("a mixture begins a new round of its sources where steps grow")
    V = stream.divisible if stream.streams else 1
    per_stream = [np.array_split(batch.blocks, V) for batch in steps(stream, None, STEPS)]
    grown = [np.concatenate(parts) for parts in zip(*per_stream, strict=True)]
    same = type(stream)(**{**arguments(stream), "blocks_per_step": 4})
    assert same.streams == stream.streams
    per_stream = [np.array_split(batch.blocks, V) for batch in steps(same, None, len(grown[0]) * V // 4)]
    for one, other in zip(grown, map(np.concatenate, zip(*per_stream, strict=True)), strict=True):
        assert np.array_equal(one, other)


def arguments(stream):
    return {name: getattr(stream, name) for name in stream.__dataclass_fields__}


def test_a_mixture_keeps_its_shares_in_each_stage(stream):
    if not hasattr(stream, "sources"):
        pytest.skip("not a mixture")
    whole = steps(stream, None, STEPS)
    position = stream.start
    borders = sorted({first for first, _ in (*stream.schedule, *GROWING.stages)} | {STEPS})
    for first, last in pairwise(borders):
        _, weights = stream.stage(first)
        blocks = sum(GROWING.blocks(step) for step in range(first, last))
        counts = stream.blocks_between(position, whole[last - 1].position)
        position = whole[last - 1].position
        assert all(abs(counts[name] - blocks * w) < 1 for name, w in zip(stream.names, weights, strict=True))


@pytest.fixture
def growing(config, document_folder):
    """Settings of a run whose steps grow after steps 3 and 5."""

    def build(name="run", kind="memory", **changes):
        dataset = str(document_folder)
        settings = {"dataset": dataset, "tokenizer": "bpe-300", "streaming": kind != "memory"}
        if kind == "mixture":
            settings["dataset"] = [{"dataset": f"{dataset}/0.jsonl"}, {"dataset": f"{dataset}/1.jsonl"}]
            settings["stages"] = [{"until_tokens": 300, "weights": [1, 3]}, {"weights": [1, 1]}]
        settings |= {"tokens_per_step": STAGES, "gradient_accumulation_steps": None, "max_steps": 8}
        return config(name, **{**settings, "per_device_train_batch_size": 4, "save_steps": 1, **changes})

    return build


def tokens_seen(run) -> list[int]:
    return [record["num_input_tokens_seen"] for record in records(run)]


@pytest.mark.parametrize("kind", ["memory", "documents", "mixture"])
def test_a_run_killed_in_any_stage_resumes_bit_for_bit(growing, kind):
    options = {"eval_steps": 4, "eval_tokens": 100, "kind": kind, "save_steps": 2}
    whole = trained(growing("whole", **options))
    for killed_at in (2, 3, 4, 5, 7) if kind == "documents" else (3, 5):
        with pytest.raises(KeyboardInterrupt):
            trained(growing(str(killed_at), **options), StopAt(killed_at))
        resumed = trained(growing(str(killed_at), resume_from_checkpoint="latest", **options))
        assert same_weights(whole, resumed) and hashes(whole) == hashes(resumed)
        for key in ("loss", "learning_rate", "grad_norm", "num_input_tokens_seen", "step"):
            assert [line[key] for line in records(whole)] == [line[key] for line in records(resumed)], key
        assert not audit(resumed.folder.path)["problems"]
    assert tokens_seen(whole) == step_by_step(STAGES, 8)[1][1:] == [64, 128, 192, 320, 448, 704, 960, 1216]
    assert audit(whole.folder.path)["tokens"] == 1216


def test_the_micro_batch_does_not_change_growing_steps(growing):
    runs = [trained(growing(str(size), per_device_train_batch_size=size)) for size in (1, 2, "auto")]
    assert hashes(runs[0]) == hashes(runs[1]) == hashes(runs[2])
    losses = [[record["loss"] for record in records(run)] for run in runs]
    assert losses[0] == pytest.approx(losses[2], abs=1e-5) and losses[1] == pytest.approx(losses[2], abs=1e-5)


def test_a_growing_run_is_the_run_whose_step_is_changed_by_hand(growing):
    """Stage by stage as separate runs with a constant rate, each resumed with the next step size."""
    flat = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    whole = trained(growing("whole", **flat))
    for tokens, last in ((64, 3), (128, 5), (256, 8)):
        by_hand = growing("hand", **flat, tokens_per_step=tokens, max_steps=last, resume_from_checkpoint="latest")
        run = trained(PretrainConfig(**{**by_hand.to_dict(), "accept_changed_text": last > 3}))
    assert same_weights(whole, run) and hashes(whole) == hashes(run) and tokens_seen(whole) == tokens_seen(run)
    assert not audit(run.folder.path)["problems"]  # a resume has recorded what has changed
    again = trained(growing("hand", **flat, tokens_per_step=256, max_steps=9, resume_from_checkpoint="latest"))
    assert tokens_seen(again)[-1] == tokens_seen(whole)[-1] + 256  # what was accepted once is not asked again


@pytest.mark.parametrize("kind", ["memory", "documents"])
def test_later_stages_may_change_and_earlier_ones_may_not(growing, kind):
    with pytest.raises(KeyboardInterrupt):
        trained(growing(kind=kind), StopAt(4))  # the newest checkpoint is of step 3 or 4
    resume = {"kind": kind, "resume_from_checkpoint": "checkpoint-3"}
    for stages in ([[0, 128], [640, 256]], [[0, 64], [128, 128], [448, 256]], 128):
        with pytest.raises(UserError, match=r"tokens_per_step, in blocks of sequence_length \(.*\)") as error:
            prepared(growing(**resume, tokens_per_step=stages))
        assert len(error.value.problems) == 1
    later = [[0, 64], [192, 192], [768, 512]]
    run = trained(growing(**resume, tokens_per_step=later))
    assert tokens_seen(run) == step_by_step(later, 8)[1][1:] and not audit(run.folder.path)["problems"]
    event = next(record for record in lines(run.folder.path, "event") if record["event"] == "resume")
    assert event["changed_settings"]["tokens_per_step"] == {"from": STAGES, "to": later}
    first = hashes(trained(growing("plain", kind, tokens_per_step=64, max_steps=3)))
    added = trained(growing("plain", tokens_per_step=later, **resume))
    assert tokens_seen(added) == tokens_seen(run) and hashes(added) == hashes(run)
    assert first == hashes(run)[:3] and not audit(added.folder.path)["problems"]


def test_a_stage_that_the_streams_of_a_run_do_not_divide_is_refused(growing):
    trained(growing(kind="documents", tokens_per_step=64, max_steps=2))
    config = growing(kind="documents", tokens_per_step=[[0, 64], [128, 96]], resume_from_checkpoint="latest",
                     per_device_train_batch_size=2)  # fmt: skip
    with pytest.raises(UserError, match=r"read in 4 streams, so steps must be multiples of 64 tokens"):
        prepared(config)


def test_the_schedule_goes_by_tokens(growing):
    """A growing run has the rates that a run of small steps has at the same tokens; its warm-up ends with its step."""
    small = trained(growing("small", tokens_per_step=64, max_steps=19))
    grown = trained(growing("grown"))
    rates = {record["num_input_tokens_seen"]: record["learning_rate"] for record in records(small)}
    for record in records(grown):
        assert record["learning_rate"] == pytest.approx(rates[record["num_input_tokens_seen"]])
    assert records(grown)[1]["learning_rate"] == 1e-2 and records(grown)[-1]["learning_rate"] == pytest.approx(1e-3)
    for stages, left in (([[0, 64], [192, 128]], 0.2), (STAGES, 0)):  # with other stages, at the same tokens
        again = trained(growing("small", tokens_per_step=stages, max_steps=9, resume_from_checkpoint="checkpoint-3"))
        for record in records(again):
            wanted = rates[min(record["num_input_tokens_seen"], 1216)] if left == 0 else None
            assert wanted is None or record["learning_rate"] == pytest.approx(wanted)


def test_what_a_growing_run_says_of_itself(growing, tmp_path, capsys):
    run = trained(growing(max_steps=None, max_tokens=1300, mfu_peak_tflops=1.0, eval_steps=4, eval_tokens=100))
    out = capsys.readouterr().out
    for text in (
        "step     steps 1 to 3: 64 tokens = micro-batch 4 x sequence 16 x accumulation 1 x processes 1",
        "step     steps 6 to 8: 256 tokens = micro-batch 4 x sequence 16 x accumulation 4 x processes 1",
        "run      8 steps, 1,216 tokens",
        "2 warm-up steps to 0.01, by tokens, because steps grow",
    ):
        assert text in out
    plan = json.loads(run.folder.run_json.read_text())["plan"]
    assert (plan["tokens_per_step"], plan["accumulation"], plan["max_steps"], plan["max_tokens"]) == (
        None,
        None,
        8,
        1216,
    )
    assert [(one["last_step"], one["tokens_per_step"], one["accumulation"]) for one in plan["stages"]] == [
        (3, 64, 1), (5, 128, 2), (8, 256, 4)
    ]  # fmt: skip
    for record, tokens in zip(records(run), step_by_step(STAGES, 8)[0], strict=True):
        assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(tokens)
    assert run.callbacks.state.tokens_left == 0 and run.callbacks.state.epoch == pytest.approx(
        1216 / 16 / run.data.train.blocks_per_epoch
    )
    card = (run.folder.checkpoint(8) / "README.md").read_text()
    assert "64, 128 from 192 tokens on, 256 from 448 tokens on" in card
    other = trained(growing("other", tokens_per_step=64, max_steps=19, eval_steps=4, eval_tokens=100))
    found = compare(read_runs([run.folder.path, other.folder.path]))
    assert found["equal"]["tokens"]["at"] == 1216 and found["equal"]["steps"]["at"] == 8
    assert found["settings_that_differ"]["tokens_per_step"] == {"run": STAGES, "other": 64}
    sizes = [one["tokens_per_step"] for one in found["runs"]]
    assert sizes == ["64, 128 from 192 tokens on, 256 from 448 tokens on", 64]
    assert found["pairs"][0]["same_tokens"]["equal"] is False and found["pairs"][0]["same_tokens"]["step"] == 4
    short = growing("short", max_steps=4)
    assert "it ends before the last stage of tokens_per_step begins" in "\n".join(prepared(short).plan.lines())


def test_the_forecast_of_a_growing_run():
    card = {"device": "NVIDIA GeForce RTX 4070 Ti", "max_tokens": 10**10}
    plain, grown = (forecast(**card, tokens_per_step=size) for size in (65536, "[[0, 65536], [1e9, 524288]]"))
    assert grown.steps == 15259 + (10**10 - 15259 * 65536) // 524288
    found, stages = grown.to_dict(), grown.to_dict()["stages"]
    assert found["hours"] == pytest.approx(plain.to_dict()["hours"], rel=1e-4) and found["seconds_per_step"] is None
    assert [one["accumulation"] * found["micro_batch"] * 1024 for one in stages] == [65536, 524288]
    assert [one["last_step"] for one in stages] == [15259, grown.steps]
    assert stages[0]["seconds_per_step"] == pytest.approx(plain.to_dict()["seconds_per_step"])
    assert "step     steps 15,260 to 32,425: 524,288 tokens = micro-batch 8" in "\n".join(grown.lines())


@pytest.mark.slow
def test_processes_that_change_in_each_stage_do_not_change_the_run(tmp_path):
    dataset = written(tmp_path / "text", "parquet")

    def leg(folder, processes, last, workers, micro_batch) -> Run:
        flags = [
            "--dataset",
            dataset,
            "--tokens_per_step",
            "[[0, 256], [1000, 512], [2600, 1024]]",
            "--max_steps",
            last,
        ]
        flags += ["--per_device_train_batch_size", micro_batch, "--dataloader_num_workers", workers]
        flags += ["--mixed_precision", "no", "--lr_scheduler_type", "constant", "--resume_from_checkpoint", "latest"]
        run = Run([*FORKED_TWO[:-1], f"--nproc_per_node={processes}"], folder, *map(str, flags))
        said = run.end(seconds=200)
        assert run.process.returncode == 0, said
        return run

    assert FORKED_TWO[0] == FORK
    whole = leg(tmp_path / "whole", 1, 10, 1, 8)
    for processes, last, workers, micro_batch in ((2, 3, 1, 4), (1, 6, 0, 2), (2, 8, 2, 1), (1, 10, 1, 8)):
        cut = leg(tmp_path / "cut", processes, last, workers, micro_batch)
    assert cut.ledger() == whole.ledger() and len(whole.ledger()) == 10
    for key, error in (("num_input_tokens_seen", 0), ("loss", 1e-5)):
        one, other = ([record[key] for record in run.records("loss")] for run in (cut, whole))
        assert one == pytest.approx(other, abs=error), key
