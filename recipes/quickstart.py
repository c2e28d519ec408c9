"""Two minutes on a CPU: train a small GPT-2 on Python's own documentation, evaluate it, sample from it.

accelerate launch --config_file accelerate_configs/one_process.yaml recipes/quickstart.py
"""

from __future__ import annotations

from hfgpt import PretrainConfig, Pretrainer, run_recipe

# Chosen for two minutes on two CPU cores without bf16 (tests/benchmarks/LEDGER.md).
CONFIG = {
    "model": {"n_layer": 4, "n_head": 2, "n_embd": 128, "n_positions": 128},
    "dataset": "embedded",
    "tokenizer": "bpe-2048",
    "output_dir": "out/quickstart",
    "sequence_length": 128,
    "per_device_train_batch_size": 8,
    # Compiled code of so small a model is no faster in float32, and it would be compiled for half a minute first.
    "torch_compile": False,
    "mixed_precision": "no",
    "max_steps": 960,
    "optim": "muon",
    "learning_rate": 1e-2,
    "min_learning_rate": 0.0,
    "warmup_steps": 30,
    "eval_steps": 240,
    "eval_tokens": 32_768,
    "logging_steps": 24,
    "save_steps": 240,
    "resume_from_checkpoint": "latest",
}
# For the embedded text; for any other the samples continue its held-out part.
PROMPTS = ["Return the", "This method is", "If the file"]


def main() -> None:
    config = PretrainConfig.from_cli(CONFIG)
    pretrainer = Pretrainer(config)
    pretrainer.train()
    if not pretrainer.run.is_main:
        return
    from hfgpt.evaluation.generate import generate
    from hfgpt.evaluation.loading import load_checkpoint
    from hfgpt.links import follow

    checkpoint = follow(f"{config.output_dir}/checkpoint-latest").as_posix()
    model, tokenizer = load_checkpoint(checkpoint)
    held_out = tokenizer.decode(pretrainer.run.data.validation[:12], skip_special_tokens=True)
    prompts = PROMPTS if config.dataset == "embedded" else [held_out]
    texts = list(generate(model, tokenizer, prompts, max_new_tokens=60, temperature=0.6, seed=1))
    pretrainer.record_samples(prompts, texts)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"\n> {prompt}{text}")
    values = "report.html" if config.report else "metrics.jsonl"
    print(
        f"\ncurves and values   {config.output_dir}/{values}\n"
        f"the model           {checkpoint}\n"
        "load it anywhere    from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'                    model = AutoModelForCausalLM.from_pretrained("{checkpoint}")\n'
        f'                    tokenizer = AutoTokenizer.from_pretrained("{checkpoint}")'
    )


if __name__ == "__main__":
    run_recipe(main)
