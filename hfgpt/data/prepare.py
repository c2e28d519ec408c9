"""Prepare the text of a run for training: one text, a mixture, or several named evaluation texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerFast

from hfgpt.config import PretrainConfig
from hfgpt.data import embedded, prepare_text
from hfgpt.data.document_stream import DocumentStream
from hfgpt.data.encoding import describe_skipped, first_tokens
from hfgpt.data.held_out import HeldOut, open_evaluation_text
from hfgpt.data.local_files import local_files
from hfgpt.data.memory_blocks import MemoryBlocks
from hfgpt.data.mixture import MixedStream
from hfgpt.data.position import SOURCE, of_source
from hfgpt.data.prepare_text import OpenText, TextData
from hfgpt.data.run_tokenizer import RunTokenizer
from hfgpt.errors import UserError
from hfgpt.settings.mixture import MixtureSource
from hfgpt.settings.step_sizes import StepSizes

T = TypeVar("T")
Streams = dict[str, MemoryBlocks | DocumentStream]
_HELD_OUT_OF_EACH = "the last tenth of each source"
# Keys of a source's fingerprint that the mixture has in common.
_SHARED = ("tokenizer", "seed", "sequence_length", "blocks_per_step")


def prepare_data(
    config: PretrainConfig,
    blocks_per_step: int | StepSizes,
    tokenizer: PreTrainedTokenizerFast | None = None,
    saved: dict[str, Any] | None = None,
) -> TextData:
    """Open the text, hold out validation text, load or train the tokenizer (unless given), and build the stream.

    `streaming`: True for a document stream, False for blocks in memory, "auto" for memory if local or embedded text has
    at most 16 MiB. Without `eval_dataset`, the last tenth of the text is held out; of a mixture, that of each source,
    to be evaluated under its name. Training never sees a validation document, nor an exact copy of one. `saved`: the
    fingerprint of a run being resumed, whose text is opened by the same rules. Raises UserError for text that is
    missing or unusable. Writes nothing.
    """
    sizes = StepSizes.of(blocks_per_step, config.sequence_length)

    def saved_of(name: str) -> dict[str, Any] | None:
        return saved if config.mixture is None else of_source(saved, name)

    sources = _of_each(config, lambda name, own: prepare_text.open_training_source(own, saved_of(name)))
    of_run = RunTokenizer(config, sources, tokenizer)
    config = of_run.config
    opened = _of_each(config, lambda name, own: prepare_text.open_text(own, sources[name], of_run, saved_of(name)))
    texts, evaluated = list(opened.values()), _evaluation_texts(config, opened, of_run)
    prepare_text.exclude_evaluated(texts, evaluated.values(), of_run)
    tokenizer, encoder = of_run.load(prepare_text.documents_for_tokenizer(config, texts)), of_run.encoder
    streams, how = Streams(), []
    for name, text in opened.items():
        streams[name], of_stream = _named(_source(name), partial(prepare_text.build_stream, text, encoder, sizes))
        how.append(f"training: {_prefix(name)}{of_stream}")
    train = _combine(config, streams, evaluated)
    skipped = sum((text.skipped for text in texts), Counter[str]())
    named, lines = {}, []
    for name, held_out in evaluated.items():
        encode = partial(prepare_text.encode_validation, config, encoder, held_out, skipped)
        full_name = f"eval_dataset.{name}" if config.evaluation_texts else _source(name)
        tokens, token_bytes, of_text = _named(full_name, encode)
        named[name] = tokens, token_bytes
        for line in of_text:
            if not line.startswith("documents:"):
                lines.append(f"{_prefix(name)}{line}")
            elif line not in lines:  # of the tokenizer, the same for all texts
                lines.append(line)
    validation = np.concatenate([tokens for tokens, _ in named.values()])
    shuffled = chain.from_iterable(map(prepare_text.shuffled_documents, texts))
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        train_sample=first_tokens(encoder, shuffled, len(validation)) if config.eval_train else None,
        validation_bytes=named[""][1] if "" in named else None,
        description=[
            *(f"{_prefix(name)}{line}" for name, text in opened.items() for line in text.describe()),
            *of_run.describe(),
            *how,
            *lines,
            *(f"so far, {line}" for line in describe_skipped(skipped)),
        ],
        skipped=skipped,
        validation_documents=len(frozenset[int]().union(*(text.hashes for text in evaluated.values()))),
        tokenizer_name=config.tokenizer,
        named_validation={} if "" in named else named,
    )


def _prefix(name: str) -> str:
    return f"{name}: " if name else ""


def _source(name: str) -> str:
    return f"source {name}" if name else ""


def _named(name: str, make: Callable[[], T]) -> T:
    """Call `make`, and put the name of the text before its errors."""
    try:
        return make()
    except UserError as error:
        if not name:
            raise
        raise UserError(*(f"{name}: {problem}" for problem in error.problems)) from error


def _of_each(config: PretrainConfig, make: Callable[[str, PretrainConfig], T]) -> dict[str, T]:
    """Call `make` with the name and settings of each source, or of the only text, whose name is empty.

    Raises the problems of all of them at once.
    """
    sources = config.mixture.sources if config.mixture else [MixtureSource("", {})]
    made: dict[str, T] = {}
    problems: list[str] = []
    for source in sources:
        own = config.of_text(source.settings) if config.mixture else config
        try:
            made[source.name] = _named(_source(source.name), partial(make, source.name, own))
        except UserError as error:
            if not config.mixture:
                raise
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return made


def _evaluation_texts(
    config: PretrainConfig, opened: dict[str, OpenText], tokenizer: RunTokenizer
) -> dict[str, HeldOut]:
    """Return the evaluation texts by name: those of `eval_dataset`, or what was held out of each source."""
    if config.eval_dataset is None or (config.mixture is None and not config.evaluation_texts):
        return {name: text.held_out for name, text in opened.items()}
    if isinstance(config.eval_dataset, dict):
        only = None if config.mixture else opened[""].source
        named = config.evaluation_texts.items()
        return {
            name: open_evaluation_text(name, settings, config, only, tokenizer.readable) for name, settings in named
        }
    name = config.eval_dataset
    if name != embedded.NAME and local_files(name) is None and "/" not in name:
        raise UserError(
            f"eval_dataset={name}: no such file or folder; for a split of one of the sources, give "
            f"{{{name}: {{dataset: .., dataset_split: {name}}}}}"
        )
    return {"": open_evaluation_text("", {"dataset": name}, config, None, tokenizer.readable)}


def _combine(
    config: PretrainConfig, streams: Streams, evaluated: dict[str, HeldOut]
) -> MemoryBlocks | DocumentStream | MixedStream:
    """Return the stream of a mixture, or the only stream; its fingerprint covers all evaluation texts."""
    if config.mixture is None and not config.evaluation_texts:
        return streams[""]
    hashes = frozenset[int]().union(*(text.hashes for text in evaluated.values()))
    of_text = {
        "held_out": _HELD_OUT_OF_EACH
        if config.eval_dataset is None
        else "; ".join(_prefix(name) + text.rule for name, text in evaluated.items()),
        "held_out.hash": xxhash.xxh3_64_hexdigest(np.array(sorted(hashes), "<u8").tobytes()),
    }
    if config.mixture is None:
        [only] = streams.values()
        only.fingerprint |= of_text
        return only
    first = next(iter(streams.values()))
    fingerprint = {key: first.fingerprint[key] for key in _SHARED} | of_text | {"stream": "mixture"}
    for name, stream in streams.items():
        own = {key: value for key, value in stream.fingerprint.items() if key not in (*_SHARED, "held_out.hash")}
        fingerprint |= {f"{name}{SOURCE}{key}": value for key, value in own.items()}
    limits = {source.name: source.max_epochs for source in config.mixture.sources}
    streamed = {name: stream for name, stream in streams.items() if isinstance(stream, DocumentStream)}
    for name, stream in streamed.items():
        stream.max_epochs = limits[name]
        if stream.max_epochs and config.on_exhausted == "renormalise":
            raise UserError(
                f"source {name}: max_epochs={limits[name]} with on_exhausted=renormalise needs text in memory, as only "
                "its end is known to all processes; use --on_exhausted stop, or --streaming false"
            )
    return MixedStream(
        streams,
        config.mixture.schedule(first.sizes),
        limits,
        renormalises=config.on_exhausted == "renormalise",
        sequence_length=first.sequence_length,
        blocks_per_step=first.sizes,
        fingerprint=fingerprint,
    )
