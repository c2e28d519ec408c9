"""The model: GPT-2's architecture, parameter names and shapes, as a transformers `PreTrainedModel`.

It saves plain GPT-2 checkpoints (`model_type: gpt2`, `architectures: ["GPT2LMHeadModel"]`), which stock transformers
loads without this package, and it loads any GPT-2 folder.

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
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import DynamicCache, GenerationMixin, GPT2Config, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D

from hfgpt.errors import UserError
from hfgpt.model.attention_masks import attention_mask_BHTS
from hfgpt.model.configuration_gpt2 import model_config, model_rows, special_ids
from hfgpt.model.cpu_kernels import gelu_by_sigmoid, is_compiled_for_cpu, product_attention, products_are_faster
from hfgpt.model.head_loss import UNSCORED, head_loss

# transformers renamed the argument and output `past_key_values` to `cache`; use the name of the installed version.
_GENERATION_ARGS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _GENERATION_ARGS else "past_key_values"
PREFIX = "transformer."  # of all parameters except the head's


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.n_head, self.layer_idx, self.dropout = config.n_head, layer_idx, config.attn_pdrop
        self.scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1
        # Conv1D is a linear layer with an (in, out) matrix, as in OpenAI's file; nn.Linear's matrix is (out, in).
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.c_proj.is_residual = True
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x_BTC: Tensor, mask: Tensor | BlockMask | None, cache: Any) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.c_attn(x_BTC).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)  # (B, H, S, D)
        dropout = self.dropout if self.training else 0.0
        is_causal = mask is None and T > 1  # a single query, the newest, may attend to all keys
        if isinstance(mask, BlockMask):
            y_BHTD = flex_attention(q, k, v, block_mask=mask, scale=self.scale)
        elif is_causal and not dropout and is_compiled_for_cpu(q) and products_are_faster(q.dtype, T):
            y_BHTD = product_attention(q, k, v, self.scale)
        else:
            y_BHTD = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=self.scale)
        return self.resid_dropout(self.c_proj(y_BHTD.transpose(1, 2).reshape(B, T, C)))


class GELU(nn.Module):
    """GPT-2's `gelu_new`, 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3)."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu_by_sigmoid(x) if is_compiled_for_cpu(x) else F.gelu(x, approximate="tanh")


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

    def forward(self, x_BTC: Tensor, mask: Tensor | BlockMask | None, cache: Any = None) -> Tensor:
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

    def forward(self, x_BTC: Tensor, position_ids: Tensor, mask: Tensor | BlockMask | None, cache: Any) -> Tensor:
        x_BTC = self.drop(x_BTC + self.wpe(position_ids))
        for block in self.h:
            x_BTC = block(x_BTC, mask, cache=cache)
        return self.ln_f(x_BTC)


class GPT2LMHeadModel(PreTrainedModel, GenerationMixin):
    """GPT-2 with its language-model head. The name is GPT-2's because `save_pretrained` writes it into config.json.

    `head_chunk_size` (attribute, default None) limits how many tokens' logits exist at once in the loss.
    """

    config_class = GPT2Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch, so transformers' Trainer need not divide
    head_chunk_size: int | None = None
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    # Buffers of older GPT-2 files, which hold the causal mask. The dot keeps `attn.c_attn.bias` out of the pattern.
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
        """Initialise as GPT-2: matrices normal(0, 0.02), biases 0, norms 1.

        The 2 L projections that add to the residual stream are divided by sqrt(2 L), which keeps its variance.
        """
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, Conv1D | nn.Embedding | nn.Linear):
            summands = 2 * self.config.n_layer if getattr(module, "is_residual", False) else 1
            init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(summands))
        if isinstance(module, Conv1D | nn.LayerNorm):
            init.zeros_(module.bias)

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
            attention_mask: (B, S), 0 on padding, S = T + length of the cache; or that of `document_attention`.
            labels: (B, T), the input ids, as in transformers: position t is scored on labels[t + 1].
            shift_labels: (B, T), already shifted: position t is scored on shift_labels[t]. -100 is not scored.
            loss_per_row: the loss is (B,), the sum of each row's.
            num_items_in_batch: divides the summed loss; default: the number of scored targets.
            logits_to_keep: compute logits for this many last positions (0: all), or for these positions.

        With `shift_labels`, or with `labels` in training mode, returns only the loss, so that no logits leave the head;
        with `loss_per_row` (B,). Otherwise returns logits (B, T, V), a loss if there are labels, and a cache if used.

        Raises UserError if there are more tokens, including cached ones, than positions in the model.
        """
        # Not in the signature: transformers' Trainer requires each argument with "label" in its name.
        shift_labels, by_row = others.pop("shift_labels", None), others.pop("loss_per_row", False)
        for name, value in others.items():  # callers of stock GPT-2 pass output_attentions=False and the like
            if value is not None and value is not False:
                raise TypeError(f"forward() of this model has no {name}; leave it out, or use stock GPT-2")
        returns_loss_only = shift_labels is not None or (self.training and labels is not None)
        if labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=UNSCORED)[:, 1:]
        cache = cache if cache is not None else past_key_values
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and not self.training and cache is None and shift_labels is None:
            cache = DynamicCache(config=self.config)
        x_BTC = inputs_embeds if inputs_embeds is not None else self.transformer.wte(input_ids)
        past, T = cache.get_seq_length() if cache is not None else 0, x_BTC.shape[1]
        if position_ids is None:
            self._check_length(past + T)
            position_ids = torch.arange(past, past + T, device=x_BTC.device)[None]
        mask = attention_mask_BHTS(attention_mask, past, T, x_BTC.device)
        x_BTC = self.transformer(x_BTC, position_ids, mask, cache)

        loss = logits_BTV = None
        if shift_labels is not None:
            x_NC, target_N = x_BTC.flatten(0, 1), shift_labels.flatten().long()
            loss = head_loss(x_NC, self.lm_head.weight, target_N, self.head_chunk_size, len(x_BTC) if by_row else None)
            loss = loss / ((shift_labels != UNSCORED).sum() if num_items_in_batch is None else num_items_in_batch)
        if not returns_loss_only:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits_BTV = self.lm_head(x_BTC[:, keep])
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **{CACHE_NAME: cache})
        return output if return_dict is None or return_dict else output.to_tuple()

    def _check_length(self, tokens: int) -> None:
        if tokens > self.config.n_positions:
            fix = "shorten the input, or use hfgpt.evaluation.generate.generate, which continues from the last tokens"
            raise UserError(f"{tokens} tokens, but n_positions is {self.config.n_positions}; {fix}")

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` inspects the signature
    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._check_length(input_ids.shape[1])  # `generate` passes position_ids, for which forward does not check
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> Any:
        """Save as the base class does, but with the names in OpenAI's file, which lack the prefix "transformer.".

        Stock transformers reads both kinds of names, mlx-lm only these. With an untied head the prefix stays, because
        transformers 4 reads `lm_head.weight` only alongside prefixed names.
        """
        prefix = PREFIX if self.config.tie_word_embeddings else ""
        state = self.state_dict() if state_dict is None else state_dict
        # torch.compile adds the prefix "_orig_mod." in a block that is compiled separately.
        state = {name.replace("_orig_mod.", "").removeprefix(prefix): value for name, value in state.items()}
        return super().save_pretrained(save_directory, is_main_process, state, **options)


def to_parameter_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file to the model's parameter names; names in a file may lack the prefix."""
    return {name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name: value for name, value in tensors.items()}


def new_model(
    size: str | dict[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, weights: dict[str, Tensor] | None = None
) -> GPT2LMHeadModel:
    """Build a model of a named size, or from GPT2Config fields, with one row for each id of the tokenizer.

    The weights are `weights` (by parameter name), or else random with this `seed`.
    """
    torch.manual_seed(seed)
    ids = special_ids(tokenizer)
    del ids["unk_token_id"]  # GPT2Config has none
    # Only for generation: stock transformers warns if an input begins with the pad token in the model's config.
    pad, ids["pad_token_id"] = ids["pad_token_id"], tokenizer.pad_token_id
    model = GPT2LMHeadModel(model_config(size, vocab_size=model_rows(tokenizer), **ids))
    model.generation_config.pad_token_id = pad
    if (
        weights and model.device.type != "meta"
    ):  # a model on the meta device has only shapes; its weights are loaded later
        model.load_state_dict(weights)
    return model
