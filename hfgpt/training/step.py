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

from hfgpt.config import Batch
from hfgpt.distributed.device import seed_random_numbers, step_seed
from hfgpt.distributed.ranks import Ranks
from hfgpt.training.lr_schedule import LearningRate
from hfgpt.training.out_of_memory import MemoryWatch

IGNORED = -100  # a target that does not count, as in torch's cross entropy


class StepResult(NamedTuple):
    """Loss and gradient norm of a step, and the parts of the loss from this process's micro-batches: on the device."""

    loss: Tensor
    grad_norm: Tensor
    micro_losses: Tensor  # (micro-batches,)


class TrainStep:
    """Trains `model` by one optimizer update at each call.

    model, optimizer: as they are saved; how processes exchange gradients is added here.
    batch: how a step is split; `micro_batch` may be made smaller between steps.
    attention: extra arguments of the model's forward for token ids (rows, T).
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
    ) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.accelerator, self.ranks, self.learning_rate, self.seed = accelerator, ranks, learning_rate, seed
        self.max_grad_norm, self.attention = max_grad_norm or float("inf"), attention
        self.is_sharded = isinstance(model, FSDPModule)
        self.parallel_model = model if self.is_sharded else accelerator.prepare(model)  # DDP, if processes are several
        # Accelerate's optimizer does something only where losses are scaled (fp16).
        self.scaled_optimizer: Any = optimizer if accelerator.scaler is None else accelerator.prepare(optimizer)
        self.parameters = list(model.parameters())
        self.memory = MemoryWatch(ranks, self.is_sharded)
        self.is_updating = False  # from the update until the step is counted: the weights are of no finished step
        self.parallel_model.train()

    def __call__(self, input_ids: Tensor, shift_labels: Tensor, step: int) -> StepResult:
        """Update number `step` (from 1) on this process's share of the tokens: inputs and targets (rows, T).

        The loss is the mean nll in nats over all target tokens of all processes; the gradient norm is that before
        clipping. Both stay on the device: reading them here would make the host wait for it at every step.
        """
        accelerator, world = self.accelerator, self.ranks.world_size
        self.is_updating = self.is_sharded  # processes that share the model may stand anywhere in a step
        # A pure function of (seed, step, process), so that no generator state has to be saved to resume.
        seed_random_numbers(step_seed(self.seed, step, self.ranks.rank), accelerator.device)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self.learning_rate(step)
        # Micro-batches and processes may have different numbers of targets. Dividing each sum by the step's total is
        # right for any split; the mean of their means is not.
        num_targets = (shift_labels != IGNORED).sum().float()
        if world > 1:
            num_targets = accelerator.reduce(num_targets, "sum")

        size = self.batch.micro_batch
        micro_batches = list(zip(input_ids.split(size), shift_labels.split(size), strict=True))
        # Made at once: small tensors that live on between large freed ones would keep their memory from being reused.
        micro_losses = torch.zeros(len(micro_batches), device=input_ids.device)
        for index, (ids, labels) in enumerate(micro_batches, start=1):
            # Gradients add up locally, and are exchanged once a step, in the last micro-batch.
            is_last = index == len(micro_batches)
            if self.is_sharded:
                self.model.set_requires_gradient_sync(is_last)
            no_sync = nullcontext() if is_last or self.is_sharded else accelerator.no_sync(self.parallel_model)
            with self.memory.micro_batch(index, len(micro_batches)), no_sync, accelerator.autocast():
                options = {"num_items_in_batch": num_targets, **self.attention(ids)}
                micro_loss = self.parallel_model(input_ids=ids, shift_labels=labels, **options).loss
                loss = micro_loss * world  # the exchange takes the mean over processes; this makes it the sum
                # accelerator.backward would look for other packages each time, 1 % of a step of 30 ms.
                (loss if accelerator.scaler is None else accelerator.scaler.scale(loss)).backward()
                micro_losses[index - 1] = micro_loss.detach()
        loss = micro_losses.sum()
        if world > 1:
            loss = accelerator.reduce(loss, "sum")

        # Clip before looking for non-finite values: the norm covers all gradients, so one number tells.
        accelerator.unscale_gradients(self.scaled_optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        if accelerator.scaler is None:
            # Fused AdamW skips the update on the device where this is 1; the host does not have to look.
            is_bad = ~(grad_norm.isfinite() & loss.isfinite())
            self.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        self.is_updating = True
        self.scaled_optimizer.step()
        self.scaled_optimizer.zero_grad()
        return StepResult(loss, grad_norm, micro_losses)

    def to_tensors(self, blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device, both (rows, T), of blocks (rows, T + 1): the one place that shifts."""
        device, tokens = self.accelerator.device, torch.from_numpy(blocks)
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]
