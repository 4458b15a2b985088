"""Data parallelism: every device has the whole network and a part of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.graph.customary.together import layout_from_rules
from shardwise.graph.layout import allows
from shardwise.graph.loans import skip_tensors_of
from shardwise.graph.named import GraphLayout
from shardwise.graph.operator import rules_of
from shardwise.graph.placement import REPLICATE, REPLICATE_SUM_GRAD, Placement
from shardwise.graph.record import OpGraph, OpNode
from shardwise.graph.rule import ShardingRule
from shardwise.graph.sizes import CONSTANT


def data_parallel(graph: OpGraph, ranks: Sequence[int]) -> GraphLayout | None:
    """The batch divided along all axes of a mesh of `ranks`, parameters and optimizer states whole, nothing
    recomputed. None where no dim follows the batch, or the batch has no part for every rank."""
    rules = batch_rules(graph)
    if all(rule.split is None for block in rules for rule in block.values()):
        return None
    along = [{name: (rule,) * len(ranks) for name, rule in block.items()} for block in rules]
    for block, own in zip(graph.blocks, along, strict=True):
        if not all(allows(op, own[op.name], ranks) for op in block.operators):
            return None
    return layout_from_rules(graph, tuple(ranks), along)


def batch_rules(graph: OpGraph) -> list[dict[str, ShardingRule]]:
    """For each block the rule of each operator that divides the batch along one axis."""
    found: list[dict[str, ShardingRule]] = []
    before: Placement = REPLICATE
    there: dict[str, Placement] = {}
    for block, skip_outputs in zip(graph.blocks, skip_tensors_of(graph).skip_outputs, strict=True):
        outputs = dict(there) if block.entry is None else {**there, block.entry: before}
        rules: dict[str, ShardingRule] = {}
        for op in block.operators:
            rules[op.name] = _batch_rule(graph, op, outputs)
            outputs[op.name] = rules[op.name].output
        before = outputs[block.operators[-1].name]
        there |= {name: outputs[name] for name in skip_outputs}
        found.append(rules)
    return found


def follows_batch(graph: OpGraph, dim: str) -> bool:
    """Whether a dim grows with the batch."""
    return graph.growth.get(dim, CONSTANT).batch > 0


def _batch_rule(graph: OpGraph, op: OpNode, outputs: Mapping[str, Placement]) -> ShardingRule:
    """Of the rules that split a dim of the batch the one that splits most inputs. An operator that has none
    does the same on every rank: for gradients that are summed, as those of parameters are, where it reads
    nothing that came from the batch."""
    rules = rules_of(op)
    splits = [rule for rule in rules if rule.split is not None and follows_batch(graph, rule.split)]
    if splits:
        return max(splits, key=lambda rule: sum(placement >= 0 for placement in rule.inputs))
    read = [outputs[operand.source] for operand in op.inputs if operand.source in outputs]
    required = REPLICATE_SUM_GRAD if all(placement == REPLICATE_SUM_GRAD for placement in read) else REPLICATE
    return next(rule for rule in rules if rule.split is None and rule.output == required)
