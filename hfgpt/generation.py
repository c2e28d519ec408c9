"""Text from a checkpoint: load it, and sample with a KV cache within the context and a window beyond it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hfgpt.data.tokenization import has_tokenizer, unknown_characters
from hfgpt.device import default_device
from hfgpt.errors import UserError
from hfgpt.modeling_hfgpt import CACHE_NAME, GPT2LMHeadModel
from hfgpt.weights import load_model, read_config

logger = logging.getLogger(__name__)

Pick = Callable[[torch.Tensor], int]  # the next id, from logits [V]


def load_checkpoint(folder: str | Path, device: torch.device | None = None) -> tuple[GPT2LMHeadModel, Any]:
    """Model (float32, evaluation mode) and tokenizer of a GPT-2 folder, ours or any other.

    Raises UserError if the folder is missing, incomplete or unreadable, or if its two parts do not fit.
    """
    folder, where = Path(folder), f"checkpoint {folder}"
    read_config(folder, where)
    if not has_tokenizer(folder):
        raise UserError(f"{where}: no tokenizer.json; copy the tokenizer's files into it")
    model = load_model(folder, where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each reader of a broken file raises its own type
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: its tokenizer cannot be read ({reason}); take another checkpoint") from error
    entries, rows = len(tokenizer), model.config.vocab_size
    if entries > rows:
        sizes = f"the tokenizer has {entries} entries and the model {rows} rows"
        raise UserError(f"{where}: {sizes}; use the tokenizer that the model was trained with")
    if entries < rows:  # for the model's own `generate`; ours never takes these ids
        model.generation_config.suppress_tokens = list(range(entries, rows))
    return model.to(device or default_device()).eval(), tokenizer


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    num_samples: int = 1,
) -> Iterator[str]:
    """Yields `num_samples` continuations of `prompt`, without the prompt and the end-of-text token.

    A sample ends at end-of-text or after `max_new_tokens`. An empty prompt starts from end-of-text, or from a
    newline where the tokenizer has none. Beyond the model's positions each token is the model's answer to the
    last `n_positions` ids. `temperature` 0 takes the likeliest token each time. The same `seed` gives the same
    texts on one machine. Ids without a token (padded rows of the model) are never taken.

    Any causal language model of transformers serves. Raises UserError, at once, for values that cannot be and
    for characters that a character tokenizer lacks.
    """
    wrong = {
        f"max_new_tokens {max_new_tokens}: at least 1": max_new_tokens < 1,
        f"num_samples {num_samples}: at least 1": num_samples < 1,
        f"temperature {temperature}: 0 (greedy) or above": not 0 <= temperature < float("inf"),
        f"top_k {top_k}: at least 1, or left out": top_k is not None and top_k < 1,
        f"top_p {top_p}: above 0, up to 1, or left out": top_p is not None and not 0 < top_p <= 1,
        f"seed {seed}: -2^63 to 2^63 - 1, or left out": seed is not None and not -(2**63) <= seed < 2**63,
    }
    if any(wrong.values()):
        raise UserError(*(problem for problem, is_so in wrong.items() if is_so))
    ids, limit = _prompt_ids(tokenizer, prompt), model.config.max_position_embeddings
    if len(ids) > limit:
        logger.warning("the prompt has %d tokens, the model sees the last %d", len(ids), limit)
        ids = ids[-limit:]
    pick = _picker(len(tokenizer), temperature, top_k, top_p, seed)
    samples = (_continue(model, ids, max_new_tokens, limit, tokenizer.eos_token_id, pick) for _ in range(num_samples))
    return (tokenizer.decode(sample, clean_up_tokenization_spaces=False) for sample in samples)


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    if prompt == "" and tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    text = prompt or "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"prompt {prompt!a}: not valid text at character {error.start}; use UTF-8") from error
    if unknown := unknown_characters(tokenizer, text):
        raise UserError(f"prompt: the tokenizer has no {', '.join(map(repr, unknown))}; leave these characters out")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _picker(entries: int, temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> Pick:
    """Takes ids below `entries` only."""
    if temperature == 0:
        return lambda logits_V: int(logits_V[:entries].argmax())
    # One generator on the CPU: the draws do not depend on the device, nor on torch's global random state.
    generator = torch.Generator()
    generator.manual_seed(generator.seed() if seed is None else seed)
    warpers: list[Any] = [TemperatureLogitsWarper(float(temperature))]
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))

    def pick(logits_V: torch.Tensor) -> int:
        scores_1V = logits_V[None, :entries].float().cpu()
        scores_1V = scores_1V - scores_1V.max()  # a low temperature then gives -inf, never inf
        for warper in warpers:
            scores_1V = warper(None, scores_1V)
        return int(torch.multinomial(scores_1V.softmax(-1), 1, generator=generator))

    return pick


@torch.no_grad()
def _continue(
    model: Any, prompt_ids: list[int], max_new_tokens: int, limit: int, eos: int | None, pick: Pick
) -> list[int]:
    cache, cached = DynamicCache(config=model.config), 0
    ids = list(prompt_ids)
    was_training = model.training
    model.eval()
    try:
        # A compiled model would be compiled again for each length.
        with torch.compiler.set_stance("force_eager"):
            while len(ids) < len(prompt_ids) + max_new_tokens:
                if len(ids) <= limit:
                    part, options = ids[cached:], {CACHE_NAME: cache, "use_cache": True}
                    cached = len(ids)
                else:
                    part, options = ids[-limit:], {"use_cache": False}
                logits_BTV = model(torch.tensor([part], device=model.device), **options).logits
                token = pick(logits_BTV[0, -1])
                if token == eos:
                    break
                ids.append(token)
    finally:
        model.train(was_training)
    return ids[len(prompt_ids) :]
