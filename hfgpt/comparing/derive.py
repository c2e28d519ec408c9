"""Derive what a console log does not print: tokens, seconds, speed, processes, and model size."""

from __future__ import annotations

import numpy as np

from hfgpt.comparing.runs import PastRun, count

# nanoGPT divides by this card's bf16 rate on every device.
NANOGPT_PEAK_TFLOPS = 312.0
NANOGPT_PEAK_SOURCE = "nanoGPT's constant: an A100 in bf16"
# Layers and width of the GPT-2 sizes that nanoGPT accepts as `init_from`.
_GPT2 = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}


def derive(run: PastRun, tokens_per_step: int | None) -> None:
    """Add tokens, seconds, speed and FLOPs, as far as they follow from the log."""
    plan = run.plan
    stated = plan.setdefault("tokens_per_step", tokens_per_step)
    if stated is None:
        run.notes.append("tokens per step are not in the log; set --tokens_per_step to compare by tokens and speed")
    elif tokens_per_step not in (None, stated):
        run.notes.append(f"the log states {stated:,} tokens per step; {tokens_per_step:,} from the flag is not used")
    plan["micro_batch"] = count(run.settings.get("per_device_train_batch_size"))
    plan["sequence_length"] = count(run.settings.get("sequence_length"))
    if stated:
        changes = [(0, stated), *run.facts.pop("step_sizes", [])]
        for record in (*run.training, *run.evaluations):
            record["num_input_tokens_seen"] = _tokens_at(record["step"], changes)
        if len(changes) > 1:
            later = ", ".join(f"{tokens:,} from step {step + 1} on" for step, tokens in changes[1:])
            run.notes.append(f"its step had {stated:,} tokens, and {later}")
        if plan["micro_batch"] and plan["sequence_length"]:  # over all processes, which a log does not show
            plan["accumulation"] = stated // (plan["micro_batch"] * plan["sequence_length"]) or None
    _add_size(run)
    _add_times(run)
    _use_mfu(run)


def _use_mfu(run: PastRun) -> None:
    """Derive FLOPs per token from the MFU, or the number of processes if FLOPs are known: the MFU is that of one."""
    stated, plan = run.tokens_per_step, run.plan
    known = [(r["mfu"], r["step_seconds"]) for r in run.training if r.get("mfu") and r.get("step_seconds")]
    if not known or not stated:
        return
    flops = float(np.median([mfu * NANOGPT_PEAK_TFLOPS * 1e12 * seconds / stated for mfu, seconds in known]))
    if run.flops_per_token is None:
        run.flops_per_token = flops
        run.notes.append("FLOPs per token are derived from its MFU and times, for one device")
        return
    processes = round(run.flops_per_token / flops)
    if processes > 1 and abs(run.flops_per_token / flops / processes - 1) < 0.1:
        plan["processes"] = processes
        if plan.get("accumulation"):
            plan["accumulation"] = plan["accumulation"] // processes or None
        run.notes.append(f"its MFU is that of one of {processes} processes")


def _tokens_at(step: int, changes: list[tuple[int, int]]) -> int:
    """Return the tokens seen after `step`; changes: (step, tokens per step after it), in rising order."""
    ends = [start for start, _ in changes[1:]] + [step]
    return sum(max(0, min(end, step) - start) * tokens for (start, tokens), end in zip(changes, ends, strict=True))


def _add_size(run: PastRun) -> None:
    """Add the numbers of parameters and FLOPs per token where log and settings determine them exactly, else None.

    nanoGPT prints the exact numbers of parameters in decayed and other tensors, and the number without positions
    rounded to 10,000. It does not always print whether the model has biases.
    """
    model = run.model
    decayed, others = model.pop("decayed", None), model.pop("not_decayed", None)
    rounded = model.pop("parameters_without_positions", None)
    model |= {key.removeprefix("model."): value for key, value in run.settings.items() if key.startswith("model.")}
    T = run.plan["sequence_length"]
    if T is not None:
        model["n_positions"] = T
    if others is None:
        decayed = None
    if decayed is None and rounded is None:
        return
    layers, width = _GPT2.get(str(run.settings.get("init_from")), (12, 768))
    L, C = count(model.get("n_layer", layers)), count(model.get("n_embd", width))
    T = T if T is not None or "sequence_length" in run.settings else 1024  # nanoGPT's own
    V = count(model.get("vocab_size"))
    possible = []  # numbers of parameters without positions that match what was printed
    if L and C and T:
        blocks, norms = 12 * L * C * C, (2 * L + 1) * C
        rows = V if decayed is None else (decayed - T * C - blocks) / C
        for vectors in (norms, 2 * norms + 9 * L * C):  # without and with biases
            if rows is None or rows != int(rows) or rows < 1 or V not in (None, rows):
                continue
            without = int(rows) * C + blocks + vectors
            if vectors == others if decayed is not None else f"{without / 1e6:.2f}" == f"{rounded / 1e6:.2f}":
                possible.append(without)
    if len(possible) == 1 and L and C and T:
        model |= {"n_layer": L, "n_embd": C, "n_positions": T, "parameters_without_positions": possible[0]}
        model["parameters"] = possible[0] + T * C
        run.flops_per_token = float(6 * possible[0] + 12 * L * C * T)
    elif decayed is not None:
        model["parameters"] = decayed + others
        run.notes.append("its settings do not give its number of parameters: the one without positions is not known")
    else:
        run.notes.append(f"its number of parameters is known only as about {rounded:,.0f} without positions")


def _add_times(run: PastRun) -> None:
    times = [record["milliseconds"] / 1000 for record in run.training if record.get("milliseconds")]
    if not times:
        return
    evaluated = {record["step"] + 1 for record in run.evaluations}
    median, seconds = float(np.median(times)), [(0, 0.0)]
    for record in run.training:
        milliseconds, starts = record.pop("milliseconds", None), record.pop("starts", False)
        is_clean = milliseconds is not None and record["step"] not in evaluated and not starts
        step_seconds = milliseconds / 1000 if is_clean else median
        last, so_far = seconds[-1]
        record["wall_seconds"] = so_far + (record["step"] - last) * step_seconds
        seconds.append((record["step"], record["wall_seconds"]))
        if is_clean and step_seconds > 0:
            record["step_seconds"] = step_seconds
            if run.tokens_per_step:
                record["tokens_per_second"] = run.tokens_per_step / step_seconds
    steps, ends = zip(*seconds, strict=True)
    for record in run.evaluations:
        record["wall_seconds"] = float(np.interp(record["step"], steps, ends))
