"""A GPT-2 of 40M parameters (12 layers, 384 wide) on FineWeb-Edu, at 524,288 tokens a step on one 12 GB card.

accelerate launch --config_file accelerate_configs/single_gpu_bf16.yaml recipes/fineweb_40m.py
"""

from __future__ import annotations

from hfgpt import PretrainConfig, Pretrainer, run_recipe

CONFIG = {
    "model": "gpt2-40m",
    "dataset": "HuggingFaceFW/fineweb-edu",
    "dataset_name": "sample-10BT",
    "tokenizer": "openai-community/gpt2",
    "output_dir": "out/fineweb-40m",
    "sequence_length": 1024,
    "tokens_per_step": 524_288,  # 16 x 1024 x 32 on one card
    "per_device_train_batch_size": 16,
    "max_tokens": 10_000_000_000,
    "optim": "muon",
    "learning_rate": 6e-3,
    "warmup_steps": 700,  # 367 M tokens, about 4 % of the run
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "eval_steps": 250,
    "eval_tokens": 1_048_576,
    "save_steps": 500,
    "save_total_limit": 3,
    "logging_steps": 1,
}


def main() -> None:
    config = PretrainConfig.from_cli(CONFIG)
    Pretrainer(config).train()


if __name__ == "__main__":
    run_recipe(main)
