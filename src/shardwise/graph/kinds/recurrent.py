"""LSTM and GRU layers over time, and cells for a single step with a given state.

A step needs the whole state of the previous one, which is gathered before each step where units are sharded.
"""

from __future__ import annotations

from shardwise.graph.kinds.kind import Attribute, OperatorKind, dims_of, dims_text, refuse, without
from shardwise.graph.record import KernelWork, Moved, OpNode, SavedTensors
from shardwise.graph.rules import REPLICATE, CollectiveCall, ShardingRule, split_rule, split_rules

# Layers

Dims = tuple[str, ...]


def recurrent_dims(op: OpNode) -> tuple[str, str, str, str]:
    """Gates, units, input width and recurrent width, by their positions in the weights."""
    gates, units, width = op.parameters[0].dims
    return gates, units, width, op.parameters[1].dims[2]


def _time(op: OpNode) -> str:
    """The time dim."""
    return dims_of(op, "time", ())[0]


def _batch(op: OpNode) -> Dims:
    return without(_without_width(op), (_time(op),))


def _check(op: OpNode, gates: int) -> None:
    weights = [parameter.dims for parameter in op.parameters]
    allowed = (
        f"input [b, t, i], weights [g, h, i] and [g, h, r] of g = {gates} and r = h, biases [g, h], output "
        "[b, t, h], with `time: t`"
    )
    found = f"input [{dims_text(op.inputs[0].dims)}], " + "; ".join(
        f"[{dims_text(dims)}]" for dims in weights
    )
    if len(weights[0]) != 3 or len(weights[1]) != 3 or weights[0][:2] != weights[1][:2]:
        raise refuse(op, "needs a weight of its input and one of its state", found=found, allowed=allowed)
    gate, units, width, recurrent = recurrent_dims(op)
    sizes_fit = op.dims[gate] == gates and op.dims[recurrent] == op.dims[units]
    output = tuple(units if dim == width else dim for dim in op.inputs[0].dims)
    own = recurrent not in (*op.inputs[0].dims, units)
    if not sizes_fit or not own or op.output != output or width not in op.inputs[0].dims:
        raise refuse(op, "has weights of other dims than its state", found=found, allowed=allowed)
    if any(dims != (gate, units) for dims in weights[2:]):
        raise refuse(
            op, "needs biases with the dims of its gates", key="parameters", found=found, allowed=allowed
        )
    if _time(op) not in _without_width(op):
        raise refuse(
            op, "needs its time dim in the input", key="attributes.time", found=_time(op), allowed=allowed
        )


def _without_width(op: OpNode) -> Dims:
    return without(op.inputs[0].dims, (recurrent_dims(op)[2],))


def _rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. With sharded units, the state is all-gathered before each step but the first (which has
    a zero state), and its gradients are reduce-scattered. With a sharded input or state, the gates' arguments
    are all-reduced."""
    gates, units, width, recurrent = recurrent_dims(op)
    batch, time = _batch(op), _time(op)
    steps = op.dims[time] - 1
    state = CollectiveCall(
        collective="all_gather", dims=(*batch, recurrent), forward_calls=steps, backward_calls=0
    )
    scattered = CollectiveCall(
        collective="reduce_scatter", dims=(*batch, recurrent), forward_calls=0, backward_calls=steps
    )
    gathered = CollectiveCall(
        collective="all_gather", dims=(*batch, units), forward_calls=0, backward_calls=steps
    )
    summed = CollectiveCall(
        collective="all_reduce", dims=(*batch, gates, units), forward_calls=steps, backward_calls=0
    )
    arguments = CollectiveCall(collective="all_reduce", dims=(*batch, time, gates, units), backward_calls=0)
    return (
        *split_rules(op, batch),
        split_rule(op, units, collectives=(state, scattered) if steps else ()),
        split_rule(op, width, output=REPLICATE, collectives=(arguments,)),
        split_rule(op, recurrent, output=REPLICATE, collectives=(summed, gathered) if steps else ()),
    )


def _work(op: OpNode) -> tuple[KernelWork, ...]:
    """The input's product for all steps at once; then, per step, the state's product and the memory-bound
    rest: gates read twice and written, the state read and written."""
    gates, units, width, recurrent = recurrent_dims(op)
    batch, time = _batch(op), _time(op)
    return (
        KernelWork(kind="matmul", m=(*batch, time), n=(gates, units), k=(width,)),
        KernelWork(kind="matmul", m=batch, n=(gates, units), k=(recurrent,), serial=(time,)),
        KernelWork(
            kind="memory",
            moved=(Moved((*batch, gates, units), 3.0, 2.0), Moved((*batch, units), 3.0, 4.0)),
            serial=(time,),
        ),
    )


def _saved(op: OpNode) -> SavedTensors:
    """The input; every gate; every cell state (for a GRU the operand of its reset gate); and every state as
    the next step reads it, which may be more than this rank's shard."""
    gates, units, _, recurrent = recurrent_dims(op)
    rows = (*_batch(op), _time(op))
    own = ((*rows, gates, units), (*rows, units), (*rows, recurrent))
    return SavedTensors(inputs=(0,), own=tuple((dims, None) for dims in own))


def _recurrent(name: str, summary: str, gates: int) -> OperatorKind:
    def check(op: OpNode) -> None:
        _check(op, gates)

    return OperatorKind(
        name=name,
        summary=summary,
        operands="input [b, t, i]; input weight [g, h, i], state weight [g, h, r], at most two biases "
        "[g, h]; output [b, t, h]",
        inputs=(1, 1),
        parameters=(2, 4),
        attributes=(Attribute(name="time", type="dim", meaning="the time dim", required=True),),
        check=check,
        splits=_rules,
        work=_work,
        saved=_saved,
    )


LSTM = _recurrent("lstm", "A layer of long short-term memory over time, from a state of zeros: 4 gates.", 4)
GRU = _recurrent("gru", "A layer of gated recurrent units over time, from a state of zeros: 3 gates.", 3)


# Cells


def _check_cell(op: OpNode, gates: int, state: tuple[str, ...]) -> None:
    if not (_has_weights(op) and _fits(op, gates, state)):
        stacked = " ".join((*state, "b"))
        tensors = (op.inputs[0].dims, op.inputs[1].dims, op.output)
        raise refuse(
            op,
            "has tensors that do not fit its state",
            found="input [{}], state [{}], output [{}]".format(*map(dims_text, tensors)),
            allowed=f"input [b i], state [{stacked} r], weights [g h i] and [g h r], biases [g h], output "
            f"[{stacked} h], with g = {gates} and r = h",
        )


def _fits(op: OpNode, gates: int, state: tuple[str, ...]) -> bool:
    gate, units, width, recurrent = recurrent_dims(op)
    given, carried = op.inputs[0].dims, op.inputs[1].dims
    batch = without(given, (width,))
    lead = without(carried, (*batch, recurrent))
    return (
        width in given
        and len(lead) == len(state)
        and carried == (*lead, *batch, recurrent)
        and op.output == (*lead, *batch, units)
        and all(op.dims[dim] == 2 for dim in lead)
        and op.dims[gate] == gates
        and op.dims[recurrent] == op.dims[units]
        and all(bias.dims == (gate, units) for bias in op.parameters[2:])
    )


def _has_weights(op: OpNode) -> bool:
    weights = [parameter.dims for parameter in op.parameters[:2]]
    return all(len(dims) == 3 for dims in weights) and weights[0][:2] == weights[1][:2]


def _cell_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. Units need the whole state and slice their part; with a sharded input, the gates'
    arguments are all-reduced."""
    gates, units, width, _ = recurrent_dims(op)
    batch = without(op.inputs[0].dims, (width,))
    arguments = CollectiveCall(collective="all_reduce", dims=(*batch, gates, units), backward_calls=0)
    return (
        *split_rules(op, batch),
        split_rule(op, units),
        split_rule(op, width, output=REPLICATE, collectives=(arguments,)),
    )


def _cell_work(op: OpNode) -> tuple[KernelWork, ...]:
    gates, units, width, recurrent = recurrent_dims(op)
    batch = without(op.inputs[0].dims, (width,))
    return (
        KernelWork(kind="matmul", m=batch, n=(gates, units), k=(width,)),
        KernelWork(kind="matmul", m=batch, n=(gates, units), k=(recurrent,)),
        KernelWork(
            kind="memory",
            moved=(Moved((*batch, gates, units), 3.0, 2.0), Moved((*batch, units), 3.0, 4.0)),
        ),
    )


def _cell_saved(op: OpNode) -> SavedTensors:
    gates, units, width, _ = recurrent_dims(op)
    rows = without(op.inputs[0].dims, (width,))
    return SavedTensors(inputs=(0, 1), own=(((*rows, gates, units), None), ((*rows, units), None)))


def _cell(name: str, summary: str, gates: int, state: tuple[str, ...]) -> OperatorKind:
    def check(op: OpNode) -> None:
        _check_cell(op, gates, state)

    stacked = " ".join((*state, "b"))
    return OperatorKind(
        name=name,
        summary=summary,
        operands=f"input [b i]; state [{stacked} r]; weights [g h i] and [g h r], at most two biases [g h]; "
        f"output [{stacked} h]",
        inputs=(2, 2),
        parameters=(2, 4),
        check=check,
        splits=_cell_rules,
        work=_cell_work,
        saved=_cell_saved,
    )


LSTM_CELL = _cell(
    "lstm_cell",
    "One step of long short-term memory; hidden state and cell state are stacked along the first dim.",
    4,
    ("two",),
)
GRU_CELL = _cell("gru_cell", "One step of a gated recurrent unit.", 3, ())
