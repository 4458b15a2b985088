"""Groups of ranks on the tiers of a cluster, and the costs of their collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import cluster, device, problem, table, with_efficiency

from shardwise.cluster import Backend, Tier
from shardwise.cluster.device import CollectiveCurve
from shardwise.cost import Problem
from shardwise.cost.collectives import (
    ProcessGroups,
    Sizes,
    alike_grids,
    collective_model_of,
    contends,
    groups_of,
    inner_part,
    joined,
    outer_part,
    sizes_of,
)
from shardwise.search.step_times import step_times_s
from shardwise.strategy import AXES, ORDERS


def tiers(*spans: int) -> tuple[Tier, ...]:
    return tuple(
        Tier(name=str(span), span=span, bytes_per_s=1.0, flow_bytes_per_s=1.0, latency_s=0.0)
        for span in spans
    )


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [
        (1, 8, (4, 2, 1)),  # four in a node, two nodes of a rack
        (1, 16, (4, 2, 2)),
        (4, 4, (1, 2, 2)),  # one per node
        (2, 4, (2, 2, 1)),
        (8, 2, (1, 1, 2)),
        (1, 1, (1, 1, 1)),
        (3, 2, (1, 1, 2)),  # does not fit the nodes: all members count as apart
    ],
)
def test_members_of_a_group_per_tier(stride: int, size: int, expected: tuple[int, ...]) -> None:
    assert tuple(int(s) for s in sizes_of(tiers(4, 8, 16), stride, size)) == expected


def test_two_axes_together() -> None:
    assert joined((2, 1), (2, 4)) == (4, 4)


@pytest.mark.parametrize(
    ("k", "inner", "outer"),
    [
        (1, (1, 1), (4, 6)),
        (2, (2, 1), (2, 6)),
        (4, (4, 1), (1, 6)),
        (12, (4, 3), (1, 2)),
        (24, (4, 6), (1, 1)),
    ],
)
def test_a_shard_group_takes_the_closest_members(k: int, inner: Sizes, outer: Sizes) -> None:
    part = inner_part((4, 6), k)
    assert tuple(int(s) for s in part) == inner
    assert tuple(int(s) for s in outer_part((4, 6), part)) == outer


def test_a_shard_group_over_three_tiers() -> None:
    part = inner_part((2, 4, 3), 24)
    assert tuple(int(s) for s in part) == (2, 4, 3)
    part = inner_part((4, 2, 3), 12)
    assert tuple(int(s) for s in part) == (4, 1, 3)
    assert tuple(int(s) for s in outer_part((4, 2, 3), part)) == (1, 2, 1)


def test_a_shard_group_that_does_not_divide_a_node() -> None:
    # 3 of a group of 2 x 6: no pair within a node, three nodes.
    assert tuple(int(s) for s in inner_part((2, 6), 3)) == (1, 3)


# Groups by brute force: the coordinates of every rank, listed.

Coordinates = dict[str, int]


def coordinates(order: str, sizes: dict[str, int]) -> list[Coordinates]:
    """Coordinates of every rank, in rank order; the first axis of the order varies fastest."""
    axes = order.split("-")
    listed = product(*(range(sizes[axis]) for axis in reversed(axes)))
    return [dict(zip(reversed(axes), values, strict=True)) for values in listed]


def counted_sizes(spans: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sizes per tier of groups with equal placement."""
    found = set()
    for ranks in groups:
        below, sizes = 1, []
        for span in spans:
            inside = max(Counter(rank // span for rank in ranks).values())
            sizes.append(inside // below)
            below = inside
        found.add(tuple(sizes))
    assert len(found) == 1
    return found.pop()


def grouped(ranks: Sequence[int], key: Callable[[int], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def counted_groups(order: str, degrees: dict[str, int], etp: int, ep: int) -> dict[str, tuple[int, ...]]:
    """The groups of a mesh on 32 ranks in pairs, nodes and racks: every field of `ProcessGroups`
    with sizes.
    """
    places = coordinates(order, degrees)
    spans, ranks = (2, 4, 16, 32), range(len(places))

    def apart(*axes: str) -> Callable[[int], Any]:
        """A key that is equal for ranks that differ in `axes` only."""
        return lambda rank: tuple(places[rank][axis] for axis in AXES if axis not in axes)

    stages = grouped(ranks, lambda rank: places[rank]["pp"])
    position = {rank: at for stage in stages for at, rank in enumerate(sorted(stage))}

    def experts(rank: int) -> tuple[int, int, int]:
        at = position[rank]
        return at % etp, at // etp % ep, at // (etp * ep)

    def expert_groups(free: int) -> list[list[int]]:
        """Ranks of one stage that differ in coordinate `free` of (etp, ep, replica) only."""

        def key(rank: int) -> Any:
            return places[rank]["pp"], *(c for axis, c in enumerate(experts(rank)) if axis != free)

        return grouped(ranks, key)

    return {
        "tensor": counted_sizes(spans, grouped(ranks, apart("tp"))),
        "context": counted_sizes(spans, grouped(ranks, apart("cp"))),
        "data": counted_sizes(spans, grouped(ranks, apart("dp", "cp"))),
        "expert_tensor": counted_sizes(spans, expert_groups(0)),
        "expert": counted_sizes(spans, expert_groups(1)),
        "experts_data": counted_sizes(spans, expert_groups(2)),
    }


def groups(order: str, degrees: dict[str, int], etp: int, ep: int) -> ProcessGroups:
    p = problem(on=replace(cluster(8), tiers=tiers(2, 4, 16, 32)))
    plain = table(p, "tp=32,sequence_parallel=no")
    return groups_of(p, plain.replaced(**degrees, etp=etp, ep=ep, axis_order=ORDERS.index(order)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "degrees",
    [(2, 2, 2, 4), (4, 1, 4, 2), (1, 2, 8, 2), (2, 4, 4, 1), (8, 2, 1, 2), (1, 1, 4, 8), (2, 1, 2, 8)],
)
def test_groups_are_those_of_listed_ranks(order: str, degrees: tuple[int, ...]) -> None:
    sizes = dict(zip(AXES, degrees, strict=True))
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    for etp, ep in [(1, 1), (1, stage), (2, 2), (1, 2), (2, stage // 2)]:
        if stage % (etp * ep):
            continue
        found = groups(order, sizes, etp, ep)
        for name, expected in counted_groups(order, sizes, etp, ep).items():
            assert tuple(int(s[0]) for s in getattr(found, name)) == expected, (name, etp, ep)


@pytest.mark.parametrize(
    ("order", "expected", "ends"),
    [
        # Pipeline neighbours are 8 apart: two in a rack of 16, on different nodes of 4.
        ("tp-cp-dp-pp", [2, 3, 2], 3),
        ("pp-tp-cp-dp", [0, 1, 0], 1),  # four next to each other, from one pair to the other in the middle
        ("tp-pp-cp-dp", [1, 2, 1], 2),  # 2 apart in nodes of 4
        ("tp-cp-pp-dp", [2, 2, 2], 2),  # 4 apart
    ],
)
def test_the_tiers_between_neighbouring_stages(order: str, expected: list[int], ends: int) -> None:
    found = groups(order, {"tp": 2, "cp": 2, "dp": 2, "pp": 4}, 1, 1).stages
    assert [int(found.tier(rank)[0]) for rank in range(3)] == expected
    assert int(found.wraparound_tier[0]) == ends


def test_axis_orders_with_the_same_groups_are_one() -> None:
    # On one tier all orders are equal; on nodes of 4, those with tp and the rest at the same strides.
    p = problem(on=cluster(2))
    texts = [f"tp=4,dp=2,axis_order={order}" for order in ("tp-cp-dp-pp", "tp-cp-pp-dp", "dp-tp-cp-pp")]
    rows, of_alike = alike_grids(p, table(p, *texts, "tp=2,dp=4", "tp=4,dp=2,micro_batch_size=2"))
    assert len(rows) == 4
    assert of_alike[0] == of_alike[1]
    assert len(set(of_alike.tolist())) == 4
    one = problem(on=replace(cluster(1), tiers=tiers(4)))
    # With stages on either side of everything else the neighbours are apart, or not; on one tier both are
    # equal.
    texts = [f"tp=2,pp=2,axis_order={order}" for order in ORDERS]
    assert len(alike_grids(one, table(one, *texts))[0]) == 1


def test_orders_with_more_concurrent_senders_are_not_equivalent() -> None:
    # Stages cross nodes of 4 in every way, with one or three devices of a node that send: the groups are
    # equal, the hops are not, unless each device has its own card.
    texts = [f"tp=4,pp=3,dp=3,axis_order={order}" for order in ("pp-dp-tp-cp", "dp-pp-tp-cp")]
    on = cluster(9)
    wide = replace(on, tiers=(on.tiers[0], replace(on.tiers[1], flow_bytes_per_s=80.0)))
    for each, number in ((on, 1), (wide, 2)):
        p = problem(on=each, batch=9)
        assert len(alike_grids(p, table(p, *texts))[0]) == number


def test_equivalent_orders_cost_the_same() -> None:
    p = problem(on=cluster(2))
    plain = "cp=2,dp=2,pp=2,zero_stage=3,axis_order="
    rows = table(p, *(plain + order for order in ORDERS))
    _, of_alike = alike_grids(p, rows)
    times_s = step_times_s(p, rows)
    assert 1 < len(set(of_alike.tolist())) < len(ORDERS)
    for alike in set(of_alike.tolist()):
        assert len(set(times_s[of_alike == alike].tolist())) == 1


CURVES: dict[str, Any] = {
    "scale_up": CollectiveCurve(fraction=0.5, startup_s=0.2),
    "scale_out": CollectiveCurve(fraction=0.25, startup_s=4.0, partial_fraction=0.5),
}


def slow_problem(*, in_switch: bool = False) -> Problem:
    """100 and 20 B/s, of which collectives reach 50 and 5; latencies 0.5 s and 2 s; start-up 0.2 s
    and 4 s.
    """
    on = cluster(2, of=with_efficiency(**CURVES), latency_s=(0.5, 2.0), in_switch=in_switch)
    return problem(on=on)


def test_collectives_reach_a_fraction_of_the_links() -> None:
    fabric = collective_model_of(slow_problem())
    assert fabric.alphas_s == (0.5, 2.0)
    assert fabric.startups_s == (0.2, 4.0)
    assert fabric.bytes_per_s == (50.0, 5.0)
    assert fabric.flow_bytes_per_s == (50.0, 5.0)
    assert fabric.in_switch == (0.0, 0.0)
    assert collective_model_of(slow_problem(in_switch=True)).in_switch == (1.0, 0.0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4, 1), 3.2),  # 3 * 0.5 + 3/4 * 100 / 50, and 0.2 to start
        ((1, 2), 16.0),  # 1 * 2 + 1/2 * 100 / 5, and 4
        ((4, 2), 22.375),  # 7 * 2 + 7/8 * max(100 / 50, 100 / (4 * 5)), and 4
        ((2, 2), 25.0),  # half of a node: 3 * 2 + 3/4 * 100 / (2 * 5 * 0.5), and 4
        ((1, 1), 0.0),
    ],
)
def test_a_pass_over_the_fabric(sizes: Sizes, expected: float) -> None:
    assert float(collective_model_of(slow_problem()).all_gather_s(100.0, sizes)) == pytest.approx(
        expected, rel=1e-14
    )


def test_two_ranks_that_send_to_each_other_share_the_bandwidth() -> None:
    curves = CURVES | {"scale_out": replace(CURVES["scale_out"], exchange_fraction=0.5)}
    fabric = collective_model_of(problem(on=cluster(2, of=with_efficiency(**curves), latency_s=(0.5, 2.0))))
    # A collective of two over the network: 2 + 1/2 * 100 / (5 * 0.5) + 4. Two in a node have the whole rate:
    # 0.5 + 1 + 0.2.
    assert float(fabric.all_gather_s(100.0, (1, 2))) == pytest.approx(26.0, rel=1e-14)
    assert float(fabric.all_gather_s(100.0, (2, 1))) == pytest.approx(1.7, rel=1e-14)
    # Larger rings send to one and receive from another; reductions and messages use one direction at a time.
    plain = collective_model_of(slow_problem())
    assert float(fabric.all_gather_s(100.0, (2, 2))) == float(plain.all_gather_s(100.0, (2, 2)))
    assert float(fabric.all_reduce_s(100.0, (1, 2))) == float(plain.all_reduce_s(100.0, (1, 2)))
    assert float(fabric.send_s(100.0, 1)) == float(plain.send_s(100.0, 1))
    # In an all-to-all every pair does: 2 + 100 * 4 / 8 / (5 * 0.5) + 4.
    assert float(fabric.all_to_all_s(100.0, (4, 2))) == pytest.approx(26.0, rel=1e-14)
    # Each row of a column has its own size.
    both = fabric.all_gather_s(100.0, (np.array([1, 2]), np.array([2, 2])))
    np.testing.assert_allclose(both, [26.0, 25.0], rtol=1e-14)


def test_ranks_wait_for_each_other_at_collectives_and_not_at_messages() -> None:
    curves = CURVES | {"scale_out": replace(CURVES["scale_out"], lockstep_s=3.0)}
    fabric = collective_model_of(problem(on=cluster(2, of=with_efficiency(**curves), latency_s=(0.5, 2.0))))
    plain = collective_model_of(slow_problem())
    sizes = (2, 2)
    for name in ("all_gather_s", "all_reduce_s", "all_to_all_s"):
        assert float(getattr(fabric, name)(100.0, sizes)) == float(getattr(plain, name)(100.0, sizes)) + 3.0
    assert float(fabric.all_gather_s(100.0, (4, 1))) == float(
        plain.all_gather_s(100.0, (4, 1))
    )  # within a node
    assert float(fabric.send_s(100.0, 1)) == float(plain.send_s(100.0, 1))


@pytest.mark.parametrize(
    ("group", "replicas", "expected"),
    [
        ((2, 1), (2, 1), True),  # both within nodes
        ((2, 1), (2, 2), False),  # the rate of replicas is set between nodes, which the group does not cross
        ((2, 2), (1, 2), True),
        ((1, 2), (4, 1), False),  # the group leaves the node, replicas do not
        ((2, 2), (2, 2), True),
        ((2, 1), (1, 1), False),  # no replicas
        ((1, 1), (1, 2), False),
    ],
)
def test_groups_that_share_network_cards_with_the_replicas_contend(
    group: Sizes, replicas: Sizes, expected: bool
) -> None:
    tiers = cluster(2).tiers
    assert contends(tiers, group, replicas) == expected
    columns = [tuple(np.array([size, 1]) for size in sizes) for sizes in (group, replicas)]
    assert contends(tiers, *columns).tolist() == [expected, False]
    # Racks and what is between them are reached through the same cards.
    racks = (*tiers, replace(tiers[1], name="between racks", span=16))
    assert contends(racks, (1, 2, 1), (1, 1, 2)) and not contends(racks, (2, 1, 1), (1, 1, 2))


def test_a_reduce_scatter_costs_the_collectives_that_the_backend_uses() -> None:
    # One pass around four of a node, 3.2 s as above; or all reduced, 6.2 s as below.
    own = collective_model_of(slow_problem())
    assert float(own.reduce_scatter_s(100.0, (4, 1))) == pytest.approx(3.2, rel=1e-14)
    sums = replace(own, backend=Backend(name="sums", instead={"reduce_scatter": "all_reduce"}))
    assert float(sums.reduce_scatter_s(100.0, (4, 1))) == pytest.approx(6.2, rel=1e-14)
    assert float(sums.all_gather_s(100.0, (4, 1))) == pytest.approx(3.2, rel=1e-14)
    assert (
        collective_model_of(problem(on=cluster(1, of=device(backend=sums.backend)))).backend is sums.backend
    )


def test_an_all_reduce_over_the_fabric() -> None:
    # Tree 2 * 2 * 0.5 + 2 * 100 / 50 = 6 equals two passes; in the switch 2 * 0.5 + 100 / 50 = 3; 0.2 to
    # start.
    assert float(collective_model_of(slow_problem()).all_reduce_s(100.0, (4, 1))) == pytest.approx(
        6.2, rel=1e-14
    )
    switched = collective_model_of(slow_problem(in_switch=True))
    assert float(switched.all_reduce_s(100.0, (4, 1))) == pytest.approx(3.2, rel=1e-14)
    # The network cannot reduce: trees 2 * 3 * 2 + max(2 * 100 / 50, 100 / 20) = 17 beat two passes 2 * 18.4;
    # and 4. A library without such trees sends twice: 22.
    assert float(switched.all_reduce_s(100.0, (4, 2))) == pytest.approx(21.0, rel=1e-14)
    lacks = Backend(name="sums", instead={"reduce_scatter": "all_reduce"})
    assert float(replace(switched, backend=lacks).all_reduce_s(100.0, (4, 2))) == pytest.approx(
        26.0, rel=1e-14
    )


@pytest.mark.parametrize(
    ("sizes", "outer_s"),
    [
        ((4, 2), 5.0),  # whole nodes: 100 / (4 * 5)
        ((2, 2), 20.0),  # parts of nodes reach half: 100 / (2 * 5 * 0.5)
        ((1, 2), 20.0),  # a single rank of a node has the card to itself: 100 / 5
        ((3, 2), 100 / 7.5),
        ((2, 1), 0.0),  # does not leave the node
    ],
)
def test_rings_through_parts_of_nodes_are_slower(sizes: Sizes, outer_s: float) -> None:
    p = slow_problem()
    plain = replace(CURVES["scale_out"], partial_fraction=1.0)
    whole = problem(on=cluster(2, of=with_efficiency(**CURVES | {"scale_out": plain}), latency_s=(0.5, 2.0)))
    n, inner_s = sizes[0] * sizes[1], 2.0 if sizes[0] > 1 else 0.0
    alpha_s = (2.0, 4.0) if sizes[1] > 1 else (0.5, 0.2)
    expected = (n - 1) * alpha_s[0] + (n - 1) / n * max(inner_s, outer_s) + alpha_s[1]
    assert float(collective_model_of(p).all_gather_s(100.0, sizes)) == pytest.approx(expected, rel=1e-14)
    # The trees of an all-reduce too: 2 log2(n) alpha + max(inner, outer), inner twice where more than two
    # meet.
    tree_s = 2 * np.log2(n) * alpha_s[0] + max((2 if sizes[0] > 2 else 1) * inner_s, outer_s)
    all_reduce_s = min(tree_s, 2 * (expected - alpha_s[1])) + alpha_s[1]
    assert float(collective_model_of(p).all_reduce_s(100.0, sizes)) == pytest.approx(all_reduce_s, rel=1e-14)
    is_slower = collective_model_of(p).all_gather_s(100.0, sizes) > collective_model_of(whole).all_gather_s(
        100.0, sizes
    )
    assert bool(is_slower) == (sizes in ((2, 2), (3, 2)))


@pytest.mark.parametrize(("cards", "outer_s"), [(4, 20.0), (2, 20.0), (1, 10.0)])
def test_parts_of_nodes_with_one_card_have_all_of_it(cards: int, outer_s: float) -> None:
    # 20 B/s for each of four devices while all send: 80 on one card, 40 on each of two. A quarter of the 20
    # is reached: 100 / (2 * 5), and by several cards half of that.
    p = slow_problem()
    network = replace(p.tiers[1], flow_bytes_per_s=80.0 / cards)
    shared = problem(on=replace(p.cluster, tiers=(p.tiers[0], network)))
    expected = 3 * 2.0 + 3 / 4 * outer_s + 4.0
    assert float(collective_model_of(shared).all_gather_s(100.0, (2, 2))) == pytest.approx(
        expected, rel=1e-14
    )


def test_parts_of_columns_are_slower_row_by_row() -> None:
    sizes = (np.array([4, 2, 1]), np.array([2, 2, 2]))
    found = collective_model_of(slow_problem()).all_gather_s(100.0, sizes)
    # 22.375 and 25 as above; one rank of each node 2 + 1/2 * 20 + 4.
    np.testing.assert_allclose(found, [22.375, 25.0, 16.0], rtol=1e-14)


def test_networks_that_join_more_nodes_are_crowded() -> None:
    # Two, eight and 32 nodes with crowding 1/2: 5 B/s over the square root of 2, 8 and 32; inside a node all
    # is as before, and a tier between counts its own groups alone.
    crowded = {**CURVES, "scale_out": replace(CURVES["scale_out"], crowding=0.5)}
    for nodes in (2, 8, 32):
        fabric = collective_model_of(problem(on=cluster(nodes, of=with_efficiency(**crowded))))
        assert fabric.bytes_per_s == pytest.approx((50.0, 5.0 / nodes**0.5), rel=1e-14)
        assert fabric.flow_bytes_per_s == pytest.approx((50.0, 5.0 / nodes**0.5), rel=1e-14)
    crowded["scale_up"] = replace(CURVES["scale_up"], crowding=1.0)
    on = replace(cluster(8, of=with_efficiency(**crowded)), tiers=tiers(4, 8, 32))
    assert collective_model_of(problem(on=on)).bytes_per_s == pytest.approx(
        (0.5 / 4, 0.5 / 2, 0.5 / 4), rel=1e-14
    )


def test_all_to_all_and_send_do_not_run_around_rings() -> None:
    fabric = collective_model_of(slow_problem())
    # 100 * 2/4 / 5 = 10 exceeds the time inside; 2 s of latency and 4 to start.
    assert float(fabric.all_to_all_s(100.0, (2, 2))) == pytest.approx(16.0, rel=1e-14)


def test_an_all_to_all_over_the_fabric() -> None:
    fabric = collective_model_of(slow_problem())
    # Inside 100 * 3/8 / 50 = 0.75; outside 100 * 4/8 / 5 = 10, or half of it; 2 s latency and 4 s start-up.
    assert float(fabric.all_to_all_s(100.0, (4, 2))) == pytest.approx(16.0, rel=1e-14)
    assert float(fabric.all_to_all_s(100.0, (4, 2), 0.5)) == pytest.approx(11.0, rel=1e-14)
    # Copies are saved beyond the innermost tier only: 100 * 3/4 / 50 + 0.5 + 0.2.
    assert float(fabric.all_to_all_s(100.0, (4, 1), 0.5)) == pytest.approx(2.2, rel=1e-14)


PARTS = ((2, 0.25), (4, 1.0))


def linked_problem() -> Problem:
    """Nodes of four without a switch: two neighbours share one of a device's four links."""
    on = cluster(2, of=with_efficiency(**CURVES), latency_s=(0.5, 2.0))
    return problem(on=replace(on, tiers=(replace(on.tiers[0], part_shares=PARTS), on.tiers[1])))


def test_groups_reach_what_the_links_between_them_carry() -> None:
    plain, linked = collective_model_of(slow_problem()), collective_model_of(linked_problem())
    # Two: 1 * 0.5 + 1/2 * 100 / (50 / 4) + 0.2; three have the links of two; four have all, as with a switch.
    assert float(linked.all_gather_s(100.0, (2, 1))) == pytest.approx(4.7, rel=1e-14)
    assert float(linked.all_gather_s(100.0, (3, 1))) == pytest.approx(1.0 + 2 / 3 * 8.0 + 0.2, rel=1e-14)
    assert float(linked.all_gather_s(100.0, (4, 1))) == float(plain.all_gather_s(100.0, (4, 1)))
    # Two trees: 2 * 0.5 + 2 * 8; twice one pass is 2 * 4.5.
    assert float(linked.all_reduce_s(100.0, (2, 1))) == pytest.approx(9.2, rel=1e-14)
    # All-to-all: 0.5 + 50 / 12.5 + 0.2; a message uses the links of two: 0.5 + 0.2 + 100 / 12.5; outside
    # nothing changes.
    assert float(linked.all_to_all_s(100.0, (2, 1))) == pytest.approx(4.7, rel=1e-14)
    tiers_of_rows = np.array([0, 1])
    found = linked.send_s(100.0, tiers_of_rows)
    np.testing.assert_allclose(found, [8.7, plain.send_s(100.0, tiers_of_rows)[1]], rtol=1e-14)
    # Across nodes the two in a node have the slower hop: 3 * 2 + 3/4 * max(8, 100 / (2 * 5 * 0.5)) + 4; a
    # column row by row.
    sizes = (np.array([2, 2, 4, 1]), np.array([2, 1, 1, 2]))
    np.testing.assert_allclose(linked.all_gather_s(100.0, sizes), [25.0, 4.7, 3.2, 16.0], rtol=1e-14)


def test_a_message_to_a_neighbour() -> None:
    fabric = collective_model_of(slow_problem())
    # 0.5 + 0.2 + 100 / 50 and 2 + 4 + 100 / 5.
    np.testing.assert_allclose(fabric.send_s(100.0, np.array([0, 1])), [2.7, 26.0], rtol=1e-14)
    # With a card of 80 B/s per node, of which 20 are reached: 20, 10 and 6.7 B/s for one to three senders, 5
    # for more and for all; nothing changes within nodes.
    on = collective_model_of(slow_problem())
    wide = replace(on, flow_bytes_per_s=(50.0, 20.0))
    found = wide.send_s(100.0, np.array([0, 1, 1, 1, 1, 1]), np.array([1, 1, 2, 3, 6, 0]))
    np.testing.assert_allclose(found, [2.7, 11.0, 16.0, 21.0, 26.0, 26.0], rtol=1e-14)
