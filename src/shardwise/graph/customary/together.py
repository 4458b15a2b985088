"""From a rule for each operator along each axis to a whole layout: where tensors and parameters then lie."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from shardwise.graph.loans import Loans, loans_of
from shardwise.graph.named import BlockLayout, GraphLayout
from shardwise.graph.placement import PARTIAL, WHOLE, WHOLE_SUMMED, Placement
from shardwise.graph.record import Block, OpGraph
from shardwise.graph.rule import Rule

Placements = tuple[Placement, ...]

BlockRules = Mapping[str, tuple[Rule, ...]]
"""The rules of each operator of a block, one per mesh axis, the outermost first."""


def laid_by(graph: OpGraph, ranks: tuple[int, ...], rules: Sequence[BlockRules]) -> GraphLayout:
    """The layout on `ranks` per axis that follows these rules, which go together, of each block; repetitions
    are laid alike.

    A tensor with several readers lies as all of them want it; one that some want whole and others whole with
    gradients to be summed has its gradients summed once. Parameters wait as they are used, whole ones with
    all of their optimizer states. All is kept for the backward pass.
    """
    stored, used = _parameters(graph, rules)
    loans = loans_of(graph)
    wants = _wants(graph, rules, loans)
    there: dict[str, Placements] = {}
    order = [place for place, block in enumerate(graph.blocks) for _ in range(block.repeat)]
    entry: Placements | None = None
    found: list[BlockLayout] = []
    for place, following in zip(order, [*order[1:], None], strict=True):
        block, own = graph.blocks[place], rules[place]
        readers = Counter(operand.source for op in block.operators for operand in op.inputs)
        tensors = {name: there[name] for name in loans.borrowed[place]}
        if block.entry is not None and entry is not None:
            tensors[block.entry] = entry
        last = block.operators[-1].name
        for op in block.operators:
            asked = list(wants[place][op.name])
            if following is not None and op.name == last:
                asked += wants[following][graph.blocks[following].entry or ""]
            elif readers[op.name] < 2 and op.name not in loans.lent[place]:
                continue
            made = tuple(rule.output for rule in own[op.name])
            tensors[op.name] = tuple(map(_common, zip(*asked, strict=True), made))
        entry = tensors.get(last)
        there |= {name: tensors[name] for name in loans.lent[place]}
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


def _wants(graph: OpGraph, rules: Sequence[BlockRules], loans: Loans) -> list[dict[str, list[Placements]]]:
    """How each tensor of each block is wanted by its readers there, and by those in blocks that borrow it."""
    found = [_wanted(block, own) for block, own in zip(graph.blocks, rules, strict=True)]
    for wanted, lent in zip(found, loans.lent, strict=True):
        for name in lent:
            for other, borrowed in zip(found, loans.borrowed, strict=True):
                wanted[name] += other[name] if name in borrowed else []
    return found


def _wanted(block: Block, rules: BlockRules) -> dict[str, list[Placements]]:
    """How each tensor is wanted by its readers in one block."""
    found: defaultdict[str, list[Placements]] = defaultdict(list)
    for op in block.operators:
        for slot, operand in enumerate(op.inputs):
            found[operand.source].append(tuple(rule.inputs[slot] for rule in rules[op.name]))
    return found


def _common(wants: Iterable[Placement], made: Placement) -> Placement:
    """Where a tensor lies along an axis for all who want it."""
    asked = set(wants)
    if len(asked) == 1:
        return asked.pop()
    return WHOLE_SUMMED if asked <= {WHOLE, WHOLE_SUMMED} or made == PARTIAL else made


def _parameters(
    graph: OpGraph, rules: Sequence[BlockRules]
) -> tuple[dict[str, Placements], dict[str, Placements]]:
    """Where each parameter is stored, and those with several readers used."""
    reads: defaultdict[str, list[Placements]] = defaultdict(list)
    for block, own in zip(graph.blocks, rules, strict=True):
        for op in block.operators:
            for slot, parameter in enumerate(op.parameters):
                reads[parameter.name].append(tuple(rule.parameters[slot] for rule in own[op.name]))
    used = {name: tuple(map(_used, zip(*asked, strict=True))) for name, asked in reads.items()}
    stored = {
        name: tuple(each if each >= 0 else WHOLE for each in placements) for name, placements in used.items()
    }
    return stored, {name: used[name] for name, asked in reads.items() if len(asked) > 1}


def _used(wants: Iterable[Placement]) -> Placement:
    """Where a parameter is brought to along an axis for all of its readers."""
    asked = set(wants)
    if len(asked) == 1 and PARTIAL not in asked:
        return asked.pop()
    return WHOLE_SUMMED if WHOLE_SUMMED in asked else WHOLE
