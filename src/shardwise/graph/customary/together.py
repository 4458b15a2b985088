"""From a rule for each operator along each axis to a whole layout: where tensors and parameters then lie."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from shardwise.graph.loans import SkipTensors, skip_tensors_of
from shardwise.graph.named import BlockLayout, GraphLayout
from shardwise.graph.placement import PARTIAL, REPLICATE, REPLICATE_SUM_GRAD, Placement
from shardwise.graph.record import Block, OpGraph
from shardwise.graph.rule import ShardingRule

Placements = tuple[Placement, ...]

BlockRules = Mapping[str, tuple[ShardingRule, ...]]
"""The rules of each operator of a block, one per mesh axis, the outermost first."""


def layout_from_rules(graph: OpGraph, ranks: tuple[int, ...], rules: Sequence[BlockRules]) -> GraphLayout:
    """The layout on `ranks` per axis that follows these rules, which go together, of each block; repetitions
    are laid alike.

    A tensor with several readers lies as all of them want it; one that some want whole and others whole with
    gradients to be summed has its gradients summed once. Parameters wait as they are used, whole ones with
    all of their optimizer states. All is kept for the backward pass.
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
    """How each tensor of each block is wanted by its readers there, and by those in blocks that borrow it."""
    found = [_block_requests(block, own) for block, own in zip(graph.blocks, rules, strict=True)]
    for requested_by_name, skip_outputs in zip(found, skips.skip_outputs, strict=True):
        for name in skip_outputs:
            for other, skip_inputs in zip(found, skips.skip_inputs, strict=True):
                requested_by_name[name] += other[name] if name in skip_inputs else []
    return found


def _block_requests(block: Block, rules: BlockRules) -> dict[str, list[Placements]]:
    """How each tensor is wanted by its readers in one block."""
    found: defaultdict[str, list[Placements]] = defaultdict(list)
    for op in block.operators:
        for slot, operand in enumerate(op.inputs):
            found[operand.source].append(tuple(rule.inputs[slot] for rule in rules[op.name]))
    return found


def _common(requests: Iterable[Placement], made: Placement) -> Placement:
    """Where a tensor lies along an axis for all who want it."""
    requested = set(requests)
    if len(requested) == 1:
        return requested.pop()
    return REPLICATE_SUM_GRAD if requested <= {REPLICATE, REPLICATE_SUM_GRAD} or made == PARTIAL else made


def _parameters(
    graph: OpGraph, rules: Sequence[BlockRules]
) -> tuple[dict[str, Placements], dict[str, Placements]]:
    """Where each parameter is stored, and those with several readers used."""
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
    """Where a parameter is brought to along an axis for all of its readers."""
    requested = set(requests)
    if len(requested) == 1 and PARTIAL not in requested:
        return requested.pop()
    return REPLICATE_SUM_GRAD if REPLICATE_SUM_GRAD in requested else REPLICATE
