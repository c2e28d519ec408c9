"""`hfgpt doctor`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from hfgpt import __version__
from hfgpt.cli.options import AsJson
from hfgpt.cli.output import as_json, as_lines

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


def doctor(is_json: AsJson = False) -> None:
    """Show what this machine offers: device, precision, compiler, peak rate, versions.

    Example: hfgpt doctor --json
    """
    from hfgpt.distributed import compiler, cpu, device_peaks
    from hfgpt.distributed import device as machine

    device, threads = machine.default_device(), cpu.use_all_cores(1)
    precision = machine.choose_precision("auto", device)
    compilation = compiler.choose_compile("auto", device, compiler.SHORT_RUN_FORWARD_PASSES)
    rated = device_peaks.rated_device_peak(device, precision.name)
    measured = device_peaks.measure_matmul_tflops(device, precision.name)
    versions = {"python": sys.version.split()[0], "hfgpt": __version__} | {name: version(name) for name in PACKAGES}
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
    if is_json:
        print(as_json(facts))
    else:
        text = {
            "precision": precision.label,
            "versions": ", ".join(f"{name} {part}" for name, part in versions.items()),
        }
        print(as_lines(facts | text))
