"""LSTM and GRU cells: a single step of a given state."""

from __future__ import annotations

from shardwise.graph.dividing import split_rule, split_rules
from shardwise.graph.kinds.kind import OperatorKind, dims_text, refuse, without
from shardwise.graph.kinds.recurrent import recurrent_dims
from shardwise.graph.placement import REPLICATE
from shardwise.graph.record import OpNode
from shardwise.graph.rule import CollectiveCall, ShardingRule
from shardwise.graph.work import KernelWork, Moved, SavedTensors


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
    """Units need the whole state and take their own part of it; a split input sums the gates' arguments."""
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
