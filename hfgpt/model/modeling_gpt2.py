"""The model: GPT-2's architecture, parameter names and shapes, as a transformers `PreTrainedModel`.

What it saves is a GPT-2 checkpoint (`model_type: gpt2`, `architectures: ["GPT2LMHeadModel"]`), so stock
transformers loads it without this package, and it loads stock GPT-2 folders.

Shape suffixes: B batch, T query length, S key length, C width, H heads, D head size, V vocabulary, N tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, GPT2Config, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D

from hfgpt.errors import UserError
from hfgpt.model.configuration_gpt2 import model_config, model_rows, special_ids

# transformers renamed the cache argument and output from `past_key_values` to `cache`; we follow what is installed.
_GENERATION_ARGS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _GENERATION_ARGS else "past_key_values"
SOFTMAX_ROWS = 128  # tokens whose softmax exists at a time in an evaluation that is not compiled
HEAD_CHUNK_SIZE = 1024  # tokens whose logits exist at a time in the loss of a model that is not compiled
PREFIX = "transformer."  # of all parameters but the head's; our files had it too, and have it with an untied head
PRODUCT_ATTENTION_LENGTH = 512  # up to which `product_attention` is the faster one


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.n_head, self.layer_idx, self.dropout = config.n_head, layer_idx, config.attn_pdrop
        self.scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.c_proj.is_residual = True
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x_BTC: Tensor, mask: Tensor | BlockMask | None, cache: Any) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.c_attn(x_BTC).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        dropout, causal = self.dropout if self.training else 0.0, mask is None and T > 1
        if isinstance(mask, BlockMask):
            y_BHTD = flex_attention(q, k, v, block_mask=mask, scale=self.scale)
        elif causal and not dropout and _is_compiled_for_cpu(q) and products_are_faster(q.dtype, T):
            y_BHTD = product_attention(q, k, v, self.scale)
        else:
            y_BHTD = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=self.scale)
        return self.resid_dropout(self.c_proj(y_BHTD.transpose(1, 2).reshape(B, T, C)))


def _is_compiled_for_cpu(x: Tensor) -> bool:
    """Where torch's own kernels are slower than the code that its compiler makes of their formula."""
    return x.device.type == "cpu" and torch.compiler.is_compiling()


def products_are_faster(dtype: torch.dtype, T: int) -> bool:
    """Whether a compiled model on a CPU takes `product_attention`. In float32 both forms take the same time."""
    return dtype == torch.bfloat16 and T <= PRODUCT_ATTENTION_LENGTH


def product_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float) -> Tensor:
    """Causal attention (B, H, T, D) as two plain products, which keeps the probabilities (B, H, T, T).

    In bf16, compiled on a CPU, forward and backward take 0.2 of the time of torch's fused form at T = 64, 0.7 at 256,
    0.45 at 512, and 1.6 at 1,024.
    """
    T = q_BHTD.shape[-2]
    future = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
    scores = (q_BHTD * scale) @ k_BHTD.transpose(-1, -2)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1, dtype=torch.float32)
    return probabilities.to(v_BHTD.dtype) @ v_BHTD


class GELU(nn.Module):
    """GPT-2's `gelu_new`, 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3)."""

    def forward(self, x: Tensor) -> Tensor:
        if not _is_compiled_for_cpu(x):
            return F.gelu(x, approximate="tanh")
        # The same function is x sigmoid(2 u), and a vectorised exp is faster than a tanh.
        x32 = x.float()
        return (x32 * torch.sigmoid(math.sqrt(8 / math.pi) * (x32 + 0.044715 * x32**3))).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, inner)
        self.c_proj.is_residual = True
        name = config.activation_function
        self.act = GELU() if name in ("gelu_new", "gelu_pytorch_tanh") else ACT2FN[name]
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x_BTC))))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: GPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), mask, cache)
        return x_BTC + self.mlp(self.ln_2(x_BTC))


class Transformer(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, x_BTC: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        x_BTC = self.drop(x_BTC + self.wpe(positions))
        for block in self.h:
            x_BTC = block(x_BTC, mask, cache=cache)
        return self.ln_f(x_BTC)


def document_attention(ids_BT: Tensor, separator_id: int, flex: bool = False) -> dict[str, Any]:
    """`attention_mask` and `position_ids` with which each document, from its separator on, is alone in its block.

    The mask is (B, 1, T, T) boolean, or a BlockMask for flex attention: faster in a compiled model on a card, but
    without dropout, and without a backward pass on a CPU. What stands before the first separator is a document too.
    """
    B, T = ids_BT.shape
    place = torch.arange(T, device=ids_BT.device)
    start_BT = torch.where(ids_BT == separator_id, place, 0).cummax(1).values
    if flex:

        def may_attend(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (start_BT[b, query] == start_BT[b, key]) & (key <= query)

        mask: Any = create_block_mask(may_attend, B, None, T, T, device=str(ids_BT.device))
    else:
        mask = (start_BT[:, None, :, None] == start_BT[:, None, None, :]) & (place <= place[:, None])
    return {"attention_mask": mask, "position_ids": place - start_BT}


def attention_mask_BHTS(attention_mask: Any, past: int, T: int, device: torch.device) -> Any:
    """Boolean mask (True: may attend) that broadcasts to (B, H, T, S), or None for plain causal attention.

    `attention_mask` is (B, S) with 0 on padding, or a ready 4-D mask or BlockMask. A padded query sees itself alone: a
    row with nothing to see would be NaN, and would spread from there.
    """
    if isinstance(attention_mask, BlockMask) or (attention_mask is not None and attention_mask.dim() == 4):
        return attention_mask
    if attention_mask is None and (past == 0 or T == 1):
        return None
    key = torch.arange(past + T, device=device)
    query = key[past:, None]
    mask = key <= query
    if attention_mask is None:
        return mask
    return mask & (attention_mask[:, None, None, :].bool() | (key == query))


def head_loss(x_NC: Tensor, weight_VC: Tensor, target_N: Tensor, chunk_size: int | None = None) -> Tensor:
    """Sum over tokens of the negative log-likelihood in nats, float32 scalar; targets of -100 do not count.

    With `chunk_size` the logits of at most that many tokens exist at a time.
    """
    if chunk_size is None or x_NC.shape[0] <= chunk_size:
        return _plain_head_loss(x_NC, weight_VC, target_N)
    # torch's own function knows nothing of autocast: it would return a loss with bf16's three digits.
    autocast = torch.is_autocast_enabled(x_NC.device.type)
    if hasattr(F, "linear_cross_entropy") and not autocast and not _pads(weight_VC) and torch.is_grad_enabled():
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size, allow_retain_graph=True)
        return F.linear_cross_entropy(x_NC, weight_VC, target_N, reduction="sum", options=options)
    pairs = zip(x_NC.split(chunk_size), target_N.split(chunk_size), strict=True)
    losses = [checkpoint(_plain_head_loss, x, weight_VC, target, use_reentrant=False) for x, target in pairs]
    return torch.stack(losses).sum()


def _pads(weight_VC: Tensor) -> bool:
    """Tensor cores want a vocabulary that is a multiple of 64."""
    return weight_VC.is_cuda and weight_VC.shape[0] % 64 != 0


def _plain_head_loss(x_NC: Tensor, weight_VC: Tensor, target_N: Tensor) -> Tensor:
    V = weight_VC.shape[0]
    if _pads(weight_VC):
        weight_VC = F.pad(weight_VC, (0, 0, 0, -V % 64))
    logits_NV = F.linear(x_NC, weight_VC)[:, :V]
    if torch.is_grad_enabled():
        return F.cross_entropy(logits_NV.float(), target_N, reduction="sum")
    # Adds up in pairs: the sum above loses a digit over a thousand tokens, which an evaluation would show. The softmax
    # is of a few rows at a time, which a compiler does by itself: a second copy of the logits would be the most memory.
    rows = len(target_N) if torch.compiler.is_compiling() else SOFTMAX_ROWS
    losses_N = torch.empty(len(target_N), device=x_NC.device)
    for losses, logits, target in zip(losses_N.split(rows), logits_NV.split(rows), target_N.split(rows), strict=True):
        losses.copy_(F.cross_entropy(logits.float(), target, reduction="none"))
    return losses_N.sum()


class GPT2LMHeadModel(PreTrainedModel, GenerationMixin):
    """GPT-2 with its language-model head. The name is GPT-2's because `save_pretrained` writes it into config.json.

    `head_chunk_size` (attribute, default None) bounds the tokens whose logits exist at a time in the loss.
    """

    config_class = GPT2Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch, so transformers' Trainer need not divide
    head_chunk_size: int | None = None
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    # Causal-mask buffers that older GPT-2 files carry; the dot keeps `attn.c_attn.bias` out of the pattern.
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.bias$", r"\.attn\.masked_bias$"]  # noqa: RUF012

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.transformer.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.transformer.wte = value

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's initialisation: normal(0, 0.02); projections onto the residual stream / sqrt(2 L); norms 1, 0."""
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, Conv1D | nn.Embedding | nn.Linear):
            summands = 2 * self.config.n_layer if getattr(module, "is_residual", False) else 1
            init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(summands))
        if isinstance(module, Conv1D | nn.LayerNorm):
            init.zeros_(module.bias)

    def _check_length(self, tokens: int) -> None:
        if tokens > self.config.n_positions:
            way_out = "shorten the input, or use hfgpt.evaluation.generate.generate, which goes by the last tokens"
            raise UserError(f"{tokens} tokens, but n_positions is {self.config.n_positions}; {way_out}")

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> Any:
        """As the base's, with the parameter names of OpenAI's own file: `wte.weight`, not `transformer.wte.weight`.

        Stock transformers reads both, mlx-lm only these. A head of its own is in no such file, and transformers 4
        reads it only beside names with the prefix. A block that is compiled by itself keeps its names, without
        torch.compile's prefix.
        """
        prefix = PREFIX if self.config.tie_word_embeddings else ""
        state = self.state_dict() if state_dict is None else state_dict
        state = {name.replace("_orig_mod.", "").removeprefix(prefix): value for name, value in state.items()}
        return super().save_pretrained(save_directory, is_main_process, state, **options)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` looks at the signature
    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._check_length(input_ids.shape[1])  # `generate` states the positions, so forward cannot tell
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """
        Args:
            input_ids: (B, T) token ids; or `inputs_embeds` (B, T, C).
            attention_mask: (B, S), 0 on padding; S is T plus what the cache holds. Or as of `document_attention`.
            labels: (B, T) as in Hugging Face: the same ids as the input; position t is scored on labels[t + 1].
            shift_labels: (B, T), already shifted: position t is scored on shift_labels[t]. -100 is not scored.
            num_items_in_batch: what the summed loss is divided by; default: the number of scored targets.
            logits_to_keep: logits of the last so many positions only (0: all), or of these positions.

        Returns: the loss alone with `shift_labels`, and with `labels` in training mode, so that no logits leave the
        head; otherwise logits (B, T, V), the loss if there are labels, and the cache if it is used.

        Raises UserError for more tokens, the cache's included, than the model has positions.
        """
        # Not in the signature, where transformers' Trainer takes each name with "label" in it for required.
        shift_labels = others.pop("shift_labels", None)
        for name, value in others.items():  # callers of stock GPT-2 pass output_attentions=False and the like
            if value is not None and value is not False:
                raise TypeError(f"forward() of this model has no {name}; leave it out, or load stock GPT-2 for it")
        cache = cache if cache is not None else past_key_values
        x_BTC = inputs_embeds if inputs_embeds is not None else self.transformer.wte(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and not self.training and cache is None and labels is None and shift_labels is None:
            cache = DynamicCache(config=self.config)
        past, T = cache.get_seq_length() if cache is not None else 0, x_BTC.shape[1]
        if position_ids is None:
            self._check_length(past + T)
            position_ids = torch.arange(past, past + T, device=x_BTC.device)[None]
        mask = attention_mask_BHTS(attention_mask, past, T, x_BTC.device)
        x_BTC = self.transformer(x_BTC, position_ids, mask, cache)

        loss = logits = None
        loss_alone = shift_labels is not None or (self.training and labels is not None)
        if labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if shift_labels is not None:
            x_NC, target_N = x_BTC.flatten(0, 1), shift_labels.flatten().long()
            loss = head_loss(x_NC, self.lm_head.weight, target_N, self.head_chunk_size)
            loss = loss / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        if not loss_alone:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(x_BTC[:, keep])
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: cache})
        return output if return_dict is None or return_dict else output.to_tuple()


def own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file under the model's own parameter names, whether the file has their prefix or not."""
    return {name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name: value for name, value in tensors.items()}


def new_model(
    size: str | dict[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, weights: dict[str, Tensor] | None = None
) -> GPT2LMHeadModel:
    """A model by name or GPT2Config fields, with the rows that the tokenizer needs.

    Its weights are random by `seed`, or those given by parameter name.
    """
    torch.manual_seed(seed)
    ids = special_ids(tokenizer)
    del ids["unk_token_id"]  # a model knows none
    # Stock transformers takes an input that begins with the model's pad token for padded, and warns.
    pad, ids["pad_token_id"] = ids["pad_token_id"], tokenizer.pad_token_id
    model = GPT2LMHeadModel(model_config(size, vocab_size=model_rows(tokenizer), **ids))
    model.generation_config.pad_token_id = pad
    if weights and model.device.type != "meta":  # where it is a shape alone
        model.load_state_dict(weights)
    return model
