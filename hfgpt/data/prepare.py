"""Prepare the text of a run for training."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerFast

from hfgpt.config import PretrainConfig
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import LOSSES, Document, Encoder, make_repeatable
from hfgpt.data.formats.tokens.reading import Vocabulary
from hfgpt.data.held_out import HeldOut, hold_out, no_documents, source_options
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.permutation import permutation
from hfgpt.data.remote import check_hub, model_files
from hfgpt.data.sources import Source, open_source, read_documents, text_hash
from hfgpt.data.token_tokenizer import choose_tokenizer, hashes_of_copies, refuse_trained, vocabulary_of
from hfgpt.data.tokenization import load_tokenizer
from hfgpt.data.units import IN_MEMORY_BYTES, Row
from hfgpt.errors import UserError
from hfgpt.files import has_tokenizer
from hfgpt.messages.formats import counted
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.model.configuration_gpt2 import model_fields
from hfgpt.settings.field_types import AUTO

CHARACTER_SCAN_BYTES = 256 * 2**20


@dataclass
class TextData:
    """Text ready to train on.

    `validation`, and a `train_sample` of training text if requested: one run of int32 tokens each.
    `validation_bytes`: UTF-8 bytes of all validation tokens except the first; None if unknown. `description`: lines for
    the plan. `skipped`: rows skipped so far, and what the tokenizer does not represent, by reason; a document stream
    counts its own with each step. `validation_documents`: number of different ones. `tokenizer_name`: the setting, or
    what tokens that are ready name as theirs.
    """

    tokenizer: PreTrainedTokenizerFast
    train: MemoryBlocks | DocumentStream
    validation: np.ndarray
    train_sample: np.ndarray | None
    validation_bytes: int | None
    description: list[str]
    skipped: Counter[str]
    validation_documents: int
    tokenizer_name: str


def prepare_data(
    config: PretrainConfig,
    blocks_per_step: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
    saved_rule: str | None = None,
) -> TextData:
    """Open the text, hold out validation text, load or train the tokenizer (unless given), and build the stream.

    `streaming`: True for a document stream, False for blocks in memory, "auto" for memory if local or embedded text has
    at most 16 MiB. Without `eval_dataset`, the last tenth of the text is held out. Training never sees a validation
    document, nor an exact copy of one. `saved_rule`: the hold-out rule of a run being resumed. Raises UserError for
    text that is missing or unusable. Writes nothing.
    """
    source = _open_training_source(config)
    if source.has_tokens:
        if tokenizer is None:
            config = choose_tokenizer(config, source)
            tokenizer = _load_tokenizer(config, [], [])
        source = source.with_vocabulary(vocabulary_of(_make_encoder(config, tokenizer), config.tokenizer, source))

    def eval_vocabulary() -> Vocabulary:
        nonlocal tokenizer
        if tokenizer is None:
            refuse_trained(config.tokenizer, f"eval_dataset={config.eval_dataset} contains tokens")
            tokenizer = _load_tokenizer(config, [], [])
        return vocabulary_of(_make_encoder(config, tokenizer), config.tokenizer)

    in_memory = _fits_memory(source) if config.streaming == "auto" else not config.streaming
    if config.tokenizer == "char" and tokenizer is None and source.size_bytes > CHARACTER_SCAN_BYTES:
        raise UserError("tokenizer=char: needs all of the text in memory, and this text is too large; use bpe-4096")
    if not in_memory:
        source = source.split_for_stream()
    skipped = +Counter(bad_file=source.skipped_files)
    documents = _read_all(config, source, skipped) if in_memory else None
    with SlowWork("reading the held-out text"):
        held_out = hold_out(config, source, documents, saved_rule, eval_vocabulary)
    skipped.update({f"eval_{reason}": count for reason, count in held_out.skipped.items()})
    if tokenizer is not None:
        held_out.copies = hashes_of_copies(source, held_out.validation, Encoder(make_repeatable(tokenizer)), tokenizer)
    training = dataclasses.replace(source, units=held_out.units, exclude=held_out.exclude)
    kept = [text for text in held_out.documents if text_hash(text) not in held_out.exclude]
    skipped += Counter(in_validation=len(held_out.documents) - len(kept))

    if tokenizer is None:
        whole, part = (source, training) if documents is None else (documents, kept)
        tokenizer = _load_tokenizer(config, whole, part)
    encoder = _make_encoder(config, tokenizer)
    fingerprint = _fingerprint(config, source, encoder, held_out, blocks_per_step)
    train: MemoryBlocks | DocumentStream
    if in_memory:
        train, how = _memory_blocks(encoder, kept, fingerprint, skipped)
        shuffled: Iterable[Row] = (kept[i] for i in permutation(len(kept), config.seed))
    else:
        fingerprint["stream"] = "documents"
        train = DocumentStream(training, encoder, **_shape(fingerprint), fingerprint=fingerprint)
        how = f"document stream: {len(source.units):,} units over {train.streams} streams"
        shuffled = _shuffled_documents(training, config.seed)
    validation, validation_bytes, lines = _encode_validation(config, encoder, held_out, skipped)
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        train_sample=_first_tokens(encoder, shuffled, len(validation)) if config.eval_train else None,
        validation_bytes=validation_bytes,
        description=[
            source.description,
            _describe_tokenizer(config, tokenizer, encoder.rows),
            f"training: {how}",
            *lines,
            *(f"so far, {line}" for line in describe_skipped(skipped)),
        ],
        skipped=skipped,
        validation_documents=len(held_out.hashes),
        tokenizer_name=config.tokenizer,
    )


def describe_skipped(skipped: Counter[str]) -> list[str]:
    """Return one line for rows without text, and one for text that the tokenizer does not represent, if any."""
    rows: list[str] = []
    losses: list[str] = []
    for reason, count in sorted(skipped.items()):
        (losses if reason.removeprefix("eval_") in LOSSES else rows).append(f"{count:,} {reason}")
    kinds = {"rows of text left out": rows, "text that the tokenizer does not represent": losses}
    return [f"{kind}: {', '.join(counts)}" for kind, counts in kinds.items() if counts]


def _open_training_source(config: PretrainConfig) -> Source:
    dataset = Path(config.dataset)
    if dataset.is_dir() and Path(config.output_dir).resolve().is_relative_to(dataset.resolve()):
        raise UserError(
            f"output_dir={config.output_dir}: is inside dataset={config.dataset}, all of whose files are training text"
        )
    hub = config.dataset_name, config.dataset_split, config.dataset_revision
    return open_source(config.dataset, *hub, **source_options(config))


def _fits_memory(source: Source) -> bool:
    return source.is_local and source.size_bytes <= IN_MEMORY_BYTES


def _read_all(config: PretrainConfig, source: Source, skipped: Counter[str]) -> list[Row]:
    with SlowWork("reading the text", "documents") as work:
        documents = list(work.count(read_documents(source, source.units, skipped)))
    if not documents:
        raise no_documents(f"dataset={config.dataset}", skipped)
    return documents


def _load_tokenizer(
    config: PretrainConfig, whole: Source | list[Row], part: Source | list[Row]
) -> PreTrainedTokenizerFast:
    """Load the tokenizer, or train it: char on the whole text, bpe-N on the training part."""
    name, text = config.tokenizer, whole if config.tokenizer == "char" else part
    # Units in random order, so that the first ones are a representative sample.
    texts = _shuffled_documents(text, config.seed) if isinstance(text, Source) else text
    if name == AUTO and config.init_from is not None:
        files = model_files(config.init_from)
        if not has_tokenizer(files):
            hint = "gpt2 for nanoGPT's 50,304 rows, char for its character models"
            raise UserError(f"init_from={config.init_from}: has no tokenizer of its own; set --tokenizer ({hint})")
        name = str(files)
    is_trained = name == "char" or name.startswith("bpe-")
    if not (is_trained or os.path.exists(name)):
        check_hub(f"tokenizer={name}", name)
    what, unit = ("training", "documents") if is_trained else ("loading", "")
    with SlowWork(f"{what} the tokenizer {name}", unit) as work:
        counted = cast(Iterable[str], work.count(texts))  # a tokenizer is not trained on tokens
        return load_tokenizer(name, lambda: counted, model_fields(config.model).get("n_positions", 1024))


def _make_encoder(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    encoder = Encoder(make_repeatable(tokenizer))
    if config.document_masking and encoder.separator_id is None:
        raise UserError(f"document_masking: tokenizer={config.tokenizer} puts no end-of-text between documents")
    if encoder.separator_is_text:
        raise UserError(
            f"tokenizer={config.tokenizer}: its end-of-text (eos) is {tokenizer.eos_token!r}, a character of ordinary "
            "text, which would end documents; give it an eos_token that is not in the text"
        )
    return encoder


def _describe_tokenizer(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, rows: int) -> str:
    named = "of init_from" if config.tokenizer == AUTO else config.tokenizer
    highest = f" with ids up to {rows - 1:,}" if rows > len(tokenizer) else ""
    return f"tokenizer: {named}, {len(tokenizer):,} entries{highest}"


def _fingerprint(
    config: PretrainConfig, source: Source, encoder: Encoder, held_out: HeldOut, blocks_per_step: int
) -> dict[str, Any]:
    """Return everything that determines the tokens and their order. It is recorded, and compared on resume."""
    return {
        **{f"dataset.{key}": value for key, value in source.fingerprint.items()},
        "tokenizer": encoder.fingerprint,
        "held_out": held_out.rule,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "blocks_per_step": blocks_per_step,
        "held_out.hash": xxhash.xxh3_64_hexdigest(np.array(sorted(held_out.hashes), "<u8").tobytes()),
    }


def _shape(fingerprint: dict[str, Any]) -> dict[str, int]:
    return {key: fingerprint[key] for key in ("seed", "sequence_length", "blocks_per_step")}


def _memory_blocks(
    encoder: Encoder, texts: list[Row], fingerprint: dict[str, Any], skipped: Counter[str]
) -> tuple[MemoryBlocks, str]:
    """Return the stream of a text in memory, and its description. Counts what the tokenizer loses in `skipped`."""
    documents = _encode(encoder, texts)
    skipped.update(_losses(documents))
    tokens = encoder.joined(documents)
    if skipped["in_validation"] and len(tokens) <= fingerprint["sequence_length"]:
        raise UserError(
            f"dataset: {len(tokens):,} training tokens are left, fewer than one block: {skipped['in_validation']:,} "
            "documents are also in the validation text; give another eval_dataset or more text"
        )
    tokens_hash = xxhash.xxh3_64_hexdigest(tokens.tobytes())
    fingerprint |= {"stream": "memory", "tokens": len(tokens), "tokens_hash": tokens_hash}
    train = MemoryBlocks(tokens, **_shape(fingerprint), fingerprint=fingerprint)
    blocks = f"{train.blocks_per_epoch:,} blocks an epoch"
    return train, f"in memory: {counted(len(texts), 'document')}, {len(tokens):,} tokens, {blocks}"


def _encode_validation(
    config: PretrainConfig, encoder: Encoder, held_out: HeldOut, skipped: Counter[str]
) -> tuple[np.ndarray, int | None, list[str]]:
    """Return the validation tokens, their bytes without the first token, and lines for the plan.

    Counts what the tokenizer loses in the documents used in `skipped`.
    """
    enough = None if config.eval_tokens is None else config.eval_tokens + 1
    encoded = _encode(encoder, held_out.validation)
    used = _first_documents(encoded, enough)
    skipped.update({f"eval_{reason}": count for reason, count in _losses(used).items()})
    tokens = encoder.joined(used)
    is_limited = enough is not None and (len(used) < len(encoded) or len(tokens) > enough)
    first = f", the first {config.eval_tokens:,} tokens (eval_tokens)" if is_limited else ""
    tokens, lengths = tokens[:enough], encoder.byte_lengths(used)
    if len(tokens) < 2:
        key = "dataset" if config.eval_dataset is None else "eval_dataset"
        hint = "give an eval_dataset with more text"
        raise UserError(f"{key}: fewer than two tokens for evaluation ({held_out.origin}); {hint}")
    documents = counted(len(held_out.validation), "document")
    lines = [
        f"validation: {len(tokens):,} tokens of {documents}, {held_out.origin}{first}",
        f"documents: {encoder.rule()}",
        *([f"bits per byte: null, because {why}"] if (why := encoder.why_no_bytes(used)) else []),
    ]
    return tokens, None if lengths is None else int(lengths[1 : len(tokens)].sum()), lines


def _encode(encoder: Encoder, texts: list[Row]) -> list[Document]:
    groups = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    # Encoding releases the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool, SlowWork("tokenizing", "documents", len(texts)) as work:
        return list(work.count(chain.from_iterable(pool.map(encoder.documents, groups))))


def _losses(documents: list[Document]) -> Counter[str]:
    return sum((document.lost for document in documents if document.lost), Counter[str]())


def _first_documents(documents: list[Document], count: int | None) -> list[Document]:
    """Return the documents that contain the first `count` ids; all of them if None."""
    if count is None:
        return documents
    ends = np.cumsum([len(document.ids) for document in documents])
    enough = ends - [document.joints for document in documents] >= count
    return documents[: int(enough.argmax()) + 1] if enough.any() else documents


def _first_tokens(encoder: Encoder, documents: Iterable[Row], count: int) -> np.ndarray:
    """Return the first `count` tokens of the documents, or all of them if there are fewer."""
    pieces: list[np.ndarray] = []
    for document in documents:
        pieces += encoder.encode([document])
        if sum(map(len, pieces)) >= count:
            break
    return np.concatenate(pieces)[:count]


def _shuffled_documents(source: Source, seed: int) -> Iterator[Row]:
    """Yield the documents of the units, in a fixed random order."""
    return read_documents(source, [source.units[i] for i in permutation(len(source.units), seed)], Counter())
