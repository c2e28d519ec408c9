"""`hfgpt doctor`."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hfgpt import __version__
from hfgpt.cli.options import AsJson
from hfgpt.cli.output import as_json, as_lines
from hfgpt.errors import RunError, first_line

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


def doctor(is_json: AsJson = False) -> None:
    """Show what this machine will do, and check that its device computes what it should.

    Ends with exit code 1 if a check fails; each names what to do.

    Example: hfgpt doctor --json
    """
    from hfgpt.distributed import compiler, cpu, device_peaks
    from hfgpt.distributed import device as machine
    from hfgpt.planning import device_checks

    device, threads = machine.default_device(), cpu.use_all_cores(1)
    try:
        machine.choose_precision("auto", device)
        machine.device_name(device), machine.memory_bytes(device)
    except Exception as error:  # whatever a device that cannot be used raises
        raise RunError(f"{device}: cannot be used ({first_line(error)}); {device_checks.USE_CPU}") from error
    precision = machine.choose_precision("auto", device)
    compilation = compiler.choose_compile("auto", device, compiler.SHORT_RUN_FORWARD_PASSES)
    rated = device_peaks.rated_device_peak(device, precision.name)
    measured = device_peaks.measure_matmul_tflops(device, precision.name)
    versions = {"python": sys.version.split()[0], "hfgpt": __version__} | {name: _version(name) for name in PACKAGES}
    facts: dict[str, Any] = {
        "device": device.type,
        "device_name": machine.device_name(device),
        "memory_gib": round(machine.memory_bytes(device) / 2**30, 1),
        "cores": cpu.available_cores(),
        "threads": threads,
        "precision": precision.name,
        "precision_reason": precision.reason,
        "torch_compile": compilation.enabled,
        "torch_compile_reason": compilation.reason,
        "peak_tflops_rated": rated.tflops if rated else None,
        "peak_rated_source": rated.source if rated else None,
        "peak_tflops_measured": measured.tflops,
        "peak_measured_source": measured.source,
        "versions": versions,
    }
    if not is_json:
        compiled = "compiled" if compilation.enabled else "not compiled"
        print(
            f"Runs on this machine train on {facts['device_name']} ({device.type}) in {precision.label} "
            f"({precision.reason}), {compiled} ({compilation.reason}).\n"
        )
        text = {
            "precision": precision.label,
            "versions": ", ".join(f"{name} {part}" for name, part in versions.items()),
        }
        print(as_lines(facts | text) + "\n", flush=True)
    checks = []
    for check in device_checks.check_device(device, rated, measured):
        checks.append(check)
        if not is_json:
            print(check.line(), flush=True)
    if is_json:
        print(as_json(facts | {"checks": [vars(check) for check in checks]}))
    if failed := [check for check in checks if check.passed is False]:
        names = ", ".join(check.name for check in failed)
        raise RunError(f"{names} failed; {'; '.join(dict.fromkeys(check.fix for check in failed))}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
