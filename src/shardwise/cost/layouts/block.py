"""One block of a graph as parts of a chain: its variables, and the costs on them, kept and recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwise.cost.layouts.choices import choices_of
from shardwise.cost.layouts.columns import Columns
from shardwise.cost.layouts.edges import Edge, crossed, edge_of
from shardwise.cost.layouts.forms import Forms, Integers, tensor_forms
from shardwise.cost.layouts.ground import Ground
from shardwise.cost.layouts.operators import Priced, priced, tensor_bytes
from shardwise.cost.layouts.storage import (
    Brought,
    brought,
    storage_forms,
    stored,
    use_forms,
    used_beside,
    used_by_all,
    used_by_one,
)
from shardwise.cost.layouts.structure import Structure, Tensor
from shardwise.frontier import COLUMNS, Costs, Factor, Part
from shardwise.graph import MODES, Mode, Placement, Rule

Role = Literal["rules", "tensors", "stored", "used"]
"""What a variable chooses, in the words of BlockLayout."""

ROLES: tuple[Role, ...] = ("rules", "tensors", "stored", "used")


@dataclass(frozen=True, slots=True)
class Variable:
    """What a variable of a part chooses among, and for whom."""

    role: Role
    name: str
    options: Sequence[tuple[Rule, ...]] | Sequence[tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class LaidBlock:
    """A block's modes, and what the variables of their parts are (the same in all of them)."""

    modes: tuple[tuple[Mode, Part], ...]
    variables: tuple[Variable, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """A parameter with several `readers`, in this block alone or, where it `is_across`, in several; `first`
    is an operator and a slot of the block, or None where the first reader is in a block before."""

    readers: int
    first: tuple[int, int] | None
    is_across: bool


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies around a block: whether the next one keeps its entry for the backward pass, parameters that
    several operators share; seconds and bytes of the step that are nobody's, and seconds of each micro-batch
    that go with sending, told in one block."""

    next_keeps_entry: bool
    shared: Mapping[str, Sharing]
    fixed_s: float = 0.0
    fixed_bytes: float = 0.0
    sent_forward_s: float = 0.0
    sent_backward_s: float = 0.0


def laid_block(ground: Ground, structure: Structure, around: Surroundings) -> LaidBlock:
    """A block with all of its layouts."""
    builder = _Builder(ground, structure, around)
    modes: tuple[Mode, ...] = MODES if structure.may_hold_less else ("kept",)
    return LaidBlock(tuple((mode, builder.part(mode)) for mode in modes), tuple(builder.variables))


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
    """A parameter with one `reader`, from the variable `waiting`, beside this `share` of its computation."""

    waiting: int
    reader: int
    moved: Brought
    share: float


class _Builder:
    """The variables of a block, and the factors of its modes."""

    def __init__(self, ground: Ground, structure: Structure, around: Surroundings) -> None:
        self.ground, self.structure, self.around = ground, structure, around
        self.variables: list[Variable] = []
        self.sizes: list[int] = []
        self.operators: list[Priced] = []
        for place, op in enumerate(structure.operators):
            choices = choices_of(op, ground.ranks)
            slots = tuple(slot for reader, slot in structure.data if reader == place)
            own = priced(ground, choices, structure.needs[place], structure.kept[place], slots)
            self.operators.append(own)
            self._add("rules", op.name, choices.rules)
        self.hubs: dict[str, tuple[int, Forms]] = {}
        self.used: dict[str, int] = {}
        for tensor in structure.tensors:
            if tensor.is_variable:
                forms = tensor_forms(tensor.shape, ground.ranks)
                self.hubs[tensor.name] = (self._add("tensors", tensor.name, forms.named), forms)
        self.uses: list[_Use] = []
        self.loans: dict[str, int] = {}
        self.alike = [factor for tensor in structure.tensors for factor in self._loan(tensor)]
        self.shared = self._parameter_factors()
        self.crossings = [crossing for tensor in structure.tensors for crossing in self._edges(tensor)]

    def _add(
        self, role: Role, name: str, options: Sequence[tuple[Rule, ...]] | Sequence[tuple[Placement, ...]]
    ) -> int:
        self.variables.append(Variable(role, name, options))
        self.sizes.append(len(options))
        return len(self.sizes) - 1

    def part(self, mode: Mode) -> Part:
        """The block in one mode."""
        structure = self.structure
        factors = [*self.alike, *self.shared, *(self._use(use, mode) for use in self.uses)]
        factors += [self._operator(place, mode) for place in range(len(self.operators))]
        factors += [self._edge(crossing, mode) for crossing in self.crossings]
        factors += [
            self._kept(tensor, mode) for tensor in structure.tensors if self._is_kept_in_place(tensor, mode)
        ]
        entry = next((self.hubs[each.name][0] for each in structure.tensors if each.is_entry), None)
        result = next((self.hubs[each.name][0] for each in structure.tensors if each.is_result), None)
        names = tuple(variable.name for variable in self.variables)
        shared = self.around.shared
        across = [(f"parameter {name}", used) for name, used in self.used.items() if shared[name].is_across]
        across += [(f"tensor {name}", variable) for name, variable in self.loans.items()]
        return Part(names, tuple(self.sizes), tuple(factors), entry, result, tuple(across))

    def _loan(self, tensor: Tensor) -> list[Factor]:
        """The hub of a tensor that blocks share, where it lies for all of its readers. Of an entry or result,
        which the chain sees as such besides, a variable of its own that makes the same choice."""
        if not (tensor.is_lent or tensor.is_borrowed):
            return []
        variable, forms = self.hubs[tensor.name]
        self.loans[tensor.name] = variable
        if not (tensor.is_entry or tensor.is_result):
            return []
        hub = self.loans[tensor.name] = self._add("tensors", tensor.name, forms.named)
        same = np.eye(len(forms), dtype=bool)[:, :, None]
        return [Factor((variable, hub), np.where(same, 0.0, np.full(len(COLUMNS), np.inf)))]

    def _costs(self, columns: Columns, *variables: int) -> Factor:
        shape = tuple(self.sizes[variable] for variable in variables)
        return Factor(variables, columns.costs(self.ground, shape))

    def _operator(self, place: int, mode: Mode) -> Factor:
        """An operator's own work, and what it keeps."""
        own = self.operators[place]
        columns = Columns(peak_bytes=own.working_bytes)
        columns.forward(own.times.forward_s + own.exchanged.forward_s)
        columns.blocked(own.exchanged.backward_s)
        columns.computed_backward(own.times.backward_s)
        is_again = mode == "recomputed" and self.structure.is_repeated[place]
        if is_again:
            columns.blocked(own.exchanged.forward_s)
            columns.computed_backward(own.times.forward_s)
        _keep(columns, own.kept_bytes, mode)
        if self.structure.block.entry is None:
            # Nobody makes data again: it waits as an entry does for whoever reads it behind the forward pass.
            _keep(columns, own.data_bytes if is_again else own.kept_data_bytes, "kept")
        else:
            _keep(columns, own.kept_data_bytes, mode)
        if place == len(self.operators) - 1:
            columns.once(self.around.fixed_s)
            columns.forward(self.around.sent_forward_s)
            columns.blocked(self.around.sent_backward_s)
            columns.held_bytes = columns.held_bytes + self.around.fixed_bytes
        return self._costs(columns, place)

    def _edges(self, tensor: Tensor) -> list[Crossing]:
        """All conversions of a tensor."""

        def edge(start: Integers, end: Integers) -> Edge:
            return edge_of(
                self.ground, tensor.shape, start, end, needs_gradient=tensor.needs_gradient,
                value_bytes=self.ground.activation_bytes, gradient_bytes=self.ground.activation_bytes,
            )  # fmt: skip

        read = [(place, slot, self.operators[place].choices.inputs[slot]) for place, slot in tensor.readers]
        if not tensor.is_variable and tensor.maker is not None:
            [(reader, slot, placements)] = read
            made = self.operators[tensor.maker].choices.output
            return [Crossing(tensor, tensor.maker, reader, slot, edge(made, placements))]
        hub, forms = self.hubs[tensor.name]
        found = [
            Crossing(tensor, hub, reader, slot, edge(forms.placements, placements))
            for reader, slot, placements in read
        ]
        if tensor.maker is not None:
            made = self.operators[tensor.maker].choices.output
            found.insert(0, Crossing(tensor, tensor.maker, hub, None, edge(made, forms.placements)))
        return found

    def _edge(self, crossing: Crossing, mode: Mode) -> Factor:
        """A conversion, and the copies of the tensor that are kept at its ends."""
        tensor, end = crossing.tensor, crossing.end
        is_again = mode == "recomputed" and self.structure.is_needed_again(tensor, end, crossing.slot)
        reader = None if crossing.slot is None else self.operators[end]
        columns = crossed(self.ground, crossing.edge, reader, is_repeated=is_again)
        _keep(columns, self._kept_at_ends(crossing), mode)
        return self._costs(columns, crossing.start, end)

    def _kept_at_ends(self, crossing: Crossing) -> Costs:
        """What the maker keeps of its result, and the reader of its input, each thing once."""
        tensor, edge = crossing.tensor, crossing.edge
        is_made = crossing.start == tensor.maker
        keeps_result = is_made and self.operators[crossing.start].kept.output
        start_bytes = edge.start_bytes * float(keeps_result) + 0.0 * edge.end_bytes
        if crossing.slot is None:
            keeps_here = self.structure.is_kept(tensor)
            if tensor.is_result:
                keeps_here = self.around.next_keeps_entry
            keeps_here |= tensor.is_lent
            return np.where(edge.is_same, 0.0, start_bytes) if keeps_here else start_bytes
        keeps_input = crossing.slot in self.operators[crossing.end].kept.inputs
        end_bytes = edge.end_bytes * float(keeps_input) + 0.0 * edge.start_bytes
        if not is_made:
            return np.where(edge.is_same, 0.0, end_bytes)
        return np.where(edge.is_same, np.maximum(start_bytes, end_bytes), start_bytes + end_bytes)

    def _is_kept_in_place(self, tensor: Tensor, mode: Mode) -> bool:
        if tensor.is_lent:
            return True
        if not tensor.is_variable or tensor.is_result or tensor.is_borrowed:
            return False
        if tensor.is_entry and self.structure.entry_is_held:
            return False
        return self.structure.is_kept(tensor) or (tensor.is_entry and mode == "recomputed")

    def _kept(self, tensor: Tensor, mode: Mode) -> Factor:
        """A tensor that readers keep, as it lies for all of them; an entry is held in any case, and by who
        lends it a tensor that other blocks read."""
        hub, forms = self.hubs[tensor.name]
        columns = Columns()
        nbytes = tensor_bytes(self.ground, tensor.shape, forms.placements)
        _keep(columns, nbytes, "kept" if tensor.is_entry or tensor.is_lent else mode)
        return self._costs(columns, hub)

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
                sharing = self.around.shared.get(parameter.name)
                if sharing is None:
                    factors += self._own_parameter(place, slot, bucket)
                else:
                    factors += self._shared_parameter(place, slot, bucket, sharing)
        return factors

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, Forms, Factor]:
        """A variable for how a parameter is stored, and what that costs."""
        forms = storage_forms(shape, self.ground.ranks)
        waiting = self._add("stored", name, forms.named)
        return waiting, forms, self._costs(stored(self.ground, forms), waiting)

    def _own_parameter(self, place: int, slot: int, bucket: float) -> list[Factor]:
        """A parameter with one reader."""
        own = self.operators[place]
        op = own.choices.op
        parameter = op.parameters[slot]
        waiting, forms, storage = self._stored(parameter.name, op.shape(parameter.dims))
        moved = brought(self.ground, forms, own.choices.parameters[slot], bucket)
        share = op.elements(parameter.dims) / sum(op.elements(each.dims) for each in op.parameters)
        self.uses.append(_Use(waiting, place, moved, share))
        return [storage]

    def _use(self, use: _Use, mode: Mode) -> Factor:
        """A parameter at its only reader."""
        own = self.operators[use.reader]
        forward_s, backward_s = own.times.forward_s[None] * use.share, own.times.backward_s[None] * use.share
        is_again = mode == "recomputed" and self.structure.is_repeated[use.reader]
        columns = used_beside(
            self.ground, use.moved, forward_s=forward_s, backward_s=backward_s,
            again_s=forward_s if is_again else None, working_bytes=own.working_bytes[None],
        )  # fmt: skip
        return self._costs(columns, use.waiting, use.reader)

    def _shared_parameter(self, place: int, slot: int, bucket: float, sharing: Sharing) -> list[Factor]:
        """One of several readers of a parameter: the first of them decides how it is stored."""
        own = self.operators[place]
        op = own.choices.op
        name, shape = op.parameters[slot].name, op.shape(op.parameters[slot].dims)
        among = use_forms(shape, self.ground.ranks)
        if name not in self.used:
            self.used[name] = self._add("used", name, among.named)
        factors: list[Factor] = []
        if sharing.first == (place, slot):
            waiting, forms, storage = self._stored(name, shape)
            factors.append(storage)
            moved = brought(self.ground, forms, among.placements, bucket)
            columns = used_by_all(self.ground, moved, sharing.readers)
            costs = columns.costs(self.ground, (len(forms), len(among))).swapaxes(0, 1)
            factors.append(Factor((self.used[name], waiting), costs))
        read = used_by_one(
            self.ground, shape, among.placements, own.choices.parameters[slot], own.working_bytes
        )
        costs = read.costs(self.ground, (len(among), len(own)))
        return [*factors, Factor((self.used[name], place), costs)]


def _keep(columns: Columns, nbytes: Costs, mode: Mode) -> None:
    """Add bytes that are kept from the forward pass to the backward pass, or made again between them."""
    if mode == "kept":
        columns.kept_bytes = columns.kept_bytes + nbytes
    else:
        columns.recomputed_bytes = columns.recomputed_bytes + nbytes
