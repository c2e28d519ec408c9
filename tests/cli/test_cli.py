"""The command as a user types it: what it prints, where, and how it ends."""

import json
import subprocess
import sys

import pytest
import torch
import typer

from hfgpt import UserError, __version__, cli, run_recipe
from hfgpt.checkpointing.audit import audit
from hfgpt.cli.evaluate import replace_compile_values
from hfgpt.comparing import read_runs
from hfgpt.evaluation.generate import read_prompts


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hfgpt ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["hfgpt", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def ending(capsys, main) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of a recipe."""
    with pytest.raises(SystemExit) as end:
        run_recipe(main)
    return end.value.code, capsys.readouterr().err.splitlines()


def raises(error):
    def main():
        raise error

    return main


def test_wrong_use_is_one_line_and_code_2(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    wrong = raises(UserError("n_embd 30: not divisible", "max_steps -1:\n too small"))
    lines = ["error: n_embd 30: not divisible; max_steps -1: too small"]
    assert ending(capsys, wrong) == (2, lines)
    monkeypatch.setenv("RANK", "0")
    assert ending(capsys, wrong) == (2, lines)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("hfgpt.cli.run_recipe.SECONDS_FOR_MAIN", 0.1)  # in which a launcher would have ended it
    assert ending(capsys, wrong) == (2, [lines[0].replace("error: ", "error: process 1 of 2: ")])


def test_a_failure_shows_its_traceback_then_its_cause(capsys):
    code, lines = ending(capsys, raises(RuntimeError("\nout of discs\nmore about discs")))
    assert code == 1
    assert lines[0].startswith("Traceback") and lines[-1] == "error: RuntimeError: out of discs"
    assert ending(capsys, raises(AssertionError()))[1][-1] == "error: AssertionError: no message"


def test_other_endings(capsys):
    assert ending(capsys, raises(KeyboardInterrupt()))[0] == 130
    assert ending(capsys, raises(SystemExit(143)))[0] == 143
    assert run_recipe(lambda: None) is None


def test_the_command_starts_without_the_heavy_imports():
    script = (
        "import sys, hfgpt.cli\n"
        "sys.argv = ['hfgpt', 'generate', '--help']\n"
        "hfgpt.cli.main()\n"
        "assert not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_help_and_version(monkeypatch, capsys):
    commands = typer.main.get_command(cli.app).commands
    assert {"generate", "doctor"} <= commands.keys()
    code, overview, _ = command(monkeypatch, capsys)
    assert code == 0 and command(monkeypatch, capsys, "--help") == (0, overview, "")
    for name in commands:
        code, text, _ = command(monkeypatch, capsys, name, "--help")
        assert code == 0 and f"Example: hfgpt {name}" in text and name in overview
    assert command(monkeypatch, capsys, "--version") == (0, f"hfgpt {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generat"], "'generate'"),
        (["generate"], "checkpoint"),
        (["generate", "folder", "--num_sample", "2"], "--num_samples"),
        (["generate", "folder", "--top_k", "many"], "--top_k"),
        (["generate", "no-such-folder"], "no-such-folder"),
        (["doctor", "--jsn"], "--json"),
    ],
)
def test_wrong_use_of_the_command_is_one_line(monkeypatch, capsys, arguments, named):
    monkeypatch.delenv("RANK", raising=False)
    code, out, err = command(monkeypatch, capsys, *arguments)
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("error: ") and named in line


@pytest.mark.parametrize(
    "line",
    [
        "generate {}", "generate x --prompt_file={}", "evaluate {} --dataset x", "evaluate x --dataset {}",
        "import {} new", "import x {}", "export {} new", "export x {}", "verify {}", "push {} me/x", "audit {}",
        "compare {}", "compare x --output={}",
    ],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_refused_by_each_command(monkeypatch, capsys, line):
    for path, why in (("a" * 5000, "too long"), ("a/" * 3000, "too long"), ("a\0", "zero byte"), ("\udcff", "UTF-8")):
        code, out, err = command(monkeypatch, capsys, *(part.format(path) for part in line.split()))
        assert (code, out, err.count("\n")) == (2, "", 1) and why in err and len(err) < 300


@pytest.mark.parametrize("value", ["9223372036854775808", "1e400", "1.5", "-1", "0"])
def test_counts_of_commands_are_refused_beyond_their_range(monkeypatch, capsys, value):
    for line in ("evaluate x --dataset x --per_device_eval_batch_size", "evaluate x --dataset x --eval_tokens"):
        code, _, err = command(monkeypatch, capsys, *line.split(), value)
        assert code == 2 and value in err and err.count("\n") == 1
    code, _, err = command(
        monkeypatch, capsys, "evaluate", "x", "--dataset", "x", "--per_device_eval_batch_size=2147483648"
    )
    assert code == 2 and "is not from 1 to 65536" in err


def test_home_is_found_by_commands(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in ("~/nowhere", "$HOME/nowhere"):
        assert f"{tmp_path}/nowhere" in command(monkeypatch, capsys, "verify", written)[2]


def test_odd_facts_of_a_run_are_refused_by_name_and_by_no_assertion(tmp_path):
    """`python -O` drops assertions; ruff's S101 keeps them out of what checks input."""
    (tmp_path / "ledger.jsonl").write_text('{"step": 1}')
    for facts in ({}, {"config": 1, "data": {}, "plan": {}}, {"config": {}, "data": {}, "plan": {}, "model": 5}):
        (tmp_path / "run.json").write_text(json.dumps(facts))
        assert read_runs([tmp_path])[0].notes[0].startswith("run.json cannot be read")
        with pytest.raises(UserError, match="give a run folder"):
            audit(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": 5}')
    with pytest.raises(UserError, match="line 1 has no text"):
        read_prompts(tmp_path / "prompts.jsonl")


def test_generate_prints_the_samples_of_the_library(monkeypatch, capsys, tmp_path):
    from transformers import GPT2Config

    from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
    from hfgpt.evaluation.generate import generate
    from hfgpt.evaluation.loading import load_checkpoint
    from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel

    tokenizer = load_tokenizer("char", lambda: ["abcdefgh"], model_max_length=8)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    capsys.readouterr()  # saving shows its progress, unless something has turned that off before
    code, out, err = command(
        monkeypatch, capsys, "generate", str(tmp_path), "--prompt", "abc", "--num_samples", "2",
        "--max_new_tokens", "12", "--temperature", "0.8", "--top_k", "5", "--top_p", "0.9", "--seed", "4",
    )  # fmt: skip
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 4}
    first, second = generate(*load_checkpoint(tmp_path), "abc", num_samples=2, **options)
    assert (code, out, err) == (0, f"abc{first}\n---\nabc{second}\n", "")

    code, out, err = command(monkeypatch, capsys, "generate", str(tmp_path), "--prompt", "abz", "--top_k", "-1")
    assert code == 2 and out == "" and err.startswith("error: top_k -1")
    code, out, err = command(monkeypatch, capsys, "generate", str(tmp_path), "--seed", str(2**63))
    assert code == 2 and out == "" and "--seed" in err and str(2**63) in err and err.count("\n") == 1
    code, out, err = command(monkeypatch, capsys, "generate", str(tmp_path), "--prompt", "abz")
    assert code == 2 and out == "" and "'z'" in err


def test_doctor_prints_what_the_machine_offers(monkeypatch, capsys):
    monkeypatch.setattr("hfgpt.planning.device_checks.VOCABULARY", 1000)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    threads = torch.get_num_threads()
    try:
        code, out, _ = command(monkeypatch, capsys, "doctor", "--json")
        facts = json.loads(out)
        text = command(monkeypatch, capsys, "doctor")[1]
    finally:
        torch.set_num_threads(threads)
    assert code == 0 and [check["name"] for check in facts["checks"] if check["passed"] is False] == []
    assert text.startswith("Runs on this machine train on") and facts["device_name"] in text
    assert all(f" {check['name']}: " in text for check in facts["checks"])
    assert facts["precision"] in ("bf16", "fp16", "no") and facts["precision_reason"]
    assert facts["torch_compile_reason"] and facts["device_name"]
    assert 1 <= facts["threads"] <= facts["cores"]
    assert facts["peak_tflops_measured"] > 0
    assert torch.__version__.startswith(facts["versions"]["torch"])  # which may go on with +cu130
    assert facts["versions"].keys() >= {"python", "hfgpt", "transformers", "accelerate", "datasets"}


def test_doctor_on_a_device_that_cannot_be_used_is_one_line(monkeypatch, capsys):
    def busy(device):
        raise RuntimeError("all CUDA-capable devices are busy\nmore")

    monkeypatch.setattr("hfgpt.distributed.device.device_name", busy)
    code, out, err = command(monkeypatch, capsys, "doctor")
    assert code == 1 and out == "" and len(err.splitlines()) == 1
    assert "cannot be used (RuntimeError: all CUDA-capable devices are busy)" in err and "train on the CPU" in err


def test_a_commands_flag_may_have_the_value_that_a_recipe_gives_it():
    given = ["evaluate", "folder", "--torch_compile", "false", "--json"]
    assert replace_compile_values(given) == ["evaluate", "folder", "--eager", "--json"]
    given[3] = "true"
    assert replace_compile_values(given) == ["evaluate", "folder", "--torch_compile", "--json"]
    assert replace_compile_values(given[:3]) == given[:3]
