"""Sampling against stock `generate`, against no cache, and against the model on its last positions."""

import io
import json
import string
from collections import Counter
from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hfgpt import cli
from hfgpt.data.tokenization import load_tokenizer, save_tokenizer
from hfgpt.errors import RunError, UserError
from hfgpt.evaluation import generate as generation
from hfgpt.evaluation.generate import generate
from hfgpt.evaluation.loading import load_checkpoint
from hfgpt.model.modeling_gpt2 import GPT2LMHeadModel as OurModel

LETTERS = "\n" + string.ascii_lowercase


@pytest.fixture(scope="module")
def letters():
    return load_tokenizer("char", lambda: [LETTERS], model_max_length=16)


@pytest.fixture(scope="module")
def bpe():
    return load_tokenizer("bpe-270", lambda: ["the cat sat on the mat and the dog sat on the log " * 20], 16)


def tiny(kind=OurModel, **changes):
    """Wide initial weights, so that the likeliest token changes along the way."""
    torch.manual_seed(3)
    sizes = {"vocab_size": len(LETTERS), "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**{**sizes, "initializer_range": 0.3, **changes}, bos_token_id=0, eos_token_id=None)
    return kind(config).eval()


@pytest.fixture(params=[GPT2LMHeadModel, OurModel], ids=["stock", "ours"])
def model(request):
    return tiny(request.param)


def text_of(model, tokenizer, prompt, **options) -> str:
    return next(generate(model, tokenizer, prompt, **options))


def test_greedy_equals_stock_generate(model, letters):
    ids = letters("hello", return_tensors="pt")["input_ids"]
    stock = GPT2LMHeadModel(model.config).eval()
    stock.load_state_dict(model.state_dict())
    expected = stock.generate(ids, do_sample=False, max_new_tokens=11, pad_token_id=0)[0, ids.shape[1] :]
    text = text_of(model, letters, "hello", temperature=0, max_new_tokens=11)
    assert text == letters.decode(expected) and len(set(text)) >= 3


@pytest.mark.parametrize("temperature", [1e-46, 5e-324, 1e-38, 1e-30, -0.0])
def test_a_temperature_near_zero_takes_the_likeliest_token(letters, temperature):
    model = tiny()
    greedy = text_of(model, letters, "hello", temperature=0, max_new_tokens=11)
    for options in ({}, {"top_k": 5, "top_p": 0.5}, {"top_p": 1e-300}):
        assert text_of(model, letters, "hello", temperature=temperature, max_new_tokens=11, **options) == greedy


def test_values_at_the_ends_of_floats_still_draw(letters):
    model = tiny()
    for options in ({"temperature": 1e300}, {"temperature": 1e39, "top_k": 2**63}, {"top_p": 5e-324}, {"top_p": 1.0}):
        assert len(text_of(model, letters, "hello", max_new_tokens=11, seed=1, **options)) == 11
    with torch.no_grad():
        model.transformer.wte.weight[3] = torch.nan
    with pytest.raises(RunError, match="not finite"):
        text_of(model, letters, "hello", seed=1)


@pytest.mark.parametrize("name", ["num_samples", "max_new_tokens", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2**31 + 1, 2**63, 10**400])
def test_counts_beyond_all_use_are_refused_at_once(letters, name, value):
    with pytest.raises(UserError, match=f"{name} {value}: 1 to "):
        generate(tiny(), letters, "hello", **{name: value})


def test_samples_are_made_as_they_are_read(letters):
    texts = generate(tiny(), letters, "hello", num_samples=2**31, batch_size=2, max_new_tokens=2, seed=1)
    assert [len(next(texts)) for _ in range(3)] == [2, 2, 2]


def test_cached_logits_equal_those_of_a_full_pass(model):
    def run() -> tuple[list[int], list[torch.Tensor]]:
        logits = []

        def pick(logits_V):
            logits.append(logits_V)
            return int(logits_V.argmax())

        return [i for _, i in generation.generate_ids(model, [[5, 6, 7]], [pick], 12, 16, None)], logits

    new, logits = run()
    with torch.no_grad():
        full = model(torch.tensor([[5, 6, 7, *new]]), use_cache=False).logits[0, 2:-1]
    assert (torch.stack(logits) - full).abs().max() < 1e-5
    again, logits_again = run()
    assert new == again and torch.equal(torch.stack(logits), torch.stack(logits_again))


def test_beyond_the_context_the_last_positions_decide(model, letters):
    prompt = "abcdefghij"
    text = text_of(model, letters, prompt, temperature=0, max_new_tokens=20)
    ids = letters(prompt + text)["input_ids"]
    assert len(ids) == 30
    with torch.no_grad():
        for place in range(10, 30):
            window = torch.tensor([ids[max(0, place - 16) : place]])
            assert ids[place] == model(window).logits[0, -1].argmax()


def test_a_long_prompt_is_cropped_with_a_warning(letters, caplog):
    prompt = (string.ascii_lowercase * 2)[:40]
    text = text_of(tiny(), letters, prompt, temperature=0, max_new_tokens=5)
    assert text == text_of(tiny(), letters, prompt[-16:], temperature=0, max_new_tokens=5)
    assert [record.message for record in caplog.records] == [
        "the prompt has 40 tokens; the model sees only the last 16"
    ]


def test_an_empty_prompt_starts_from_a_separator(letters, bpe):
    assert text_of(tiny(), letters, "", seed=1) == text_of(tiny(), letters, "\n", seed=1)
    model = tiny(vocab_size=len(bpe))
    from_separator = text_of(model, bpe, bpe.eos_token, temperature=0, max_new_tokens=5)
    assert text_of(model, bpe, "", temperature=0, max_new_tokens=5) == from_separator


@pytest.mark.parametrize("max_new_tokens", [6, 30], ids=["within the context", "beyond it"])
def test_prompts_beside_each_other_are_continued_as_alone(model, letters, max_new_tokens):
    prompts = ["abc", "z", "hello there".replace(" ", ""), ""]
    options = {"temperature": 0, "max_new_tokens": max_new_tokens}
    alone = [text_of(model, letters, prompt, **options) for prompt in prompts]
    for batch_size in (1, 3, 4):
        assert list(generate(model, letters, prompts, batch_size=batch_size, **options)) == alone
    drawn = {"seed": 3, "num_samples": 2, "max_new_tokens": max_new_tokens}
    one_by_one = list(generate(model, letters, prompts, batch_size=1, **drawn))
    assert list(generate(model, letters, prompts, batch_size=8, **drawn)) == one_by_one and len(set(one_by_one)) == 8


def test_a_batch_equals_stock_generate_with_left_padding(bpe):
    model = tiny(GPT2LMHeadModel, vocab_size=len(bpe), n_positions=64)
    model.config.eos_token_id = model.generation_config.eos_token_id = bpe.eos_token_id
    prompts = ["the cat", "a", "the dog sat on the log and"]
    bpe.padding_side = "left"
    stock = model.generate(
        **bpe(prompts, return_tensors="pt", padding=True), do_sample=False, max_new_tokens=30, pad_token_id=0
    )[:, -30:]
    expected = [bpe.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in stock]
    assert list(generate(model, bpe, prompts, temperature=0, max_new_tokens=30)) == expected


def test_a_row_that_ends_leaves_the_others_alone(bpe):
    model = tiny(vocab_size=len(bpe))
    ends = iter([5, bpe.eos_token_id])  # the first row takes a token and ends; its pick is not asked again
    others = []

    def third(logits_V):
        others.append(int(logits_V.argmax()))
        return others[-1]

    picks = [lambda _: next(ends), third]
    steps = list(generation.generate_ids(model, [[3, 4], [7]], picks, 20, 16, bpe.eos_token_id))
    assert [token for row, token in steps if row == 0] == [5]
    alone = [token for _, token in generation.generate_ids(model, [[7]], [third], 20, 16, None)]
    assert [token for row, token in steps if row == 1] == alone[: len(steps) - 1]


def test_text_is_streamed_in_whole_characters():
    text = "caf\u00e9 \U0001f600\U0001f680 na\u00efve \u4f60\u597d\n" * 3
    tokenizer = load_tokenizer("bpe-257", lambda: [text], 64)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())  # each a byte

    class Writer(torch.nn.Module):
        config, device = tiny(vocab_size=len(tokenizer), n_positions=512).config, torch.device("cpu")

        def forward(self, input_ids, **_):
            logits = torch.zeros(1, 1, len(tokenizer))
            logits[0, 0, next(left)] = 1.0
            return type("Output", (), {"logits": logits})

    left, pieces = iter(ids + [ids[12]] * 2), []  # at its end half a character
    written = next(
        generate(
            Writer(), tokenizer, "", temperature=0, max_new_tokens=len(ids) + 2, stream=lambda *p: pieces.append(p)
        )
    )
    assert written.startswith(text) and "".join(piece for _, piece in pieces) == written
    assert all("\ufffd" not in piece for _, piece in pieces[:-1]) and len(pieces) > len(text) - 1


def all_mass_on(model, row: int):
    """Rigs the head: the given row gets all the mass, all other rows share the rest equally."""
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()[1] = 1.0
        model.transformer.wte.weight.zero_()[row, 1] = 50.0
    return model


def test_end_of_text_ends_the_sample(bpe):
    model = all_mass_on(tiny(vocab_size=len(bpe)), bpe.eos_token_id)
    for temperature in (0, 1.0):
        assert list(generate(model, bpe, "the", temperature=temperature, num_samples=2, seed=0)) == ["", ""]


def test_rows_without_a_token_are_never_taken():
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + 96))) + "\n"
    tokenizer = load_tokenizer("char", lambda: [characters], model_max_length=4096)
    assert len(tokenizer) == 97
    model = all_mass_on(tiny(vocab_size=128, n_positions=4096, n_layer=1, n_embd=8, n_head=1), 100)
    assert text_of(model, tokenizer, "\n", temperature=0, max_new_tokens=4) == "\n" * 4
    draws = 2000
    text = text_of(model, tokenizer, "\n", max_new_tokens=draws, seed=7)
    counts = Counter(text)
    assert len(text) == draws and set(counts) <= set(characters)
    expected = draws / 97
    chi_square = sum((counts[character] - expected) ** 2 / expected for character in characters)
    assert 60 < chi_square < 140  # 96 degrees of freedom: 99.8 % of uniform draws


def test_the_seed_alone_decides(letters):
    model = tiny()
    state = torch.get_rng_state()
    first = list(generate(model, letters, "abc", seed=5, num_samples=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert list(generate(model, letters, "abc", seed=5, num_samples=2)) == first[:2]
    assert len(set(first)) == 3
    assert text_of(model, letters, "abc", seed=6) != first[0]
    assert text_of(model, letters, "abc") != text_of(model, letters, "abc")


def test_a_training_model_samples_without_dropout_and_goes_on_training(letters):
    model = tiny(resid_pdrop=0.5, embd_pdrop=0.5)
    expected = text_of(model, letters, "abc", seed=5, max_new_tokens=30)
    model.train()
    assert text_of(model, letters, "abc", seed=5, max_new_tokens=30) == expected
    assert model.training


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_the_narrowest_draw_is_greedy(letters, narrow):
    greedy = text_of(tiny(), letters, "abc", temperature=0, max_new_tokens=12)
    assert text_of(tiny(), letters, "abc", seed=1, max_new_tokens=12, **narrow) == greedy


def test_wide_limits_change_nothing(letters):
    plain = text_of(tiny(), letters, "abc", seed=1)
    assert text_of(tiny(), letters, "abc", seed=1, top_k=1000, top_p=1.0) == plain
    assert text_of(tiny(), letters, "abc", seed=1, top_k=0) == plain


def test_wrong_values_are_refused_together_and_at_once(letters):
    with pytest.raises(UserError) as refused:
        generate(tiny(), letters, "a", max_new_tokens=0, num_samples=-1, temperature=-0.5, top_k=-1, top_p=1.5)
    problems = refused.value.problems
    with pytest.raises(UserError, match="batch_size 0"):
        generate(tiny(), letters, "a", batch_size=0)
    assert [problem.split(":")[0] for problem in problems] == [
        "max_new_tokens 0", "num_samples -1", "temperature -0.5", "top_k -1", "top_p 1.5",
    ]  # fmt: skip
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(UserError, match=f"seed {seed}"):
            generate(tiny(), letters, "a", seed=seed)
    assert text_of(tiny(), letters, "a", seed=-5) == text_of(tiny(), letters, "a", seed=-5)
    with pytest.raises(UserError, match="'!', 'É'"):
        generate(tiny(), letters, "aÉb!")
    with pytest.raises(UserError, match="UTF-8"):
        generate(tiny(), letters, "a\udcff")


@pytest.fixture
def checkpoint(tmp_path, letters):
    folder = tmp_path / "run" / "checkpoint-3"
    tiny().save_pretrained(folder)
    save_tokenizer(letters, folder)
    return folder


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, OurModel], ids=["stock", "ours"])
def test_a_saved_model_writes_the_same_text(tmp_path, letters, kind):
    folder, model = tmp_path / "model", tiny(kind)
    expected = text_of(model, letters, "abc", seed=5)
    model.save_pretrained(folder)
    save_tokenizer(letters, folder)
    loaded, tokenizer = load_checkpoint(folder, torch.device("cpu"))
    assert text_of(loaded, tokenizer, "abc", seed=5) == expected
    model.to(torch.bfloat16).save_pretrained(folder)
    assert next(load_checkpoint(folder, torch.device("cpu"))[0].parameters()).dtype == torch.float32


def test_stock_generate_never_takes_padded_rows_of_a_loaded_folder(tmp_path, letters):
    all_mass_on(tiny(GPT2LMHeadModel, vocab_size=64), 50).save_pretrained(tmp_path)
    save_tokenizer(letters, tmp_path)
    model, tokenizer = load_checkpoint(tmp_path, torch.device("cpu"))
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    for do_sample in (False, True):
        written = model.generate(ids, do_sample=do_sample, max_new_tokens=13, pad_token_id=0)
        assert written.max() < len(tokenizer)


def refusal(folder) -> str:
    with pytest.raises(UserError) as refused:
        load_checkpoint(folder)
    (problem,) = refused.value.problems
    assert "\n" not in problem
    return problem


def test_what_is_no_checkpoint_is_refused(checkpoint, tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "checkpoint-3" in refusal(checkpoint.parent)
    (checkpoint / "config.json").write_text("{")
    assert "config" in refusal(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "no config.json" in refusal(checkpoint)


def test_a_damaged_checkpoint_is_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read" in refusal(checkpoint)
    weights.unlink()
    assert "model.safetensors" in refusal(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(checkpoint)


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    del weights["h.1.mlp.c_fc.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "transformer.h.1.mlp.c_fc.weight" in refusal(checkpoint)


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint):
    tiny(vocab_size=20).save_pretrained(checkpoint)
    problem = refusal(checkpoint)
    assert "27 entries" in problem and "20 rows" in problem


def run_generate(capsys, monkeypatch, checkpoint, *flags, stdin="") -> str:
    monkeypatch.setattr("sys.argv", ["hfgpt", "generate", str(checkpoint), "--temperature", "0", *flags])
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    cli.main()
    return capsys.readouterr().out


def test_prompts_come_from_flags_files_and_standard_input(capsys, monkeypatch, checkpoint, tmp_path):
    run = partial(run_generate, capsys, monkeypatch, checkpoint, "--max_new_tokens", "8")
    texts = {prompt: prompt + text_of(tiny(), letters_of(checkpoint), prompt, temperature=0, max_new_tokens=8)
             for prompt in ("abc", "hello", "a\nb")}  # fmt: skip
    assert run("--prompt", "abc") == texts["abc"] + "\n"
    assert run("--prompt", "-", stdin="a\nb\n") == texts["a\nb"] + "\n"
    both = f"{texts['abc']}\n---\n{texts['hello']}\n"
    assert run("--prompt", "abc", "--prompt", "hello") == both
    lines, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("abc\n\nhello")
    assert run("--prompt_file", str(lines)) == both
    rows.write_text('{"prompt": "abc"}\n{"prompt": "a\\nb"}\n')
    written = [json.loads(line) for line in run("--prompt_file", str(rows), "--json").splitlines()]
    assert [fact["prompt"] + fact["text"] for fact in written] == [texts["abc"], texts["a\nb"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("p.txt", b"\n \n", "no prompt"), ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}', "line 2"),
     ("p.jsonl", b'{"prompt": 3}', "line 1"), ("p.txt", b"\xff\xfe\xe9", "UTF-8"), ("p.txt", None, "No such file")],
)  # fmt: skip
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        generation.read_prompts(tmp_path / name)


def letters_of(folder):
    return load_checkpoint(folder, torch.device("cpu"))[1]


def test_standard_input_closed_or_named_twice_is_refused_and_ctrl_c_has_its_code(capsys, monkeypatch, checkpoint):
    monkeypatch.setattr("sys.argv", ["hfgpt", "generate", str(checkpoint), "--prompt", "-"])
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        cli.run_app()
    monkeypatch.setattr("sys.argv", ["hfgpt", "generate", str(checkpoint), "--prompt", "-", "--prompt", "-"])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    with pytest.raises(UserError, match="prompt -: standard input can be read only once"):
        cli.run_app()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["hfgpt", "generate", str(checkpoint)])
    monkeypatch.setattr(generation, "generate", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
