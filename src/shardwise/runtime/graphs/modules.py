"""Modules of operator graphs: what each operator computes exactly, its parameters and its data.

`graph_module` builds a module for a graph that has none, with seeded parameters. `captured` compares a user's
module, exported by torch.export, with the plan's graph. It returns what the graph does not hold: the settings
of each operator (`settings_of`), the parameter values, and how a batch becomes the graph's inputs.
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
from shardwise.runtime.state_dict import ParameterValue

# Modules for graphs without one

NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm")

EMBEDDING_STD = 0.02
"""Standard deviation of the rows of embedding tables: GPT-2's."""


class GraphModule(nn.Module):
    """The parameters of `graph` by their names in it, those of each repetition of a block included."""

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
    """A module of `graph` whose parameters depend on the seed and on their names.

    Weights are normal with the inverse root of their fan-in as standard deviation; norms are one, biases
    zero.
    """
    value = graph_value(graph, seed=seed)
    return GraphModule(graph, {name: value(name, shape) for name, shape in _shapes(graph).items()})


def meta_graph_module(graph: OpGraph) -> GraphModule:
    """A module of `graph` on the meta device."""
    shapes = _shapes(graph)
    return GraphModule(graph, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def graph_value(graph: OpGraph, *, seed: int) -> ParameterValue:
    """The initial values of the parameters of `graph_module`."""
    readers = first_readers(graph)
    return lambda name, shape: _initial(name, *readers[name], seed)


def _shapes(graph: OpGraph) -> dict[str, torch.Size]:
    """The shape of every parameter by name."""
    return {
        name: torch.Size(op.shape(op.parameters[slot].dims))
        for name, (op, slot) in first_readers(graph).items()
    }


def check_computable(graph: OpGraph) -> None:
    """ConfigError with the name of the first operator whose function `graph` does not define: running it
    needs the module that the graph was captured from."""
    for block in graph.blocks:
        for op in block.operators:
            if op.kind == "elementwise":
                try:
                    element_function(op)
                except ConfigError as error:
                    raise error.within(key=f"graph.{block.name}") from None


def first_readers(graph: OpGraph) -> dict[str, tuple[OpNode, int]]:
    """Every parameter by name, with its first reader and its position among that reader's parameters."""
    found: dict[str, tuple[OpNode, int]] = {}
    for block in graph.blocks:
        for count in range(block.repeat):
            for op in block.operators:
                for slot, parameter in enumerate(op.parameters):
                    found.setdefault(repeated(parameter.name, count, block.repeat), (op, slot))
    return found


def is_weight(op: OpNode, slot: int) -> bool:
    """Whether a parameter is multiplied with an input: neither a bias nor the scale of a norm."""
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


# Settings of operators, from traced calls

COST_ONLY = (
    "std", "var", "linalg_vector_norm", "logsumexp", "stack", "prelu", "binary_cross_entropy",
)  # fmt: skip
"""PyTorch operators that graphs model for their cost only: the graph's operators compute something else."""

EPSILONS: Mapping[str, int] = {
    "layer_norm": 4, "rms_norm": 3, "group_norm": 4, "batch_norm": 7, "instance_norm": 7
}  # fmt: skip
"""Position of epsilon among the arguments."""

ELEMENTWISE_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "l1_loss": lambda x, y: (x - y).abs(),
    "smooth_l1_loss": lambda x, y, beta=1.0: functional.smooth_l1_loss(x, y, reduction="none", beta=beta),
    "huber_loss": lambda x, y, delta=1.0: functional.huber_loss(x, y, reduction="none", delta=delta),
}
"""Losses that a graph has as an elementwise function and a mean."""

MEAN = 1
"""PyTorch's enum value of reduction='mean'."""


def settings_of(builder: Builder, node: OpNode, call: TracedCall, targets: Mapping[str, Any]) -> Settings:
    """What `node` computes beyond its kind: its function, epsilon or scale.

    ConfigError with the source line of a call that this runtime does not run.
    """
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
    """ConfigError for a call that the graph does not represent exactly."""
    if name in COST_ONLY:
        raise builder.refused(call, "is modelled for its cost only", "the same function in other operators")
    wrong = ""
    if node.kind == "elementwise" and node.attributes["function"] == "dropout":
        wrong = "draws random numbers, which depend on the layout; module.eval() or p=0"
    if name == "batch_norm" and node.kind == "elementwise":
        wrong = "uses running statistics; training mode"
    if node.kind == "embedding" and int(argument(call, 2, "padding_idx", -1)) >= 0 and name == "embedding":
        wrong = "has a row without a gradient; no padding_idx"
    if node.kind == "slice" and name == "slice" and int(argument(call, 4, "step", 1)) != 1:
        wrong = "has a step other than 1; step=1"
    if node.kind == "attention" and argument(call, 4, "dropout_p", 0.0):
        wrong = "draws random numbers, which depend on the layout; dropout_p=0"
    if name in ("lstm", "gru") and call.arguments[5] and call.arguments[6] and call.arguments[4] > 1:
        wrong = "draws random numbers, which depend on the layout; dropout=0"
    if name in ("addmm", "baddbmm") and {call.named.get("beta", 1), call.named.get("alpha", 1)} != {1}:
        wrong = "scales its terms; alpha=1 and beta=1"
    wrong = wrong or _pool_problem(call, name) or _loss_problem(node, call, name)
    if wrong:
        problem, _, allowed = wrong.partition("; ")
        raise builder.refused(call, problem, allowed)


def _pool_problem(call: TracedCall, name: str) -> str:
    if name.startswith("max_pool") and argument(call, 4, "dilation", 1) not in (1, [1], [1, 1], [1, 1, 1]):
        return "has dilated windows; dilation=1"
    if name.startswith("avg_pool"):
        padding = argument(call, 3, "padding", 0)
        has_padding = any(padding) if isinstance(padding, list) else bool(padding)
        if argument(call, 4, "ceil_mode", False):
            return "has windows past its last row; ceil_mode=False"
        if has_padding and not argument(call, 5, "count_include_pad", True):
            return "leaves padding out of the mean; count_include_pad=True"
        if argument(call, 6, "divisor_override") is not None:
            return "divides by a given number; no divisor_override"
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
    """The elementwise function: PyTorch's own with the numbers of the call."""
    if node.name == f"{call.name}_bias" or node.name.endswith("_repeat"):
        return {}
    if name in ELEMENTWISE_LOSSES:
        numbers = [value for value in call.arguments[3:] if isinstance(value, int | float)]
        return {"function": lambda x, y: ELEMENTWISE_LOSSES[name](x, y, *numbers)}
    if name == "glu":
        return {"function": lambda x, y: x * y.sigmoid()}
    return {"function": _called(builder, node, call, _out_of_place(targets[call.name]))}


def _out_of_place(target: Any) -> Any:
    """The out-of-place variant of an in-place `target`: other operators may read its operand, and under some
    layouts the operand is a view."""
    space, name, *overload = str(target).split(".")
    if space != "aten" or not name.endswith("_") or name.endswith("__"):
        return target
    return getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload[0])


def _called(builder: Builder, node: OpNode, call: TracedCall, target: Any) -> Callable[..., Tensor]:
    """The call as a function of its operands: inputs in order, then parameters in order."""
    slots: dict[str, int] = {}
    seen: list[View] = []
    counts = [0, len(node.inputs)]
    for ref in refs_of(call):
        view = builder.views[ref.name]
        if not isinstance(view, View):
            raise ConfigError("reads a list of tensors as one operand", key=call.where)
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


# A user's module compared with its graph

MODULE = "module"
"""Key of the module in messages: it has no file of its own."""


@dataclass(frozen=True)
class Captured:
    """A module as the plan's graph has it.

    `settings` are those of operators, by number. `values` are parameters by their names in the graph;
    `matrices` are the names of those that are matrices in the module. `data` turns the arguments of the
    module's forward into the inputs of the graph.
    """

    settings: Mapping[int, Settings]
    values: Mapping[str, Tensor]
    matrices: frozenset[str]
    data: Callable[[Any], Mapping[str, Tensor]]


def captured(module: nn.Module, inputs: Any, graph: OpGraph) -> Captured:
    """Compare `module`, called with `inputs` of the whole batch, with `graph`.

    `inputs` are positional arguments, or a dict of keyword arguments. ConfigError where the module is another
    network than the graph, or has a call that graphs model for its cost only.
    """
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
    """ConfigError where the module has an autograd function with its own backward pass: graphs differentiate
    the forward pass."""
    for node in autograd_nodes(_results(module, inputs)):
        if isinstance(node, BackwardCFunction):
            raise ConfigError(
                "uses a custom autograd.Function, which operator graphs do not support", key=MODULE,
                found=node.name().removesuffix("Backward"), allowed="functions that PyTorch differentiates",
            )  # fmt: skip


def _results(module: nn.Module, inputs: Any) -> Any:
    """The results of a copy of the module: on the meta device, unless its forward reads values of tensors."""
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
    """`value` with twice as many samples, where its first dim is the batch."""
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
    """Names of data in the plan's graph mapped to those in the module. ConfigError where operators differ."""
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
    """The attributes that do not name dims; `number` is taken from the module."""
    dims = ("over", "time", "heads", "kv_heads", "channel", "number")
    return {name: value for name, value in op.attributes.items() if name not in dims}


def _describe(op: OpNode) -> str:
    shapes = " ".join(str(list(op.shape(dims))) for dims in op.tensors)
    return f"{op.kind} {shapes}"


def _other_network_error(found: str, allowed: str) -> ConfigError:
    return ConfigError("is not the plan's network", key=MODULE, found=found, allowed=allowed)


def part_of_parameter(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter by its name in a graph: `in_proj.weight[0:64]` is a range of its rows."""
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
    """Computes the inputs of a graph from the arguments of the module.

    The inputs are arguments (tensors at `places`), buffers, and tensors computed from these without a
    parameter.
    """

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
        """The arguments of the module's forward by their names in the exported program."""
        tensors = tensors_by_path(forward_arguments(batch))
        if set(tensors) != set(self.places):
            raise ConfigError(
                "does not have the arguments that the module was captured with", key="batch",
                found=f"{len(tensors)} tensors",
                allowed=f"{len(self.places)} tensors",
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
        # Not in the module: the index of a one-row parameter that is repeated, or the initial state of a
        # cell.
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
        """ConfigError where the initial state of a recurrent layer is not zero."""
        made: dict[str, Any] = {**self.buffers, **self.forward_inputs(inputs)}
        for node in found:
            if node.kind in ("lstm", "gru"):
                call = self.nodes[builder.calls[node.name].name]
                states = call.args[1] if isinstance(call.args[1], list | tuple) else [call.args[1]]
                for state in states:
                    if self._value(state.name, made).count_nonzero():
                        raise ConfigError(
                            f"{node.name} has an initial state", key=MODULE, found="nonzero", allowed="zeros"
                        )
