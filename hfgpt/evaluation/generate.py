"""Generate text: with a KV cache up to the model's positions, and from the last tokens beyond them."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hfgpt.data.encoding import Encoder
from hfgpt.data.tokenizer_model import BYTE_TOKEN
from hfgpt.distributed.device import step_seed
from hfgpt.errors import RunError, UserError, one_line
from hfgpt.evaluation.loss import evaluation_mode
from hfgpt.model.modeling_gpt2 import CACHE_NAME

logger = logging.getLogger(__name__)

Pick = Callable[[Tensor], int]  # returns the next id, from logits (V,)
Stream = Callable[[int, str], None]  # called with the number of a sample and its next piece of text
LARGEST_BATCH, MOST = 2**16, 2**31
GREEDY_BELOW = torch.finfo(torch.float32).tiny  # a lower temperature is 0 in float32
HALF_CHARACTER = "\ufffd"  # what an incomplete character decodes to


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
    stream: Stream | None = None,
) -> Iterator[str]:
    """Yield `num_samples` continuations of each prompt, prompt by prompt, without the prompt and the separator.

    A sample ends at the separator (end-of-text) or after `max_new_tokens`. Beyond the model's positions, each token is
    predicted from the last `n_positions` ids. An empty prompt starts from the separator, or from a line end with a
    character tokenizer; other tokenizers without a separator need a prompt. Ids without a token are never sampled.

    temperature: 0 picks the most likely token. top_k: 0 samples from all. seed: the same seed gives the same texts on
    the same machine. batch_size: samples per forward pass, padded on the left; each has its own random numbers, so the
    others change it only by rounding.

    The model may be any causal language model in transformers. Raises UserError, immediately, for impossible values and
    for characters that a character tokenizer lacks.
    """
    _check_values(max_new_tokens, num_samples, batch_size, temperature, top_k, top_p, seed)
    limit, prompts = model.config.max_position_embeddings, [prompts] if isinstance(prompts, str) else prompts
    prompt_ids = [_encode_prompt(tokenizer, prompt) for prompt in prompts]
    for ids in prompt_ids:
        if len(ids) > limit:
            logger.warning("the prompt has %d tokens; the model sees only the last %d", len(ids), limit)
    used = tokenizer.get_vocab().values()
    unused = torch.tensor(sorted({*range(max(used) + 1)}.difference(used)), dtype=torch.long)
    byte_ids = {i for token, i in tokenizer.get_vocab().items() if BYTE_TOKEN.fullmatch(token)}

    def make_sample(number: int) -> _Sample:
        prompt = number // num_samples
        pick = make_pick(max(used) + 1, unused, temperature, top_k, top_p, seed, number)
        context = prompt_ids[prompt] if prompts[prompt] else []  # the start token of an empty prompt is not decoded
        return _Sample(number, tokenizer, prompt_ids[prompt][-limit:], context, pick, byte_ids, stream)

    def write() -> Iterator[str]:
        total = len(prompt_ids) * num_samples
        for first in range(0, total, batch_size):
            samples = [make_sample(number) for number in range(first, min(first + batch_size, total))]
            starts, picks = [sample.start for sample in samples], [sample.pick for sample in samples]
            for row, token in generate_ids(model, starts, picks, max_new_tokens, limit, tokenizer.eos_token_id):
                samples[row].add(token)
            yield from (sample.finish() for sample in samples)

    return write()


def _check_values(
    max_new_tokens: int,
    num_samples: int,
    batch_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> None:
    is_possible = {
        f"max_new_tokens {max_new_tokens}: 1 to 2^31": 1 <= max_new_tokens <= MOST,
        f"num_samples {num_samples}: 1 to 2^31": 1 <= num_samples <= MOST,
        f"batch_size {batch_size}: 1 to {LARGEST_BATCH}": 1 <= batch_size <= LARGEST_BATCH,
        f"temperature {temperature}: 0 (greedy) or above": 0 <= temperature < float("inf"),
        f"top_k {top_k}: at least 1, or 0 for all": top_k is None or top_k >= 0,
        f"top_p {top_p}: above 0, up to 1, or left out": top_p is None or 0 < top_p <= 1,
        f"seed {seed}: -2^63 to 2^63 - 1, or left out": seed is None or -(2**63) <= seed < 2**63,
    }
    if problems := [problem for problem, is_so in is_possible.items() if not is_so]:
        raise UserError(*problems)


class _Sample:
    """One continuation while it is generated. Its text is what decoding the new ids adds to the decoded context."""

    def __init__(
        self,
        number: int,
        tokenizer: Any,
        start: list[int],
        context: list[int],
        pick: Pick,
        byte_ids: set[int],
        stream: Stream | None,
    ) -> None:
        self.number, self.tokenizer, self.start, self.pick = number, tokenizer, start, pick
        self.byte_ids, self.stream = byte_ids, stream
        self.ids = list(context)
        self.before, self.streamed = self._decode(), ""

    def add(self, token: int) -> None:
        self.ids.append(token)
        if self.stream is None or token in self.byte_ids:  # the next byte may complete the character
            return
        text = _added(self.before, self._decode())
        if not text.endswith(HALF_CHARACTER) and text.startswith(self.streamed):
            self.stream(self.number, text[len(self.streamed) :])
            self.streamed = text

    def finish(self) -> str:
        text = _added(self.before, self._decode())
        if self.stream is not None and text != self.streamed:
            self.stream(self.number, _added(self.streamed, text))
        return text

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, clean_up_tokenization_spaces=False)


def _added(before: str, text: str) -> str:
    """Return the part of `text` after the prefix that it shares with `before`."""
    if text.startswith(before):
        return text[len(before) :]
    pairs = itertools.zip_longest(before, text)
    return text[next(i for i, (a, b) in enumerate(pairs) if a != b) :]


def _encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    encoder = _encoder(tokenizer) if tokenizer.is_fast else None
    if prompt == "" and tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    if prompt == "" and not (encoder and encoder.has_characters):
        raise UserError(
            "prompt: is empty, and the tokenizer has no end-of-text token (eos) to start from; give a prompt"
        )
    text = prompt or "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"prompt {prompt!a}: not valid text at character {error.start}; use UTF-8") from error
    if encoder and (unknown := encoder.unknown_characters(text)):
        raise UserError(f"prompt: the tokenizer has no {', '.join(map(repr, unknown))}; leave these characters out")
    try:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the library raises no specific type
        raise UserError(f"prompt {prompt!a}: cannot be encoded ({one_line(error)})") from error
    if not ids:
        raise UserError(f"prompt {prompt!a}: it has no tokens with this tokenizer; give another prompt")
    lost = encoder.losses(text, ids)[0] if encoder else {}
    if parts := [f"{count:,} {reason}" for reason, count in lost.items() if reason != "changed_documents"]:
        logger.warning("the tokenizer does not represent the whole prompt: %s", ", ".join(parts))
    return ids


@functools.lru_cache(4)
def _encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


def make_pick(
    entries: int,
    unused: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    number: int,
) -> Pick:
    """Return a function that samples an id below `entries`, except `unused`, with random numbers of sample `number`."""

    def of_tokens(logits_V: Tensor) -> Tensor:
        return logits_V[:entries].index_fill(0, unused.to(logits_V.device), -torch.inf)

    if temperature < GREEDY_BELOW:
        return lambda logits_V: int(of_tokens(logits_V).argmax())
    # A generator on the CPU, so that the draws depend neither on the device nor on torch's global random state.
    generator = torch.Generator()
    generator.manual_seed(generator.seed() if seed is None else step_seed(seed, 0, number))
    warpers: list[Any] = [TemperatureLogitsWarper(float(temperature))]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))

    def pick(logits_V: Tensor) -> int:
        scores_1V = of_tokens(logits_V)[None].float().cpu()
        scores_1V = scores_1V - scores_1V.max()  # so that a low temperature gives -inf, never inf
        for warper in warpers:
            scores_1V = warper(None, scores_1V)
        probabilities_1V = scores_1V.softmax(-1)
        if not probabilities_1V.isfinite().all():
            raise RunError("the model's logits are not finite, so no token can be sampled")
        return int(torch.multinomial(probabilities_1V, 1, generator=generator))

    return pick


@torch.no_grad()
def generate_ids(
    model: Any, prompts: list[list[int]], picks: list[Pick], max_new_tokens: int, limit: int, eos: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (row, next id) for rows of ids of any length, until each ends with `eos` or after `max_new_tokens`.

    Rows of up to `limit` ids use a KV cache; beyond that, the model recomputes the last `limit` ids for each token.
    """
    rows, running = [list(ids) for ids in prompts], list(range(len(prompts)))
    cache, cached = DynamicCache(config=model.config), 0
    # Eager: a compiled model would be compiled again for each length.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        for _ in range(max_new_tokens):
            if (longest := max(map(len, rows))) <= limit:  # including finished rows, which are in the cache
                batch, columns, options = rows, slice(cached, None), {CACHE_NAME: cache, "use_cache": True}
                place, cached = {row: row for row in running}, longest
            else:
                batch, columns, options = [rows[r][-limit:] for r in running], slice(None), {"use_cache": False}
                place = {row: number for number, row in enumerate(running)}
            ids_BT, padding = _pad(batch, columns, model.device)
            logits_B1V = model(ids_BT, logits_to_keep=1, **options, **padding).logits
            tokens = {row: picks[row](logits_B1V[place[row], -1]) for row in running}
            for row, ids in enumerate(rows):
                ids.append(tokens.get(row, ids[-1]))
            running = [row for row in running if tokens[row] != eos]
            yield from ((row, tokens[row]) for row in running)
            if not running:
                break


def _pad(rows: list[list[int]], columns: slice, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the last `columns` ids (B, T), padded on the left, and the model arguments that describe the padding."""
    longest = max(map(len, rows))
    pads = [longest - len(ids) for ids in rows]
    ids_BT = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, rows, strict=True)], device=device)
    if not any(pads):
        return ids_BT[:, columns], {}
    positions_BT = torch.arange(longest, device=device) - torch.tensor(pads, device=device)[:, None]
    position_ids = positions_BT.clamp(min=0)[:, columns]
    return ids_BT[:, columns], {"attention_mask": (positions_BT >= 0).long(), "position_ids": position_ids}


def read_prompts(path: Path) -> list[str]:
    """Read a file of prompts: one per non-empty line; from a .jsonl file, the field `prompt` of each row.

    Raises UserError, naming the line, if a row has no prompt.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"prompt_file={path}: not a regular file; for a pipe use --prompt -")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"prompt_file={path}: {reason}; give a text file with a prompt per line") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"prompt_file={path}: has no prompt; write one per line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, RecursionError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            problem = f'line {number} has no text in the field "prompt"'
            raise UserError(f'prompt_file={path}: {problem}; write it as {{"prompt": "text"}}')
        prompts.append(prompt)
    return prompts
