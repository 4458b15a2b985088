"""Redistribution between placements: the table of docs/concepts/pareto-search.md, by equations worked out by
hand.
"""

from itertools import product

import numpy as np
import pytest

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost.collectives import collective_model_of
from shardwise.cost.layouts.redistribute import (
    activation_placements,
    gradient_placements,
    redistribute_s,
    redistribution_elements,
    redistributions_of,
    value_placements,
)
from shardwise.cost.problem import machine_of
from shardwise.graph import PARTIAL, REPLICATE, REPLICATE_SHARD_STATES, REPLICATE_SUM_GRAD, Placement, shard
from shardwise.strategy import MEGATRON_2024

Box = tuple[tuple[int, int], ...]

CLUSTER = load_cluster("8x8xH100-SXM")
FABRIC = collective_model_of(machine_of(CLUSTER, "bf16", "adamw", MEGATRON_2024))
SHAPE = (64, 128)
NBYTES = 64 * 128 * 2.0
NODE = mesh_of(CLUSTER, (8,))
S0, S1, R, RS, P = shard(0), shard(1), REPLICATE, REPLICATE_SUM_GRAD, PARTIAL


def ring_s(nbytes: float, sizes: tuple[int, int]) -> float:
    """(n - 1) alpha + (n - 1) / n B / the slowest hop, and the collective's start-up:
    docs/reference/equations.md.
    """
    inside, nodes = sizes
    n = inside * nodes
    tier = 1 if nodes > 1 else 0
    partial = FABRIC.partial[1] if 1 < inside < 8 else 1.0
    hops = [nbytes / FABRIC.bytes_per_s[0]] if inside > 1 else []
    hops += [nbytes / (inside * FABRIC.bytes_per_s[1] * partial)] if nodes > 1 else []
    return (n - 1) * FABRIC.alphas_s[tier] + (n - 1) / n * max(hops) + FABRIC.startups_s[tier]


def all_to_all_s(nbytes: float) -> float:
    """Within a node of 8: each rank keeps an eighth of B."""
    return FABRIC.alphas_s[0] + nbytes * 7 / 8 / FABRIC.bytes_per_s[0] + FABRIC.startups_s[0]


def redistributed_s(
    start: tuple[int, ...],
    end: tuple[int, ...],
    ranks: tuple[int, ...] = (8,),
    shape: tuple[int, ...] = SHAPE,
    element_bytes: float = 2.0,
) -> float:
    mesh = mesh_of(CLUSTER, ranks)
    return float(redistribute_s(FABRIC, mesh, shape, element_bytes, np.array(start), np.array(end)))


NOTHING = 0.0
GATHER = ring_s(NBYTES, (8, 1))
REDUCE = float(FABRIC.all_reduce_s(NBYTES, (8, 1)))
ALL_TO_ALL = all_to_all_s(NBYTES / 8)

TABLE = {
    # from, to: forward, gradient; one axis of 8 ranks in a node, in the notation of
    # docs/concepts/pareto-search.md
    (S0, S1): (ALL_TO_ALL, ALL_TO_ALL),
    (S0, R): (GATHER, NOTHING),
    (S0, RS): (GATHER, GATHER),
    (S0, P): (NOTHING, NOTHING),
    (R, S0): (NOTHING, GATHER),
    (R, RS): (NOTHING, REDUCE),
    (R, P): (NOTHING, NOTHING),
    (RS, S0): (NOTHING, NOTHING),
    (RS, R): (NOTHING, NOTHING),
    (RS, P): (NOTHING, NOTHING),
    (P, R): (REDUCE, NOTHING),
    (P, RS): (REDUCE, REDUCE),
    (P, S0): (GATHER, GATHER),
}


@pytest.mark.parametrize(("start", "end"), TABLE)
def test_one_axis_follows_the_table(start: Placement, end: Placement) -> None:
    a, b = np.array([start]), np.array([end])
    forward = float(redistribute_s(FABRIC, NODE, SHAPE, 2.0, value_placements(a), value_placements(b)))
    gradient = float(redistribute_s(FABRIC, NODE, SHAPE, 2.0, gradient_placements(b), gradient_placements(a)))
    assert (forward, gradient) == pytest.approx(TABLE[start, end], rel=1e-12)


def test_an_all_reduce_is_the_best_of_the_equations() -> None:
    # 16 KiB in a node with reduction in the switch: 2 alpha + B / bw, or two rings, or a tree.
    switched = 2 * FABRIC.alphas_s[0] + NBYTES / FABRIC.bytes_per_s[0] + FABRIC.startups_s[0]
    assert min(switched, 2 * GATHER) >= REDUCE


def test_axes_that_need_the_same_collective_are_one_group() -> None:
    # 64 ranks, 8 in each of 8 nodes.
    assert redistributed_s((S0, S0), (R, R), (8, 8)) == pytest.approx(ring_s(NBYTES, (8, 8)), rel=1e-12)
    assert redistributed_s((P, P), (R, R), (8, 8)) == pytest.approx(
        float(FABRIC.all_reduce_s(NBYTES, (8, 8))), rel=1e-12
    )


def test_collectives_that_shrink_come_before_those_that_grow() -> None:
    # The reduce-scatter within the node shrinks the all-reduce between nodes to an eighth.
    expected = ring_s(NBYTES, (8, 1)) + float(FABRIC.all_reduce_s(NBYTES / 8, (1, 8)))
    assert redistributed_s((P, P), (R, S0), (8, 8)) == pytest.approx(expected, rel=1e-12)
    # Slicing within the node comes before gathering between nodes.
    assert redistributed_s((S0, R), (R, S1), (8, 8)) == pytest.approx(ring_s(NBYTES / 8, (1, 8)), rel=1e-12)


def test_optimizer_states_that_are_split_take_their_part_of_the_gradient() -> None:
    # The reduce-scatter of a partial sum; an all-gather of the updated weights.
    assert redistributed_s((P,), (REPLICATE_SHARD_STATES,)) == pytest.approx(GATHER, rel=1e-12)
    assert redistributed_s((REPLICATE_SHARD_STATES,), (R,)) == pytest.approx(GATHER, rel=1e-12)
    assert redistributed_s((R,), (REPLICATE_SHARD_STATES,)) == 0.0
    assert redistributed_s((S0,), (REPLICATE_SHARD_STATES,)) == 0.0


def test_uneven_parts_count_as_their_largest() -> None:
    # 65 rows over 8 ranks: the rank with most rows sends 9 in the all-to-all.
    assert redistributed_s((S0,), (S1,), shape=(65, 128)) == pytest.approx(
        all_to_all_s(9 * 128 * 2.0), rel=1e-12
    )


def test_a_table_has_every_pair() -> None:
    mesh = mesh_of(CLUSTER, (2, 8))
    table = redistributions_of(FABRIC, mesh, SHAPE, 2.0)
    rows = table.table.named
    for (i, start), (j, end) in product(enumerate(rows), repeat=2):
        assert table.seconds[i, j] == pytest.approx(redistributed_s(start, end, (2, 8)), rel=1e-12)
        assert table.seconds[i, i] == 0.0


def test_placements_are_all_but_those_that_split_too_often() -> None:
    # 3 x 128 elements: 8 ranks cannot split dim 0, 2 ranks can; 2 x 8 of them only dim 1 twice.
    table = activation_placements((3, 128), (2, 8))
    assert len(table) == 5 * 4
    assert (S0, S1) in table.named
    assert (S0, S0) not in table.named
    assert table.find(np.array([[S0, S0], [S1, R]])).tolist() == [-1, table.named.index((S1, R))]
    assert table.local_elements(np.array([S0, S1])) == 2 * 16


SIZE = 48


def nested(form: tuple[int, ...], ranks: tuple[int, ...], at: tuple[int, ...]) -> Box:
    """First and last element of a rank's part in both dims: the outermost axis divides first."""
    box = [(0, SIZE), (0, SIZE)]
    for placement, count, index in zip(form, ranks, at, strict=True):
        if placement >= 0:
            first, stop = box[placement]
            each = (stop - first) // count
            box[placement] = (first + index * each, first + (index + 1) * each)
    return tuple(box)


def has(one: Box, other: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(one, other, strict=True))


def is_alone(ranks: tuple[int, ...], start: tuple[int, ...], end: tuple[int, ...]) -> bool:
    """Whether every rank has the elements that it needs, without partial sums to reduce."""
    if any(a == P and b != P for a, b in zip(start, end, strict=True)):
        return False
    every = product(*map(range, ranks))
    return all(has(nested(start, ranks, at), nested(end, ranks, at)) for at in every)


@pytest.mark.parametrize("ranks", [(4,), (2, 4), (8, 2), (2, 3), (2, 2, 2)])
def test_only_redistributions_without_communication_are_free(ranks: tuple[int, ...]) -> None:
    table = redistributions_of(FABRIC, mesh_of(CLUSTER, ranks), (SIZE, SIZE), 2.0)
    free = 0
    for (i, start), (j, end) in product(enumerate(table.table.named), repeat=2):
        if any(b == P and a != P for a, b in zip(start, end, strict=True)):
            continue  # with zeros around it a part is a partial sum: ranks need not have all of it
        assert (table.seconds[i, j] == 0.0) == is_alone(ranks, start, end), (start, end)
        free += table.seconds[i, j] == 0.0
    assert 0 < free < len(table.table) ** 2 / 2


def test_shifted_parts_need_an_all_to_all() -> None:
    # 8 ranks in a node hold an eighth each, in both of 2 nodes; then the nodes divide the rows first:
    # a rank needs a sixteenth, of which some rank has nothing.
    shift_s = FABRIC.alphas_s[0] + NBYTES / 16 / FABRIC.bytes_per_s[0] + FABRIC.startups_s[0]
    assert redistributed_s((R, S0), (S0, S0), (2, 8)) == pytest.approx(shift_s, rel=1e-12)
    assert redistributed_s((S0, R), (S0, S0), (2, 8)) == 0.0
    # In reverse, an all-gather over both nodes, to an eighth each, and the eighths shift.
    back_s = FABRIC.alphas_s[0] + NBYTES / 8 / FABRIC.bytes_per_s[0] + FABRIC.startups_s[0]
    expected = ring_s(NBYTES / 8, (1, 2)) + back_s
    assert redistributed_s((S0, S0), (R, S0), (2, 8)) == pytest.approx(expected, rel=1e-12)
    assert redistributed_s((S0, S0), (S0, R), (2, 8)) == pytest.approx(ring_s(NBYTES / 2, (8, 1)), rel=1e-12)


Way = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]

COPIES: dict[Way, int] = {
    # from, to, number of ranks, dims of the tensor: most live elements.
    # A sum of 8 x 12 and a rank's quarter of it: 96 + 24 as rows. Columns are reordered: 96 more.
    ((P,), (S0,), (4,), (8, 12)): 120,
    ((P,), (S1,), (4,), (8, 12)): 216,
    # A quarter, and the whole; once more where the received parts are columns.
    ((S0,), (R,), (4,), (8, 12)): 24 + 96,
    ((S1,), (R,), (4,), (8, 12)): 24 + 96 + 96,
    # Three of ten rows, padded: four times three are received.
    ((S0,), (R,), (4,), (10, 12)): 36 + 120 + 4 * 36,
    # Of eleven rows the last two remain, and in order as received: with a row after them.
    ((S0,), (R,), (4,), (11, 12)): 36 + 4 * 36,
    # Columns of rows, in the order of their receivers: 24 more. In reverse the received parts are reordered.
    ((S0,), (S1,), (4,), (8, 12)): 24 + 24 + 24,
    ((S1,), (S0,), (4,), (8, 12)): 24 + 24 + 24,
    # Cut, padded and reduced without that; one row is in order whichever later dim is split.
    ((R,), (S1,), (4,), (8, 12)): 96 + 24,
    ((S1,), (P,), (4,), (8, 12)): 24 + 96,
    ((P,), (R,), (4,), (8, 12)): 96 + 96,
    ((S1,), (R,), (4,), (1, 12)): 3 + 12,
    # A sum of 4 x 12 to its 4 x 6, columns, so once more 48; then with both 8 x 6, rows: as many.
    ((S0, P), (R, S1), (2, 2), (8, 12)): 48 + 24 + 48,
    ((S0, P), (S0, S1), (2, 2), (8, 12)): 48 + 24 + 48,
    # Rows of two nodes' ranks arrive in the order of the ranks.
    ((S0, S0), (R, R), (2, 2), (8, 12)): 24 + 96,
    ((S0, S1), (R, R), (2, 2), (8, 12)): 24 + 96 + 96,
    # Quarters that shift when halves come first: half of each stays, and is reordered.
    ((R, S0), (S0, S0), (2, 2), (8, 12)): 48 + 24 + 48,
}


@pytest.mark.parametrize("way", COPIES)
def test_peak_elements_during_a_redistribution(way: Way) -> None:
    start, end, ranks, shape = way
    found = float(redistribution_elements(shape, ranks, np.array(start), np.array(end)))
    assert found == COPIES[way]
    # A table of columns has the same values, and zero where nothing changes.
    table = redistributions_of(FABRIC, mesh_of(CLUSTER, ranks), shape, 2.0)
    a, b = table.table.find(np.array([start, end]))
    assert table.copies_bytes[a, b] == 2.0 * found
    assert table.copies_bytes[a, a] == 0.0
