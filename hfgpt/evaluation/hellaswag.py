"""HellaSwag: which of four endings of a short scene a model finds likeliest.

Scored as in the scripts that train small GPT-2 models: the tokens of the context, then those of a space and the ending,
with nothing before them; the loss is over the ending's tokens. So the figures can be compared with theirs. Others
rewrite the text first, and get other figures.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object

from hfgpt.data.encoding import Encoder
from hfgpt.data.local_files import local_files
from hfgpt.data.remote import hub_files
from hfgpt.data.rows import read_rows
from hfgpt.distributed.ranks import HostGroup
from hfgpt.errors import RunError, UserError
from hfgpt.evaluation.loss import shown
from hfgpt.model.configuration_gpt2 import model_rows

T = TypeVar("T")

HUB_DATASET, SPLIT = "Rowan/hellaswag", "validation"
ENDINGS = 4
PATIENCE_SECONDS = 120.0


class Example(NamedTuple):
    """Token ids of a context and its endings, `label` the number of the right one; `where`: file and row."""

    context: list[int]
    endings: list[list[int]]
    label: int
    where: str


class Text(NamedTuple):
    """Token ids of a context and one ending, of which the last `scored` are the ending's."""

    ids: list[int]
    scored: int
    is_cropped: bool


class Score(NamedTuple):
    """What became of one example: whether the right ending was chosen, by the mean and by the sum of its nll."""

    by_mean: bool
    by_sum: bool
    cropped: int
    is_finite: bool
    where: str


def hellaswag(
    model: Any,
    tokenizer: Any,
    source: str | None = None,
    *,
    batch_size: int,
    accelerator: Accelerator,
    host: HostGroup,
    limit: int | None = None,
) -> dict[str, Any]:
    """Accuracy of a causal language model (ours, or any of transformers) on HellaSwag, the same on every process.

    source: a local jsonl or parquet file with `ctx`, `endings` and `label`, or a Hub dataset; default: that of its
    authors, validation split. batch_size: texts in one forward pass of one process. limit: only the first examples.

    Returns `accuracy_norm` (the ending with the lowest nll per token is taken) and `accuracy` (the lowest nll), each
    with its standard error `..._stderr` (None for one example); `examples`; `cropped`: of the texts, four an example,
    those longer than the model's positions, of which the last tokens were taken; `padded_rows` of the model, for
    which the tokenizer has no entry: they take part in the softmax, as elsewhere; `dataset`, `dataset_split` and
    `dataset_revision` (of a local file only its name is told); `not_represented`: what the tokenizer has no token for,
    where there is any; `seconds`.

    Raises UserError for a file that is not HellaSwag, with the row, and for a tokenizer that cannot write it.
    """
    began = time.perf_counter()
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: at least 1")
    plain = accelerator.unwrap_model(model)
    rows, entries = plain.get_input_embeddings().weight.shape[0], model_rows(tokenizer)
    if entries > rows:
        sizes = f"the tokenizer has {entries:,} entries and the model {rows:,} rows"
        raise UserError(f"{sizes}; use the tokenizer that the model was trained with")
    examples, place = host.from_main(lambda: _read(source or HUB_DATASET, limit, tokenizer))  # the Hub is asked once
    own = examples[accelerator.process_index :: accelerator.num_processes]
    positions = getattr(plain.config, "max_position_embeddings", None)
    texts = [_text(example.context, ending, positions) for example in own for ending in example.endings]
    # The same number of forward passes on each process, as those that share a model must.
    count = -(-len(examples) // accelerator.num_processes) * ENDINGS
    nll = _scored(model, texts, batch_size, -(-count // batch_size), accelerator)
    scores: list[Score] = gather_object([_score(*its) for its in zip(own, _fours(texts), _fours(nll), strict=True)])
    if broken := [score.where for score in scores if not score.is_finite]:
        raise RunError(f"{broken[0]}: the loss is not finite; the model's weights or precision are at fault")
    return {
        **place,
        "examples": len(scores),
        **_accuracy("accuracy_norm", [score.by_mean for score in scores]),
        **_accuracy("accuracy", [score.by_sum for score in scores]),
        "cropped": sum(score.cropped for score in scores),
        "padded_rows": rows - entries,
        "seconds": time.perf_counter() - began,
    }


def _read(source: str, limit: int | None, tokenizer: Any) -> tuple[list[Example], dict[str, Any]]:
    """The examples, and `dataset`, `dataset_split`, `dataset_revision` that say where they are from."""
    place: dict[str, Any] = {"dataset": source}
    if (found := local_files(source)) is not None:
        files, place["dataset"] = found[0], Path(source).expanduser().absolute().name
    else:
        files, commit = hub_files(source, None, SPLIT, None, PATIENCE_SECONDS)
        place |= {"dataset_split": SPLIT, "dataset_revision": commit}
    numbered = ((file, row, content) for file in files for row, content in read_rows(file, PATIENCE_SECONDS))
    rows: dict[str, tuple[str, list[str], int]] = {}
    for file, row, content in itertools.islice(numbered, limit):
        where = f"dataset: {file}, row {row}"
        rows[where] = _checked(where, content)
    if not rows:
        raise UserError(f"dataset={source}: holds no example; give a HellaSwag file with ctx, endings and label")
    examples, lost = _encoded(tokenizer, rows)
    return examples, place | ({"not_represented": dict(lost)} if lost else {})


def _checked(where: str, row: Any) -> tuple[str, list[str], int]:
    """Context, endings and label of a row. Raises UserError, which begins with `where`, for one that has none."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: not an object; give one with ctx, endings and label")
    if missing := [name for name in ("ctx", "endings", "label") if name not in row]:
        raise UserError(f"{where}: has no {', '.join(missing)}; its fields are {', '.join(map(str, row)) or 'none'}")
    context, endings, label = row["ctx"], row["endings"], row["label"]
    if not _is_text(context):
        raise UserError(f"{where}: ctx is {_shown(context)}; it must be text")
    if not isinstance(endings, list) or len(endings) != ENDINGS or not all(map(_is_text, endings)):
        raise UserError(f"{where}: endings is {_shown(endings)}; it must be a list of {ENDINGS} texts")
    if isinstance(label, bool) or str(label) not in map(str, range(ENDINGS)):
        hint = "; the labels of the test split are not public" if label in ("", -1) else ""
        raise UserError(f"{where}: label is {_shown(label)}; it must be 0 to {ENDINGS - 1}{hint}")
    return context, endings, int(label)


def _is_text(value: Any) -> bool:
    """Whether a tokenizer can take it: more than blanks, and no half of a character."""
    try:
        return isinstance(value, str) and bool(value.strip()) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _encoded(tokenizer: Any, rows: dict[str, tuple[str, list[str], int]]) -> tuple[list[Example], Counter[str]]:
    """The examples, and what the tokenizer does not represent of them. Special tokens in text stay text.

    Raises UserError for text that the tokenizer cannot write: one of characters drops what it lacks.
    """
    encoder, lost = Encoder(tokenizer), Counter[str]()
    examples = []
    for where, (context, endings, label) in rows.items():
        texts = [context, *(f" {ending}" for ending in endings)]
        if missing := encoder.unknown_characters("".join(texts)):
            raise UserError(f"{where}: the tokenizer has no {', '.join(map(repr, missing))}, so it cannot be scored")
        first, *four = ids = encoder.tokens(texts)
        if not all(ids):
            raise UserError(f"{where}: the tokenizer makes no token of one of its texts")
        for text, its in zip(texts, ids, strict=True):
            lost += encoder.losses(text, its)[0]
        examples.append(Example(first, four, label, where))
    del lost["changed_documents"]
    return examples, lost


def _fours(values: list[T]) -> list[list[T]]:
    """Those of one example together."""
    return [values[start : start + ENDINGS] for start in range(0, len(values), ENDINGS)]


def _text(context: list[int], ending: list[int], positions: int | None) -> Text:
    """The last `positions` tokens, of which at least the first is context for the ending."""
    whole = [*context, *ending]
    ids = whole[-positions:] if positions else whole
    return Text(ids, min(len(ending), len(ids) - 1), len(ids) < len(whole))


@torch.no_grad()
def _scored(model: Any, texts: Sequence[Text], batch_size: int, passes: int, accelerator: Accelerator) -> list[float]:
    """The nll in nats of each text's scored tokens, in `passes` forward passes, idle ones where no text is left."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number].ids))  # little padding
    found = [math.nan] * len(texts)
    was_training = model.training
    model.eval()
    try:
        # A compiled model would be compiled again for each length.
        with torch.compiler.set_stance("force_eager"):
            for start in shown(range(0, passes * batch_size, batch_size), accelerator.is_main_process):
                numbers = order[start : start + batch_size]
                batch = [texts[number] for number in numbers] or [Text([0, 0], 1, False)]
                nll = _batch_nll(model, batch, accelerator)
                for number, its in zip(numbers, nll if numbers else [], strict=True):
                    found[number] = its
    finally:
        model.train(was_training)
    return found


def _batch_nll(model: Any, batch: Sequence[Text], accelerator: Accelerator) -> list[float]:
    """One forward pass, padded at the right, where causal attention does not look.

    Logits (B, T, V) are the model's own; float32 copies exist of one text's scored positions at a time.
    """
    ids_BT = torch.zeros(len(batch), max(len(text.ids) for text in batch), dtype=torch.long)
    for row, text in zip(ids_BT, batch, strict=True):
        row[: len(text.ids)] = torch.tensor(text.ids)
    ids_BT = ids_BT.to(accelerator.device)
    with accelerator.autocast():
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    sums = []
    for ids_T, logits_TV, (ids, scored, _) in zip(ids_BT, logits_BTV, batch, strict=True):
        stop = len(ids)
        logits_SV = logits_TV[stop - scored - 1 : stop - 1].float()
        sums.append(F.cross_entropy(logits_SV, ids_T[stop - scored : stop], reduction="sum"))
    return torch.stack(sums).tolist()


def _score(example: Example, texts: Sequence[Text], sums: Sequence[float]) -> Score:
    means = [nll / text.scored for nll, text in zip(sums, texts, strict=True)]
    return Score(
        by_mean=means.index(min(means)) == example.label,
        by_sum=sums.index(min(sums)) == example.label,
        cropped=sum(text.is_cropped for text in texts),
        is_finite=all(map(math.isfinite, sums)),
        where=example.where,
    )


def _accuracy(name: str, hits: Sequence[bool]) -> dict[str, float | None]:
    """Share of hits, and its standard error from their sample variance, sqrt(p (1 - p) / (n - 1))."""
    share, count = sum(hits) / len(hits), len(hits)
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None}
