"""Small graphs to cut into stages, settings for them, and every possible pipeline, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.property.layout_instances import op
from tests.reference.one_layout import LayoutEstimate, estimate_pipeline, estimate_stage

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import Training
from shardwise.graph import Block, GraphLayout, OpGraph, SizeGrowth, StagedLayout, scaled
from shardwise.pareto import Chain, non_dominated
from shardwise.search.pareto.solution import SegmentChoice, Solution
from shardwise.search.staged import StagedPipeline, StagedProblem

Values = npt.NDArray[np.float64]


def cut_graph(seed: int, middles: int, batch: int | None = None) -> OpGraph:
    """A linear layer, `middles` runs of one or two more, and a last one with a loss, with random sizes (but
    for a given `batch`).
    """
    random = np.random.default_rng(seed)
    sizes = {
        "b": int(random.choice([8, 16, 64])), "e": int(random.choice([64, 512, 2048])),
        "f": int(random.choice([256, 1024, 4096])),
    }  # fmt: skip
    sizes["g"] = sizes["f"]
    if batch is not None:
        sizes["b"] = batch
    first = [
        op("a", "linear", sizes, [("x", "be")], "bf", [("wa", "ef")]),
        op("relu", "elementwise", sizes, [("a", "bf")], "bf", function="relu"),
    ]
    blocks = [Block(name="first", operators=tuple(first[: 1 + seed % 2]))]
    for number in range(middles):
        middle = op(f"c{number}", "linear", sizes, [("m", "bf")], "bg", [(f"wc{number}", "fg")])
        repeat = int(random.integers(1, 3))
        blocks.append(Block(name=f"middle{number}", entry="m", repeat=repeat, operators=(middle,)))
    last = (
        op("d", "linear", sizes, [("z", "bf")], "be", [("wd", "fe")]),
        op("loss", "mean_square", sizes, [("d", "be"), ("target", "be")], ""),
    )
    blocks.append(Block(name="last", entry="z", operators=last))
    shape = (sizes["b"], sizes["e"])
    return OpGraph(
        name="cut", inputs={"x": shape, "target": shape}, blocks=tuple(blocks), batch=sizes["b"],
        growth={"b": SizeGrowth(batch=1)},
    )  # fmt: skip


def problem_of(seed: int) -> StagedProblem:
    """Two ranks per stage with few ways to cut, or one rank per stage with many."""
    is_wide = seed % 3 == 0
    return StagedProblem(
        graph=cut_graph(seed, 0 if is_wide else 1 + seed % 2),
        cluster=load_cluster("2x4xV100-32G"),
        training=Training(dtype="fp16"),
        mesh=mesh_of(load_cluster("2x4xV100-32G"), (2,) if is_wide else (1,)),
        stages=2 if is_wide else 2 + seed % 2,
        microbatches=(1, 2, 4, 8)[seed // 3 % 4],
    )


def solutions(chain: Chain) -> Iterator[Solution]:
    """Every solution of a chain."""
    links = [link for link in chain for _ in range(link.repeat)]

    def following(place: int, border: int | None) -> Iterator[Solution]:
        if place == len(links):
            yield ()
            return
        for mode, (_, part) in enumerate(links[place].modes):
            options = []
            for variable, size in enumerate(part.sizes):
                alone = [factor.costs for factor in part.factors if factor.variables == (variable,)]
                free = [each for each in range(size) if all(np.isfinite(c[each]).all() for c in alone)]
                options.append([border] if variable == part.entry and border is not None else free)
            for choices in product(*options):
                end = None if part.exit is None else choices[part.exit]
                for rest in following(place + 1, end):
                    yield (SegmentChoice(mode, choices), *rest)

    return following(0, None)


def estimate_of(
    problem: StagedProblem, stage: int, first: int, end: int, layout: GraphLayout
) -> LayoutEstimate:
    """The estimate of a stage's layout, from its names."""
    return estimate_stage(
        problem.graph, problem.cluster, problem.training, problem.mesh, layout,
        first=first, end=end, counts=problem.counts(stage, first, end),
    )  # fmt: skip


def estimate_of_point(point: StagedPipeline, estimate: Callable[..., Any] = estimate_pipeline) -> Any:
    """The estimate of a pipeline of the frontier, from its names, by the reference or by another program."""
    problem, layouts = point.problem, point.layouts
    layout = StagedLayout(
        ranks=problem.mesh.ranks, blocks=tuple(block for each in layouts for block in each.blocks),
        cuts=point.cuts, microbatches=problem.microbatches, schedule="1f1b",
    )  # fmt: skip
    whole = scaled(problem.graph, problem.graph.batch * problem.microbatches)
    return estimate(whole, problem.cluster, problem.training, problem.mesh, layout)


def every_pipeline(problem: StagedProblem) -> Values:
    """The frontier (n, 2) of all partitions with all layouts of their stages, by the schedule's evaluator."""
    found = []
    for cuts in combinations(problem.places_to_cut, problem.stages - 1):
        stages = []
        for stage, (first, end) in enumerate(problem.spans(cuts)):
            candidates = problem.candidates(first, end, problem.counts(stage, first, end))
            prices = [
                estimate_of(problem, stage, first, end, candidates.layout(s))
                for s in solutions(candidates.chain)
            ]
            rows = np.array([[p.forward_s, p.backward_s, p.end_s, p.memory_bytes] for p in prices])
            stages.append(rows[non_dominated(rows)])
        picks = np.meshgrid(*[np.arange(len(rows)) for rows in stages], indexing="ij")
        all_of = np.stack([rows[pick.ravel()] for rows, pick in zip(stages, picks, strict=True)], axis=1)
        time_s = problem.step_s(cuts, all_of[..., 0], all_of[..., 1], all_of[..., 2])
        found.append(np.column_stack([time_s, all_of[..., 3].max(axis=1)]))
    points = np.concatenate(found)
    return points[non_dominated(points)]
