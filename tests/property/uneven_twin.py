"""The space of uneven plans again: every layout of every pipeline, every set of pipelines, every share.

Only the prices of single stages are those of the planner; layouts, schedules, shares and the choice among
them are plain and slow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.search import Limits, UnevenSpace
from shardwise.search.uneven.options import Options, Pricing
from shardwise.search.uneven.space import Block
from shardwise.strategy import Job

DEVICES = ("H100-SXM", "A100-80G", "A100-40G", "V100-16G", "T4", "RTX3090", "L4")
LINKS = ("1Gb/s", "10Gb/s", "200Gb/s")
Stage = tuple[int, int, int]
"""Pool, kind and layers of a stage."""


def drawn_space(seed: int, most_devices: int) -> UnevenSpace:
    """A random small problem: up to `most_devices` devices of two or three classes, 2 to 8 layers, three
    speeds of links; memory is tight in half of them."""
    rng = random.Random(seed)
    while True:
        classes = rng.sample(DEVICES, rng.choice((2, 2, 3)))
        parts = [(rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 4))) for _ in classes]
        if sum(nodes * devices for nodes, devices in parts) <= most_devices:
            break
    text = "+".join(f"{n}x{d}x{name}" for (n, d), name in zip(parts, classes, strict=True))
    layers = rng.randint(2, 8 if most_devices > 4 else 6)
    config = {
        "model_type": "gpt2", "n_embd": rng.choice((512, 1024, 4096)), "n_layer": layers, "n_head": 8,
        "vocab_size": rng.choice((1000, 50257)), "n_positions": 1024,
        "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    job = Job(
        seq_len=rng.choice((128, 1024)),
        global_batch_size=rng.choice((2, 3, 4, 6, 8)),
        dtype="fp16",
        memory_margin=rng.choice((0.05, 0.05, 0.6, 0.8, 0.9)),
    )
    limits = Limits(
        stages=rng.choice((2, 3, 4)), rows=rng.choice((1, 2)), loose_nodes=rng.choice((0, 4, 4, 4))
    )
    model = model_from_config(config, name="drawn")
    return UnevenSpace(model, load_cluster(text, inter_node=rng.choice(LINKS)), job, limits)


def least_s(space: UnevenSpace) -> float:
    """The least time of any plan of the space; infinity where nothing fits."""
    pricing = Pricing(space)
    best = float("inf")
    for mask in range(1, 1 << len(space.pools)):
        union = tuple(place for place in range(len(space.pools)) if mask >> place & 1)
        devices = sum(space.pools[place].devices for place in union)
        batch = space.job.global_batch_size
        for size in (size for size in range(1, batch + 1) if batch % size == 0):
            for pipelines in range(1, min(devices, batch // size) + 1):
                block = Block(pools=union, micro_batch_size=size, least=pipelines, most=pipelines)
                best = min(best, _least_of(pricing.options(block), batch // size, pipelines))
                if len(union) > 1 and pipelines > 1:
                    alike = pricing.options(replace(block, is_alike=True))
                    best = min(best, _least_alike(alike, batch // size, pipelines))
    return best


def _least_alike(options: Options, microbatches: int, pipelines: int) -> float:
    """The least time of `pipelines` pipelines with the same stages, of shares as equal as can be."""
    best = float("inf")
    for stages in every_layout(options):
        taken = [0] * len(options.devices)
        for pool, kind, _ in stages:
            tp, dp = options.stages[pool].kinds[kind]
            taken[pool] += tp * dp * pipelines
        if all(a <= b for a, b in zip(taken, options.devices, strict=True)):
            best = min(best, walked_s(options, stages, -(-microbatches // pipelines)))
    return best


def _least_of(options: Options, microbatches: int, pipelines: int) -> float:
    """The least time of `pipelines` pipelines that share the microbatches."""
    times = _pipelines(options, microbatches - pipelines + 1)
    reached: dict[tuple[tuple[int, ...], int], float] = {((0,) * len(options.devices), 0): 0.0}
    sets = [(used, alike, by_share) for (used, alike), by_share in times.items()]
    layers = [reached] + [{} for _ in range(pipelines)]
    for done in range(pipelines):
        for (used, shared), time_s in layers[done].items():
            for taken, alike, by_share in sets:
                total = tuple(a + b for a, b in zip(used, taken, strict=True))
                if done + alike > pipelines or any(
                    a > b for a, b in zip(total, options.devices, strict=True)
                ):
                    continue
                for share, share_s in by_share.items():
                    state = (total, min(shared + share, microbatches))
                    later = layers[done + alike]
                    later[state] = min(later.get(state, float("inf")), max(time_s, share_s))
    ends = [time_s for (_, shared), time_s in layers[pipelines].items() if shared == microbatches]
    return min(ends, default=float("inf"))


def _pipelines(options: Options, most: int) -> dict[tuple[tuple[int, ...], int], dict[int, float]]:
    """By devices taken and how many alike pipelines take them: the least time of each number of microbatches
    that they do together, none of them fewer than any other by more than one."""
    found: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}
    for stages in every_layout(options):
        one = [0] * len(options.devices)
        for pool, kind, _ in stages:
            tp, dp = options.stages[pool].kinds[kind]
            one[pool] += tp * dp
        alike = 1
        while any(alike * taken % unit for taken, unit in zip(one, options.units, strict=True)):
            alike += 1
        taken = tuple(alike * count for count in one)
        if any(a > b for a, b in zip(taken, options.devices, strict=True)):
            continue
        by_share = found.setdefault((taken, alike), {})
        for each in range(1, most + 1):
            time_s = walked_s(options, stages, each)
            by_share[alike * each] = min(by_share.get(alike * each, float("inf")), time_s)
    return found


def every_layout(options: Options) -> Iterator[tuple[Stage, ...]]:
    """Every pipeline: kinds per pool, pools in any order, layers in any parts."""
    for kinds in product(*(range(len(stages.kinds)) for stages in options.stages)):
        for stages in range(1, options.most_stages + 1):
            for pools in product(range(len(kinds)), repeat=stages):
                if any(kind for pool, kind in enumerate(kinds) if pool not in pools):
                    continue
                for parts in _parts(options.layers, stages):
                    yield tuple((pool, kinds[pool], n) for pool, n in zip(pools, parts, strict=True))


def _parts(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _parts(total - first, parts - 1):
            yield (first, *rest)


def _hops(options: Options, pools: list[int], kinds: list[int]) -> list[float]:
    """Seconds from each stage to the next."""
    found = []
    for at, (pool, then) in enumerate(pairwise(pools)):
        number, left = pools.count(pool), pools[at:].count(pool)
        if pool == then:
            found.append(float(options.hops[pool].near_s[kinds[at], number, left]))
        else:
            one = float(options.hops[pool].far_s[kinds[at], number, left])
            number, left = pools.count(then), pools[at + 1 :].count(then)
            found.append(max(one, float(options.hops[then].far_s[kinds[at + 1], number, left])))
    return found


def walked_s(options: Options, stages: tuple[Stage, ...], microbatches: int) -> float:
    """One pipeline's step under 1F1B, action by action."""
    p = len(stages)
    figures = [
        {
            name: float(getattr(options.stages[pool], name)[kind, p - s, int(s == 0), layers])
            for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")
        }
        for s, (pool, kind, layers) in enumerate(stages)
    ]
    if any(figure["backward_s"] == float("inf") for figure in figures):
        return float("inf")
    hops = _hops(options, [pool for pool, _, _ in stages], [kind for _, kind, _ in stages])
    orders = []
    for s in range(p):
        warm = min(p - 1 - s, microbatches)
        order = [("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [("F", warm + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(microbatches - warm, microbatches)])
    ends: dict[tuple[int, str, int], float] = {}
    free = [figure["gather_s"] for figure in figures]
    while any(orders):
        for s, order in enumerate(orders):
            while order:
                what, i = order[0]
                source = (s - 1, "F", i) if what == "F" else (s + 1, "B", i)
                is_end = s == 0 if what == "F" else s == p - 1
                if not is_end and source not in ends:
                    break
                ready = 0.0 if is_end else ends[source] + hops[min(s, source[0])]
                length = figures[s]["forward_s" if what == "F" else "backward_s"]
                ends[s, what, i] = free[s] = max(free[s], ready) + length
                order.pop(0)
    drained = max(free[s] + figures[s]["reduce_s"] for s in range(p))
    return drained + max(figure["end_s"] for figure in figures)
