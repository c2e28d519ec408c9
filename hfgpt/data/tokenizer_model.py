"""Read a tokenizer.json: the bytes or character that each token stands for, and which tokens text may be encoded as.

A "specification" is the parsed tokenizer.json; its "model" is the part that turns words into ids.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfgpt.errors import UserError

BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
NO_TEXT = "\U0010fffe"  # prefix that hides a special token from text; not a character of any text
KEEPS_TEXT = {"ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts"}  # pre-tokenizers that only split


def steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Flatten a normalizer, pre-tokenizer, decoder or post-processor, which may be nested sequences."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    parts = next((value for value in component.values() if isinstance(value, list)), [])
    return [step for part in parts for step in steps(part)]


def unknown_token_id(model: dict[str, Any]) -> int | None:
    return model["unk_id"] if model["type"] == "Unigram" else model["vocab"].get(model["unk_token"])


def refuse_shared_ids(vocabulary: dict[str, int]) -> None:
    for shared, count in Counter(vocabulary.values()).most_common(1):
        if count > 1:
            names = " and ".join(repr(token) for token, i in sorted(vocabulary.items()) if i == shared)
            raise UserError(f"tokenizer: the id {shared} stands for {names}; give each token its own id")


def find_characters(specification: dict[str, Any], special: set[str]) -> dict[str, int] | None:
    """Return the id of each character; None if the tokens are not single characters."""
    model = specification["model"]
    if model["type"] != "BPE" or specification["pre_tokenizer"] is not None or specification["normalizer"] is not None:
        return None
    if not all(token["special"] for token in specification["added_tokens"]) or model.get("byte_fallback"):
        return None
    characters = {token: i for token, i in model["vocab"].items() if token not in special}
    return characters if characters and all(len(token) == 1 for token in characters) else None


def find_token_bytes(
    specification: dict[str, Any], vocabulary: dict[str, int], special: set[str], rows: int
) -> list[bytes] | None:
    """Return the bytes that each id decodes to, empty for special tokens; None if they depend on neighboring ids.

    Only a comparison with a text shows whether these are its bytes.
    """
    decoder = steps(specification["decoder"])
    kinds = {step["type"] for step in decoder}
    if not kinds or kinds & {"WordPiece", "BPEDecoder", "CTC"}:
        return None  # these decoders put spaces between tokens
    replaced = [(step["replacement"], " ") for step in decoder if step["type"] == "Metaspace"]
    for step in decoder:
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


def is_symbol(token: str | None, model: dict[str, Any]) -> bool:
    """Return whether the token is a BPE's only way to represent one character of text."""
    if token is None or model["type"] != "BPE" or token not in model["vocab"]:
        return False
    bare = token.removeprefix(model.get("continuing_subword_prefix") or "")
    return len(bare.removesuffix(model.get("end_of_word_suffix") or "")) == 1


def has_all_bytes(specification: dict[str, Any]) -> bool:
    """Return whether this is a byte-level BPE with a token for every byte."""
    model = specification["model"]
    return (
        any(step["type"] == "ByteLevel" for step in steps(specification["pre_tokenizer"]))
        and model["type"] == "BPE"
        and model["vocab"].keys() >= BYTE_OF.keys()
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    )


def keeps_all_text(specification: dict[str, Any]) -> bool:
    """Return whether this is a byte-level BPE that represents any text exactly, so that no document needs a check."""
    pre_tokenizers = steps(specification["pre_tokenizer"])
    return (
        has_all_bytes(specification)
        and specification["normalizer"] is None
        and all(step["type"] in KEEPS_TEXT and step.get("behavior") != "Removed" for step in pre_tokenizers)
        and not any(step.get("add_prefix_space") for step in pre_tokenizers)
        and not any(
            token["lstrip"] or token["rstrip"] for token in specification["added_tokens"] if not token["special"]
        )
    )


def without_special_text(model: dict[str, Any], special: set[str]) -> dict[str, Any]:
    """Return the model changed so that no text is encoded as a special token; all ids stay the same."""
    if model["type"] == "Unigram":
        pieces = [[NO_TEXT + piece if piece in special else piece, score] for piece, score in model["vocab"]]
        return {**model, "vocab": pieces}
    hidden = {token for token in special & model["vocab"].keys() if not is_symbol(token, model)}
    if model["type"] == "BPE":
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model = {**model, "merges": [[a, b] for a, b in pairs if hidden.isdisjoint((a, b, a + b.removeprefix(prefix)))]}
        if not model.get("ignore_merges"):  # with it, a word that is a token bypasses the merges
            return model
    hidden.discard(model["unk_token"])  # text encoded as unknown is counted elsewhere
    vocabulary = {NO_TEXT + token if token in hidden else token: i for token, i in model["vocab"].items()}
    return {**model, "vocab": vocabulary}


def build_backend(specification: dict[str, Any], model: dict[str, Any]) -> Tokenizer:
    """Build a tokenizer with this model that treats special tokens in text as text. Added tokens keep their ids."""
    backend = Tokenizer.from_str(json.dumps(specification))
    if model != specification["model"]:
        backend.model = Tokenizer.from_str(json.dumps({**specification, "model": model, "added_tokens": []})).model
    backend.encode_special_tokens = True
    return backend


def build_loss_counter(specification: dict[str, Any], rows: int) -> Tokenizer | None:
    """Build a tokenizer that returns the id `rows` for each symbol that this one drops; None if it drops none."""
    model = specification["model"]
    has_fallback = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    if model["type"] != "BPE" or has_all_bytes(specification) or has_fallback:
        return None
    vocabulary = {**model["vocab"], NO_TEXT: rows}
    return build_backend(specification, {**model, "vocab": vocabulary, "unk_token": NO_TEXT, "fuse_unk": False})
