"""Baseline layouts that a frontier is compared with: `data_parallel` and `megatron`.

`layout_from_rules` makes a whole layout from one sharding rule per operator and mesh axis. Data parallelism
splits the batch. Megatron's layout of a transformer splits pairs of matmuls by columns and rows within a
node, with data parallelism across nodes (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.graph.layouts import BlockLayout, GraphLayout
from shardwise.graph.operator import rules_of
from shardwise.graph.record import Block, OpGraph, OpNode, SkipTensors, skip_tensors_of
from shardwise.graph.rules import PARTIAL, REPLICATE, REPLICATE_SUM_GRAD, Placement, ShardingRule, allows
from shardwise.graph.sizes import CONSTANT

# Layouts from rules

Placements = tuple[Placement, ...]

BlockRules = Mapping[str, tuple[ShardingRule, ...]]
"""The rules of each operator of a block, one per mesh axis, outermost first."""


def layout_from_rules(graph: OpGraph, ranks: tuple[int, ...], rules: Sequence[BlockRules]) -> GraphLayout:
    """The layout on a mesh of `ranks` per axis that follows the sharding rules of each block.

    The rules of an operator must be allowed together. All repetitions of a block have the same layout. A
    tensor with several readers has the placement that all of them read. If some read it replicated and others
    with partial gradients, its gradient is summed once. Parameters are stored as they are used; replicated
    ones have whole optimizer states. All activations are saved.
    """
    stored, used = _parameters(graph, rules)
    skips = skip_tensors_of(graph)
    requests = _requests(graph, rules, skips)
    there: dict[str, Placements] = {}
    order = [place for place, block in enumerate(graph.blocks) for _ in range(block.repeat)]
    entry: Placements | None = None
    found: list[BlockLayout] = []
    for place, following in zip(order, [*order[1:], None], strict=True):
        block, own = graph.blocks[place], rules[place]
        readers = Counter(operand.source for op in block.operators for operand in op.inputs)
        tensors = {name: there[name] for name in skips.skip_inputs[place]}
        if block.entry is not None and entry is not None:
            tensors[block.entry] = entry
        last = block.operators[-1].name
        for op in block.operators:
            requested = list(requests[place][op.name])
            if following is not None and op.name == last:
                requested += requests[following][graph.blocks[following].entry or ""]
            elif readers[op.name] < 2 and op.name not in skips.skip_outputs[place]:
                continue
            made = tuple(rule.output for rule in own[op.name])
            tensors[op.name] = tuple(map(_common, zip(*requested, strict=True), made))
        entry = tensors.get(last)
        there |= {name: tensors[name] for name in skips.skip_outputs[place]}
        names = {parameter.name: None for op in block.operators for parameter in op.parameters}
        found.append(
            BlockLayout(
                name=block.name,
                mode="kept",
                rules=own,
                tensors=tensors,
                stored={name: stored[name] for name in names},
                used={name: used[name] for name in names if name in used},
            )
        )
    return GraphLayout(ranks=ranks, blocks=tuple(found))


def _requests(
    graph: OpGraph, rules: Sequence[BlockRules], skips: SkipTensors
) -> list[dict[str, list[Placements]]]:
    """The placements in which each tensor of each block is read, in the block and in blocks with it as skip
    input."""
    found = [_block_requests(block, own) for block, own in zip(graph.blocks, rules, strict=True)]
    for requested_by_name, skip_outputs in zip(found, skips.skip_outputs, strict=True):
        for name in skip_outputs:
            for other, skip_inputs in zip(found, skips.skip_inputs, strict=True):
                requested_by_name[name] += other[name] if name in skip_inputs else []
    return found


def _block_requests(block: Block, rules: BlockRules) -> dict[str, list[Placements]]:
    """The placements in which each tensor is read in one block."""
    found: defaultdict[str, list[Placements]] = defaultdict(list)
    for op in block.operators:
        for slot, operand in enumerate(op.inputs):
            found[operand.source].append(tuple(rule.inputs[slot] for rule in rules[op.name]))
    return found


def _common(requests: Iterable[Placement], made: Placement) -> Placement:
    """One placement of a tensor along an axis for all its readers."""
    requested = set(requests)
    if len(requested) == 1:
        return requested.pop()
    return REPLICATE_SUM_GRAD if requested <= {REPLICATE, REPLICATE_SUM_GRAD} or made == PARTIAL else made


def _parameters(
    graph: OpGraph, rules: Sequence[BlockRules]
) -> tuple[dict[str, Placements], dict[str, Placements]]:
    """The stored placements of each parameter, and the used ones of parameters with several readers."""
    reads: defaultdict[str, list[Placements]] = defaultdict(list)
    for block, own in zip(graph.blocks, rules, strict=True):
        for op in block.operators:
            for slot, parameter in enumerate(op.parameters):
                reads[parameter.name].append(tuple(rule.parameters[slot] for rule in own[op.name]))
    used = {name: tuple(map(_used, zip(*requested, strict=True))) for name, requested in reads.items()}
    stored = {
        name: tuple(each if each >= 0 else REPLICATE for each in placements)
        for name, placements in used.items()
    }
    return stored, {name: used[name] for name, requested in reads.items() if len(requested) > 1}


def _used(requests: Iterable[Placement]) -> Placement:
    """The placement along an axis to which a parameter is gathered for all its readers."""
    requested = set(requests)
    if len(requested) == 1 and PARTIAL not in requested:
        return requested.pop()
    return REPLICATE_SUM_GRAD if REPLICATE_SUM_GRAD in requested else REPLICATE


# Data parallelism


def data_parallel(graph: OpGraph, ranks: Sequence[int]) -> GraphLayout | None:
    """Data parallelism: the batch is split along all axes of a mesh of `ranks`.

    Parameters and optimizer states are replicated, nothing is recomputed. None where no dim grows with the
    batch, or the batch has no part for every rank.
    """
    rules = batch_rules(graph)
    if all(rule.split is None for block in rules for rule in block.values()):
        return None
    along = [{name: (rule,) * len(ranks) for name, rule in block.items()} for block in rules]
    for block, own in zip(graph.blocks, along, strict=True):
        if not all(allows(op, own[op.name], ranks) for op in block.operators):
            return None
    return layout_from_rules(graph, tuple(ranks), along)


def batch_rules(graph: OpGraph) -> list[dict[str, ShardingRule]]:
    """For each block, the rule of each operator that splits the batch along one axis."""
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
    """The rule that splits a batch dim and most inputs.

    An operator without such a rule is replicated. Its gradients are partial sums, like those of parameters,
    if nothing that it reads comes from the batch.
    """
    rules = rules_of(op)
    splits = [rule for rule in rules if rule.split is not None and follows_batch(graph, rule.split)]
    if splits:
        return max(splits, key=lambda rule: sum(placement >= 0 for placement in rule.inputs))
    read = [outputs[operand.source] for operand in op.inputs if operand.source in outputs]
    required = REPLICATE_SUM_GRAD if all(placement == REPLICATE_SUM_GRAD for placement in read) else REPLICATE
    return next(rule for rule in rules if rule.split is None and rule.output == required)


# Megatron


def megatron(graph: OpGraph, ranks: Sequence[int]) -> GraphLayout | None:
    """Megatron's layout: tensor parallelism along the innermost axis of a mesh, data parallelism along the
    others.

    Parameters and optimizer states are replicated, nothing is recomputed. Operators after a column-parallel
    matmul (attention heads, the width of an MLP) work on shards. A row-parallel matmul, whose partial sums
    are all-reduced, or the loss ends this. Embedding tables are split by rows. Every rank of the axis
    computes all other operators. None where no attention can be split (no transformer, or too few heads), or
    where the batch has no part for every rank of the other axes.
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
    """A block, the rules of its operators along the outer axes, and its skip tensors.

    Skip tensors and results are replicated along the innermost axis between blocks.
    """

    graph: OpGraph
    block: Block
    ranks: Sequence[int]
    outer: dict[str, tuple[ShardingRule, ...]]
    skip_outputs: tuple[str, ...]
    skip_inputs: tuple[str, ...]

    def rules_of(self, op: OpNode) -> list[ShardingRule]:
        """The rules of an operator along the innermost axis that are allowed with those along the others."""
        return [rule for rule in rules_of(op) if allows(op, (*self.outer[op.name], rule), self.ranks)]

    def states(self, op: OpNode, placed: dict[str, Placement]) -> list[Placement | None]:
        """The placements of the operator's inputs; None for data, which has any placement."""
        return [placed.get(operand.source) for operand in op.inputs]


def _block_rules(context: _BlockContext) -> dict[str, ShardingRule]:
    """The rule of each operator along the innermost axis.

    If an operator's split tensor has a reader without a matching rule, the operator's next rule is tried; the
    last resort is not to split it.
    """
    tried: dict[str, int] = {}
    while True:
        walk = _Walk(context, tried)
        failed = walk.assign_rules()
        if not failed:
            return walk.rules
        for name in failed:
            tried[name] = tried.get(name, 0) + 1


@dataclass(slots=True)
class _Walk:
    """One pass over a block: the rule of each operator, the placement of its result, and who split it.

    `tried` counts the rules of an operator that have failed.
    """

    context: _BlockContext
    tried: dict[str, int]
    rules: dict[str, ShardingRule] = field(default_factory=dict)
    placed: dict[str, Placement] = field(default_factory=dict)
    split_by: dict[str, frozenset[str]] = field(default_factory=dict)

    def assign_rules(self) -> frozenset[str]:
        """Assign rules in order. Returns the operators whose split results have no matching reader; empty on
        success."""
        block = self.context.block
        self.placed |= dict.fromkeys(self.context.skip_inputs, REPLICATE)
        if block.entry is not None:
            self.placed[block.entry] = REPLICATE
        for op in block.operators:
            sources = [operand.source for operand in op.inputs]
            split_sources = frozenset().union(*(self.split_by.get(source, frozenset()) for source in sources))
            rule = self._matching_rule(op) if split_sources else self._next_rule(op)
            if rule is None:
                return split_sources
            self.rules[op.name] = rule
            self.placed[op.name] = rule.output if rule.output >= 0 else REPLICATE
            if rule.output >= 0:
                self.split_by[op.name] = split_sources or frozenset({op.name})
        seen = (*self.context.skip_outputs, block.operators[-1].name)
        return frozenset().union(*(self.split_by.get(name, frozenset()) for name in seen))

    def _matching_rule(self, op: OpNode) -> ShardingRule | None:
        """The rule for inputs in their placements; collectives are allowed in the loss only. None if there is
        none."""
        states = self.context.states(op, self.placed)
        for rule in self.context.rules_of(op):
            fits = all(
                state is None or required == state or (state == REPLICATE and required == REPLICATE_SUM_GRAD)
                for state, required in zip(states, rule.inputs, strict=True)
            )
            if fits and (not rule.collectives or not op.output):
                return rule
        return None

    def _next_rule(self, op: OpNode) -> ShardingRule:
        """The next rule that splits an operator with replicated inputs, or replication if no rule is left."""
        rules = self.context.rules_of(op)
        ways = [rule for rule in rules if self._splits_weight(op, rule)]
        ways.sort(key=lambda rule: rule.output != PARTIAL)
        place = self.tried.get(op.name, 0)
        if place < len(ways):
            return ways[place]
        return next(rule for rule in rules if rule.split is None and rule.output == REPLICATE)

    def _splits_weight(self, op: OpNode, rule: ShardingRule) -> bool:
        """Whether a rule splits a weight matrix only: columns of a matmul, or rows of a table with indices of
        the batch."""
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
