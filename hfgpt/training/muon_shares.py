"""Which process orthogonalizes which matrices, and the exchange of matrices between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hfgpt.model.memory import BATCH_ELEMENTS

# torch 2.13 renamed it, and warns of the earlier name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Round = list[list[nn.Parameter]]  # by rank: matrices of one shape that it orthogonalizes at once; none at the end


def held(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: all of it, or under FSDP2 some of its rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def plan_rounds(parameters: list[nn.Parameter], world_size: int) -> list[Round]:
    """Share out the matrices so that all processes have about the same work, the same plan on each of them."""
    costs = dict.fromkeys(range(world_size), 0)
    batches: list[list[list[nn.Parameter]]] = [[] for _ in costs]  # by rank
    for parameter in sorted(parameters, key=lambda parameter: (-_cost(parameter), parameter.shape)):
        rank = min(costs, key=lambda rank: costs[rank])
        costs[rank] += _cost(parameter)
        size = max(1, BATCH_ELEMENTS // parameter.numel())
        same = next((one for one in batches[rank] if one[0].shape == parameter.shape and len(one) < size), None)
        if same is None:
            batches[rank].append(same := [])
        same.append(parameter)
    return [[own[number] if number < len(own) else [] for own in batches] for number in range(max(map(len, batches)))]


def _cost(parameter: nn.Parameter) -> int:
    """Return the multiplications of one round of the iteration in `orthogonalize`."""
    short, long = sorted(parameter.shape)
    return 2 * short * short * long + short**3


class Pending(NamedTuple):
    """Tensors on their way. `inputs` keeps what is sent until it has arrived."""

    work: Any
    finish: Callable[[], Any]
    inputs: Tensor | None = None

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Shares:
    """Exchanges the matrices of rounds between all processes, in `dtype`. Call its methods on all of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, is_alone = dtype, not dist.is_initialized()
        self.rank, self.world_size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())

    def takes_part(self, rank: int, parameter: nn.Parameter) -> bool:
        """Return whether `rank` needs what this process holds of a matrix that it orthogonalizes."""
        return rank == self.rank or isinstance(parameter, DTensor)

    def collect(self, now: Round, updates: dict[nn.Parameter, Tensor]) -> Pending:
        """Bring this process's matrices of a round here, (n, rows, columns), from what each process holds of them."""
        mine = now[self.rank]
        if not self._is_sharded(now):
            return Pending(None, lambda: torch.stack([updates[one] for one in mine]).to(self.dtype) if mine else None)
        parts = [updates[one] for batch in now for one in batch]
        splits = [sum(updates[one].numel() for one in batch) for batch in now]
        shapes = [(len(mine), self._rows(mine, rank), mine[0].shape[1]) if mine else (0,) for rank in self._ranks]
        return self._exchange(parts, splits, shapes, lambda parts: torch.cat(parts, dim=1) if mine else None)

    def send(self, now: Round, whole: Tensor | None) -> Pending:
        """Send this process's matrices to all that hold parts of them.

        Returns for each rank the matrices that it has sent, (n, rows, columns), with the rows that are held here.
        """
        if self._is_sharded(now):
            rows = [self._rows(now[self.rank], rank) for rank in self._ranks]
            parts = [held(_first(now)).new_empty(0)] if whole is None else whole.split(rows, dim=1)
            splits = [0] * len(rows) if whole is None else [part.numel() for part in parts]
            shapes = [(len(batch), self._rows(batch, self.rank), batch[0].shape[1]) if batch else (0,) for batch in now]
            return self._exchange(parts, splits, shapes, list)
        if self.world_size == 1:
            return Pending(None, lambda: [whole])
        shapes = [(len(batch), *batch[0].shape) if batch else (0,) for batch in now]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        padded = held(_first(now)).new_empty(max(sizes), dtype=self.dtype)  # all processes send as much
        if whole is not None:
            padded[: whole.numel()] = whole.flatten()
        received = padded.new_empty(self.world_size * len(padded))
        work = _all_gather(received, padded, async_op=True)
        by_rank = zip(received.split(len(padded)), sizes, shapes, strict=True)
        parts = [sent[:size].view(shape) for sent, size, shape in by_rank]
        return Pending(work, lambda: parts, padded)

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _is_sharded(self, now: Round) -> bool:
        return isinstance(_first(now), DTensor)

    def _rows(self, batch: list[nn.Parameter], rank: int) -> int:
        """Return how many rows of each matrix `rank` holds under FSDP2, which splits as torch.chunk does."""
        rows = batch[0].shape[0] if batch else 0
        chunk = -(-rows // self.world_size)
        return max(0, min(chunk, rows - rank * chunk))

    def _exchange(
        self, parts: Sequence[Tensor], splits: list[int], shapes: Sequence[tuple[int, ...]], finish: Callable[..., Any]
    ) -> Pending:
        """Send `splits[rank]` elements of `parts` to each rank, and receive tensors with `shapes` from them."""
        sent = torch.cat([part.flatten() for part in parts]).to(self.dtype)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(received, sent, sizes, splits, async_op=True)
        by_rank = [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
        return Pending(work, lambda: finish(by_rank), sent)


def _first(now: Round) -> Tensor:
    return next(one for batch in now for one in batch)
