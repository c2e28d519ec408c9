"""Sources -> documents -> tokens -> blocks: `prepare_data` puts the pieces together."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerFast

from hfgpt.config import AUTO, PretrainConfig
from hfgpt.configuration_hfgpt import model_fields
from hfgpt.data.encoding import LOSSES, Document, Encoder, make_repeatable
from hfgpt.data.permutation import permutation
from hfgpt.data.remote import model_files
from hfgpt.data.sources import IN_MEMORY_BYTES, Source, Unit, Unusable, local_files, open_source, text_hash
from hfgpt.data.stream import DocumentStream, MemoryBlocks, Stream
from hfgpt.data.tokenization import has_tokenizer, load_tokenizer
from hfgpt.errors import UserError

CHARACTER_SCAN_BYTES = 256 * 2**20


@dataclass
class TextData:
    """Text ready to train on. `validation`, and `train_sample` of training text where asked for: one run of int32
    tokens each. `validation_bytes`: UTF-8 bytes of the text of all validation tokens but the first, None where they
    are not known. `description`: lines for the plan. `skipped`: rows passed over so far and what the tokenizer does
    not represent, by reason; a document stream counts its own with each step.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Stream
    validation: np.ndarray
    train_sample: np.ndarray | None
    validation_bytes: int | None
    description: list[str]
    skipped: Counter[str]


def prepare_data(
    config: PretrainConfig, blocks_per_step: int, tokenizer: PreTrainedTokenizerFast | None = None
) -> TextData:
    """Open the text, hold out validation, load or train the tokenizer (unless given), and make the training stream.

    `streaming`: True for a document stream, False for blocks in memory, "auto" for memory up to 16 MiB of local or
    embedded text. `eval_dataset`: local files, or another split of the same Hub dataset; without it, part of the
    text is held out (see `_split` and `_hold_out`). Training never sees a validation document, nor an exact copy of
    one. Raises `UserError` for text that is missing or unusable; writes nothing.
    """
    hub = config.dataset_name, config.dataset_split, config.dataset_revision
    if os.path.isdir(config.dataset) and Path(config.output_dir).resolve().is_relative_to(
        Path(config.dataset).resolve()
    ):
        raise UserError(f"output_dir={config.output_dir}: lies in dataset={config.dataset}, whose files are the text")
    source = open_source(config.dataset, *hub, **_options(config))
    streaming, seed = config.streaming, config.seed
    # A document has a token at least, so that as many documents are enough.
    enough = None if config.eval_tokens is None else config.eval_tokens + 1
    in_memory = source.is_local and source.size_bytes <= IN_MEMORY_BYTES if streaming == "auto" else not streaming
    if config.tokenizer == "char" and tokenizer is None and source.size_bytes > CHARACTER_SCAN_BYTES:
        raise UserError("tokenizer=char: has to see all of the text, which is too large for that; use bpe-4096")
    skipped, eval_skipped = +Counter(bad_file=source.skipped_files), Counter[str]()
    documents = list(documents_of(source, source.units, skipped)) if in_memory else []
    if in_memory and not documents:
        raise UserError(f"dataset={config.dataset}: holds no usable document (passed over: {dict(skipped)})")
    units, kept = source.units, documents
    if config.eval_dataset is not None:
        eval_source = _open_eval(config.eval_dataset, source, config)
        validation = list(islice(documents_of(eval_source, eval_source.units, eval_skipped), enough))
        which = eval_source.fingerprint.get("hash", config.eval_dataset)
        rule, origin = f"eval_dataset {which}", eval_source.description
    elif in_memory:
        kept, validation = _split(documents)
        rule, origin = "last tenth", "held out: the last tenth of the text"
    else:
        units, validation, rule = _hold_out(source, eval_skipped)
        origin = rule
    held_out = frozenset(map(text_hash, validation))
    training = dataclasses.replace(source, units=units, exclude=held_out)
    copies = len(kept)
    kept = [text for text in kept if text_hash(text) not in training.exclude]
    copies -= len(kept)
    skipped += Counter(in_validation=copies, **{f"eval_{reason}": count for reason, count in eval_skipped.items()})

    if config.tokenizer == "char":  # knows the held-out part, too; of an `eval_dataset` nothing
        texts = documents if in_memory else documents_of(source, source.units, Counter())
    else:  # learns from training text alone, whose units are shuffled so that the first are a fair sample
        texts = kept if in_memory else _shuffled(training, seed)
    if tokenizer is None:
        n_positions = model_fields(config.model).get("n_positions", 1024)
        tokenizer = load_tokenizer(_tokenizer_name(config), lambda: texts, n_positions)
    encoder = Encoder(make_repeatable(tokenizer))
    if config.document_masking and encoder.separator_id is None:
        raise UserError(f"document_masking: tokenizer={config.tokenizer} puts no end-of-text between documents")
    if encoder.separator_is_text:
        raise UserError(
            f"tokenizer={config.tokenizer}: its end-of-text (eos) is {tokenizer.eos_token!r}, a character of ordinary "
            "text, which would end documents; give it an eos_token of its own"
        )
    fingerprint = {f"dataset.{key}": value for key, value in source.fingerprint.items()}
    shape = {"seed": seed, "sequence_length": config.sequence_length, "blocks_per_step": blocks_per_step}
    fingerprint |= {"tokenizer": encoder.fingerprint, "held_out": rule, **shape}
    fingerprint["held_out.hash"] = xxhash.xxh3_64_hexdigest(np.array(sorted(held_out), "<u8").tobytes())
    train: Stream
    if in_memory:
        documents_in = _encode(encoder, kept)
        skipped += _losses(documents_in)
        run = encoder.joined(documents_in)
        if skipped["in_validation"] and len(run) <= config.sequence_length:
            raise UserError(
                f"dataset: {len(run):,} training tokens are left, fewer than one block: {skipped['in_validation']:,} "
                "documents also stand in the validation text; give another eval_dataset or more text"
            )
        fingerprint |= {"stream": "memory", "tokens": len(run), "tokens_hash": xxhash.xxh3_64_hexdigest(run.tobytes())}
        train = MemoryBlocks(run, **shape, fingerprint=fingerprint)
        how = f"in memory: {len(kept):,} documents, {len(run):,} tokens, {train.blocks_per_epoch:,} blocks an epoch"
    else:
        train = DocumentStream(training, encoder, **shape, fingerprint={**fingerprint, "stream": "documents"})
        how = f"document stream: {len(source.units):,} units over {train.streams} streams"
    evaluated = _first(_encode(encoder, validation), enough)
    skipped += Counter({f"eval_{reason}": count for reason, count in _losses(evaluated).items()})
    validation_run, validation_bytes = encoder.joined(evaluated)[:enough], encoder.byte_lengths(evaluated)
    if len(validation_run) < 2:
        key = "dataset" if config.eval_dataset is None else "eval_dataset"
        raise UserError(f"{key}: fewer than two tokens to evaluate on ({origin}); give an eval_dataset with more text")
    train_sample = None
    if config.eval_train:
        in_order = [kept[i] for i in permutation(len(kept), seed)] if in_memory else _shuffled(training, seed)
        train_sample = _first_tokens(encoder, in_order, len(validation_run))
    named = "of init_from" if config.tokenizer == AUTO else config.tokenizer
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation_run,
        train_sample=train_sample,
        validation_bytes=None if validation_bytes is None else int(validation_bytes[1 : len(validation_run)].sum()),
        description=[
            source.description,
            f"tokenizer: {named}, {len(tokenizer):,} entries"
            + (f" with ids up to {encoder.rows - 1:,}" if encoder.rows > len(tokenizer) else ""),
            f"documents: {encoder.rule()}",
            f"training: {how}",
            f"validation: {len(validation_run):,} tokens of {len(validation):,} documents, {origin}",
            *([f"bits per byte: null, as {why}"] if (why := encoder.why_no_bytes(evaluated)) else []),
            *(f"so far, {line}" for line in told_counts(skipped)),
        ],
        skipped=skipped,
    )


def prepare_again(
    config: PretrainConfig,
    blocks_per_step: int,
    saved: dict[str, Any],
    fingerprint: dict[str, Any],
    folder: Path | None,
) -> TextData:
    """`prepare_data` for a run that has begun with settings `saved` on the text of `fingerprint`: at its commit, and in
    the tokenizer trained for it, which the checkpoint `folder` holds.
    """
    pinned, commit, tokenizer = config, fingerprint.get("dataset.commit"), None
    was_local = commit is None and config.dataset != "embedded" and config.dataset == saved.get("dataset")
    if was_local and local_files(config.dataset) is None:
        raise UserError(
            f"dataset={config.dataset}: was a local path when the run began, and is not here; start where it was "
            "started, or give the whole path"
        )
    if commit and config.dataset_revision == saved.get("dataset_revision"):
        pinned = dataclasses.replace(config, dataset_revision=commit)
    own = config.tokenizer in ("char", AUTO) or config.tokenizer.startswith("bpe-")
    if folder and own and config.tokenizer == saved.get("tokenizer"):
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # each broken file fails in its own way
            raise UserError(f"{folder}: its tokenizer cannot be read ({error}); take another checkpoint") from error
    try:
        return prepare_data(pinned, blocks_per_step, tokenizer)
    except UserError as error:
        if pinned is config or f"dataset_revision={commit}" not in str(error):
            raise
        if not config.accept_changed_text:
            way_out = "this is the commit that the run began with; --accept_changed_text true goes on with the newest"
            raise UserError(f"{error}; {way_out}") from error
        return prepare_data(config, blocks_per_step, tokenizer)


def told_counts(skipped: Counter[str]) -> list[str]:
    """Rows passed over, and what the tokenizer does not represent, each a line if there are any."""
    kinds: dict[str, list[str]] = {"rows of text left out": [], "text that the tokenizer does not represent": []}
    for reason, count in sorted(skipped.items()):
        kinds[[*kinds][reason.removeprefix("eval_") in LOSSES]].append(f"{count:,} {reason}")
    return [f"{kind}: {', '.join(counts)}" for kind, counts in kinds.items() if counts]


def _tokenizer_name(config: PretrainConfig) -> str:
    if config.tokenizer != AUTO or config.init_from is None:
        return config.tokenizer
    files = model_files(config.init_from)
    if not has_tokenizer(files):
        of_nanogpt = "gpt2 for nanoGPT's 50,304 rows, char for its character models"
        raise UserError(f"init_from={config.init_from}: has no tokenizer of its own; state --tokenizer ({of_nanogpt})")
    return str(files)


def _options(config: PretrainConfig) -> dict[str, Any]:
    return {
        "text_column": config.text_column,
        "patience_seconds": config.stream_timeout,
        "skip_bad_files": config.on_bad_files == "skip",
    }


def documents_of(source: Source, units: list[Unit], skipped: Counter[str]) -> Iterator[str]:
    """The documents of these units; rows without a usable one are counted in `skipped`, by reason."""
    for row in chain.from_iterable(map(source.read, units)):
        if isinstance(row, Unusable):
            skipped[row.reason] += 1
        else:
            yield row


def _shuffled(source: Source, seed: int) -> Iterator[str]:
    """Documents from units in a fixed random order."""
    return documents_of(source, [source.units[i] for i in permutation(len(source.units), seed)], Counter())


def _first_tokens(encoder: Encoder, documents: Iterable[str], count: int) -> np.ndarray:
    """The first `count` tokens of the documents, or all there are."""
    pieces: list[np.ndarray] = []
    for document in documents:
        pieces += encoder.encode([document])
        if sum(map(len, pieces)) >= count:
            break
    return np.concatenate(pieces)[:count]


def _open_eval(eval_dataset: str, source: Source, config: PretrainConfig) -> Source:
    dataset = config.dataset
    hub: dict[str, Any] = {
        "name": config.dataset_name,
        "split": eval_dataset,
        "revision": source.fingerprint.get("commit"),
    }
    if source.is_local or os.path.exists(os.path.expanduser(eval_dataset)) or glob.has_magic(eval_dataset):
        dataset, hub = eval_dataset, {}
    try:
        return open_source(dataset, **hub, **_options(config))
    except UserError as error:
        raise UserError(re.sub("^dataset(_split)?", "eval_dataset", str(error))) from error


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and validation documents: of several the last with a tenth of the text, of one its last tenth."""
    if len(documents) == 1:
        cut = int(0.9 * len(documents[0]))
        return [documents[0][:cut]], [documents[0][cut:]]
    characters = np.cumsum([len(text) for text in reversed(documents)])
    first = max(1, len(documents) - 1 - int(np.searchsorted(10 * characters, characters[-1])))
    return documents[:first], documents[first:]


def _hold_out(source: Source, skipped: Counter[str]) -> tuple[list[Unit], list[str], str]:
    """Units to train on, validation documents (the last unit that has one, or the last tenth of its rows if there are
    fewer than 10 units), and the rule in words.
    """
    for i, unit in reversed(list(enumerate(source.units))):
        rows = source.read(unit)
        first = 0 if len(source.units) >= 10 else len(rows) * 9 // 10
        documents = [row for row in rows[first:] if isinstance(row, str)]
        skipped.update(row.reason for row in rows[first:] if isinstance(row, Unusable))
        if documents:
            rest = [unit._replace(rows=first)] if first else []
            return source.units[:i] + rest, documents, f"held out: unit {i} from row {first} on"
    passed_over = f" (passed over: {dict(skipped)})" if skipped else ""
    raise UserError(f"dataset={source.description}: holds no usable document{passed_over}")


def _encode(encoder: Encoder, texts: list[str]) -> list[Document]:
    groups = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # encoding releases the interpreter lock
        return list(chain.from_iterable(pool.map(encoder.documents, groups)))


def _first(documents: list[Document], count: int | None) -> list[Document]:
    """Those with the first `count` ids of all, None: all."""
    if count is None:
        return documents
    ends = np.cumsum([len(document.ids) for document in documents])
    enough = ends - [document.joints for document in documents] >= count
    return documents[: int(enough.argmax()) + 1] if enough.any() else documents


def _losses(documents: list[Document]) -> Counter[str]:
    return sum((document.lost for document in documents if document.lost), Counter[str]())
