"""Chains of layouts: hand-computed layouts of a two-layer network, and properties of all layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.property.layout_choices import Names, named, solution_of
from tests.property.layout_instances import llama, mlp

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost.collectives import collective_model_of
from shardwise.cost.layouts.chain import LayoutSpace, layout_chain
from shardwise.cost.layouts.redistribute import Redistributions
from shardwise.cost.problem import machine_of
from shardwise.cost.training import Training
from shardwise.search.pareto import pareto_search
from shardwise.search.pareto.solution import measure, solution_costs
from shardwise.strategy import MEGATRON_2024

CLUSTER = load_cluster("8x8xH100-SXM")
BLOCKING = Training(dtype="bf16", profile=MEGATRON_2024.without_overlap())
HIDING = Training(dtype="bf16")
MACHINE = machine_of(CLUSTER, "bf16", "adamw", MEGATRON_2024)
FABRIC = collective_model_of(MACHINE)
BATCH, WIDTH, INNER, CLASSES = 4096, 1024, 4096, 512
GRAPH = mlp(BATCH, WIDTH, INNER, CLASSES)
NODE = (8, 1)
"""Sizes per tier of a group of 8 in a node."""

DATA_PARALLEL = {
    "up": "split b", "relu": "split b", "down": "split b", "loss": "split b", "w_up": "R", "w_down": "R",
}  # fmt: skip
FULLY_SHARDED = {**DATA_PARALLEL, "w_up": "S(0)", "w_down": "S(0)"}
ZERO_1 = {**DATA_PARALLEL, "w_up": "R°", "w_down": "R°"}
MEGATRON = {
    "up": "split f", "relu": "split f", "down": "split f", "loss": "replicate", "w_up": "S(1)",
    "w_down": "S(0)",
}  # fmt: skip


def space(training: Training, *ranks: int) -> LayoutSpace:
    return layout_chain(GRAPH, CLUSTER, training, mesh_of(CLUSTER, ranks))


def seconds(training: Training, names: Names, *ranks: int) -> float:
    out = space(training, *ranks)
    return measure(out.chain, solution_of(out, names))[0]


def computed_s(training: Training, names: Names) -> float:
    """The step on 8 ranks without communication between them and without the optimizer step."""
    out = space(training, 8)
    [choice] = solution_of(out, names)
    part = out.chain[0].modes[0][1]
    return sum(
        float(factor.costs[choice.choices[factor.variables[0]], 0])
        for factor in part.factors
        if len(factor.variables) == 1 and factor.variables[0] < len(GRAPH.blocks[0].operators)
    )


def updated_s(owned: float) -> float:
    """The optimizer step with 16-bit weights, fp32 gradients, master copies and two moments. The update reads
    the gradient (4), reads and writes the master copy (8) and the moments (16), and writes the weight (2):
    30 bytes. The norm reads the gradient twice and writes it: 12.
    """
    return owned * 42.0 / (MACHINE.memory_bytes_per_s * MACHINE.efficiency.memory.fraction)


WEIGHTS = (WIDTH * INNER, INNER * CLASSES)


def test_data_parallelism_is_an_all_reduce_of_every_gradient() -> None:
    summed_s = float(FABRIC.all_reduce_s(4.0 * sum(WEIGHTS), NODE))
    expected = computed_s(BLOCKING, DATA_PARALLEL) + updated_s(sum(WEIGHTS)) + summed_s
    assert seconds(BLOCKING, DATA_PARALLEL, 8) == pytest.approx(expected, rel=1e-12)


def test_fully_sharded_parameters_have_two_gathers_and_a_reduce_scatter() -> None:
    weights = sum(WEIGHTS)
    moved_s = 2.0 * float(FABRIC.all_gather_s(2.0 * weights, NODE)) + float(
        FABRIC.all_gather_s(4.0 * weights, NODE)
    )
    expected = computed_s(BLOCKING, FULLY_SHARDED) + updated_s(sum(WEIGHTS) / 8) + moved_s
    assert seconds(BLOCKING, FULLY_SHARDED, 8) == pytest.approx(expected, rel=1e-12)


def test_split_states_are_a_reduce_scatter_and_a_gather() -> None:
    weights = sum(WEIGHTS)
    moved_s = float(FABRIC.all_gather_s(2.0 * weights, NODE)) + float(
        FABRIC.all_gather_s(4.0 * weights, NODE)
    )
    expected = computed_s(BLOCKING, ZERO_1) + updated_s(sum(WEIGHTS) / 8) + moved_s
    assert seconds(BLOCKING, ZERO_1, 8) == pytest.approx(expected, rel=1e-12)


def test_megatrons_pair_is_one_all_reduce_forward() -> None:
    # The input is data, so its gradient is not reduced: column-parallel, then row-parallel, one all-reduce of
    # the result in 16 bits.
    summed_s = float(FABRIC.all_reduce_s(2.0 * BATCH * CLASSES, NODE))
    expected = computed_s(BLOCKING, MEGATRON) + updated_s(sum(WEIGHTS) / 8) + summed_s
    assert seconds(BLOCKING, MEGATRON, 8) == pytest.approx(expected, rel=1e-12)


def test_gradients_are_hidden_by_backward_computation() -> None:
    # T = a + c + g - min(g, c): the chain's two times are a + c (all hidden) and a + g (computation is over).
    out = space(HIDING, 8)
    costs = solution_costs(out.chain, solution_of(out, DATA_PARALLEL))
    summed_s = float(FABRIC.all_reduce_s(4.0 * sum(WEIGHTS), NODE))
    unhidden_s = seconds(BLOCKING, DATA_PARALLEL, 8)
    assert costs[0] == pytest.approx(unhidden_s - summed_s, rel=1e-12)
    backward_s = unhidden_s - costs[1]
    assert 0.0 < backward_s < unhidden_s - summed_s
    expected = unhidden_s - min(summed_s, backward_s)
    assert seconds(HIDING, DATA_PARALLEL, 8) == pytest.approx(expected, rel=1e-12)


def test_memory_of_data_parallelism() -> None:
    # 16 bytes per weight: weight 2, gradient 4, master copy 4, moments 8; weights in fp32 need no master
    # copy.
    # Saved in 16 bits: the input of `up`, the output of relu (which `down` reads), the logits in fp32
    # and the targets. Largest working memory: relu with its input and output; or `up`, or `down`.
    rows = BATCH / 8
    saved = rows * (2.0 * WIDTH + 2.0 * INNER + 4.0 * CLASSES + 2.0)
    working = rows * 2.0 * max(2 * INNER, INNER + CLASSES)
    efficiency = MACHINE.efficiency
    allocated = 18.0 * sum(WEIGHTS) + saved + working
    expected = allocated * (1.0 + efficiency.fragmentation_ratio)
    expected += efficiency.context_bytes + 2.0 * efficiency.communicator_bytes
    out = space(BLOCKING, 8)
    assert measure(out.chain, solution_of(out, DATA_PARALLEL))[1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("names", [DATA_PARALLEL, FULLY_SHARDED, MEGATRON])
def test_more_ranks_hold_no_more(names: Names) -> None:
    resident = []
    for ranks in (2, 4, 8):
        out = space(BLOCKING, ranks)
        resident.append(float(solution_costs(out.chain, solution_of(out, names))[2]))
    assert resident == sorted(resident, reverse=True)


def test_a_single_rank_has_one_layout_and_no_communication() -> None:
    out = space(BLOCKING, 1)
    assert set(out.layouts_per_operator.values()) == {1}
    # The only choice is whether its one block is recomputed.
    assert [mode for mode, _ in out.chain[0].modes] == ["kept", "recomputed"]
    assert len(pareto_search([out.chain]).points) == 2
    assert all(
        float(factor.costs[..., 0].sum()) == 0.0
        for factor in out.chain[0].modes[0][1].factors
        if len(factor.variables) == 2
    )


def test_the_frontier_dominates_layouts_by_hand() -> None:
    out = space(HIDING, 8)
    points = pareto_search([out.chain]).points
    for names in (DATA_PARALLEL, FULLY_SHARDED, ZERO_1, MEGATRON):
        time_s, memory_bytes = measure(out.chain, solution_of(out, names))
        assert ((points[:, 0] <= time_s * (1 + 1e-12)) & (points[:, 1] <= memory_bytes * (1 + 1e-12))).any()


def test_a_solution_names_its_layout() -> None:
    out = space(HIDING, 8)
    layout = out.layout(solution_of(out, MEGATRON))
    [block] = layout.blocks
    assert block.mode == "kept"
    assert block.rules["up"][0].name == "split f"
    assert block.stored["w_down"] == (0,)


def test_an_omitted_redistribution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mutant, redistribution is free: the costs of Megatron's pair are then wrong."""
    right = seconds(BLOCKING, MEGATRON, 8)
    monkeypatch.setattr(
        "shardwise.cost.layouts.context.redistributions_of",
        lambda *given: _free(given),
    )
    assert seconds(BLOCKING, MEGATRON, 8) < right


def _free(given: tuple[object, ...]) -> Redistributions:
    from shardwise.cost.layouts.redistribute import redistributions_of

    table = redistributions_of(*given)  # type: ignore[arg-type]
    return replace(table, seconds=np.zeros_like(table.seconds))


def test_recomputed_blocks_save_their_entry_alone() -> None:
    graph = llama(layers=2, batch=8, seq_len=256)
    out = layout_chain(graph, CLUSTER, HIDING, mesh_of(CLUSTER, (4,)))
    names = {
        named(variable): "split b" if variable.role == "rules" else "S(0)"
        for variables in out.variables
        for variable in variables
    }
    solutions = [solution_of(out, names, mode) for mode in ("kept", "recomputed")]
    saved, recomputed = (solution_costs(out.chain, solution) for solution in solutions)
    # Of 2 layers in 16 bits: the entry is saved; everything else is recomputed, one layer at a time.
    assert recomputed[2] < saved[2]
    assert recomputed[0] > saved[0]
    assert recomputed[2] + recomputed[3] < saved[2] + saved[3]
