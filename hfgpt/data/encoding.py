"""What must be known of a tokenizer, and documents as ids: complete, repeatable, without special tokens from text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfgpt.data.fast_encoding import LONGEST_TEXT, fast_encoding
from hfgpt.errors import UserError
from hfgpt.model.configuration_gpt2 import model_rows

# What a document loses in a tokenizer, in the words under which it is counted.
LOSSES = ("unknown_tokens", "unknown_tokens_left_out", "dropped_bytes", "dropped_characters", "changed_documents")
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
NO_TEXT = "\U0010fffe"  # before the name of a token that no text may become; not a character of any text
KEEPS_TEXT = {"ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts"}  # pre-tokenizers that only divide it


class Document(NamedTuple):
    """A text as int32 `ids`: the separator first, or `joints` ids of a line end last.

    `lost`: what the tokenizer does not represent, see LOSSES. `prefix`: bytes before the text that it added (a space).
    """

    ids: np.ndarray
    lost: Counter[str]
    prefix: int
    joints: int


def make_repeatable(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Switch off what a tokenizer.json may have left on: dropout of merges, truncation, padding. In place."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    return tokenizer


class Encoder:
    """Turns documents into ids, the separator in front of each; special tokens inside text stay text.

    `separator_id`: the tokenizer's end-of-text, or None: then `newline_id` follows a document that does not end in a
    line end; where the tokenizer has no token for one (None), documents follow each other directly.
    `rows`: the highest id plus one. `lengths`: UTF-8 bytes of each id, int32 [rows], special tokens 0; None where a
    token's bytes are not its own, as in WordPiece. `unknown_id`: what unknown text becomes. `fingerprint` names
    vocabulary and rules. Pickles, and encodes in threads and forks. Raises UserError for ids that two tokens share.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        specification = json.loads(tokenizer.backend_tokenizer.to_str())
        model, added = specification["model"], specification["added_tokens"]
        specification |= {"truncation": None, "padding": None}
        if model.get("dropout"):
            model["dropout"] = None
        rules = {key: specification[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        self._tokenizer = tokenizer
        self.rows = model_rows(tokenizer)
        self.separator_id: int | None = tokenizer.eos_token_id
        self.unknown_id = _unknown_id(model)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        _refuse_shared_ids(vocabulary)
        special = {token["content"] for token in added if token["special"]} | set(tokenizer.all_special_tokens)
        self._characters = _characters(specification, special)
        self._table = _token_bytes(specification, vocabulary, special, self.rows)
        self.lengths = None if self._table is None else np.array([len(token) for token in self._table], np.int32)
        self.newline_id = self._newline_id() if self.separator_id is None else None
        if self.newline_id is not None and self._characters is None:
            rules["joined"] = "newline_id"  # a character more in other tokenizers' text once
        elif self.separator_id is None and self._characters is None:
            rules["joined"] = "directly"
        self.fingerprint = xxhash.xxh3_64_hexdigest(json.dumps(rules, sort_keys=True).encode())

        # A copy of our own: transformers resets the flag, and what is hidden here others may look for.
        for token in added:
            token["special"] |= token["content"] in special
        self._specification = {**specification, "model": _without_special_text(model, special)}
        self._backend = _backend(specification, self._specification["model"])
        symbols = _steps(specification["pre_tokenizer"])
        self._by_bytes = any(step["type"] == "ByteLevel" for step in symbols)
        self._has_all_bytes = self._by_bytes and model["type"] == "BPE" and model["vocab"].keys() >= BYTE_OF.keys()
        self._has_all_bytes &= not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        self.separator_is_text = _is_symbol(tokenizer.eos_token, model)
        # Then nothing can be lost, and no document has to be looked at.
        self.keeps_all_text = self._characters is not None or (
            self._has_all_bytes
            and self._table is not None
            and specification["normalizer"] is None
            and all(step["type"] in KEEPS_TEXT and step.get("behavior") != "Removed" for step in symbols)
            and not any(step.get("add_prefix_space") for step in symbols)
            and not any(token["lstrip"] or token["rstrip"] for token in added if not token["special"])
        )

    def __reduce__(self) -> Any:
        return Encoder, (self._tokenizer,)  # a copy in a worker: the backend would forget its flag

    @cached_property
    def _fast(self) -> Any:
        return fast_encoding(self._backend) if self._characters is None else None

    @property
    def has_characters(self) -> bool:
        """Whether each token is one character."""
        return self._characters is not None

    def unknown_characters(self, text: str) -> list[str]:
        """Characters of `text` that a character tokenizer has no id for, sorted; empty for other tokenizers."""
        return [] if self._characters is None else sorted(set(text) - self._characters.keys())

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of `documents`."""
        return [document.ids for document in self.documents(texts)]

    def documents(self, texts: list[str]) -> list[Document]:
        """Each text as a Document. Raises `UserError` for an unknown character, or text that cannot be encoded."""
        start = [] if self.separator_id is None else [self.separator_id]
        found = []
        for text, ids in zip(texts, self.tokens(texts), strict=True):
            lost, prefix = self.losses(text, ids)
            if lost["unknown_tokens"] and self.unknown_id in (self.separator_id, self._tokenizer.eos_token_id):
                ids = [i for i in ids if i != self.unknown_id]  # else unknown text would end a document
                lost["unknown_tokens_left_out"] = lost.pop("unknown_tokens")
            ends = [] if self.newline_id is None or text.endswith("\n") else [self.newline_id]
            found.append(Document(np.array([*start, *ids, *ends], np.int32), lost, prefix, len(ends)))
        return found

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text alone, without a separator."""
        if self._characters is None:
            if self._fast is not None and all(len(text) < LONGEST_TEXT for text in texts):
                return [self._fast.encode_ordinary(text) for text in texts]
            return [encoding.ids for encoding in _encoded(self._backend, texts)]
        try:
            return [[self._characters[c] for c in text] for text in texts]
        except KeyError as error:
            [character] = error.args
            raise UserError(
                f"tokenizer: the character {character!r} (U+{ord(character):04X}) is not in the character "
                f"vocabulary of {len(self._characters)} symbols, and unknown characters are never dropped; "
                "take it out of the text or train with a bpe-N tokenizer"
            ) from None

    def losses(self, text: str, ids: list[int]) -> tuple[Counter[str], int]:
        """What `ids` do not represent of `text`, see LOSSES, and the bytes that they have before it."""
        lost = Counter[str]()
        if self.keeps_all_text:
            return lost, 0
        prefix = 0
        if self._table is not None:
            found, wanted = b"".join(map(self._table.__getitem__, ids)), text.encode()
            prefix = int(found != wanted and found == b" " + wanted)
            changed = found[prefix:] != wanted
        else:  # all but the spaces
            decoded = self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
            changed = "".join(decoded.split()) != "".join(text.split())
        lost["changed_documents"] = int(changed)
        if self.unknown_id is not None:
            lost["unknown_tokens"] = ids.count(self.unknown_id)
        elif changed and self._counting is not None:
            [encoding] = _encoded(self._counting, [text])
            kind = "dropped_bytes" if self._by_bytes else "dropped_characters"
            lost[kind] = encoding.ids.count(self.rows)
        return +lost, prefix

    @cached_property
    def _counting(self) -> Tokenizer | None:
        """Gives the id `rows` for each symbol that the tokenizer would drop; None where it drops none."""
        model = self._specification["model"]
        has_fallback = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        if model["type"] != "BPE" or self._has_all_bytes or has_fallback:
            return None
        vocabulary = {**model["vocab"], NO_TEXT: self.rows}
        return _backend(self._specification, {**model, "vocab": vocabulary, "unk_token": NO_TEXT, "fuse_unk": False})

    def _newline_id(self) -> int | None:
        if self._characters is not None:
            return self._characters.get("\n")
        return self._table.index(b"\n") if self._table is not None and b"\n" in self._table else None

    def byte_lengths(self, documents: Iterable[Document]) -> np.ndarray | None:
        """UTF-8 bytes of the text that each id of the documents stands for; None where one is not represented."""
        found = [np.zeros(0, np.int32)]
        for document in documents:
            if self.lengths is None or document.lost:
                return None
            found.append(self.lengths[document.ids])
            if document.prefix:
                found[-1][int(self.separator_id is not None)] -= document.prefix
        return np.concatenate(found)

    def why_no_bytes(self, documents: Sequence[Document]) -> str | None:
        """Why `byte_lengths` is None, in words."""
        if changed := sum(bool(document.lost) for document in documents):
            return f"the tokenizer does not represent {changed:,} of {len(documents):,} documents exactly"
        if self.lengths is None:
            return "the tokenizer does not keep the spaces of a text, and the bytes of its tokens are not known"
        return None

    def joined(self, documents: Sequence[Document]) -> np.ndarray:
        """The documents as one run of ids; after the last there is no line end to join it to another."""
        pieces = [np.zeros(0, np.int32), *(document.ids for document in documents)]
        if documents and documents[-1].joints:
            pieces[-1] = pieces[-1][: -documents[-1].joints]
        return np.concatenate(pieces)

    def rule(self) -> str:
        """How documents are joined, in words."""
        if self.separator_id is not None:
            token = self._tokenizer.eos_token
            return f"{token if token.isprintable() else repr(token)} ({self.separator_id}) before each"
        if self.newline_id is not None:
            return "a line end after each that has none, as the tokenizer has no end-of-text token (eos)"
        return "one after another with nothing between, as the tokenizer has no end-of-text token (eos) and no line end"


def _encoded(backend: Tokenizer, texts: list[str]) -> list[Any]:
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library's own type
        raise UserError(
            f"tokenizer: cannot encode the text ({' '.join(str(error).split())}); take one with an unknown token or "
            "all bytes, or train bpe-N"
        ) from error


def _steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer, decoder or post-processor, of which one may be a sequence."""
    if component is None:
        return []
    parts = next((value for value in component.values() if isinstance(value, list)), [])
    return [step for part in parts for step in _steps(part)] if component["type"] == "Sequence" else [component]


def _unknown_id(model: dict[str, Any]) -> int | None:
    return model["unk_id"] if model["type"] == "Unigram" else model["vocab"].get(model["unk_token"])


def _refuse_shared_ids(vocabulary: dict[str, int]) -> None:
    if len(set(vocabulary.values())) == len(vocabulary):
        return
    [(shared, _)] = Counter(vocabulary.values()).most_common(1)
    names = " and ".join(repr(token) for token, i in sorted(vocabulary.items()) if i == shared)
    raise UserError(f"tokenizer: the id {shared} stands for {names}; give each token an id of its own")


def _characters(specification: dict[str, Any], special: set[str]) -> dict[str, int] | None:
    """The id of each character, or None if the tokenizer is not one of single characters."""
    model = specification["model"]
    if model["type"] != "BPE" or specification["pre_tokenizer"] is not None or specification["normalizer"] is not None:
        return None
    if not all(token["special"] for token in specification["added_tokens"]) or model.get("byte_fallback"):
        return None
    characters = {token: i for token, i in model["vocab"].items() if token not in special}
    return characters if characters and all(len(token) == 1 for token in characters) else None


def _token_bytes(
    specification: dict[str, Any], vocabulary: dict[str, int], special: set[str], rows: int
) -> list[bytes] | None:
    """The bytes that each id stands for, by the decoder; whether a text is made of them, its own bytes tell."""
    steps = _steps(specification["decoder"])
    kinds = {step["type"] for step in steps}
    if not kinds or kinds & {"WordPiece", "BPEDecoder", "CTC"}:
        return None  # these put spaces between tokens
    replaced = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replaced.append((step["pattern"]["String"], step["content"]))

    def bytes_of(token: str) -> bytes:
        if "ByteLevel" in kinds:
            try:
                return bytes(map(BYTE_OF.__getitem__, token))
            except KeyError:
                return token.encode()
        if "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    added = {token["content"] for token in specification["added_tokens"]}
    table = [b""] * rows
    for token, i in vocabulary.items():
        table[i] = b"" if token in special else token.encode() if token in added else bytes_of(token)
    return table


def _is_symbol(token: str | None, model: dict[str, Any]) -> bool:
    """Whether the token is what a BPE has for one character of text, which nothing else can stand for."""
    if token is None or model["type"] != "BPE" or token not in model["vocab"]:
        return False
    bare = token.removeprefix(model.get("continuing_subword_prefix") or "")
    return len(bare.removesuffix(model.get("end_of_word_suffix") or "")) == 1


def _without_special_text(model: dict[str, Any], special: set[str]) -> dict[str, Any]:
    """`model`, in which no text becomes one of the special tokens, with the same ids."""
    if model["type"] == "Unigram":
        pieces = [[NO_TEXT + piece if piece in special else piece, score] for piece, score in model["vocab"]]
        return {**model, "vocab": pieces}
    hidden = {token for token in special & model["vocab"].keys() if not _is_symbol(token, model)}
    if model["type"] == "BPE":
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model = {**model, "merges": [[a, b] for a, b in pairs if hidden.isdisjoint((a, b, a + b.removeprefix(prefix)))]}
        if not model.get("ignore_merges"):  # with it, a word that is a token needs no merge
            return model
    hidden.discard(model["unk_token"])  # text that becomes it is counted
    vocabulary = {NO_TEXT + token if token in hidden else token: i for token, i in model["vocab"].items()}
    return {**model, "vocab": vocabulary}


def _backend(specification: dict[str, Any], model: dict[str, Any]) -> Tokenizer:
    """A tokenizer with another model, for which special tokens in text are text; the ids of added tokens stay."""
    backend = Tokenizer.from_str(json.dumps(specification))
    if model != specification["model"]:
        backend.model = Tokenizer.from_str(json.dumps({**specification, "model": model, "added_tokens": []})).model
    backend.encode_special_tokens = True
    return backend
