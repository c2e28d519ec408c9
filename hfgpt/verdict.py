"""A comparison of two runs in plain words."""

from __future__ import annotations

from typing import Any

from hfgpt.noise import Gap

_BETTER_WORSE = ("better", "worse")


def verdicts(found: dict[str, Any]) -> list[str]:
    """One line per question about a pair (see `compare.pair`), the summary of all first."""
    same, speed = _same_line(found), _speed_line(found)
    by_axis = {name: _axis_line(found, name, gap) for name, gap in found["gaps"].items()}
    summary = [same] if found["same_tokens"]["equal"] else []
    if not found["loss_per_token_comparable"]:
        summary.append("loss per token is not comparable")
    axis = "tokens" if found["gaps"]["tokens"]["at"] is not None else "steps"
    if found["gaps"][axis]["at"] is not None and not _same_result(found):
        summary.append(decision(found, axis)[1])
    if found["speed"]:
        summary.append(speed.split(" (")[0])
    lines = ["; ".join(summary)] if summary else []
    if not found["loss_per_token_comparable"]:
        lines.append(
            f"loss per token is not comparable: {found['why_not_comparable']}; bits per byte of held-out text are"
        )
    lines += [f"{kind} losses give no verdict: {', '.join(r)}" for kind, r in found["reservations"].items() if r]
    return [*lines, same, *by_axis.values(), speed]


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


def decision(found: dict[str, Any], axis: str) -> tuple[str | None, str]:
    """What decides at equal `axis` ("eval_loss", "loss", "eval_bits_per_byte", or None), and the verdict.

    Evaluations decide where they have a band, as they are of text the model has not seen; else training losses.
    """
    gaps, b, at = found["gaps"][axis], found["b"], f"at equal {axis}"
    reserved = found["reservations"]
    keys = [key for key, kind in (("eval_loss", "evaluation"), ("loss", "training")) if not reserved[kind]]
    if not found["loss_per_token_comparable"]:
        keys = [] if reserved["evaluation"] else ["eval_bits_per_byte"]
    known = [(key, gaps[key]) for key in keys if isinstance(gaps.get(key), Gap)]
    if _same_result(found) and gaps.get("paired") and known:
        return known[0][0], f"no difference beyond noise {at}"
    for key, gap in known:
        if gap.beyond_noise:
            return key, f"{b} is {abs(gap.percent):.2g} % {_BETTER_WORSE[gap.difference > 0]} {at}"
        if gap.beyond_noise is False:
            return key, f"no difference beyond noise {at}"
    if known:
        return None, f"{b} differs by {known[0][1].percent:+.2g} % {at}, with too few records to tell it from noise"
    return None, f"no verdict {at}"


def _axis_line(found: dict[str, Any], axis: str, gaps: dict[str, Any]) -> str:
    if gaps["at"] is None:
        return f"at equal {axis}: not known, {' and '.join(gaps['missing'])} has no {axis} with a finite loss"
    comparable = found["loss_per_token_comparable"]
    names = {"eval_loss": "evaluation loss", "loss": "training loss"}
    names = names if comparable else {"eval_bits_per_byte": "bits per byte"}
    told = [f"{name} {_gap(gaps[key])}" for key, name in names.items() if isinstance(gaps.get(key), Gap)]
    if not told:
        told = ["one of them has no record there" if comparable else "not both have bits per byte there"]
    key, verdict = decision(found, axis)
    by = f" by {names[key]}" if key and len(told) > 1 else ""
    return f"{verdict}{by}: {'; '.join(told)}"


def _gap(gap: Gap) -> str:
    band = gap.how if gap.band is None else f"noise ±{100 * gap.band / abs(gap.first or 1):.2g} %"
    return f"{gap.first:.4f} and {gap.second:.4f} ({gap.percent:+.2g} %, {band})"


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
