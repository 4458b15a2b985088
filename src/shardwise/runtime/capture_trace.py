"""A module's forward pass as plain records: what torch.export sees on the meta device, without tensors."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from shardwise.errors import ConfigError
from shardwise.runtime.capture_gradients import parameters_with_gradient

Shape = tuple[int, ...]

_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by its name in the trace."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One operator of PyTorch.

    `target` is its name (`aten.linear.default`), `arguments` are refs, numbers, text, None and lists of
    them, `shapes` those of its results (one, or several where it has a tuple of them), `where` is the line
    of the user's code, if known. `is_region` says that it runs a part of the module as one (`no_grad`,
    `autocast`), `writes` which values it changes in place.
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
    """A forward pass: data by name and shape (inputs and buffers), parameters by name in the trace with their
    name in the module and their shape, calls in order, and the names of the results. `memory` are numbers of
    what values lie in: those that see the same elements, as a tensor and its views do, have one in common.
    `gradients` are the parameters, by their names in the module, that PyTorch gives a gradient."""

    data: Mapping[str, Shape]
    parameters: Mapping[str, tuple[str, Shape]]
    calls: tuple[TracedCall, ...]
    results: tuple[str, ...]
    memory: Mapping[str, frozenset[int]]
    gradients: frozenset[str]

    @property
    def trained(self) -> tuple[TracedCall, ...]:
        """The calls that depend on a parameter, in order; all others make data from data."""
        names = set(self.parameters)
        calls = [call for call in self.calls if _joins(call, names)]
        return tuple(calls)

    def shapes(self) -> dict[str, tuple[Shape, ...]]:
        """The shapes of every value by its name, several where it is a tuple."""
        inputs = {name: (shape,) for name, shape in self.data.items()}
        parameters = {name: (shape,) for name, (_, shape) in self.parameters.items()}
        return {**inputs, **parameters, **{call.name: call.shapes for call in self.calls}}


def refs_of(value: Any) -> list[Ref]:
    """All refs within an argument, or the arguments of a call, in order."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, TracedCall):
        return refs_of([list(value.arguments), *value.named.values()])
    return [ref for item in value for ref in refs_of(item)] if isinstance(value, list | tuple) else []


def refusal(file: str, call: TracedCall, problem: str, allowed: str) -> ConfigError:
    """Why a call cannot be captured, by its name and the user's line."""
    return ConfigError(
        f"{call.target.removesuffix('.default')} {problem}",
        file=file,
        key=call.where,
        found=", ".join(str(list(shape)) for shape in call.shapes) or None,
        allowed=allowed,
    )


def _joins(call: TracedCall, names: set[str]) -> bool:
    """Whether the call reads one of `names`, which its own then joins."""
    if not any(ref.name in names for ref in refs_of(call)):
        return False
    names.add(call.name)
    return True


def trace_of(
    module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], file: str
) -> ModuleTrace:
    """What `module` does with `inputs`, all on the meta device; ConfigError where it cannot be exported."""
    with torch.device("meta"):
        program, trained = exported(module, inputs, named, file)
    return trace_of_program(program, module, file, gradients=trained)


def exported(
    module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], file: str
) -> tuple[ExportedProgram, frozenset[str]]:
    """`module` as PyTorch exports it, and the parameters that its loss gives a gradient; ConfigError where it
    cannot."""
    try:
        # What the module prints belongs on stderr; what PyTorch prints there of its failures does not.
        with warnings.catch_warnings(), _quiet(), parameters_with_gradient(module) as trained:
            warnings.simplefilter("ignore")
            program = torch.export.export(module, inputs, dict(named), strict=False)
            return program, frozenset(trained)
    except (Exception, SystemExit) as error:  # the user's forward may leave the program
        raise capture_error(error, file) from error


def trace_of_program(
    program: ExportedProgram, module: torch.nn.Module, file: str, *, gradients: frozenset[str]
) -> ModuleTrace:
    """An exported module as plain records, with its parameters that get gradients."""
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
    """Without what PyTorch prints and logs, beside what it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _owners(module: torch.nn.Module) -> dict[str, str]:
    """For each name of a parameter the first name of the same parameter."""
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
                allowed="tensors of the same size at any values: torch.where or a product with the mask in "
                "place of indexing by a mask",
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
    """The place of the first operator that says one in parts of the module that are run as one."""
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
    """The values that the operator changes in place, as it is declared."""
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
    """Numbers of the storages of all tensors of a value. PyTorch's records of it keep them alive, so that
    none is used twice."""
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
    """`line 12` of the user's file, the innermost; else the innermost line outside of PyTorch."""
    frames = [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', stack)]
    return _innermost(frames, file)


def _innermost(frames: list[tuple[str, int]], file: str) -> str | None:
    own = [line for name, line in frames if name == file]
    if own:
        return f"line {own[-1]}"
    others = [(name, line) for name, line in frames if not name.startswith(_TORCH)]
    return f"line {others[-1][1]} of {others[-1][0]}" if others else None


def capture_error(error: BaseException, file: str) -> ConfigError:
    """What stopped the export, and at which line of the user's code."""
    frames = [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _PACKAGE, "<"))
    ]
    message = " ".join(str(error).split("\n\n")[0].split())
    return ConfigError(
        "stops the capture",
        file=file,
        key=_innermost(frames, file),
        found=f"{type(error).__name__}: {message[:300]}",
        allowed="a forward pass that depends on shapes, not on values of tensors (no .item(), no branch on a "
        "tensor), with all tensors made on the default device",
    )
