"""Batch sizes of a graph: the same graph at another size (`scaled`), and whether micro-batches are exact.

Micro-batches divide the batch as the ranks of one more mesh axis would, one after the other and without
communication. So an operator can run by micro-batch if it has a sharding rule without collectives for its
part. `loss_weight` checks this for a whole graph and returns the weight of the loss of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from shardwise.errors import ConfigError
from shardwise.graph.operator import rules_of
from shardwise.graph.record import Block, OpGraph, OpNode, skip_tensors_of
from shardwise.graph.rules import PARTIAL, REPLICATE, REPLICATE_SUM_GRAD, Placement, ShardingRule, shard
from shardwise.graph.sizes import CONSTANT, MAX_SIZE, SizeGrowth, scaled_size
from shardwise.inputs import short_repr

# Scaling

Ratio = tuple[Fraction, Fraction]


def scaled(graph: OpGraph, batch: int | None = None, seq_len: int | None = None) -> OpGraph:
    """`graph` at this batch and sequence length (None: its own).

    Every dim grows as `graph.growth` says of its name, and graph inputs as the dims of their readers. An
    operator's own `flop` and `moved_bytes` grow as its iteration space. ConfigError where the graph has no
    sequence length, or a dim would not be an integer.
    """
    if seq_len is not None and graph.seq_len is None:
        raise ConfigError(
            f"cannot change: graph {short_repr(graph.name)} has no sequence length",
            key="seq_len",
            found=str(seq_len),
        )
    ratio = (
        Fraction(batch or graph.batch, graph.batch),
        Fraction(seq_len or graph.seq_len or 1, graph.seq_len or 1),
    )
    blocks = tuple(
        replace(block, operators=tuple(_scaled_node(node, graph.growth, ratio) for node in block.operators))
        for block in graph.blocks
    )
    return replace(
        graph,
        inputs={name: _scaled_input(graph, name, ratio) for name in graph.inputs},
        blocks=blocks,
        batch=batch or graph.batch,
        seq_len=seq_len or graph.seq_len,
    )


def input_growth(graph: OpGraph, name: str) -> tuple[SizeGrowth, ...]:
    """The growth of each dim of a graph input, as the dims of its readers have it."""
    for block in graph.blocks:
        for node in block.operators:
            for operand in node.inputs:
                if operand.source == name:
                    return tuple(graph.growth.get(dim, CONSTANT) for dim in operand.dims)
    return (CONSTANT,) * len(graph.inputs[name])


def _scaled_input(graph: OpGraph, name: str, ratio: Ratio) -> tuple[int, ...]:
    pairs = zip(graph.inputs[name], input_growth(graph, name), strict=True)
    return tuple(_whole(scaled_size(size, growth, ratio), short_repr(name)) for size, growth in pairs)


def _scaled_node(node: OpNode, growth: Mapping[str, SizeGrowth], ratio: Ratio) -> OpNode:
    dims = {
        dim: _whole(
            scaled_size(size, growth.get(dim, CONSTANT), ratio), f"{short_repr(node.name)}, dim {dim}"
        )
        for dim, size in node.dims.items()
    }
    factor = prod(dims.values()) / prod(node.dims.values())
    return replace(
        node,
        dims=dims,
        flop=None if node.flop is None else node.flop * factor,
        moved_bytes=None if node.moved_bytes is None else node.moved_bytes * factor,
    )


def _whole(size: Fraction, what: str) -> int:
    """`size` as an integer; ConfigError where a dim cannot have it."""
    if size.denominator == 1 and size <= MAX_SIZE:
        return int(size)
    raise ConfigError(
        f"gives {what} an invalid size",
        key="batch",
        found=f"{float(size):g}",
        allowed=f"a batch and a sequence length that make it a whole number up to {MAX_SIZE:g}",
    )


# Micro-batches

MEANS = ("cross_entropy", "mean_square", "binary_cross_entropy")
"""Kinds that divide by the number of elements that they sum over."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a tensor that one micro-batch has.

    It is a share of the samples along a dim, the whole tensor (`REPLICATE`), or a partial sum (`PARTIAL`). A
    partial sum that `is_mean` is too large by the number of micro-batches. `groups`: the micro-batch has
    adjacent samples in each of this many groups of the dim. For time steps and samples merged into one dim,
    these are its samples of every step.
    """

    placement: Placement
    is_mean: bool = False
    groups: int = 1


def loss_weight(graph: OpGraph, microbatches: int) -> float:
    """The factor on the loss of each of `microbatches`, with which their sum is the loss of the whole batch.

    `graph` has the size of the whole batch. ConfigError with the name of the first operator that combines
    samples other than in a sum: the batch norm statistics of a micro-batch are not those of the batch.
    """
    if microbatches == 1:
        return 1.0
    result: _Share | None = None
    there: dict[str, _Share] = {}
    for block, skip_outputs in zip(graph.blocks, skip_tensors_of(graph).skip_outputs, strict=True):
        for _ in range(block.repeat):
            before = result
            made = _block_shares(graph, block, before, there, microbatches)
            result = made[block.operators[-1].name]
            if result == before:  # so the next repetition is equal to this one
                break
        there |= {name: made[name] for name in skip_outputs}
    if result is None or result.placement != PARTIAL:
        raise _refused(graph.blocks[-1].operators[-1], microbatches)
    return 1.0 / microbatches if result.is_mean else 1.0


def samples_dim(graph: OpGraph, name: str) -> int | None:
    """The dim of graph input `name` along which the batch is split; None where each micro-batch reads all of
    it."""
    return _batch_dim(input_growth(graph, name))


def _block_shares(
    graph: OpGraph, block: Block, entry: _Share | None, there: Mapping[str, _Share], microbatches: int
) -> dict[str, _Share]:
    """The part of each tensor that a micro-batch has in one repetition of a block; `there` has earlier
    tensors."""
    made = dict(there)
    if block.entry is not None and entry is not None:
        made[block.entry] = entry
    for op in block.operators:
        for operand in op.inputs:
            if operand.source in graph.inputs:
                dim = samples_dim(graph, operand.source)
                made[operand.source] = _Share(REPLICATE if dim is None else shard(dim))
        reads = [made[operand.source] for operand in op.inputs]
        made[op.name] = _result_share(op, reads, graph.growth, microbatches)
    return made


def _result_share(
    op: OpNode, reads: Sequence[_Share], growth: Mapping[str, SizeGrowth], microbatches: int
) -> _Share:
    """The part of an operator's result that a micro-batch has, from the parts of its inputs."""
    sizes = [[growth.get(dim, CONSTANT) for dim in dims] for dims in op.tensors]
    along = _batch_dim(sizes[-1])
    groups = {read.groups for read in reads if read.placement >= 0}
    if any(sum(each.batch for each in dims) > 1 for dims in sizes) or len(groups) > 1:
        raise _refused(op, microbatches)  # samples are compared with each other, or have different groups
    if op.kind == "reshape" and groups and along is not None:
        return _reshaped(op, reads[0], along, microbatches)
    for rule in rules_of(op):
        output = _value_placement(rule.output)
        if _matches(rule, reads) and (output < 0 if along is None else output == shard(along)):
            is_divisible = rule.split is None or rule.units % microbatches == 0
            is_by_rows = groups <= {1} or (rule.split is not None and rule.units == op.dims[rule.split])
            summed = {read.is_mean for read in reads if read.placement == PARTIAL}
            if output == PARTIAL and not summed:
                summed = {op.kind in MEANS or op.attributes.get("function") == "mean"}
            if is_divisible and is_by_rows and len(summed) < 2:
                return _Share(
                    output, is_mean=True in summed, groups=max(groups, default=1) if output >= 0 else 1
                )
    raise _refused(op, microbatches)


def _reshaped(op: OpNode, read: _Share, along: int, microbatches: int) -> _Share:
    """The part of a reshaped tensor that a micro-batch has: of each group, whole rows of the dim `along`."""
    made = op.shape(op.output)
    groups = read.groups * prod(op.shape(op.inputs[0].dims)[: read.placement])
    ahead, after = prod(made[:along]), prod(made[along + 1 :])
    if groups % ahead or (prod(made) // groups) % (after * microbatches):
        raise _refused(op, microbatches)
    return _Share(shard(along), groups=groups // ahead)


def _matches(rule: ShardingRule, reads: Sequence[_Share]) -> bool:
    """Whether an operator under `rule` reads the parts of a micro-batch and whole parameters, without
    collectives."""
    return (
        not rule.collectives
        and [_value_placement(placement) for placement in rule.inputs] == [read.placement for read in reads]
        and all(_value_placement(placement) == REPLICATE for placement in rule.parameters)
    )


def _value_placement(placement: Placement) -> Placement:
    """A placement without its gradient."""
    return REPLICATE if placement == REPLICATE_SUM_GRAD else placement


def _batch_dim(growth: Sequence[SizeGrowth]) -> int | None:
    """The first dim that grows with the batch."""
    return next((at for at, each in enumerate(growth) if each.batch), None)


def _refused(op: OpNode, microbatches: int) -> ConfigError:
    return ConfigError(
        f"are not exact: {op.kind} operator {op.name} computes across samples",
        key="layout.microbatches", found=str(microbatches), allowed="1",
    )  # fmt: skip
