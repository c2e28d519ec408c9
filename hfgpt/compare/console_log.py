"""Import of logs that other training scripts print: nanoGPT's console lines, llm.c's `main.log`, and plain tables."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.compare.run_history import PastRun, add_in_order, flops_per_token, number
from hfgpt.errors import UserError

# nanoGPT divides by the bf16 rate of this card on every device.
NANOGPT_PEAK_TFLOPS = 312.0
NANOGPT_PEAK_SOURCE = "nanoGPT's constant: an A100 in bf16"

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
_ITER = re.compile(
    rf"\biter\s+(\d+)\s*:\s*loss\s+{_NUMBER}(?:\s*,?\s*time\s+{_NUMBER}\s*ms)?(?:\s*,?\s*mfu\s+{_NUMBER}\s*%)?", re.I
)
_STEP = re.compile(rf"\bstep\s+(\d+)\s*:\s*train\s+loss\s+{_NUMBER}\s*,?\s*val\s+loss\s+{_NUMBER}", re.I)
_LLMC = re.compile(rf"^\s*s:(\d+)\s+(trl|tel):{_NUMBER}(?:\s+lr:{_NUMBER})?(?:\s+norm:{_NUMBER})?")
_SETTING = re.compile(r"^(?:Overriding:\s*)?([a-z]\w*)\s*=\s*([^=#]+?)\s*(?:#.*)?$")
_HEADERS = {
    "tokens_per_step": re.compile(r"tokens per iteration will be:\s*([\d,]+)"),
    "parameters_without_positions": re.compile(r"number of parameters:\s*([\d.,]+\s*[KMB]?)"),
    "vocab_size": re.compile(r"(?:found vocab_size =|vocab_size of GPT-2 to)\s*([\d,]+)"),
}
_TENSORS = re.compile(r"num (?:non-)?decayed parameter tensors:\s*\d+,\s*with\s*([\d,]+) parameters")
_COLUMNS = {"train_loss": "loss", "loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm", "norm": "grad_norm"}

# Our names for nanoGPT's settings.
_NAMES = {
    "batch_size": "per_device_train_batch_size", "block_size": "sequence_length", "max_iters": "max_steps",
    "gradient_accumulation_steps": "gradient_accumulation_steps", "learning_rate": "learning_rate",
    "min_lr": "min_learning_rate", "warmup_iters": "warmup_steps", "weight_decay": "weight_decay",
    "beta1": "adam_beta1", "beta2": "adam_beta2", "grad_clip": "max_grad_norm", "eval_interval": "eval_steps",
    "log_interval": "logging_steps", "compile": "torch_compile", "dataset": "dataset", "device": "device",
    "n_layer": "model.n_layer", "n_head": "model.n_head", "n_embd": "model.n_embd", "dropout": "model.dropout",
}  # fmt: skip


def read_log(path: Path, tokens_per_step: int | None = None) -> PastRun:
    """A run from a log file. Raises UserError for a file without a line that is understood.

    tokens_per_step: taken where the log does not say (`tokens per iteration will be: N`).

    The scripts count from 0: their `iter N: loss` is of the text of update N + 1, so it becomes step N + 1, while
    `step N: ... val loss` is of the model after N updates and stays at N. What a restarted script prints again
    replaces what it had printed. Seconds of training are added up from the times of the logged iterations, each
    standing for those since the last; where an evaluation or a start lies in it, which nanoGPT's clock includes, the
    median stands instead.
    """
    if not path.is_file():
        raise UserError(f"run {path}: not a regular file; give a run's output_dir, or a console log")
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"run {path}: cannot be read ({error.strerror})") from None
    run = PastRun(path.stem, str(path), "log")
    lines = text.splitlines()
    header = lines[0].split("\t") if lines else []
    if "step" in header and not {"train_loss", "loss"}.isdisjoint(header):
        run.kind = "table"
        _read_table(run, header, lines[1:])
    else:
        _read_lines(run, lines, whole=text.endswith(("\n", "\r")))
    if not run.training and not run.evaluations:
        known = "`iter N: loss L, time Tms, mfu M%`, `step N: train loss A, val loss B`, `s:N trl:L`"
        raise UserError(f"run {path}: no line of a training log in it; known are {known}, and a run's output_dir")
    _complete(run, tokens_per_step)
    return run


def _read_table(run: PastRun, header: list[str], lines: list[str]) -> None:
    for line in lines:
        cells = dict(zip(header, line.split("\t"), strict=False))
        if not (cells.get("step") or "").strip().isdigit():
            continue
        step = int(cells["step"])
        values = {ours: _number(cells[name]) for name, ours in _COLUMNS.items() if cells.get(name, "").strip()}
        if "loss" in values:
            add_in_order(run.training, {"step": step + 1, **values})
        if cells.get("val_loss", "").strip():
            add_in_order(run.evaluations, {"step": step, "eval_loss": _number(cells["val_loss"])})


def _read_lines(run: PastRun, lines: list[str], whole: bool) -> None:
    shapes: dict[str, list[int]] = {}  # of the lines of each kind, to know one that was cut short
    tensors: list[int] = []
    starts = True
    for index, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            continue
        cut_short = index == len(lines) - 1 and not whole
        if match := _ITER.search(line):
            kind, step = "nanoGPT log", int(match[1])
            milliseconds, percent = _number(match[3]), _number(match[4])
            record: dict[str, Any] = {"step": step + 1, "loss": _number(match[2])}
            record |= {"milliseconds": milliseconds, "starts": starts}
            if percent is not None and percent >= 0:  # -100 stands for "not yet known"
                record |= {"mfu": percent / 100, "peak_tflops": NANOGPT_PEAK_TFLOPS, "peak_source": NANOGPT_PEAK_SOURCE}
        elif match := _STEP.search(line):
            kind, step = "nanoGPT log", int(match[1])
            record = {"step": step, "train_eval_loss": _number(match[2]), "eval_loss": _number(match[3])}
        elif match := _LLMC.search(line):
            kind, step = "llm.c log", int(match[1])
            record = {"step": step, "eval_loss": _number(match[3])}
            if match[2] == "trl":
                rate, norm = _number(match[4]), _number(match[5])
                record = {"step": step + 1, "loss": _number(match[3]), "learning_rate": rate, "grad_norm": norm}
        else:
            starts = _read_header(run, line, tensors) or starts
            continue
        form = "loss" if "loss" in record else "eval"
        shape = [len(decimals) for decimals in re.findall(r"\.(\d*)", match[0])]
        if cut_short and shapes.get(form, shape) != shape:
            run.notes.append("the last line, cut short, left out")
            continue
        shapes[form] = shape
        run.kind = kind
        # A script that starts again from a checkpoint prints both kinds of line again from there.
        for records, first in ((run.training, step + 1), (run.evaluations, step + (form == "loss"))):
            while records and records[-1]["step"] >= first:
                records.pop()
        add_in_order(run.training if form == "loss" else run.evaluations, record)
        starts = starts and form != "loss"
    if tensors:
        run.model["parameters"] = sum(tensors[-2:])


def _read_header(run: PastRun, line: str, tensors: list[int]) -> bool:
    """Take a fact that the script prints at its start; True if the line says that it starts."""
    if match := _TENSORS.search(line):
        tensors.append(int(match[1].replace(",", "")))
    for key, pattern in _HEADERS.items():
        if match := pattern.search(line):
            text = match[1].replace(",", "").strip()
            scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1)
            value = round(float(text.rstrip("KMB ") or 0) * scale)
            (run.plan if key == "tokens_per_step" else run.model)[key] = value
            return key == "tokens_per_step"
    if (match := _SETTING.match(line.strip())) and match[1] in _NAMES and not run.training:
        try:
            run.settings[_NAMES[match[1]]] = ast.literal_eval(match[2])
        except (ValueError, SyntaxError):
            run.notes.append(f"setting {match[1]} = {match[2]} not understood")
    return False


def _complete(run: PastRun, tokens_per_step: int | None) -> None:
    """Tokens, seconds, speed and FLOPs, as far as they follow from what the log says."""
    settings = run.settings
    stated = run.plan.setdefault("tokens_per_step", tokens_per_step)
    if stated is None:
        run.notes.append("tokens per step are not in the log: state --tokens_per_step to compare by tokens and speed")
    elif tokens_per_step not in (None, stated):
        run.notes.append(f"the log says {stated:,} tokens per step; the {tokens_per_step:,} of the flag are not used")
    run.plan["micro_batch"] = settings.get("per_device_train_batch_size")
    run.plan["sequence_length"] = settings.get("sequence_length")
    if stated:
        for record in (*run.training, *run.evaluations):
            record["num_input_tokens_seen"] = record["step"] * stated
        if run.plan["micro_batch"] and run.plan["sequence_length"]:  # over all processes, which a log does not tell
            run.plan["accumulation"] = stated // (run.plan["micro_batch"] * run.plan["sequence_length"]) or None
    run.model |= {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    run.model |= {"n_positions": run.plan["sequence_length"]}
    _take_times(run)
    run.flops_per_token = flops_per_token(run.model, run.plan["sequence_length"])
    if run.flops_per_token is None and stated:
        products = [
            r["mfu"] * NANOGPT_PEAK_TFLOPS * 1e12 * r["step_seconds"] / stated
            for r in run.training
            if r.get("mfu") and r.get("step_seconds")
        ]
        if products:
            run.flops_per_token = float(np.median(products))
            run.notes.append("FLOPs per token follow from its MFU and times, for one device")


def _take_times(run: PastRun) -> None:
    times = [(r["milliseconds"] or 0) / 1000 for r in run.training if r.get("milliseconds")]
    if not times:
        return
    evaluated = {record["step"] + 1 for record in run.evaluations}
    typical, seconds, last = float(np.median(times)), 0.0, 0
    by_step: dict[int, float] = {0: 0.0}
    for record in run.training:
        milliseconds, starts = record.pop("milliseconds", None), record.pop("starts", False)
        clean = milliseconds is not None and record["step"] not in evaluated and not starts
        step_seconds = milliseconds / 1000 if clean else typical
        seconds += (record["step"] - last) * step_seconds
        last = record["step"]
        record["wall_seconds"] = by_step[last] = seconds
        if clean and step_seconds > 0:
            record["step_seconds"] = step_seconds
            if run.tokens_per_step:
                record["tokens_per_second"] = run.tokens_per_step / step_seconds
    steps = sorted(by_step)
    for record in run.evaluations:
        record["wall_seconds"] = float(np.interp(record["step"], steps, [by_step[step] for step in steps]))


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else number(float(text)) if math.isfinite(float(text)) else None
    except ValueError:
        return None
