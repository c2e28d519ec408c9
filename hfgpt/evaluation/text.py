"""The text of an evaluation: documents as tokens, and which of the tokens are scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfgpt.data.encoding import Document, Encoder
from hfgpt.data.open_source import open_source
from hfgpt.data.source import read_documents
from hfgpt.data.token_tokenizer import vocabulary_of
from hfgpt.data.units import Row
from hfgpt.errors import UserError
from hfgpt.messages.slow_progress import SlowWork


@dataclass(frozen=True)
class Text:
    """Documents as int32 `tokens`, in runs of `lengths`. `scored_bytes`: UTF-8 bytes that are scored (None: unknown).

    `facts`: what an evaluation reports about the text.
    """

    tokens: np.ndarray
    lengths: list[int]
    scored_bytes: int | None
    facts: dict[str, Any]


def read_text(
    tokenizer: Any, source: dict[str, Any], eval_tokens: int | None, by_document: bool | None, as_trained: bool = False
) -> Text:
    """Read the documents of `open_source(**source)`, each after a start token, until `eval_tokens` can be scored.

    The start token is the tokenizer's bos, else its eos. If both are the same token, as in GPT-2, documents follow each
    other as in training, and a start token is scored if another document precedes it. Otherwise, or with
    `by_document`, each document is a separate run. The first token of a run is never scored: it is the start token, or
    without one the first token of the text.

    as_trained: for a checkpoint of a run, whose documents followed each other, after eos, whatever the bos.
    """
    encoder, opened, skipped = Encoder(tokenizer), open_source(**source), Counter[str]()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    has_own_start = bos is not None and not as_trained
    start = encoder.separator_id = bos if has_own_start else eos
    is_apart = (has_own_start and bos != eos) if by_document is None else by_document
    if is_apart or start is not None:
        encoder.newline_id = None  # documents are not joined by a line end
    if opened.has_tokens:
        vocabulary = vocabulary_of(encoder, "the checkpoint's", opened)
        opened = opened.with_vocabulary(vocabulary._replace(separator=eos))
    with SlowWork("reading and tokenizing", "documents") as work:
        texts = work.count(read_documents(opened, opened.units, skipped))
        documents, count, lost = _encode(encoder, texts, is_apart, eval_tokens)
    tokens = encoder.joined(documents)
    lengths = [len(document.ids) for document in documents] if is_apart else [len(tokens)]
    if eval_tokens is not None and (surplus := len(tokens) - len(lengths) - eval_tokens) > 0:
        tokens, lengths[-1] = tokens[:-surplus], lengths[-1] - surplus
    is_scored = np.delete(np.arange(len(tokens)), np.cumsum([0, *lengths[:-1]])) if len(tokens) else tokens
    if not len(is_scored):
        raise UserError(f"dataset={source['dataset']}: no token to score; give more text")
    token_bytes = encoder.byte_lengths(documents)
    commit = opened.fingerprint.get("commit")
    on_hub = {f"dataset_{key}": source.get(key) for key in ("name", "split")} | {"dataset_revision": commit}
    facts = {
        "dataset": source["dataset"],
        **(on_hub if commit else {}),
        "text": opened.description,
        "documents": count,
        "left_out": dict(skipped),
        **({"not_represented": dict(lost)} if lost else {}),
        **({"bits_per_byte_is_null": why} if (why := encoder.why_no_bytes(documents)) else {}),
        "joined": "each document on its own" if is_apart else "documents one after another, as in training",
        "start_token": _describe_start(tokenizer, start, is_apart, encoder),
    }
    return Text(tokens, lengths, None if token_bytes is None else int(token_bytes[is_scored].sum()), facts)


def _encode(
    encoder: Encoder, texts: Iterable[Row], is_apart: bool, eval_tokens: int | None
) -> tuple[list[Document], int, Counter[str]]:
    """Encode documents with `eval_tokens` to score; also return how many were read, and what the tokenizer loses."""
    documents: list[Document] = []
    targets, count, lost = 0, 0, Counter[str]()
    for text in texts:
        [document] = encoder.documents([text])
        lost, count = lost + document.lost, count + 1
        if not len(document.ids):
            continue  # the tokenizer drops all of it
        documents.append(document)
        targets += len(document.ids) - is_apart
        if eval_tokens is not None and targets - document.joints - (not is_apart) >= eval_tokens:
            break
    return documents, count, lost


def _describe_start(tokenizer: Any, start: int | None, is_apart: bool, encoder: Encoder) -> str:
    if start is None:
        if is_apart:
            return "none; the first token of each document is not scored"
        return f"none; the first token of the text is not scored; {encoder.rule()}"
    scored = "never scored" if is_apart else "scored except the first"
    token = tokenizer.bos_token if start == tokenizer.bos_token_id else tokenizer.eos_token
    return f"{token} ({start}) before each document; {scored}"
