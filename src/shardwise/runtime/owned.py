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
from shardwise.runtime.holdings import LocalRegion, gather_rank_regions, region_of
from shardwise.runtime.transfers import Region, owners


@dataclass(slots=True, kw_only=True)
class _WeightRegion:
    """A region of a weight that is here: the parameter, and what it holds; `weight` is what its gradient
    counts, where several ranks have computed the same. Of all ranks that hold it one `saves` it."""

    parameter: nn.Parameter
    local_region: Region
    region: Region
    weight: float
    saves: bool

    def view(self, values: Tensor) -> Tensor:
        """The region in `values`, which are like the parameter's part here."""
        return LocalRegion(self.local_region, {"": values}).view("", self.region)

    @property
    def elements(self) -> int:
        return prod(stop - start for start, stop in self.region)


@dataclass(slots=True, kw_only=True)
class _ShareGroup:
    """Pieces that the same ranks own, in the same order on all of them, and this rank's `share` of their
    elements, which lie one after the other and are dealt out in equal runs. Of `parameters`, which it is made
    up of, each says whether it decays and where in the share it lies."""

    group: ProcessGroup | None
    weight_regions: list[_WeightRegion]
    share: Tensor
    parameters: list[tuple[nn.Parameter, bool, slice]] = field(default_factory=list)


class OptimizerShards:
    """The weights of one rank's stage, as parts of those of the whole model."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        names: Sequence[str],
        tensor_ranks: Mapping[int, frozenset[int]],
    ) -> None:
        """`parameters` go by their names in the whole model, which has `names`; `tensor_ranks` are the ranks
        of every rank's tensor group, which have equal gradients of what they all hold. Makes process groups;
        call it on every rank."""
        here: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in parameters:
            here[names.index(name)].append(parameter)
        rank_regions = gather_rank_regions(
            (tensor, region_of(one))
            for tensor, same in here.items()
            for one in same
            if local(one.detach()).numel()
        )
        sets: dict[tuple[int, ...], list[tuple[int, Region]]] = defaultdict(list)
        for tensor, region, ranks in owners(rank_regions, distributed.get_world_size()):
            sets[ranks].append((tensor, region))
        rank = distributed.get_rank()
        self._share_groups: list[_ShareGroup] = []
        for ranks, regions in sorted(sets.items()):
            group = group_among([ranks]) if len(ranks) > 1 else None
            if rank in ranks:
                weight = 1.0 / len(tensor_ranks[rank] & set(ranks))
                is_saver = (number % len(ranks) == ranks.index(rank) for number in range(len(regions)))
                weight_regions = [
                    _weight_region_of(here[tensor], region, weight, saves)
                    for (tensor, region), saves in zip(regions, is_saver, strict=True)
                ]
                weight_regions.sort(
                    key=lambda weight_region: weight_region.parameter.dim() <= 1
                )  # those that decay come first
                self._share_groups.append(
                    _share_group_of(group, weight_regions, len(ranks), ranks.index(rank))
                )

    @property
    def parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """This rank's share of everything that it holds, and of each whether it decays: what the optimizer
        works on. Over all ranks every element of the model is there once."""
        return [
            (own, decays) for share_group in self._share_groups for own, decays, _ in share_group.parameters
        ]

    def reduce(self) -> None:
        """Give `parameters` the sums of the gradients of all owners, and take those of the weights away."""
        pending = []
        for share_group in self._share_groups:
            whole = _packed(
                [_gradient(weight_region) for weight_region in share_group.weight_regions], share_group
            )
            part, work = whole, None
            if share_group.group is not None:
                part = torch.empty_like(share_group.share)
                work = distributed.reduce_scatter_single(part, whole, group=share_group.group, async_op=True)
            pending.append((share_group, part, whole, work))
        for share_group, part, _, work in pending:
            if work is not None:
                work.wait()
            for own, _, place in share_group.parameters:
                own.grad = part[place]
        for weight_region in (
            weight_region
            for share_group in self._share_groups
            for weight_region in share_group.weight_regions
        ):
            weight_region.parameter.grad = None

    def sync_weights(self) -> None:
        """Give the weights what their owners' shares are now."""
        with torch.no_grad():
            for weight_region, values in self._gathered_regions([own for own, _ in self.parameters]):
                there = weight_region.view(local(weight_region.parameter))
                there.copy_(values.view(there.shape))

    @property
    def regions(self) -> list[tuple[nn.Parameter, Region, bool]]:
        """Of every weight here the regions that are owned by the same ranks each, and whether this rank is
        the one of them that saves it."""
        return [
            (weight_region.parameter, weight_region.region, weight_region.saves)
            for share_group in self._share_groups
            for weight_region in share_group.weight_regions
        ]

    def gathered_regions(self, shares: Sequence[Tensor]) -> Iterator[Tensor]:
        """What the owners of every one of `regions` have in their `shares`, which are like `parameters`; a
        region's elements one after the other. Call it on every rank."""
        return (values for _, values in self._gathered_regions(shares))

    def scattered(self, values: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shares, like `parameters`, of `values`, which are those of `regions`."""
        left, shares = iter(values), []
        for share_group in self._share_groups:
            whole = _packed([next(left) for _ in share_group.weight_regions], share_group)
            first = (
                0
                if share_group.group is None
                else distributed.get_rank(share_group.group) * len(share_group.share)
            )
            own = whole[first : first + len(share_group.share)]
            shares += [own[place] for _, _, place in share_group.parameters]
        return shares

    def _gathered_regions(self, shares: Sequence[Tensor]) -> Iterator[tuple[_WeightRegion, Tensor]]:
        left = iter(shares)
        for share_group in self._share_groups:
            own = torch.cat([next(left).detach() for _ in share_group.parameters])
            whole = own
            if share_group.group is not None:
                whole = own.new_empty(len(own) * distributed.get_world_size(share_group.group))
                distributed.all_gather_single(whole, own, group=share_group.group)
            sizes = [weight_region.elements for weight_region in share_group.weight_regions]
            parts = whole[: sum(sizes)].split(sizes)
            yield from zip(share_group.weight_regions, parts, strict=True)


def _weight_region_of(
    same: Sequence[nn.Parameter], region: Region, weight: float, saves: bool
) -> _WeightRegion:
    (parameter,) = same
    return _WeightRegion(
        parameter=parameter, local_region=region_of(parameter), region=region, weight=weight, saves=saves
    )


def _share_group_of(
    group: ProcessGroup | None, weight_regions: list[_WeightRegion], ranks: int, place: int
) -> _ShareGroup:
    elements = sum(weight_region.elements for weight_region in weight_regions)
    decaying = sum(
        weight_region.elements for weight_region in weight_regions if weight_region.parameter.dim() > 1
    )
    size = -(-elements // ranks)
    start = place * size
    share_group = _ShareGroup(group=group, weight_regions=weight_regions, share=torch.empty(0))
    with torch.no_grad():
        values = _packed(
            [weight_region.view(local(weight_region.parameter)) for weight_region in weight_regions],
            share_group,
        )
    share_group.share = values[start : start + size].clone()
    middle = min(max(decaying - start, 0), size)
    for decays, run in ((True, slice(0, middle)), (False, slice(middle, size))):
        if run.start < run.stop:
            share_group.parameters.append((nn.Parameter(share_group.share[run]), decays, run))
    return share_group


def _gradient(weight_region: _WeightRegion) -> Tensor:
    return weight_region.view(local(weight_region.parameter.grad)) * weight_region.weight


def _packed(values: Sequence[Tensor], share_group: _ShareGroup) -> Tensor:
    """These one after the other, and zeros to the end of equal shares."""
    ranks = 1 if share_group.group is None else distributed.get_world_size(share_group.group)
    flat = torch.cat([one.reshape(-1) for one in values])
    return torch.cat((flat, flat.new_zeros(-len(flat) % ranks)))
