"""Encode documents as ids: complete, reproducible, and never turning text into special tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hfgpt.data import tokenizer_model as rules
from hfgpt.data.fast_encoding import LONGEST_TEXT, fast_encoding
from hfgpt.errors import UserError, one_line
from hfgpt.model.configuration_gpt2 import model_rows

# Names under which text that a tokenizer loses is counted.
LOSSES = ("unknown_tokens", "unknown_tokens_left_out", "dropped_bytes", "dropped_characters", "changed_documents")


class Document(NamedTuple):
    """A text as int32 `ids`, with the separator first, or `joints` ids of a line end last.

    `lost`: what the tokenizer does not represent, see LOSSES. `prefix`: bytes that it added before the text (a space),
    None if the text is not known.
    """

    ids: np.ndarray
    lost: Counter[str]
    prefix: int | None
    joints: int


def make_repeatable(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Switch off, in place, what a tokenizer.json may leave on: merge dropout, truncation, padding."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    return tokenizer


class Encoder:
    """Encodes documents as ids, each with the separator in front. Special tokens inside a text stay text.

    Attributes:
        separator_id: the tokenizer's end-of-text, or None: then `newline_id` follows a document that does not end in a
            line end; if that is None too, documents follow each other directly.
        rows: the highest id plus one.
        lengths: UTF-8 bytes of each id, int32 [rows], 0 for special tokens; None if a token has no bytes of its own, as
            in WordPiece.
        unknown_id: the id for unknown text.
        fingerprint: identifies vocabulary and rules.

    It can be pickled, and works in threads and forked processes. Raises UserError for an id that two tokens share.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        specification = json.loads(tokenizer.backend_tokenizer.to_str())
        model, added = specification["model"], specification["added_tokens"]
        specification |= {"truncation": None, "padding": None}
        if model.get("dropout"):
            model["dropout"] = None
        self._tokenizer = tokenizer
        self.rows = model_rows(tokenizer)
        self.separator_id: int | None = tokenizer.eos_token_id
        self.unknown_id = rules.unknown_token_id(model)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        rules.refuse_shared_ids(vocabulary)
        special = {token["content"] for token in added if token["special"]} | set(tokenizer.all_special_tokens)
        self._characters = rules.find_characters(specification, special)
        self._table = rules.find_token_bytes(specification, vocabulary, special, self.rows)
        self.lengths = None if self._table is None else np.array([len(token) for token in self._table], np.int32)
        self.newline_id = self._find_newline() if self.separator_id is None else None
        self.fingerprint = self._hash_rules(specification)
        self.separator_is_text = rules.is_symbol(tokenizer.eos_token, model)

        # A private copy: transformers resets the flag, and others may look for the tokens that are hidden here.
        for token in added:
            token["special"] |= token["content"] in special
        self._specification = {**specification, "model": rules.without_special_text(model, special)}
        self._backend = rules.build_backend(specification, self._specification["model"])
        self.keeps_all_text = self._characters is not None or (
            self._table is not None and rules.keeps_all_text(specification)
        )

    def __reduce__(self) -> Any:
        return Encoder, (self._tokenizer,)  # rebuilt in a worker, because a pickled backend loses its flag

    def _hash_rules(self, specification: dict[str, Any]) -> str:
        hashed = {key: specification[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        if self.separator_id is None and self._characters is None:
            hashed["joined"] = "directly" if self.newline_id is None else "newline_id"
        return xxhash.xxh3_64_hexdigest(json.dumps(hashed, sort_keys=True).encode())

    def _find_newline(self) -> int | None:
        if self._characters is not None:
            return self._characters.get("\n")
        return self._table.index(b"\n") if self._table is not None and b"\n" in self._table else None

    @cached_property
    def _fast(self) -> Any:
        return fast_encoding(self._backend) if self._characters is None else None

    @cached_property
    def _loss_counter(self) -> Tokenizer | None:
        return rules.build_loss_counter(self._specification, self.rows)

    @property
    def has_characters(self) -> bool:
        """Whether each token is one character."""
        return self._characters is not None

    def unknown_characters(self, text: str) -> list[str]:
        """Return the characters of `text` that a character tokenizer lacks, sorted; empty for other tokenizers."""
        return [] if self._characters is None else sorted(set(text) - self._characters.keys())

    def encode(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Return the ids of texts, encoded as documents."""
        return [document.ids for document in self.documents(texts)]

    def documents(self, texts: Sequence[Any]) -> list[Document]:
        """Encode texts as documents, or take their ids. Raises UserError for text that cannot be encoded."""
        if any(isinstance(text, np.ndarray) for text in texts):
            return [self._of_ids(text) if isinstance(text, np.ndarray) else self.documents([text])[0] for text in texts]
        start = [] if self.separator_id is None else [self.separator_id]
        documents = []
        for text, ids in zip(texts, self.tokens(texts), strict=True):
            lost, prefix = self.losses(text, ids)
            if lost["unknown_tokens"] and self.unknown_id in (self.separator_id, self._tokenizer.eos_token_id):
                ids = [i for i in ids if i != self.unknown_id]  # otherwise unknown text would end a document
                lost["unknown_tokens_left_out"] = lost.pop("unknown_tokens")
            ends = [] if self.newline_id is None or text.endswith("\n") else [self.newline_id]
            documents.append(Document(np.array([*start, *ids, *ends], np.int32), lost, prefix, len(ends)))
        return documents

    def _of_ids(self, tokens: np.ndarray) -> Document:
        start = 0 if self.separator_id is None else 1
        joints = int(self.newline_id is not None and tokens[-1] != self.newline_id)
        ids = np.empty(start + len(tokens) + joints, np.int32)
        ids[:start] = self.separator_id or 0
        ids[start : start + len(tokens)] = tokens
        ids[start + len(tokens) :] = self.newline_id or 0
        return Document(ids, Counter(), 0 if self.keeps_all_text else None, joints)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without separators."""
        if self._characters is None:
            if self._fast is not None and all(len(text) < LONGEST_TEXT for text in texts):
                return [self._fast.encode_ordinary(text) for text in texts]
            return [encoding.ids for encoding in _encode_batch(self._backend, [*texts])]
        try:
            return [[self._characters[c] for c in text] for text in texts]
        except KeyError as error:
            [character] = error.args
            raise UserError(
                f"tokenizer: the character {character!r} (U+{ord(character):04X}) is not in the character "
                f"vocabulary of {len(self._characters)} symbols, and unknown characters are not dropped; "
                "remove it from the text or train with a bpe-N tokenizer"
            ) from None

    def losses(self, text: str, ids: list[int]) -> tuple[Counter[str], int]:
        """Count what `ids` lose of `text`, see LOSSES, and the bytes that they add before it."""
        lost = Counter[str]()
        if self.keeps_all_text:
            return lost, 0
        prefix = 0
        if self._table is not None:
            decoded, expected = b"".join(map(self._table.__getitem__, ids)), text.encode()
            prefix = int(decoded != expected and decoded == b" " + expected)
            changed = decoded[prefix:] != expected
        else:  # compared without spaces, which this kind of tokenizer drops
            words = self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).split()
            changed = "".join(words) != "".join(text.split())
        lost["changed_documents"] = int(changed)
        if self.unknown_id is not None:
            lost["unknown_tokens"] = ids.count(self.unknown_id)
        elif changed and self._loss_counter is not None:
            [encoding] = _encode_batch(self._loss_counter, [text])
            by_bytes = any(step["type"] == "ByteLevel" for step in rules.steps(self._specification["pre_tokenizer"]))
            lost["dropped_bytes" if by_bytes else "dropped_characters"] = encoding.ids.count(self.rows)
        return +lost, prefix

    def byte_lengths(self, documents: Iterable[Document]) -> np.ndarray | None:
        """Return the UTF-8 bytes of text that each id stands for; None if any text is not represented exactly."""
        lengths = [np.zeros(0, np.int32)]
        for document in documents:
            if self.lengths is None or document.lost or document.prefix is None:
                return None
            lengths.append(self.lengths[document.ids])
            if document.prefix:
                lengths[-1][int(self.separator_id is not None)] -= document.prefix
        return np.concatenate(lengths)

    def why_no_bytes(self, documents: Sequence[Document]) -> str | None:
        """Explain why `byte_lengths` is None."""
        if changed := sum(bool(document.lost) for document in documents):
            return f"the tokenizer does not represent {changed:,} of {len(documents):,} documents exactly"
        if self.lengths is not None and any(document.prefix is None for document in documents):
            return "this tokenizer changes text, and that of tokens that are ready is not known"
        if self.lengths is None:
            return "the tokenizer does not keep the spaces of a text, and the bytes of its tokens are not known"
        return None

    def joined(self, documents: Sequence[Document]) -> np.ndarray:
        """Join documents into one run of ids, without a line end after the last one."""
        pieces = [np.zeros(0, np.int32), *(document.ids for document in documents)]
        if documents and documents[-1].joints:
            pieces[-1] = pieces[-1][: -documents[-1].joints]
        return np.concatenate(pieces)

    def rule(self) -> str:
        """Describe how documents are joined."""
        if self.separator_id is not None:
            token = self._tokenizer.eos_token
            return f"{token if token.isprintable() else repr(token)} ({self.separator_id}) before each"
        if self.newline_id is not None:
            return "a line end after each that has none, because the tokenizer has no end-of-text token (eos)"
        return "one after another with nothing between: the tokenizer has no end-of-text token (eos) and no line end"


def _encode_batch(backend: Tokenizer, texts: list[str]) -> list[Any]:
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises no specific type
        raise UserError(
            f"tokenizer: cannot encode the text ({one_line(error)}); use one with an unknown token or "
            "all bytes, or train bpe-N"
        ) from error


def describe_skipped(skipped: Counter[str]) -> list[str]:
    """Return one line for rows without text, and one for text that the tokenizer does not represent, if any."""
    rows: list[str] = []
    losses: list[str] = []
    for reason, count in sorted(skipped.items()):
        (losses if reason.removeprefix("eval_") in LOSSES else rows).append(f"{count:,} {reason}")
    kinds = {"rows of text left out": rows, "text that the tokenizer does not represent": losses}
    return [f"{kind}: {', '.join(counts)}" for kind, counts in kinds.items() if counts]


def first_tokens(encoder: Encoder, documents: Iterable[Any], count: int) -> np.ndarray:
    """Return the first `count` tokens of the documents, or all of them if there are fewer."""
    pieces: list[np.ndarray] = []
    for document in documents:
        pieces += encoder.encode([document])
        if sum(map(len, pieces)) >= count:
            break
    return np.concatenate(pieces)[:count]


def first_documents(documents: list[Document], count: int | None) -> list[Document]:
    """Return the documents that contain the first `count` ids; all of them if None."""
    if count is None:
        return documents
    ends = np.cumsum([len(document.ids) for document in documents])
    enough = ends - [document.joints for document in documents] >= count
    return documents[: int(enough.argmax()) + 1] if enough.any() else documents
