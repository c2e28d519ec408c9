"""Tokenizers of many kinds, made in the test: each as a folder that AutoTokenizer loads, or a name that hfgpt knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [f"Item {n}: the {n * n % 97}th costs {n % 13} or {n % 7}; what say you, MENENIUS?\n" for n in range(300)]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
END = "<|endoftext|>"


def byte_level(
    *, special=(END,), alphabet=ALPHABET, prefix=False, size=300, regex: str | None = None, **model: Any
) -> Tokenizer:
    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex is None)
    if regex:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    trained = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS, trained)
    return backend


def unigram(special=("<unk>", "<s>", "</s>"), scheme="always") -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trained = trainers.UnigramTrainer(vocab_size=120, special_tokens=[*special], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(WORDS, trained)
    return backend


def template(backend: Tokenizer, single: str, *tokens: str) -> Tokenizer:
    pairs = [(token, backend.token_to_id(token)) for token in tokens]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return backend


def llama() -> Tokenizer:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    words = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    words.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=400, special_tokens=[*special, *fallback], show_progress=False)
    )
    specification = json.loads(words.to_str())  # bytes are no added tokens there
    specification["added_tokens"] = [token for token in specification["added_tokens"] if token["content"] in special]
    return template(Tokenizer.from_str(json.dumps(specification)), "<s> $A", "<s>")


def bert(pre_tokenizer: Any = None) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator(
        WORDS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    )
    return template(backend, "[CLS] $A [SEP]", "[CLS]", "[SEP]")


def word_level() -> Tokenizer:
    """With its special tokens in the middle of the vocabulary."""
    words = sorted({word for line in WORDS for word in line.split()})
    entries = [*words[:20], "</s>", "[UNK]", *words[20:]]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def gaps() -> Tokenizer:
    """Ids from 100 on, every second one."""
    specification = json.loads(byte_level(special=()).to_str())
    vocabulary = {token: 100 + 2 * i for token, i in specification["model"]["vocab"].items()}
    specification["model"]["vocab"] = {**vocabulary, "</s>": max(vocabulary.values()) + 10}
    return Tokenizer.from_str(json.dumps(specification))


def qwen() -> Tokenizer:
    backend = byte_level(special=(), regex=r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+", ignore_merges=True)
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([END, "<|im_start|>"])
    backend.add_tokens(["<tool>"])
    return backend


def left_on() -> Tokenizer:
    backend = byte_level(special=(), dropout=0.3)
    backend.enable_truncation(8)
    backend.enable_padding(length=12, pad_id=3)
    return backend


def folder_of(backend: Callable[[], Tokenizer], **tokens: str) -> Callable[[Path], str]:
    def make(path: Path) -> str:
        PreTrainedTokenizerFast(tokenizer_object=backend(), **tokens).save_pretrained(path)
        return str(path)

    return make


def pair_of_files(path: Path) -> str:
    path.mkdir(parents=True)
    byte_level().model.save(str(path))
    return str(path)


# Each makes what `tokenizer=` names, in a folder if it needs one.
KINDS: dict[str, Callable[[Path], str]] = {
    "bytes": folder_of(byte_level, bos_token=END, eos_token=END),
    "bytes, not all": folder_of(lambda: byte_level(alphabet=[]), eos_token=END),
    "bytes, prefix": folder_of(lambda: byte_level(prefix=True), eos_token=END),
    "bytes, left on, no eos": folder_of(left_on),
    "unigram": folder_of(unigram, bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "llama": folder_of(llama, bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "qwen": folder_of(qwen, eos_token=END, pad_token=END),
    "t5": folder_of(
        lambda: template(unigram(("<pad>", "</s>", "<unk>", "<extra_id_0>")), "$A </s>", "</s>"),
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ),
    "bert": folder_of(bert, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"),
    "words": folder_of(word_level, eos_token="</s>", unk_token="[UNK]"),
    "gaps": folder_of(gaps, eos_token="</s>"),
    "pair of files": pair_of_files,
    "char": lambda path: "char",
    "bpe-N": lambda path: "bpe-300",
}


def added(backend: Tokenizer, *tokens: str | AddedToken) -> Tokenizer:
    backend.add_tokens([*tokens])
    return backend


def changed(backend: Tokenizer, pre: list[Any] = (), norm: list[Any] = ()) -> Tokenizer:
    if pre:
        backend.pre_tokenizer = pre_tokenizers.Sequence([*pre, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if norm:
        backend.normalizer = normalizers.Sequence(norm)
    return backend


def with_end(**options: Any) -> Tokenizer:
    return byte_level(special=("</s>",), **options)


def words_bpe(**model: str) -> Tokenizer:
    """As in the first GPT: no bytes, a mark at a word's end or before its other parts."""
    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    suffix = model.get("end_of_word_suffix")
    backend.decoder = decoders.BPEDecoder(suffix) if suffix else decoders.WordPiece(cleanup=False)
    options = {"vocab_size": 300, "special_tokens": ["</s>"], "show_progress": False}
    backend.train_from_iterator(WORDS, trainers.BpeTrainer(**options, **model))
    return backend


def merged_end(**model: Any) -> Tokenizer:
    """The end-of-text is also what merges make of its characters."""
    specification = json.loads(byte_level(special=(), **model).to_str())
    vocabulary = specification["model"]["vocab"]
    for pair in (["</", "s"], ["</s", ">"]):
        vocabulary.setdefault("</", len(vocabulary))
        vocabulary["".join(pair)] = len(vocabulary)
    specification["model"]["merges"] += [["<", "/"], ["</", "s"], ["</s", ">"]]
    return Tokenizer.from_str(json.dumps(specification))


# Makers, special tokens, and whether something of the text is lost.
ODD: dict[str, tuple[Callable[[], Tokenizer], dict[str, str], bool]] = {
    "eos is an ordinary added token": (lambda: added(byte_level(special=()), "</s>"), {}, False),
    "eos is a merge": (merged_end, {}, False),
    "eos is a word": (lambda: merged_end(ignore_merges=True), {}, False),
    "eos is unk": (lambda: unigram(("<unk>",)), {"eos_token": "<unk>", "unk_token": "<unk>"}, True),
    "eos is pad and bos": (with_end, {"pad_token": "</s>", "bos_token": "</s>"}, False),
    "pad is an ordinary character": (with_end, {"pad_token": "!"}, False),
    "a space before the first": (lambda: unigram(scheme="first"), {"unk_token": "<unk>"}, True),
    "no space before": (lambda: unigram(scheme="never"), {"unk_token": "<unk>", "bos_token": "<s>"}, True),
    "digits alone": (lambda: changed(with_end(), [pre_tokenizers.Digits(True)]), {}, False),
    "a letter removed": (lambda: changed(with_end(), [pre_tokenizers.Split("o", "removed")]), {}, True),
    "accents stripped": (lambda: changed(with_end(), norm=[normalizers.NFD(), normalizers.StripAccents()]), {}, False),
    "in lower case": (lambda: changed(with_end(), norm=[normalizers.NFKC(), normalizers.Lowercase()]), {}, True),
    "spaces stripped": (lambda: changed(with_end(), norm=[normalizers.Strip()]), {}, True),
    "a mark at the end of words": (lambda: words_bpe(end_of_word_suffix="</w>"), {}, True),
    "a mark inside words": (lambda: words_bpe(continuing_subword_prefix="##"), {}, True),
    "words of bert": (
        lambda: bert(pre_tokenizers.WhitespaceSplit()),
        {"eos_token": "[SEP]", "unk_token": "[UNK]"},
        True,
    ),
    "an added token takes spaces": (lambda: added(with_end(), AddedToken("costs", lstrip=True, rstrip=True)), {}, True),
    "added twice": (lambda: added(with_end(), "costs", "costs", "the"), {}, False),
}
