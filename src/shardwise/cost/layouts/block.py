"""One block of a graph as parts of a chain: its variables, and the costs on them, kept and recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwise.cost.layouts.choices import operator_layouts_of
from shardwise.cost.layouts.columns import CostColumns
from shardwise.cost.layouts.edges import Edge, edge_costs, edge_of
from shardwise.cost.layouts.forms import Integers, PlacementTable, activation_placements
from shardwise.cost.layouts.ground import CostContext
from shardwise.cost.layouts.operators import OperatorCosts, operator_costs, tensor_bytes
from shardwise.cost.layouts.storage import (
    ParameterTraffic,
    one_reader_costs,
    parameter_traffic,
    shared_parameter_costs,
    single_reader_costs,
    storage_costs,
    storage_placements,
    use_placements,
)
from shardwise.cost.layouts.structure import Structure, Tensor
from shardwise.frontier import COLUMNS, Costs, Factor, FactorGraph
from shardwise.graph import MODES, Mode, Placement, ShardingRule

Role = Literal["rules", "tensors", "stored", "used"]
"""What a variable chooses, in the words of BlockLayout."""

ROLES: tuple[Role, ...] = ("rules", "tensors", "stored", "used")


@dataclass(frozen=True, slots=True)
class Variable:
    """What a variable of a part chooses among, and for whom."""

    role: Role
    name: str
    options: Sequence[tuple[ShardingRule, ...]] | Sequence[tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class BlockGraphs:
    """A block's modes, and what the variables of their parts are (the same in all of them)."""

    modes: tuple[tuple[Mode, FactorGraph], ...]
    variables: tuple[Variable, ...]


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter with several `readers`, in this block alone or, where it `is_across`, in several; `first`
    is an operator and a slot of the block, or None where the first reader is in a block before."""

    readers: int
    first: tuple[int, int] | None
    is_across: bool


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What lies around a block: whether the next one keeps its entry for the backward pass, parameters that
    several operators share; seconds and bytes of the step that are nobody's, and seconds of each micro-batch
    that go with sending, told in one block."""

    next_saves_entry: bool
    shared: Mapping[str, SharedParameter]
    fixed_s: float = 0.0
    fixed_bytes: float = 0.0
    sent_forward_s: float = 0.0
    sent_backward_s: float = 0.0


def block_graphs(context: CostContext, structure: Structure, block_context: BlockContext) -> BlockGraphs:
    """A block with all of its layouts."""
    builder = _Builder(context, structure, block_context)
    modes: tuple[Mode, ...] = MODES if structure.recompute_saves_memory else ("kept",)
    return BlockGraphs(tuple((mode, builder.part(mode)) for mode in modes), tuple(builder.variables))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor's conversion between two variables: from its maker or its own variable `start`, to its own
    variable or to the `slot` of a reader, `end`."""

    tensor: Tensor
    start: int
    end: int
    slot: int | None
    edge: Edge


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter with one `reader`, from the variable `storage_variable`, beside this `share` of its
    computation."""

    storage_variable: int
    reader: int
    moved: ParameterTraffic
    share: float


class _Builder:
    """The variables of a block, and the factors of its modes."""

    def __init__(self, context: CostContext, structure: Structure, block_context: BlockContext) -> None:
        self.context, self.structure, self.block_context = context, structure, block_context
        self.variables: list[Variable] = []
        self.sizes: list[int] = []
        self.operators: list[OperatorCosts] = []
        for place, op in enumerate(structure.operators):
            choices = operator_layouts_of(op, context.ranks)
            slots = tuple(slot for reader, slot in structure.data if reader == place)
            own = operator_costs(context, choices, structure.needs[place], structure.saved[place], slots)
            self.operators.append(own)
            self._add("rules", op.name, choices.rules)
        self.tensor_variables: dict[str, tuple[int, PlacementTable]] = {}
        self.used: dict[str, int] = {}
        for tensor in structure.tensors:
            if tensor.is_variable:
                table = activation_placements(tensor.shape, context.ranks)
                self.tensor_variables[tensor.name] = (self._add("tensors", tensor.name, table.named), table)
        self.uses: list[_Use] = []
        self.skips: dict[str, int] = {}
        self.alike = [factor for tensor in structure.tensors for factor in self._shared_skip(tensor)]
        self.shared = self._parameter_factors()
        self.crossings = [crossing for tensor in structure.tensors for crossing in self._edges(tensor)]

    def _add(
        self,
        role: Role,
        name: str,
        options: Sequence[tuple[ShardingRule, ...]] | Sequence[tuple[Placement, ...]],
    ) -> int:
        self.variables.append(Variable(role, name, options))
        self.sizes.append(len(options))
        return len(self.sizes) - 1

    def part(self, mode: Mode) -> FactorGraph:
        """The block in one mode."""
        structure = self.structure
        factors = [*self.alike, *self.shared, *(self._use(use, mode) for use in self.uses)]
        factors += [self._operator(place, mode) for place in range(len(self.operators))]
        factors += [self._edge(crossing, mode) for crossing in self.crossings]
        factors += [
            self._saved(tensor, mode) for tensor in structure.tensors if self._is_saved_in_place(tensor, mode)
        ]
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
        """The hub of a tensor that blocks share, where it lies for all of its readers. Of an entry or result,
        which the chain sees as such besides, a variable of its own that makes the same choice."""
        if not (tensor.is_skip_output or tensor.is_skip_input):
            return []
        variable, table = self.tensor_variables[tensor.name]
        self.skips[tensor.name] = variable
        if not (tensor.is_entry or tensor.is_result):
            return []
        shared_variable = self.skips[tensor.name] = self._add("tensors", tensor.name, table.named)
        same = np.eye(len(table), dtype=bool)[:, :, None]
        return [Factor((variable, shared_variable), np.where(same, 0.0, np.full(len(COLUMNS), np.inf)))]

    def _costs(self, columns: CostColumns, *variables: int) -> Factor:
        shape = tuple(self.sizes[variable] for variable in variables)
        return Factor(variables, columns.costs(self.context, shape))

    def _operator(self, place: int, mode: Mode) -> Factor:
        """An operator's own work, and what it keeps."""
        own = self.operators[place]
        columns = CostColumns(peak_bytes=own.working_bytes)
        columns.forward(own.times.forward_s + own.collective_times.forward_s)
        columns.blocked(own.collective_times.backward_s)
        columns.computed_backward(own.times.backward_s)
        is_recomputed = mode == "recomputed" and self.structure.is_repeated[place]
        if is_recomputed:
            columns.blocked(own.collective_times.forward_s)
            columns.computed_backward(own.times.forward_s)
        _save(columns, own.saved_bytes, mode)
        if self.structure.block.entry is None:
            # Nobody makes data again: it waits as an entry does for whoever reads it behind the forward pass.
            _save(columns, own.data_bytes if is_recomputed else own.saved_data_bytes, "kept")
        else:
            _save(columns, own.saved_data_bytes, mode)
        if place == len(self.operators) - 1:
            columns.once(self.block_context.fixed_s)
            columns.forward(self.block_context.sent_forward_s)
            columns.blocked(self.block_context.sent_backward_s)
            columns.resident_bytes = columns.resident_bytes + self.block_context.fixed_bytes
        return self._costs(columns, place)

    def _edges(self, tensor: Tensor) -> list[Crossing]:
        """All conversions of a tensor."""

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

    def _edge(self, crossing: Crossing, mode: Mode) -> Factor:
        """A conversion, and the copies of the tensor that are kept at its ends."""
        tensor, end = crossing.tensor, crossing.end
        is_recomputed = mode == "recomputed" and self.structure.is_needed_for_recompute(
            tensor, end, crossing.slot
        )
        reader = None if crossing.slot is None else self.operators[end]
        columns = edge_costs(self.context, crossing.edge, reader, is_repeated=is_recomputed)
        _save(columns, self._saved_at_ends(crossing), mode)
        return self._costs(columns, crossing.start, end)

    def _saved_at_ends(self, crossing: Crossing) -> Costs:
        """What the maker keeps of its result, and the reader of its input, each thing once."""
        tensor, edge = crossing.tensor, crossing.edge
        is_made = crossing.start == tensor.maker
        saves_result = is_made and self.operators[crossing.start].saved.output
        start_bytes = edge.start_bytes * float(saves_result) + 0.0 * edge.end_bytes
        if crossing.slot is None:
            saves_here = self.structure.is_saved(tensor)
            if tensor.is_result:
                saves_here = self.block_context.next_saves_entry
            saves_here |= tensor.is_skip_output
            return np.where(edge.is_same, 0.0, start_bytes) if saves_here else start_bytes
        saves_input = crossing.slot in self.operators[crossing.end].saved.inputs
        end_bytes = edge.end_bytes * float(saves_input) + 0.0 * edge.start_bytes
        if not is_made:
            return np.where(edge.is_same, 0.0, end_bytes)
        return np.where(edge.is_same, np.maximum(start_bytes, end_bytes), start_bytes + end_bytes)

    def _is_saved_in_place(self, tensor: Tensor, mode: Mode) -> bool:
        if tensor.is_skip_output:
            return True
        if not tensor.is_variable or tensor.is_result or tensor.is_skip_input:
            return False
        if tensor.is_entry and self.structure.entry_is_saved_elsewhere:
            return False
        return self.structure.is_saved(tensor) or (tensor.is_entry and mode == "recomputed")

    def _saved(self, tensor: Tensor, mode: Mode) -> Factor:
        """A tensor that readers keep, as it lies for all of them; an entry is held in any case, and by who
        lends it a tensor that other blocks read."""
        shared_variable, table = self.tensor_variables[tensor.name]
        columns = CostColumns()
        nbytes = tensor_bytes(self.context, tensor.shape, table.placements)
        _save(columns, nbytes, "kept" if tensor.is_entry or tensor.is_skip_output else mode)
        return self._costs(columns, shared_variable)

    def _parameter_factors(self) -> list[Factor]:
        """Costs of parameters, which no mode changes; `uses` are those that one does."""
        sizes = {
            parameter.name: op.elements(parameter.dims)
            for op in self.structure.operators
            for parameter in op.parameters
        }
        total = sum(sizes.values())
        factors = []
        for place, own in enumerate(self.operators):
            for slot, parameter in enumerate(own.choices.op.parameters):
                bucket = sizes[parameter.name] / total
                shared_parameter = self.block_context.shared.get(parameter.name)
                if shared_parameter is None:
                    factors += self._own_parameter(place, slot, bucket)
                else:
                    factors += self._shared_parameter(place, slot, bucket, shared_parameter)
        return factors

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, PlacementTable, Factor]:
        """A variable for how a parameter is stored, and what that costs."""
        table = storage_placements(shape, self.context.ranks)
        storage_variable = self._add("stored", name, table.named)
        return storage_variable, table, self._costs(storage_costs(self.context, table), storage_variable)

    def _own_parameter(self, place: int, slot: int, bucket: float) -> list[Factor]:
        """A parameter with one reader."""
        own = self.operators[place]
        op = own.choices.op
        parameter = op.parameters[slot]
        storage_variable, table, storage = self._stored(parameter.name, op.shape(parameter.dims))
        moved = parameter_traffic(self.context, table, own.choices.parameters[slot], bucket)
        share = op.elements(parameter.dims) / sum(op.elements(each.dims) for each in op.parameters)
        self.uses.append(_Use(storage_variable, place, moved, share))
        return [storage]

    def _use(self, use: _Use, mode: Mode) -> Factor:
        """A parameter at its only reader."""
        own = self.operators[use.reader]
        forward_s, backward_s = own.times.forward_s[None] * use.share, own.times.backward_s[None] * use.share
        is_recomputed = mode == "recomputed" and self.structure.is_repeated[use.reader]
        columns = single_reader_costs(
            self.context, use.moved, forward_s=forward_s, backward_s=backward_s,
            recompute_s=forward_s if is_recomputed else None, working_bytes=own.working_bytes[None],
        )  # fmt: skip
        return self._costs(columns, use.storage_variable, use.reader)

    def _shared_parameter(
        self, place: int, slot: int, bucket: float, shared_parameter: SharedParameter
    ) -> list[Factor]:
        """One of several readers of a parameter: the first of them decides how it is stored."""
        own = self.operators[place]
        op = own.choices.op
        name, shape = op.parameters[slot].name, op.shape(op.parameters[slot].dims)
        among = use_placements(shape, self.context.ranks)
        if name not in self.used:
            self.used[name] = self._add("used", name, among.named)
        factors: list[Factor] = []
        if shared_parameter.first == (place, slot):
            storage_variable, table, storage = self._stored(name, shape)
            factors.append(storage)
            moved = parameter_traffic(self.context, table, among.placements, bucket)
            columns = shared_parameter_costs(self.context, moved, shared_parameter.readers)
            costs = columns.costs(self.context, (len(table), len(among))).swapaxes(0, 1)
            factors.append(Factor((self.used[name], storage_variable), costs))
        read = one_reader_costs(
            self.context, shape, among.placements, own.choices.parameters[slot], own.working_bytes
        )
        costs = read.costs(self.context, (len(among), len(own)))
        return [*factors, Factor((self.used[name], place), costs)]


def _save(columns: CostColumns, nbytes: Costs, mode: Mode) -> None:
    """Add bytes that are kept from the forward pass to the backward pass, or made again between them."""
    if mode == "kept":
        columns.saved_bytes = columns.saved_bytes + nbytes
    else:
        columns.recomputed_bytes = columns.recomputed_bytes + nbytes
