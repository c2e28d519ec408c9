"""One optimizer update: `TrainStep`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hfgpt.distributed.device import seed_random_numbers, step_seed, to_device
from hfgpt.distributed.ranks import Ranks
from hfgpt.model.head_loss import UNSCORED
from hfgpt.settings.batch import Batch
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.out_of_memory import MemoryWatch
from hfgpt.training.spikes import SpikeWindow


class StepResult(NamedTuple):
    """Loss and gradient norm of a step, and the losses of this process's micro-batches, as tensors on the device.

    `row_losses`: each row's part of the loss, if requested. `limits`: of loss and norm, above which it is a spike.
    """

    loss: Tensor
    grad_norm: Tensor
    micro_losses: Tensor  # (micro-batches,)
    row_losses: Tensor | None = None  # (rows,)
    limits: Tensor | None = None  # (2,)

    @property
    def is_skipped(self) -> Tensor:
        """Whether the weights stay as they are: loss or gradient is not finite, or a spike."""
        is_bad = ~(self.loss.isfinite() & self.grad_norm.isfinite())
        if self.limits is None:
            return is_bad
        return is_bad | (torch.stack([self.loss, self.grad_norm]) > self.limits).any()


class TrainStep:
    """One optimizer update per call.

    model, optimizer: without wrappers. DDP is added here.
    batch: how a step is split into micro-batches. It may be replaced between steps.
    attention: returns extra inputs of the model for token ids (rows, T).
    spikes: the steps by which a step is judged to be a spike, which is skipped; None: only non-finite steps are.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        *,
        accelerator: Accelerator,
        ranks: Ranks,
        learning_rate: LearningRate,
        seed: int,
        max_grad_norm: float,
        attention: Callable[[Tensor], dict[str, Any]],
        spikes: SpikeWindow | None = None,
    ) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.accelerator, self.ranks, self.learning_rate, self.seed = accelerator, ranks, learning_rate, seed
        self.max_grad_norm, self.attention, self.spikes = max_grad_norm or float("inf"), attention, spikes
        self.is_sharded = isinstance(model, FSDPModule)
        self.parallel_model = model if self.is_sharded else accelerator.prepare(model)  # DDP, if processes are several
        # Accelerate's wrapper is only needed to scale losses (fp16).
        self.scaled_optimizer: Any = optimizer if accelerator.scaler is None else accelerator.prepare(optimizer)
        self.parameters = list(model.parameters())
        self.memory = MemoryWatch(ranks, self.is_sharded)
        self.is_updating = False  # True while the weights belong to no finished step
        self.parallel_model.train()

    def __call__(self, input_ids: Tensor, shift_labels: Tensor, step: int, loss_per_row: bool = False) -> StepResult:
        """Train on this process's share of step `step` (from 1): inputs and targets, both (rows, T).

        The loss is the mean negative log-likelihood in nats over the target tokens of all processes, the gradient norm
        is that before clipping. Both stay on the device: reading them here would stall it at every step.
        """
        accelerator, world = self.accelerator, self.ranks.world_size
        self.is_updating = self.is_sharded  # under FSDP2 a failure may hit processes in different micro-batches
        # Seed dropout from (seed, step, rank), so that a resumed run needs no saved generator state.
        seed_random_numbers(step_seed(self.seed, step, self.ranks.rank), accelerator.device)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self.learning_rate(step)
        # Micro-batches may have different numbers of targets. Dividing each sum by the total of the step is right for
        # any split into micro-batches and processes; a mean of means is not.
        num_targets = (shift_labels != UNSCORED).sum().float()
        if world > 1:
            num_targets = accelerator.reduce(num_targets, "sum")

        size = self.batch.micro_batch
        micro_batches = list(zip(input_ids.split(size), shift_labels.split(size), strict=True))
        # One tensor: many small ones that outlive their micro-batch would fragment the device's memory.
        micro_losses = torch.zeros(len(micro_batches), device=input_ids.device)
        row_losses = torch.zeros(len(input_ids), device=input_ids.device) if loss_per_row else None
        per_row = {"loss_per_row": True} if loss_per_row else {}
        for index, (ids, labels) in enumerate(micro_batches, start=1):
            # Accumulate gradients locally and exchange them once per step, in the last micro-batch.
            is_last = index == len(micro_batches)
            if self.is_sharded:
                self.model.set_requires_gradient_sync(is_last)
            no_sync = nullcontext() if is_last or self.is_sharded else accelerator.no_sync(self.parallel_model)
            with self.memory.micro_batch(index, len(micro_batches)), no_sync, accelerator.autocast():
                options = {"num_items_in_batch": num_targets, **per_row, **self.attention(ids)}
                micro_loss = self.parallel_model(input_ids=ids, shift_labels=labels, **options).loss
                if row_losses is not None:
                    row_losses[(index - 1) * size : index * size] = micro_loss.detach()
                    micro_loss = micro_loss.sum()
                loss = micro_loss * world  # DDP and FSDP2 average gradients over processes; we want the sum
                # Not accelerator.backward, which checks for other packages each time: 1 % of a 30 ms step.
                (loss if accelerator.scaler is None else accelerator.scaler.scale(loss)).backward()
                micro_losses[index - 1] = micro_loss.detach()
        loss = micro_losses.sum()
        if world > 1:
            loss = accelerator.reduce(loss, "sum")

        # Clip first: the norm is finite only if all gradients are, so one number covers the check below.
        accelerator.unscale_gradients(self.scaled_optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        limits = self.spikes.limits() if self.spikes else None
        result = StepResult(loss, grad_norm, micro_losses, row_losses, limits)
        if accelerator.scaler is None:
            # The optimizer skips the update if this is 1; fused AdamW does so without a synchronisation.
            self.optimizer.found_inf = result.is_skipped.float()  # type: ignore[attr-defined]
        self.is_updating = True
        self.scaled_optimizer.step()
        self.scaled_optimizer.zero_grad()
        if self.spikes:
            self.spikes.add(loss, grad_norm, result.is_skipped)
        return result

    def to_tensors(self, blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        """Move blocks (rows, T + 1) to the device and split them into inputs and targets, both (rows, T).

        This is the only place that shifts tokens.
        """
        tokens = to_device(blocks, self.accelerator.device)
        return tokens[:, :-1], tokens[:, 1:]
