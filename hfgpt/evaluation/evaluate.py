"""`hfgpt evaluate`: a checkpoint, ours or any causal model's, on a text or a task, over the processes there are."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfgpt.checkpointing.training_state import STATE, read_state
from hfgpt.data.encoding import Document, Encoder, make_repeatable
from hfgpt.data.remote import model_files
from hfgpt.data.sources import open_source, read_documents
from hfgpt.distributed.compiler import choose_compile
from hfgpt.distributed.device import device_name, start_accelerator
from hfgpt.distributed.fsdp2 import take_sharding
from hfgpt.distributed.ranks import HostGroup
from hfgpt.errors import UserError
from hfgpt.evaluation.generate import load_checkpoint
from hfgpt.evaluation.hellaswag import hellaswag
from hfgpt.evaluation.loss import UNSCORED, figures, summed_nll, windows
from hfgpt.files import read_text_file
from hfgpt.model.configuration_gpt2 import model_rows
from hfgpt.model.modeling_gpt2 import HEAD_CHUNK_SIZE, document_attention

LONGEST_DEFAULT = 1024  # tokens of a window, for a model of more positions, unless stated
TIMEOUT_SECONDS = 1800.0  # for a process that does not answer


class SummedLoss(nn.Module):
    """A stock causal language model behind the arguments of ours: the loss is summed over targets, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **_: Any) -> SimpleNamespace:
        logits_BTV = self.model(input_ids=input_ids, use_cache=False).logits
        losses_BT = torch.empty(shift_labels.shape, device=logits_BTV.device)
        # One at a time, as the copies are large.
        for losses, row, labels in zip(losses_BT, logits_BTV, shift_labels.long(), strict=True):
            losses.copy_(F.cross_entropy(row.float(), labels, ignore_index=UNSCORED, reduction="none"))
        return SimpleNamespace(loss=losses_BT.sum())


@dataclass(frozen=True)
class Subject:
    """A checkpoint under examination, on each process: model in evaluation mode, tokenizer, folder."""

    model: Any
    tokenizer: Any
    folder: Path
    accelerator: Accelerator
    host: HostGroup

    @property
    def positions(self) -> int | None:
        """Tokens that the model can see, None where it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)


@dataclass(frozen=True)
class Text:
    """Documents as int32 `tokens`, in runs of `lengths`; UTF-8 bytes of what is scored (None: unknown); facts."""

    tokens: np.ndarray
    lengths: list[int]
    scored_bytes: int | None
    facts: dict[str, Any]


def load_any(checkpoint: str, device: torch.device) -> tuple[Any, Any, Path]:
    """Model (float32, evaluation mode), tokenizer and folder of a checkpoint: a folder, or a name on the Hub.

    Any causal language model of transformers that needs no code from elsewhere. Raises UserError for what is not one.
    """
    where, folder = f"checkpoint {checkpoint}", model_files(checkpoint, "checkpoint ")
    try:
        kind = json.loads(read_text_file(folder / "config.json"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = "gpt2"  # whose reader says what is wrong
    if kind == "gpt2":
        return *load_checkpoint(folder, device), folder
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **options)
    except Exception as error:  # each broken file raises its own type
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: cannot be read ({reason}); give a causal language model's folder") from error
    if not tokenizer.is_fast:
        raise UserError(f"{where}: has no tokenizer.json; save its tokenizer in that form")
    rows, needed = len(model.get_input_embeddings().weight), model_rows(tokenizer)
    if needed > rows:
        sizes = f"the tokenizer has {needed:,} entries and the model {rows:,} rows"
        raise UserError(f"{where}: {sizes}; use the tokenizer that the model was trained with")
    return model.to(device).eval(), make_repeatable(tokenizer), folder


def evaluate_checkpoint(
    checkpoint: str, measure: Callable[[Subject], dict[str, Any]], mixed_precision: str = "no"
) -> dict[str, Any]:
    """What `measure` finds of a checkpoint on each of the processes that were launched, and facts about these."""
    take_sharding()  # each process holds the whole model here
    host = HostGroup(TIMEOUT_SECONDS)
    with host.contact():
        host.meet()
        accelerator, precision = start_accelerator(mixed_precision, TIMEOUT_SECONDS)
        host.join()
        subject = Subject(*load_any(checkpoint, accelerator.device), accelerator, host)
        began = time.perf_counter()
        found = measure(subject)
        seconds = time.perf_counter() - began
        host.leave()
        accelerator.end_training()
    return {
        "checkpoint": checkpoint,
        **found,
        "seconds": found.get("seconds", seconds),
        "device": device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "precision": "float32" if precision.name == "no" else precision.name,
    }


def score_text(
    subject: Subject,
    source: dict[str, Any],
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    by_document: bool | None = None,
    eval_tokens: int | None = None,
    batch_size: int = 8,
    torch_compile: bool = False,
) -> dict[str, Any]:
    """`loss` (nats per token), `perplexity`, `bits_per_byte` of the text of `open_source(**source)`, and the counts.

    Windows as in `evaluation.loss.windows`; documents are joined as in `read_text`. `sequence_length`, and whether
    documents see each other: default as in training, where the folder says, else the model's positions, up to 1,024.
    Equal for any batch size, number of processes and `torch_compile`, up to rounding. Rows of the vocabulary that stand
    for no token take part, as they do elsewhere; `vocabulary` says so.
    """
    model, host, accelerator = subject.model, subject.host, subject.accelerator
    trained = _trained_with(subject.folder)
    usual = trained.get("sequence_length") or min(subject.positions or LONGEST_DEFAULT, LONGEST_DEFAULT)
    length = sequence_length or usual
    masked = by_document is None and bool(trained.get("document_masking"))
    wrong = {
        f"sequence_length={length}: is above the model's {subject.positions} positions; shorten it": subject.positions
        and length > subject.positions,
        f"stride={stride}: is above sequence_length={length}, and would pass tokens over; shorten it": stride
        and stride > length,
    }
    if any(wrong.values()):
        raise UserError(*(problem for problem, is_so in wrong.items() if is_so))
    text = host.from_main(partial(read_text, subject.tokenizer, source, eval_tokens, by_document, bool(trained)))
    parts = windows(text.lengths, length, stride)
    own = hasattr(model, "head_chunk_size")
    scored: Any = model if own else SummedLoss(model)
    if choose_compile(torch_compile, accelerator.device, len(parts)).enabled:
        scored.compile(dynamic=False)
    elif own:
        model.head_chunk_size = HEAD_CHUNK_SIZE
    width = int((parts[:, 2] - parts[:, 0]).max())  # no longer than the longest run
    options: dict[str, Any] = {"sequence_length": width, "batch_size": batch_size}
    if masked:
        options["attention"] = partial(document_attention, separator_id=subject.tokenizer.eos_token_id)
    nll = summed_nll(scored, text.tokens, parts, accelerator=accelerator, **options)
    rows, entries = model.config.vocab_size, len(subject.tokenizer)
    padded = f", and {rows - entries:,} rows without a token, which take part" if rows > entries else ""
    counted = int((parts[:, 2] - parts[:, 1]).sum())
    return {
        **figures(nll or 0.0, counted, text.scored_bytes),
        **text.facts,
        **({"joined": f"{text.facts['joined']}, each seeing itself alone"} if masked else {}),
        "scored_tokens": counted,
        "scored_bytes": text.scored_bytes,
        "sequence_length": length,
        "stride": stride or length,
        "windows": len(parts),
        "vocabulary": f"{entries:,} entries{padded}",
        "batch_size": batch_size,
        "torch_compile": torch_compile,
    }


def score_task(
    subject: Subject, task: str, *, source: str | None = None, limit: int | None = None, batch_size: int = 8
) -> dict[str, Any]:
    """What `hfgpt.evaluation.hellaswag.hellaswag` returns: `task` is hellaswag."""
    if task != "hellaswag":
        raise UserError(f"task={task}: not known; use hellaswag")
    processes: dict[str, Any] = {"accelerator": subject.accelerator, "host": subject.host}
    return hellaswag(subject.model, subject.tokenizer, source, batch_size=batch_size, limit=limit, **processes)


def _trained_with(folder: Path) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint; empty where the folder does not say."""
    return read_state(folder, "trainer_state")["config"] if (folder / STATE).is_dir() else {}


def read_text(
    tokenizer: Any, source: dict[str, Any], eval_tokens: int | None, by_document: bool | None, as_trained: bool = False
) -> Text:
    """The documents of `open_source(**source)` as tokens, each with the start token before it, up to `eval_tokens` to
    score.

    The start token is the tokenizer's bos, else its eos. Without either, the first token of all has nothing before it,
    and is not scored. Where the two are one, as in GPT-2, documents follow each other as in training, and the start
    token is scored where another document is before it. Else, or with `by_document`, each document is on its own.
    `as_trained`: for a model of ours, whose documents followed each other, whatever its bos.
    """
    encoder, opened, skipped = Encoder(tokenizer), open_source(**source), Counter[str]()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    own_start = bos is not None and not as_trained
    start = encoder.separator_id = bos if own_start else eos
    alone = (own_start and bos != eos) if by_document is None else by_document
    if alone or start is not None:
        encoder.newline_id = None  # nothing to be joined by it
    read: list[Document] = []
    targets, count, lost = 0, 0, Counter[str]()
    for text in read_documents(opened, opened.units, skipped):
        [document] = encoder.documents([text])
        lost, count = lost + document.lost, count + 1
        if not len(document.ids):
            continue  # of which the tokenizer represents nothing
        read.append(document)
        targets += len(document.ids) - alone
        if eval_tokens is not None and targets - document.joints - (not alone) >= eval_tokens:
            break
    lengths = [len(document.ids) for document in read] if alone else [len(encoder.joined(read))]
    tokens = encoder.joined(read)
    if eval_tokens is not None and (over := len(tokens) - len(lengths) - eval_tokens) > 0:
        tokens, lengths[-1] = tokens[:-over], lengths[-1] - over
    is_scored = np.delete(np.arange(len(tokens)), np.cumsum([0, *lengths[:-1]])) if len(tokens) else tokens
    if not len(is_scored):
        raise UserError(f"dataset={source['dataset']}: no token to score; give more text")
    token_bytes = encoder.byte_lengths(read)
    commit = opened.fingerprint.get("commit")
    on_hub = {f"dataset_{key}": source.get(key) for key in ("name", "split")} | {"dataset_revision": commit}
    facts = {
        "dataset": source["dataset"],
        **(on_hub if commit else {}),
        "text": opened.description,
        "documents": count,
        "left_out": dict(skipped),
        **({"not_represented": dict(lost)} if lost else {}),
        **({"bits_per_byte_is_null": why} if (why := encoder.why_no_bytes(read)) else {}),
        "joined": "each document on its own" if alone else "documents one after another, as in training",
        "start_token": _told_start(tokenizer, start, alone, encoder),
    }
    return Text(tokens, lengths, None if token_bytes is None else int(token_bytes[is_scored].sum()), facts)


def _told_start(tokenizer: Any, start: int | None, alone: bool, encoder: Encoder) -> str:
    if start is None:
        if alone:
            return "none; the first token of each document is not scored"
        return f"none; the first token of the text is not scored; {encoder.rule()}"
    scored = "never scored" if alone else "scored except the first"
    token = tokenizer.bos_token if start == tokenizer.bos_token_id else tokenizer.eos_token
    return f"{token} ({start}) before each document; {scored}"
