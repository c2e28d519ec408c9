"""Put the comparison of two runs into words."""

from __future__ import annotations

from typing import Any, NamedTuple

_NAMES = {"eval_loss": "evaluation loss", "loss": "training loss", "eval_bits_per_byte": "bits per byte"}


class Verdict(NamedTuple):
    """The verdict on a pair of runs, one line per question.

    doubts: why some or all losses give no verdict. tokens: whether tokens and result are the same. deciding: the gap
    that the summary reports, or None; in_time: a clear difference in speed, and the gap at equal wall time if it is
    another one beyond noise. on_axes: the gaps on every axis; axes with the same answer share a line.
    cautions: what else the losses depend on.
    """

    summary: str
    doubts: list[str]
    tokens: str
    deciding: str | None
    in_time: list[str]
    on_axes: list[str]
    cautions: list[str]
    speed: str

    @property
    def lines(self) -> list[str]:
        return [self.summary, *self.doubts, self.tokens, *self.on_axes, *self.cautions, self.speed]

    @property
    def evidence(self) -> list[str]:
        """Evidence for the summary."""
        return [line for line in (self.tokens, self.deciding, *self.in_time) if line]

    @property
    def notes(self) -> list[str]:
        """All other lines, most important first."""
        shown = self.evidence
        return [line for line in (*self.doubts, *self.cautions, *self.on_axes, self.speed) if line not in shown]


class Finding(NamedTuple):
    """A conclusion about more than a pair, such as a sweep's, with the parts of a verdict that a report shows."""

    summary: str
    evidence: list[str]
    notes: list[str]


def explain(pair: dict[str, Any]) -> Verdict:
    """Put the comparison of a pair (see `pairs.compare_pair`) into words."""
    tokens, speed, comparable = _tokens_line(pair), _speed_line(pair), pair["loss_per_token_comparable"]
    summary = [tokens.split(" (")[0].split(":")[0]] if pair["same_tokens"]["equal"] else []
    doubts = [f"{kind} losses give no verdict: {', '.join(r)}" for kind, r in pair["reservations"].items() if r]
    if not comparable:
        summary.append("loss per token is not comparable")
        why_not = pair["why_not_comparable"]
        doubts.insert(0, f"loss per token is not comparable: {why_not}; bits per byte of held-out text are")
    axis = "tokens" if pair["gaps"]["tokens"]["at"] is not None else "steps"
    on_axes = _axis_lines(pair)
    deciding = None
    if pair["gaps"][axis]["at"] is not None and not _is_same_result(pair):
        assumed = f", if {pair['assumed']}" if pair["assumed"] and comparable else ""
        _, answer, doubt = decide(pair, axis)
        summary.append(f"{answer} at equal {axis}{doubt}{assumed}")
        deciding = on_axes[axis]
    if pair["speed"]:
        summary.append(speed.split(" (")[0])
    cautions = [
        f"at the last common step {name} was at {_percent(100 * part)} of its length: with the learning rate not yet "
        "at its end, a loss is higher than that of a run planned to end there"
        for name, part in pair["on_the_way"].items()
    ]
    lines, time = list(dict.fromkeys(on_axes.values())), pair["gaps"]["wall time"]
    beyond = time["at"] is not None and (key := decide(pair, "wall time")[0]) and time[key]["beyond_noise"]
    in_time = [speed] if pair["speed"] and (pair["speed"]["clear"] or pair["speed"]["over_all"]) else []
    in_time += [on_axes["wall time"]] if beyond and on_axes["wall time"] != deciding else []
    return Verdict("; ".join(summary) or "no verdict", doubts, tokens, deciding, in_time, lines, cautions, speed)


def _is_same_result(pair: dict[str, Any]) -> bool:
    return bool(pair["same_tokens"]["equal"] and pair["same_result"] and pair["same_result"]["same"])


def _tokens_line(pair: dict[str, Any]) -> str:
    same, result = pair["same_tokens"], pair["same_result"]
    if same["equal"] is None:
        return f"whether the two saw the same tokens is {same['text']}"
    if not same["equal"] and same["step"] == 1:
        return "other tokens from the first step on"
    outcome = "no losses to compare"
    if result and not result["same"]:
        key = result["key"].replace("grad_norm", "gradient norm")
        outcome = f"different result from step {result['from_step']} on ({key} {result['a']:.6g} and {result['b']:.6g})"
    elif result:
        largest = result["largest_part"]
        how = f": training losses differ by {largest:.1g} of their value at most, which is rounding"
        equal = ": every training loss that both recorded is equal"
        how = equal if largest == 0 else how if largest < 1e-5 else " within noise"
        outcome = f"same result{'' if same['equal'] else ' until then'}{how}"
    until = "" if same["equal"] else f" up to step {same['step'] - 1}, others from step {same['step']} on"
    return f"same tokens{until}, {outcome}"


def decide(pair: dict[str, Any], axis: str) -> tuple[str | None, str, str]:
    """Return deciding key ("eval_loss", "loss", "eval_bits_per_byte", None), answer and doubt at equal `axis`.

    Of evaluation and training loss, the one with the narrower band decides; using both would give chance two tries.
    There is a doubt if the other loss shows the opposite by more than its noise, for example after memorizing the text.
    """
    gaps, reserved = pair["gaps"][axis], pair["reservations"]
    keys = [key for key, kind in (("eval_loss", "evaluation"), ("loss", "training")) if not reserved[kind]]
    if not pair["loss_per_token_comparable"]:
        keys = [] if reserved["evaluation"] else ["eval_bits_per_byte"]
    known = {key: gaps[key] for key in keys if gaps.get(key)}
    if not known:
        return None, "no verdict", ""
    if _is_same_result(pair) and gaps["paired"]:  # a stricter test than the band of one window
        return None, "no difference beyond noise", ""
    with_band = {key: gap for key, gap in known.items() if gap["band"] is not None}
    if not with_band:
        percent = next(iter(known.values()))["percent"]
        return None, f"{pair['b']} differs by {_percent(percent, '+')}", ", with too few records to tell it from noise"
    key = min(with_band, key=lambda key: (with_band[key]["band"], key))
    percent = with_band[key]["percent"]
    if not with_band[key]["beyond_noise"]:
        return key, "no difference beyond noise", ""
    opposite = [
        other for other, gap in with_band.items() if gap["beyond_noise"] and (gap["percent"] > 0) != (percent > 0)
    ]
    doubt = f", while the {_NAMES[opposite[0]]} says the opposite" if opposite else ""
    return key, f"{pair['b']} is {_percent(abs(percent))} {'worse' if percent > 0 else 'better'}", doubt


def _axis_lines(pair: dict[str, Any]) -> dict[str, str]:
    """Return axis -> line; axes with the same answer share one line that names them all, unknown axes come last."""
    answers: dict[tuple[str, str], list[str]] = {}
    unknown = {}
    for axis, gaps in pair["gaps"].items():
        if gaps["at"] is None:
            unknown[axis] = f"at equal {axis}: not known of {' and '.join(gaps['missing'])}"
            continue
        key, answer, doubt = decide(pair, axis)
        by = f" by {_NAMES[key]}" if key else ""
        answers.setdefault((f"{answer}{by}", f"{doubt}: {_losses(pair, gaps)}"), []).append(axis)
    lines = {
        axis: f"{answer} at equal {' and '.join(axes)}{rest}"
        for (answer, rest), axes in answers.items()
        for axis in axes
    }
    return lines | unknown


def _losses(pair: dict[str, Any], gaps: dict[str, Any]) -> str:
    comparable = pair["loss_per_token_comparable"]
    keys = ("eval_loss", "loss") if comparable else ("eval_bits_per_byte",)
    missing = "one of them has no record there" if comparable else "not both have bits per byte there"
    return "; ".join(f"{_NAMES[key]} {describe_gap(gaps[key])}" for key in keys if gaps.get(key)) or missing


def describe_gap(gap: dict[str, Any]) -> str:
    """Return both losses, their difference and its noise."""
    band = gap["how"] if gap["band"] is None else f"noise ±{_percent(100 * gap['band'] / abs(gap['first'] or 1))}"
    return f"{gap['first']:.4f} and {gap['second']:.4f} ({_percent(gap['percent'], '+')}, {band})"


def _percent(value: float, sign: str = "") -> str:
    """Format with two or three digits, at most two of them after the point: 0.13 %, 1.8 %, 35 %."""
    decimals = 2 if abs(value) < 1 else 1 if abs(value) < 10 else 0
    value = round(value, decimals)
    return f"{value:{sign if value else ''}.{decimals}f} %" if value else "0.00 %"


def _speed_line(pair: dict[str, Any]) -> str:
    speed = pair["speed"]
    if not speed:
        return "speed: not known of both"
    rates = f"{speed['a']:,.0f} and {speed['b']:,.0f} tokens/s"
    if speed["devices"]:
        rates += f", on {' and '.join(map(str, speed['devices']))}"
    over_all = speed["over_all"]
    if over_all:
        rates += f"; {over_all['a']:,.0f} and {over_all['b']:,.0f} over the whole run"
    if over_all and not speed["clear"]:
        return (
            f"{_faster(pair, over_all)} over the whole run (medians {rates}: one of them was slow for part of its time)"
        )
    if not speed["clear"]:
        return f"no clear difference in speed ({rates})"
    if speed["varied"]:
        (low_a, high_a), (low_b, high_b) = speed["varied"]
        rates += f"; half of the records are from {low_a:,.0f} to {high_a:,.0f}, and from {low_b:,.0f} to {high_b:,.0f}"
    return f"{_faster(pair, speed)} ({rates})"


def _faster(pair: dict[str, Any], speed: dict[str, Any]) -> str:
    times = speed["times_as_fast"]
    return f"{pair['b']} is {max(times, 1 / times):.2f}x {'faster' if times > 1 else 'slower'} per token"
