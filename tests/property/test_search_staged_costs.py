"""Costs of pipelines from the staged search, compared with a program that knows the layout alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.property.stage_instances import cut_graph, estimate_of_point
from tests.reference.one_layout.pipeline import actions_of, max_in_flight
from tests.sampling import sample_of

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import StageTransfer, Training
from shardwise.cost.collectives import CollectiveModel
from shardwise.schedule import NAMES, in_flight
from shardwise.search import estimate_pipeline
from shardwise.search.staged import StagedPipeline, StagedProblem, staged_frontier
from shardwise.strategy import PROFILES

MESHES = ((1,), (2,), (4,), (2, 2))
SEEDS, OFTEN = range(24), range(12)
"""The seeds, and those of them that a run without `--full` takes."""


def random_problem(seed: int) -> StagedProblem:
    """Two or three stages within a node and across nodes, with software that overlaps its messages or not."""
    random = np.random.default_rng(seed)
    stages = 2 + seed % 2
    ranks = MESHES[seed // 2 % (4 if stages == 2 else 2)]
    cluster = load_cluster("2x4xV100-32G")
    profile = PROFILES[("megatron-2024", "fsdp")[seed // 4 % 2]]
    return StagedProblem(
        graph=cut_graph(seed, 1 if len(ranks) > 1 else 1 + seed % 2),
        cluster=cluster,
        training=Training(
            dtype="fp16", profile=replace(profile, pipeline_overlap=float(random.choice([0, 0.4, 1])))
        ),
        mesh=mesh_of(cluster, ranks),
        stages=stages,
        microbatches=int(random.choice([1, 2, 3, 8])),
    )


def points_of(seed: int) -> list[StagedPipeline]:
    found, _ = staged_frontier([random_problem(seed)], epsilon=0.1, most_labels=1e4)
    return found.points


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_of(SEEDS, OFTEN))
def test_the_estimate_of_a_named_pipeline_has_the_parts_of_the_reference(seed: int) -> None:
    for point in points_of(seed)[:3]:
        found, expected = estimate_of_point(point, estimate_pipeline), estimate_of_point(point)
        for name in ("time_s", "memory_bytes", "at_once_bytes", "seconds", "nbytes"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
        assert found.hops_s == pytest.approx(expected.hops_s, rel=1e-9)


def costs_differ(point: StagedPipeline) -> bool:
    """Whether the two programs disagree about the costs of a pipeline."""
    price = estimate_of_point(point)
    own, other = (point.time_s, point.memory_bytes), (price.time_s, price.memory_bytes)
    return own != pytest.approx(other, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_of(SEEDS, OFTEN))
def test_a_point_has_the_cost_of_its_named_layout(seed: int) -> None:
    points = points_of(seed)
    assert points
    assert not any(costs_differ(point) for point in points)


def _shorter(transfer: StageTransfer, stage: int, block: int) -> float:
    return 0.0 if stage == 0 else SENT(transfer, stage, block)


def _fewer(code: int, stages: int, microbatches: int, chunks: int, stage: int) -> int:
    return max(int(in_flight(code, stages, microbatches, chunks, stage)) - 1, 0)


def _busier(problem: StagedProblem, cuts: object, forward_s: np.ndarray, *given: np.ndarray) -> object:
    return STEP(problem, cuts, forward_s * (1.0 + 1e-6), *given)  # type: ignore[arg-type]


SENT, STEP, HOPS, NEIGHBOUR = (
    StageTransfer.sent_s,
    StagedProblem.step_s,
    StagedProblem.hops_s,
    CollectiveModel.send_s,
)

MUTANTS: dict[str, tuple[str, object]] = {
    "a message left out": ("shardwise.cost.layouts.chain.StageTransfer.sent_s", _shorter),
    "one micro-batch less in flight": ("shardwise.cost.layouts.chain.in_flight", _fewer),
    "a stage busy for longer": ("shardwise.search.staged.problem.StagedProblem.step_s", _busier),
    "hops that take no time": (
        "shardwise.search.staged.problem.StagedProblem.hops_s", lambda *given: 0.0 * HOPS(*given),
    ),
    "another schedule's order": ("shardwise.search.staged.problem.SCHEDULE", "gpipe"),
    "buffers for one way": ("shardwise.cost.layouts.chain.BOUNDARY_BUFFERS", 2.0),
    "ranks that send one by one": (
        "shardwise.cost.collectives.CollectiveModel.send_s",
        lambda fabric, nbytes, tier, senders: NEIGHBOUR(fabric, nbytes, tier, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, replacement = MUTANTS[mutant]
    monkeypatch.setattr(target, replacement)
    assert any(costs_differ(point) for seed in range(8) for point in points_of(seed))


def test_the_walk_holds_the_activations_of_the_schedule_table() -> None:
    code = NAMES.index("1f1b")
    for stages in range(1, 6):
        for microbatches in range(1, 9):
            for stage in range(stages):
                actions = actions_of(stage, stages, microbatches)
                assert sorted(actions) == [(kind, n) for kind in "BF" for n in range(microbatches)]
                assert max_in_flight(actions) == int(in_flight(code, stages, microbatches, 1, stage))


def test_points_cross_nodes_and_have_messages_of_each_kind() -> None:
    problems = [random_problem(seed) for seed in OFTEN]
    assert {problem.stages for problem in problems} == {2, 3}
    assert {problem.mesh.ranks for problem in problems} == set(MESHES)
    overlaps = {problem.training.profile.pipeline_overlap for problem in problems}
    assert overlaps == {0.0, 0.4, 1.0}
    tiers = {tuple(problem.transfer.tiers) for problem in problems}
    assert {(0,), (1,), (0, 1)} <= tiers
