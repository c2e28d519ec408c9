"""Use tiktoken, which is several times as fast as `tokenizers`, wherever it gives the same ids."""

from __future__ import annotations

import json
from typing import Any

# A million whitespace characters in a row make tiktoken panic.
LONGEST_TEXT = 1_000_000

# Text on which splitters and merges are likely to disagree.
SAMPLE = (
    "The reader's 3,141 notes -- they'll say: \"it's 10:45\", won't they?",
    "def f(x_1):\n\treturn {'a': [x_1 ** 2]}  # 100%\r\n\n\n    if not done:   \n",
    " leading,  double   triple and trailing spaces   ",
    "Ünïcödé, ÅNGSTRÖM, straße, Πλάτων, Ελλάδα, Москва, עברית, العربية, हिन्दी, 日本語、中文。",
    "\U0001f415\U0001f469\u200d\U0001f4bb e\u0301 \u00a0\u2003\u3000 \u00bd \u0661\u0662 \ufeff\u0000\x7f",
    "a'S 'LL 'tis rock'n'roll''s AAAaaa111!!!???...----____====\n\t \n",
    "<|endoftext|> is text here, <|im_start|> too",
)


def fast_encoding(backend: Any) -> Any:
    """Return a `tiktoken.Encoding` with the ids of a byte-level BPE; None if they might differ or tiktoken is missing.

    `backend`: a `tokenizers.Tokenizer` for which special tokens in text are text (`encode_special_tokens`).

    tiktoken joins the pair whose *result* has the lowest id, the tokenizer the pair that is listed first. The two
    agree if each entry is a byte or the result of one merge, ids are in the order of merges, and the text of each entry
    is encoded as that entry: then no other pair that tiktoken could join to an entry ever occurs.
    """
    try:
        import tiktoken
    except ImportError:
        return None
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    specification = json.loads(backend.to_str())
    model, splitter = specification["model"], specification["pre_tokenizer"] or {}
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    options = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"
    if (
        model["type"] != "BPE"
        or any(model.get(option) for option in options)
        or specification["normalizer"] is not None
        or splitter.get("type") != "ByteLevel"
        or splitter["add_prefix_space"]
        or not splitter.get("use_regex", True)
        or not all(added["special"] for added in specification["added_tokens"])
    ):
        return None
    special = {added["content"] for added in specification["added_tokens"]}
    vocabulary = {token: i for token, i in model["vocab"].items() if token not in special}
    merged = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    ids = [vocabulary.get(token, -1) for token in merged]
    if (
        sorted(vocabulary) != sorted([*byte_of, *merged])
        or ids != sorted(ids)
        or any(len(backend.model.tokenize(token)) != 1 for token in merged)
    ):
        return None
    ranks = {bytes(byte_of[character] for character in token): i for token, i in vocabulary.items()}
    # GPT-2's splitting pattern, in the possessive form that cannot backtrack.
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding("converted", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in SAMPLE:
        if encoding.encode_ordinary(text) != backend.encode(text, add_special_tokens=False).ids:
            return None
    return encoding
