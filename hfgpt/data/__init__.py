"""Sources -> documents -> tokens -> blocks: `prepare_data` puts the pieces together."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from hfgpt.data.sources import IN_MEMORY_BYTES, Source, Unusable, open_source
from hfgpt.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from hfgpt.data.stream import HeldOut, Stream
    from hfgpt.data.tokenization import Encoder

CHARACTER_SCAN_BYTES = 256 * 2**20


@dataclass
class TextData:
    """Text ready to train on.

    `validation`: one run of int32 tokens, to be scored at stride `sequence_length`. `token_bytes`: UTF-8 bytes of
    each id, int32 [vocabulary], or None where unknown. `description`: lines for the plan. `skipped`: rows passed
    over so far, by reason; a document stream counts its own with each step.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Stream
    validation: np.ndarray
    token_bytes: np.ndarray | None
    description: list[str]
    skipped: Counter[str]


def prepare_data(
    *,
    dataset: str,
    dataset_name: str | None = None,
    dataset_split: str = "train",
    dataset_revision: str | None = None,
    text_column: str = "text",
    eval_dataset: str | None = None,
    tokenizer: str | PreTrainedTokenizerFast,
    seed: int,
    sequence_length: int,
    blocks_per_step: int,
    n_positions: int,
    streaming: bool | Literal["auto"] = "auto",
    eval_tokens: int | None = None,
) -> TextData:
    """Open the text, hold out validation, load or train the tokenizer, and make the training stream.

    `streaming`: True for a document stream, False for blocks in memory, "auto" for memory up to 16 MiB of local or
    embedded text. `eval_dataset`: local files, or another split of the same Hub dataset; without it, part of the
    text is held out: of text in memory the last documents that make up a tenth (of a single document its last
    tenth), of a document stream the last unit, or the last tenth of its rows if there are fewer than 10 units.
    Training never sees a validation document, nor an exact copy of one. Raises `UserError` for text that is
    missing or unusable; writes nothing.
    """
    from hfgpt.data.stream import DocumentStream, MemoryBlocks, text_hash
    from hfgpt.data.tokenization import Encoder, load_tokenizer, token_byte_lengths

    source = open_source(
        dataset, name=dataset_name, split=dataset_split, revision=dataset_revision, text_column=text_column
    )
    in_memory = source.is_local and source.size_bytes <= IN_MEMORY_BYTES if streaming == "auto" else not streaming
    if tokenizer == "char" and source.size_bytes > CHARACTER_SCAN_BYTES:
        raise UserError(
            f"tokenizer=char: needs a pass over all of the text to know its characters, too slow for "
            f"{source.size_bytes / 1e6:,.0f} MB; use bpe-4096 or a ready tokenizer"
        )
    skipped: Counter[str] = Counter()
    documents = list(_documents(source, skipped)) if in_memory else []
    if in_memory and not documents:
        raise UserError(f"dataset={dataset}: holds no usable document (passed over: {dict(skipped)})")
    held_out: HeldOut | None = None
    if eval_dataset is not None:
        eval_source = _open_eval(eval_dataset, source, dataset, dataset_name, text_column)
        validation = _evaluation_documents(eval_source, eval_tokens)
        rule, origin = f"eval_dataset {eval_source.fingerprint.get('hash', eval_dataset)}", eval_source.description
    elif in_memory:
        documents, validation = _split(documents)
        rule, origin = "last tenth", "held out: the last tenth of the text"
    else:
        held_out, validation = _hold_out(source)
        rule = origin = f"held out: unit {held_out.unit} from row {held_out.row} on"
    exclude = frozenset(text_hash(text) for text in validation)
    kept = [text for text in documents if text_hash(text) not in exclude]
    skipped += Counter(in_validation=len(documents) - len(kept))

    def training_texts() -> Iterator[str]:
        return iter(kept) if in_memory else _training_documents(source, held_out, exclude, seed)

    tokenizer_name = tokenizer if isinstance(tokenizer, str) else tokenizer.name_or_path or "given"
    if isinstance(tokenizer, str):
        texts = (lambda: chain(training_texts(), validation)) if tokenizer == "char" else training_texts
        tokenizer = load_tokenizer(tokenizer, texts, n_positions)
    encoder = Encoder(tokenizer)
    fingerprint = {f"dataset.{key}": value for key, value in source.fingerprint.items()}
    fingerprint |= {"tokenizer": encoder.fingerprint, "held_out": rule}
    shape = {"seed": seed, "sequence_length": sequence_length, "blocks_per_step": blocks_per_step}
    train: Stream
    if in_memory:
        run = _encode(encoder, kept)
        fingerprint |= {"tokens": len(run), "tokens_hash": xxhash.xxh3_64_hexdigest(run.tobytes())}
        train = MemoryBlocks(run, fingerprint=fingerprint, **shape)
        how = f"in memory: {len(kept):,} documents, {len(run):,} tokens, {train.blocks_per_epoch:,} blocks an epoch"
    else:
        train = DocumentStream(source, encoder, held_out=held_out, exclude=exclude, fingerprint=fingerprint, **shape)
        how = f"document stream: {len(source.units):,} units over {train.streams} streams"
    validation_run = _encode(encoder, validation, None if eval_tokens is None else eval_tokens + 1)
    if len(validation_run) < 2:
        raise UserError("eval_dataset: the validation text has fewer than two tokens; give one with more text")
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation_run,
        token_bytes=token_byte_lengths(tokenizer),
        description=[
            f"text: {source.description}",
            f"tokenizer: {tokenizer_name}, {len(tokenizer):,} entries",
            f"training: {how}",
            f"validation: {len(validation_run):,} tokens of {len(validation):,} documents, {origin}",
        ],
        skipped=skipped,
    )


def _documents(source: Source, skipped: Counter[str]) -> Iterator[str]:
    for row in chain.from_iterable(map(source.read, source.units)):
        if isinstance(row, Unusable):
            skipped[row.reason] += 1
        else:
            yield row


def _open_eval(eval_dataset: str, source: Source, dataset: str, name: str | None, text_column: str) -> Source:
    try:
        if source.is_local or os.path.exists(os.path.expanduser(eval_dataset)) or glob.has_magic(eval_dataset):
            return open_source(eval_dataset, text_column=text_column)
        commit = source.fingerprint["commit"]
        return open_source(dataset, name=name, split=eval_dataset, revision=commit, text_column=text_column)
    except UserError as error:
        raise UserError(*(re.sub("^dataset(_split)?", "eval_dataset", line) for line in error.problems)) from error


def _evaluation_documents(source: Source, eval_tokens: int | None) -> list[str]:
    """All documents of a small source; of a large one as many as surely hold `eval_tokens` tokens."""
    documents: list[str] = []
    characters = 0
    for document in _documents(source, Counter()):
        documents.append(document)
        characters += len(document)
        # No tokenizer averages 16 characters a token over running text.
        if eval_tokens is not None and characters > 16 * eval_tokens and source.size_bytes > IN_MEMORY_BYTES:
            break
    return documents


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and validation documents: of several the last with a tenth of the text, of one its last tenth."""
    if len(documents) == 1:
        cut = int(0.9 * len(documents[0]))
        return [documents[0][:cut]], [documents[0][cut:]]
    wanted, first = 0.1 * sum(map(len, documents)), len(documents)
    while wanted > 0 and first > 1:
        first -= 1
        wanted -= len(documents[first])
    return documents[:first], documents[first:]


def _hold_out(source: Source) -> tuple[HeldOut, list[str]]:
    """The last unit with a document, or the last tenth of its rows if there are fewer than 10 units; its documents."""
    from hfgpt.data.stream import HeldOut

    for unit in reversed(range(len(source.units))):
        rows = source.read(source.units[unit])
        first = 0 if len(source.units) >= 10 else max(0, len(rows) - max(1, len(rows) // 10))
        documents = [row for row in rows[first:] if isinstance(row, str)]
        if documents:
            return HeldOut(unit, first), documents
    raise UserError("dataset: holds no usable document at its end; give an eval_dataset or another dataset")


def _training_documents(source: Source, held_out: HeldOut | None, exclude: frozenset[int], seed: int) -> Iterator[str]:
    """Training documents with the units shuffled, so that the first ones are a fair sample."""
    from hfgpt.data.stream import permutation, text_hash

    for unit in permutation(len(source.units) if held_out is None else held_out.unit + 1, seed):
        rows = source.read(source.units[unit])
        limit = held_out.row if held_out is not None and unit == held_out.unit else len(rows)
        yield from (row for row in rows[:limit] if isinstance(row, str) and text_hash(row) not in exclude)


def _encode(encoder: Encoder, texts: list[str], limit: int | None = None) -> np.ndarray:
    """The ids of all texts as one run, cut to `limit`; no more texts are encoded than that takes."""
    groups = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    pieces, tokens = [np.zeros(0, np.int32)], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # encoding releases the interpreter lock
        for ids in pool.map(encoder.encode, groups) if limit is None else map(encoder.encode, groups):
            pieces += ids
            tokens += sum(map(len, ids))
            if limit is not None and tokens >= limit:
                break
    if encoder.separator_id is None and len(pieces) == len(texts) + 1 > 1 and not texts[-1].endswith("\n"):
        pieces[-1] = pieces[-1][:-1]  # the newline between documents, which ends no document here
    return np.concatenate(pieces)[:limit]
