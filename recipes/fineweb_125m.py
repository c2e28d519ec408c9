"""GPT-2 125M on FineWeb-Edu, streamed from the Hub, at 524,288 tokens a step on one 12 GB card.

accelerate launch --config_file accelerate_configs/single_gpu_bf16.yaml recipes/fineweb_125m.py
"""

from __future__ import annotations

from hfgpt import PretrainConfig, Pretrainer, run_recipe

CONFIG = {
    "model": "gpt2-125m",
    "dataset": "HuggingFaceFW/fineweb-edu",
    "dataset_name": "sample-10BT",
    "tokenizer": "openai-community/gpt2",
    "output_dir": "out/fineweb-125m",
    "sequence_length": 1024,
    "tokens_per_step": 524_288,  # 8 x 1024 x 64 on one card
    "per_device_train_batch_size": 8,
    "max_tokens": 10_000_000_000,
    "optim": "muon",
    "learning_rate": 3.6e-3,
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
