"""The count of the space, compared with hand-counted spaces and a row-by-row enumeration of
docs/reference/space.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import chain, permutations, product

import pytest

from shardwise_verify import InputError, count_space

Row = dict[str, object]
OFFLOADS = ("none", "optimizer", "activations", "both")


def parts_by_degrees(
    layers: int, experts: int | None, devices: int, batch: int, space: str
) -> Iterator[tuple[int, list[list[Row]]]]:
    """For each (tp, cp, pp, dp): dp * cp, and the choices of every row of the table in
    docs/reference/space.md.
    """
    core = space == "core"
    for degrees in _degrees(devices, core):
        tp, cp, pp, dp = (degrees[axis] for axis in ("tp", "cp", "pp", "dp"))
        yield (
            dp * cp,
            [
                [dict(degrees)],
                [{"cp_kind": kind} for kind in (["ring", "all_to_all"] if cp > 1 else ["ring"])],
                [{"etp": etp, "ep": ep} for etp, ep in _experts(degrees, experts, core)],
                [{"axis_order": order} for order in _orders(degrees, core)],
                [{"sequence_parallel": value} for value in ([False, True] if tp > 1 else [False])],
                [{"micro_batch_size": size} for size in _micro_batches(dp, batch)],
                list(_pipelines(pp, layers, core)),
                list(_shards(dp * cp, core)),
                [{"offload": kind} for kind in OFFLOADS[: 1 if core else 4]],
            ],
        )


def slow_count(
    layers: int, experts: int | None, devices: int, batch: int, space: str, fixed: Mapping[str, object]
) -> tuple[int, dict[str, set[object]]]:
    """Candidates one by one, and the values seen in them."""
    count = 0
    values: dict[str, set[object]] = {}
    for ranks, parts in parts_by_degrees(layers, experts, devices, batch, space):
        allowed = [[row for row in part if _is_allowed(row, ranks, fixed)] for part in parts]
        candidates = sum(1 for _ in product(*allowed))
        count += candidates
        for row in chain(*allowed) if candidates else ():
            for name, value in row.items():
                values.setdefault(name, set()).add(value)
    return count, values


def _degrees(devices: int, core: bool) -> Iterator[dict[str, int]]:
    for tp in range(1, devices + 1):
        for cp in range(1, devices + 1):
            for pp in range(1, devices + 1):
                if devices % (tp * cp * pp) == 0 and (cp == 1 or not core):
                    yield {"tp": tp, "cp": cp, "pp": pp, "dp": devices // (tp * cp * pp)}


def _experts(degrees: Mapping[str, int], experts: int | None, core: bool) -> Iterator[tuple[int, int]]:
    width = degrees["tp"] * degrees["cp"] * degrees["dp"]
    if experts is None:
        yield 1, 1
    elif core:
        yield degrees["tp"], 1
    else:
        for etp in range(1, width + 1):
            for ep in range(1, width + 1):
                if width % (etp * ep) == 0:
                    yield etp, ep


def _orders(degrees: Mapping[str, int], core: bool) -> set[str]:
    """The orders before which the dictionary has no order with the axes larger than 1 in the same
    sequence.
    """
    if core:
        return {"tp-cp-dp-pp"}
    natural = ("tp", "cp", "dp", "pp")
    split = [axis for axis in natural if degrees[axis] > 1]

    def has_same_order(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
        return sorted(split, key=one.index) == sorted(split, key=other.index)

    return {
        "-".join(order)
        for order in permutations(natural)
        if not any(
            has_same_order(order, other)
            and [natural.index(a) for a in other] < [natural.index(a) for a in order]
            for other in permutations(natural)
        )
    }


def _micro_batches(dp: int, batch: int) -> list[int]:
    if batch % dp:
        return [1]
    return [size for size in range(1, batch + 1) if (batch // dp) % size == 0]


def _pipelines(pp: int, layers: int, core: bool) -> Iterator[Row]:
    schedules = [("1f1b", 1)]
    if pp > 1:
        schedules += [("gpipe", 1)]
        if not core:
            schedules += [("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("dualpipe_v", 2)]
        schedules += [("interleaved_1f1b", vpp) for vpp in range(2, layers // pp + 1)]
    for schedule, vpp in schedules:
        for split in _splits(pp * vpp, layers, core):
            most = max(split)
            choices = [("none", 0), ("selective", 0)]
            choices += [("full", most)] if core else [("full", r) for r in range(1, most + 1)]
            for recompute, number in choices:
                yield {
                    "schedule": schedule,
                    "vpp": vpp,
                    "first_stage_layers": split[0],
                    "last_stage_layers": split[-1],
                    "recompute": recompute,
                    "recompute_layers": number,
                }


def _splits(stages: int, layers: int, core: bool) -> Iterator[list[int]]:
    """Layers of every stage, assigned one by one."""
    even = _deal(layers, stages)
    if stages == 1:
        yield [layers]
    elif stages == 2:
        for first in [layers // 2] if core else range(layers + 1):
            yield [first, layers - first]
    else:
        # In an even split the last stage but one gets a remainder before the last: E2 has one only when all
        # stages but the first have.
        most_first, most_last = even[0], even[1] if layers % stages == stages - 1 else even[0]
        for first in [most_first] if core else range(most_first + 1):
            for last in [most_last] if core else range(most_last + 1):
                yield [first, *_deal(layers - first - last, stages - 2), last]


def _deal(layers: int, stages: int) -> list[int]:
    layers_of_stage = [0] * stages
    for layer in range(layers):
        layers_of_stage[-1 - layer % stages] += 1
    return layers_of_stage


def _shards(ranks: int, core: bool) -> Iterator[Row]:
    """`ranks` is dp * cp."""
    for param in range(1, ranks + 1):
        for grad in range(param, ranks + 1, param):
            for optim in range(grad, ranks + 1, grad):
                is_stage = {param, grad, optim} <= {1, ranks}
                if ranks % optim == 0 and (is_stage or not core):
                    yield {"param_shard": param, "grad_shard": grad, "optim_shard": optim}


def _is_allowed(row: Row, ranks: int, fixed: Mapping[str, object]) -> bool:
    """Whether the choices of one row of the table have the fixed values and match the aliases."""
    if any(row.get(name, value) != value for name, value in fixed.items()):
        return False
    aliases = {"zero_stage", "dp_shard", "dp_replicate"} & set(fixed)
    if not aliases or "param_shard" not in row:
        return True
    degrees = [ranks]
    if aliases & {"dp_shard", "dp_replicate"}:
        degrees = [
            d
            for d in range(1, ranks + 1)
            if ranks % d == 0
            and fixed.get("dp_shard", d) == d
            and fixed.get("dp_replicate", ranks // d) == ranks // d
        ]
    stage = fixed.get("zero_stage", 3)
    chains = [
        (d if stage == 3 else 1, d if stage in (2, 3) else 1, d if stage in (1, 2, 3) else 1) for d in degrees
    ]
    return (row["param_shard"], row["grad_shard"], row["optim_shard"]) in chains


def _instance(random_: random.Random) -> tuple[int, int | None, int, int, str]:
    return (
        random_.randint(1, 9),
        random_.choice([None, 8]),
        random_.randint(1, 16),
        random_.randint(1, 24),
        random_.choice(["core", "default"]),
    )


def _some_fixed(random_: random.Random, instance: tuple[int, int | None, int, int, str]) -> Row:
    """Up to three fields fixed at values that occur, or almost occur."""
    _, _, devices, _, _ = instance
    pool: Row = {
        "tp": random_.choice([1, 2, 3, 4, devices]),
        "pp": random_.choice([1, 2, 3, 4, devices]),
        "cp": random_.choice([1, 2]),
        "dp": random_.choice([1, 2, devices]),
        "vpp": random_.choice([1, 2, 3]),
        "cp_kind": random_.choice(["ring", "all_to_all"]),
        "etp": random_.choice([1, 2]),
        "ep": random_.choice([1, 2, 3]),
        "param_shard": random_.choice([1, 2]),
        "grad_shard": random_.choice([1, 2, 4]),
        "optim_shard": random_.choice([1, 2, 6]),
        "micro_batch_size": random_.choice([1, 2, 5]),
        "schedule": random_.choice(["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]),
        "sequence_parallel": random_.choice([False, True]),
        "recompute": random_.choice(["none", "selective", "full"]),
        "recompute_layers": random_.choice([0, 1, 2, 4]),
        "offload": random_.choice(["none", "both"]),
        "axis_order": random_.choice(["tp-cp-dp-pp", "cp-dp-tp-pp", "pp-dp-cp-tp"]),
        "first_stage_layers": random_.choice([0, 1, 2, 3]),
        "last_stage_layers": random_.choice([0, 1, 2, 3]),
        "zero_stage": random_.choice([0, 1, 2, 3]),
        "dp_replicate": random_.choice([1, 2, 3]),
        "dp_shard": random_.choice([1, 2, 4]),
    }
    return {name: pool[name] for name in random_.sample(sorted(pool), random_.randint(1, 3))}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_fixed", [False, True])
def test_count_and_values_equal_the_enumeration(seed: int, is_fixed: bool) -> None:
    """50 random instances per case, with at most 200,000 candidates; at least 15 of them are not empty."""
    random_ = random.Random(seed + 100 * is_fixed)
    compared = nonempty = 0
    while compared < 50:
        instance = _instance(random_)
        fixed = _some_fixed(random_, instance) if is_fixed else {}
        layers, experts, devices, batch, space = instance
        answer = count_space(
            model_layers=layers,
            experts=experts,
            devices=devices,
            global_batch_size=batch,
            space=space,
            fixed=fixed,
        )
        if answer.count > 200_000:
            continue
        count, values = slow_count(layers, experts, devices, batch, space, fixed)
        assert answer.count == count, (instance, fixed)
        assert {name: set(texts) for name, texts in answer.axes.items() if texts} == {
            name: {_as_text(value) for value in found} for name, found in values.items()
        }, (instance, fixed)
        compared += 1
        nonempty += count > 0
    assert nonempty >= 15


def _as_text(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _count(
    space: str = "default",
    *,
    layers: int = 2,
    experts: int | None = None,
    devices: int = 2,
    batch: int = 2,
    fixed: Mapping[str, object] | None = None,
) -> int:
    return count_space(
        model_layers=layers,
        experts=experts,
        devices=devices,
        global_batch_size=batch,
        space=space,
        fixed=fixed or {},
    ).count


def test_one_device_by_hand() -> None:
    """1 device, 2 layers, batch 2. Rows 1 to 5, 8 and 10 have one choice; micro_batch_size 1 or 2;
    recompute none, selective, full 1, full 2; offload 4. Default 2 * 4 * 4 = 32, core 2 * 3 = 6."""
    assert _count(devices=1) == 32
    assert _count("core", devices=1) == 6


def test_two_devices_by_hand() -> None:
    """2 devices, 2 layers, batch 2, `core`.

    tp=2: sequence_parallel 2, micro 1 or 2, recompute 3 = 12.
    dp=2: micro 1, recompute 3, shards 4 = 12.
    pp=2: micro 2, recompute 3, 1f1b and gpipe (2 / 2 layers leave no interleaved) = 12.
    """
    assert _count("core") == 36
    assert _count("core", fixed={"tp": 2}) == 12
    assert _count("core", fixed={"dp": 2, "zero_stage": 3}) == 3


def test_two_devices_default_by_hand() -> None:
    """2 devices, 2 layers, batch 2, `default`; offload 4 everywhere.

    tp=2: sequence_parallel 2, micro 2, recompute 4, offload 4 = 64.
    cp=2: kinds 2, micro 2, recompute 4, chains over 2 (1,1,1 1,1,2 1,2,2 2,2,2) 4, offload 4 = 256.
    dp=2: micro 1, recompute 4, chains 4, offload 4 = 64.
    pp=2: micro 2, offload 4, and of layers: two stages split (0,2) (1,1) (2,0) with M = 2, 1, 2, so
    4 + 3 + 4 = 11 for each of 1f1b, gpipe, zb_h1, zb_h2; four stages (zb_v, dualpipe_v): base 0, rest 2 of 4,
    so E1 = E2 = 0, M = ceil(2 / 2) = 1: 3 each. 4 * 11 + 2 * 3 = 50, times 8 = 400.
    """
    assert _count(fixed={"tp": 2}) == 64
    assert _count(fixed={"cp": 2}) == 256
    assert _count(fixed={"dp": 2}) == 64
    assert _count(fixed={"pp": 2}) == 400
    assert _count() == 784


def test_axis_orders_by_hand() -> None:
    """tp = dp = 2 of 4 devices: two axes larger than 1, 2! orders, each written with all four axes."""
    answer = count_space(
        model_layers=1,
        experts=None,
        devices=4,
        global_batch_size=1,
        space="default",
        fixed={"tp": 2, "dp": 2},
    )
    assert answer.axes["axis_order"] == ("cp-dp-tp-pp", "tp-cp-dp-pp")


def test_experts_by_hand() -> None:
    """Pairs with etp * ep dividing 4: (1,1) (1,2) (1,4) (2,1) (2,2) (4,1), six times a dense model."""
    fixed = {"pp": 1}
    assert _count(devices=4, experts=8, fixed=fixed) == 6 * _count(devices=4, fixed=fixed)
    assert _count("core", devices=4, experts=8) == _count("core", devices=4)


def test_fixed_aliases_by_hand() -> None:
    """dp = 4: d = 4; `dp_shard=2` and `dp_replicate=2` both mean d = 2; `dp_shard=4` contradicts that."""
    one = {"dp": 4, "offload": "none", "recompute": "none", "micro_batch_size": 1}
    assert _count(devices=4, fixed={**one, "zero_stage": 0}) == 1
    assert _count(devices=4, fixed={**one, "zero_stage": 2, "grad_shard": 4}) == 1
    assert _count(devices=4, fixed={**one, "zero_stage": 2, "grad_shard": 2}) == 0
    assert _count(devices=4, fixed={**one, "zero_stage": 2, "dp_shard": 2, "grad_shard": 2}) == 1
    assert _count(devices=4, fixed={**one, "dp_replicate": 2}) == 1
    assert _count(devices=4, fixed={**one, "dp_replicate": 2, "dp_shard": 4}) == 0
    assert _count(devices=4, fixed={**one, "dp_shard": 2, "param_shard": 2}) == 1
    assert _count(devices=4, fixed={**one, "dp_shard": 3}) == 0
    assert _count("core", devices=4, fixed={**one, "dp_shard": 2}) == 0
    assert _count("core", devices=4, fixed={**one, "dp_shard": 4}) == 1


@pytest.mark.slow
def test_a_large_space_is_exact_beyond_64_bits() -> None:
    """25,200 devices have 90 divisors; the count exceeds 2**63 and no candidate is visited."""
    schedules = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
    counts = [
        _count(layers=126, experts=8, devices=25_200, batch=75_600, fixed={"offload": "none", **fixed})
        for fixed in [{}, *({"schedule": schedule} for schedule in schedules)]
    ]
    assert counts[0] == sum(counts[1:])
    assert 4 * counts[0] > 2**63


@pytest.mark.parametrize("field", ["schedule", "micro_batch_size", "first_stage_layers", "recompute_layers"])
def test_fixed_values_partition_the_space(field: str) -> None:
    """The counts with one field fixed at each of its values sum to the whole."""
    answer = count_space(
        model_layers=11, experts=None, devices=36, global_batch_size=72, space="default", fixed={}
    )
    values: list[int | str] = [int(text) if text.isdigit() else text for text in answer.axes[field]]
    parts = [_count(layers=11, devices=36, batch=72, fixed={field: value}) for value in values]
    assert sum(parts) == answer.count


def test_bad_sizes_and_names_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="devices: size out of range; found 0"):
        _count(devices=0)
    with pytest.raises(InputError, match="model_layers: size out of range"):
        _count(layers=0)
    with pytest.raises(InputError, match="global_batch_size: size out of range"):
        _count(batch=-1)
    with pytest.raises(InputError, match="unknown space; found tiny; allowed: core, default"):
        _count("tiny")
    with pytest.raises(InputError, match="unknown strategy field; found tpp"):
        _count(fixed={"tpp": 8})
