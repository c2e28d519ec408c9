"""Perplexity of a causal language model from the negative log-likelihood of each token, as an `evaluate` module.

README.md in this folder shows how to use it.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
import torch
import torch.nn.functional as F

from hfgpt.errors import UserError
from hfgpt.evaluation.loss import loss_metrics
from hfgpt.model.head_loss import UNSCORED

DESCRIPTION = """
Loss, perplexity and bits per byte over all scored tokens: sums first, one division at the end. Perplexity is exp(sum of
the tokens' negative log-likelihoods / number of tokens), so it does not depend on how the tokens are divided into rows,
batches and processes.
"""

INPUTS = """
Args:
    predictions: (rows, tokens of the row) negative log-likelihood of each token in nats; rows may differ in length.
    references: (rows, tokens of the row) the tokens' labels. Tokens with -100 here or in predictions are not scored.
    scored_bytes: UTF-8 bytes of the text of the scored tokens, over all rows; for `bits_per_byte`.

Returns:
    loss: nats per token. perplexity: exp(loss), infinity if it overflows. tokens: the number scored.
    bits_per_byte: None without `scored_bytes`.

Raises UserError, a ValueError, for mismatched rows, if there is nothing to score, and for negative or NaN predictions.
"""


def token_nll(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return (B, T) float32: the negative log-likelihood in nats of each label, from the logits (B, T, V) before it.

    Pass it to the Trainer as `preprocess_logits_for_metrics`, which then keeps one number per token instead of logits.
    It is -100 for the first label of a row, which no position predicts, and where the label is -100.
    """
    logits_BTV = logits[0] if isinstance(logits, tuple) else logits  # a model may return more than logits
    nll_BT = torch.full(labels.shape, float(UNSCORED), device=labels.device)
    for nll_T, logits_TV, labels_T in zip(
        nll_BT, logits_BTV, labels, strict=True
    ):  # row by row, to limit the memory for float32
        target_T = labels_T[1:]
        is_scored_T = target_T != UNSCORED
        nll = F.cross_entropy(logits_TV[:-1].float(), target_T.long(), reduction="none", ignore_index=UNSCORED)
        nll_T[1:][is_scored_T] = nll[is_scored_T]
    return nll_BT


class Perplexity(evaluate.Metric):
    """`compute` returns loss, perplexity, tokens and bits_per_byte; `token_nll` is for the Trainer."""

    token_nll = staticmethod(token_nll)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("float64")),
                    "references": datasets.Sequence(datasets.Value("int64")),
                }
            ),
        )

    def _compute(
        self, predictions: list[list[float]], references: list[list[int]], scored_bytes: int | None = None
    ) -> dict[str, Any]:
        if scored_bytes is not None and not 0 < scored_bytes < float("inf"):
            raise UserError(f"scored_bytes={scored_bytes}: at least 1, or left out")
        nll_sum, tokens = 0.0, 0
        for row, (nlls, labels) in enumerate(zip(predictions, references, strict=True)):
            scored = _scored(row, np.asarray(nlls, np.float64), np.asarray(labels, np.int64))
            nll_sum += float(scored.sum())
            tokens += len(scored)
        if not tokens:
            raise UserError(f"no token is scored: in {len(references)} rows every label or prediction is {UNSCORED}")
        return {**loss_metrics(nll_sum, tokens, scored_bytes), "tokens": tokens}


def _scored(row: int, nll_T: np.ndarray, labels_T: np.ndarray) -> np.ndarray:
    """Return the scored values of a row, float64. Raises UserError if one is not a negative log-likelihood."""
    if nll_T.shape != labels_T.shape:
        raise UserError(f"row {row}: {len(nll_T)} predictions and {len(labels_T)} references; give one for each token")
    scored = nll_T[(labels_T != UNSCORED) & (nll_T != UNSCORED)]
    if np.isnan(scored).any():
        raise UserError(f"row {row}: a prediction is NaN; find the step at which the model's weights became NaN")
    # Rounding can leave a likelihood slightly above 1.
    if len(scored) and scored.min() < -1e-3:
        problem = f"row {row}: a prediction is {scored.min():g}, but a negative log-likelihood is never below 0"
        raise UserError(f"{problem}; give -log p of each label, as token_nll does, not log p or logits")
    return scored
