"""What a rank computes of contractions and of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.runtime.graphs.work import Dims, Kernel, ShardedOperator, aligned, arranged, without


def contracted(operands: Sequence[tuple[Tensor, Dims]], output: Dims) -> Tensor:
    """The product of all operands, summed over the dims that the output has not."""
    letters: dict[str, str] = {}
    for dims in (*(dims for _, dims in operands), output):
        for dim in dims:
            letters.setdefault(dim, chr(ord("a") + len(letters)))
    terms = ",".join("".join(letters[dim] for dim in dims) for _, dims in operands)
    equation = f"{terms}->{''.join(letters[dim] for dim in output)}"
    return torch.einsum(equation, *(tensor for tensor, _ in operands))


def einsum(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return contracted(_operands(work, inputs, parameters), work.op.output)


def linear(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """A product with a weight; where dims lie as PyTorch's own has them, that one."""
    op = work.op
    (read,), weight = op.inputs, op.parameters[0].dims
    is_plain = len(weight) == 2 and read.dims[-1] == weight[1] and op.output == (*read.dims[:-1], weight[0])
    if is_plain:
        return functional.linear(inputs[0], *parameters)
    product = contracted(_operands(work, inputs, parameters[:1]), op.output)
    for bias, parameter in zip(parameters[1:], op.parameters[1:], strict=True):
        product = product + aligned(bias, parameter.dims, op.output)
    return product


def _operands(
    work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[tuple[Tensor, Dims]]:
    op = work.op
    read = [(tensor, operand.dims) for tensor, operand in zip(inputs, op.inputs, strict=True)]
    return [*read, *((tensor, own.dims) for tensor, own in zip(parameters, op.parameters, strict=False))]


def embedding(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Rows of a table by index; of rows that other ranks hold a rank makes zeros."""
    op = work.op
    indices, table = op.inputs[0].dims, op.parameters[0].dims
    (rows,) = without(table, (*indices, *op.output))
    tables = tuple(dim for dim in table if dim in indices)
    width = without(table, (rows, *tables))
    order = (*tables, *without(indices, tables))
    first, stop = work.interval(rows)
    index = arranged(inputs[0], indices, order).long() - first
    values = arranged(parameters[0], table, (*tables, rows, *width))
    outside = (index < 0) | (index >= stop - first) if work.is_divided(rows) else None
    if outside is not None:
        index = index.masked_fill(outside, 0)
    for at, dim in enumerate(tables):
        step = torch.arange(work.length(dim), device=index.device) * (stop - first)
        for later in tables[at + 1 :]:
            step = step * work.length(later)
        index = index + step.view(-1, *(1 for _ in order[at + 1 :]))
    flat = values.reshape(-1, *values.shape[len(tables) + 1 :])
    found = functional.embedding(index, flat.flatten(1)).unflatten(-1, flat.shape[1:] or (1,))
    if not width:
        found = found.squeeze(-1)
    if outside is not None:
        found = found.masked_fill(outside.view(*outside.shape, *(1 for _ in width)), 0.0)
    made = (*order, *width)
    summed = [made.index(dim) for dim in made if dim not in op.output]
    if summed:
        found = found.sum(summed)
    return arranged(found, [dim for dim in made if dim in op.output], op.output).contiguous()


PRODUCTS: Mapping[str, Kernel] = {
    "einsum": einsum,
    "matmul": einsum,
    "linear": linear,
    "embedding": embedding,
}
"""By kind."""
