"""A character-level GPT on one text file, on a CPU in a few minutes (or `--model char-gpu` on a card).

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/shakespeare_char.py \
        --dataset tinyshakespeare.txt --output_dir out/shakespeare
"""

from __future__ import annotations

from hfgpt import PretrainConfig, Pretrainer, run_recipe

CONFIG = {
    "model": "char-cpu",
    "dataset": "embedded",
    "tokenizer": "char",
    "output_dir": "out/shakespeare-char",
    "sequence_length": 64,
    "per_device_train_batch_size": 12,
    "max_steps": 2000,
    "learning_rate": 1e-3,
    "min_learning_rate": 1e-4,
    "warmup_steps": 100,
    "adam_beta2": 0.99,
    "eval_steps": 250,
    "logging_steps": 50,
}

# For --model char-gpu: 6 layers, 6 heads, 384 wide, dropout 0.2.
ON_A_CARD = {"sequence_length": 256, "per_device_train_batch_size": 64, "max_steps": 5000}


def main() -> None:
    config = PretrainConfig.from_cli(CONFIG, for_model={"char-gpu": ON_A_CARD})
    Pretrainer(config).train()


if __name__ == "__main__":
    run_recipe(main)
