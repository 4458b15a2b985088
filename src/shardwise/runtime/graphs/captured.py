"""A user's module beside the graph that was captured from it: what each operator computes exactly, where its
parameters are, and how the data that it reads are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode
from shardwise.runtime.capture import operators_of_trace
from shardwise.runtime.capture_checks import check_data, check_parameters
from shardwise.runtime.capture_code import TreePath, forward_arguments, tensors_by_path, tree_map
from shardwise.runtime.capture_gradients import autograd_nodes
from shardwise.runtime.capture_trace import ModuleTrace, exported, trace_of_program
from shardwise.runtime.graphs.exact import settings_of
from shardwise.runtime.graphs.module import first_readers
from shardwise.runtime.graphs.program import Settings, operators_of, repeated

MODULE = "module"
"""How a module is called in messages: it has no file of its own."""


@dataclass(frozen=True)
class Captured:
    """A module as the graph of a plan has it: `settings` of operators by their number, `values` of parameters
    by their names in the graph, `matrices` those that are matrices in the module, and `data` from what the
    module's forward is called with to the inputs of the graph."""

    settings: Mapping[int, Settings]
    values: Mapping[str, Tensor]
    matrices: frozenset[str]
    data: Callable[[Any], Mapping[str, Tensor]]


def captured(module: nn.Module, inputs: Any, graph: OpGraph) -> Captured:
    """`module`, called with `inputs` of the whole batch (by place, or a dict by name), as `graph` has it.
    ConfigError where it is another network than the graph, or does what graphs tell for its cost alone."""
    check_derivatives(module, inputs)
    program, trace = _traced(module, inputs)
    more = tree_map(lambda value: _doubled(value, graph.batch), inputs)
    _, doubled = _traced(module, more)
    builder, found = operators_of_trace(trace, {"batch": doubled}, MODULE)
    check_parameters(builder, found, module, trace.gradients)
    check_data(trace, MODULE)
    names = _match_operators(operators_of(graph), found, _parameter_names(graph))
    data = _Data(
        program, names, graph.inputs, tuple(tensors_by_path(forward_arguments(inputs))), builder.rows
    )
    settings = {
        number: settings_of(builder, node, builder.calls[node.name], _targets(program))
        for number, node in enumerate(found)
    }
    data.check_states(builder, found, inputs)
    own = dict(module.named_parameters())
    values, matrices = {}, set()
    for name, (op, slot) in first_readers(graph).items():
        value = part_of_parameter(own, name)
        values[name] = value.detach().reshape(op.shape(op.parameters[slot].dims))
        if own[name.partition("[")[0]].dim() > 1:
            matrices.add(name)
    return Captured(settings, values, frozenset(matrices), data)


def _traced(module: nn.Module, inputs: Any) -> tuple[ExportedProgram, ModuleTrace]:
    placed, named = forward_arguments(inputs)
    program, gradients = exported(module, placed, named, MODULE)
    return program, trace_of_program(program, module, MODULE, gradients=gradients)


def check_derivatives(module: nn.Module, inputs: Any) -> None:
    """ConfigError where a function of the module's has a backward pass of its own, which graphs do not have:
    they differentiate what its forward pass does."""
    for node in autograd_nodes(_results(module, inputs)):
        if isinstance(node, BackwardCFunction):
            raise ConfigError(
                "has a backward pass of its own, which graphs do not have", key=MODULE,
                found=node.name().removesuffix("Backward"), allowed="functions that PyTorch differentiates",
            )  # fmt: skip


def _results(module: nn.Module, inputs: Any) -> Any:
    """What a copy of the module makes of its inputs: without values, unless it looks at some, as models that
    leave out a mask which masks nothing do."""
    placed, named = tree_map(_on_meta, forward_arguments(inputs))
    try:
        with torch.device("meta"):
            return deepcopy(module).to("meta")(*placed, **named)
    except RuntimeError:
        placed, named = forward_arguments(inputs)
        return deepcopy(module)(*placed, **named)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _doubled(value: Any, batch: int) -> Any:
    """The same with twice as many samples, where its first dim is the batch."""
    is_batch = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch
    return torch.cat((value, value)) if is_batch else value


def _parameter_names(graph: OpGraph) -> list[tuple[str, ...]]:
    return [
        tuple(repeated(parameter.name, count, block.repeat) for parameter in op.parameters)
        for block in graph.blocks
        for count in range(block.repeat)
        for op in block.operators
    ]


def _match_operators(
    plan: Sequence[OpNode], found: Sequence[OpNode], names: Sequence[tuple[str, ...]]
) -> dict[str, str]:
    """The names of data in the plan's graph with those in the module. ConfigError where operators differ."""
    data: dict[str, str] = {}
    if len(plan) != len(found):
        raise _other_network_error(f"{len(found)} operators", f"{len(plan)}")
    made = {node.name for node in found}
    for op, node, parameters in zip(plan, found, names, strict=True):
        captured_op = (node.kind, [node.shape(dims) for dims in node.tensors], _plain(node))
        planned_op = (op.kind, [op.shape(dims) for dims in op.tensors], _plain(op))
        if captured_op != planned_op or tuple(each.name for each in node.parameters) != parameters:
            raise _other_network_error(f"{node.name}: {_describe(node)}", f"{op.name}: {_describe(op)}")
        for operand, read in zip(op.inputs, node.inputs, strict=True):
            if read.source not in made:
                data[operand.source] = read.source
    return data


def _plain(op: OpNode) -> dict[str, Any]:
    """The attributes that do not name dims; numbers are the module's to say."""
    dims = ("over", "time", "heads", "kv_heads", "channel", "number")
    return {name: value for name, value in op.attributes.items() if name not in dims}


def _describe(op: OpNode) -> str:
    shapes = " ".join(str(list(op.shape(dims))) for dims in op.tensors)
    return f"{op.kind} {shapes}"


def _other_network_error(found: str, allowed: str) -> ConfigError:
    return ConfigError("is not the plan's network", key=MODULE, found=found, allowed=allowed)


def part_of_parameter(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter by its name in a graph: `in_proj.weight[0:64]` are rows of one."""
    own, _, rows = name.partition("[")
    value = parameters[own]
    for dim, text in enumerate(rows.rstrip("]").split(",") if rows else ()):
        first, _, stop = text.strip().partition(":")
        if first and stop:
            value = value.narrow(dim, int(first), int(stop) - int(first))
    return value


def _targets(program: ExportedProgram) -> Mapping[str, Any]:
    return {node.name: node.target for node in program.graph.nodes if node.op == "call_function"}


class _Data:
    """What a graph reads, made from what the module is called with (tensors at `places`): its inputs,
    buffers, and what it computes of them before any parameter comes in."""

    def __init__(
        self,
        program: ExportedProgram,
        names: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        places: Sequence[TreePath],
        rows: Mapping[str, range],
    ) -> None:
        self.program, self.names, self.shapes, self.places = program, names, shapes, places
        self.rows = rows
        floats = (value.dtype for value in program.state_dict.values() if value.is_floating_point())
        self.dtype = next(floats, torch.float32)
        self.nodes = {node.name: node for node in program.graph.nodes}
        self.buffers: dict[str, Any] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target is not None:
                stores = (program.state_dict, program.constants)
                self.buffers[spec.arg.name] = next(
                    each[spec.target] for each in stores if spec.target in each
                )

    def __call__(self, batch: Any) -> Mapping[str, Tensor]:
        made = {**self.buffers, **self.forward_inputs(batch)}
        with torch.no_grad():
            return {name: self._data(name, own, made) for name, own in self.names.items()}

    def forward_inputs(self, batch: Any) -> dict[str, Tensor]:
        """What the module is called with, by the names of the export."""
        tensors = tensors_by_path(forward_arguments(batch))
        if set(tensors) != set(self.places):
            raise ConfigError(
                "is not what the module is called with", key="batch", found=f"{len(tensors)} tensors",
                allowed=f"{len(self.places)}, as the module was captured with",
            )  # fmt: skip
        users = map(str, self.program.graph_signature.user_inputs)
        return dict(zip(users, (tensors[place] for place in self.places), strict=True))

    def _data(self, name: str, own: str, made: dict[str, Any]) -> Tensor:
        own = own if own in self.nodes else own.removesuffix("_spelled")
        if own in self.rows:
            return torch.tensor(list(self.rows[own])).reshape(self.shapes[name])
        if own in self.nodes:
            result: Tensor = self._value(own, made)
            return result
        # What is not in the module is the one row of a parameter that is repeated, or a cell's first state.
        return torch.zeros(self.shapes[name], dtype=self.dtype)

    def _value(self, name: str, made: dict[str, Any]) -> Any:
        if name not in made:
            made[name] = self._computed(name, made)
        return made[name]

    def _computed(self, name: str, made: dict[str, Any]) -> Any:
        node = self.nodes[name]
        arguments = [self._argument(value, made) for value in node.args]
        return node.target(
            *arguments, **{key: self._argument(value, made) for key, value in node.kwargs.items()}
        )

    def _argument(self, value: Any, made: dict[str, Any]) -> Any:
        if isinstance(value, torch.fx.Node):
            return self._value(value.name, made)
        if isinstance(value, list | tuple):
            return type(value)(self._argument(item, made) for item in value)
        return value

    def check_states(self, builder: Any, found: Sequence[OpNode], inputs: Any) -> None:
        """ConfigError where a recurrent layer does not begin with zeros."""
        made: dict[str, Any] = {**self.buffers, **self.forward_inputs(inputs)}
        for node in found:
            if node.kind in ("lstm", "gru"):
                call = self.nodes[builder.calls[node.name].name]
                states = call.args[1] if isinstance(call.args[1], list | tuple) else [call.args[1]]
                for state in states:
                    if self._value(state.name, made).count_nonzero():
                        raise ConfigError(
                            f"{node.name} begins with a state", key=MODULE, found="numbers", allowed="zeros"
                        )
