"""One process, several with the whole model each (DDP), several with a sharded model (FSDP2): the same run."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import psutil
import pytest
import torch
from forked import FORK, completed
from running import DISTRIBUTED, FORKED_TWO, ROOT, TWO, lines, rows_of_steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hfgpt import PretrainConfig
from hfgpt.checkpointing.audit import audit
from hfgpt.checkpointing.checkpoint import find_damage
from hfgpt.distributed.fsdp2 import take_fsdp_request
from hfgpt.errors import UserError
from hfgpt.training.plan import check_memory, setting_of

CONFIGS = ROOT / "accelerate_configs"
# Saves what each process holds of the parameters, to see that they are shared out.
RECIPE = """
import os
from pathlib import Path
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from hfgpt import PretrainConfig, Pretrainer, run_recipe

class Held(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **kwargs):
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        held = sum(p.numel() for p in local), sum(p.numel() for p in model.parameters())
        Path(args.output_dir, f"held.{os.environ.get('RANK', '0')}").write_text(f"{held[0]} {held[1]}")

run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [Held()]).train())
"""


@pytest.fixture
def launch(tmp_path, document_folder):
    """Runs the recipe as `kind` of run (one, cpus, ddp or fsdp2) in the folder `name`; returns that folder."""
    (tmp_path / "recipe.py").write_text(RECIPE)

    def launch(kind: str, name: str, *flags: str, python: str = FORK) -> Path:
        names = {"one": "cpu", "cpus": "cpu_2proc", "ddp": "multi_gpu_ddp", "fsdp2": "multi_gpu_fsdp2"}
        names["single"] = "single_gpu_bf16"
        settings = (CONFIGS / f"{names[kind]}.yaml").read_text()
        settings = settings.replace("use_cpu: false" if kind == "single" else "mixed_precision: bf16", "use_cpu: true")
        (tmp_path / f"{kind}.yaml").write_text(settings)  # the cards' own file, but for the cards
        command = [python, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / f"{kind}.yaml")]
        command += [str(tmp_path / "recipe.py"), "--dataset", str(document_folder), *DISTRIBUTED]
        command += ["--output_dir", str(tmp_path / name), *flags]
        done = completed(command, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\nsaves ") == 1  # one process speaks
        return tmp_path / name

    return launch


def assert_same(one, other, tolerance=2e-5):
    assert (one / "ledger.jsonl").read_text() == (other / "ledger.jsonl").read_text()
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen"):
        kind = "eval_loss" if key == "eval_loss" else "loss"
        first, second = ([line[key] for line in lines(folder, kind)] for folder in (one, other))
        assert second == pytest.approx(first, abs=tolerance), key
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        first, second = (load_file(folder / "checkpoint-latest" / name) for folder in (one, other))
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(second[key], first[key], atol=tolerance, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_one_process_two_and_two_that_share_the_model_are_one_run(launch, optim):
    """8 blocks x 2 on one process are 4 x 2 on two."""
    flags = ["--optim", optim, "--average_last", "0.5"]
    one = launch("one", "one", "--per_device_train_batch_size", "8", *flags)
    for kind in ("ddp", "fsdp2"):
        python = sys.executable if (kind, optim) == ("ddp", "adamw") else FORK  # once as a user starts it
        two = launch(kind, kind, "--per_device_train_batch_size", "4", *flags, python=python)
        tolerance = 2e-5 if optim == "adamw" else 4e-3  # Muon rounds its updates to bf16
        assert_same(one, two, tolerance)
        ours, theirs = (load_file(run / "checkpoint-latest/training_state/average.safetensors") for run in (one, two))
        for key in ours:
            torch.testing.assert_close(theirs[key], ours[key], atol=tolerance, rtol=1e-4)
        held = [tuple(map(int, (two / f"held.{rank}").read_text().split())) for rank in (0, 1)]
        share = 1 if kind == "ddp" else 2
        assert [mine * share for mine, _ in held] == pytest.approx([total for _, total in held], rel=0.05)
        model, info = AutoModelForCausalLM.from_pretrained(two / "checkpoint-latest", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert model.config.architectures == ["GPT2LMHeadModel"]


@pytest.mark.slow
def test_a_run_with_muon_and_rates_of_its_groups_resumes_as_another_kind(launch, tmp_path):
    rates = ["--optim", "muon", "--muon_learning_rate", "2e-2", "--embedding_learning_rate", "3e-2"]
    rates += ["--vector_learning_rate", "5e-3", "--embedding_weight_decay", "0.2"]
    whole = launch("one", "whole", "--per_device_train_batch_size", "8", *rates)
    moved = tmp_path / "moved"
    shutil.copytree(whole / "checkpoint-2", moved / "checkpoint-2")
    resume = ["--resume_from_checkpoint", "latest", "--per_device_train_batch_size", "4", *rates]
    for kind, steps in (("ddp", "3"), ("fsdp2", "4"), ("one", "5"), ("fsdp2", "6")):
        launch(kind, "moved", *resume, "--max_steps", steps)
    first, second = ([{**line, "time": 0} for line in lines(folder)] for folder in (whole, moved))
    keys = ["learning_rate", "muon_learning_rate", "embedding_learning_rate", "vector_learning_rate"]
    assert [[line[key] for key in keys] for line in second] == [[line[key] for key in keys] for line in first[2:]]
    assert [line["loss"] for line in second] == pytest.approx([line["loss"] for line in first[2:]], abs=4e-3)
    ours, theirs = (load_file(run / "checkpoint-6/training_state/optimizer.safetensors") for run in (whole, moved))
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(theirs[key], ours[key], atol=4e-3, rtol=1e-4)


@pytest.mark.slow
def test_a_run_on_a_mixture_resumes_as_another_kind(launch, tmp_path, document_folder):
    texts = [{"text": f"code {n} says {n * n % 101}"} for n in range(200)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    sources = [{"dataset": str(document_folder), "name": "docs", "weight": 0.7}]
    sources += [{"dataset": str(tmp_path / "code.jsonl"), "weight": 0.3}]
    mixture = ["--dataset", json.dumps(sources), "--ema_decay", "0.8"]
    whole = launch("one", "whole", "--per_device_train_batch_size", "8", *mixture)
    shutil.copytree(whole / "checkpoint-2", tmp_path / "moved" / "checkpoint-2")
    resume = ["--resume_from_checkpoint", "latest", "--per_device_train_batch_size", "4", *mixture]
    for kind, steps in (("fsdp2", "4"), ("one", "5"), ("fsdp2", "6")):
        moved = launch(kind, "moved", *resume, "--max_steps", steps)
    assert (whole / "ledger.jsonl").read_text().splitlines()[2:] == (moved / "ledger.jsonl").read_text().splitlines()
    for key in ("loss", "loss/docs", "loss/code", "learning_rate"):
        first, second = ([line[key] for line in lines(folder)] for folder in (whole, moved))
        assert second == pytest.approx(first[2:], abs=2e-5) and None not in second, key
    averages = [lines(folder, "eval_loss")[-1]["eval_loss_ema"] for folder in (whole, moved)]
    assert averages[1] == pytest.approx(averages[0], abs=2e-5)
    assert all(find_damage(folder) is None for folder in moved.glob("checkpoint-?"))


@pytest.mark.slow
def test_given_weights_reach_all_processes(launch, tmp_path):
    first = launch("single", "first", "--max_steps", "2")
    begin = ["--init_from", str(first / "checkpoint-2"), "--tokenizer", str(first / "checkpoint-2"), "--max_steps", "1"]
    begin += ["--eval_steps", "1", "--learning_rate", "1e-12", "--seed", "7"]
    two = launch("fsdp2", "fsdp2", "--per_device_train_batch_size", "4", *begin)
    before, after = (lines(folder, "eval_loss")[-1]["eval_loss"] for folder in (first, two))
    assert after == pytest.approx(before, abs=2e-5)


@pytest.mark.slow
def test_a_sharded_model_trains_in_bf16_and_with_recomputation(launch):
    """Near to float32; the precision of the weights and of the loss stays."""
    exact = launch("one", "exact")
    flags = ["--mixed_precision", "bf16", "--gradient_checkpointing", "true", "--per_device_train_batch_size", "4"]
    near = launch("fsdp2", "near", *flags)
    losses = [[line["loss"] for line in lines(folder)] for folder in (exact, near)]
    assert losses[1] == pytest.approx(losses[0], abs=0.03) and losses[1] != losses[0]
    weights = load_file(near / "checkpoint-latest" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


FAILING = """
import os, signal, time
from transformers import TrainerCallback
from hfgpt import PretrainConfig, Pretrainer, run_recipe

class Fails(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3 and os.environ["RANK"] == "1":
            {what}

run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [Fails()]).train())
"""


@pytest.fixture
def failing(tmp_path, document_folder):
    """Runs a recipe on two processes with logs of their own; the exit code, and the last line of the main process."""
    recipe = tmp_path / "recipe.py"

    def run(text: str, *flags: str, python: str = FORK) -> tuple[int, str]:
        recipe.write_text(text)
        command = [python, *TWO[1:], "--log_dir", str(tmp_path / "logs"), "--redirects", "2"]
        command += [str(recipe), "--dataset", str(document_folder), *DISTRIBUTED, "--output_dir", str(tmp_path / "run")]
        command += ["--per_device_train_batch_size", "4", "--ddp_timeout", "6", "--stream_timeout", "5", *flags]
        cpu = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
        done = completed(command, {**os.environ, **cpu}, timeout=200, cwd=tmp_path)
        assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]  # none is left
        [log] = (tmp_path / "logs").rglob("attempt_0/0/stderr.log")
        stderr = log.read_text().splitlines()
        return done.returncode, stderr[-1] if stderr else ""

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raise ValueError('a bad card')", "process 1 of 2: ValueError: a bad card"),
        (
            "signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(1000)",
            "no answer from process 1 (on {host}) of 2 within ddp_timeout=6 s",
        ),
    ],
)
def test_the_main_process_reports_why_another_failed(failing, tmp_path, what, expected):
    code, last = failing(FAILING.format(what=what), python=sys.executable)
    assert code == 1
    assert last.startswith(f"error: {expected.format(host=socket.gethostname())}"), last
    assert last.endswith("continue with --resume_from_checkpoint latest")
    assert find_damage((tmp_path / "run" / "checkpoint-latest").resolve()) is None


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_process_leaves_a_checkpoint_of_the_last_finished_step(failing, tmp_path, rank):
    text = FAILING.format(what="raise ValueError('a bad card')").replace('"RANK"] == "1"', f'"RANK"] == "{rank}"')
    code, last = failing(text, "--save_steps", "2")
    assert code == 1 and last.startswith(f"error: process {rank} of 2: ValueError: a bad card")
    run = tmp_path / "run"
    assert "continue with --resume_from_checkpoint latest" in last
    assert (run / "checkpoint-latest").resolve().name == "checkpoint-3" and find_damage(run / "checkpoint-3") is None
    assert (
        [line["step"] for line in lines(run, "loss")]
        == [1, 2, 3]
        == [line["step"] for line in map(json.loads, (run / "ledger.jsonl").open())]
    )
    name = "traceback.txt" if rank == 0 else "traceback-process-1.txt"
    assert "a bad card" in (run / name).read_text()


STARTING = """
import os, signal, time
from hfgpt import PretrainConfig, Pretrainer, run_recipe
import hfgpt.training.pretrainer

class Odd(Exception):
    def __init__(self, message, *, code):
        super().__init__(message)

def fails(*_, **__):
    {what}

{where}
run_recipe(lambda: Pretrainer(PretrainConfig.from_cli()).train())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "what", "expected"),
    [
        ("if os.environ['RANK'] == '1': fails()", "time.sleep(1000)", "process 1 of 2 has not started within ddp_"),
        (
            "if os.environ['RANK'] == '1': time.sleep(2), fails()",
            "os._exit(3)",
            "process 1 of 2 has not started; stopped by SIGTERM",
        ),
        (
            "if os.environ['RANK'] == '0': hfgpt.training.open_text.prepare_data = fails",
            "raise Odd('odd', code=3)",
            "process 0 ",
        ),
    ],
)
def test_the_main_process_reports_why_another_did_not_start(failing, tmp_path, where, what, expected):
    code, last = failing(STARTING.format(where=where, what=what))
    assert code and last.startswith(f"error: {expected}"), last
    assert "1 of 2" in last or "Odd: odd" in last
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.slow
def test_the_main_process_reports_wrong_use_even_if_it_is_slower(failing):
    slow = "if os.environ['RANK'] == '0': time.sleep(1.5)"
    code, last = failing(STARTING.format(where=slow, what="pass"), "--per_device_train_batch_size", "5")
    assert code and last.startswith("error: ") and "per_device_train_batch_size" in last


@pytest.mark.slow
def test_text_that_one_process_cannot_read_names_the_process(failing, tmp_path):
    broken = """
class Broken:
    def __init__(self, batches): self.batches, self.left = batches, 4
    def __next__(self):
        self.left -= 1
        if not self.left: raise hfgpt.errors.UserError("a/file.jsonl: cannot be read")
        return next(self.batches)
    def close(self): self.batches.close()

import hfgpt.errors
iterate = hfgpt.training.setup.iterate
if os.environ["RANK"] == "1": hfgpt.training.setup.iterate = lambda *a, **k: Broken(iterate(*a, **k))
"""
    _, last = failing(STARTING.format(where=broken, what="pass"))
    assert last == (
        "error: process 1 of 2: a/file.jsonl: cannot be read; ended after step 3; continue with "
        "--resume_from_checkpoint latest"
    )


EARLY = """
import os
from hfgpt import PretrainConfig, Pretrainer, run_recipe

def main():
    config = PretrainConfig.from_cli()
    if os.environ["RANK"] == "1":
        raise RuntimeError("before it has met anybody")
    Pretrainer(config).train()

run_recipe(main)
"""


@pytest.mark.slow
def test_a_failure_before_the_rendezvous_is_reported(failing):
    code, last = failing(EARLY)
    assert code and last.startswith("error: process 1 of 2: RuntimeError: before it has met anybody"), last


DIFFERING = """
import os, time
from transformers import TrainerCallback
from hfgpt import PretrainConfig, Pretrainer, run_recipe

class Differs(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= os.environ["RANK"] == "1" and state.global_step == 1
        control.should_evaluate |= os.environ["RANK"] == "0" and state.global_step == 2

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        control.should_training_stop |= os.environ["RANK"] == "1" and state.global_step == 4

run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [Differs()]).train())
"""


@pytest.mark.slow
def test_what_a_callback_requests_on_one_process_is_done_on_all(failing, tmp_path):
    code, last = failing(DIFFERING, "--save_steps", "100", "--eval_steps", "4")
    assert code == 0, last
    run = tmp_path / "run"
    assert [path.name for path in sorted(run.glob("checkpoint-?"))] == ["checkpoint-1", "checkpoint-4"]
    assert lines(run, "eval_loss")[0]["step"] == 2
    assert lines(run)[-1]["step"] == 4


@pytest.mark.slow
def test_processes_that_wait_for_different_things_are_reported(failing):
    """As where a callback exchanges something on one process alone."""
    gathers = "pretrainer.run.machine.ranks.gather(1) or time.sleep(1000)"
    code, last = failing(
        FAILING.format(what=gathers)
        .replace("run_recipe(lambda: Pretrainer(", "pretrainer = Pretrainer(")
        .replace("[Fails()]).train())", "[Fails()])\nrun_recipe(pretrainer.train)")
    )
    assert code and last.startswith("error: the processes are waiting for different things"), last


COUNTING = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import TrainerCallback
from hfgpt import PretrainConfig, Pretrainer, run_recipe

class Counts(TrainerCallback):
    reduced, steps = 0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        def hook(group, bucket):
            self.reduced += bucket.buffer().numel()
            return allreduce_hook(group, bucket)

        pretrainer.run.step.parallel_model.register_comm_hook(None, hook)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps += 1
        assert self.reduced == self.steps * sum(p.numel() for p in model.parameters()), (self.reduced, self.steps)

counts = Counts()
pretrainer = Pretrainer(PretrainConfig.from_cli(), [counts])
run_recipe(pretrainer.train)
assert counts.steps == 6
"""


@pytest.mark.slow
def test_gradients_are_exchanged_once_a_step(tmp_path, document_folder):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(COUNTING)
    flags = ["--dataset", str(document_folder), *DISTRIBUTED, "--output_dir", str(tmp_path / "run")]
    flags += ["--per_device_train_batch_size", "2"]  # x 16 x 2 processes x accumulation 4
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = completed([*FORKED_TWO, str(recipe), *flags], environment, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optim"), [("fsdp2", "adamw"), ("fsdp2", "muon"), ("ddp", "muon")])
def test_a_non_finite_step_is_skipped_by_all_processes(launch, tmp_path, kind, optim):
    poison = "from running import PoisonMicroBatch\n"
    recipe = (tmp_path / "recipe.py").read_text().replace("[Held()]", "[Held(), PoisonMicroBatch(3, 0, rank=1)]")
    (tmp_path / "recipe.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n{poison}{recipe}")
    folder = launch(kind, "run", "--per_device_train_batch_size", "4", "--optim", optim)
    [record] = lines(folder, "documents")
    assert record["step"] == 3 and record["ranks"] == [1] and record["documents"]
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        tensors = load_file(folder / "checkpoint-6" / name)
        assert all(value.isfinite().all() for value in tensors.values())
    steps = {int(value) for key, value in tensors.items() if key.startswith("step.")}
    assert steps == {5}  # of six


BROKEN = """
import json, os, sys
sys.path.insert(0, {tests!r})
from running import BrokenText
from hfgpt import PretrainConfig, Pretrainer, run_recipe
from hfgpt.training import spikes

spikes.WINDOW = 6
rows = json.load(open(os.environ["ROWS"]))
run_recipe(lambda: Pretrainer(PretrainConfig.from_cli(), [BrokenText(rows)]).train())
"""


@pytest.mark.slow
@pytest.mark.parametrize("skips", ["0", "6"])
def test_spikes_and_rollbacks_are_the_same_on_one_process_two_and_two_that_share_the_model(
    launch, tmp_path, document_folder, monkeypatch, skips
):
    """Of three broken steps in a row, either the losses are above the others, or all are skipped."""
    flags = ["--max_steps", "20", "--rollback_margin", "1", "--rollback_steps", "3", "--skip_spikes", skips]
    (tmp_path / "recipe.py").write_text(BROKEN.format(tests=str(ROOT / "tests")))
    stated = ["--dataset", str(document_folder), *DISTRIBUTED, *flags, "--output_dir", str(tmp_path / "rows")]
    rows = rows_of_steps(PretrainConfig.from_cli(argv=stated), range(13, 16))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.json"))
    one = launch("one", "one", "--per_device_train_batch_size", "8", *flags)
    [event] = lines(one, "from_step")
    assert (event["step"], event["from_step"], event["steps"]) == (10, 15, 5)
    for kind in ("ddp", "fsdp2"):
        two = launch(kind, kind, "--per_device_train_batch_size", "4", *flags)
        assert_same(one, two)
        assert [line["step"] for line in lines(two, "from_step")] == [10]
    facts = audit(one)
    assert not facts["problems"] and facts["passed_over"]["documents"] > 0
    dropped = [json.loads(line) for line in (one / "abandoned.jsonl").read_text().splitlines()]
    skipped = [line["step"] for line in dropped if line.get("event") == "skip_step"]
    assert skipped == ([13, 14, 15] if skips == "6" else [])


UNEVEN = """
import copy
import numpy as np
import torch
import torch.distributed as dist
from running import prepared
from hfgpt import PretrainConfig
from hfgpt.training.pretrainer import next_batch

run = prepared(PretrainConfig.from_cli())
run.step.optimizer.step = run.step.optimizer.zero_grad = lambda: None
model = copy.deepcopy(run.step.model)
own, _ = next_batch(run)
ids, labels = run.step.to_tensors(np.concatenate(run.machine.ranks.gather(own.blocks)))
labels = labels.clone()
for row in range(len(labels)):
    labels[row, 1 + row % 3 if row < len(labels) // 2 else 12 :] = -100  # few targets on process 0, many on 1
share = slice(len(ids) // 2 * dist.get_rank(), len(ids) // 2 * (dist.get_rank() + 1))
loss, *_ = run.step(ids[share], labels[share], 1)
expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten().long())
expected.backward()
torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=0)
for ours, plain in zip(run.step.model.parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-6, rtol=1e-5)
"""


@pytest.mark.slow
def test_unequal_numbers_of_targets_weigh_as_in_one_batch(tmp_path, document_folder):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(UNEVEN)
    flags = [
        "--dataset",
        str(document_folder),
        *DISTRIBUTED,
        "--output_dir",
        str(tmp_path / "run"),
        "--max_grad_norm",
        "0",
    ]
    flags += ["--per_device_train_batch_size", "4", "--dataloader_num_workers", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = completed([*FORKED_TWO, str(recipe), *flags], environment, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 1 (the default is 1); set fsdp_version: 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "use --gradient_checkpointing true"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true in the accelerate configuration"),
        ({"FSDP_IGNORED_MODULES": "lm_head"}, "fsdp_ignored_modules: lm_head"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "use --torch_compile true"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "use FSDP2"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config is not supported; remove it"),
    ],
)
def test_unsupported_settings_of_the_launcher_are_refused(monkeypatch, settings, expected):
    monkeypatch.setattr("hfgpt.distributed.fsdp2._is_requested", False)
    for key, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **settings}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=re.escape(expected)):
        take_fsdp_request()


def test_ignored_settings_of_the_launcher_are_a_warning(monkeypatch, caplog):
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    settings |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    monkeypatch.setattr("hfgpt.distributed.fsdp2._is_requested", False)
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    assert take_fsdp_request()
    assert "fsdp_state_dict_type SHARDED_STATE_DICT" in caplog.text and "auto_wrap" not in caplog.text
    assert "ACCELERATE_USE_FSDP" not in os.environ  # Accelerate would serve it in its own way
    assert take_fsdp_request()  # for a second run in this process, too


WHOLE = """
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import GPT2Config
from hfgpt.distributed.fsdp2 import build_sharded_model
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

dist.init_process_group("gloo")
for tied in (True, False):
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=97, bos_token_id=1, eos_token_id=1,
        tie_word_embeddings=tied,
    )
    made = []

    def make():
        torch.manual_seed(3)
        made.append(GPT2LMHeadModel(config))
        return made[-1]

    model = build_sharded_model(make, torch.device("cpu"), "no")
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    devices = [m.transformer.wte.weight.device.type for m in made[1:]]
    assert devices == (["cpu"] if dist.get_rank() == 0 else []), devices  # made[0] has become the shared one
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = make().state_dict()
    assert dist.get_rank() or all(torch.equal(whole[name], expected[name]) for name in expected)
dist.barrier()
"""


@pytest.mark.slow
def test_only_the_main_process_ever_holds_a_sharded_model_whole(tmp_path):
    (tmp_path / "script.py").write_text(WHOLE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = completed([*FORKED_TWO, str(tmp_path / "script.py")], environment, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_model_that_only_fits_when_sharded_is_not_refused():
    config = PretrainConfig(output_dir="run", model="gpt2-1.5b", max_steps=1, per_device_train_batch_size=1)
    batch, memory = config.batch(8), 12 * 2**30
    with pytest.raises(UserError, match="GiB"):
        check_memory(config, batch, setting_of(config, batch, "bf16", 1, "cuda"), memory)
    check_memory(config, batch, setting_of(config, batch, "bf16", 8, "cuda"), memory)
