"""Two machines: network namespaces with their own addresses and a link between them that can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from running import FORKED, MODEL, ROOT, Run

from hfgpt.checkpointing.checkpoint import find_damage

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def nodes():
    """Names of the two namespaces."""
    names = [f"hfgpt-{os.getpid()}-{n}" for n in (0, 1)]
    if sys.platform != "linux" or os.geteuid() or any(ip("netns", "add", name).returncode for name in names):
        pytest.skip("network namespaces are not permitted here")
    cable = ("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
    if ip(*cable).returncode:
        pytest.skip("cables between namespaces are not permitted here")
    for n, name in enumerate(names):
        ip("-n", name, "addr", "add", f"{ADDRESSES[n]}/24", "dev", f"cable{n}")
        ip("-n", name, "link", "set", f"cable{n}", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    for name in names:
        ip("netns", "del", name)


@pytest.mark.slow
def test_two_machines_stop_when_the_network_fails_and_resume_exactly(nodes, tmp_path, document_folder):
    settings = (ROOT / "accelerate_configs" / "multi_node.yaml").read_text()
    config = tmp_path / "multi_node.yaml"
    config.write_text(settings.replace("mixed_precision: bf16", "use_cpu: true"))
    flags = ["--dataset", str(document_folder), "--model", json.dumps(MODEL), "--tokens_per_step", "512"]
    flags += ["--mixed_precision", "no", "--save_steps", "5", "--ddp_timeout", "8", "--stream_timeout", "7"]
    runs = []

    def start(*more):
        for n, name in enumerate(nodes):
            launcher = ["ip", "netns", "exec", name, sys.executable, "-m", "accelerate.commands.launch"]
            launcher += ["--config_file", str(config), "--num_processes", "2", "--machine_rank", str(n)]
            launcher += ["--main_process_ip", ADDRESSES[0]]
            environment = {"GLOO_SOCKET_IFNAME": f"cable{n}", "PET_SHUTDOWN_TIMEOUT": "3"}
            runs.append(Run(launcher, tmp_path / "run", *flags, *more, env=environment))
            runs[-1].errors.rename(tmp_path / f"{len(runs)}.err")
            runs[-1].errors = tmp_path / f"{len(runs)}.err"
        return runs[-2:]

    try:
        first, second = start()
        first.wait_for(lambda: len(first.records("loss")) >= 12)
        assert ip("-n", nodes[0], "link", "set", "cable0", "down").returncode == 0
        for run in (first, second):
            stderr = run.end(seconds=200)
            assert run.process.returncode == 1
            [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
            assert ("no answer from" in line or "no connection to" in line) and line.endswith(
                "continue with --resume_from_checkpoint latest"
            )
        assert find_damage((tmp_path / "run" / "checkpoint-latest").resolve()) is None

        ip("-n", nodes[0], "link", "set", "cable0", "up")
        last = max(record["step"] for record in first.records())
        for run in start("--resume_from_checkpoint", "latest", "--max_steps", str(last + 5)):
            assert run.end(seconds=100) is not None and run.process.returncode == 0, run.errors.read_text()
        whole = Run(FORKED, tmp_path / "whole", *flags, "--max_steps", str(last + 5))
        whole.end()
        assert whole.ledger() == first.ledger()
    finally:
        for run in runs:
            if run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
