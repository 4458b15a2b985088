"""Loads a user's function, exports its module with torch.export on the meta device, and records the trace.

`example_of` calls the function for a module and its inputs. `trace_of` exports the module as a `ModuleTrace`:
plain records of ATen calls (`TracedCall`) without tensors. `parameters_with_gradient` finds the parameters
that autograd gives a gradient.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from shardwise.errors import ConfigError
from shardwise.inputs import listed, printable, unknown
from shardwise.runtime.graph_capture.users_code import does_not_end, error_text, prints_to_stderr, users_code

# The user's function

RETURNS = (
    "(module, inputs): a torch.nn.Module whose forward returns the loss, and the tuple of its arguments, "
    "or a dict of them by name"
)
DEFAULT_BATCH = 8
"""Samples in a batch where neither the command nor the function gives a number."""


@dataclass(frozen=True, slots=True)
class Example:
    """A module on the meta device and the arguments of its forward."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]


def user_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file at `path`. Runs the file; ConfigError where it has no such
    function."""
    file = os.path.realpath(path)
    if not os.path.isfile(file):
        raise ConfigError("is not a file", file=printable(path), allowed="the path of a Python file")
    spec = importlib.util.spec_from_file_location("shardwise_captured", file)
    if spec is None or spec.loader is None:
        raise ConfigError("is not a Python file", file=printable(path), allowed="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the names of their module here
    with users_code(file, import_folder=os.path.dirname(file)):
        spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown(
            f"has no function {printable(name)}",
            name,
            functions,
            file=printable(path),
            found=None,
            allowed=listed(functions) if functions else "a file with a function",
        )
    function: Callable[..., Any] = found
    return function


def example_of(function: Callable[..., Any], file: str, arguments: Mapping[str, int]) -> Example:
    """The module and inputs that `function` returns, called with `arguments` under meta as the default
    device.

    ConfigError where it returns something else, or has a tensor on another device.
    """
    with users_code(file, import_folder=os.path.dirname(file)), torch.device("meta"):
        returned = function(**arguments)
    is_answer = isinstance(returned, tuple) and 2 <= len(returned) <= 3
    if not is_answer or not isinstance(returned[0], torch.nn.Module):
        found = type(returned).__name__
        key = f"{function.__name__}()"
        raise ConfigError(
            "does not return a module and its inputs", file=file, key=key, found=found, allowed=RETURNS
        )
    inputs, named = forward_arguments(returned[1])
    named = {**named, **(returned[2] if len(returned) == 3 else {})}
    for name, value in (*returned[0].named_parameters(), *returned[0].named_buffers()):
        if value.device.type != "meta":
            raise ConfigError(
                "makes a tensor that is not on the default device",
                file=file,
                key=f"{function.__name__}()",
                found=f"{name} on {value.device}",
                allowed="no device= and no .to(...) in the module",
            )
    return Example(returned[0], tree_map(_on_meta, inputs), tree_map(_on_meta, named))


def forward_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and the keyword arguments of a forward: a dict has keywords, anything else is
    positional."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` applied to everything within its tuples, lists and dicts."""
    if isinstance(value, Mapping):
        return {name: tree_map(change, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [tree_map(change, item) for item in value]
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    return change(value)


TreePath = tuple[Any, ...]
"""Path of a tensor within tuples, lists and dicts: keys and indices, outermost first."""


def tensors_by_path(value: Any) -> dict[TreePath, torch.Tensor]:
    """All tensors within tuples, lists and dicts, by their paths, in order."""
    if isinstance(value, torch.Tensor):
        return {(): value}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {(key, *place): tensor for key, item in items for place, tensor in tensors_by_path(item).items()}


def parameter_default(function: Callable[..., Any], name: str) -> tuple[bool, int | None]:
    """Whether the function has a parameter `name`, and its default if it is an integer."""
    found = inspect.signature(function).parameters.get(name)
    default = None if found is None else found.default
    return found is not None, default if isinstance(default, int) else None


def with_batch(example: Example, before: int, after: int) -> Example:
    """The same module; inputs whose first dim has size `before` get size `after`."""

    def resized(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == before:
            return torch.empty((after, *value.shape[1:]), dtype=value.dtype, device="meta")
        return value

    return Example(example.module, tree_map(resized, example.inputs), tree_map(resized, example.named))


def batch_of(example: Example, file: str) -> int:
    """The size of the first dim of the first input that has dims."""
    for value in tensors_by_path((example.inputs, example.named)).values():
        if value.dim():
            return int(value.shape[0])
    raise ConfigError("returns no input tensor with a dim", file=file, allowed=RETURNS)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


# Parameters with gradients


def autograd_nodes(results: Any) -> Iterator[Any]:
    """The autograd nodes of all tensors of `results`, each once."""
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
    """Collects, for each call of `module`, the parameters that its scalar results depend on, by first
    name."""
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


# Traces

Shape = tuple[int, ...]

_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by its name in the trace."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One ATen call.

    `target` is its name (`aten.linear.default`). `arguments` are refs, numbers, text, None and lists of
    these. `shapes` are those of its results; there are several if `is_tuple`. `where` is the line of the
    user's code, if known. `is_region` marks a part of the module that is one call (`no_grad`, `autocast`).
    `writes` are the values that it changes in place.
    """

    name: str
    target: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    is_tuple: bool
    where: str | None
    is_region: bool = False
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """The trace of a forward pass.

    `data` are inputs and buffers by name. `parameters` have, by name in the trace, their name in the module
    and their shape. `calls` are in order, `results` are names. `memory` numbers the storages of each value: a
    tensor and its views share one. `gradients` are the parameters, by name in the module, that autograd gives
    a gradient.
    """

    data: Mapping[str, Shape]
    parameters: Mapping[str, tuple[str, Shape]]
    calls: tuple[TracedCall, ...]
    results: tuple[str, ...]
    memory: Mapping[str, frozenset[int]]
    gradients: frozenset[str]

    @property
    def trained(self) -> tuple[TracedCall, ...]:
        """The calls that depend on a parameter, in order; all others compute data from data."""
        names = set(self.parameters)
        calls = [call for call in self.calls if _joins(call, names)]
        return tuple(calls)

    def shapes(self) -> dict[str, tuple[Shape, ...]]:
        """The shapes of every value by its name; several for a tuple."""
        inputs = {name: (shape,) for name, shape in self.data.items()}
        parameters = {name: (shape,) for name, (_, shape) in self.parameters.items()}
        return {**inputs, **parameters, **{call.name: call.shapes for call in self.calls}}


def refs_of(value: Any) -> list[Ref]:
    """All refs within an argument, or within the arguments of a call, in order."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, TracedCall):
        return refs_of([list(value.arguments), *value.named.values()])
    return [ref for item in value for ref in refs_of(item)] if isinstance(value, list | tuple) else []


def refusal(file: str, call: TracedCall, problem: str, allowed: str) -> ConfigError:
    """The error for a call that cannot be captured, with its name and the user's source line."""
    return ConfigError(
        f"{call.target.removesuffix('.default')} {problem}",
        file=file,
        key=call.where,
        found=", ".join(str(list(shape)) for shape in call.shapes) or None,
        allowed=allowed,
    )


def _joins(call: TracedCall, names: set[str]) -> bool:
    """Whether the call reads one of `names`; if so, its name is added."""
    if not any(ref.name in names for ref in refs_of(call)):
        return False
    names.add(call.name)
    return True


def trace_of(
    module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], file: str
) -> ModuleTrace:
    """The trace of `module` on `inputs` on the meta device; ConfigError where it cannot be exported."""
    with torch.device("meta"):
        program, trained = exported(module, inputs, named, file)
    return trace_of_program(program, module, file, gradients=trained)


def exported(
    module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], file: str
) -> tuple[ExportedProgram, frozenset[str]]:
    """The exported program of `module`, and the parameters that its loss gives a gradient.

    ConfigError where it cannot be exported.
    """
    try:
        # Prints of the module go to stderr; PyTorch's own prints about failures are dropped.
        with warnings.catch_warnings(), _quiet(), parameters_with_gradient(module) as trained:
            warnings.simplefilter("ignore")
            program = torch.export.export(module, inputs, dict(named), strict=False)
            return program, frozenset(trained)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and exceptions of the user's own that derive from it
        raise capture_error(error, file) from error


def trace_of_program(
    program: ExportedProgram, module: torch.nn.Module, file: str, *, gradients: frozenset[str]
) -> ModuleTrace:
    """An exported program as plain records; `gradients` are the parameters that get a gradient."""
    owners = _owners(module)
    data: dict[str, Shape] = {}
    parameters: dict[str, tuple[str, Shape]] = {}
    targets = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    calls: list[TracedCall] = []
    results: tuple[str, ...] = ()
    memory: dict[str, frozenset[int]] = {}
    for node in program.graph.nodes:
        memory[node.name] = _memory(node.meta.get("val"))
        if node.op == "placeholder":
            spec = targets[node.name]
            if spec.kind is InputKind.PARAMETER and spec.target is not None:
                parameters[node.name] = (owners.get(spec.target, spec.target), _shape(node.meta["val"]))
            elif isinstance(node.meta.get("val"), torch.Tensor):
                data[node.name] = _shape(node.meta["val"])
        elif node.op == "call_function":
            calls.append(_call(node, file))
        elif node.op == "output":
            results = tuple(item.name for item in _flat(node.args) if isinstance(item, torch.fx.Node))
    specs = program.graph_signature.output_specs
    outputs = {spec.arg.name for spec in specs if spec.kind is OutputKind.USER_OUTPUT}
    results = tuple(name for name in results if name in outputs)
    return ModuleTrace(
        data=data,
        parameters=parameters,
        calls=tuple(calls),
        results=results,
        memory=memory,
        gradients=gradients,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what PyTorch prints and logs in addition to what it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with prints_to_stderr(), contextlib.redirect_stderr(io.StringIO()), does_not_end():
            yield
    finally:
        logging.disable(before)


def _owners(module: torch.nn.Module) -> dict[str, str]:
    """For each name of a parameter, the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _call(node: Any, file: str) -> TracedCall:
    value = node.meta.get("val")
    is_tuple = isinstance(value, list | tuple)
    values = value if is_tuple else [value]
    regions = [item for item in _flat(node.args) if isinstance(item, torch.fx.Node) and item.op == "get_attr"]
    where = _where(str(node.meta.get("stack_trace") or _stack_within(regions)), file)
    target = _target_text(node.target)
    for item in values:
        if isinstance(item, torch.Tensor) and not all(map(_is_known, item.shape)):
            raise ConfigError(
                f"{target.removesuffix('.default')} makes a tensor whose size depends on values",
                file=file,
                key=where,
                allowed="sizes that do not depend on values: torch.where or a product with the mask instead "
                "of indexing by a mask",
            )
    return TracedCall(
        name=node.name,
        target=target,
        arguments=tuple(map(_plain, node.args)),
        named={name: _plain(item) for name, item in node.kwargs.items()},
        shapes=tuple(_shape(item) if isinstance(item, torch.Tensor) else () for item in values),
        is_tuple=is_tuple,
        where=where,
        is_region=bool(regions),
        writes=_written(node),
    )


def _stack_within(regions: list[Any]) -> str:
    """The stack trace of the first operator with one, in regions that are one call."""
    for region in regions:
        part = getattr(region.graph.owning_module, str(region.target), None)
        nodes = part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ()
        for node in nodes:
            if node.meta.get("stack_trace"):
                return str(node.meta["stack_trace"])
    return ""


def _is_known(size: int | torch.SymInt) -> bool:
    return not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None


def _written(node: Any) -> tuple[str, ...]:
    """The values that the operator changes in place, by its schema."""
    declared = getattr(getattr(node.target, "_schema", None), "arguments", ())
    values = [*node.args[: len(declared)]]
    values += [node.kwargs.get(argument.name) for argument in declared[len(values) :]]
    return tuple(
        item.name
        for argument, value in zip(declared, values, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
        for item in _flat(value)
        if isinstance(item, torch.fx.Node)
    )


def _memory(value: Any) -> frozenset[int]:
    """Identifiers of the storages of all tensors of a value. The export keeps storages alive, so none is
    reused."""
    tensors = [item for item in _flat(value) if isinstance(item, torch.Tensor)]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def _target_text(target: Any) -> str:
    """`aten.linear.default`; plain functions by their name (`getitem`)."""
    text = str(target)
    return str(target.__name__) if text.startswith("<") else text


def _plain(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _shape(value: Any) -> Shape:
    return tuple(int(size) for size in value.shape)


def _where(stack: str, file: str) -> str | None:
    """`line 12` of the user's file, the innermost frame; otherwise the innermost frame outside of PyTorch."""
    frames = [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', stack)]
    return _innermost(frames, file)


def _innermost(frames: list[tuple[str, int]], file: str) -> str | None:
    own = [line for name, line in frames if name == file]
    if own:
        return f"line {own[-1]}"
    others = [(name, line) for name, line in frames if not name.startswith(_TORCH)]
    return f"line {others[-1][1]} of {others[-1][0]}" if others else None


def capture_error(error: BaseException, file: str) -> ConfigError:
    """The error for a failed export, with the line of the user's code."""
    frames = [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _PACKAGE, "<"))
    ]
    return ConfigError(
        "stops the capture",
        file=file,
        key=_innermost(frames, file),
        found=error_text(error),
        allowed="a forward pass that depends on shapes, not on values of tensors (no .item(), no branch on a "
        "tensor), with all tensors created on the default device",
    )
