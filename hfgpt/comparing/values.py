"""Format the values in a report."""

from __future__ import annotations

from typing import Any

from hfgpt.messages.formats import duration

UNKNOWN = "-"


def format_value(value: Any, key: str = "") -> str:
    """Format a value; its key determines the unit."""
    if value is None:
        return UNKNOWN if key else "None"
    if key == "events":
        return (
            ", ".join(f"{n} {name}" for name, n in value.items() if name not in ("start", "end", "sample")) or UNKNOWN
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith(("loss", "loss_ema")) or key == "eval_bits_per_byte":
        return f"{value:.4f}"
    if key in ("mfu", "hfu"):
        return f"{100 * value:.1f} %"
    if key == "memory_bytes":
        return f"{value / 2**30:.3g} GiB"
    if key == "wall_seconds":
        return f"{value:.2f} s" if value < 60 else f"{value:,.0f} s ({duration(value)})"
    if key == "flops":
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    if key in ("tokens", "tokens_per_second", "flops_per_token") and value >= 10:
        return f"{value:,.0f}"
    return f"{value:.4g}" if key else f"{value:.6g}"
