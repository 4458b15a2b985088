"""Which parameters PyTorch gives a gradient, told by its own record of the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shardwise.runtime.capture_code import tensors_by_path


def autograd_nodes(results: Any) -> Iterator[Any]:
    """PyTorch's nodes of the backward pass of all tensors of `results`, each once."""
    waiting = [each.grad_fn for each in tensors_by_path(results).values()]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        yield node


@contextlib.contextmanager
def parameters_with_gradient(module: torch.nn.Module) -> Iterator[set[str]]:
    """Gathers, each time that `module` runs, the parameters by their first names to which the numbers among
    its results lead back."""
    found: set[str] = set()

    def hook(_: torch.nn.Module, __: Any, results: Any) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        losses = [each for each in tensors_by_path(results).values() if each.numel() == 1]
        leaves = (getattr(node, "variable", None) for node in autograd_nodes(losses))
        found.update(names[id(leaf)] for leaf in leaves if id(leaf) in names)

    handle = module.register_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()
