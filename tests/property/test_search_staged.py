"""The search of stages and layouts together, compared with every pipeline, and the two programs that estimate
a stage.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.property.layout_instances import llama, random_graph, skips_after_the_first
from tests.property.stage_instances import cut_graph, estimate_of_point, every_pipeline, problem_of, solutions
from tests.property.test_layouts_one import random_solution
from tests.reference.one_layout import estimate_stage
from tests.sampling import sample_of

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import StepCounts, Training, stage_layouts
from shardwise.errors import ConfigError
from shardwise.graph import load_graph, scaled
from shardwise.search.pareto.solution import SegmentChoice, measure, occurrences
from shardwise.search.staged import StagedProblem, staged_frontier
from shardwise.search.staged.problem import Path, critical_path, plain_paths
from shardwise.search.staged.search import Partition, StagedFrontier
from shardwise.search.staged.stage_frontier import StageFrontiers, pipeline_lower_bound

SEEDS = [seed for seed in range(36) if seed % 3 or seed % 2 == 0]

OFTEN = SEEDS[::2]
"""Seeds that a run without `--full` takes."""


def test_the_frequent_cases_have_settings_of_each_kind() -> None:
    """Widths, stages, blocks and numbers of micro-batches; also of the seeds that are searched within an
    epsilon.
    """

    def kinds(seeds: list[int]) -> set[object]:
        problems = [problem_of(seed) for seed in seeds]
        shapes = {(each.mesh.ranks, each.stages, len(each.graph.blocks)) for each in problems}
        return {*shapes, *(each.microbatches for each in problems)}

    assert kinds(OFTEN) == kinds(OFTEN[::2]) == kinds(SEEDS)


def found_in(problem: StagedProblem, epsilon: float = 0.0) -> StagedFrontier:
    found, _ = staged_frontier([problem], epsilon=epsilon, most_labels=1e6)
    return found


def farthest(found: StagedFrontier, every: np.ndarray) -> float:
    """The least epsilon within which the points match all of `every`."""
    figures = found.figures
    return float(max((figures / row).max(axis=1).min() for row in every)) - 1.0


@pytest.mark.parametrize("seed", sample_of(SEEDS, OFTEN))
def test_points_match_every_pipeline(seed: int) -> None:
    problem = problem_of(seed)
    found, every = found_in(problem), every_pipeline(problem)
    assert found.epsilon == 0.0
    assert farthest(found, every) <= found.epsilon + 1e-9
    for point in found.points:
        price = estimate_of_point(point)
        figures = (price.time_s, price.memory_bytes)
        assert figures == pytest.approx((point.time_s, point.memory_bytes), rel=1e-9)
        assert sum(price.seconds.values()) == pytest.approx(price.time_s)
        assert sum(price.nbytes.values()) == pytest.approx(price.memory_bytes)
        # Every point is that of some pipeline.
        assert (every <= np.array(figures) * (1 + 1e-9)).all(axis=1).any()


@pytest.mark.parametrize("epsilon", [0.001, 0.02])
@pytest.mark.parametrize("seed", sample_of(OFTEN, OFTEN[::2]))
def test_points_match_every_pipeline_within_an_epsilon_that_is_proven(seed: int, epsilon: float) -> None:
    """The larger costs of stages within their epsilon hide no critical path."""
    found = found_in(problem_of(seed), epsilon)
    assert found.epsilon <= epsilon * (1 + 1e-9)
    assert farthest(found, every_pipeline(problem_of(seed))) <= found.epsilon + 1e-9


@pytest.mark.slow
def test_paths_of_layouts_within_the_lower_bound_alone_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant enumerates paths only for layouts within the lower bound. Their bytes are less by the
    epsilon, so no pipeline fits into them.
    """
    next_path = Partition.next_path

    def within_the_lower_bound(partition: Partition, limit: float) -> bool:
        if all(each.memory_bytes > limit * (1 + 1e-12) for each in partition.evaluated):
            return False
        return next_path(partition, limit)

    monkeypatch.setattr(Partition, "next_path", within_the_lower_bound)
    assert all(found_in(problem_of(seed), 0.001).epsilon > 0.05 for seed in (11, 13, 35))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_of([0, 3], [3]))
def test_several_meshes_are_the_union_of_each(seed: int) -> None:
    """Meshes of a stage and numbers of micro-batches are alternatives within one search."""
    base = problem_of(seed)
    base = replace(base, graph=cut_graph(seed, 0, batch=8))
    problems = [
        replace(base, mesh=mesh_of(base.cluster, ranks), microbatches=microbatches)
        for ranks, microbatches in (((4,), 2), ((2, 2), 2), ((4,), 4))
    ]
    together, _ = staged_frontier(problems, epsilon=0.0, most_labels=1e6)
    alone = [found_in(problem) for problem in problems]
    union = np.concatenate([found.figures for found in alone])
    assert farthest(together, union) <= together.epsilon + 1e-9
    figures = {tuple(row) for row in union.tolist()}
    assert {tuple(row) for row in together.figures.tolist()} <= figures
    assert together.partitions == sum(found.partitions for found in alone)
    on = {(point.problem.mesh.ranks, point.problem.microbatches) for point in together.points}
    assert on <= {(problem.mesh.ranks, problem.microbatches) for problem in problems}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["partitions", "paths"])
def test_lower_bounds_that_are_too_high_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants double the bound of partitions, which prunes partitions with points, or that of paths, which
    ends the search too early.
    """
    seeds = (5, 7, 29, 65) if mutant == "partitions" else (5, 31, 57)

    def is_wrong(seed: int) -> bool:
        found = found_in(problem_of(seed))
        return farthest(found, every_pipeline(problem_of(seed))) > found.epsilon + 1e-9

    assert not any(is_wrong(seed) for seed in seeds)

    def doubled(*given: object) -> object:
        return 2.0 * pipeline_lower_bound(*given)  # type: ignore[arg-type]

    seconds = Path.seconds

    def longer(path: Path, *given: object) -> object:
        return 2.0 * seconds(path, *given)  # type: ignore[arg-type]

    if mutant == "partitions":
        monkeypatch.setattr("shardwise.search.staged.stage_frontier.pipeline_lower_bound", doubled)
    else:
        monkeypatch.setattr(Path, "seconds", longer)
    assert any(is_wrong(seed) for seed in seeds)


@pytest.mark.slow
def test_the_proof_needs_bounds_of_several_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plain paths alone, some of these graphs keep a gap of several per cent."""
    # A gap stays where a stage's fastest layout on one path is slow on another.
    assert 0.0 < found_in(problem_of(51)).epsilon < 0.02
    monkeypatch.setattr("shardwise.search.staged.search.MOST_PATHS", 1)
    assert all(found_in(problem_of(seed)).epsilon > 0.02 for seed in (8, 10, 23))


@pytest.mark.parametrize("seed", range(20))
def test_no_pipeline_is_below_a_path_and_one_is_on_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    base = problem_of(3 * int(random.integers(0, 4)))
    problem = replace(base, stages=int(random.integers(2, 5)), microbatches=int(random.integers(1, 9)))
    cuts = (1,) * (problem.stages - 1)  # the cuts decide the messages alone

    def sampled() -> np.ndarray:
        return random.uniform(0.1, 2.0, (problem.stages, 3)) * 1e-3

    def step_s(prices: np.ndarray) -> float:
        return float(problem.step_s(cuts, *(prices[None, :, column] for column in range(3)))[0])

    def along(path: Path, prices: np.ndarray) -> float:
        stages_s = (prices * np.array(path.passes)).sum(axis=1)
        return float(path.seconds(problem, cuts, list(stages_s[:, None]))[0])

    paths = plain_paths(problem.stages, problem.microbatches)
    for _ in range(5):
        prices = sampled()
        longest = critical_path(problem, cuts, prices)
        assert longest is not None
        assert along(longest, prices) == pytest.approx(step_s(prices), rel=1e-12)
        paths += [longest, longest.averaged_with(paths[-1])]
    for _ in range(20):
        prices = sampled()
        assert max(along(path, prices) for path in paths) <= step_s(prices) * (1 + 1e-12)


@pytest.mark.parametrize("seed", sample_of(range(30), range(16)))
def test_a_stage_has_the_cost_of_its_named_layout(seed: int) -> None:
    random = np.random.default_rng(seed)
    graph = random_graph(seed) if seed % 4 else llama(layers=3, batch=16, seq_len=64)
    blocks = sum(block.repeat for block in graph.blocks)
    first = int(random.integers(0, blocks))
    end = int(random.integers(first + 1, blocks + 1))
    cluster = load_cluster("8x8xH100-SXM")
    mesh = mesh_of(cluster, [(2, 4), (4,), (8, 8), (1,)][seed % 4])
    counts = StepCounts(
        microbatches=int(random.integers(1, 6)), in_flight=int(random.integers(1, 4)), stages=2,
        sent_forward_s=1e-4, sent_backward_s=2e-4, buffer_bytes=1e7,
    )  # fmt: skip
    training = Training(dtype="bf16")
    homes = {(p.name, block.name) for block in graph.blocks for op in block.operators for p in op.parameters}
    if len({name for name, _ in homes}) < len(homes):
        with pytest.raises(ConfigError, match="share a parameter"):
            stage_layouts(graph, cluster, training, mesh, counts, first=first, end=end)
        return
    candidates = stage_layouts(graph, cluster, training, mesh, counts, first=first, end=end)
    chain = candidates.chain
    solution = []
    for place, chosen in zip(occurrences(chain), random_solution(random, chain), strict=True):
        choices = list(chosen.choices)
        for factor in chain[place].modes[chosen.mode][1].factors:
            if len(factor.variables) == 1 and not np.isfinite(factor.costs).all():
                choices[factor.variables[0]] = int(np.isfinite(factor.costs[:, 0]).argmax())
        solution.append(SegmentChoice(chosen.mode, tuple(choices)))
    layout = candidates.layout(solution)
    price = estimate_stage(graph, cluster, training, mesh, layout, first=first, end=end, counts=counts)
    assert measure(chain, tuple(solution)) == pytest.approx((price.time_s, price.memory_bytes), rel=1e-9)
    passes_s = counts.microbatches * (price.forward_s + price.backward_s)
    assert passes_s + price.end_s == pytest.approx(price.time_s, rel=1e-9)
    for forwards, backwards, ends in ((1, 0, 0), (0, 2, 0), (2, 5, 1), (4, 1, 1)):
        parts = replace(counts, microbatches=backwards, extra_forwards=forwards - backwards, steps=ends)
        candidates = stage_layouts(graph, cluster, training, mesh, parts, first=first, end=end)
        sum_s = forwards * price.forward_s + backwards * price.backward_s + ends * price.end_s
        assert measure(candidates.chain, tuple(solution))[0] == pytest.approx(sum_s, rel=1e-9)


@pytest.mark.parametrize("span", [(0, 1), (0, 4), (1, 4), (1, 5), (4, 5)])
def test_a_stage_with_skip_tensors_has_the_cost_of_its_named_layout(span: tuple[int, int]) -> None:
    """Later blocks read the entry of the second block, which crosses a cut before it, and its result. So
    stages begin before it or after the last reader, and nowhere else.
    """
    first, end = span
    graph, cluster, training = (
        skips_after_the_first(64, 48, 96, 32),
        load_cluster("8x8xH100-SXM"),
        Training(dtype="bf16"),
    )
    mesh = mesh_of(cluster, (2, 4))
    assert StagedProblem(graph, cluster, training, mesh, 2, 1).places_to_cut == (1, 4)
    counts = StepCounts(microbatches=3, in_flight=2, stages=2, sent_forward_s=1e-4, buffer_bytes=1e7)
    candidates = stage_layouts(graph, cluster, training, mesh, counts, first=first, end=end)
    for seed in range(6):
        solution, fixed = [], {}
        sampled = random_solution(np.random.default_rng(seed), candidates.chain)
        for place, chosen in zip(occurrences(candidates.chain), sampled, strict=True):
            part, choices = candidates.chain[place].modes[chosen.mode][1], list(chosen.choices)
            for factor in part.factors:
                if len(factor.variables) == 1 and not np.isfinite(factor.costs).all():
                    [variable] = factor.variables
                    choices[variable] = int(np.isfinite(factor.costs[:, 0]).argmax())
                    fixed[f"tensor {part.names[variable]}"] = choices[variable]
            for name, variable in part.shared:
                choices[variable] = fixed.get(name, choices[variable])
            solution.append(SegmentChoice(chosen.mode, tuple(choices)))
        layout = candidates.layout(solution)
        price = estimate_stage(graph, cluster, training, mesh, layout, first=first, end=end, counts=counts)
        found = measure(candidates.chain, tuple(solution))
        assert found == pytest.approx((price.time_s, price.memory_bytes), rel=1e-9)


def test_a_stage_holds_the_activations_of_its_schedule() -> None:
    """1f1b: stage s of p saves activations of min(m, p - s) micro-batches; each rank sends its part of the
    hidden states.
    """
    cluster = load_cluster("8x8xH100-SXM")
    graph = scaled(load_graph("graph:llama-3.1-8b"), 8, 2048)
    problem = StagedProblem(graph, cluster, Training(dtype="bf16"), mesh_of(cluster, (2, 8)), 4, 32)
    assert [problem.counts(stage, 1, 2).in_flight for stage in range(4)] == [4, 3, 2, 1]
    # 8 x 2048 x 4096 values of 2 bytes over 16 ranks: 8 MiB, four buffers of them.
    assert problem.counts(1, 1, 2).buffer_bytes == 4 * 8 * 2**20
    assert problem.hops_s((8, 16, 24)) == pytest.approx([problem.transfer.hop_s(0, 8)] * 3)


def test_no_stage_is_below_the_open_bound_of_its_part() -> None:
    for seed in (1, 4, 5):
        problem = problem_of(seed)
        stage_frontiers = StageFrontiers(problem, 0.0, 1e6)
        blocks = len(problem.blocks)
        for first in range(blocks - 1):
            lower_bound = stage_frontiers.open_bound(0, first, first + 1)
            for end in range(first + 1, blocks):
                candidates = problem.candidates(0, end, problem.counts(0, 0, end))
                for solution in solutions(candidates.chain):
                    time_s, memory_bytes = measure(candidates.chain, solution)
                    assert time_s >= lower_bound.at(np.array([memory_bytes]))[0] * (1 - 1e-12)


def test_more_stages_than_blocks_are_refused() -> None:
    problem = replace(problem_of(0), stages=3)
    with pytest.raises(ConfigError, match="cannot be cut into this number of stages"):
        found_in(problem)
