"""Who makes and reads what within a block, what needs gradients, and what is made again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwise.cost.layouts.work import Needs
from shardwise.graph import Block, OpNode, SavedTensors, saved_of


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation of a block: `maker` is the place of its operator, None of the entry and of what is
    borrowed from a block before; `readers` are operators and the slots of their inputs. `is_result` tells
    what the next block reads, `is_skip_output` what blocks behind borrow."""

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
        """Whether it is brought to a place of its own: for several readers, or another block."""
        return self.maker is None or self.is_result or self.is_skip_output or len(self.readers) > 1


@dataclass(frozen=True, slots=True)
class Structure:
    """A block seen as a network. By operator: `needs` of gradients, `saved` for the backward pass, whether it
    `is_repeated` where the block is recomputed. `data` are inputs (operator, slot) without a gradient that
    the graph is given. Where the `entry_is_saved_elsewhere`, another block counts what it takes: who lends
    it."""

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
        """What blocks behind borrow, by name, and whether it needs a gradient."""
        return {tensor.name: tensor.needs_gradient for tensor in self.tensors if tensor.is_skip_output}

    @property
    def operators(self) -> tuple[OpNode, ...]:
        return self.block.operators

    def is_saved(self, tensor: Tensor) -> bool:
        """Whether the backward pass of some reader reads the tensor."""
        return any(slot in self.saved[reader].inputs for reader, slot in tensor.readers)

    def is_needed_for_recompute(self, tensor: Tensor, end: int, slot: int | None) -> bool:
        """Whether a recomputation brings the tensor to the `slot` of its reader `end` again; without a slot,
        to the place where it lies for all readers."""
        return any(
            self.is_repeated[reader] or own in self.saved[reader].inputs
            for reader, own in tensor.readers
            if slot is None or (reader, own) == (end, slot)
        )

    @property
    def recompute_saves_memory(self) -> bool:
        """Whether the block may hold less where it is recomputed: something that it makes is kept, be it a
        copy of its entry. Data lies as its readers want it, and waits for them in any case."""
        has_made = any(own.output or own.own for own in self.saved) or any(map(self.is_saved, self.tensors))
        return has_made or self.block.entry is not None

    @property
    def saves_entry(self) -> bool:
        """Whether the entry is held to the backward pass, were the block not recomputed."""
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
    """The structure of a block that has activations of these `shapes`, reads graph inputs `data`, its entry
    and what is `skip_inputs` from blocks before it, by whether that needs a gradient, and lends what is
    `skip_outputs`; `has_next` where another block follows, `stops_early` where a recomputation ends with what
    is needed."""
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
    """The left operand of products is an activation, the right one a parameter or the other activations."""
    if op.parameters:
        return Needs(left=any(inputs), right=True)
    return Needs(left=any(inputs[:1]), right=any(inputs[1:]))


def _repeated(
    ops: Sequence[OpNode], saved: Sequence[SavedTensors], tensors: Sequence[Tensor]
) -> tuple[bool, ...]:
    """Which operators make, themselves or through others, what the backward pass reads."""
    is_repeated = [bool(own.output or own.own) for own in saved]
    made_by = {tensor.maker: tensor for tensor in tensors}
    for place in reversed(range(len(ops))):
        for reader, slot in made_by[place].readers if place in made_by else ():
            is_repeated[place] |= is_repeated[reader] or slot in saved[reader].inputs
    return tuple(is_repeated)
