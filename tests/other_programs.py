"""Compare a checkpoint in the programs that are installed with stock transformers: ids, log-probabilities, text.

    python tests/other_programs.py out/mine/checkpoint-latest

prints one line per program with the largest difference of a log-probability, or why the program is skipped, and exits
with 1 where one differs. `pip install -e '.[other-programs]'` brings CTranslate2, PEFT and TRL; mlx-lm needs `mlx[cpu]`
where there is no Apple chip. It runs without hfgpt, so that older packages can be tried in an environment of their own;
only llama.cpp needs it, for `hfgpt export`, with gguf and xllamacpp.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

TOLERANCE = 1e-5  # of a log-probability in float32
NEW_TOKENS = 8


class Skip(Exception):
    """Why a program is not compared."""


class Checkpoint:
    """The folder, and what stock transformers makes of it in float32 on a CPU."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.text = folder, text
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, loading = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **{DTYPE: torch.float32}
        )
        lost = {kind: names for kind, names in loading.items() if names}
        assert not lost, lost
        self.model.eval()
        self.ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.ids = self.ids[: self.model.config.n_positions - NEW_TOKENS]
        self.scores_TV = scores(self.model, self.ids)
        self.greedy = greedy(self.model, self.ids[:NEW_TOKENS])

    def difference(self, scores_TV: torch.Tensor) -> float:
        assert scores_TV.shape == self.scores_TV.shape, f"{tuple(scores_TV.shape)}, not {tuple(self.scores_TV.shape)}"
        return (scores_TV - self.scores_TV).abs().max().item()


DTYPE = "dtype" if transformers.__version__ >= "5" else "torch_dtype"


def scores(model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) in float32, whose sum over a large vocabulary is off by up to 1e-4, in all programs."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def greedy(model, ids: list[int]) -> list[int]:
    inputs = torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(inputs, **options)[0, len(ids) :].tolist()


def module(name: str, package: str | None = None):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"pip install {package or name} ({error})") from error


def batched_prompts(checkpoint: Checkpoint) -> float:
    """Two prompts of different lengths, padded, by stock `generate`, against each alone; 0 or an AssertionError."""
    tokenizer, model = checkpoint.tokenizer, checkpoint.model
    if tokenizer.pad_token is None:
        raise Skip("the tokenizer has no pad token (see the card)")
    prompts = [tokenizer.decode(checkpoint.ids[:size]) for size in (3, NEW_TOKENS)]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for prompt, new in zip(prompts, together, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (new, alone)]
        assert texts[0] == texts[1], f"{texts[0]!r} in a batch, {texts[1]!r} alone"
    return 0.0


def tokenizer_output(checkpoint: Checkpoint) -> float:
    """The model's answer to all that the tokenizer returns, as `model(**tokenizer(text))` is used."""
    inputs = checkpoint.tokenizer(checkpoint.tokenizer.decode(checkpoint.ids), return_tensors="pt")
    if inputs["input_ids"][0].tolist() != checkpoint.ids:
        raise Skip("the tokenizer adds tokens of its own, or decodes the text to another one")
    with torch.no_grad():
        return checkpoint.difference(checkpoint.model(**inputs).logits[0].log_softmax(-1))


def headless(checkpoint: Checkpoint) -> float:
    model, loading = AutoModel.from_pretrained(checkpoint.folder, output_loading_info=True, **{DTYPE: torch.float32})
    assert not loading["missing_keys"], loading["missing_keys"]
    with torch.no_grad():
        hidden_TC = model.eval()(torch.tensor([checkpoint.ids])).last_hidden_state[0]
        return checkpoint.difference(checkpoint.model.lm_head(hidden_TC).log_softmax(-1))


def device_map(checkpoint: Checkpoint) -> float:
    module("accelerate")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, device_map="cpu", **{DTYPE: torch.float32})
    return checkpoint.difference(scores(model.eval(), checkpoint.ids))


def text_pipeline(checkpoint: Checkpoint) -> float:
    prompt = checkpoint.tokenizer.decode(checkpoint.ids[:NEW_TOKENS])
    inputs = checkpoint.tokenizer(prompt)["input_ids"]
    whole = checkpoint.tokenizer.decode([*inputs, *greedy(checkpoint.model, inputs)], skip_special_tokens=True)
    [made] = pipeline("text-generation", str(checkpoint.folder))(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert made["generated_text"] == whole, f"{made['generated_text']!r}, not {whole!r}"
    return 0.0


def ctranslate2(checkpoint: Checkpoint) -> float:
    ct2 = module("ctranslate2")
    module("ctranslate2.converters")
    with tempfile.TemporaryDirectory() as temporary:
        converted = Path(temporary, "model")
        ct2.converters.TransformersConverter(str(checkpoint.folder)).convert(str(converted))
        # A tokenizer without end-of-text: as hfgpt/README.md says.
        described = converted / "config.json"
        text = described.read_text()
        if checkpoint.tokenizer.eos_token is None:
            text = text.replace('_token": null', '_token": ""')
        described.write_text(text)
        generator = ct2.Generator(str(converted), compute_type="float32")
        [made] = generator.generate_batch(
            [checkpoint.tokenizer.convert_ids_to_tokens(checkpoint.ids[:NEW_TOKENS])],
            max_length=NEW_TOKENS, sampling_topk=1, include_prompt_in_result=False, return_end_token=True,
        )  # fmt: skip
        assert made.sequences_ids[0] == checkpoint.greedy, f"{made.sequences_ids[0]}, not {checkpoint.greedy}"
        output = generator.forward_batch([checkpoint.ids], return_log_probs=True)
        return checkpoint.difference(torch.from_numpy(np.array(output))[0])


def onnx(checkpoint: Checkpoint) -> float:
    runtime = module("optimum.onnxruntime", "'optimum-onnx[onnxruntime]' (not with transformers 5)")
    model = runtime.ORTModelForCausalLM.from_pretrained(checkpoint.folder, export=True)
    assert greedy(model, checkpoint.ids[:NEW_TOKENS]) == checkpoint.greedy
    inputs = torch.tensor([checkpoint.ids])
    return checkpoint.difference(model(inputs, attention_mask=torch.ones_like(inputs)).logits[0].log_softmax(-1))


def mlx_lm(checkpoint: Checkpoint) -> float:
    mx, lm = module("mlx.core", "'mlx[cpu]'"), module("mlx_lm", "mlx-lm")
    if not checkpoint.model.config.tie_word_embeddings:
        raise Skip("mlx-lm's GPT-2 has a tied head alone")
    model, tokenizer = lm.load(str(checkpoint.folder))
    assert tokenizer.encode(checkpoint.text, add_special_tokens=False)[: len(checkpoint.ids)] == checkpoint.ids
    logits_TV = np.array(model(mx.array([checkpoint.ids]))[0].astype(mx.float32))
    return checkpoint.difference(torch.from_numpy(logits_TV).log_softmax(-1))


def peft(checkpoint: Checkpoint) -> float:
    library = module("peft")
    settings = library.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, r=2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, **{DTYPE: torch.float32})
    adapted = library.get_peft_model(model, settings)
    with tempfile.TemporaryDirectory() as temporary:
        adapted.save_pretrained(temporary)
        again = AutoModelForCausalLM.from_pretrained(checkpoint.folder, **{DTYPE: torch.float32})
        merged = library.PeftModel.from_pretrained(again, temporary).merge_and_unload()
    return checkpoint.difference(scores(merged.eval(), checkpoint.ids))


def trl(checkpoint: Checkpoint) -> float:
    """Two steps of supervised fine-tuning at a learning rate of 0 leave the model as it is, saved and loaded again."""
    library, datasets = module("trl"), module("datasets")
    if checkpoint.tokenizer.pad_token is None:
        raise Skip("the tokenizer has no pad token (see the card)")
    text = checkpoint.tokenizer.decode(checkpoint.ids)
    rows = datasets.Dataset.from_list([{"text": text}, {"text": text[: len(text) // 2]}] * 2)
    with tempfile.TemporaryDirectory() as temporary:
        settings = library.SFTConfig(
            output_dir=temporary, max_steps=2, per_device_train_batch_size=2, learning_rate=0.0, use_cpu=True,
            report_to="none", max_length=checkpoint.model.config.n_positions, save_strategy="no", bf16=False,
            gradient_checkpointing=False, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, **{DTYPE: torch.float32})
        trainer = library.SFTTrainer(
            model=model, args=settings, train_dataset=rows, processing_class=checkpoint.tokenizer
        )
        trainer.train()
        trainer.save_model(temporary)
        again = AutoModelForCausalLM.from_pretrained(temporary, **{DTYPE: torch.float32})
        tokenizer = AutoTokenizer.from_pretrained(temporary)
    assert tokenizer(text)["input_ids"] == checkpoint.tokenizer(text)["input_ids"]
    return checkpoint.difference(scores(again.eval(), checkpoint.ids))


def gguf(checkpoint: Checkpoint) -> float:
    """Ids and greedy text of `hfgpt export`'s file; llama.cpp's GELU is a table in float16."""
    module("gguf")
    module("xllamacpp")
    program = [sys.executable, "-m", "hfgpt.cli", "export", str(checkpoint.folder)]
    if subprocess.run([*program[:3], "--help"], capture_output=True).returncode:
        raise Skip("needs hfgpt in the same environment")
    model, ids = checkpoint.model, checkpoint.ids[:NEW_TOKENS]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "model.gguf")
        done = subprocess.run([*program, str(path), "--dtype", "f32"], capture_output=True, text=True)
        if done.returncode == 2:
            raise Skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        other = module("llama_cpp").LlamaCpp(path, model.config.vocab_size, model.config.n_positions)
        text = checkpoint.tokenizer.decode(checkpoint.ids)
        found, wanted = other.ids(text, True), checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found == wanted, f"{found}, not {wanted}"
        made, _ = other.greedy(ids, NEW_TOKENS)
        assert made == checkpoint.greedy, f"{made}, not {checkpoint.greedy}"
        return (other.scores(checkpoint.ids) - checkpoint.scores_TV[-1]).abs().max().item()


def harness(checkpoint: Checkpoint) -> float:
    """lm-evaluation-harness: the log-likelihood of the text after the start token, per token."""
    module("lm_eval", "'lm-eval[hf]'")
    instance = module("lm_eval.api.instance").Instance
    tokenizer, start = checkpoint.tokenizer, {}
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        start = {"prefix_token_id": tokenizer.get_vocab().get("\n", 0)}  # as the card says
    model = module("lm_eval.models.huggingface").HFLM(pretrained=str(checkpoint.folder), device="cpu", **start)
    text = tokenizer.decode(checkpoint.ids)
    if tokenizer(text)["input_ids"] != checkpoint.ids:
        raise Skip("the tokenizer adds tokens of its own, or decodes the text to another one")
    [found] = model.loglikelihood_rolling([instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    found = found[0] if isinstance(found, tuple) else found
    ids = [model.prefix_token_id, *checkpoint.ids]
    wanted = scores(checkpoint.model, ids[:-1]).gather(-1, torch.tensor(ids[1:])[:, None]).sum().item()
    return abs(found - wanted) / len(checkpoint.ids)


PROGRAMS: dict[str, tuple[Callable[[Checkpoint], float], str, float]] = {
    "what the tokenizer returns": (tokenizer_output, "transformers", TOLERANCE),
    "a padded batch of prompts": (batched_prompts, "transformers", 0.0),
    "AutoModel": (headless, "transformers", TOLERANCE),
    "device_map": (device_map, "transformers", TOLERANCE),
    "pipeline": (text_pipeline, "transformers", 0.0),
    "CTranslate2": (ctranslate2, "ctranslate2", TOLERANCE),
    "ONNX by optimum": (onnx, "optimum-onnx", 2 * TOLERANCE),
    "mlx-lm": (mlx_lm, "mlx-lm", TOLERANCE),
    "PEFT": (peft, "peft", TOLERANCE),
    "TRL": (trl, "trl", 0.0),
    "llama.cpp": (gguf, "xllamacpp", 1e-2),
    "lm-evaluation-harness": (harness, "lm-eval", TOLERANCE),
}


def compared(checkpoint: Checkpoint, only: list[str]) -> bool:
    """Print a line for each program; whether all that ran agree."""
    agree = True
    for name, (compare, package, tolerance) in PROGRAMS.items():
        if only and not any(word.lower() in name.lower() for word in only):
            continue
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some programs print
                difference = compare(checkpoint)
            verdict = "same" if difference <= tolerance else f"DIFFERS by more than {tolerance:g}"
            line = f"{difference:.2g}  {verdict}  ({package} {importlib.metadata.version(package)})"
            agree &= difference <= tolerance
        except Skip as reason:
            line = f"skipped: {reason}"
        except Exception as error:
            line, agree = f"FAILS: {type(error).__name__}: {' '.join(str(error).split())[-400:]}", False
        print(f"  {name:28}{line}", flush=True)
    return agree


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoint folders")
    parser.add_argument("--text", help="default: what the first tokens of the vocabulary stand for")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the programs' names")
    arguments = parser.parse_args(given)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    agree = True
    for folder in arguments.folders:
        text = arguments.text
        if text is None:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            rows = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
            text = tokenizer.decode([rows[n * n % min(len(rows), 400)] for n in range(1, 40)])
        checkpoint = Checkpoint(folder, text)
        print(f"{folder}: {len(checkpoint.ids)} ids, {checkpoint.ids[:6]} ..; greedy {checkpoint.greedy[:6]} ..")
        agree &= compared(checkpoint, arguments.only)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
