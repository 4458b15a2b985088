"""What ranks hold the same parts of weights do with them: gradients are added up over all of them, and each
keeps the optimizer's states of a part of its own.

Pipelines whose cuts and tensor degrees differ hold different parts of a weight. It is cut wherever any of
them cuts it, and each piece belongs to all ranks that hold it: with one group for every such set of ranks,
each pair of ranks exchanges what both have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from shardwise.runtime.gradients import local
from shardwise.runtime.groups import group_among
from shardwise.runtime.holdings import Part, region_of, told
from shardwise.runtime.transfers import Region, owners


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A region of a weight that is here: the parameter, and what it holds; `weight` is what its gradient
    counts, where several ranks have computed the same. Of all ranks that hold it one `saves` it."""

    parameter: nn.Parameter
    held: Region
    region: Region
    weight: float
    saves: bool

    def view(self, values: Tensor) -> Tensor:
        """The region in `values`, which are like the parameter's part here."""
        return Part(self.held, {"": values}).view("", self.region)

    @property
    def elements(self) -> int:
        return prod(stop - start for start, stop in self.region)


@dataclass(slots=True, kw_only=True)
class _Shared:
    """Pieces that the same ranks own, in the same order on all of them, and this rank's `share` of their
    elements, which lie one after the other and are dealt out in equal runs. Of `parameters`, which it is made
    up of, each says whether it decays and where in the share it lies."""

    group: ProcessGroup | None
    pieces: list[_Piece]
    share: Tensor
    parameters: list[tuple[nn.Parameter, bool, slice]] = field(default_factory=list)


class Owned:
    """The weights of one rank's stage, as parts of those of the whole model."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        names: Sequence[str],
        mates: Mapping[int, frozenset[int]],
    ) -> None:
        """`parameters` go by their names in the whole model, which has `names`; `mates` are the ranks of
        every rank's tensor group, which have equal gradients of what they all hold. Makes process groups;
        call it on every rank.
        """
        here: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in parameters:
            here[names.index(name)].append(parameter)
        held = told(
            (tensor, region_of(one))
            for tensor, same in here.items()
            for one in same
            if local(one.detach()).numel()
        )
        sets: dict[tuple[int, ...], list[tuple[int, Region]]] = defaultdict(list)
        for tensor, region, ranks in owners(held, distributed.get_world_size()):
            sets[ranks].append((tensor, region))
        rank = distributed.get_rank()
        self._shared: list[_Shared] = []
        for ranks, regions in sorted(sets.items()):
            group = group_among([ranks]) if len(ranks) > 1 else None
            if rank in ranks:
                weight = 1.0 / len(mates[rank] & set(ranks))
                turns = (number % len(ranks) == ranks.index(rank) for number in range(len(regions)))
                pieces = [
                    _piece_of(here[tensor], region, weight, saves)
                    for (tensor, region), saves in zip(regions, turns, strict=True)
                ]
                pieces.sort(key=lambda piece: piece.parameter.dim() <= 1)  # those that decay come first
                self._shared.append(_shared_of(group, pieces, len(ranks), ranks.index(rank)))

    @property
    def parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """This rank's share of everything that it holds, and of each whether it decays: what the optimizer
        works on. Over all ranks every element of the model is there once."""
        return [(own, decays) for shared in self._shared for own, decays, _ in shared.parameters]

    def reduce(self) -> None:
        """Give `parameters` the sums of the gradients of all owners, and take those of the weights away."""
        pending = []
        for shared in self._shared:
            whole = _packed([_gradient(piece) for piece in shared.pieces], shared)
            part, work = whole, None
            if shared.group is not None:
                part = torch.empty_like(shared.share)
                work = distributed.reduce_scatter_single(part, whole, group=shared.group, async_op=True)
            pending.append((shared, part, whole, work))
        for shared, part, _, work in pending:
            if work is not None:
                work.wait()
            for own, _, place in shared.parameters:
                own.grad = part[place]
        for piece in (piece for shared in self._shared for piece in shared.pieces):
            piece.parameter.grad = None

    def spread(self) -> None:
        """Give the weights what their owners' shares are now."""
        with torch.no_grad():
            for piece, values in self._joined([own for own, _ in self.parameters]):
                there = piece.view(local(piece.parameter))
                there.copy_(values.view(there.shape))

    @property
    def regions(self) -> list[tuple[nn.Parameter, Region, bool]]:
        """Of every weight here the regions that are owned by the same ranks each, and whether this rank is
        the one of them that saves it."""
        return [
            (piece.parameter, piece.region, piece.saves) for shared in self._shared for piece in shared.pieces
        ]

    def joined(self, shares: Sequence[Tensor]) -> Iterator[Tensor]:
        """What the owners of every one of `regions` have in their `shares`, which are like `parameters`; a
        region's elements one after the other. Call it on every rank."""
        return (values for _, values in self._joined(shares))

    def dealt(self, values: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shares, like `parameters`, of `values`, which are those of `regions`."""
        left, shares = iter(values), []
        for shared in self._shared:
            whole = _packed([next(left) for _ in shared.pieces], shared)
            first = 0 if shared.group is None else distributed.get_rank(shared.group) * len(shared.share)
            own = whole[first : first + len(shared.share)]
            shares += [own[place] for _, _, place in shared.parameters]
        return shares

    def _joined(self, shares: Sequence[Tensor]) -> Iterator[tuple[_Piece, Tensor]]:
        left = iter(shares)
        for shared in self._shared:
            own = torch.cat([next(left).detach() for _ in shared.parameters])
            whole = own
            if shared.group is not None:
                whole = own.new_empty(len(own) * distributed.get_world_size(shared.group))
                distributed.all_gather_single(whole, own, group=shared.group)
            sizes = [piece.elements for piece in shared.pieces]
            parts = whole[: sum(sizes)].split(sizes)
            yield from zip(shared.pieces, parts, strict=True)


def _piece_of(same: Sequence[nn.Parameter], region: Region, weight: float, saves: bool) -> _Piece:
    (parameter,) = same
    return _Piece(parameter=parameter, held=region_of(parameter), region=region, weight=weight, saves=saves)


def _shared_of(group: ProcessGroup | None, pieces: list[_Piece], ranks: int, place: int) -> _Shared:
    elements = sum(piece.elements for piece in pieces)
    decaying = sum(piece.elements for piece in pieces if piece.parameter.dim() > 1)
    size = -(-elements // ranks)
    start = place * size
    shared = _Shared(group=group, pieces=pieces, share=torch.empty(0))
    with torch.no_grad():
        values = _packed([piece.view(local(piece.parameter)) for piece in pieces], shared)
    shared.share = values[start : start + size].clone()
    middle = min(max(decaying - start, 0), size)
    for decays, run in ((True, slice(0, middle)), (False, slice(middle, size))):
        if run.start < run.stop:
            shared.parameters.append((nn.Parameter(shared.share[run]), decays, run))
    return shared


def _gradient(piece: _Piece) -> Tensor:
    return piece.view(local(piece.parameter.grad)) * piece.weight


def _packed(values: Sequence[Tensor], shared: _Shared) -> Tensor:
    """These one after the other, and zeros to the end of equal shares."""
    ranks = 1 if shared.group is None else distributed.get_world_size(shared.group)
    flat = torch.cat([one.reshape(-1) for one in values])
    return torch.cat((flat, flat.new_zeros(-len(flat) % ranks)))
