"""Read the logs of other training scripts: nanoGPT's console lines, llm.c's `main.log`, and plain tables."""

from __future__ import annotations

import ast
import codecs
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfgpt.comparing.derive import NANOGPT_PEAK_SOURCE, NANOGPT_PEAK_TFLOPS, derive
from hfgpt.comparing.runs import PastRun, add_record, drop_from, number
from hfgpt.errors import UserError

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
_ITER = re.compile(
    rf"\biter\s+(\d+)\s*:\s*loss\s+{_NUMBER}(?:\s*,?\s*time\s+{_NUMBER}\s*ms)?(?:\s*,?\s*mfu\s+{_NUMBER}\s*%)?", re.I
)
_STEP = re.compile(rf"\bstep\s+(\d+)\s*:\s*train\s+loss\s+{_NUMBER}\s*,?\s*val\s+loss\s+{_NUMBER}", re.I)
_LLMC = re.compile(rf"^\s*s:(\d+)\s+(trl|tel):{_NUMBER}(?:\s+lr:{_NUMBER})?(?:\s+norm:{_NUMBER})?")
# A line of a configuration file (Python), or a value from the command line (plain text).
_SETTING = re.compile(r"^(?P<overriding>Overriding:\s*)?(?P<name>[a-z]\w*)\s*=\s*(?P<value>[^=\s].*)$")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colors, cursor moves
_RANK = re.compile(r"^\s*\[(?:rank|default)\d+\]:\s?")  # torchrun's prefix of each line
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
    """Read a run from a log file. Raises UserError if no line of it is recognized.

    tokens_per_step: used if the log does not state it (`tokens per iteration will be: N`).

    These scripts count from 0: `iter N: loss` is the loss on the text of update N + 1, so it becomes step N + 1, while
    `step N: ... val loss` is of the model after N updates and stays at N. Lines that a restarted script prints again
    replace the earlier ones. Training time is the sum over logged iterations, each standing for all iterations since
    the last one. nanoGPT's clock includes evaluations and starts; the median is used for these.
    """
    if not path.is_file():
        raise UserError(f"run {path}: not a regular file; give a run's output_dir, or a console log")
    content = path.read_bytes()
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # written by Windows PowerShell
    text = content.decode("utf-16" if is_utf16 else "utf-8", errors="replace")
    run = PastRun(path.stem, str(path), "log")
    # A progress line ends with a carriage return only; other line separators belong to sampled text.
    lines = re.split(r"\r\n|\n|\r", _TERMINAL_CODES.sub("", text).removeprefix("\ufeff"))
    lines = [_RANK.sub("", line) for line in lines]
    header = lines[0].split("\t")
    if "step" in header and not {"train_loss", "loss"}.isdisjoint(header):
        _read_table(run, header, lines[1:])
    else:
        _read_lines(run, lines, ends_whole=text.endswith(("\n", "\r")))
    if not run.training and not run.evaluations:
        known = "`iter N: loss L, time Tms, mfu M%`, `step N: train loss A, val loss B`, `s:N trl:L`"
        raise UserError(
            f"run {path}: contains no line of a known training log; known are {known}, and a run's output_dir"
        )
    derive(run, tokens_per_step)
    return run


def _read_table(run: PastRun, header: list[str], lines: list[str]) -> None:
    run.kind = "table"
    for line in lines:
        cells = dict(zip(header, line.split("\t"), strict=False))
        if not (cells.get("step") or "").strip().isdigit():
            continue
        step = int(cells["step"])
        values = {ours: _number(cells[name]) for name, ours in _COLUMNS.items() if cells.get(name, "").strip()}
        if "loss" in values:
            add_record(run.training, {"step": step + 1, **values})
        if cells.get("val_loss", "").strip():
            add_record(run.evaluations, {"step": step, "eval_loss": _number(cells["val_loss"])})


def _read_lines(run: PastRun, lines: list[str], ends_whole: bool) -> None:
    decimals: dict[bool, list[int]] = {}  # of the numbers in both kinds of line, to recognize a truncated one
    starts = True
    for index, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            continue
        if (found := _read_record(line)) is None:
            starts = _read_header(run, line) or starts
            continue
        kind, record, matched = found
        is_training = "loss" in record
        printed = [len(digits) for digits in re.findall(r"\.(\d*)", matched)]
        if index == len(lines) - 1 and not ends_whole and decimals.get(is_training, printed) != printed:
            run.notes.append("the last line is cut short and was skipped")
            continue
        decimals[is_training] = printed
        run.kind = kind
        # A script that restarts from a checkpoint prints both kinds of line again from there.
        updates = record["step"] - 1 if is_training else record["step"]  # made before this line
        drop_from(run.training, updates + 1)
        drop_from(run.evaluations, record["step"])
        if changes := run.facts.get("step_sizes"):  # these count from where the script restarted
            changes[-1] = (min(changes[-1][0], updates), changes[-1][1])
        if is_training:
            record["starts"], starts = starts, False
        (run.training if is_training else run.evaluations).append(record)


def _read_record(line: str) -> tuple[str, dict[str, Any], str] | None:
    """Return a line's format, record (`loss` is the training loss) and matched text; None for other lines."""
    if match := _ITER.search(line):
        record: dict[str, Any] = {"step": int(match[1]) + 1, "loss": _number(match[2])}
        record["milliseconds"], percent = _number(match[3]), _number(match[4])
        if percent is not None and percent >= 0:  # -100 stands for "not yet known"
            record |= {"mfu": percent / 100, "peak_tflops": NANOGPT_PEAK_TFLOPS, "peak_source": NANOGPT_PEAK_SOURCE}
        return "nanoGPT log", record, match[0]
    if match := _STEP.search(line):
        losses = {"train_eval_loss": _number(match[2]), "eval_loss": _number(match[3])}
        return "nanoGPT log", {"step": int(match[1])} | losses, match[0]
    if match := _LLMC.search(line):
        step, loss = int(match[1]), _number(match[3])
        if match[2] == "tel":
            return "llm.c log", {"step": step, "eval_loss": loss}, match[0]
        rates = {"learning_rate": _number(match[4]), "grad_norm": _number(match[5])}
        return "llm.c log", {"step": step + 1, "loss": loss} | rates, match[0]
    return None


def _read_header(run: PastRun, line: str) -> bool:
    """Store a fact that the script prints when it starts; return True if this line marks a start."""
    if match := _TENSORS.search(line):
        run.model["not_decayed" if match[1] else "decayed"] = int(match[2].replace(",", ""))
    for key in ("parameters_without_positions", "vocab_size"):
        if match := _HEADERS[key].search(line):
            run.model[key] = _printed_count(match[1])
    if match := _HEADERS["tokens_per_step"].search(line):
        value = _printed_count(match[1])
        if not run.training:
            run.plan["tokens_per_step"] = value
        elif run.plan.get("tokens_per_step") != value:
            run.facts.setdefault("step_sizes", []).append((run.training[-1]["step"], value))
        return True
    if (match := _SETTING.match(line.strip())) and match["name"] in _NAMES:
        _read_setting(run, _NAMES[match["name"]], match)
    return False


def _printed_count(text: str) -> int:
    """Convert a printed count, such as 124,337,664 or 123.59M, to a number."""
    text = text.replace(",", "").strip()
    return round(float(text.rstrip("KMB ") or 0) * {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1))


def _read_setting(run: PastRun, name: str, match: re.Match[str]) -> None:
    """Store a setting that the script prints; if it changes at a restart, both values are kept."""
    value = _evaluate(match["value"], run.settings, is_python=not match["overriding"])
    if not run.training:
        run.settings[name] = value
    elif (
        match["overriding"] and (before := run.settings.get(name)) != value
    ):  # otherwise perhaps a line of sampled text
        start = run.training[-1]["step"] + 1
        run.settings[name] = f"{'its default' if before is None else before}; {value} from step {start} on"


def _evaluate(text: str, settings: dict[str, Any], is_python: bool) -> Any:
    """Return the value of a printed setting: a Python literal, arithmetic on numbers and settings, or else the text."""
    try:
        if is_python:  # a comment, or another statement, may follow
            node: Any = getattr(ast.parse(text.strip()).body[0], "value", None)
        else:
            node = ast.parse(text.strip(), mode="eval").body
        return _evaluate_node(node, settings)
    except (ValueError, SyntaxError, IndexError, ArithmeticError, RecursionError, MemoryError):
        return text.split(" #")[0].strip() if is_python else text.strip()


def _evaluate_node(node: Any, settings: dict[str, Any]) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate_node(node.left, settings), _evaluate_node(node.right, settings)
        if number(left) is None or number(right) is None:
            raise ValueError
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Name) and _NAMES.get(node.id) in settings:
        return settings[_NAMES[node.id]]
    return ast.literal_eval(node)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else number(float(text))
    except ValueError:
        return None
