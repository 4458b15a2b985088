"""Counts bytes of tensors on a CPU: those that autograd saves for the backward pass, and the peak of all."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """Bytes that autograd saves during calls of `count`, each storage once and without those of `module`.

    A mask of dropout counts one byte per element, as on a GPU; on a CPU it has the dtype of the activations.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        owned = (*module.parameters(), *module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._saved: dict[int, torch.Tensor] = {}

    def count(self, call: Callable[[], Any]) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            call()
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._own:
            self._saved.setdefault(place, tensor)  # held, so that no other tensor takes its place
        return tensor


def count_calls(layer: Any, saved: SavedBytes, totals: list[int]) -> None:
    """Makes each call of `layer` append to `totals` the bytes that are saved so far."""
    forward = layer.forward

    def counted(*states: Any, **options: Any) -> Any:
        found = []
        totals.append(saved.count(lambda: found.append(forward(*states, **options))))
        return found[0]

    layer.forward = counted


class PeakBytes(TorchDispatchMode):  # type: ignore[misc]
    """The most bytes at once in tensors that operators create while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.now += nbytes
            weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.now -= nbytes


def allocated_peak(call: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator hands out at once during a call, also in compiled code."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    profiler: Any = record.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def import_compiler() -> None:
    """Imports PyTorch's compiler, which `PeakBytes` needs, without the stand-in for Triton that Megatron-LM
    needs: the compiler would look for parts of Triton that the stand-in lacks."""
    stand_ins = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "triton"}
    for name in ("torch._dynamo", "torch._inductor.utils"):
        import_module(name)
    sys.modules.update(stand_ins)
