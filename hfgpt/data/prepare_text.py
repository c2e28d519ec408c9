"""Prepare one text of a run: hold out validation text, encode it, and build its stream."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerFast

from hfgpt.config import PretrainConfig
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import Document, Encoder, first_documents
from hfgpt.data.eval_source import source_options
from hfgpt.data.held_out import HeldOut, hold_out
from hfgpt.data.local_files import refuse_inside
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.mixture import MixedStream
from hfgpt.data.open_source import Earlier, open_source
from hfgpt.data.permutation import permutation
from hfgpt.data.run_tokenizer import RunTokenizer
from hfgpt.data.source import Source, hashes_of_pieces, read_documents, read_shuffled, text_hash
from hfgpt.data.units import IN_MEMORY_BYTES, Row
from hfgpt.data.unusable import no_documents, note_on_text, note_unusable
from hfgpt.distributed.cpu import available_cores
from hfgpt.errors import UserError
from hfgpt.messages.formats import counted
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.settings.step_sizes import StepSizes

CHARACTER_SCAN_BYTES = 256 * 2**20
# Compressed files are held in memory if they unpack to at most this many times IN_MEMORY_BYTES.
LARGEST_RATIO = 16


@dataclass
class TextData:
    """Text ready to train on.

    `validation`, and a `train_sample` of training text if requested: one run of int32 tokens each.
    `validation_bytes`: UTF-8 bytes of all validation tokens except the first; None if unknown. `description`: lines for
    the plan. `skipped`: rows skipped so far, and what the tokenizer does not represent, by reason; a document stream
    counts its own with each step. `validation_documents`: number of different ones. `named_validation`: the parts of
    `validation` that are evaluated by name, each with its bytes. `tokenizer_name`: the setting, or what tokens that are
    ready name as theirs.
    """

    tokenizer: PreTrainedTokenizerFast
    train: MemoryBlocks | DocumentStream | MixedStream
    validation: np.ndarray
    train_sample: np.ndarray | None
    validation_bytes: int | None
    description: list[str]
    skipped: Counter[str]
    validation_documents: int
    tokenizer_name: str
    named_validation: dict[str, tuple[np.ndarray, int | None]] = field(default_factory=dict)


@dataclass
class OpenText:
    """One text after its validation text was held out, before it is encoded.

    `documents`: all of them if the text is in memory, None for a document stream. `training`: the units for training.
    `notes`: for the plan.
    """

    config: PretrainConfig
    source: Source
    documents: list[Row] | None
    held_out: HeldOut
    training: Source
    skipped: Counter[str]
    notes: list[str]

    def describe(self) -> list[str]:
        return [self.source.description, *self.notes]

    def exclude(self, hashes: frozenset[int]) -> None:
        """Leave out documents with these hashes from training."""
        self.training = dataclasses.replace(self.training, exclude=hashes)
        kept = [text for text in self.held_out.documents if text_hash(text) not in hashes]
        self.skipped += Counter(in_validation=len(self.held_out.documents) - len(kept))
        self.held_out.documents = kept


def exclude_evaluated(texts: Sequence[OpenText], evaluated: Iterable[HeldOut], tokenizer: RunTokenizer) -> None:
    """Leave out documents of evaluation texts from training, also where one has the tokens of what the other has."""
    evaluated = list(evaluated)
    hashes = frozenset[int]().union(*(held_out.exclude for held_out in evaluated))
    rows = [row for held_out in evaluated for row in held_out.whole_documents]
    kinds = {text.source.has_tokens for text in texts}
    copies = {has_tokens: tokenizer.hashes_of_copies(rows, as_tokens=has_tokens) for has_tokens in kinds}
    for text in texts:
        size = text.source.fingerprint.get("text_pieces")  # into which a stream splits txt files
        pieces = (
            hashes_of_pieces(one.source, size, sum(map(len, one.validation)))
            for one in evaluated
            if size and one.source and not one.source.has_tokens
        )
        text.exclude(hashes.union(copies[text.source.has_tokens], *pieces))


def open_text(
    config: PretrainConfig, source: Source, tokenizer: RunTokenizer, saved: dict[str, Any] | None
) -> OpenText:
    """Decide whether the text of an opened source is held in memory, and hold out validation text."""
    source = tokenizer.readable(source, f"dataset={config.dataset}")
    in_memory = _fits_memory(source) if config.streaming == "auto" else not config.streaming
    if config.tokenizer == "char" and not tokenizer.is_loaded and source.size_bytes > CHARACTER_SCAN_BYTES:
        raise UserError("tokenizer=char: needs all of the text in memory, and this text is too large; use bpe-4096")
    if not in_memory:
        source = source.split_for_stream()
    skipped = +Counter(bad_file=source.skipped_files)
    documents = _read_all(config, source, skipped) if in_memory else None
    with SlowWork("reading the held-out text"):
        held_out = hold_out(config, source, documents, (saved or {}).get("held_out"), tokenizer.readable)
    notes = note_on_text(source, documents, skipped)
    skipped.update({f"eval_{reason}": count for reason, count in held_out.skipped.items()})
    training = dataclasses.replace(source, units=held_out.units, training_size=held_out.size)
    return OpenText(config, source, documents, held_out, training, skipped, notes)


def build_stream(text: OpenText, encoder: Encoder, sizes: StepSizes) -> tuple[MemoryBlocks | DocumentStream, str]:
    """Return the stream of a text, and its description."""
    fingerprint = _fingerprint(text.config, text.source, encoder, text.held_out, sizes)
    if text.documents is not None:
        return _memory_blocks(encoder, text.held_out.documents, fingerprint, text.skipped, sizes)
    fingerprint["stream"] = "documents"
    shape = fingerprint["seed"], fingerprint["sequence_length"], sizes
    train = DocumentStream(text.training, encoder, *shape, fingerprint)
    units = counted(len(text.source.units), "file" if text.source.by_file else "unit")
    return train, f"document stream: {units} over {train.streams} streams"


def open_training_source(config: PretrainConfig, saved: dict[str, Any] | None) -> Source:
    assert isinstance(config.dataset, str)  # noqa: S101 the settings of one text
    refuse_inside(f"output_dir={config.output_dir}", config.output_dir, config.dataset)
    hub = config.dataset_name, config.dataset_split, config.dataset_revision
    return open_source(config.dataset, *hub, **source_options(config), as_earlier=Earlier.of(saved))


def _fits_memory(source: Source) -> bool:
    unpacked_bytes = sum(unit.size_bytes for unit in source.units)
    is_small = source.size_bytes <= IN_MEMORY_BYTES and unpacked_bytes <= LARGEST_RATIO * IN_MEMORY_BYTES
    return source.is_local and is_small


def _read_all(config: PretrainConfig, source: Source, skipped: Counter[str]) -> list[Row]:
    with SlowWork("reading the text", "documents") as work:
        documents = list(work.count(read_documents(source, source.units, skipped)))
    if not documents:
        raise no_documents(f"dataset={config.dataset}", skipped)
    return documents


def documents_for_tokenizer(config: PretrainConfig, texts: Iterable[OpenText]) -> Iterable[Row]:
    """Return the documents that a tokenizer is trained on: the whole texts for char, their training parts for bpe-N."""
    return chain.from_iterable(_documents_for_tokenizer(text, config.tokenizer == "char") for text in texts)


def _documents_for_tokenizer(text: OpenText, whole: bool) -> Iterable[Row]:
    if text.documents is not None:
        return text.documents if whole else text.held_out.documents
    # Units in random order, so that the first ones are a representative sample.
    return read_shuffled(text.source if whole else text.training, text.config.seed)


def shuffled_documents(text: OpenText) -> Iterable[Row]:
    """Return the training documents in a fixed random order."""
    if text.documents is None:
        return read_shuffled(text.training, text.config.seed)
    kept = text.held_out.documents
    return (kept[i] for i in permutation(len(kept), text.config.seed))


def _fingerprint(
    config: PretrainConfig, source: Source, encoder: Encoder, held_out: HeldOut, sizes: StepSizes
) -> dict[str, Any]:
    """Return everything that determines the tokens and their order. It is recorded, and compared on resume."""
    return {
        **{f"dataset.{key}": value for key, value in source.fingerprint.items()},
        "tokenizer": encoder.fingerprint,
        "held_out": held_out.rule,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "blocks_per_step": sizes.to_json(),
        "held_out.hash": xxhash.xxh3_64_hexdigest(np.array(sorted(held_out.hashes), "<u8").tobytes()),
    }


def _memory_blocks(
    encoder: Encoder, texts: list[Row], fingerprint: dict[str, Any], skipped: Counter[str], sizes: StepSizes
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
    train = MemoryBlocks(tokens, fingerprint["seed"], fingerprint["sequence_length"], sizes, fingerprint)
    blocks = f"{train.blocks_per_epoch:,} blocks an epoch"
    return train, f"in memory: {counted(len(texts), 'document')}, {len(tokens):,} tokens, {blocks}"


def encode_validation(
    config: PretrainConfig, encoder: Encoder, held_out: HeldOut, skipped: Counter[str]
) -> tuple[np.ndarray, int | None, list[str]]:
    """Return the validation tokens, their bytes without the first token, and lines for the plan.

    Counts what the tokenizer loses in the documents used in `skipped`.
    """
    enough = None if config.eval_tokens is None else config.eval_tokens + 1
    encoded = _encode(encoder, held_out.validation)
    used = first_documents(encoded, enough)
    skipped.update({f"eval_{reason}": count for reason, count in _losses(used).items()})
    tokens = encoder.joined(used)
    is_limited = enough is not None and (len(used) < len(encoded) or len(tokens) > enough)
    first = f", the first {config.eval_tokens:,} tokens (eval_tokens)" if is_limited else ""
    tokens, lengths = tokens[:enough], encoder.byte_lengths(used)
    if len(tokens) < 2:
        key = "dataset" if config.eval_dataset is None else "eval_dataset"
        hint = "give an eval_dataset with more text"
        raise UserError(f"{key}: fewer than two tokens for evaluation ({held_out.origin}); {hint}")
    documents = counted(len(used), "document")
    lines = [
        f"validation: {len(tokens):,} tokens of {documents}, {held_out.origin}{first}",
        *note_unusable(len(held_out.validation), held_out.skipped, "the validation text"),
        f"documents: {encoder.rule()}",
        *([f"bits per byte: null, because {why}"] if (why := encoder.why_no_bytes(used)) else []),
    ]
    return tokens, None if lengths is None else int(lengths[1 : len(tokens)].sum()), lines


def _encode(encoder: Encoder, texts: list[Row]) -> list[Document]:
    groups = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    # Encoding releases the interpreter lock.
    with ThreadPoolExecutor(available_cores()) as pool, SlowWork("tokenizing", "documents", len(texts)) as work:
        return list(work.count(chain.from_iterable(pool.map(encoder.documents, groups))))


def _losses(documents: list[Document]) -> Counter[str]:
    return sum((document.lost for document in documents if document.lost), Counter[str]())
