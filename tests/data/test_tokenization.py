"""Text survives the round trip, special tokens stay out of documents, and saved tokenizers load anywhere."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfgpt.data.encoding import Encoder
from hfgpt.data.fast_encoding import SAMPLE, fast_encoding
from hfgpt.data.open_source import open_source
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import UserError

SHARED = Path(__file__).parents[3] / "shared" / "data"
AWKWARD = ["y is ?", "x != y", " don ' t", "a\u00a0b", "e\u0301", "\U0001f415", "\r\n\t ", "a <|endoftext|> b"]
TEXTS = ["The quick brown fox.\nIt jumps over the lazy dog, doesn't it?\n" * 20, *AWKWARD]


def bpe(size=300):
    return load_tokenizer(f"bpe-{size}", lambda: TEXTS, 64)


def characters(texts=TEXTS):
    return load_tokenizer("char", lambda: texts, 64)


def gpt2():
    folder = SHARED / "gpt2_tokenizer"
    if not folder.is_dir():
        pytest.skip("needs the GPT-2 tokenizer in ../shared/data/gpt2_tokenizer")
    return load_tokenizer(str(folder), lambda: [], 1024)


@pytest.mark.parametrize("make", [bpe, characters, gpt2])
@pytest.mark.parametrize("text", AWKWARD)
def test_decode_gives_the_text_back(make, text):
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text, split_special_tokens=True)) == text
    [ids] = Encoder(tokenizer).encode([text])
    assert tokenizer.decode(ids[0 if make is characters else 1 :]).removesuffix("\n") == text


@pytest.mark.parametrize("make", [bpe, gpt2])
def test_only_the_separator_is_special(make):
    tokenizer = make()
    encoder = pickle.loads(pickle.dumps(Encoder(tokenizer)))
    ids = np.concatenate(encoder.encode(["x <|endoftext|> y", "z"]))
    assert encoder.separator_id == tokenizer.eos_token_id
    assert list(np.flatnonzero(ids == encoder.separator_id)) == [0, len(ids) - 2]
    assert ids.dtype == np.int32
    # The tokenizer itself is left as it was.
    assert tokenizer.encode("<|endoftext|>") == [tokenizer.eos_token_id]


def test_gpt2_ids_are_those_of_gpt2():
    encoder = Encoder(gpt2())
    lines = (SHARED / "gpt2_tokenizer" / "gpt2_vectors.jsonl").read_text().splitlines()
    vectors = [json.loads(line) for line in lines]
    for vector in vectors:
        [ids] = encoder.encode([vector["text"]])
        assert ids.tolist() == [50256, *vector["ids_ordinary"]], vector["text"]


def test_character_ids_are_sorted_and_nothing_else_is_in_the_vocabulary():
    tokenizer = characters(["hello\nworld"])
    assert tokenizer.get_vocab() == {character: i for i, character in enumerate(sorted("helowrd\n"))}
    assert tokenizer.all_special_tokens == []
    path = SHARED / "shakespeare" / "tinyshakespeare_input.txt"
    if path.exists():
        text = path.read_text()
        tokenizer = characters([text])
        assert len(tokenizer) == 65
        [ids] = Encoder(tokenizer).encode([text])
        assert tokenizer.decode(ids) == text


def test_unknown_character_is_named_not_dropped():
    tokenizer = characters(["abc\n"])
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\) is not in the character vocabulary of 4 symbols"):
        Encoder(tokenizer).encode(["abé"])
    with pytest.raises(UserError, match=r"U\+1F415"):
        Encoder(tokenizer).encode(["\U0001f415"])
    assert Encoder(tokenizer).unknown_characters("é?a") == ["?", "é"]
    assert Encoder(bpe()).unknown_characters("é?a") == []


def test_documents_do_not_run_together_without_a_separator():
    tokenizer = characters(["ab\n"])
    encoder = Encoder(tokenizer)
    assert encoder.separator_id is None
    assert tokenizer.decode(np.concatenate(encoder.encode(["ab", "b\n"]))) == "ab\nb\n"


@pytest.mark.parametrize("make", [bpe, characters, gpt2])
def test_token_bytes_add_up_to_the_text(make):
    tokenizer = make()
    lengths = Encoder(tokenizer).lengths
    assert lengths.shape == (len(tokenizer),) and lengths.dtype == np.int32
    for text, ids in zip(AWKWARD, Encoder(tokenizer).encode([text + "\n" for text in AWKWARD]), strict=True):
        assert lengths[ids].sum() == len((text + "\n").encode())
    assert all(lengths[i] == 0 for i in tokenizer.all_special_ids)


def test_token_bytes_of_another_kind_are_unknown():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    documents = encoder.documents(["a a", "a b"])
    assert encoder.byte_lengths(documents) is None and "spaces" in encoder.why_no_bytes(documents[:1])
    assert "does not represent 1 of 2 documents" in encoder.why_no_bytes(documents)
    assert [dict(document.lost) for document in documents] == [{}, {"changed_documents": 1, "unknown_tokens": 1}]


def test_bpe_is_the_same_each_time_and_has_the_size_asked_for():
    assert len(bpe(300)) == 300
    assert bpe().backend_tokenizer.to_str() == bpe().backend_tokenizer.to_str()
    assert bpe().eos_token == bpe().bos_token == bpe().pad_token == "<|endoftext|>"


LOAD = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.loads(sys.argv[2])
ids = [tokenizer.encode(text) for text in texts]
assert [tokenizer.decode(i) for i in ids] == texts
print(json.dumps([ids, tokenizer.model_max_length, len(tokenizer), tokenizer.eos_token_id]))
"""


def test_reserved_tokens_have_rows_and_no_text_is_encoded_as_them(tmp_path):
    texts = [*TEXTS, "<|user|>Hello<|assistant|>"]
    tokenizer = load_tokenizer("bpe-300", lambda: texts, 64, ("<|user|>", "<|assistant|>"))
    assert len(tokenizer) == 300 and (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        0,
        0,
        1,
    )
    assert tokenizer.convert_ids_to_tokens(range(4)) == ["<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>"]
    [ids] = Encoder(tokenizer).encode(["<|user|>Hello<|pad|>"])
    assert ids[0] == 0 and not set(ids[1:]) & {0, 1, 2, 3}
    save_tokenizer(tokenizer, tmp_path)
    stock = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = stock("<|user|>Hello<|assistant|>")["input_ids"]
    assert ids[0] == 2 and ids[-1] == 3 and stock.decode(ids, skip_special_tokens=True) == "Hello"
    assert stock.pad_token_id == 1 and stock.eos_token_id == 0
    with pytest.raises(UserError, match=r"at least 259 .256 bytes and <.endoftext.>, <.pad.>, <.user.>"):
        load_tokenizer("bpe-258", lambda: texts, 64, ("<|user|>",))


@pytest.mark.slow
@pytest.mark.parametrize("make", [bpe, characters, gpt2])
def test_stock_transformers_loads_the_saved_tokenizer(make, tmp_path):
    tokenizer = make()
    # Next to a GPT-2 model, as in a checkpoint: AutoTokenizer must not take it for GPT-2's own.
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    texts = AWKWARD[:-1]
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), json.dumps(texts)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    expected = [tokenizer.encode(text) for text in texts]
    assert json.loads(result.stdout) == [expected, tokenizer.model_max_length, len(tokenizer), tokenizer.eos_token_id]
    assert Encoder(load_tokenizer(str(tmp_path), lambda: [], 64)).fingerprint == Encoder(tokenizer).fingerprint


def test_bare_vocabulary_and_merges_load_as_gpt2(tmp_path):
    gpt2()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((SHARED / "gpt2_tokenizer" / name).read_bytes())
    assert load_tokenizer(str(tmp_path), lambda: [], 64).encode("y is ?") == [88, 318, 5633]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", r"tokenizer=\./nowhere: .* no tokenizer could be loaded"),
        ("bpe-12", "tokenizer=bpe-12: .* at least 257"),
        ("bpe-many", "tokenizer=bpe-many: .* number of entries"),
        ("no-such-tokenizer", "tokenizer=no-such-tokenizer: .* no tokenizer could be loaded"),
    ],
)
def test_impossible_tokenizers_are_named(name, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(name, lambda: TEXTS, 64)


def test_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=f"tokenizer={tmp_path}"):
        load_tokenizer(str(tmp_path), lambda: TEXTS, 64)


def test_the_fast_encoding_gives_the_same_ids_or_is_not_used():
    pytest.importorskip("tiktoken")
    source = open_source("embedded")
    texts = [row for row in source.read(source.units[0])[::10] if isinstance(row, str)]
    tokenizer = load_tokenizer("bpe-1000", lambda: texts, 64)
    fast, plain = Encoder(tokenizer), Encoder(tokenizer)
    assert fast._fast is not None
    plain._fast = None
    texts += ["", "x" * 1_000_000, " " * 1_000_001, *SAMPLE]
    for ids, expected in zip(fast.encode(texts), plain.encode(texts), strict=True):
        np.testing.assert_array_equal(ids, expected)
    again = pickle.loads(pickle.dumps(fast))
    np.testing.assert_array_equal(again.encode(["a b"])[0], plain.encode(["a b"])[0])
    assert Encoder(load_tokenizer("char", lambda: texts, 64))._fast is None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert fast_encoding(tokenizer.backend_tokenizer) is None
