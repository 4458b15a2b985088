"""Megatron's layout of a transformer: matmuls in pairs split by columns and rows within a node, and data
parallelism across nodes (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.graph.customary.data_parallel import batch_rules, follows_batch
from shardwise.graph.customary.together import layout_from_rules
from shardwise.graph.layout import allows
from shardwise.graph.loans import skip_tensors_of
from shardwise.graph.named import GraphLayout
from shardwise.graph.operator import rules_of
from shardwise.graph.placement import PARTIAL, REPLICATE, REPLICATE_SUM_GRAD, Placement
from shardwise.graph.record import Block, OpGraph, OpNode
from shardwise.graph.rule import ShardingRule


def megatron(graph: OpGraph, ranks: Sequence[int]) -> GraphLayout | None:
    """Tensor parallelism along the innermost axis of a mesh of `ranks`, data parallelism along the others,
    parameters and optimizer states whole, nothing recomputed.

    Within a block a matmul is split by columns where what follows can work on its part of the result (heads
    of attention, the width of an MLP) up to a matmul split by rows, whose partial sums are added up, or up to
    the loss; tables of what the batch looks up are split by rows; all else is done by every rank of the axis.
    None where no attention is split so (the network is no transformer, or has too few heads), or the batch
    has no part for every rank along the others.
    """
    found = []
    skips = skip_tensors_of(graph)
    for block, data, skip_outputs, skip_inputs in zip(
        graph.blocks, batch_rules(graph), skips.skip_outputs, skips.skip_inputs, strict=True
    ):
        outer = {name: (rule,) * (len(ranks) - 1) for name, rule in data.items()}
        if not all(allows(op, outer[op.name], ranks[:-1]) for op in block.operators):
            return None
        inner = _block_rules(_BlockContext(graph, block, ranks, outer, skip_outputs, skip_inputs))
        found.append({name: (*outer[name], inner[name]) for name in outer})
    attention = [
        found[place][op.name][-1].split
        for place, block in enumerate(graph.blocks)
        for op in block.operators
        if op.kind == "attention"
    ]
    return layout_from_rules(graph, tuple(ranks), found) if any(attention) else None


@dataclass(frozen=True, slots=True)
class _BlockContext:
    """A block, the rules of its operators along the outer axes of a mesh of `ranks`, and what it lends to
    other blocks and borrows of them: that is whole between blocks, as results are."""

    graph: OpGraph
    block: Block
    ranks: Sequence[int]
    outer: dict[str, tuple[ShardingRule, ...]]
    skip_outputs: tuple[str, ...]
    skip_inputs: tuple[str, ...]

    def rules_of(self, op: OpNode) -> list[ShardingRule]:
        """The rules of an operator along the innermost axis that go with those along the others."""
        return [rule for rule in rules_of(op) if allows(op, (*self.outer[op.name], rule), self.ranks)]

    def states(self, op: OpNode, placed: dict[str, Placement]) -> list[Placement | None]:
        """How the inputs of an operator lie; None for data, which lies as it is wanted."""
        return [placed.get(operand.source) for operand in op.inputs]


def _block_rules(context: _BlockContext) -> dict[str, ShardingRule]:
    """The rule of each operator along the innermost axis. Where what an operator has split cannot be worked
    on to the end, it is split in the next way, and at last not at all."""
    tried: dict[str, int] = {}
    while True:
        walk = _Walk(context, tried)
        stuck = walk.to_the_end()
        if not stuck:
            return walk.rules
        for name in stuck:
            tried[name] = tried.get(name, 0) + 1


@dataclass(slots=True)
class _Walk:
    """One way through a block: the rule of each operator, how its result lies, and which operators split what
    it is made of. `tried` ways to split an operator have failed."""

    context: _BlockContext
    tried: dict[str, int]
    rules: dict[str, ShardingRule] = field(default_factory=dict)
    placed: dict[str, Placement] = field(default_factory=dict)
    split_by: dict[str, frozenset[str]] = field(default_factory=dict)

    def to_the_end(self) -> frozenset[str]:
        """The operators that split what then could not be worked on; none where all could be."""
        block = self.context.block
        self.placed |= dict.fromkeys(self.context.skip_inputs, REPLICATE)
        if block.entry is not None:
            self.placed[block.entry] = REPLICATE
        for op in block.operators:
            sources = [operand.source for operand in op.inputs]
            split_sources = frozenset().union(*(self.split_by.get(source, frozenset()) for source in sources))
            rule = self._following(op) if split_sources else self._opening(op)
            if rule is None:
                return split_sources
            self.rules[op.name] = rule
            self.placed[op.name] = rule.output if rule.output >= 0 else REPLICATE
            if rule.output >= 0:
                self.split_by[op.name] = split_sources or frozenset({op.name})
        seen = (*self.context.skip_outputs, block.operators[-1].name)
        return frozenset().union(*(self.split_by.get(name, frozenset()) for name in seen))

    def _following(self, op: OpNode) -> ShardingRule | None:
        """The rule that works on inputs as they lie, with words between ranks in the loss alone."""
        states = self.context.states(op, self.placed)
        for rule in self.context.rules_of(op):
            fits = all(
                state is None or required == state or (state == REPLICATE and required == REPLICATE_SUM_GRAD)
                for state, required in zip(states, rule.inputs, strict=True)
            )
            if fits and (not rule.collectives or not op.output):
                return rule
        return None

    def _opening(self, op: OpNode) -> ShardingRule:
        """The next way to split an operator all of whose inputs are whole, or to repeat it on every rank."""
        rules = self.context.rules_of(op)
        ways = [rule for rule in rules if self._splits_weight(op, rule)]
        ways.sort(key=lambda rule: rule.output != PARTIAL)
        place = self.tried.get(op.name, 0)
        if place < len(ways):
            return ways[place]
        return next(rule for rule in rules if rule.split is None and rule.output == REPLICATE)

    def _splits_weight(self, op: OpNode, rule: ShardingRule) -> bool:
        """Whether a rule splits a matrix and nothing else that is read: columns of a matmul, or rows of a
        table in which the batch is looked up."""
        if (
            rule.collectives
            or not rule.parameters
            or rule.parameters[0] < 0
            or len(op.parameters[0].dims) < 2
        ):
            return False
        if any(placement >= 0 for placement in rule.inputs):
            return False
        return rule.output >= 0 or any(follows_batch(self.context.graph, dim) for dim in op.output)
