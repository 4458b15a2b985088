"""A second implementation of the space of uneven plans (the twin): every layout of every pipeline, every set
of pipelines, every share.

It uses the planner's costs of single stages. Layouts, schedules, shares and the choice among them are plain
enumerations without bounds; layouts are columns of one array.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import load_cluster
from shardwise.cost import NodeSlot, StageShape, hop_s, stage_bytes, stage_costs, stage_kinds_of
from shardwise.model import Model, model_from_config
from shardwise.search import UnevenSpace
from shardwise.search.hetero import UnevenLimits
from shardwise.search.hetero.space import MixedPoolKind, StageKind, UnevenSubproblem
from shardwise.search.hetero.stage_costs import SiteCosts, StageCostModel, StageHops, StageOptions
from shardwise.strategy import Job

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEVICES = ("H100-SXM", "A100-80G", "A100-40G", "V100-16G", "T4", "RTX3090", "L4")
BY_NODE_SLOT = ("gather_s", "reduce_s", "end_s")
"""Costs that depend on how many stages of the pipeline share a node."""
LINKS = ("1Gb/s", "10Gb/s", "200Gb/s")


@dataclass(frozen=True, slots=True)
class Layouts:
    """Pipelines of one number of stages: site, kind and layers of each stage, of shape (layouts, stages); the
    devices of each pool that they take, of shape (layouts, pools); and the set size of spread stages, the
    number of identical pipelines that fill the nodes, 1 for other pipelines.
    """

    pools: Ints
    kinds: Ints
    layers: Ints
    taken: Ints
    filling: Ints

    def take(self, chosen: Any) -> Layouts:
        """The layouts of a mask, or at these indices."""
        columns = self.pools, self.kinds, self.layers, self.taken, self.filling
        return Layouts(*(values[chosen] for values in columns))


def random_space(seed: int, most_devices: int) -> UnevenSpace:
    """A random small problem: up to `most_devices` devices of two or three classes, 2 to 8 layers, three link
    speeds; memory is tight in half of them.
    """
    rng = random.Random(seed)
    while True:
        classes = rng.sample(DEVICES, rng.choice((2, 2, 3)))
        parts = [(rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 4))) for _ in classes]
        if sum(nodes * devices for nodes, devices in parts) <= most_devices:
            break
    text = "+".join(f"{n}x{d}x{name}" for (n, d), name in zip(parts, classes, strict=True))
    layers = rng.randint(2, 8 if most_devices > 4 else 6)
    model = _model(rng, layers, rng.choice((512, 1024, 4096)))
    job = Job(
        seq_len=rng.choice((128, 1024)),
        global_batch_size=rng.choice((2, 3, 4, 6, 8)),
        dtype="fp16",
        memory_margin=rng.choice((0.05, 0.05, 0.6, 0.8, 0.9)),
    )
    limits = UnevenLimits(
        stages=rng.choice((2, 3, 4)),
        stage_dp=rng.choice((1, 2)),
        whole_node_threshold=rng.choice((0, 4, 4, 4)),
    )
    return UnevenSpace(model, load_cluster(text, inter_node=rng.choice(LINKS)), job, limits)


def random_to_spread(seed: int) -> UnevenSpace:
    """A problem with two nodes of two devices or more of one class, wide layers on slow links, and pipelines
    too short for all devices, so that spread stages are more often best.
    """
    rng = random.Random(seed)
    one, other = rng.sample(DEVICES, 2)
    first = rng.choice(("2x2", "2x2", "2x2", "2x4"))
    second = rng.choice(("1x1", "1x2", "2x1")) if first == "2x2" else "1x1"
    model = _model(rng, rng.randint(2, 5), rng.choice((2048, 4096)), heads=rng.choice((1, 1, 8)))
    batch, margin = rng.choice((4, 6, 8)), rng.choice((0.5, 0.7, 0.8, 0.9))
    job = Job(seq_len=rng.choice((128, 256)), global_batch_size=batch, dtype="fp16", memory_margin=margin)
    limits = UnevenLimits(stages=rng.choice((2, 2, 3, 4)), whole_node_threshold=rng.choice((0, 4, 4, 4)))
    link = rng.choice(("1Gb/s", "10Gb/s", "100Gb/s"))
    cluster = load_cluster(f"{first}x{one}+{second}x{other}", inter_node=link)
    return UnevenSpace(model, cluster, job, limits)


def random_with_mixed_stages(seed: int) -> UnevenSpace:
    """A problem of up to 5 devices whose stages may split up to 4 or 6 rows over two pools, and in which
    mixed-pool stages are more often best: fast links and few short sequences.
    """
    rng = random.Random(seed)
    while True:
        classes = rng.sample(DEVICES, rng.choice((2, 2, 2, 3)))
        parts = [(rng.choice((1, 1, 2)), rng.choice((1, 1, 2))) for _ in classes]
        if sum(nodes * devices for nodes, devices in parts) <= 5:
            break
    layers, width = rng.randint(2, 4), rng.choice((1024, 1024, 2048))
    link, batch = rng.choice(("200Gb/s", "1600Gb/s")), rng.choice((2, 4, 4, 5, 6))
    margin, stages, mixed_stage_rows = (
        rng.choice((0.05, 0.5, 0.5, 0.9)),
        rng.choice((2, 3)),
        rng.choice((4, 4, 6)),
    )
    model = _model(rng, layers, width)
    job = Job(seq_len=256, global_batch_size=batch, dtype="fp16", memory_margin=margin)
    limits = UnevenLimits(
        stages=stages,
        stage_dp=rng.choice((1, 2)),
        whole_node_threshold=rng.choice((0, 4, 4, 4)),
        mixed_stage_rows=mixed_stage_rows,
    )
    text = "+".join(f"{n}x{d}x{name}" for (n, d), name in zip(parts, classes, strict=True))
    return UnevenSpace(model, load_cluster(text, inter_node=link), job, limits)


def _model(rng: random.Random, layers: int, width: int, heads: int = 8) -> Model:
    config = {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads,
        "vocab_size": rng.choice((1000, 50257)), "n_positions": 1024,
        "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    return model_from_config(config, name="drawn")


def least_s(space: UnevenSpace) -> float:
    """The least time of any plan of the space; infinity where nothing fits."""
    pricing = StageCostModel(
        UnevenSpace(space.model, space.cluster, space.job, replace(space.limits, mixed_stage_rows=1))
    )
    best = float("inf")
    for mask in range(1, 1 << len(space.pools)):
        union = tuple(place for place in range(len(space.pools)) if mask >> place & 1)
        devices = sum(space.pools[place].devices for place in union)
        batch = space.job.global_batch_size
        for size in (size for size in range(1, batch + 1) if batch % size == 0):
            most = min(devices, batch // size)
            widest = UnevenSubproblem(pools=union, micro_batch_size=size, least=1, most=1)
            layouts = every_layout(with_mixed_stages(space, pricing.options(widest), widest))
            for pipelines in range(1, most + 1):
                subproblem = replace(widest, least=pipelines, most=pipelines)
                options = with_mixed_stages(space, pricing.options(subproblem), subproblem)
                best = min(best, _least_of(options, layouts, pipelines))
                if len(union) > 1 and pipelines > 1:
                    alike = pricing.options(replace(subproblem, is_alike=True))
                    plain = [some.take((some.pools < len(union)).all(axis=1)) for some in layouts]
                    best = min(best, _least_alike(alike, plain, pipelines))
    return best


def with_mixed_stages(
    space: UnevenSpace, options: StageOptions, subproblem: UnevenSubproblem
) -> StageOptions:
    """The options of a subproblem with mixed-pool stages in addition, each with all its layers and at least
    one row of every micro-batch on each pool. They cost as much as their slower part, where both parts
    fit, with the recomputation of the shortest backward pass. Each pipeline counts for two replicas, on
    different nodes.
    """
    size, count = subproblem.micro_batch_size, len(subproblem.pools)
    if not 2 <= size <= space.limits.mixed_stage_rows:
        return options
    stages, hops, sites = list(options.stages), list(options.hops), list(options.sites)
    for a in range(count):
        for b in range(a + 1, count):
            mixed_pool_stages, figures, hops_s = [], [], []
            for rows in range(1, size):
                for one in _parts_of(space, subproblem, subproblem.pools[a], rows):
                    for other in _parts_of(space, subproblem, subproblem.pools[b], size - rows):
                        mixed_pool_stages.append(MixedPoolKind((one.tp, other.tp), (rows, size - rows)))
                        figures.append(_slower(one, other))
                        hops_s.append(max(one.hop_s, other.hop_s))
            shape = (len(mixed_pool_stages), options.most_stages + 1, options.most_stages + 1)
            hop_s = np.broadcast_to(np.array(hops_s)[:, None, None], shape)
            found = {name: np.array([one[name] for one in figures]) for name in figures[0]}
            found["recompute"] = np.zeros(found["forward_s"].shape, dtype=int)
            for name in BY_NODE_SLOT:
                found[name] = found[name][:, None]
            stages.append(SiteCosts(kinds=tuple(mixed_pool_stages), node_slots=(NodeSlot(),), **found))
            hops.append(StageHops(hop_s, hop_s, np.zeros((2, *shape), dtype=np.int64)))
            sites.append((a, b))
    return replace(options, stages=tuple(stages), hops=tuple(hops), sites=tuple(sites))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a mixed-pool stage: its costs by recomputation, place of the stage, whether it is the first,
    and layers; infinite where it does not fit.
    """

    tp: int
    figures: dict[str, Floats]
    hop_s: float


def _parts_of(space: UnevenSpace, subproblem: UnevenSubproblem, pool: int, rows: int) -> list[_Part]:
    problem = space.problem(pool, subproblem.pools, False)
    node = space.pools[pool].node.devices
    axes = (space.most_stages + 1, 2, space.model.layers + 1)
    place, first, layers = (axis.reshape(-1, 1) for axis in np.indices(axes))
    shape = StageShape(
        layers=layers, in_flight=place, is_first=1.0 * first, is_last=1.0 * (place == 1),
        replicas=(2 * subproblem.most,), groups=2,
    )  # fmt: skip
    found = []
    for tp in (tp for tp in (1, 2, 4, 8) if node % tp == 0):
        kinds = stage_kinds_of(problem, [(tp, 1)], rows)
        price, device_bytes = stage_costs(kinds, shape), stage_bytes(kinds, shape).device
        cells = (3, 1, place.size, 1)
        figures = {
            name: np.broadcast_to(getattr(price, name), cells).reshape(3, *axes)
            for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
        }
        fits = (device_bytes <= problem.usable_bytes) & ((place > 0) & (layers > 0))
        fits = np.broadcast_to(fits, cells).reshape(3, *axes)
        figures["backward_s"] = np.where(fits, figures["backward_s"], np.inf)
        found.append(_Part(tp, figures, float(hop_s(kinds, -1, np.array([node]))[0])))
    return found


def _slower(one: _Part, other: _Part) -> dict[str, Floats]:
    """Each figure of the slower part, under the recomputation with the shortest backward pass for both."""
    both = {name: np.maximum(one.figures[name], other.figures[name]) for name in one.figures}
    way = both["backward_s"].argmin(axis=0)[None]
    return {name: np.take_along_axis(values, way, axis=0)[0] for name, values in both.items()}


def every_layout(options: StageOptions) -> list[Layouts]:
    """Every pipeline for which there are enough devices: any kinds per site, any order of sites, at most one
    pair of pools, any split of layers; grouped by number of stages.
    """
    count, alone = len(options.stages), len(options.devices)
    takes = [
        np.array([_takes(site, kind, alone) for kind in stages.kinds])
        for site, stages in zip(options.sites, options.stages, strict=True)
    ]
    mixed_pool_stages = [(0,) * len(takes[alone:])] + [
        tuple(kind if pair == at else 0 for at in range(alone, count))
        for pair in range(alone, count)
        for kind in range(1, len(takes[pair]))
    ]
    kinds_of_pools = product(*(range(len(one)) for one in takes[:alone]))
    chosen: Ints = np.array([(*some, *more) for some in kinds_of_pools for more in mixed_pool_stages])
    found = []
    for stages in range(1, options.most_stages + 1):
        orders: Ints = np.array(list(product(range(count), repeat=stages)))
        numbers = (orders[:, :, None] == np.arange(count)).sum(axis=1)
        is_known = (numbers[:, alone:] > 0).sum(axis=1) <= 1
        orders, numbers = orders[is_known], numbers[is_known]
        # A pool without stages has its first kind, so that no layout occurs twice.
        is_one = ((numbers[:, None] > 0) | (chosen == 0)).all(axis=2)
        order, kind = np.nonzero(is_one)
        of_kinds = np.stack([takes[site][chosen[:, site]] for site in range(count)], axis=1)
        taken = (numbers[order][..., None] * of_kinds[kind]).sum(axis=1)
        is_enough = (taken <= options.devices).all(axis=1)
        order, kind, taken = order[is_enough], kind[is_enough], taken[is_enough]
        filling: Ints = np.ones(len(order), dtype=np.int64)
        for site, many in product(range(alone), range(1, stages + 1)):
            of = np.array([filling_of(options, site, one, many) for one in range(len(takes[site]))])
            here = numbers[order, site] == many
            filling[here] = np.lcm(filling[here], of[chosen[kind[here], site]])
        order, kind, taken, filling = (values[filling > 0] for values in (order, kind, taken, filling))
        parts: Ints = np.array(list(_parts(options.layers, stages)))
        pools = np.repeat(orders[order], len(parts), axis=0)
        kinds = np.repeat(np.take_along_axis(chosen[kind], orders[order], axis=1), len(parts), axis=0)
        every = np.tile(parts, (len(order), 1))
        wide = [np.repeat(values, len(parts), axis=0) for values in (taken, filling)]
        found.append(Layouts(pools, kinds, every, *wide))
    return found


def filling_of(options: StageOptions, site: int, kind: int, many: int) -> int:
    """The set size of pipelines with `many` stages of a kind on a site: how many identical ones fill the
    nodes. It is 1 where as many stages as fit share a node, and 0 where another kind has the same node
    slots.
    """
    stages = options.stages[site]
    one, devices = stages.kinds[kind], stages.node_slots[0].devices
    assert not isinstance(one, MixedPoolKind)
    size, more = one.tp * one.dp, [n for n in (1, 2, 4, 8) if one.stages_per_node < n <= options.most_stages]
    if not any(devices % (n * size) == 0 for n in more):
        return 1
    own, *others = (
        [_stages_per_node(devices, size, many, left, most) for left in range(1, many + 1)]
        for most in (one.stages_per_node, *more)
    )
    return 0 if own in others else max(devices // (stages_per_node * size) for stages_per_node in own)


def _takes(site: tuple[int, ...], kind: StageKind | MixedPoolKind, pools: int) -> list[int]:
    """Devices of each pool that a stage takes: all on its pool, or one part on each of two."""
    if isinstance(kind, MixedPoolKind):
        return [kind.tp[site.index(pool)] if pool in site else 0 for pool in range(pools)]
    return [kind.tp * kind.dp if pool in site else 0 for pool in range(pools)]


def _parts(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _parts(total - first, parts - 1):
            yield (first, *rest)


def least_of_subproblem(options: StageOptions, layouts: list[Layouts], subproblem: UnevenSubproblem) -> float:
    """The least time of any plan of a subproblem with one number of pipelines; infinity where
    nothing fits.
    """
    least = _least_alike if subproblem.is_alike else _least_of
    return least(options, layouts, subproblem.most)


def _least_alike(options: StageOptions, layouts: list[Layouts], pipelines: int) -> float:
    """The least time of `pipelines` identical pipelines, whose shares differ by at most one."""
    best = float("inf")
    for some in layouts:
        is_whole = pipelines % some.filling == 0
        fitting = some.take((some.taken * pipelines <= options.devices).all(axis=1) & is_whole)
        times_s = walked_s(options, fitting, [-(-options.microbatches // pipelines)])
        best = min(best, float(times_s.min(initial=np.inf)))
    return best


def _least_of(options: StageOptions, layouts: list[Layouts], pipelines: int) -> float:
    """The least time of `pipelines` pipelines that share the micro-batches.

    `reached` has the least time by number of pipelines, devices taken of each pool, and micro-batches done.
    """
    most = options.microbatches
    reached = np.full((pipelines + 1, *(count + 1 for count in options.devices), most + 1), np.inf)
    reached[(0,) * reached.ndim] = 0.0
    sets = _sets(options, layouts, most - pipelines + 1)
    for done in range(pipelines):
        for (taken, alike), times_s in sets.items():
            if done + alike > pipelines:
                continue
            left = tuple(slice(None, n + 1 - k) for n, k in zip(options.devices, taken, strict=True))
            before, after = reached[done][left], reached[done + alike][tuple(slice(k, None) for k in taken)]
            for each, time_s in enumerate(times_s.tolist(), start=1):
                share = min(alike * each, most)
                longer = np.maximum(before, time_s)
                after[..., share:] = np.minimum(after[..., share:], longer[..., : most + 1 - share])
                after[..., most] = np.minimum(after[..., most], longer[..., most - share :].min(axis=-1))
    return float(reached[pipelines][..., most].min())


def _sets(
    options: StageOptions, layouts: list[Layouts], most: int
) -> dict[tuple[tuple[int, ...], int], Floats]:
    """By devices taken and number of identical pipelines: the least time in which each of them does 1, 2, ...
    `most` micro-batches.
    """
    found: dict[tuple[tuple[int, ...], int], Floats] = {}
    for some in layouts:
        keys = np.concatenate([some.taken, some.filling[:, None]], axis=1)
        each, group = np.unique(keys, axis=0, return_inverse=True)
        times_s = walked_s(options, some, range(1, most + 1))
        least = np.full((len(each), most), np.inf)
        np.minimum.at(least, group.reshape(-1), times_s)
        for (*taken, filling), own in zip(each.tolist(), least, strict=True):
            alike = filling
            while any(alike * n % unit for n, unit in zip(taken, options.units, strict=True)):
                alike += filling
            total = tuple(alike * n for n in taken)
            if all(a <= b for a, b in zip(total, options.devices, strict=True)):
                found[total, alike] = np.minimum(found.get((total, alike), np.inf), own)
    return found


def _hops(options: StageOptions, layouts: Layouts) -> Floats:
    """Seconds of the hops from each stage to the next, of shape (stages - 1, layouts)."""
    pools, kinds = layouts.pools.T, layouts.kinds.T
    stages = len(pools)
    near, far = np.zeros((2, stages, pools.shape[1]))
    for s in range(stages):
        number, left = (pools == pools[s]).sum(axis=0), (pools[s:] == pools[s]).sum(axis=0)
        for pool, hops in enumerate(options.hops):
            mine = pools[s] == pool
            at = kinds[s][mine], number[mine], left[mine]
            near[s][mine], far[s][mine] = hops.near_s[at], hops.far_s[at]
    return np.where(pools[1:] == pools[:-1], near[:-1], np.maximum(far[:-1], far[1:]))


def _figures(options: StageOptions, layouts: Layouts, name: str) -> Floats:
    """One figure of every stage, of shape (stages, layouts)."""
    found: Floats = np.zeros(layouts.pools.T.shape)
    stages = len(found)
    for s in range(stages):
        for pool, of in enumerate(options.stages):
            mine = layouts.pools[:, s] == pool
            at = stages - s, int(s == 0), layouts.layers[mine, s]
            kinds = layouts.kinds[mine, s]
            if name in BY_NODE_SLOT:
                number = (layouts.pools[mine] == pool).sum(axis=1)
                left = (layouts.pools[mine, s:] == pool).sum(axis=1)
                # Few of them differ: each node slot is looked up once.
                keys = (kinds * (stages + 1) + number) * (stages + 1) + left
                _, first, alike = np.unique(keys, return_index=True, return_inverse=True)
                node_slots = [
                    _node_slot(of, int(kinds[n]), int(number[n]), int(left[n]), stages) for n in first
                ]
                found[s][mine] = getattr(of, name)[kinds, np.array(node_slots, dtype=np.int64)[alike], *at]
            else:
                found[s][mine] = getattr(of, name)[kinds, *at]
    return found


@cache
def _stages_per_node(devices: int, size: int, number: int, left: int, most: int) -> int:
    """How many of `number` stages share one node of `devices` with the stage that is `left`-th from their
    end. They fill nodes from the end on, in powers of two of up to `most` that divide a node.
    """
    fitting = [n for n in (1, 2, 4, 8) if n <= most and devices % (n * size) == 0]
    placed = 0
    while True:
        many = max(n for n in fitting if n <= number - placed)
        placed += many
        if left <= placed:
            return many


def _node_slot(of: SiteCosts, kind: int, number: int, left: int, stages: int) -> int:
    """Index of the costs of a stage on a pool by its node slot; it is one of `number` there, in a pipeline of
    `stages`.
    """
    devices = of.node_slots[0].devices
    if isinstance(one := of.kinds[kind], MixedPoolKind):
        return 0
    stages_per_node = _stages_per_node(devices, one.tp * one.dp, number, left, one.stages_per_node)
    whole = NodeSlot(stages_per_node, devices, True)
    return of.node_slots.index(
        whole if stages_per_node == stages and whole in of.node_slots else NodeSlot(stages_per_node, devices)
    )


def walked_s(options: StageOptions, layouts: Layouts, counts: range | list[int]) -> Floats:
    """Each pipeline's 1F1B step with each of these numbers of micro-batches, action by action; of shape
    (layouts, counts).
    """
    found = np.full((len(layouts.pools), len(counts)), np.inf)
    fits = np.isfinite(_figures(options, layouts, "backward_s")).all(axis=0)
    fitting = layouts.take(fits)
    names = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
    forward_s, backward_s, gather_s, reduce_s, end_s = (_figures(options, fitting, name) for name in names)
    hops = _hops(options, fitting)
    for place, microbatches in enumerate(counts):
        free = _freed(forward_s, backward_s, gather_s, hops, microbatches)
        found[fits, place] = (free + reduce_s).max(axis=0) + end_s.max(axis=0)
    return found


def _freed(
    forward_s: Floats, backward_s: Floats, gather_s: Floats, hops: Floats, microbatches: int
) -> Floats:
    """End time of each stage, of shape (stages, layouts)."""
    p = len(forward_s)
    orders = []
    for s in range(p):
        warm = min(p - 1 - s, microbatches)
        order = [("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [("F", warm + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(microbatches - warm, microbatches)])
    ends: dict[tuple[int, str, int], Floats] = {}
    free = list(gather_s)
    while any(orders):
        for s, order in enumerate(orders):
            while order:
                what, i = order[0]
                source = (s - 1, "F", i) if what == "F" else (s + 1, "B", i)
                is_end = s == 0 if what == "F" else s == p - 1
                if not is_end and source not in ends:
                    break
                start = free[s] if is_end else np.maximum(free[s], ends[source] + hops[min(s, source[0])])
                free[s] = start + (forward_s if what == "F" else backward_s)[s]
                ends[s, what, i] = free[s]
                order.pop(0)
    return np.stack(free)
