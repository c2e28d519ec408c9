"""An accelerator in pure Python: a device that is neither "cpu" nor "cuda", and that torch takes for a real one.

`install()` registers it as torch's current accelerator, "fake", for the rest of the process. Its tensors lie in the
machine's memory and its operators are the CPU's, but an operator that meets tensors of both devices fails, as on a real
one. Only copies and single numbers may cross.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

CPU = torch.device("cpu")
# The CPU's own kernels of these look at sizes and strides only.
VIEWS = ("as_strided", "view", "_reshape_alias", "set_.source_Storage_storage_offset")
ON_CPU = torch._C.DispatchKey.CPU
STRICT = ("aten::_fused_", "aten::_amp_")  # operators that take no numbers of the CPU either
IN_BF16 = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "scaled_dot_product_attention")  # under autocast


def _calling(operator: Any) -> Any:
    return lambda *args, **kwargs: operator._op_dk(ON_CPU, *args, **kwargs)


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _casting(operator: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operator(*pytree.tree_map(_to_bf16, args), **pytree.tree_map(_to_bf16, kwargs))

    return call


class _Module(backend_registration._DummyBackendModule):
    """What torch.fake offers; nothing that hfgpt could do without."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


class FakeAccelerator:
    """The device; one a process."""

    def __init__(self, name: str = "fake") -> None:
        backend_registration._setup_privateuseone_for_python_backend(name, backend_module=_Module())
        torch.accelerator.synchronize = lambda device=None: None  # Python backends have no streams
        self.device = torch.device(name, 0)
        self.operators: set[str] = set()  # that have run on it
        self._memory: list[tuple[StorageWeakRef, Tensor]] = []  # storages, and the CPU's tensors whose memory they use
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        self._libraries = everything, aten
        everything.fallback(self._run_on_cpu, "PrivateUse1")
        for view in VIEWS:
            packet, _, overload = view.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(view, _calling(operator), "PrivateUse1")
        everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for name in IN_BF16:
            aten.impl(name, _casting(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
        aten.impl("empty.memory_format", self._empty, "PrivateUse1")
        aten.impl("empty_strided", self._empty_strided, "PrivateUse1")
        aten.impl("_copy_from", self._copy, "PrivateUse1")
        aten.impl("_local_scalar_dense", lambda tensor: self._to_cpu(tensor).item(), "PrivateUse1")

    def _from_cpu(self, tensor: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return a tensor of the device, `onto` or a new one, that uses the memory of a CPU's."""
        storage = tensor.untyped_storage()
        own = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), self.device, storage.nbytes())
        if len(self._memory) > 1000:
            self._memory = [(used, kept) for used, kept in self._memory if not used.expired()]
        self._memory.append((StorageWeakRef(own), tensor.detach()))
        if onto is None:
            onto = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
        place = own, tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(ON_CPU, onto, *place)

    def _to_cpu(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU that uses the memory of one of the device."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        own = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), CPU, own.nbytes())
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _run_on_cpu(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        name = operator.name()
        self.operators.add(name)
        on_cpu: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor of the device, and it on the CPU

        def enter(value: Any) -> Any:
            if isinstance(value, torch.device):
                return CPU
            if not isinstance(value, Tensor):
                return value
            if value.device == CPU:
                if value.dim():
                    raise RuntimeError(f"{name}: a tensor of shape {tuple(value.shape)} is on the CPU")
                return value
            return on_cpu.setdefault(id(value), (value, self._to_cpu(value)))[1]

        if name.startswith(STRICT) or any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            if kwargs.get("generator") is not None or any(tensor.device == CPU for tensor in tensors):
                raise RuntimeError(f"{name}: a generator or a number is on the CPU")
        args, kwargs = pytree.tree_map(enter, (args, kwargs))
        result = operator(*args, **kwargs)
        for own, tensor in on_cpu.values():
            if tensor.shape != own.shape:  # an `out` that was empty
                self._from_cpu(tensor, own)
        own_of = {id(tensor): own for own, tensor in on_cpu.values()}

        def leave(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return own_of[id(value)] if id(value) in own_of else self._from_cpu(value)

        return pytree.tree_map(leave, result)

    def _empty(self, size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return self._from_cpu(torch.empty(size, dtype=dtype))

    def _empty_strided(self, size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return self._from_cpu(torch.empty_strided(size, stride, dtype=dtype))

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        source, place = (tensor if tensor.device == CPU else self._to_cpu(tensor) for tensor in (source, target))
        place.copy_(source)
        return target


if __name__ == "__main__":  # python fake_accelerator.py SCRIPT ARGUMENTS: run a script where the device is there
    ACCELERATOR = FakeAccelerator()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
