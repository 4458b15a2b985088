"""Instances of Megatron-LM's distributed optimizer: the ranks among which an expert's states are divided."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.targets.megatron import environment
from tests.unit.cost.hand_made import cluster, operator_model, problem, table, with_software

from shardwise.cost.layers import grid_cost
from shardwise.cost.sharding import shard_degrees
from shardwise.model import Experts
from shardwise.operators import Extent, GroupedMatmul, Weight

GROUPS = """
import sys, torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

world, tp, ep, instances = map(int, sys.argv[1:])
torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
parallel_state.initialize_model_parallel(
    tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
    num_distributed_optimizer_instances=instances, create_gloo_process_groups=False,
)
dense = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
expert = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
print(dense.size(), expert.size())
"""


@pytest.mark.parametrize(
    ("world", "tp", "ep", "instances"),
    [(16, 2, 8, 2), (16, 2, 4, 2), (16, 1, 4, 2), (16, 1, 4, 4), (16, 4, 2, 1)],
)
def test_states_of_experts_are_divided_within_an_instance(
    world: int, tp: int, ep: int, instances: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS, *map(str, (world, tp, ep, instances))],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    dense, expert = map(int, done.stdout.split())
    weight = Weight(name="w", shape=(Extent(8), Extent(8, "expert_ffn")), experts=8)
    work = GroupedMatmul(name="g", experts=8, k=Extent(8), n=Extent(8, "expert_ffn"), weights=(weight,))
    model = operator_model((work,), experts=Experts(experts=8, top_k=1), embedding=(), head=())
    p = with_software(problem(model, cluster(4)), shards_experts_by_instance=True)
    shards = f"param_shard=1,grad_shard=1,optim_shard={world // tp // instances}"
    rows = table(p, f"tp={tp},etp=1,ep={ep},dp={world // tp},{shards}")
    of_dense, of_expert = shard_degrees(p, rows, grid_cost(p, rows))
    assert (int(of_dense.optim[0]), int(of_expert.optim[0])) == (dense, min(expert, dense))
