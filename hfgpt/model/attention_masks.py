"""Attention masks: causal, with padding, and within documents.

Shape suffixes: B batch, H heads, T query length, S key length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def document_attention(ids_BT: Tensor, separator_id: int, flex: bool = False) -> dict[str, Any]:
    """Return the `attention_mask` and `position_ids` with which tokens attend only within their own document.

    A document begins at its separator; tokens before the first separator of a row also form a document. The mask is
    boolean (B, 1, T, T), or with `flex` a BlockMask for flex attention, which is faster in a compiled model on a GPU,
    but has no dropout, and no backward pass on a CPU.
    """
    B, T = ids_BT.shape
    position_T = torch.arange(T, device=ids_BT.device)
    start_BT = torch.where(ids_BT == separator_id, position_T, 0).cummax(1).values
    if flex:

        def may_attend(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (start_BT[b, query] == start_BT[b, key]) & (key <= query)

        mask: Any = create_block_mask(may_attend, B, None, T, T, device=str(ids_BT.device))
    else:
        is_same = start_BT[:, None, :, None] == start_BT[:, None, None, :]
        mask = is_same & (position_T <= position_T[:, None])
    return {"attention_mask": mask, "position_ids": position_T - start_BT}


def attention_mask_BHTS(attention_mask: Any, past: int, T: int, device: torch.device) -> Any:
    """Return a boolean mask (True: may attend) that broadcasts to (B, H, T, S), or None for plain causal attention.

    `attention_mask`: (B, S) with 0 on padding, or a complete 4-D mask or BlockMask. `past`: tokens in the cache.
    """
    if isinstance(attention_mask, BlockMask) or (attention_mask is not None and attention_mask.dim() == 4):
        return attention_mask
    if attention_mask is None and (past == 0 or T == 1):
        return None
    key_S = torch.arange(past + T, device=device)
    query_T1 = key_S[past:, None]
    causal_TS = key_S <= query_T1
    if attention_mask is None:
        return causal_TS
    # A padded query attends to itself: the softmax of a fully masked row is NaN, which would spread to other rows.
    return causal_TS & (attention_mask[:, None, None, :].bool() | (key_S == query_T1))
