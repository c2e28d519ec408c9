"""The comparison of runs as a table on the screen, and as a Markdown report with plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from hfgpt.comparing import perplexity
from hfgpt.comparing.noise import FLOOR
from hfgpt.comparing.run_history import PastRun, number
from hfgpt.errors import UserError
from hfgpt.field_types import duration

Section = tuple[str, list[tuple[str, list[str]]]]  # title, and rows of a label with one cell per run
UNKNOWN = "-"
WIDTH = 100
_EVENTS_TOLD, _EVALUATIONS_TOLD = 5, 20  # of a kind and run; of a run

NOISE = (
    "Noise: half the width of a 95 % band. For training losses it follows from the scatter of step losses around their "
    "trend in the window that ends at the equal point (its last tenth, or more where records are few); for runs that "
    "saw the same tokens from their differences step by step; for evaluations from their jumps from one to the next. "
    f"It is never below {100 * FLOOR:g} % of the loss. It covers which text fell into the steps, and not what another "
    "seed would change: a difference little beyond it wants a second seed."
)


def sections(runs: Sequence[PastRun], found: dict[str, Any]) -> list[Section]:
    """The tables of `compare.compare`'s result, a column per run."""
    facts, names = found["runs"], [run.name for run in runs]

    def rows(*specs: tuple[str, str, Callable[[Any], str]]) -> list[tuple[str, list[str]]]:
        told = [(label, [_told(fact[key], form) for fact in facts]) for label, key, form in specs]
        return [row for row in told if any(cell != UNKNOWN for cell in row[1])]

    differing = [
        (key, [_value(values[name]) if name in values else UNKNOWN for name in names])
        for key, values in found["settings_that_differ"].items()
    ]
    if len(runs) == 1:
        differing = [(key, [_value(value)]) for key, value in runs[0].settings.items()]
    against = [
        (
            f"MFU against {row['peak_tflops']:.4g} TFLOP/s [{index}]",
            [_told(row["mfu"][name], lambda mfu: f"{100 * mfu:.1f} %") for name in names],
        )
        for index, row in enumerate(found["mfu_against"], start=1)
    ]
    tables = [
        ("run", rows(("form", "kind", str), ("state", "state", str), ("device", "device", str))),
        (
            "model and step",
            rows(
                ("parameters", "parameters", _whole),
                ("without positions", "parameters_without_positions", _whole),
                ("vocabulary", "vocab_size", _whole),
                ("FLOPs per token", "flops_per_token", _whole),
                ("tokens per step", "tokens_per_step", _whole),
                ("micro-batch", "micro_batch", _whole),
                ("sequence", "sequence_length", _whole),
                ("accumulation", "accumulation", _whole),
                ("processes", "processes", _whole),
            ),
        ),
        (
            "speed (medians)",
            rows(
                ("tokens/s", "tokens_per_second", _whole),
                ("seconds per step", "step_seconds", "{:.4g}".format),
                ("seconds per micro-batch", "micro_batch_seconds", "{:.4g}".format),
            )
            + against
            + rows(("HFU", "hfu", "{:.1%}".format), ("memory", "memory_bytes", lambda b: f"{b / 2**30:.3g} GiB")),
        ),
        (
            "how far",
            rows(
                ("steps", "steps", _whole),
                ("steps planned", "planned_steps", _whole),
                ("tokens", "tokens", _whole),
                ("FLOPs", "flops", "{:.3g}".format),
                ("time of training", "wall_seconds", _duration),
                ("events", "events", _events),
            ),
        ),
        (
            "at the end",
            rows(
                ("training loss", "end_loss", "{:.4f}".format),
                ("its perplexity", "end_perplexity", "{:.4g}".format),
                ("mean from step on", "end_loss_from_step", _whole),
                ("evaluation loss", "eval_loss", "{:.4f}".format),
                ("evaluation perplexity", "eval_perplexity", "{:.4g}".format),
                ("bits per byte", "eval_bits_per_byte", "{:.4f}".format),
                ("evaluated at step", "eval_step", _whole),
                ("best evaluation loss", "best_eval_loss", "{:.4f}".format),
                ("at step", "best_eval_step", _whole),
            ),
        ),
    ]
    comparable = all(pair["loss_per_token_comparable"] for pair in found["pairs"])
    equal: dict[str, tuple[list[str], dict[str, Any]]] = {}  # axes with the same figures share a table
    for axis, point in found["equal"].items():
        earlier = f"evaluated at {_place(axis, at)}" if (at := point["eval_loss_at"]) not in (None, point["at"]) else ""
        place = ", ".join(filter(None, (_place(axis, point["at"]), earlier)))
        equal.setdefault(str(point["runs"]), ([], point))[0].append(f"{axis} ({place})")
    for axes, point in equal.values():
        tables.append((f"at equal {' and '.join(axes)}", _equal_rows(point, names, comparable)))
    if len(runs) > 1:
        tables.insert(1, ("settings that differ", differing))
    else:
        tables += [("plan and text", _plan_rows(runs[0])), ("evaluations", _evaluation_rows(runs[0]))]
        tables.append(("settings", differing))
    return [(title, part) for title, part in tables if part]


def _plan_rows(run: PastRun) -> list[tuple[str, list[str]]]:
    rows = []
    for label, key, value in (("precision", "precision", "name"), ("compile", "torch_compile", "enabled")):
        if isinstance(choice := run.plan.get(key), dict) and value in choice:
            said = "on" if choice[value] is True else "off" if choice[value] is False else choice[value]
            rows.append((label, [f"{said} ({choice.get('reason') or 'no reason given'})"]))
    text = run.plan.get("text")
    return rows + [("text", [str(line)]) for line in (text if isinstance(text, list) else [])]


def _evaluation_rows(run: PastRun) -> list[tuple[str, list[str]]]:
    """At most _EVALUATIONS_TOLD of them, evenly spread up to the newest."""
    every = -(-len(run.evaluations) // _EVALUATIONS_TOLD) or 1
    rows = []
    for record in run.evaluations[::-every][::-1]:
        loss, bits = number(record["eval_loss"]), number(record.get("eval_bits_per_byte"))
        told = (
            ["loss not finite"] if loss is None else [f"loss {loss:.4f}", f"perplexity {perplexity(loss) or inf:.4g}"]
        )
        told += [] if bits is None else [f"{bits:.4f} bits per byte"]
        if (train := number(record.get("train_eval_loss"))) is not None:
            told.append(f"training split {train:.4f}")
        rows.append((f"step {record['step']:,}", [", ".join(told)]))
    return rows


def _equal_rows(point: dict[str, Any], names: list[str], comparable: bool) -> list[tuple[str, list[str]]]:
    labels = {"loss": "training loss", "perplexity": "perplexity", "eval_loss": "evaluation loss"}
    labels |= {"eval_perplexity": "evaluation perplexity", "eval_bits_per_byte": "bits per byte"}
    if not comparable:
        labels |= {key: f"{label} *" for key, label in labels.items() if key != "eval_bits_per_byte"}
    forms = {key: "{:.4g}".format if "perplexity" in key else "{:.4f}".format for key in labels}
    figures = [point["runs"][name] for name in names]
    rows = [(label, [_told(figure[key], forms[key]) for figure in figures]) for key, label in labels.items()]
    return [row for row in rows if any(cell != UNKNOWN for cell in row[1])]


def remarks(runs: Sequence[PastRun], found: dict[str, Any]) -> list[str]:
    """What stands below the tables: the peaks by number, events, and notes on the reading."""
    lines = [f"[{n}] {row['peak_source'] or 'source not known'}" for n, row in enumerate(found["mfu_against"], start=1)]
    if not all(pair["loss_per_token_comparable"] for pair in found["pairs"]):
        lines.append("* per token, which is not comparable between these runs")
    for run in runs:
        kinds: dict[str, list[dict[str, Any]]] = {}
        for event in run.events:
            kinds.setdefault(str(event.get("event")), []).append(event)
        for kind in [kind for kind in kinds if kind not in ("start", "save", "end")]:
            lines += [f"{run.name}: {_event(event)}" for event in kinds[kind][:_EVENTS_TOLD]]
            if (more := len(kinds[kind]) - _EVENTS_TOLD) > 0:
                lines.append(f"{run.name}: {kind} {more} more times, up to step {kinds[kind][-1]['step']}")
    return lines + [f"note: {note}" for note in found["notes"]]


def _event(event: dict[str, Any]) -> str:
    always = ("event", "step", "time", "wall_seconds", "num_input_tokens_seen")
    details = ", ".join(
        f"{key} {_cut(_value(value), 120)}" for key, value in event.items() if key not in always and value
    )
    return f"{event.get('event')} at step {event['step']}{': ' if details else ''}{details}"


def as_text(runs: Sequence[PastRun], found: dict[str, Any]) -> str:
    """The screen table, aligned; two or three runs fit WIDTH columns, long cells are cut."""
    label_width = 34
    width = max(14, min(46 if len(runs) > 1 else WIDTH, (WIDTH - label_width) // len(runs) - 1))
    lines = []
    for title, rows in [("", [("", [run.name for run in runs])]), *sections(runs, found)]:
        lines += ["", title] if title else []
        for label, cells in rows:
            shown = " ".join(f"{_cut(cell, width):{width}}" for cell in cells)
            lines.append(f"{_cut(f'  {label}', label_width - 1):{label_width}}{shown}".rstrip())
    for pair in found["pairs"]:
        summary, *answers = pair["verdicts"]
        lines += ["", *_wrapped(f"{pair['b']} against {pair['a']}: {summary}", "")]
        lines += [line for answer in answers for line in _wrapped(f"- {answer}", "  ")]
    lines += ["", *(line for remark in remarks(runs, found) for line in _wrapped(remark, ""))]
    if found["pairs"]:
        lines += ["", *_wrapped(NOISE, "")]
    return "\n".join(lines).strip("\n")


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ") or [indent]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 1]}..{text[-(width - width // 2 - 1) :]}"


def write_report(path: Path, runs: Sequence[PastRun], found: dict[str, Any]) -> list[Path]:
    """The Markdown report at `path`, its plots beside it under the same stem; all files written, the report last.

    Raises UserError where they cannot be written.
    """
    if path.is_dir():
        raise UserError(f"output={path}: is a folder; name a file, such as {path / 'report.md'}")
    if path.suffix.lower() not in (".md", ".markdown"):
        raise UserError(f"output={path}: the report is Markdown; name a file that ends in .md")
    from hfgpt.comparing.plots import draw

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures = draw(path, runs, all(pair["loss_per_token_comparable"] for pair in found["pairs"]))
        path.write_text(_markdown(runs, found, pictures), encoding="utf-8")
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror}); name another place") from None
    return [*(picture for _, picture in pictures), path]


def _markdown(runs: Sequence[PastRun], found: dict[str, Any], pictures: list[tuple[str, Path]]) -> str:
    names = [run.name for run in runs]
    lines = [f"# {' against '.join(_escaped(name) for name in names)}", ""]
    for pair in found["pairs"]:
        lines += [f"**{_escaped(pair['b'])} against {_escaped(pair['a'])}: {_escaped(pair['verdicts'][0])}.**", ""]
        lines += [*(f"- {_escaped(verdict)}" for verdict in pair["verdicts"][1:]), ""]
    for title, picture in pictures:
        lines += [f"![{title}]({picture.name.replace(' ', '%20')})", ""]
    for title, rows in sections(runs, found):
        lines += [f"## {title[0].upper()}{title[1:]}", "", f"| | {' | '.join(map(_escaped, names))} |"]
        lines += ["|---|" + "---|" * len(names)]
        lines += [*(f"| {_escaped(label)} | {' | '.join(map(_escaped, cells))} |" for label, cells in rows), ""]
    if told := remarks(runs, found):
        lines += ["## Remarks", "", *(f"- {_escaped(remark)}" for remark in told), ""]
    return "\n".join([*lines, *([NOISE, ""] if found["pairs"] else [])])


def _escaped(text: str) -> str:
    for character in "\\|*_<":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def _told(value: Any, form: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _whole(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and abs(value) >= 10 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds:,.0f} s ({duration(seconds)})"


def _events(counts: dict[str, int]) -> str:
    told = [f"{count} {name}" for name, count in counts.items() if name not in ("start", "end")]
    return ", ".join(told) or UNKNOWN


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 9999 else f"{value}"


def _place(axis: str, at: float) -> str:
    return {"FLOPs": f"{at:.3g}", "wall time": _duration(at)}.get(axis, f"{at:,.0f}")
