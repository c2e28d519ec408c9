"""A comparison of two runs in plain words."""

from __future__ import annotations

from typing import Any

from hfgpt.comparing.noise import Gap

_BETTER_WORSE = ("better", "worse")
_NAMES = {"eval_loss": "evaluation loss", "loss": "training loss", "eval_bits_per_byte": "bits per byte"}


def verdicts(found: dict[str, Any]) -> list[str]:
    """One line per question about a pair (see `compare.pair`), the summary of all first.

    An axis whose answer is that of an earlier one shares its line.
    """
    same, speed = _same_line(found), _speed_line(found)
    summary = [same.split(" (")[0].split(":")[0]] if found["same_tokens"]["equal"] else []
    if not found["loss_per_token_comparable"]:
        summary.append("loss per token is not comparable")
    axis = "tokens" if found["gaps"]["tokens"]["at"] is not None else "steps"
    if found["gaps"][axis]["at"] is not None and not _same_result(found):
        assumed = f", if {found['assumed']}" if found["assumed"] and found["loss_per_token_comparable"] else ""
        _, said, doubt = decision(found, axis)
        summary.append(f"{said} at equal {axis}{doubt}{assumed}")
    if found["speed"]:
        summary.append(speed.split(" (")[0])
    lines = ["; ".join(summary) or "no verdict"]
    if not found["loss_per_token_comparable"]:
        lines.append(
            f"loss per token is not comparable: {found['why_not_comparable']}; bits per byte of held-out text are"
        )
    lines += [f"{kind} losses give no verdict: {', '.join(r)}" for kind, r in found["reservations"].items() if r]
    caution = [
        f"at the last common step {name} was at {_percent(100 * part)} of its length: with the learning rate not yet "
        "at its end, a loss is higher than that of a run planned to end there"
        for name, part in found["on_the_way"].items()
    ]
    return [*lines, same, *_axis_lines(found), *caution, speed]


def _same_result(found: dict[str, Any]) -> bool:
    return bool(found["same_tokens"]["equal"] and found["same_result"] and found["same_result"]["same"])


def _same_line(found: dict[str, Any]) -> str:
    same, result = found["same_tokens"], found["same_result"]
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
        how = f": losses differ by {largest:.1g} of their value at most, which is rounding"
        how = ": every recorded loss is equal" if largest == 0 else how if largest < 1e-5 else " within noise"
        outcome = f"same result{how}"
    until = "" if same["equal"] else f" up to step {same['step'] - 1}, others from step {same['step']} on"
    return f"same tokens{until}, {outcome}"


def decision(found: dict[str, Any], axis: str) -> tuple[str | None, str, str]:
    """What decides at equal `axis` ("eval_loss", "loss", "eval_bits_per_byte", or None), the verdict, and a doubt.

    Of evaluation and training loss the one with the narrower band decides, so that chance has one try, not two. Where
    the other says the opposite beyond its own noise, as when a text is learnt by heart, that is the doubt.
    """
    gaps, b = found["gaps"][axis], found["b"]
    reserved = found["reservations"]
    keys = [key for key, kind in (("eval_loss", "evaluation"), ("loss", "training")) if not reserved[kind]]
    if not found["loss_per_token_comparable"]:
        keys = [] if reserved["evaluation"] else ["eval_bits_per_byte"]
    known = [(key, gaps[key]) for key in keys if isinstance(gaps.get(key), Gap)]
    if _same_result(found) and gaps.get("paired") and known:  # which asked more than the band of one window
        return None, "no difference beyond noise", ""
    if judges := [(gap.band, key, gap) for key, gap in known if gap.band is not None]:
        _, key, gap = min(judges)
        if not gap.beyond_noise:
            return key, "no difference beyond noise", ""
        against = [
            _NAMES[other] for _, other, its in judges if its.beyond_noise and its.difference * gap.difference < 0
        ]
        said = f"{b} is {_percent(abs(gap.percent))} {_BETTER_WORSE[gap.difference > 0]}"
        return key, said, f", while the {against[0]} says the opposite" if against else ""
    if known:
        said = f"{b} differs by {_percent(known[0][1].percent, '+')}"
        return None, said, ", with too few records to tell it from noise"
    return None, "no verdict", ""


def _axis_lines(found: dict[str, Any]) -> list[str]:
    answers: dict[tuple[str, str, str], list[str]] = {}
    unknown = []
    for axis, gaps in found["gaps"].items():
        if gaps["at"] is None:
            unknown.append(f"at equal {axis}: not known of {' and '.join(gaps['missing'])}")
        else:
            key, said, doubt = decision(found, axis)
            by = f" by {_NAMES[key]}" if key else ""
            answers.setdefault((f"{said}{by}", doubt, _figures(found, gaps)), []).append(axis)
    lines = [f"{said} at equal {' and '.join(axes)}{doubt}: {told}" for (said, doubt, told), axes in answers.items()]
    return lines + unknown


def _figures(found: dict[str, Any], gaps: dict[str, Any]) -> str:
    comparable = found["loss_per_token_comparable"]
    names = ("eval_loss", "loss") if comparable else ("eval_bits_per_byte",)
    told = [f"{_NAMES[key]} {_gap(gaps[key])}" for key in names if isinstance(gaps.get(key), Gap)]
    missing = "one of them has no record there" if comparable else "not both have bits per byte there"
    return "; ".join(told) or missing


def _gap(gap: Gap) -> str:
    band = gap.how if gap.band is None else f"noise ±{_percent(100 * gap.band / abs(gap.first or 1))}"
    return f"{gap.first:.4f} and {gap.second:.4f} ({_percent(gap.percent, '+')}, {band})"


def _percent(value: float, sign: str = "") -> str:
    """Two or three digits, and never more than two after the point: 0.13 %, 1.8 %, 35 %."""
    decimals = 2 if abs(value) < 1 else 1 if abs(value) < 10 else 0
    value = round(value, decimals)
    return f"{value:{sign if value else ''}.{decimals}f} %" if value else "0.00 %"


def _speed_line(found: dict[str, Any]) -> str:
    speed = found["speed"]
    if not speed:
        return "speed: not known of both"
    rates = f"{speed['a']:,.0f} and {speed['b']:,.0f} tokens/s"
    if speed["devices"]:
        rates += f", on {' and '.join(map(str, speed['devices']))}"
    times = speed["times_as_fast"]
    if not speed["clear"]:
        return f"no clear difference in speed ({rates})"
    return f"{found['b']} is {max(times, 1 / times):.2f}x {'faster' if times > 1 else 'slower'} per token ({rates})"
