"""HellaSwag: which of four endings of a short scene a model finds most likely.

Scored as in the scripts that train small GPT-2 models, so that results are comparable: the tokens of the context, then
those of a space and the ending, with nothing before them; the loss is over the ending's tokens. Other programs rewrite
the text first, and get other results.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

from hfgpt.data.encoding import Encoder
from hfgpt.data.local_files import local_files
from hfgpt.data.remote import hub_files
from hfgpt.data.rows import read_rows
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import RunError, UserError
from hfgpt.evaluation.loading import count_padded_rows
from hfgpt.evaluation.loss import evaluation_mode
from hfgpt.messages.slow_progress import SlowWork

HUB_DATASET, SPLIT = "Rowan/hellaswag", "validation"
ENDINGS = 4
PATIENCE_SECONDS = 120.0  # for an unresponsive Hub


class Example(NamedTuple):
    """Token ids of a context and its endings, and the index `label` of the right one. `where`: file and row."""

    context: list[int]
    endings: list[list[int]]
    label: int
    where: str


class Text(NamedTuple):
    """Token ids of a context and one ending; the last `scored` are the ending's."""

    ids: list[int]
    scored: int
    is_cropped: bool


def hellaswag(
    model: Any,
    tokenizer: Any,
    source: str | None = None,
    *,
    batch_size: int,
    accelerator: Accelerator,
    ranks: Ranks,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return the accuracy of a causal language model (ours, or any in transformers), the same on every process.

    source: a local jsonl or parquet file with `ctx`, `endings` and `label`, or a Hub dataset; default: the validation
    split of the authors' dataset. batch_size: texts in one forward pass of a process. limit: use only this many
    examples.

    Keys: `accuracy_norm` (by nll per token) and `accuracy` (by nll), each with its standard error `..._stderr` (None
    for one example); `examples`; `cropped`: number of texts (four per example) that lost their beginning because they
    exceed the model's positions; `padded_rows`: rows of the model without an entry in the tokenizer, which take part in
    the softmax, as in other programs; `dataset` (the name of a local file), `dataset_split` and `dataset_revision`;
    `not_represented`: counts of what the tokenizer has no token for, if any; `seconds`.

    Raises UserError for a file that is not HellaSwag, naming the row, and for a tokenizer that cannot encode it.
    """
    began = time.perf_counter()
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: at least 1")
    plain_model = accelerator.unwrap_model(model)
    padded_rows = count_padded_rows(plain_model, tokenizer, "model")
    examples, facts = ranks.from_main(lambda: _read(source or HUB_DATASET, limit, tokenizer))  # one request to the Hub
    positions = getattr(plain_model.config, "max_position_embeddings", None)
    texts = [_text(example.context, ending, positions) for example in examples for ending in example.endings]
    nll_E4 = np.array(_score_texts(model, texts, batch_size, accelerator)).reshape(-1, ENDINGS)
    if broken := [example.where for example, nll in zip(examples, nll_E4, strict=True) if not np.isfinite(nll).all()]:
        raise RunError(f"{broken[0]}: the loss is not finite; check the model's weights and the precision")
    tokens_E4 = np.array([text.scored for text in texts]).reshape(-1, ENDINGS)
    labels_E = np.array([example.label for example in examples])
    return {
        **facts,
        "examples": len(examples),
        **_accuracy("accuracy_norm", (nll_E4 / tokens_E4).argmin(1) == labels_E),
        **_accuracy("accuracy", nll_E4.argmin(1) == labels_E),
        "cropped": sum(text.is_cropped for text in texts),
        "padded_rows": padded_rows,
        "seconds": time.perf_counter() - began,
    }


def _read(source: str, limit: int | None, tokenizer: Any) -> tuple[list[Example], dict[str, Any]]:
    """Read the examples; also return `dataset`, its split and revision as far as known, and `not_represented`."""
    facts: dict[str, Any] = {"dataset": source}
    if (found := local_files(source)) is not None:
        files, facts["dataset"] = found[0], Path(source).expanduser().absolute().name
    else:
        files, commit = hub_files(source, None, SPLIT, None, PATIENCE_SECONDS)
        facts |= {"dataset_split": SPLIT, "dataset_revision": commit}
    rows = ((file, number, row) for file in files for number, row in read_rows(file, PATIENCE_SECONDS))
    encoder, examples, lost = Encoder(tokenizer), [], Counter[str]()
    for file, number, row in itertools.islice(rows, limit):
        where = f"dataset: {file}, row {number}"
        examples.append(_encode(encoder, where, *_check_row(where, row), lost))
    if not examples:
        raise UserError(f"dataset={source}: has no examples; give a HellaSwag file with ctx, endings and label")
    del lost["changed_documents"]
    return examples, facts | ({"not_represented": dict(lost)} if lost else {})


def _check_row(where: str, row: Any) -> tuple[str, list[str], int]:
    """Return context, endings and label of a row. Raises UserError, starting with `where`, if they are not usable."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object; give one with ctx, endings and label")
    if missing := [name for name in ("ctx", "endings", "label") if name not in row]:
        raise UserError(f"{where}: has no {', '.join(missing)}; its fields are {', '.join(map(str, row)) or 'none'}")
    context, endings, label = row["ctx"], row["endings"], row["label"]
    if not _is_text(context):
        raise UserError(f"{where}: ctx is {_shorten(context)}; it must be text")
    if not isinstance(endings, list) or len(endings) != ENDINGS or not all(map(_is_text, endings)):
        raise UserError(f"{where}: endings is {_shorten(endings)}; it must be a list of {ENDINGS} texts")
    if isinstance(label, bool) or str(label) not in map(str, range(ENDINGS)):
        hint = "; the labels of the test split are not public" if label in ("", -1) else ""
        raise UserError(f"{where}: label is {_shorten(label)}; it must be 0 to {ENDINGS - 1}{hint}")
    return context, endings, int(label)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that a tokenizer can encode: not blank, and valid Unicode."""
    try:
        return isinstance(value, str) and bool(value.strip()) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _shorten(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _encode(encoder: Encoder, where: str, context: str, endings: list[str], label: int, lost: Counter[str]) -> Example:
    """Return the token ids of a row; special tokens in its text stay text. Counts what has no token in `lost`.

    Raises UserError for text that the tokenizer cannot encode.
    """
    texts = [context, *(f" {ending}" for ending in endings)]
    if missing := encoder.unknown_characters("".join(texts)):
        raise UserError(f"{where}: the tokenizer has no {', '.join(map(repr, missing))}, so it cannot be scored")
    encoded = encoder.tokens(texts)
    if not all(encoded):
        raise UserError(f"{where}: one of its texts has no tokens with this tokenizer")
    for text, ids in zip(texts, encoded, strict=True):
        lost.update(encoder.losses(text, ids)[0])
    return Example(encoded[0], encoded[1:], label, where)


def _text(context: list[int], ending: list[int], positions: int | None) -> Text:
    """Return the last `positions` tokens; the first of them is never scored, because it has no context."""
    whole = [*context, *ending]
    ids = whole[-positions:] if positions else whole
    return Text(ids, min(len(ending), len(ids) - 1), len(ids) < len(whole))


@torch.no_grad()
def _score_texts(model: Any, texts: Sequence[Text], batch_size: int, accelerator: Accelerator) -> list[float]:
    """Return the nll in nats of each text's scored tokens. The processes share the work."""
    world = accelerator.num_processes
    order = sorted(range(len(texts)), key=lambda number: len(texts[number].ids))  # sorted by length, for little padding
    order += [-1] * (-len(order) % world)  # dummies, so that every process runs the same number of forward passes
    own = order[accelerator.process_index :: world]
    batches = [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
    nll: list[tuple[int, float]] = []
    # Eager: a compiled model would be compiled again for each length.
    eager, progress = torch.compiler.set_stance("force_eager"), SlowWork("evaluation", "batches", len(batches))
    with evaluation_mode(model), eager, progress as work:
        for numbers in work.count(batches):
            batch = [texts[number] if number >= 0 else Text([0, 0], 1, False) for number in numbers]
            nll += zip(numbers, _batch_nll(model, batch, accelerator), strict=True)
    by_number = dict(gather_object(nll))
    return [by_number[number] for number in range(len(texts))]


def _batch_nll(model: Any, batch: Sequence[Text], accelerator: Accelerator) -> list[float]:
    """Run one forward pass, padded on the right, where causal attention cannot see.

    The logits (B, T, V) are copied to float32 for one text's scored positions at a time.
    """
    ids_BT = pad_sequence([torch.tensor(text.ids) for text in batch], batch_first=True).to(accelerator.device)
    with accelerator.autocast():
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    sums = []
    for ids_T, logits_TV, text in zip(ids_BT, logits_BTV, batch, strict=True):
        stop = len(text.ids)
        start = stop - text.scored
        sums.append(F.cross_entropy(logits_TV[start - 1 : stop - 1].float(), ids_T[start:stop], reduction="sum"))
    return torch.stack(sums).tolist()


def _accuracy(name: str, hits: np.ndarray) -> dict[str, float | None]:
    """Return the fraction of hits, and its standard error from the sample variance, sqrt(p (1 - p) / (n - 1))."""
    share, count = int(hits.sum()) / len(hits), len(hits)
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None}
