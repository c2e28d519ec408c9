"""Text from a checkpoint: load it, and sample with a KV cache within the context and a window beyond it."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hfgpt.data.encoding import Encoder, make_repeatable
from hfgpt.data.tokenization import has_tokenizer
from hfgpt.data.tokenizer_model import BYTE_TOKEN
from hfgpt.distributed.device import default_device, step_seed
from hfgpt.errors import RunError, UserError
from hfgpt.model.configuration_gpt2 import model_rows
from hfgpt.model.modeling_gpt2 import CACHE_NAME, GPT2LMHeadModel
from hfgpt.model.pretrained import load_model, read_config

logger = logging.getLogger(__name__)

Pick = Callable[[torch.Tensor], int]  # the next id, from logits [V]
LARGEST_BATCH, MOST = 2**16, 2**31
# A smaller temperature is 0 in float32, and is taken for 0.
GREEDY_BELOW = torch.finfo(torch.float32).tiny
HALF_CHARACTER = "\ufffd"  # what the first bytes of a character are decoded as


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
    if not tokenizer.is_fast:
        raise UserError(f"{where}: has no tokenizer.json; save its tokenizer in that form")
    entries, rows = model_rows(tokenizer), model.config.vocab_size
    if entries > rows:
        sizes = f"the tokenizer has {entries} entries and the model {rows} rows"
        raise UserError(f"{where}: {sizes}; use the tokenizer that the model was trained with")
    if unused := sorted({*range(rows)}.difference(tokenizer.get_vocab().values())):
        model.generation_config.suppress_tokens = unused  # for the model's own `generate`; ours never takes these ids
    return model.to(device or default_device()).eval(), make_repeatable(tokenizer)


def generate(
    model: Any,
    tokenizer: Any,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    num_samples: int = 1,
    batch_size: int = 8,
    stream: Callable[[int, str], None] | None = None,
) -> Iterator[str]:
    """Yields `num_samples` continuations of each prompt, prompt after prompt, without the prompt and the separator.

    A continuation is what decoding prompt and new tokens together adds to the prompt. A sample ends at the separator
    (end-of-text), or after `max_new_tokens`. An empty prompt starts from the separator, of a character tokenizer from
    a line end; other tokenizers without a separator need a prompt. Beyond the model's positions each token is the
    model's answer to the last `n_positions` ids. `temperature` 0 takes the likeliest token each time. The same `seed`
    gives the same texts on one machine. Ids without a token (padded rows of the model) are never taken. `top_k` 0: all.

    `batch_size` samples are written at a time, padded at the left, each with random numbers of its own: others beside
    it change nothing but rounding. `stream(sample, piece)` is told each piece of text when it is there.

    Any causal language model of transformers serves. Raises UserError, at once, for values that cannot be and
    for characters that a character tokenizer lacks.
    """
    wrong = {
        f"max_new_tokens {max_new_tokens}: 1 to 2^31": not 1 <= max_new_tokens <= MOST,
        f"num_samples {num_samples}: 1 to 2^31": not 1 <= num_samples <= MOST,
        f"batch_size {batch_size}: 1 to {LARGEST_BATCH}": not 1 <= batch_size <= LARGEST_BATCH,
        f"temperature {temperature}: 0 (greedy) or above": not 0 <= temperature < float("inf"),
        f"top_k {top_k}: at least 1, or 0 for all": top_k is not None and top_k < 0,
        f"top_p {top_p}: above 0, up to 1, or left out": top_p is not None and not 0 < top_p <= 1,
        f"seed {seed}: -2^63 to 2^63 - 1, or left out": seed is not None and not -(2**63) <= seed < 2**63,
    }
    if any(wrong.values()):
        raise UserError(*(problem for problem, is_so in wrong.items() if is_so))
    limit, prompts = model.config.max_position_embeddings, [prompts] if isinstance(prompts, str) else prompts
    starts, contexts = [], []
    for prompt in prompts:
        ids = _prompt_ids(tokenizer, prompt)
        if len(ids) > limit:
            logger.warning("the prompt has %d tokens, the model sees the last %d", len(ids), limit)
        starts.append(ids[-limit:])
        contexts.append(ids if prompt else [])
    used = set(tokenizer.get_vocab().values())
    entries = max(used) + 1
    unused = torch.tensor(sorted({*range(entries)} - used), dtype=torch.long)
    picker = partial(_picker, entries, unused, temperature, top_k, top_p, seed)
    return _written(model, tokenizer, starts, contexts, num_samples, picker, max_new_tokens, limit, batch_size, stream)


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    encoder = _encoder(tokenizer) if tokenizer.is_fast else None
    if prompt == "" and tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    if prompt == "" and not (encoder and encoder.has_characters):
        raise UserError("prompt: is empty, and the tokenizer has no end-of-text token (eos) to begin with; give a text")
    text = prompt or "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"prompt {prompt!a}: not valid text at character {error.start}; use UTF-8") from error
    if encoder and (unknown := encoder.unknown_characters(text)):
        raise UserError(f"prompt: the tokenizer has no {', '.join(map(repr, unknown))}; leave these characters out")
    try:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the library's own type
        raise UserError(f"prompt {prompt!a}: cannot be encoded ({' '.join(str(error).split())})") from error
    if not ids:
        raise UserError(f"prompt {prompt!a}: the tokenizer makes no token of it; give another text")
    if encoder and (lost := encoder.losses(text, ids)[0]) and not {*lost} <= {"changed_documents"}:
        told = ", ".join(f"{count:,} {reason}" for reason, count in lost.items() if reason != "changed_documents")
        logger.warning("the prompt is not all represented by the tokenizer: %s", told)
    return ids


@functools.lru_cache(4)
def _encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


def _picker(
    entries: int,
    unused: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    number: int,
) -> Pick:
    """Takes ids below `entries` only, and none of `unused`; each sample `number` has random numbers of its own."""

    def of_tokens(logits_V: torch.Tensor) -> torch.Tensor:
        logits_V = logits_V[:entries]
        return logits_V.index_fill(0, unused.to(logits_V.device), -torch.inf) if len(unused) else logits_V

    if temperature < GREEDY_BELOW:
        return lambda logits_V: int(of_tokens(logits_V).argmax())
    # A generator on the CPU: the draws do not depend on the device, nor on torch's global random state.
    generator = torch.Generator()
    generator.manual_seed(generator.seed() if seed is None else step_seed(seed, 0, number))
    warpers: list[Any] = [TemperatureLogitsWarper(float(temperature))]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))

    def pick(logits_V: torch.Tensor) -> int:
        scores_1V = of_tokens(logits_V)[None].float().cpu()
        scores_1V = scores_1V - scores_1V.max()  # a low temperature then gives -inf, never inf
        for warper in warpers:
            scores_1V = warper(None, scores_1V)
        chances_1V = scores_1V.softmax(-1)
        if not chances_1V.isfinite().all():
            raise RunError("the model gives values that are not finite, from which nothing can be drawn")
        return int(torch.multinomial(chances_1V, 1, generator=generator))

    return pick


def _written(
    model: Any,
    tokenizer: Any,
    starts: list[list[int]],
    contexts: list[list[int]],
    num_samples: int,
    picker: Callable[[int], Pick],
    max_new_tokens: int,
    limit: int,
    batch_size: int,
    stream: Callable[[int, str], None] | None,
) -> Iterator[str]:
    """The texts that follow each of `starts`, `num_samples` of each, `batch_size` rows at a time; `contexts`: what is
    decoded before each of them.
    """
    bytes_apart = {i for token, i in tokenizer.get_vocab().items() if BYTE_TOKEN.fullmatch(token)}
    total = len(starts) * num_samples
    for first in range(0, total, batch_size):
        batch = range(first, min(first + batch_size, total))
        rows, picks = [starts[number // num_samples] for number in batch], list(map(picker, batch))
        given = [contexts[number // num_samples] for number in batch]
        new: list[list[int]] = [[] for _ in batch]
        before = [_decoded(tokenizer, ids) for ids in given]

        def text_of(row: int) -> str:
            text = _decoded(tokenizer, given[row] + new[row])  # noqa: B023 of this batch
            return _after(before[row], text)  # noqa: B023

        told = [""] * len(new)
        for row, token in continued(model, rows, picks, max_new_tokens, limit, tokenizer.eos_token_id):
            new[row].append(token)
            if stream is None or token in bytes_apart:  # of which the next may make another character
                continue
            text = text_of(row)
            if not text.endswith(HALF_CHARACTER) and text.startswith(told[row]):
                stream(first + row, text[len(told[row]) :])
                told[row] = text
        for row in range(len(new)):
            text = text_of(row)
            if stream is not None and text != told[row]:
                stream(first + row, _after(told[row], text))
            yield text


def _after(before: str, text: str) -> str:
    """What `text` has after the part that is `before`."""
    if text.startswith(before):
        return text[len(before) :]
    pairs = itertools.zip_longest(before, text)
    return text[next(i for i, (a, b) in enumerate(pairs) if a != b) :]


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@torch.no_grad()
def continued(
    model: Any, prompts: list[list[int]], picks: list[Pick], max_new_tokens: int, limit: int, eos: int | None
) -> Iterator[tuple[int, int]]:
    """Yields (row, next id) for rows of ids of any lengths, until each has met `eos` or `max_new_tokens`.

    Up to `limit` ids a row goes by a KV cache, beyond by its last `limit` ids.
    """
    rows, running = [list(ids) for ids in prompts], list(range(len(prompts)))
    cache, cached = DynamicCache(config=model.config), 0
    was_training = model.training
    model.eval()
    try:
        # A compiled model would be compiled again for each length.
        with torch.compiler.set_stance("force_eager"):
            for _ in range(max_new_tokens):
                if (longest := max(map(len, rows))) <= limit:  # ended rows go along, as the cache has them
                    at, part, options = rows, slice(cached, None), {CACHE_NAME: cache, "use_cache": True}
                    place, cached = {row: row for row in running}, longest
                else:
                    at, part, options = [rows[row][-limit:] for row in running], slice(0, None), {"use_cache": False}
                    place = {row: number for number, row in enumerate(running)}
                ids_BT, padding = _padded(at, part, model.device)
                logits_B1V = model(ids_BT, logits_to_keep=1, **options, **padding).logits
                tokens = {row: picks[row](logits_B1V[place[row], -1]) for row in running}
                for row, ids in enumerate(rows):
                    ids.append(tokens.get(row, ids[-1]))
                running = [row for row in running if tokens[row] != eos]
                yield from ((row, tokens[row]) for row in running)
                if not running:
                    break
    finally:
        model.train(was_training)


def _padded(rows: list[list[int]], part: slice, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows of ids (B, T) in one length, padded at the left, and what a model must know of the padding, if there is any.

    `part`: the columns that the model has not seen yet.
    """
    longest = max(map(len, rows))
    pads = [longest - len(ids) for ids in rows]
    ids_BT = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, rows, strict=True)], device=device)
    if not any(pads):
        return ids_BT[:, part], {}
    positions_BT = torch.arange(longest, device=device) - torch.tensor(pads, device=device)[:, None]
    positions = {"position_ids": positions_BT.clamp(min=0)[:, part]}
    return ids_BT[:, part], {"attention_mask": (positions_BT >= 0).long(), **positions}


def read_prompts(path: Path) -> list[str]:
    """One prompt for each line of a text file that is not empty, or row of a .jsonl file, whose field is `prompt`.

    Raises UserError that names the line which is not one.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"prompt_file={path}: not a regular file; for a pipe use --prompt -")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"prompt_file={path}: {reason}; give a text file of a prompt per line") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompts.append(line)
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not (isinstance(row, dict) and isinstance(row.get("prompt"), str)):
                raise UserError(f'prompt_file={path}: line {number} is not {{"prompt": "text"}}')
            prompts[-1] = row["prompt"]
    if not prompts:
        raise UserError(f"prompt_file={path}: holds no prompt; write one per line")
    return prompts
