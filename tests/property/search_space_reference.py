"""The search space of docs/reference/space.md and the rules of legality, implemented a second time: plain
Python, one strategy at a time, nothing skipped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from typing import Any

from shardwise.strategy import AXES, OFFLOADS, Limits, Strategy

Grid = dict[str, int]
Choice = Mapping[str, object]

V_SHAPED = ("zb_v", "dualpipe_v")


@cache
def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


@cache
def degrees(devices: int, *, core: bool) -> tuple[Mapping[str, int], ...]:
    """Row 1 of the space."""
    sizes = divisors(devices)
    return tuple(
        {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        for tp in sizes
        for cp in (sizes if not core else (1,))
        for pp in sizes
        for dp in sizes
        if tp * cp * pp * dp == devices
    )


@dataclass(frozen=True, kw_only=True)
class SpaceTwin:
    """The rows of docs/reference/space.md, each as a list of choices given the earlier choices."""

    core: bool
    devices: int
    layers: int
    moe: bool
    batch: int
    module_sets: tuple[str, ...] = ("",)
    empty_ends: bool = False

    def degrees(self) -> list[Grid]:
        """Row 1."""
        return [dict(grid) for grid in degrees(self.devices, core=self.core)]

    def kinds(self, g: Grid) -> list[Choice]:
        """Rows 2 and 5."""
        return [
            {"cp_kind": kind, "sequence_parallel": parallel}
            for kind in (["ring", "all_to_all"] if g["cp"] > 1 else ["ring"])
            for parallel in ([False, True] if g["tp"] > 1 else [False])
        ]

    def experts(self, g: Grid) -> list[Choice]:
        """Row 3."""
        if not self.moe:
            return [{"etp": 1, "ep": 1}]
        if self.core:
            return [{"etp": g["tp"], "ep": 1}]
        ranks = g["tp"] * g["cp"] * g["dp"]
        return [
            {"etp": etp, "ep": ep}
            for etp in divisors(ranks)
            for ep in divisors(ranks)
            if ranks % (etp * ep) == 0
        ]

    def orders(self, g: Grid) -> list[Choice]:
        """Row 4: of orders that are equal without their axes of size 1, the first."""
        if self.core:
            return [{"axis_order": "tp-cp-dp-pp"}]
        written: dict[tuple[str, ...], str] = {}
        for order in permutations(AXES):
            read = tuple(axis for axis in order if g[axis] > 1)
            if read not in written:
                written[read] = "-".join(order)
        return [{"axis_order": order} for order in written.values()]

    def batches(self, g: Grid) -> list[Choice]:
        """Row 6."""
        sizes = divisors(self.batch // g["dp"]) if self.batch % g["dp"] == 0 else [1]
        return [{"micro_batch_size": size} for size in sizes]

    def schedules(self, g: Grid) -> list[Choice]:
        """Row 7."""
        if g["pp"] == 1:
            return [{"schedule": "1f1b", "vpp": 1}]
        names = ["1f1b", "gpipe"] if self.core else ["1f1b", "gpipe", "zb_h1", "zb_h2"]
        found: list[Choice] = [{"schedule": name, "vpp": 1} for name in names]
        if not self.core:
            found += [{"schedule": name, "vpp": 2} for name in V_SHAPED]
        most = self.layers + 2 if self.empty_ends else self.layers
        return found + [
            {"schedule": "interleaved_1f1b", "vpp": vpp}
            for vpp in range(2, most + 1)
            if g["pp"] * vpp <= most
        ]

    def ends(self, stages: int) -> list[tuple[int, int]]:
        """Row 8."""
        layers = self.layers
        base, rest = divmod(layers, stages)
        if stages == 1:
            return [(layers, layers)]
        if stages == 2:
            return [(base, layers - base)] if self.core else [(f, layers - f) for f in range(layers + 1)]
        e1, e2 = base, base + 1 if rest == stages - 1 else base
        if self.core:
            return [(e1, e2)]
        return [(first, last) for first in range(e1 + 1) for last in range(e2 + 1)]

    def layers_of_stages(self, stages: int, first: int, last: int) -> list[int]:
        """Decoder layers on each stage; between the ends, remaining layers are assigned one by one, last
        stage first.
        """
        if stages == 1:
            return [self.layers]
        between = [0] * (stages - 2)
        rest = self.layers - first - last
        while rest > 0:
            for index in reversed(range(len(between))):
                if rest > 0:
                    between[index] += 1
                    rest -= 1
        return [first, *between, last]

    def recomputes(self, largest: int) -> list[Choice]:
        """Row 9."""
        counts = [largest] if self.core else list(range(1, largest + 1))
        full: list[Choice] = [
            {"recompute": "full", "recompute_modules": "", "recompute_layers": count} for count in counts
        ]
        return [
            {"recompute": "none", "recompute_modules": "", "recompute_layers": 0},
            *(
                {"recompute": "selective", "recompute_modules": modules, "recompute_layers": 0}
                for modules in self.module_sets
            ),
            *full,
        ]

    def shards(self, g: Grid) -> list[Choice]:
        """Row 10."""
        ranks = g["dp"] * g["cp"]
        if self.core:
            chains = [(1, 1, 1)]
            if ranks > 1:
                chains += [(1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)]
        else:
            sizes = divisors(ranks)
            chains = [
                (param, grad, optim)
                for param in sizes
                for grad in sizes
                for optim in sizes
                if grad % param == 0 and optim % grad == 0
            ]
        return [{"param_shard": p, "grad_shard": g_, "optim_shard": o} for p, g_, o in chains]

    def offloads(self) -> list[Choice]:
        """Row 11."""
        return [{"offload": offload} for offload in (["none"] if self.core else OFFLOADS)]

    def candidates(self, allows: Callable[[Grid, Choice], bool] = lambda *_: True) -> Iterator[Strategy]:
        """Every candidate of the space that has one of these degrees and only allowed values elsewhere."""
        return self._walk(lambda grid, choices: [choice for choice in choices if allows(grid, choice)])

    def random_candidate(self, rng: random.Random) -> Strategy:
        """One candidate, each choice at random."""
        return next(self._walk(lambda _, choices: [rng.choice(choices)]))

    def _walk(self, some_of: Callable[[Grid, list[Choice]], list[Choice]]) -> Iterator[Strategy]:
        for degrees in some_of({}, [*self.degrees()]):
            g: Grid = dict(degrees)  # type: ignore[arg-type]

            def some(choices: list[Choice], g: Grid = g) -> list[Choice]:
                return some_of(g, choices)

            below = list(self._joined(some, self.shards(g), self.offloads()))
            ends: dict[int, list[Choice]] = {}
            for grid in self._joined(
                some, self.kinds(g), self.experts(g), self.orders(g), self.batches(g), self.schedules(g)
            ):
                stages = g["pp"] * int(str(grid["vpp"]))
                if stages not in ends:
                    ends[stages] = list(self._ends(some, stages))
                for end, rest in product(ends[stages], below):
                    yield Strategy(**g, **grid, **end, **rest)  # type: ignore[arg-type]

    def _ends(self, some: Callable[[list[Choice]], list[Choice]], stages: int) -> Iterator[Choice]:
        """Rows 8 and 9."""
        splits: list[Choice] = [
            {"first_stage_layers": first, "last_stage_layers": last} for first, last in self.ends(stages)
        ]
        for split in some(splits):
            first, last = split["first_stage_layers"], split["last_stage_layers"]
            assert isinstance(first, int) and isinstance(last, int)
            largest = max(self.layers_of_stages(stages, first, last))
            for with_layers in some(self.recomputes(largest)):
                yield {**split, **with_layers}

    def _joined(
        self, some_of: Callable[[list[Choice]], list[Choice]], *levels: list[Choice]
    ) -> Iterator[Choice]:
        """Every combination of one choice per level."""
        for chosen in product(*[some_of(level) for level in levels]):
            yield {name: value for choice in chosen for name, value in choice.items()}


def keeps(strategy: Any, fixed: Mapping[str, object]) -> bool:
    """Whether a candidate has the fixed values; aliases follow the last paragraph of
    docs/reference/space.md.
    """
    plain = {name: value for name, value in fixed.items() if hasattr(strategy, name)}
    if any(getattr(strategy, name) != value for name, value in plain.items()):
        return False
    if len(plain) == len(fixed):
        return True
    ranks = strategy.dp * strategy.cp
    d = fixed.get("dp_shard")
    if "dp_replicate" in fixed:
        replicate = int(str(fixed["dp_replicate"]))
        if ranks % replicate or d not in (None, ranks // replicate):
            return False
        d = ranks // replicate
    d = ranks if d is None else int(str(d))
    if ranks % d:
        return False
    stage = int(str(fixed.get("zero_stage", 3)))
    expected = (d if stage >= 3 else 1, d if stage >= 2 else 1, d if stage >= 1 else 1)
    return (strategy.param_shard, strategy.grad_shard, strategy.optim_shard) == expected


def first_reason(s: Strategy, m: Limits) -> str | None:
    """The first rule that a strategy breaks, in the fixed order of the rules; None where it is legal."""
    heads, kv_heads = m.heads // s.tp, max(m.kv_heads // s.tp, 1)
    if m.heads % s.tp:
        return "heads_tp"
    if m.kv_heads % s.tp and s.tp % m.kv_heads:
        return "kv_heads_tp"
    if m.ffn_splits % s.tp:
        return "ffn_tp"
    if s.cp > 1 and m.seq_len % (2 * s.cp if s.cp_kind == "ring" else s.cp):
        return "seq_cp"
    if s.cp_kind == "all_to_all" and (heads % s.cp or kv_heads % s.cp):
        return "heads_cp"
    if s.sequence_parallel and (m.seq_len // s.cp) % s.tp:
        return "seq_tp"
    if m.experts % s.ep:
        return "experts_ep"
    if m.expert_ffn % s.etp:
        return "expert_ffn_etp"
    if m.global_batch_size % s.dp:
        return "batch_dp"
    if s.pp > m.layers:
        return "layers_pp"
    if s.pp * s.vpp > (m.layers + 2 if s.schedule == "interleaved_1f1b" else m.layers):
        return "layers_vpp"
    microbatches = m.global_batch_size // s.dp // s.micro_batch_size
    if s.schedule == "interleaved_1f1b" and microbatches % s.pp:
        return "interleaved_microbatches"
    if s.schedule in V_SHAPED and microbatches < 2 * s.pp:
        return "v_microbatches"
    return None
