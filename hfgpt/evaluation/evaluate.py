"""`hfgpt evaluate`: score a checkpoint, ours or any causal model's, on a text or a task, on all processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from hfgpt.checkpointing.read_training_state import STATE, read_state
from hfgpt.distributed.compiler import choose_compile
from hfgpt.distributed.device import device_name, start_accelerator
from hfgpt.distributed.fsdp2 import take_fsdp_request
from hfgpt.distributed.ranks import Ranks
from hfgpt.errors import UserError
from hfgpt.evaluation.hellaswag import hellaswag
from hfgpt.evaluation.loading import load_any_checkpoint
from hfgpt.evaluation.loss import loss_metrics, sum_nll, windows
from hfgpt.evaluation.text import read_text
from hfgpt.model.attention_masks import document_attention
from hfgpt.model.head_loss import HEAD_CHUNK_SIZE, UNSCORED

LONGEST_DEFAULT = 1024  # default tokens per window, for a model with more positions
TIMEOUT_SECONDS = 1800.0  # for an unresponsive process


class SummedLoss(nn.Module):
    """Wraps a stock causal language model to give the same loss as ours: summed over the targets, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **_: Any) -> SimpleNamespace:
        logits_BTV = self.model(input_ids=input_ids, use_cache=False).logits
        losses_BT = torch.empty(shift_labels.shape, device=logits_BTV.device)
        # Row by row, because the float32 copies are large.
        for losses_T, logits_TV, labels_T in zip(losses_BT, logits_BTV, shift_labels.long(), strict=True):
            losses_T.copy_(F.cross_entropy(logits_TV.float(), labels_T, ignore_index=UNSCORED, reduction="none"))
        return SimpleNamespace(loss=losses_BT.sum())


@dataclass(frozen=True)
class Subject:
    """The checkpoint being evaluated, on each process; the model is in evaluation mode."""

    model: Any
    tokenizer: Any
    folder: Path
    accelerator: Accelerator
    ranks: Ranks


def evaluate_checkpoint(
    checkpoint: str, measure: Callable[[Subject], dict[str, Any]], mixed_precision: str = "no"
) -> dict[str, Any]:
    """Return the result of `measure` over all launched processes, with checkpoint, time, device and precision."""
    take_fsdp_request()  # an FSDP configuration has no effect here: each process holds the whole model
    ranks = Ranks(TIMEOUT_SECONDS)
    with ranks.share_failures():
        ranks.rendezvous()
        accelerator, precision = start_accelerator(mixed_precision, TIMEOUT_SECONDS)
        ranks.connect()
        subject = Subject(*load_any_checkpoint(checkpoint, accelerator.device), accelerator, ranks)
        began = time.perf_counter()
        found = measure(subject)
        seconds = time.perf_counter() - began
        ranks.disconnect()
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
    """Return `loss` (nats per token), `perplexity` and `bits_per_byte` of a text, with counts and settings.

    source: arguments of `open_source`; documents are joined as `read_text` describes, and divided into windows as
    `evaluation.loss.windows` does. `sequence_length`, and whether documents attend to each other, default to the
    training settings if the folder has them, else to the model's positions (at most 1,024) and attention across
    documents.

    Batch size, number of processes and `torch_compile` change the result only by rounding. Rows of the vocabulary
    without a token take part in the softmax, as in other programs; `vocabulary` says how many there are.
    """
    model, ranks, accelerator = subject.model, subject.ranks, subject.accelerator
    trained = _training_settings(subject.folder)
    length = _check_length(model, trained, sequence_length, stride)
    is_masked = by_document is None and bool(trained.get("document_masking"))
    text = ranks.from_main(partial(read_text, subject.tokenizer, source, eval_tokens, by_document, bool(trained)))
    parts = windows(text.lengths, length, stride)
    is_ours = hasattr(model, "head_chunk_size")
    scored: Any = model if is_ours else SummedLoss(model)
    if choose_compile(torch_compile, accelerator.device, len(parts)).enabled:
        scored.compile(dynamic=False)
    elif is_ours:
        model.head_chunk_size = HEAD_CHUNK_SIZE
    options: dict[str, Any] = {"accelerator": accelerator, "batch_size": batch_size}
    options["sequence_length"] = int((parts[:, 2] - parts[:, 0]).max())  # short texts need no padding up to `length`
    if is_masked:
        options["attention"] = partial(document_attention, separator_id=subject.tokenizer.eos_token_id)
    nll = sum_nll(scored, text.tokens, parts, **options)
    rows, entries = model.config.vocab_size, len(subject.tokenizer)
    padded = f", and {rows - entries:,} rows without a token, which take part" if rows > entries else ""
    scored_tokens = int((parts[:, 2] - parts[:, 1]).sum())
    return {
        **loss_metrics(nll or 0.0, scored_tokens, text.scored_bytes),
        **text.facts,
        **({"joined": f"{text.facts['joined']}, each attending only to itself"} if is_masked else {}),
        "scored_tokens": scored_tokens,
        "scored_bytes": text.scored_bytes,
        "sequence_length": length,
        "stride": stride or length,
        "windows": len(parts),
        "vocabulary": f"{entries:,} entries{padded}",
        "batch_size": batch_size,
        "torch_compile": torch_compile,
    }


def score_hellaswag(
    subject: Subject, *, source: str | None = None, limit: int | None = None, batch_size: int = 8
) -> dict[str, Any]:
    """Return the result of `hfgpt.evaluation.hellaswag.hellaswag`."""
    processes: dict[str, Any] = {"accelerator": subject.accelerator, "ranks": subject.ranks}
    return hellaswag(subject.model, subject.tokenizer, source, batch_size=batch_size, limit=limit, **processes)


def _training_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint; empty for a folder without training state."""
    return read_state(folder, "trainer_state")["config"] if (folder / STATE).is_dir() else {}


def _check_length(model: Any, trained: dict[str, Any], stated: int | None, stride: int | None) -> int:
    """Return the window length. Raises UserError if it exceeds the model's positions, or if the stride exceeds it."""
    positions = getattr(model.config, "max_position_embeddings", None)  # None: the model does not state it
    length = stated or trained.get("sequence_length") or min(positions or LONGEST_DEFAULT, LONGEST_DEFAULT)
    problems = []
    if positions and length > positions:
        problems.append(f"sequence_length={length}: is above the model's {positions} positions; shorten it")
    if stride and stride > length:
        problems.append(f"stride={stride}: is above sequence_length={length}, which would skip tokens; shorten it")
    if problems:
        raise UserError(*problems)
    return length
