"""What the runtime does not run of a plan: `not_run` lists all of it, `check_runnable` refuses the first."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.launch import check_runnable, not_run, own_target
from shardwise.plans import Plan


def on_accelerators(plan: Plan) -> Plan:
    return replace(plan, cluster=load_cluster("1x4xH100-SXM"))


def with_job(plan: Plan, **changes: object) -> Plan:
    return replace(plan, job=replace(plan.job, **changes))  # type: ignore[arg-type]


RING = make_plan("cp=4,cp_kind=ring")
ALONE, SHORT = make_uneven("5 l4 + 3 l4"), make_uneven("5 l4 + 3 l3")

CASES = [
    (make_plan("dp=4"), []),
    (on_accelerators(with_job(RING, dtype="bf16")), []),
    # the kernels of a ring have no fp32 on accelerators; `plan --save` did not warn of it
    (on_accelerators(RING), ["fp32 with ring attention (it runs bf16, or cp_kind all_to_all)"]),
    (
        with_job(make_plan("dp=4"), optimizer="muon", dtype="fp8"),
        [f"dtype fp8 (it runs {', '.join(own_target().dtypes)})", "optimizer muon (it runs adamw, sgd)"],
    ),
    (ALONE, []),
    (SHORT, ["3 layers (it runs 4)"]),
    (
        with_job(SHORT, optimizer="muon", global_batch_size=9),
        ["optimizer muon (it runs adamw, sgd)", "3 layers (it runs 4)", "8 sequences (it runs 9)"],
    ),
]


@pytest.mark.parametrize(("plan", "expected"), CASES)
def test_everything_is_listed_and_the_first_is_refused(plan: Plan, expected: list[str]) -> None:
    assert not_run(plan) == tuple(expected)
    if not expected:
        check_runnable(plan)
        return
    with pytest.raises(ConfigError) as caught:
        check_runnable(plan)
    # "dtype fp8 (it runs ...)" is refused as job.dtype: found fp8; allowed: ...
    assert caught.value.found is not None and caught.value.found in expected[0]
    assert f"(it runs {caught.value.allowed})" in expected[0]


def test_fields_of_a_strategy_come_first_with_advice() -> None:
    plan = with_job(make_plan("dp=4,offload=both"), optimizer="muon")
    limited = replace(own_target(), axes={"offload": ("none",)}, limits=())
    with patch("shardwise.launch.capability.own_target", lambda: limited):
        assert not_run(plan) == ("offload=both (it runs none)", "optimizer muon (it runs adamw, sgd)")
        with pytest.raises(ConfigError) as caught:
            check_runnable(plan)
    assert caught.value.key == "best.strategy.offload"
    assert caught.value.allowed == "none, as in plans of `plan --target shardwise`"


def test_devices_without_a_backend_are_not_listed_but_refused() -> None:
    plan = replace(make_plan("dp=4"), cluster=load_cluster("1x4xTPU-v4"))
    assert not_run(plan) is None
    with pytest.raises(ConfigError, match="allowed: cpu, or devices of NVIDIA and AMD"):
        check_runnable(plan)
