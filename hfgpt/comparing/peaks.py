"""MFU of runs against the peaks that they state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hfgpt.comparing.runs import PastRun, number
from hfgpt.model.flops import mfu


class Peak(NamedTuple):
    """A peak that `runs` (their names) measure their MFU against."""

    tflops: float
    source: str | None
    runs: list[str]


def stated_peaks(runs: Sequence[PastRun]) -> list[Peak]:
    """Return each peak that a run states, once.

    Of peaks measured on the same device in the same precision, only the highest is returned, for all their runs: other
    programs, and matmuls of other sizes, only lower what is measured.
    """
    found: dict[Any, list[Peak]] = {}
    for run in runs:
        if tflops := number(run.newest("peak_tflops")):
            source = run.newest("peak_source")
            is_measured = str(source).startswith("measured")
            key = re.sub(r"\d+ x \d+ ", "", source) if is_measured else (tflops, str(source))
            found.setdefault(key, []).append(Peak(tflops, source, [run.name]))
    peaks = []
    for alike in found.values():
        highest, values = max(alike), {peak.tflops for peak in alike}
        source = highest.source
        if len(values) > 1:
            source = f"{source}; the highest of {len(values)} measurements, from {min(values):.4g} TFLOP/s on"
        peaks.append(Peak(highest.tflops, source, [name for peak in alike for name in peak.runs]))
    return peaks


def mfu_against(runs: Sequence[PastRun]) -> list[dict[str, Any]]:
    """Return the MFU of every run, from its median speed, relative to every peak that any run states."""

    def of_run(run: PastRun, peak: Peak) -> float | None:
        speed = run.median("tokens_per_second")
        if speed and run.flops_per_token:
            return mfu(speed, run.flops_per_token, peak.tflops, run.processes)
        own, stated = run.median("mfu"), number(run.newest("peak_tflops"))
        return own * stated / peak.tflops if own and stated and run.name in peak.runs else None

    return [
        {
            "peak_tflops": peak.tflops,
            "peak_source": peak.source,
            "stated_by": peak.runs,
            "mfu": {run.name: of_run(run, peak) for run in runs},
        }
        for peak in stated_peaks(runs)
    ]


def too_high(against: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note for each run with an MFU above 1, which names the runs that state the peak."""
    return [
        f"{name}: an MFU above 1 against the {row['peak_tflops']:.4g} TFLOP/s of {', '.join(row['stated_by'])}: that "
        "peak is wrong, or of a slower device"
        for row in against
        for name, value in row["mfu"].items()
        if value and value > 1
    ]
