"""Model sizes by name. The configuration class is GPT-2's own, so that every checkpoint is a plain GPT-2 folder."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from transformers import GPT2Config
from transformers.activations import ACT2FN

from hfgpt.errors import UserError
from hfgpt.messages.formats import shown
from hfgpt.settings.field_types import NOT_CONVERTIBLE, convert, describe

MOST_UNKNOWN = 20  # most unknown fields that an error lists
MOST_HEADS = 2**12  # largest number of heads that an error suggests
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_SIZES = ("n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size")
_NO_DROPOUT = dict.fromkeys(_DROPOUTS, 0.0)
_GPT2 = {"n_positions": 1024, **_NO_DROPOUT}

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "char-cpu": {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, **_NO_DROPOUT},
    "char-gpu": {"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256, **dict.fromkeys(_DROPOUTS, 0.2)},
    "gpt2-40m": {"n_layer": 12, "n_head": 6, "n_embd": 384, **_GPT2},
    "gpt2-125m": {"n_layer": 12, "n_head": 12, "n_embd": 768, **_GPT2},
    "gpt2-350m": {"n_layer": 24, "n_head": 16, "n_embd": 1024, **_GPT2},
    "gpt2-774m": {"n_layer": 36, "n_head": 20, "n_embd": 1280, **_GPT2},
    "gpt2-1.5b": {"n_layer": 48, "n_head": 25, "n_embd": 1600, **_GPT2},
}

# Fields that change what the model computes.
ARCHITECTURE_FIELDS = (
    *("vocab_size", "n_layer", "n_head", "n_embd", "n_positions", "n_inner", "activation_function"),
    *("layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"),
)
# The fields that a user may set. The special ids come from the tokenizer; the others have no meaning in pretraining.
_NOT_SET = ("bos_token_id", "eos_token_id", "pad_token_id", "add_cross_attention")
_TYPES = {
    key: hint
    for key, hint in GPT2Config.__annotations__.items()
    if key not in _NOT_SET and not key.startswith("summary_")
}


def model_fields(model: str | dict[str, Any], defaults: dict[str, Any] = _NO_DROPOUT) -> dict[str, Any]:
    """Return the GPT2Config fields of `model`: a name in MODEL_SIZES, or fields, optionally based on {"size": name}.

    defaults: values of fields that `model` does not set. Raises UserError for an unknown name or field, and for sizes
    that cannot work.
    """
    given = {"size": model} if isinstance(model, str) else dict(model)
    if any(value is None and ":" in str(key) for key, value in given.items()):
        raise UserError("model: write a space after each ':', as in {n_layer: 2}")
    size = given.pop("size", None)
    if size is not None and not (isinstance(size, str) and size in MODEL_SIZES):
        where = "model" if isinstance(model, str) else "model.size"
        near = _near(size, MODEL_SIZES, cutoff=0.7)  # all are listed anyway
        raise UserError(f"{where}={shown(size)}: no such size; {near}sizes are {', '.join(MODEL_SIZES)}")
    fields = {**defaults, **MODEL_SIZES.get(str(size), {}), **given}
    problems: list[str] = []
    if unknown := [key for key in given if key not in _TYPES]:
        names = ", ".join([f"model.{shown(key)}={shown(fields.pop(key))}" for key in unknown][:MOST_UNKNOWN])
        near = _near(unknown[0], _TYPES) if len(unknown) == 1 else ""
        problems.append(f"{names}: not a field that can be set; {near}fields are {', '.join(_TYPES)}")
    for key, value in fields.items():
        try:
            fields[key] = _checked_field(key, value)
        except UserError as error:
            problems += error.problems
    n_embd, n_head = fields.get("n_embd", 768), fields.get("n_head", 12)
    if not problems and n_embd % n_head:
        fits = ", ".join(str(h) for h in range(1, min(n_embd, 2 * n_head, MOST_HEADS) + 1) if n_embd % h == 0)
        problems.append(f"model.n_embd={n_embd} is not divisible by model.n_head={n_head}; n_head may be {fits}")
    if problems:
        raise UserError(*problems)
    return fields


def _checked_field(key: str, value: Any) -> Any:
    """Return the value converted to its field's type. Raises UserError if it cannot be used."""
    where = f"model.{shown(key)}={shown(value)}"
    try:
        value = convert(value, _TYPES[key])
    except NOT_CONVERTIBLE:
        raise UserError(f"{where}: must be {describe(_TYPES[key])}") from None
    if key in ("layer_norm_epsilon", "initializer_range") and not 1e-30 <= value < 1:
        raise UserError(f"{where}: must be above 0 and below 1, also in float32")
    if key in _SIZES and value is not None and value < 1:
        raise UserError(f"{where}: must be at least 1")
    if key in _DROPOUTS and not 0 <= value < 1:
        raise UserError(f"{where}: must be at least 0 and below 1")
    if key == "activation_function" and value not in ACT2FN:
        raise UserError(f"{where}: transformers has no such function; {_near(value, ACT2FN)}GPT-2's is gelu_new")
    return value


def _near(word: Any, known: Iterable[str], cutoff: float = 0.4) -> str:
    near = difflib.get_close_matches(shown(word), known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}? " if near else ""


def model_config(
    model: str | dict[str, Any],
    *,
    vocab_size: int = 50257,
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> GPT2Config:
    """Return the GPT2Config of `model` (see `model_fields`) for a tokenizer of `vocab_size` rows with these ids.

    Raises UserError if `model` sets a vocab_size other than the tokenizer's.
    """
    fields = model_fields(model)
    stated = fields.pop("vocab_size", vocab_size)
    if stated != vocab_size:
        why = f"the tokenizer has {vocab_size} entries, and the model has exactly one row for each"
        raise UserError(f"model.vocab_size={stated}: {why}; leave vocab_size out")
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    config = GPT2Config(vocab_size=vocab_size, **fields, **ids)
    config.n_ctx = config.n_positions  # converters to other formats still read this older name
    return config


def fields_of(config: GPT2Config) -> dict[str, Any]:
    """Return the fields with which `model_config` rebuilds `config`. Raises UserError for values that cannot work.

    vocab_size is left out: a new model gets one row for each id of its tokenizer.
    """
    return model_fields({key: getattr(config, key) for key in _TYPES if key != "vocab_size"})


def model_rows(tokenizer: Any) -> int:
    """Return the number of embedding rows a tokenizer needs: its highest id plus one.

    This is more than `len(tokenizer)` if the ids have gaps.
    """
    return max(tokenizer.get_vocab().values(), default=0) + 1


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """Return the ids of a tokenizer's bos, eos, pad and unk tokens, as stored in a checkpoint.

    Batches need a pad token, and CTranslate2 needs bos and unk. If the tokenizer lacks one of these, another special
    token replaces it, as in GPT-2, where end-of-text serves for all. Nothing replaces eos, which ends texts. All are
    None for a character tokenizer: an added token would need one more row, and a character declared special would
    vanish from decoded text.
    """
    bos, eos, pad, unk = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))

    def first(*ids: int | None) -> int | None:
        return next((i for i in ids if i is not None), None)

    return {
        "bos_token_id": first(bos, eos),
        "eos_token_id": eos,
        "pad_token_id": first(pad, eos, bos, unk),
        "unk_token_id": first(unk, eos, bos, pad),
    }
