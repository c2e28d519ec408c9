"""One optimizer update: the model, its optimizer, and `training_step`, one visible block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from hfgpt.config import Batch, PretrainConfig
from hfgpt.distributed.device import CompileChoice, Precision, seed_random_numbers, step_seed, with_code_mended
from hfgpt.distributed.ranks import HostGroup, shared_model
from hfgpt.model.modeling_gpt2 import HEAD_CHUNK_SIZE, document_attention, new_model
from hfgpt.training.batch_size import MemoryWatch
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.non_finite import StepResult
from hfgpt.training.optimizer import build_optimizer


class TrainingStep:
    """A model, its optimizer, and how they take a step on the processes there are."""

    config: PretrainConfig
    host: HostGroup
    accelerator: Accelerator
    precision: Precision
    compile: CompileChoice
    sharded: bool  # whether the processes share the parameters
    batch: Batch  # its micro-batch becomes smaller where memory runs out
    updating = False  # from the optimizer's update on until the step is counted: the state is that of no finished step
    learning_rate: LearningRate

    def training_step(self, input_ids: Tensor, shift_labels: Tensor, *, step: int) -> StepResult:
        """One optimizer update of step number `step` (from 1) on this process's share, (rows, T) each.

        The result's loss is the mean nll in nats over all target tokens of all processes, its gradient norm that
        before clipping, both as tensors on the device: reading them is left to the logging interval.
        """
        accelerator, world = self.accelerator, self.accelerator.num_processes
        seed_random_numbers(step_seed(self.config.seed, step, accelerator.process_index), accelerator.device)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self.learning_rate(step)
        num_targets = (shift_labels != -100).sum().float()
        if world > 1:
            num_targets = accelerator.reduce(num_targets, "sum")

        size = self.batch.micro_batch
        micro_batches = list(zip(input_ids.split(size), shift_labels.split(size), strict=True))
        micro_losses = torch.zeros(len(micro_batches), device=input_ids.device)  # made once, see `summed_nll`
        for index, (ids, labels) in enumerate(micro_batches, start=1):
            # The processes exchange gradients once per step, after the last micro-batch.
            last = index == len(micro_batches)
            if self.sharded:
                self.raw_model.set_requires_gradient_sync(last)
            no_sync = nullcontext() if last or self.sharded else accelerator.no_sync(self.model)
            with self.memory.micro_batch(index, len(micro_batches)), no_sync, accelerator.autocast():
                options = {"num_items_in_batch": num_targets, **self.attention(ids)}
                micro_loss = self.model(input_ids=ids, shift_labels=labels, **options).loss
                self.backward(micro_loss * world)  # the exchange takes the mean over processes
                micro_losses[index - 1] = micro_loss.detach()
        loss = micro_losses.sum()
        if world > 1:
            loss = accelerator.reduce(loss, "sum")

        limit = self.config.max_grad_norm or float("inf")
        accelerator.unscale_gradients(self.optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        if accelerator.scaler is None:
            # The optimizer leaves the step out where this is 1; fused AdamW without the host having to look.
            bad = ~(grad_norm.isfinite() & loss.isfinite())
            self.raw_optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        self.updating = True
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss, grad_norm, micro_losses)

    def backward(self, loss: Tensor) -> None:
        """As `accelerator.backward`, which looks for other packages each time: that took 1 % of a step of 30 ms."""
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def build_model(self, tokenizer: PreTrainedTokenizerBase, weights: dict[str, Tensor]) -> Any:
        """The model and its optimizer, as they are saved: `raw_model`, which is returned, and `raw_optimizer`."""
        config, device = self.config, self.accelerator.device
        make = partial(new_model, config.model, tokenizer, config.seed, weights)
        model: Any = shared_model(make, device, self.precision.name) if self.sharded else make().to(device)
        self.attention: Callable[[Tensor], dict[str, Any]] = lambda ids_BT: {}
        if config.document_masking:
            flex = self.compile.enabled and device.type == "cuda" and model.config.attn_pdrop == 0
            self.attention = partial(document_attention, separator_id=tokenizer.eos_token_id, flex=flex)
        self.raw_model, self.raw_optimizer = model, build_optimizer(model, config)
        if config.gradient_checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        if self.compile.enabled:
            model.compile(dynamic=False)
        else:
            model.head_chunk_size = HEAD_CHUNK_SIZE
        return model

    def wrap_model(self) -> None:
        """`model` and `optimizer` as the step uses them."""
        self.model = self.raw_model if self.sharded else self.accelerator.prepare(self.raw_model)
        self.parameters = list(self.raw_model.parameters())
        # Accelerate's optimizer has a part only where losses are scaled.
        scaled = self.accelerator.scaler is not None
        self.optimizer: Any = self.accelerator.prepare(self.raw_optimizer) if scaled else self.raw_optimizer
        self.model.train()
        self.memory = MemoryWatch(self.host, self.sharded)

    def to_tensors(self, blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device, both (rows, T), of blocks (rows, T + 1): the one place that shifts."""
        device, tokens = self.accelerator.device, torch.from_numpy(blocks)
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def trial(self, batch: Batch) -> None:
        """One micro-batch of random tokens, forward and backward."""
        vocabulary, device = self.raw_model.config.vocab_size, self.accelerator.device
        ids = torch.randint(vocabulary, (batch.micro_batch, batch.sequence_length), device=device)
        with self.accelerator.no_sync(self.model), self.accelerator.autocast():
            options = {"num_items_in_batch": ids.numel(), **self.attention(ids)}
            with_code_mended(lambda: self.model(input_ids=ids, shift_labels=ids, **options).loss.backward())

    def rehearse(self) -> None:
        """A micro-batch forward and backward where several processes hold the model.

        Memory that runs out while they exchange gradients finds them out of step; here MemoryRanOut comes on all.
        """
        if self.host.world == 1 or self.sharded:
            return
        with self.memory.micro_batch(1, 2):
            self.trial(self.batch)
        with self.memory.micro_batch(2, 2):  # asks the others
            self.optimizer.zero_grad()
