"""What a rank computes of recurrent layers and cells: step after step, each with the whole state before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.runtime.graphs.gathered import all_gather_dim, local_part
from shardwise.runtime.graphs.kernels_products import contracted
from shardwise.runtime.graphs.work import Dims, Kernel, ShardedOperator, arranged, without

Gates = Sequence[Tensor]


def recurrent(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """A layer over time. Without splits of its own it is PyTorch's."""
    op = work.op
    gates, units, width = op.parameters[0].dims
    state = op.parameters[1].dims[2]
    time = str(op.attributes["time"]).split()[0]
    dims = op.inputs[0].dims
    batch = without(dims, (width, time))
    if not work.axes((units, width, state)):
        return _whole_layer(work, inputs[0], parameters, (time, *batch), width)
    arguments = contracted(
        [(inputs[0], dims), (parameters[0], op.parameters[0].dims)], (time, *batch, gates, units)
    )
    arguments = work.summed(arguments, (width,), gradients="whole")
    advance = _lstm_step if op.kind == "lstm" else _gru_step
    before: Tensor | None = None
    cell: Tensor | None = None
    made = []
    for own in arguments.unbind():
        carried = None if before is None else _carried(work, before, parameters[1], units, state)
        before, cell = advance(own, carried, parameters[2:], before, cell)
        made.append(before)
    return arranged(torch.stack(made), (time, *batch, units), op.output).contiguous()


def _whole_layer(
    work: ShardedOperator, value: Tensor, parameters: Sequence[Tensor], rows: Dims, width: str
) -> Tensor:
    op = work.op
    is_lstm = op.kind == "lstm"
    units = op.parameters[0].dims[1]
    value = arranged(value, op.inputs[0].dims, (*rows, width))
    lead = value.shape[:-1]
    flat = value.reshape(lead[0], -1, value.shape[-1])
    weights = [weight.flatten(0, 1) for weight in parameters]
    if len(weights) == 3:
        weights.append(torch.zeros_like(weights[2]))
    start = flat.new_zeros(1, flat.shape[1], work.length(units))
    settings = (weights, len(weights) == 4, 1, 0.0, True, False, False)
    result = (
        torch.lstm(flat, (start, start), *settings)[0] if is_lstm else torch.gru(flat, start, *settings)[0]
    )
    return arranged(result.reshape(*lead, -1), (*rows, units), op.output).contiguous()


def _carried(work: ShardedOperator, before: Tensor, weight: Tensor, units: str, state: str) -> Tensor:
    """The product of the state's weight and the whole state of the step before."""
    whole = all_gather_dim(work, before, before.dim() - 1, units)
    whole = local_part(work, whole, whole.dim() - 1, state)
    product = (whole @ weight.flatten(0, 1).T).unflatten(-1, weight.shape[:2])
    return work.summed(product, (state,), gradients="whole")


def cell(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """A step of a state that every rank has whole; of it a rank that makes some units takes their part."""
    op = work.op
    gates, units, width = op.parameters[0].dims
    dims = op.inputs[0].dims
    batch = without(dims, (width,))
    arguments = contracted(
        [(inputs[0], dims), (parameters[0], op.parameters[0].dims)], (*batch, gates, units)
    )
    arguments = work.summed(arguments, (width,), gradients="whole")
    is_lstm = op.kind == "lstm_cell"
    states = list(inputs[1].unbind()) if is_lstm else [inputs[1]]
    carried = (states[0] @ parameters[1].flatten(0, 1).T).unflatten(-1, parameters[1].shape[:2])
    first, stop = work.interval(units)
    own = [each.narrow(-1, first, stop - first) for each in states]
    if not is_lstm:
        return _gru_step(arguments, carried, parameters[2:], own[0], None)[0]
    made = _lstm_step(arguments, carried, parameters[2:], own[0], own[1])
    return torch.stack([each for each in made if each is not None])


def _lstm_step(
    own: Tensor, carried: Tensor | None, biases: Gates, before: Tensor | None, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gates in PyTorch's order: input, forget, cell, output."""
    total = own if carried is None else own + carried
    for bias in biases:
        total = total + bias
    enter, forget, fresh, leave = total.unbind(-2)
    cell_now = enter.sigmoid() * fresh.tanh()
    if cell is not None:
        cell_now = cell_now + forget.sigmoid() * cell
    return leave.sigmoid() * cell_now.tanh(), cell_now


def _gru_step(
    own: Tensor, carried: Tensor | None, biases: Gates, before: Tensor | None, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gates in PyTorch's order: reset, update, candidate. The first bias is the input's, the second the
    state's, which the reset gate scales."""
    of_input = own + biases[0] if biases else own
    of_state = torch.zeros_like(own) if carried is None else carried
    if len(biases) > 1:
        of_state = of_state + biases[1]
    reset, update, fresh = of_input.unbind(-2)
    reset_state, update_state, fresh_state = of_state.unbind(-2)
    update = (update + update_state).sigmoid()
    candidate = (fresh + (reset + reset_state).sigmoid() * fresh_state).tanh()
    made = (1.0 - update) * candidate
    return (made if before is None else made + update * before), None


RECURRENT: Mapping[str, Kernel] = {"lstm": recurrent, "gru": recurrent, "lstm_cell": cell, "gru_cell": cell}
"""By kind."""
