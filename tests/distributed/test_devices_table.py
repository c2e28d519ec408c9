"""`devices.csv`: rates follow from their sources; names, kinds and variants are as the look-up needs them."""

import csv
import re
from importlib.resources import files
from itertools import groupby

import pytest

from hfgpt.distributed.device_peaks import rated_devices, rated_memory_gib, rated_peak
from hfgpt.planning.device import kind_of

ROWS = list(csv.DictReader(files("hfgpt.distributed").joinpath("devices.csv").open()))
NAMES = {
    "mps": r"Apple M\d( Pro| Max| Ultra)?",
    "xpu": r"Intel\(R\) (Arc\(TM\) .+ Graphics|Data Center GPU Max \d+)",
    "cuda": r"(NVIDIA|Tesla|TITAN|Quadro|AMD|Radeon) .+",
}


def test_each_rate_is_that_of_its_source():
    """`units x MHz x FLOP per clock and unit`, or the name of a document."""
    for row in ROWS:
        assert row["source"] and row["confidence"] in ("high", "medium", "low")
        if formula := re.fullmatch(r"(\d+) (?:SM|CU|Xe cores|cores) x (\d+) MHz x (\d+)", row["source"]):
            units, mhz, flop = map(int, formula.groups())
            expected = units * mhz * flop / 1e6
            assert float(row["dense_tflops_fp32_accumulate"]) == pytest.approx(expected, rel=4e-3), row
            if row["multiprocessors"]:
                assert int(row["multiprocessors"]) == units
        else:
            assert " x " not in row["source"], row["source"]


def test_names_are_those_that_torch_prints():
    for name in rated_devices():
        assert re.fullmatch(NAMES[kind_of(name)], name), name


def test_variants_of_one_name_differ_and_the_smallest_comes_first():
    def key(row):
        return row["device_name"], row["dtype"]

    for (name, dtype), rows in groupby(sorted(ROWS, key=key), key):  # the sort keeps the order of the file
        variants = [row["multiprocessors"] for row in rows]
        assert len(variants) == 1 or variants == sorted(set(variants), key=int), (name, dtype)


def test_a_mac_is_rated_by_its_cores_in_float32_and_bf16():
    for precision in ("bf16", "fp16", "no"):  # no unit of its own for 16 bits
        rates = [rated_peak("Apple M2 Max", precision, cores).tflops for cores in (30, 38)]
        assert rates == [10.74, 13.6]
    assert rated_peak("Apple M2 Max", "bf16", 31) is None  # measured
    assert rated_memory_gib("Apple M2 Max") is None  # the machine's


def test_float32_is_never_rated_where_tf32_may_be_on():
    for row in ROWS:
        if row["dtype"] == "no":
            assert re.match(
                r"Apple|AMD Radeon|Radeon|AMD Instinct MI(100|2\d\d)|Intel\(R\) Arc\(TM\) A", row["device_name"]
            )
    assert rated_peak("AMD Instinct MI250X", "no").tflops == 47.9
    assert rated_peak("AMD Instinct MI300X", "no") is None


def test_one_device_of_torch_is_half_a_card_of_two_chips():
    assert rated_peak("AMD Instinct MI250X", "bf16").tflops == pytest.approx(383 / 2, abs=0.1)
    assert rated_memory_gib("AMD Instinct MI250X") == 63.9

    def max_1550(xe_cores):
        return rated_peak("Intel(R) Data Center GPU Max 1550", "bf16", xe_cores).tflops

    assert max_1550(64) == pytest.approx(838.9 / 2, abs=0.1) and max_1550(128) == 838.9


def test_memory_is_the_card_s_and_not_that_of_the_machine():
    assert rated_memory_gib("NVIDIA GH200 480GB") == 94.5  # 480 GB are the CPU's
