"""The module of an operator graph: what its operators compute, on one process.

What an operator computes exactly, from the call of PyTorch's that it was captured from.

A user's module beside the graph that was captured from it: what each operator computes exactly, where its
parameters are, and how the data that it reads are made.
"""

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
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode
from shardwise.runtime.graph_capture.aten_elementwise import argument
from shardwise.runtime.graph_capture.builder import Builder, View
from shardwise.runtime.graph_capture.capture import operators_of_trace
from shardwise.runtime.graph_capture.checks import check_data, check_parameters
from shardwise.runtime.graph_capture.torch_export import (
    ModuleTrace,
    Ref,
    TracedCall,
    TreePath,
    autograd_nodes,
    exported,
    forward_arguments,
    refs_of,
    tensors_by_path,
    trace_of_program,
    tree_map,
)
from shardwise.runtime.graphs.kernels_elementwise import element_function
from shardwise.runtime.graphs.program import Settings, operators_of, repeated
from shardwise.runtime.initialization import generator_of

NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm")

EMBEDDING_STD = 0.02
"""Standard deviation of the rows of tables (GPT-2's)."""


class GraphModule(nn.Module):
    """The parameters of `graph`, by the names that it gives them, repetitions counted."""

    def __init__(self, graph: OpGraph, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, value in values.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(last, nn.Parameter(value))


def graph_module(graph: OpGraph, *, seed: int = 0) -> GraphModule:
    """The module of `graph` with parameters that depend on the seed and on their names: weights normal, with
    the inverse root of what they sum over as deviation, norms one, biases zero."""
    values: dict[str, Tensor] = {}
    for name, (op, slot) in first_readers(graph).items():
        if name not in values:
            values[name] = _initial(name, op, slot, seed)
    return GraphModule(graph, values)


def check_computable(graph: OpGraph) -> None:
    """ConfigError by the name of the first operator of which `graph` does not say what it computes: it takes
    the module that the graph was captured from."""
    for block in graph.blocks:
        for op in block.operators:
            if op.kind == "elementwise":
                try:
                    element_function(op)
                except ConfigError as error:
                    raise error.within(key=f"graph.{block.name}") from None


def first_readers(graph: OpGraph) -> dict[str, tuple[OpNode, int]]:
    """Every parameter by its name, with its first reader and its place there."""
    found: dict[str, tuple[OpNode, int]] = {}
    for block in graph.blocks:
        for count in range(block.repeat):
            for op in block.operators:
                for slot, parameter in enumerate(op.parameters):
                    found.setdefault(repeated(parameter.name, count, block.repeat), (op, slot))
    return found


def is_weight(op: OpNode, slot: int) -> bool:
    """Whether a parameter is multiplied with what is read: neither a bias nor the scale of a norm."""
    if op.kind in NORMS or op.kind == "elementwise":
        return False
    return slot < (2 if op.kind in ("lstm", "gru", "lstm_cell", "gru_cell") else 1) or op.kind == "einsum"


def _initial(name: str, op: OpNode, slot: int, seed: int) -> Tensor:
    dims = op.parameters[slot].dims
    shape = op.shape(dims)
    if not is_weight(op, slot):
        is_scale = (op.kind in NORMS and slot == 0) or op.attributes.get("function") == "multiply"
        return torch.full(shape, 1.0 if is_scale else 0.0)
    std = EMBEDDING_STD
    if op.kind != "embedding":
        std = op.elements(tuple(dim for dim in dims if dim not in op.output)) ** -0.5
    return torch.randn(shape, generator=generator_of(name, seed)).mul_(std)


COST_ONLY = (
    "std", "var", "linalg_vector_norm", "logsumexp", "stack", "prelu", "binary_cross_entropy",
)  # fmt: skip
"""Operators of PyTorch that graphs have for their cost alone: they compute something else."""

EPSILONS: Mapping[str, int] = {
    "layer_norm": 4, "rms_norm": 3, "group_norm": 4, "batch_norm": 7, "instance_norm": 7
}  # fmt: skip
"""The place of the epsilon among the arguments."""

ELEMENTWISE_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "l1_loss": lambda x, y: (x - y).abs(),
    "smooth_l1_loss": lambda x, y, beta=1.0: functional.smooth_l1_loss(x, y, reduction="none", beta=beta),
    "huber_loss": lambda x, y, delta=1.0: functional.huber_loss(x, y, reduction="none", delta=delta),
}
"""Losses that graphs have as a function of elements and a mean."""

MEAN = 1
"""PyTorch's number for losses that are a mean."""


def settings_of(builder: Builder, node: OpNode, call: TracedCall, targets: Mapping[str, Any]) -> Settings:
    """What `node` computes beside what its kind says. ConfigError by the line of a call that is not carried
    out."""
    name = call.target.split(".")[1].rstrip("_") if call.target.startswith("aten.") else call.target
    _check(builder, node, call, name)
    if node.kind == "elementwise":
        return _element_settings(builder, node, call, name, targets)
    if name in EPSILONS:
        epsilon = argument(call, EPSILONS[name], "eps", 1e-5)
        return {"epsilon": epsilon}
    if node.kind == "attention":
        return {"scale": call.named.get("scale")}
    return {}


def _check(builder: Builder, node: OpNode, call: TracedCall, name: str) -> None:
    """Refuses what graphs do not say of a call."""
    if name in COST_ONLY:
        raise builder.refused(call, "is captured for its cost alone", "it written with other operators")
    wrong = ""
    if node.kind == "elementwise" and node.attributes["function"] == "dropout":
        wrong = "draws random numbers, which depend on the layout; module.eval() or p=0"
    if name == "batch_norm" and node.kind == "elementwise":
        wrong = "uses kept statistics; training mode"
    if node.kind == "embedding" and int(argument(call, 2, "padding_idx", -1)) >= 0 and name == "embedding":
        wrong = "has a row without gradient; no padding_idx"
    if node.kind == "slice" and name == "slice" and int(argument(call, 4, "step", 1)) != 1:
        wrong = "has a step; steps of 1"
    if node.kind == "attention" and argument(call, 4, "dropout_p", 0.0):
        wrong = "draws random numbers, which depend on the layout; dropout_p=0"
    if name in ("lstm", "gru") and call.arguments[5] and call.arguments[6] and call.arguments[4] > 1:
        wrong = "draws random numbers, which depend on the layout; dropout=0"
    if name in ("addmm", "baddbmm") and {call.named.get("beta", 1), call.named.get("alpha", 1)} != {1}:
        wrong = "is scaled; alpha and beta of 1"
    wrong = wrong or _pool_problem(call, name) or _loss_problem(node, call, name)
    if wrong:
        problem, _, allowed = wrong.partition("; ")
        raise builder.refused(call, problem, allowed)


def _pool_problem(call: TracedCall, name: str) -> str:
    if name.startswith("max_pool") and argument(call, 4, "dilation", 1) not in (1, [1], [1, 1], [1, 1, 1]):
        return "has dilated windows; dilation of 1"
    if name.startswith("avg_pool"):
        padding = argument(call, 3, "padding", 0)
        has_padding = any(padding) if isinstance(padding, list) else bool(padding)
        if argument(call, 4, "ceil_mode", False):
            return "has windows beyond its rows; ceil_mode=False"
        if has_padding and not argument(call, 5, "count_include_pad", True):
            return "counts fewer rows at the edges; count_include_pad=True"
        if argument(call, 6, "divisor_override") is not None:
            return "divides by another number; no divisor_override"
    return ""


def _loss_problem(node: OpNode, call: TracedCall, name: str) -> str:
    if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        if argument(call, 2, "weight") is not None:
            return "weighs classes; no weight"
        if not node.output and argument(call, 3, "reduction", MEAN) != MEAN:
            return "is no mean; reduction='mean'"
        if name == "cross_entropy_loss" and argument(call, 5, "label_smoothing", 0.0):
            return "smooths labels; label_smoothing=0"
    if name == "mse_loss" and not node.output and argument(call, 2, "reduction", MEAN) != MEAN:
        return "is no mean; reduction='mean'"
    if name == "binary_cross_entropy_with_logits":
        if argument(call, 2, "weight") is not None or argument(call, 3, "pos_weight") is not None:
            return "weighs classes; no weight"
        if not node.output and argument(call, 4, "reduction", MEAN) != MEAN:
            return "is no mean; reduction='mean'"
    if name in ELEMENTWISE_LOSSES and argument(call, 2, "reduction", MEAN) != MEAN:
        return "is no mean; reduction='mean'"
    return ""


def _element_settings(
    builder: Builder, node: OpNode, call: TracedCall, name: str, targets: Mapping[str, Any]
) -> Settings:
    """The function of elements: PyTorch's own with the call's numbers."""
    if node.name == f"{call.name}_bias" or node.name.endswith("_repeat"):
        return {}
    if name in ELEMENTWISE_LOSSES:
        numbers = [value for value in call.arguments[3:] if isinstance(value, int | float)]
        return {"function": lambda x, y: ELEMENTWISE_LOSSES[name](x, y, *numbers)}
    if name == "glu":
        return {"function": lambda x, y: x * y.sigmoid()}
    return {"function": _called(builder, node, call, _out_of_place(targets[call.name]))}


def _out_of_place(target: Any) -> Any:
    """`target` as a function that makes a tensor of its own, where it changes the one that it is given:
    several may read that, and under some layouts it is a view."""
    space, name, *overload = str(target).split(".")
    if space != "aten" or not name.endswith("_") or name.endswith("__"):
        return target
    return getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload[0])


def _called(builder: Builder, node: OpNode, call: TracedCall, target: Any) -> Callable[..., Tensor]:
    """The call with its tensors replaced by operands: inputs in order, then parameters in order."""
    slots: dict[str, int] = {}
    seen: list[View] = []
    counts = [0, len(node.inputs)]
    for ref in refs_of(call):
        view = builder.views[ref.name]
        if not isinstance(view, View):
            raise ConfigError("reads several tensors as one", key=call.where)
        if view in seen and len(node.inputs) + len(node.parameters) < len(refs_of(call)):
            slots[ref.name] = slots[next(name for name in slots if builder.views[name] == view)]
            continue
        seen.append(view)
        slots[ref.name] = counts[view.is_parameter]
        counts[view.is_parameter] += 1

    def filled(value: Any, operands: tuple[Tensor, ...]) -> Any:
        if isinstance(value, Ref):
            return operands[slots[value.name]]
        return [filled(item, operands) for item in value] if isinstance(value, list) else value

    def function(*operands: Tensor) -> Tensor:
        arguments = [filled(value, operands) for value in call.arguments]
        result: Tensor = target(
            *arguments, **{key: filled(value, operands) for key, value in call.named.items()}
        )
        return result

    return function


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
