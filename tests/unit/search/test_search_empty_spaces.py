"""Why a space is empty: the infeasible subset of values, the requirement, and the available amount."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cluster import load_cluster
from shardwise.errors import Infeasible
from shardwise.model import load_model
from shardwise.search import Question, default_job, plan
from shardwise.search.infeasibility import why_empty
from shardwise_verify import count_space


def question(model: str = "llama-3.1-8b", **options: Any) -> Question:
    named, cluster = load_model(model), load_cluster("8xH100-SXM")
    job = default_job(named, cluster, seq_len=4096, global_batch_size=64)
    return Question(model=named, cluster=cluster, job=job, **options)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tp": 3}, "has tp=3 (tp * cp * pp * dp is the 8 devices); tp may be 1, 2, 4, 8"),
        ({"tp": 16, "dp": 1}, "has tp=16 (tp * cp * pp * dp is the 8 devices); tp may be 1, 2, 4, 8"),
        ({"tp": 4, "dp": 4}, "has tp=4,dp=4 (tp * cp * pp * dp is the 8 devices); tp may be 1, 2 with the"),
        ({"ep": 2}, "has ep=2 (llama-3.1-8b has no experts: ep and etp are 1); ep may be 1"),
        ({"micro_batch_size": 3}, "has micro_batch_size=3 (micro_batch_size divides the 64 sequences"),
        ({"pp": 1, "schedule": "zb_v"}, "has pp=1,schedule=zb_v (pp=1 has only 1f1b"),
        ({"recompute": "none", "recompute_layers": 3}, "recompute_layers is 1 to the layers of the largest"),
        ({"first_stage_layers": 40}, "has first_stage_layers=40 (of 32 layers, the first and the last stage"),
        ({"cp": 1, "cp_kind": "all_to_all"}, "cp_kind is ring where cp is 1"),
        ({"tp": 1, "sequence_parallel": True}, "has tp=1,sequence_parallel=true (sequence_parallel is false"),
        ({"grad_shard": 2, "param_shard": 4}, "has grad_shard=2,param_shard=4 (param_shard divides"),
        ({"optim_shard": 3, "tp": 2}, "has optim_shard=3 (param_shard divides grad_shard"),
    ],
)  # fmt: skip
def test_contradicting_fixed_values_are_named(fixed: dict[str, Any], message: str) -> None:
    assert message in why_empty(question(fixed=fixed))


@pytest.mark.slow
def test_a_plan_of_an_empty_space_is_infeasible() -> None:
    with pytest.raises(Infeasible, match=r"no candidate has tp=3 \(tp \* cp \* pp \* dp is the 8 devices\)"):
        plan(question(fixed={"tp": 3}))


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"schedule": "zb_h1"}, "has schedule=zb_h1 (pp=1 has only 1f1b"),
        ({"cp": 2}, "has cp=2 (cp_kind is ring where cp is 1; in core cp is 1); cp may be 1"),
        ({"offload": "both"}, "has offload=both (in core nothing is offloaded)"),
    ],
)
def test_values_that_core_lacks_are_named(fixed: dict[str, Any], message: str) -> None:
    assert message in why_empty(question(space="core", fixed=fixed))
    assert count(question(fixed=fixed)) > 0


def count(requested: Question) -> int:
    """Candidates of a question, by the checker's counting program."""
    return count_space(
        model_layers=requested.model.layers,
        experts=None,
        devices=requested.cluster.devices,
        global_batch_size=requested.job.global_batch_size,
        space=requested.space,
        fixed=requested.fixed,
        axes=requested.axes,
    ).count


def test_a_list_of_values_is_named_as_such() -> None:
    message = why_empty(question(axes={"tp": (3, 5)}, fixed={"recompute": "none"}))
    assert "has tp in [3, 5] (tp * cp * pp * dp is the 8 devices); tp may be 1, 2, 4, 8" in message


def test_the_named_values_are_a_minimal_contradiction() -> None:
    """Without any one of the named values there are candidates, and so there are with the offered ones."""
    requested = question(fixed={"recompute": "full", "tp": 4, "offload": "none", "pp": 4, "vpp": 1})
    assert "no candidate has tp=4,pp=4 (" in why_empty(requested)
    assert "; tp may be 1, 2 with the other values unchanged" in why_empty(requested)
    for name in ("tp", "pp"):
        fixed = {key: value for key, value in requested.fixed.items() if key != name}
        assert count(replace(requested, fixed=fixed)) > 0
