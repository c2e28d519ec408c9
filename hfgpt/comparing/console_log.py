"""Import of logs that other training scripts print: nanoGPT's console lines, llm.c's `main.log`, and plain tables."""

from __future__ import annotations

import ast
import codecs
import math
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hfgpt.comparing.run_history import PastRun, add_in_order, number
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
# A line of a configuration file, which is Python, or a value from the command line, which stands as it is.
_SETTING = re.compile(r"^(?P<stated>Overriding:\s*)?(?P<name>[a-z]\w*)\s*=\s*(?P<value>[^=\s].*)$")
_MOVES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # of a terminal: colours, and others
_RANK = re.compile(r"^\s*\[(?:rank|default)\d+\]:\s?")  # as torchrun puts it before each line
# Of transformers' GPT-2: layers, width; nanoGPT takes these for `init_from`.
_GPT2 = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
_HEADERS = {
    "tokens_per_step": re.compile(r"tokens per iteration will be:\s*([\d,]+)"),
    "parameters_without_positions": re.compile(r"number of parameters:\s*([\d.,]+\s*[KMB]?)"),
    "vocab_size": re.compile(r"(?:found vocab_size =|vocab_size of GPT-2 to)\s*([\d,]+)"),
}
_TENSORS = re.compile(r"num (non-)?decayed parameter tensors:\s*\d+,\s*with\s*([\d,]+) parameters")
_COLUMNS = {"train_loss": "loss", "loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm", "norm": "grad_norm"}

# Our names for nanoGPT's settings.
_NAMES = {
    "batch_size": "per_device_train_batch_size", "block_size": "sequence_length", "max_iters": "max_steps",
    "gradient_accumulation_steps": "gradient_accumulation_steps", "learning_rate": "learning_rate",
    "min_lr": "min_learning_rate", "warmup_iters": "warmup_steps", "weight_decay": "weight_decay",
    "beta1": "adam_beta1", "beta2": "adam_beta2", "grad_clip": "max_grad_norm", "eval_interval": "eval_steps",
    "log_interval": "logging_steps", "compile": "torch_compile", "dataset": "dataset", "device": "device",
    "n_layer": "model.n_layer", "n_head": "model.n_head", "n_embd": "model.n_embd", "dropout": "model.dropout",
    "bias": "model.bias", "init_from": "init_from",
}  # fmt: skip


_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
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
        content = path.read_bytes()
        wide = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as Windows PowerShell writes it
        text = content.decode("utf-16" if wide else "utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"run {path}: cannot be read ({error.strerror})") from None
    run = PastRun(path.stem, str(path), "log")
    # A progress line ends with a carriage return alone; other separators of lines belong to text that was sampled.
    lines = [_RANK.sub("", line) for line in re.split(r"\r\n|\n|\r", _MOVES.sub("", text).removeprefix("\ufeff"))]
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
    tensors: dict[bool, int] = {}  # parameters in decayed ones, and others
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
        if changes := run.facts.get("steps_of"):  # which hold from where the script went on
            changes[-1] = (min(changes[-1][0], step), changes[-1][1])
        add_in_order(run.training if form == "loss" else run.evaluations, record)
        starts = starts and form != "loss"
    if len(tensors) == 2:
        run.model |= {"decayed": tensors[True], "not_decayed": tensors[False]}


def _read_header(run: PastRun, line: str, tensors: dict[bool, int]) -> bool:
    """Take a fact that the script prints at its start; True if the line says that it starts."""
    if match := _TENSORS.search(line):
        tensors[match[1] is None] = int(match[2].replace(",", ""))
    for key, pattern in _HEADERS.items():
        if match := pattern.search(line):
            text = match[1].replace(",", "").strip()
            scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1)
            value = round(float(text.rstrip("KMB ") or 0) * scale)
            if key == "tokens_per_step" and run.training:  # of a script that starts again
                before, at = run.plan.get(key), run.training[-1]["step"]
                if before != value:
                    run.facts.setdefault("steps_of", []).append((at, value))
                return True
            (run.plan if key == "tokens_per_step" else run.model)[key] = value
            return key == "tokens_per_step"
    if (match := _SETTING.match(line.strip())) and match["name"] in _NAMES:
        _take_setting(run, _NAMES[match["name"]], match)
    return False


def _take_setting(run: PastRun, name: str, match: re.Match[str]) -> None:
    """A setting that the script prints; one that it changes where it starts again holds both values."""
    value = _value(match["value"], run.settings, is_python=not match["stated"])
    if not run.training:
        run.settings[name] = value
    elif match["stated"] and (before := run.settings.get(name)) != value:  # else a line of sampled text, perhaps
        at = run.training[-1]["step"] + 1
        run.settings[name] = f"{'its default' if before is None else before}; {value} from step {at} on"


def _value(text: str, settings: dict[str, Any], is_python: bool) -> Any:
    """The value of what a configuration prints: a literal of Python, arithmetic of such and of settings, or text."""
    try:
        if is_python:  # a comment, or another statement, may follow
            node: Any = getattr(ast.parse(text.strip()).body[0], "value", None)
        else:
            node = ast.parse(text.strip(), mode="eval").body
        return _arithmetic(node, settings)
    except (ValueError, SyntaxError, IndexError, ArithmeticError, RecursionError, MemoryError):
        return text.split(" #")[0].strip() if is_python else text.strip()


def _arithmetic(node: Any, settings: dict[str, Any]) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _arithmetic(node.left, settings), _arithmetic(node.right, settings)
        if number(left) is None or number(right) is None:
            raise ValueError
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Name) and _NAMES.get(node.id) in settings:
        return settings[_NAMES[node.id]]
    return ast.literal_eval(node)


def _complete(run: PastRun, tokens_per_step: int | None) -> None:
    """Tokens, seconds, speed and FLOPs, as far as they follow from what the log says."""
    settings = run.settings
    stated = run.plan.setdefault("tokens_per_step", tokens_per_step)
    if stated is None:
        run.notes.append("tokens per step are not in the log: state --tokens_per_step to compare by tokens and speed")
    elif tokens_per_step not in (None, stated):
        run.notes.append(f"the log says {stated:,} tokens per step; the {tokens_per_step:,} of the flag are not used")
    for ours, key in (("micro_batch", "per_device_train_batch_size"), ("sequence_length", "sequence_length")):
        run.plan[ours] = _whole(settings.get(key))
    if stated:
        changes = [(0, stated), *run.facts.pop("steps_of", [])]
        for record in (*run.training, *run.evaluations):
            record["num_input_tokens_seen"] = _tokens_at(record["step"], changes)
        if len(changes) > 1:
            told = ", ".join(f"{tokens:,} from step {at + 1} on" for at, tokens in changes[1:])
            run.notes.append(f"its step had {stated:,} tokens, and {told}")
        if run.plan["micro_batch"] and run.plan["sequence_length"]:  # over all processes, which a log does not tell
            run.plan["accumulation"] = stated // (run.plan["micro_batch"] * run.plan["sequence_length"]) or None
    _take_size(run)
    _take_times(run)
    _take_processes(run)
    if run.flops_per_token is None and stated:
        products = [
            r["mfu"] * NANOGPT_PEAK_TFLOPS * 1e12 * r["step_seconds"] / stated
            for r in run.training
            if r.get("mfu") and r.get("step_seconds")
        ]
        if products:
            run.flops_per_token = float(np.median(products))
            run.notes.append("FLOPs per token follow from its MFU and times, for one device")


def _tokens_at(step: int, changes: list[tuple[int, int]]) -> int:
    """Tokens seen after `step`; changes: (step, tokens of each step after it), rising."""
    ends = [at for at, _ in changes[1:]] + [step]
    return sum(max(0, min(end, step) - at) * tokens for (at, tokens), end in zip(changes, ends, strict=True))


def _take_processes(run: PastRun) -> None:
    """How many processes trained, by the MFU that it prints, which is that of one of them."""
    rates = [(r["tokens_per_second"], r["mfu"]) for r in run.training if r.get("tokens_per_second") and r.get("mfu")]
    if not rates or run.flops_per_token is None:
        return
    ratio = float(np.median([rate * run.flops_per_token / (mfu * NANOGPT_PEAK_TFLOPS * 1e12) for rate, mfu in rates]))
    count = round(ratio)
    if count > 1 and abs(ratio / count - 1) < 0.1:
        run.plan["processes"] = count
        if run.plan.get("accumulation"):
            run.plan["accumulation"] = run.plan["accumulation"] // count or None
        run.notes.append(f"its MFU is that of one of {count} processes")


def _take_size(run: PastRun) -> None:
    """Parameters and FLOPs per token, all of one count, or None: exact where the log or its settings say it so.

    nanoGPT prints the exact numbers of parameters by decayed and other tensors, and one without positions that is
    rounded to 10,000. It has biases only where it is set up so, which it does not print by itself.
    """
    stated = {key.removeprefix("model."): value for key, value in run.settings.items() if key.startswith("model.")}
    decayed, others, rounded = (
        run.model.pop(key, None) for key in ("decayed", "not_decayed", "parameters_without_positions")
    )
    run.model |= stated
    T = run.plan["sequence_length"]
    if T is not None:
        run.model["n_positions"] = T
    if decayed is None and rounded is None:
        return
    sizes = _GPT2.get(str(run.settings.get("init_from")), (12, 768))
    L, C = (_whole(stated.get(key, usual)) for key, usual in zip(("n_layer", "n_embd"), sizes, strict=True))
    T = T if T is not None or "sequence_length" in run.settings else 1024  # nanoGPT's own
    V, counts = _whole(run.model.get("vocab_size")), []  # (matrices without positions, vectors) of what it can be
    if L and C and T:
        norms, biases, blocks = (2 * L + 1) * C, (2 * L + 1) * C + 9 * L * C, 12 * L * C * C
        if decayed is not None:
            counts = [(decayed - T * C, others)] if others in (norms, norms + biases) else []
            rows, rest = divmod(decayed - blocks - T * C, C)
            counts = counts if not rest and rows > 0 and V in (None, rows) else []
        elif V is not None:
            counts = [(V * C + blocks, norms), (V * C + blocks, norms + biases)]
            counts = [count for count in counts if f"{sum(count) / 1e6:.2f}" == f"{rounded / 1e6:.2f}"]
    if len(counts) == 1 and L and C and T:
        without = sum(counts[0])
        run.model |= {"n_layer": L, "n_embd": C, "n_positions": T, "parameters_without_positions": without}
        run.model["parameters"] = without + T * C
        run.flops_per_token = float(6 * without + 12 * L * C * T)
    elif decayed is not None:
        run.model["parameters"] = decayed + others
        run.notes.append("its settings do not give its number of parameters: the one without positions is not known")
    else:
        run.notes.append(f"its number of parameters is known only as about {rounded:,.0f} without positions")


def _whole(value: Any) -> int | None:
    known = number(value)
    return int(known) if known is not None and known >= 1 and known == int(known) else None


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
