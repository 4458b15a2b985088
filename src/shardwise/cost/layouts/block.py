"""One block of an operator graph as factor graphs: variables and costs, saved and recomputed.

`structure_of` finds producers, readers, gradients and saved tensors of a block. `block_graphs` makes the
variables (sharding rules, tensor placements, stored and used placements of parameters) and the factors of
each mode. `block_terms` has the same costs of one given layout, term by term.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardwise.cost.layouts.context import CostColumns, CostContext
from shardwise.cost.layouts.operators import (
    Edge,
    Needs,
    OperatorCosts,
    edge_costs,
    edge_of,
    every_rule,
    operator_costs,
    operator_layouts_of,
    tensor_bytes,
)
from shardwise.cost.layouts.parameters import (
    ParameterTraffic,
    copied_bytes,
    one_reader_costs,
    parameter_traffic,
    shared_parameter_costs,
    single_reader_costs,
    storage_costs,
    storage_placements,
    use_placements,
)
from shardwise.cost.layouts.redistribute import Integers, PlacementTable, activation_placements
from shardwise.graph import (
    MODES,
    Block,
    BlockLayout,
    Mode,
    OpNode,
    Placement,
    SavedTensors,
    ShardingRule,
    saved_of,
)
from shardwise.pareto import COLUMNS, Costs, Factor, FactorGraph

# Structure of a block


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation of a block.

    `maker` is the index of its operator, None for the entry and for skip inputs. `readers` are operators and
    their input slots. `is_result` marks what the next block reads, `is_skip_output` what later blocks read,
    `is_skip_input` what an earlier block made.
    """

    name: str
    shape: tuple[int, ...]
    maker: int | None
    readers: tuple[tuple[int, int], ...]
    needs_gradient: bool
    is_result: bool = False
    is_skip_output: bool = False
    is_skip_input: bool = False

    @property
    def is_entry(self) -> bool:
        return self.maker is None and not self.is_skip_input

    @property
    def is_variable(self) -> bool:
        """Whether it has a placement variable of its own: for several readers, or for another block."""
        return self.maker is None or self.is_result or self.is_skip_output or len(self.readers) > 1


@dataclass(frozen=True, slots=True)
class Structure:
    """A block with its data flow, by operator.

    `needs` are gradients, `saved` the tensors saved for the backward pass, `is_repeated` whether
    recomputation repeats the operator. `data` are (operator, slot) of graph inputs, which have no gradient.
    If the `entry_is_saved_elsewhere`, the block that made it counts its bytes.
    """

    block: Block
    tensors: tuple[Tensor, ...]
    data: tuple[tuple[int, int], ...]
    needs: tuple[Needs, ...]
    saved: tuple[SavedTensors, ...]
    is_repeated: tuple[bool, ...]
    result_needs_gradient: bool
    entry_is_saved_elsewhere: bool

    @property
    def skip_outputs(self) -> Mapping[str, bool]:
        """The skip outputs by name, and whether they need gradients."""
        return {tensor.name: tensor.needs_gradient for tensor in self.tensors if tensor.is_skip_output}

    @property
    def operators(self) -> tuple[OpNode, ...]:
        return self.block.operators

    def is_saved(self, tensor: Tensor) -> bool:
        """Whether the backward pass of some reader reads the tensor."""
        return any(slot in self.saved[reader].inputs for reader, slot in tensor.readers)

    def is_needed_for_recompute(self, tensor: Tensor, end: int, slot: int | None) -> bool:
        """Whether recomputation repeats the redistribution of the tensor to the `slot` of its reader `end`.

        Without a slot, to its placement for all readers.
        """
        return any(
            self.is_repeated[reader] or own in self.saved[reader].inputs
            for reader, own in tensor.readers
            if slot is None or (reader, own) == (end, slot)
        )

    @property
    def recompute_saves_memory(self) -> bool:
        """Whether recomputation of the block may save memory: it saves a tensor that it makes, or a copy of
        its entry.

        Graph inputs do not count. They have the placements of their readers and stay allocated in either
        mode.
        """
        has_made = any(own.output or own.own for own in self.saved) or any(map(self.is_saved, self.tensors))
        return has_made or self.block.entry is not None

    @property
    def saves_entry(self) -> bool:
        """Whether the entry is saved for the backward pass if the block is not recomputed."""
        return any(
            self.is_saved(tensor) or tensor.is_skip_output for tensor in self.tensors if tensor.is_entry
        )


def structure_of(
    block: Block,
    data: Collection[str],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    entry_needs_gradient: bool,
    skip_inputs: Mapping[str, bool],
    skip_outputs: Collection[str],
    entry_is_saved_elsewhere: bool,
    has_next: bool,
    stops_early: bool,
) -> Structure:
    """The structure of a block.

    `shapes` are those of its activations, `data` the graph inputs. `skip_inputs` come from earlier blocks,
    with a flag whether they need gradients; `skip_outputs` are read by later blocks. `has_next` where another
    block follows; `stops_early` where recomputation ends with the last saved tensor.
    """
    ops = block.operators
    readers: dict[str, list[tuple[int, int]]] = {}
    for place, op in enumerate(ops):
        for slot, operand in enumerate(op.inputs):
            readers.setdefault(operand.source, []).append((place, slot))
    has_gradient = dict.fromkeys(data, False)
    tensors: list[Tensor] = []
    needs: list[Needs] = []
    entry = {} if block.entry is None else {block.entry: entry_needs_gradient}
    for name, needs_gradient in {**entry, **skip_inputs}.items():
        has_gradient[name] = needs_gradient
        tensors.append(
            Tensor(
                name, shapes[name], None, tuple(readers.get(name, ())), needs_gradient,
                is_skip_output=name in skip_outputs, is_skip_input=name in skip_inputs,
            )
        )  # fmt: skip
    for place, op in enumerate(ops):
        inputs = [has_gradient[operand.source] for operand in op.inputs]
        needs.append(_needs(op, inputs))
        has_gradient[op.name] = any(inputs) or bool(op.parameters)
        is_result, is_skip_output = has_next and place == len(ops) - 1, op.name in skip_outputs
        if readers.get(op.name) or is_result or is_skip_output:
            tensors.append(
                Tensor(
                    op.name, shapes[op.name], place, tuple(readers.get(op.name, ())),
                    has_gradient[op.name], is_result=is_result, is_skip_output=is_skip_output,
                )
            )  # fmt: skip
    saved = tuple(saved_of(op) for op in ops)
    return Structure(
        block=block,
        tensors=tuple(tensors),
        data=tuple(place for name in data for place in readers.get(name, ())),
        needs=tuple(needs),
        saved=saved,
        is_repeated=_repeated(ops, saved, tensors) if stops_early else (True,) * len(ops),
        result_needs_gradient=has_gradient[ops[-1].name],
        entry_is_saved_elsewhere=entry_is_saved_elsewhere,
    )


def _needs(op: OpNode, inputs: Sequence[bool]) -> Needs:
    """The left operand of products is an activation; the right one is a parameter or the other
    activations.
    """
    if op.parameters:
        return Needs(left=any(inputs), right=True)
    return Needs(left=any(inputs[:1]), right=any(inputs[1:]))


def _repeated(
    ops: Sequence[OpNode], saved: Sequence[SavedTensors], tensors: Sequence[Tensor]
) -> tuple[bool, ...]:
    """Which operators make, directly or through others, a tensor that the backward pass reads."""
    is_repeated = [bool(own.output or own.own) for own in saved]
    made_by = {tensor.maker: tensor for tensor in tensors}
    for place in reversed(range(len(ops))):
        for reader, slot in made_by[place].readers if place in made_by else ():
            is_repeated[place] |= is_repeated[reader] or slot in saved[reader].inputs
    return tuple(is_repeated)


# Factor graphs of a block

Role = Literal["rules", "tensors", "stored", "used"]
"""Field of `BlockLayout` that a variable chooses."""

ROLES: tuple[Role, ...] = ("rules", "tensors", "stored", "used")


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a factor graph: its role, the name of its operator, tensor or parameter, and its
    options.
    """

    role: Role
    name: str
    options: Sequence[tuple[ShardingRule, ...]] | Sequence[tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class BlockGraphs:
    """The modes of a block as factor graphs, and their variables (the same in all modes)."""

    modes: tuple[tuple[Mode, FactorGraph], ...]
    variables: tuple[Variable, ...]


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter with several `readers`, in this block only or, if `is_across`, in several.

    `first` is the (operator, slot) of the first reader, None where that is in an earlier block.
    """

    readers: int
    first: tuple[int, int] | None
    is_across: bool


@dataclass(frozen=True, slots=True)
class BlockContext:
    """The surroundings of a block.

    `next_saves_entry`: whether the next block saves its entry for the backward pass. `shared`: parameters
    with several readers. The rest are costs that belong to no operator and are charged to one block:
    `fixed_s` and `fixed_bytes` of the step, `sent_*_s` of sends per micro-batch.
    """

    next_saves_entry: bool
    shared: Mapping[str, SharedParameter]
    fixed_s: float = 0.0
    fixed_bytes: float = 0.0
    sent_forward_s: float = 0.0
    sent_backward_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """Costs that the choices of one or two variables decide, at operator `at` of the block (-1: its entry).

    The axes of `columns` are those of `variables`, or the other way round if `is_swapped`. `copies_bytes` are
    temporaries of the same moment that another term counts already.
    """

    columns: CostColumns
    variables: tuple[int, ...]
    at: int
    is_swapped: bool = False
    copies_bytes: Any = 0.0


def block_terms(
    context: CostContext, structure: Structure, block_context: BlockContext, layout: BlockLayout
) -> list[Term]:
    """The costs of one layout of a block: columns of one element."""
    return _Builder(context, structure, block_context, layout).terms(layout.mode)


def block_graphs(context: CostContext, structure: Structure, block_context: BlockContext) -> BlockGraphs:
    """A block with all of its layouts."""
    builder = _Builder(context, structure, block_context)
    modes: tuple[Mode, ...] = MODES if structure.recompute_saves_memory else ("kept",)
    return BlockGraphs(tuple(builder.parts(modes)), tuple(builder.variables))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A redistribution of a tensor between two variables.

    `start` is the maker or the tensor's own variable; `end` is its own variable, or the reader whose `slot`
    it is.
    """

    tensor: Tensor
    start: int
    end: int
    slot: int | None
    edge: Edge


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter with one `reader`, stored as `storage_variable`.

    Its traffic overlaps with this `share` of the reader's computation.
    """

    storage_variable: int
    reader: int
    moved: ParameterTraffic
    share: float


class _Builder:
    """The variables of a block, and the costs of its modes. With a `layout`, each variable has that choice
    alone."""

    def __init__(
        self,
        context: CostContext,
        structure: Structure,
        block_context: BlockContext,
        layout: BlockLayout | None = None,
    ) -> None:
        self.context, self.structure, self.block_context = context, structure, block_context
        self.layout = layout
        self.variables: list[Variable] = []
        self.sizes: list[int] = []
        self.operators: list[OperatorCosts] = []
        for place, op in enumerate(structure.operators):
            rules = every_rule(op, context.ranks) if layout is None else (layout.rules[op.name],)
            choices = operator_layouts_of(op, context.ranks, rules)
            slots = tuple(slot for reader, slot in structure.data if reader == place)
            own = operator_costs(context, choices, structure.needs[place], structure.saved[place], slots)
            self.operators.append(own)
            self._add("rules", op.name, choices.rules)
        self.tensor_variables: dict[str, tuple[int, PlacementTable]] = {}
        self.used: dict[str, int] = {}
        for tensor in structure.tensors:
            if tensor.is_variable:
                table = self._options("tensors", tensor.name, tensor.shape, activation_placements)
                self.tensor_variables[tensor.name] = (self._add("tensors", tensor.name, table.named), table)
        self.uses: list[_Use] = []
        self.skips: dict[str, int] = {}
        self.alike = [factor for tensor in structure.tensors for factor in self._shared_skip(tensor)]
        self.parameters = self._parameter_terms()
        self.crossings = [crossing for tensor in structure.tensors for crossing in self._edges(tensor)]

    def _options(
        self, role: Role, name: str, shape: tuple[int, ...], every: Callable[..., PlacementTable]
    ) -> PlacementTable:
        """The placements of a tensor or parameter: `every` one, or that of the given layout."""
        if self.layout is None:
            return every(shape, self.context.ranks)
        placements: Mapping[str, tuple[Placement, ...]] = getattr(self.layout, role)
        return PlacementTable(shape, self.context.ranks, np.array([placements[name]], dtype=np.int64))

    def _add(
        self,
        role: Role,
        name: str,
        options: Sequence[tuple[ShardingRule, ...]] | Sequence[tuple[Placement, ...]],
    ) -> int:
        self.variables.append(Variable(role, name, options))
        self.sizes.append(len(options))
        return len(self.sizes) - 1

    def terms(self, mode: Mode) -> list[Term]:
        """The costs of the block in one mode, term by term."""
        return [*self.parameters, *self._terms_of(mode)]

    def _terms_of(self, mode: Mode) -> Iterator[Term]:
        """The costs that depend on the mode."""
        yield from (self._use(use, mode) for use in self.uses)
        yield from (self._operator(place, mode) for place in range(len(self.operators)))
        yield from (self._edge(crossing, mode) for crossing in self.crossings)
        for tensor in self.structure.tensors:
            if self._is_saved_in_place(tensor, mode):
                yield self._saved(tensor, mode)

    def parts(self, modes: Sequence[Mode]) -> Iterator[tuple[Mode, FactorGraph]]:
        """The factor graph of the block in each mode."""
        always = [*self.alike, *map(self._factor, self.parameters)]
        for mode in modes:
            yield mode, self._part([*always, *map(self._factor, self._terms_of(mode))])

    def _part(self, factors: Sequence[Factor]) -> FactorGraph:
        structure = self.structure
        entry = next(
            (self.tensor_variables[each.name][0] for each in structure.tensors if each.is_entry), None
        )
        result = next(
            (self.tensor_variables[each.name][0] for each in structure.tensors if each.is_result), None
        )
        names = tuple(variable.name for variable in self.variables)
        shared = self.block_context.shared
        across = [(f"parameter {name}", used) for name, used in self.used.items() if shared[name].is_across]
        across += [(f"tensor {name}", variable) for name, variable in self.skips.items()]
        return FactorGraph(names, tuple(self.sizes), tuple(factors), entry, result, tuple(across))

    def _shared_skip(self, tensor: Tensor) -> list[Factor]:
        """The shared variable of a skip tensor: its placement for all readers.

        An entry or result, which is in the separator of the chain already, gets a second variable with the
        same choice.
        """
        if not (tensor.is_skip_output or tensor.is_skip_input):
            return []
        variable, table = self.tensor_variables[tensor.name]
        self.skips[tensor.name] = variable
        if not (tensor.is_entry or tensor.is_result):
            return []
        shared_variable = self.skips[tensor.name] = self._add("tensors", tensor.name, table.named)
        same = np.eye(len(table), dtype=bool)[:, :, None]
        return [Factor((variable, shared_variable), np.where(same, 0.0, np.full(len(COLUMNS), np.inf)))]

    def _factor(self, term: Term) -> Factor:
        shape = tuple(self.sizes[variable] for variable in term.variables)
        if term.is_swapped:
            return Factor(term.variables, term.columns.costs(self.context, shape[::-1]).swapaxes(0, 1))
        return Factor(term.variables, term.columns.costs(self.context, shape))

    def _operator(self, place: int, mode: Mode) -> Term:
        """An operator's own computation and saved tensors."""
        own = self.operators[place]
        columns = CostColumns(peak_bytes=own.working_bytes)
        columns.forward(own.times.forward_s, "forward")
        columns.computed_backward(own.times.backward_s, "backward")
        columns.forward(own.collective_times.forward_s, "exchanges")
        columns.blocked(own.collective_times.backward_s, "exchanges")
        is_recomputed = mode == "recomputed" and self.structure.is_repeated[place]
        if is_recomputed:
            columns.blocked(own.collective_times.forward_s, "recomputation")
            columns.computed_backward(own.times.forward_s, "recomputation")
        columns.save(own.saved_bytes, mode, place)
        if self.structure.block.entry is None:
            # Graph inputs are never recomputed: they stay like an entry for readers in the backward pass.
            columns.save(own.data_bytes if is_recomputed else own.saved_data_bytes, "kept", place)
        else:
            columns.save(own.saved_data_bytes, mode, place)
        if place == len(self.operators) - 1 and self.layout is None:
            columns.once(self.block_context.fixed_s, "fixed")
            columns.forward(self.block_context.sent_forward_s, "sends")
            columns.blocked(self.block_context.sent_backward_s, "sends")
            columns.hold(self.block_context.fixed_bytes, "fixed")
        return Term(columns, (place,), place)

    def _edges(self, tensor: Tensor) -> list[Crossing]:
        """All redistributions of a tensor."""

        def edge(start: Integers, end: Integers) -> Edge:
            return edge_of(
                self.context, tensor.shape, start, end, needs_gradient=tensor.needs_gradient,
                value_bytes=self.context.activation_bytes, gradient_bytes=self.context.activation_bytes,
            )  # fmt: skip

        read = [(place, slot, self.operators[place].choices.inputs[slot]) for place, slot in tensor.readers]
        if not tensor.is_variable and tensor.maker is not None:
            [(reader, slot, placements)] = read
            made = self.operators[tensor.maker].choices.output
            return [Crossing(tensor, tensor.maker, reader, slot, edge(made, placements))]
        shared_variable, table = self.tensor_variables[tensor.name]
        found = [
            Crossing(tensor, shared_variable, reader, slot, edge(table.placements, placements))
            for reader, slot, placements in read
        ]
        if tensor.maker is not None:
            made = self.operators[tensor.maker].choices.output
            found.insert(
                0, Crossing(tensor, tensor.maker, shared_variable, None, edge(made, table.placements))
            )
        return found

    def _edge(self, crossing: Crossing, mode: Mode) -> Term:
        """A redistribution, and the saved copies of the tensor at its ends."""
        tensor, end = crossing.tensor, crossing.end
        is_recomputed = mode == "recomputed" and self.structure.is_needed_for_recompute(
            tensor, end, crossing.slot
        )
        reader = None if crossing.slot is None else self.operators[end]
        columns = edge_costs(self.context, crossing.edge, reader, is_repeated=is_recomputed)
        at = crossing.start if reader is None else end
        made_bytes, read_bytes = self._saved_at_ends(crossing)
        if crossing.start == tensor.maker:
            columns.save(made_bytes, mode, crossing.start)
        if reader is not None:
            columns.save(read_bytes, mode, end)
        return Term(columns, (crossing.start, end), at)

    def _saved_at_ends(self, crossing: Crossing) -> tuple[Costs, Costs]:
        """Bytes that the maker saves of its output, and bytes that the reader saves of its input. A tensor
        that both save in one placement is saved once, by the maker."""
        tensor, edge = crossing.tensor, crossing.edge
        is_made = crossing.start == tensor.maker
        saves_result = is_made and self.operators[crossing.start].saved.output
        start_bytes = edge.start_bytes * float(saves_result) + 0.0 * edge.end_bytes
        nothing = 0.0 * start_bytes
        if crossing.slot is None:
            saves_here = self.structure.is_saved(tensor)
            if tensor.is_result:
                saves_here = self.block_context.next_saves_entry
            saves_here |= tensor.is_skip_output
            return np.where(edge.is_same, 0.0, start_bytes) if saves_here else start_bytes, nothing
        saves_input = crossing.slot in self.operators[crossing.end].saved.inputs
        end_bytes = edge.end_bytes * float(saves_input) + 0.0 * edge.start_bytes
        if not is_made:
            return nothing, np.where(edge.is_same, 0.0, end_bytes)
        made_bytes = np.where(edge.is_same, np.maximum(start_bytes, end_bytes), start_bytes)
        return made_bytes, np.where(edge.is_same, 0.0, end_bytes)

    def _is_saved_in_place(self, tensor: Tensor, mode: Mode) -> bool:
        if tensor.is_skip_output:
            return True
        if not tensor.is_variable or tensor.is_result or tensor.is_skip_input:
            return False
        if tensor.is_entry and self.structure.entry_is_saved_elsewhere:
            return False
        return self.structure.is_saved(tensor) or (tensor.is_entry and mode == "recomputed")

    def _saved(self, tensor: Tensor, mode: Mode) -> Term:
        """Bytes of a tensor saved in its placement for all readers.

        An entry is saved in any mode, and so is a skip tensor by the block that makes it.
        """
        shared_variable, table = self.tensor_variables[tensor.name]
        columns = CostColumns()
        nbytes = tensor_bytes(self.context, tensor.shape, table.placements)
        at = -1 if tensor.maker is None else tensor.maker
        columns.save(nbytes, "kept" if tensor.is_entry or tensor.is_skip_output else mode, at)
        return Term(columns, (shared_variable,), at)

    def _parameter_terms(self) -> list[Term]:
        """Costs of parameters that do not depend on the mode; `uses` are parameters whose costs do."""
        sizes = {
            parameter.name: op.elements(parameter.dims)
            for op in self.structure.operators
            for parameter in op.parameters
        }
        total = sum(sizes.values())
        terms = []
        for place, own in enumerate(self.operators):
            for slot, parameter in enumerate(own.choices.op.parameters):
                bucket = sizes[parameter.name] / total
                shared_parameter = self.block_context.shared.get(parameter.name)
                if shared_parameter is None:
                    terms += self._own_parameter(place, slot, bucket)
                else:
                    terms += self._shared_parameter(place, slot, bucket, shared_parameter)
        return terms

    def _stored(self, name: str, shape: tuple[int, ...], reader: int) -> tuple[int, PlacementTable, Term]:
        """A variable for the stored placement of a parameter, and its costs."""
        table = self._options("stored", name, shape, storage_placements)
        storage_variable = self._add("stored", name, table.named)
        costs = Term(storage_costs(self.context, table), (storage_variable,), reader)
        return storage_variable, table, costs

    def _own_parameter(self, place: int, slot: int, bucket: float) -> list[Term]:
        """A parameter with one reader."""
        own = self.operators[place]
        op = own.choices.op
        parameter = op.parameters[slot]
        storage_variable, table, storage = self._stored(parameter.name, op.shape(parameter.dims), place)
        moved = parameter_traffic(self.context, table, own.choices.parameters[slot], bucket)
        share = op.elements(parameter.dims) / sum(op.elements(each.dims) for each in op.parameters)
        self.uses.append(_Use(storage_variable, place, moved, share))
        return [storage]

    def _use(self, use: _Use, mode: Mode) -> Term:
        """A parameter at its only reader."""
        own = self.operators[use.reader]
        forward_s, backward_s = own.times.forward_s[None] * use.share, own.times.backward_s[None] * use.share
        is_recomputed = mode == "recomputed" and self.structure.is_repeated[use.reader]
        columns = single_reader_costs(
            self.context, use.moved, forward_s=forward_s, backward_s=backward_s,
            recompute_s=forward_s if is_recomputed else None, working_bytes=own.working_bytes[None],
        )  # fmt: skip
        return Term(columns, (use.storage_variable, use.reader), use.reader)

    def _shared_parameter(
        self, place: int, slot: int, bucket: float, shared_parameter: SharedParameter
    ) -> list[Term]:
        """One of several readers of a parameter; the first of them has the storage variable."""
        own = self.operators[place]
        op = own.choices.op
        name, shape = op.parameters[slot].name, op.shape(op.parameters[slot].dims)
        among = self._options("used", name, shape, use_placements)
        if name not in self.used:
            self.used[name] = self._add("used", name, among.named)
        terms: list[Term] = []
        copies_bytes: Any = 0.0
        if shared_parameter.first == (place, slot):
            storage_variable, table, storage = self._stored(name, shape, place)
            moved = parameter_traffic(self.context, table, among.placements, bucket)
            columns = shared_parameter_costs(self.context, moved, shared_parameter.readers)
            variables = (self.used[name], storage_variable)
            terms = [storage, Term(columns, variables, place, is_swapped=True)]
        elif self.layout is not None:
            table = self._options("stored", name, shape, storage_placements)
            moved = parameter_traffic(self.context, table, among.placements, bucket)
            copies_bytes = copied_bytes(self.context, moved)
        read = one_reader_costs(
            self.context, shape, among.placements, own.choices.parameters[slot], own.working_bytes
        )
        return [*terms, Term(read, (self.used[name], place), place, copies_bytes=copies_bytes)]
