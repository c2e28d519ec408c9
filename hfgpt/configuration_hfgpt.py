"""Model sizes by name. The configuration class is GPT-2's own, so that every checkpoint is a plain GPT-2 folder."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from transformers import GPT2Config
from transformers.activations import ACT2FN

from hfgpt.convert import convert, describe
from hfgpt.errors import UserError

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 = {"n_positions": 1024, **_NO_DROPOUT}

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "char-cpu": {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, **_NO_DROPOUT},
    "char-gpu": {
        **{"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256},
        **{"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    },
    "gpt2-40m": {"n_layer": 12, "n_head": 6, "n_embd": 384, **_GPT2},
    "gpt2-125m": {"n_layer": 12, "n_head": 12, "n_embd": 768, **_GPT2},
    "gpt2-350m": {"n_layer": 24, "n_head": 16, "n_embd": 1024, **_GPT2},
    "gpt2-774m": {"n_layer": 36, "n_head": 20, "n_embd": 1280, **_GPT2},
    "gpt2-1.5b": {"n_layer": 48, "n_head": 25, "n_embd": 1600, **_GPT2},
}

# Set from the tokenizer, never by hand: a row more or less than the tokenizer has makes a broken checkpoint.
_FROM_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_FIELDS = {field.name for field in dataclasses.fields(GPT2Config)} - {"add_cross_attention", "n_ctx"}


def model_fields(model: str | dict[str, Any]) -> dict[str, Any]:
    """GPT2Config fields of `model`: a name of MODEL_SIZES, or fields, which may start from a size: {"size": name}.

    Raises UserError for an unknown name or field and for sizes that cannot work.
    """
    if isinstance(model, str):
        if model not in MODEL_SIZES:
            near = difflib.get_close_matches(model, MODEL_SIZES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"model={model}: no such size; {hint}sizes are {', '.join(MODEL_SIZES)}")
        return dict(MODEL_SIZES[model])
    given = dict(model)
    if not isinstance(given.get("size", ""), str):
        raise UserError(f"model.size={given['size']}: must be one of {', '.join(MODEL_SIZES)}")
    fields = {**_NO_DROPOUT, **(model_fields(given.pop("size")) if "size" in given else {}), **given}
    problems = []
    for key in given:
        if key in _FROM_TOKENIZER and key != "vocab_size":
            problems.append(f"model.{key}={given[key]}: this is set from the tokenizer; leave it out")
        elif key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1)
            problems.append(
                f"model.{key}={given[key]}: GPT2Config has no such field"
                + (f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(_FIELDS))}")
            )
    hints = GPT2Config.__annotations__  # GPT-2's own fields; those of the base class are left as they are
    for key in sorted(set(fields) & _FIELDS & set(hints)):
        try:
            value = fields[key] = convert(fields[key], hints[key])
        except ValueError:
            problems.append(f"model.{key}={fields[key]}: must be {describe(hints[key])}")
            continue
        if key in ("n_layer", "n_head", "n_embd", "n_positions", "n_inner") and value is not None and value < 1:
            problems.append(f"model.{key}={value}: must be at least 1")
        if key.endswith("_pdrop") and not 0 <= value < 1:
            problems.append(f"model.{key}={value}: must be at least 0 and below 1")
        if key == "activation_function" and value not in ACT2FN:
            near = difflib.get_close_matches(value, ACT2FN, n=1, cutoff=0.3) or ["gelu_new"]
            problems.append(f"model.{key}={value}: transformers has no such function; did you mean {near[0]}?")
    if not problems:
        n_embd, n_head = fields.get("n_embd", 768), fields.get("n_head", 12)
        if n_embd % n_head:
            fits = [str(h) for h in range(1, min(n_embd, 2 * n_head) + 1) if n_embd % h == 0]
            problems.append(
                f"model.n_embd={n_embd} is not divisible by model.n_head={n_head}; "
                f"an n_head that divides it: {', '.join(fits)}"
            )
    if problems:
        raise UserError(*problems)
    return fields


def model_config(
    model: str | dict[str, Any],
    *,
    vocab_size: int = 50257,
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> GPT2Config:
    """GPT2Config of `model` (see `model_fields`) for a tokenizer of `vocab_size` rows with these special ids.

    Raises UserError when `model` states another vocab_size than the tokenizer's.
    """
    fields = model_fields(model)
    stated = fields.pop("vocab_size", vocab_size)
    if stated != vocab_size:
        raise UserError(
            f"model.vocab_size={stated}: the tokenizer has {vocab_size} entries, and the model gets exactly one row "
            "for each (the head pads its matmul by itself where that is faster); leave vocab_size out"
        )
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    config = GPT2Config(vocab_size=vocab_size, **fields, **ids)
    config.n_ctx = config.n_positions  # converters to other formats still read this older name
    return config
