"""Runs the commands and the Python of all READMEs and of CONTRIBUTING.md, as small runs in a copy of the project.

    python tests/readme_commands.py              # all; about ten minutes on two cores
    python tests/readme_commands.py compare      # those that contain "compare"

A CPU and no network are enough: a Hub on this machine serves made text, tokenizers and models; configurations for cards
are read with use_cpu; and flags are added that make a run small. What cannot run so is listed in `NOT_RUN`, and only
its flags are checked. Exit code 1 if a command fails, or if `NOT_RUN` lists what no README has.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hub_server import HubServer
from readme_inputs import copy_project, repositories, write_inputs, write_nanogpt
from readmes import PROGRAMS, Block, WrongCommand, code, commands, parse, readmes

from hfgpt import PretrainConfig

NOT_RUN = {
    r"^pip install": "needs a package index; .ci/run installs",
    r"^pre-commit install": "changes the hooks of the repository",
    r"^git stash": "changes the working tree",
    r"^\.ci/": "is itself what CI runs",
    r"readme_commands\.py": "is this script",
    r"^(srun|export MAIN)": "needs SLURM",
    r"^hf auth login": "asks for a token",
    r"^hfgpt export out/chat": "needs the model that the chat example trains",
    r"lambada_openai": "needs a task from the Hub",
    r"benchmarks/run\.py": "needs nanoGPT and twelve minutes; tests/test_benchmarks.py starts it",
}
NEEDS = {r"\bct2\b": "ct2-transformers-converter"}
MODEL = '{"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 1024}'
# Flags that make a recipe small: these always, these unless the command states them.
ALWAYS = {"--max_steps": "3", "--warmup_steps": "1", "--logging_steps": "1", "--eval_tokens": "2000"}
UNLESS_STATED = {"--eval_steps": "2", "--torch_compile": "false", "--mfu_peak_tflops": "1"}
SMALLER = {
    "quickstart": {"--model": f"'{MODEL}'", "--tokenizer": "bpe-300"},
    "fineweb": {"--model": f"'{MODEL}'", "--tokens_per_step": "32768"},
    "shakespeare": {},
}
# Flags that make another command small.
SMALL = {
    r"^hfgpt plan --measure": f"--model '{MODEL}' --tokens_per_step 4096 --sequence_length 64",
    r"hfgpt(\.cli)? evaluate.* --eval_tokens": "--eval_tokens 5000",
    r"hfgpt generate": "--max_new_tokens 8",
    r"hfgpt sweep .*--model": "--max_steps 3 --eval_tokens 2000",
    r"hfgpt sweep": f"--max_steps 3 --eval_tokens 2000 --model '{MODEL}' --tokenizer bpe-300",
    r"^pytest": "--collect-only -n0",
    r"tests/golden\.py": "plan",
    r"benchmarks/stream\.py": "--tokens 20000 --rounds 1 --tokenizer bpe-300",
    r"benchmarks/memory\.py": "--only 'characters float32'",
}
LAUNCH = "accelerate launch recipes/quickstart.py"
FIRST = (  # runs that others read
    f'{LAUNCH} --dataset "texts/*.jsonl" --text_column body --output_dir out/mine',
    LAUNCH,
    f"{LAUNCH} --output_dir out/b --learning_rate 1e-3",
)
SECONDS = 400.0  # for one command

# What the Python of a README takes for granted: settings of a small run, a Trainer of a small model, the metric.
BEFORE = """
import hfgpt, torch, transformers
class PretrainConfig(hfgpt.PretrainConfig):
    def __init__(self, **given):
        small = dict(model={model}, tokenizer="bpe-300", max_steps=2, torch_compile=False, eval_tokens=1000)
        super().__init__(**given | small)
hfgpt.PretrainConfig = PretrainConfig
if {trains}:
    import evaluate
    from hfgpt.evaluation.metrics import PERPLEXITY
    metric = evaluate.load(PERPLEXITY)
    rows = [dict(input_ids=(row := torch.randint(9, (16,))), labels=row) for _ in range(16)]
    class Trainer(transformers.Trainer):
        def __init__(self, *_, **given):
            shape = dict(n_layer=1, n_head=2, n_embd=32, vocab_size=9, bos_token_id=0, eos_token_id=0)
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
            arguments = transformers.TrainingArguments("out/trainer", max_steps=2, use_cpu=True, report_to="none")
            super().__init__(model, arguments, train_dataset=rows, eval_dataset=rows, **given)
            global trainer
            trainer = self
    Trainer()
"""
AFTER = "\nif {trains}: trainer.train(); assert trainer.evaluate()['eval_loss'] > 0\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression: only what it is found in")
    pattern = parser.parse_args().pattern
    blocks = [block for path in readmes() for block in code(path)]
    blocks = [block for block in blocks if re.search(pattern, block.text) and block.language != "output"]
    with tempfile.TemporaryDirectory() as folder, HubServer(repositories(), token="hf_made") as hub:
        run = Runs(Path(folder), hub)
        failed = [block for block in blocks if not run.block(block)]
    unused = [listed for listed in NOT_RUN if listed not in run.listed] if not pattern else []
    for listed in unused:
        print(f"failed: NOT_RUN lists {listed}, which no README has")
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in run.outcomes.items())
    print(f"{len(blocks)} blocks and names: {outcomes or 'nothing to run'}")
    sys.exit(bool(failed or unused))


class Runs:
    """A copy of the project with what commands read, made once, and restored before each block."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.work, self.prepared, self.log = folder / "work", folder / "prepared", folder / "log"
        self.seen: set[str] = set()
        self.listed: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(self.work), "ACCELERATE_USE_CPU": "true"}
        self.environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **hub.environment(folder / "home"), **own}
        copy_project(self.work)
        write_inputs(self.work)
        for command in FIRST:
            print(f"first: {command}", flush=True)
            if reason := self._failure(["bash", "-c", f"{small(command, parse(command))} --max_steps 2"]):
                sys.exit(f"failed: {reason}")
        shutil.copytree(self.work / "out" / "quickstart", self.work / "out" / "a", symlinks=True)
        self.work.rename(self.prepared)

    def block(self, block: Block) -> bool:
        """Run what was not yet; return whether all went well."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.prepared, self.work, symlinks=True)
        if block.language == "python":
            return self._report(block, block.text.splitlines()[0], lambda: self._python(block.text))
        every = [part for command in commands(block) for part in parts(command)]
        every = [command for command in every if not (command in self.seen or self.seen.add(command))]
        return all([self._report(block, command, lambda c=command: self._shell(c)) for command in every])

    def _report(self, block: Block, shown: str, run: Callable[[], str | None]) -> bool:
        begin = time.monotonic()
        reason = run()
        outcome = reason or f"ok, {time.monotonic() - begin:.0f} s"
        self.outcomes[re.split("[:,]| with ", outcome)[0]] += 1
        print(f"{block.place}: {shown}\n    {outcome}", flush=True)
        return not outcome.startswith("failed")

    def _shell(self, command: str) -> str | None:
        try:
            configs = parse(command)
        except WrongCommand as error:
            return f"failed: {error}"
        if listed := why_not(command):
            self.listed.add(listed)
            return f"not run: {NOT_RUN[listed]}"
        program = next((NEEDS[needs] for needs in NEEDS if re.search(needs, command)), command.split()[0])
        if program in PROGRAMS and program != "source" and not shutil.which(program, path=self.environment["PATH"]):
            return f"not run: {program} is not installed"
        for config in configs:
            if config.resume_from_checkpoint == "never":
                shutil.rmtree(self.work / config.output_dir, ignore_errors=True)
        if "--tokenizer char --text" in command:
            write_nanogpt(self.work, len(set((self.work / "input.txt").read_text())))
        return self._failure(["bash", "-o", "pipefail", "-c", small(command, configs)])

    def _python(self, text: str) -> str | None:
        if missing := [name for name in re.findall(r"^from (\w+)", text, re.M) if not find_spec(name)]:
            return f"not run: {missing[0]} is not installed"
        trains = bool(re.search(r"\b[tT]rainer\b", text))
        before = BEFORE.format(model=MODEL, trains=trains)
        return self._failure([sys.executable, "-c", before + text + AFTER.format(trains=trains)])

    def _failure(self, command: list[str]) -> str | None:
        """Run a command; return the last line of its stderr if it fails."""
        with self.log.open("w+") as log:
            process = subprocess.Popen(
                command, cwd=self.work, env=self.environment, stdout=log, stderr=log, text=True, start_new_session=True
            )
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return f"failed: not done after {SECONDS:.0f} s"
            log.seek(0)
            lines = log.read().strip().splitlines()
        if not status:
            return None
        named = [line for line in lines if line.startswith("error: ")]  # ours; a launcher adds its own report
        return f"failed with {status}: {(named or lines or ['nothing was printed'])[-1]}"


def why_not(command: str) -> str | None:
    return next((listed for listed in NOT_RUN if re.search(listed, command)), None)


def parts(command: str) -> list[str]:
    """Split at `&&` if a part cannot run."""
    split = command.split(" && ")
    return split if any(map(why_not, split)) else [command]


def small(command: str, configs: list[PretrainConfig]) -> str:
    """Add flags that make a command small. Those of a recipe that it states itself keep their values."""
    for pattern, flags in SMALL.items():
        if re.search(pattern, command):
            return f"{command} {flags}"
    for recipe, smaller in SMALLER.items() if configs else ():
        if f"recipes/{recipe}" in command:
            stated = re.findall(r"--\w+", command)
            stated += ["--model", "--tokenizer"] if "--init_from" in stated else []
            added = {flag: value for flag, value in {**UNLESS_STATED, **smaller}.items() if flag not in stated}
            return " ".join([command, *(f"{flag} {value}" for flag, value in {**added, **ALWAYS}.items())])
    return command


if __name__ == "__main__":
    main()
