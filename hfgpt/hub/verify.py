"""Check that a checkpoint folder is what other tools expect: a GPT-2 model that stock transformers loads and runs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from hfgpt.checkpointing.checkpoint import MANIFEST, MODEL_FILES, find_damage
from hfgpt.checkpointing.read_training_state import STATE, evaluation_of_model, read_state
from hfgpt.config import PretrainConfig
from hfgpt.data import prepare_data_of_run
from hfgpt.errors import UserError
from hfgpt.evaluation.loss import scored_blocks, windows
from hfgpt.files import has_tokenizer, read_text_file
from hfgpt.links import follow
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.model.configuration_gpt2 import model_rows

logger = logging.getLogger(__name__)

REQUIRED = ("model.safetensors", "generation_config.json")
SCRIPT = Path(__file__).with_name("load_with_transformers.py")
# How far the loss may be from the recorded one: training may evaluate in 16 bits, but this uses float32.
TOLERANCE_16_BITS, TOLERANCE_FLOAT32 = 0.02, 1e-3


def verify(folder: str | Path) -> dict[str, Any]:
    """Return facts about a checkpoint folder, and `problems`: what breaks or surprises other tools, one line each.

    `loss` is the evaluation loss computed by stock transformers in float32, on the held-out tokens of the run;
    `loss_not_checked` says why it is missing. Python warnings from transformers are logged, but are not problems.
    Raises UserError for a folder without a model.
    """
    facts: dict[str, Any] = {"checkpoint": str(folder)}
    folder = follow(folder)
    check_is_model(folder)
    problems = _file_problems(folder)
    if not (has_tokenizer(folder) and all((folder / name).is_file() for name in REQUIRED)):
        return {**facts, "problems": problems}
    recorded, tolerance, blocks = None, TOLERANCE_FLOAT32, None
    try:
        recorded, tolerance, blocks = _evaluation(folder)
    except UserError as error:
        facts["loss_not_checked"] = str(error)
    done = _load_in_clean_process(folder, blocks)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        return {**facts, "problems": [*problems, f"stock transformers does not load it: {reason}"]}
    found = json.loads(done.stdout.splitlines()[-1])
    for warning in found.pop("warnings"):
        logger.warning("checkpoint %s: transformers warns: %s", folder, warning)
    found["tokenizer_rows"] = model_rows(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    problems += found.pop("problems") + _find_surprises(found)
    if recorded is not None:
        facts |= {"recorded_loss": recorded, "tolerance": tolerance}
        if not abs(found["loss"] - recorded) <= tolerance:
            problems.append(f"the loss is {found['loss']:.4f}, but {recorded:.4f} was recorded (tolerance {tolerance})")
    return {**facts, **found, "problems": problems}


def check_is_model(folder: Path) -> None:
    """Raise UserError for a folder without a model."""
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: no such folder; give a checkpoint folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"checkpoint {folder}: no config.json; give a checkpoint folder")


def _file_problems(folder: Path) -> list[str]:
    """Return what is wrong with the files of a folder, before any of them is loaded."""
    problems = []
    if (folder / MANIFEST).exists() and (damage := find_damage(folder, MODEL_FILES)):
        problems.append(damage)
    problems += [f"{name} is missing" for name in REQUIRED if not (folder / name).is_file()]
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):
            content = json.loads(read_text_file(path))
            if "auto_map" in content:
                problems.append(f"{path.name} requires code from elsewhere (auto_map)")
            generic = content.get("tokenizer_class") == "PreTrainedTokenizerFast"
            if "token_type_ids" in content.get("model_input_names", ["token_type_ids"] if generic else []):
                problems.append(f"{path.name}: transformers 4 returns token_type_ids, which change the model's answer")
    if not has_tokenizer(folder):
        problems.append("there is no tokenizer in the folder; stock transformers makes up an empty one")
    return problems


def _load_in_clean_process(
    folder: Path, blocks: tuple[np.ndarray, np.ndarray] | None
) -> subprocess.CompletedProcess[str]:
    """Run `load_with_transformers.py`, isolated from the environment of this process and from this package."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-I", "-X", "utf8", str(SCRIPT), str(folder.resolve())]
        if blocks is not None:
            command.append(str(Path(temporary, "blocks.npz")))
            np.savez(command[-1], inputs=blocks[0], targets=blocks[1])
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with SlowWork("verifying with stock transformers"):
            return subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", env=environment, cwd=temporary
            )


def _evaluation(folder: Path) -> tuple[float, float, tuple[np.ndarray, np.ndarray]]:
    """Return a checkpoint's recorded loss, the tolerance, and inputs and targets. Raises UserError if there is none."""
    if not (folder / STATE).is_dir():
        raise UserError("the folder has no training_state, so there is no recorded evaluation")
    trainer, data = read_state(folder, "trainer_state"), read_state(folder, "data_state")
    evaluation = evaluation_of_model(trainer)
    if not evaluation or trainer["evaluation_step"] != trainer["step"]:
        raise UserError(f"no evaluation was recorded at step {trainer['step']}")
    config = PretrainConfig.of_run(trainer["config"])
    if config.document_masking:
        raise UserError("it was evaluated with document masking")
    blocks_per_step = data["fingerprint"]["blocks_per_step"]
    text = prepare_data_of_run(config, blocks_per_step, trainer["config"], data["fingerprint"], folder)
    for key in ("held_out", "held_out.hash", "tokenizer"):
        if text.train.fingerprint.get(key) != data["fingerprint"].get(key):
            raise UserError(f"the text has changed since the run: {key} differs")
    tolerance = TOLERANCE_FLOAT32 if config.mixed_precision == "no" else TOLERANCE_16_BITS
    named = [len(tokens) for tokens, _ in text.named_validation.values()]
    parts = windows(named or [len(text.validation)], config.sequence_length)
    blocks = scored_blocks(text.validation, parts, config.sequence_length)
    return evaluation["eval_loss"], tolerance, blocks


def _find_surprises(found: dict[str, Any]) -> list[str]:
    """Find what other tools would not expect. Removes `has_special_tokens` from `found`."""
    expected: dict[str, Any] = {"class": "GPT2LMHeadModel", "architectures": ["GPT2LMHeadModel"]}
    expected |= {"model_type": "gpt2", "remote_code": False, "finite": True}
    problems = [f"{key} is {found[key]}, not {value}" for key, value in expected.items() if found[key] != value]
    equal = [("n_positions", "model_max_length"), ("dtype", "declared_dtype"), ("vocab_size", "tokenizer_rows")]
    problems += [f"{a} is {found[a]}, {b} {found[b]}" for a, b in equal if found[a] != found[b]]
    for key, (in_tokenizer, in_config, in_generation) in found["ids"].items():
        # As in GPT-2, config.json has no pad token if the tokenizer pads with another token.
        if in_config not in ({in_tokenizer, None} if key == "pad_token_id" else {in_tokenizer}):
            problems.append(f"{key} is {in_config} in config.json, {in_tokenizer} in the tokenizer")
        if in_generation != in_tokenizer:
            problems.append(f"{key} is {in_generation} in generation_config.json, {in_tokenizer} in the tokenizer")
    if found["padding_side"] != "left":
        problems.append(
            f"the tokenizer pads on the {found['padding_side']}, which breaks generation from a batch of prompts"
        )
    if found.pop("has_special_tokens") and found["ids"]["pad_token_id"][0] is None:
        problems.append("the tokenizer has no pad token, so batches of prompts of different lengths fail")
    return problems
