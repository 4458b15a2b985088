"""Plans for accelerators: whole steps on a stand-in, and refusals where there is no accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.runtime.fake_accelerator import BROKEN, NAME, PLANS, plan_of
from torch import distributed, nn

from shardwise.app.cli.main import main
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.plans import write_plan
from shardwise.runtime import check_options, check_runnable
from shardwise.runtime.devices import (
    backends,
    check_local_devices,
    is_on_host,
    select_device,
    synchronize_device,
    to_device,
)

pytestmark = pytest.mark.xdist_group("accelerator")


@pytest.fixture(scope="module")
def stand_in() -> dict[str, Any]:
    """Results of steps on the stand-in, which runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.fake_accelerator"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_step_on_the_device_sends_the_same_as_one_on_the_host(stand_in: dict[str, Any], name: str) -> None:
    on_host, there = stand_in["done"][name]["cpu"], stand_in["done"][name]["H100-SXM"]
    assert on_host["held"] == ["cpu"] and there["held"] == [NAME]
    assert there["saved"] == ["cpu"]
    assert there["sent"] == on_host["sent"] != []


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.__name__)
def test_a_mutant_that_leaves_a_tensor_on_the_host_is_caught(stand_in: dict[str, Any], mutant: Any) -> None:
    assert stand_in["broken"][mutant.__name__]


def test_a_cluster_is_on_the_host_or_on_accelerators() -> None:
    assert is_on_host(load_cluster("1x4xcpu"))
    assert not is_on_host(load_cluster("1x4xH100-SXM"))


def test_a_step_is_over_when_its_device_is_done() -> None:
    """A device call returns before the device is done; the host's own work is done when the call returns."""
    with patch.object(torch.accelerator, "synchronize") as waited:
        synchronize_device(load_cluster("1x4xcpu"))
        assert waited.call_count == 0
        synchronize_device(load_cluster("1x4xH100-SXM"))
        assert waited.call_count == 1


def test_groups_use_gloo_and_the_backend_of_the_accelerator() -> None:
    assert backends() == "gloo"
    with patch.object(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")):
        assert backends() == "cpu:gloo,cuda:nccl"
    with patch.object(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")):
        assert backends() == "gloo"


def test_plans_for_accelerators_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="finds on this machine; found 8 x H100-SXM; allowed: 0"):
        check_local_devices(load_cluster("1x8xH100-SXM"), 8)
    with pytest.raises(ConfigError, match="needs an accelerator for each of its processes; found process 3"):
        select_device(load_cluster("1x8xH100-SXM"), 3)
    check_local_devices(load_cluster("1x8xcpu"), 8)
    assert select_device(load_cluster("1x8xcpu"), 3) == "cpu"


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo"])
def test_a_group_must_serve_hosts_and_accelerators(config: str) -> None:
    here = torch.device("cuda")
    with (
        patch.object(torch.accelerator, "current_accelerator", lambda check_available: here),
        patch.object(torch.accelerator, "device_count", lambda: 8),
        patch.object(distributed, "get_backend_config", lambda: config),
        pytest.raises(ConfigError, match=r"allowed: init_process_group\('cpu:gloo,cuda:nccl'\)"),
    ):
        select_device(load_cluster("1x8xH100-SXM"), 3)


def test_plans_for_devices_without_a_backend_are_refused() -> None:
    plan = plan_of("dp=4", "fp32", "H100-SXM")
    check_runnable(plan)
    for text in ("1x4xTPU-v4", "1x4xTrainium2"):
        with pytest.raises(ConfigError, match="allowed: cpu, or devices of NVIDIA and AMD"):
            check_runnable(replace(plan, cluster=load_cluster(text)))
    host, device = (load_cluster(f"1x2x{name}") for name in ("cpu", "H100-SXM"))
    both = replace(host, classes={**host.classes, **device.classes}, nodes=(*host.nodes, *device.nodes))
    with pytest.raises(ConfigError, match="found cpu, H100-SXM"):
        check_runnable(replace(plan, cluster=both))


def test_fp32_with_a_ring_of_context_ranks_is_refused_on_accelerators() -> None:
    check_runnable(plan_of("cp=4,cp_kind=ring", "bf16", "H100-SXM"))
    check_runnable(plan_of("cp=4,cp_kind=ring", "fp32", "cpu"))
    with pytest.raises(ConfigError, match="fp32 with ring attention"):
        check_runnable(plan_of("cp=4,cp_kind=ring", "fp32", "H100-SXM"))


def test_measurements_for_hosts_alone_are_refused_by_name() -> None:
    plan = plan_of("dp=4", "fp32", "H100-SXM")
    check_options(plan, is_adaptive=False, is_traced=False)
    check_options(plan_of("dp=4", "fp32", "cpu"), is_adaptive=True, is_traced=True)
    with pytest.raises(ConfigError, match="--adaptive: is not supported on accelerators; found H100-SXM"):
        check_options(plan, is_adaptive=True, is_traced=False)
    with pytest.raises(ConfigError, match="--trace: is not supported on accelerators"):
        check_options(plan, is_adaptive=False, is_traced=True)


def test_tensors_on_their_device_stay_and_shared_parameters_stay_shared() -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 3, bias=False), "last": nn.Linear(2, 3, bias=False)})
    module["last"].weight = module["first"].weight
    before = module["first"].weight
    to_device(module, "cpu")
    assert module["first"].weight is before
    to_device(module, "meta")
    assert module["first"].weight is module["last"].weight
    assert module["first"].weight.device.type == "meta"


def test_train_names_the_launcher_where_devices_are_on_other_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(str(path), plan_of("dp=4", "bf16", "H100-SXM"))
    assert main(["train", str(path), "--steps", "1"]) == 2
    reported = capsys.readouterr().err
    assert (
        "needs more accelerators than PyTorch finds on this machine" in reported
        and "shardwise launch" in reported
    )
    assert "Traceback" not in reported
