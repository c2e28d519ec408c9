"""Two minutes on a CPU: train a small GPT-2 on Python's own documentation, evaluate it, sample from it.

accelerate launch recipes/quickstart.py
"""

from __future__ import annotations

from hfgpt import PretrainConfig, Pretrainer, run_recipe

CONFIG = {
    "model": {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 256},
    "dataset": "embedded",
    "tokenizer": "bpe-4096",
    "output_dir": "out/quickstart",
    "sequence_length": 128,
    "per_device_train_batch_size": 16,
    "max_steps": 400,
    "learning_rate": 3e-3,
    "warmup_steps": 30,
    "eval_steps": 100,
    "eval_tokens": 32_768,
    "logging_steps": 20,
    "resume_from_checkpoint": "latest",
}


def main() -> None:
    config = PretrainConfig.from_cli(CONFIG)
    pretrainer = Pretrainer(config)
    pretrainer.train()
    run = pretrainer.run
    if run.is_main:
        from hfgpt.evaluation.generate import generate
        from hfgpt.evaluation.loading import load_checkpoint

        model, tokenizer = load_checkpoint(f"{config.output_dir}/checkpoint-latest")
        prompt = tokenizer.decode(run.data.validation[:12], skip_special_tokens=True)
        for text in generate(model, tokenizer, prompt, max_new_tokens=60, temperature=0.8, seed=1):
            print(f"\nsample, from held-out text on:\n{prompt}|{text}")
        print(
            "\nLoad the result anywhere:\n"
            "    from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f'    model = AutoModelForCausalLM.from_pretrained("{config.output_dir}/checkpoint-latest")\n'
            f'    tokenizer = AutoTokenizer.from_pretrained("{config.output_dir}/checkpoint-latest")'
        )


if __name__ == "__main__":
    run_recipe(main)
