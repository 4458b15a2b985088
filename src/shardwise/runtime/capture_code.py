"""A user's function, loaded from its file and asked for a module and its inputs on the meta device."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.inputs import nearest, printable

RETURNS = (
    "(module, inputs): a torch.nn.Module whose forward returns the loss, and the tuple of what it is called "
    "with, or a dict of it by name"
)
DEFAULT_BATCH = 8
"""Samples where neither the command nor the function says how many."""


@dataclass(frozen=True, slots=True)
class Example:
    """A module on the meta device and what its forward is called with."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]


def user_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file at `path`, which is run to get it."""
    file = os.path.realpath(path)
    if not os.path.isfile(file):
        raise ConfigError("is no file", file=printable(path), allowed="the path of a Python file")
    spec = importlib.util.spec_from_file_location("shardwise_captured", file)
    if spec is None or spec.loader is None:
        raise ConfigError("is no Python file", file=printable(path), allowed="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses of the file look for their names
    with _users_code(file, import_folder=os.path.dirname(file)):
        spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        guess = nearest(name, functions)
        hint = f" (did you mean {guess}?)" if guess else ""
        raise ConfigError(
            f"has no function {printable(name)}{hint}",
            file=printable(path),
            allowed=", ".join(functions[:10]) or "a file with a function",
        )
    function: Callable[..., Any] = found
    return function


def example_of(function: Callable[..., Any], file: str, arguments: Mapping[str, int]) -> Example:
    """What `function` returns, called with `arguments` while the default device is meta."""
    with _users_code(file, import_folder=os.path.dirname(file)), torch.device("meta"):
        returned = function(**arguments)
    is_answer = isinstance(returned, tuple) and 2 <= len(returned) <= 3
    if not is_answer or not isinstance(returned[0], torch.nn.Module):
        found = type(returned).__name__
        key = f"{function.__name__}()"
        raise ConfigError("returns another thing", file=file, key=key, found=found, allowed=RETURNS)
    inputs, named = forward_arguments(returned[1])
    named = {**named, **(returned[2] if len(returned) == 3 else {})}
    for name, value in (*returned[0].named_parameters(), *returned[0].named_buffers()):
        if value.device.type != "meta":
            raise ConfigError(
                "makes a tensor on another device than the default one",
                file=file,
                key=f"{function.__name__}()",
                found=f"{name} on {value.device}",
                allowed="no device= and no .to(...) in the module",
            )
    return Example(returned[0], tree_map(_on_meta, inputs), tree_map(_on_meta, named))


def forward_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What a forward is called with by place and by name: a dict is by name, all else by place."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` made of everything within its tuples, lists and dicts."""
    if isinstance(value, Mapping):
        return {name: tree_map(change, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [tree_map(change, item) for item in value]
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    return change(value)


TreePath = tuple[Any, ...]
"""Where a tensor is within tuples, lists and dicts: keys and numbers, the outermost first."""


def tensors_by_path(value: Any) -> dict[TreePath, torch.Tensor]:
    """All tensors within tuples, lists and dicts, by their places, in order."""
    if isinstance(value, torch.Tensor):
        return {(): value}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {(key, *place): tensor for key, item in items for place, tensor in tensors_by_path(item).items()}


def parameter_default(function: Callable[..., Any], name: str) -> tuple[bool, int | None]:
    """Whether the function has a parameter `name`, and its default."""
    found = inspect.signature(function).parameters.get(name)
    default = None if found is None else found.default
    return found is not None, default if isinstance(default, int) else None


def with_batch(example: Example, before: int, after: int) -> Example:
    """The same module, the first dim of each input that is `before` long made `after` long."""

    def resized(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == before:
            return torch.empty((after, *value.shape[1:]), dtype=value.dtype, device="meta")
        return value

    return Example(example.module, tree_map(resized, example.inputs), tree_map(resized, example.named))


def batch_of(example: Example, file: str) -> int:
    """The first dim of the first input."""
    for value in tensors_by_path((example.inputs, example.named)).values():
        if value.dim():
            return int(value.shape[0])
    raise ConfigError("returns no tensor with a dim as input", file=file, allowed=RETURNS)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _users_code(file: str, *, import_folder: str) -> Iterator[None]:
    """Runs code of the user's: modules beside it can be imported, what it prints goes to stderr, and what it
    raises is told with its line."""
    sys.path.insert(0, import_folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit of the user's is no answer of ours
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno]
        raise ConfigError(
            "raises an error of its own",
            file=printable(file),
            key=f"line {lines[-1]}" if lines else None,
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            allowed="code that runs with torch.device('meta') as the default device",
        ) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(import_folder)
