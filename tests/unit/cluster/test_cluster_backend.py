"""The backend of collectives between devices, by device class."""

from __future__ import annotations

from shardwise.cluster import NATIVE, cluster_from_record, cluster_record, find_device, load_cluster


def test_processes_of_cpus_have_gloo_and_all_else_its_own() -> None:
    gloo = find_device("cpu").backend
    assert (gloo.name, gloo.substitute("reduce_scatter")) == ("gloo", "all_reduce")
    assert gloo.substitute("all_gather") == "all_gather"
    assert find_device("H100-SXM").backend == NATIVE
    assert NATIVE.substitute("reduce_scatter") == "reduce_scatter"


def test_a_backend_goes_with_its_device_into_plans() -> None:
    record = cluster_record(load_cluster("2x2xcpu"))
    assert cluster_from_record(record).classes["cpu"].backend == find_device("cpu").backend
    del record["classes"]["cpu"]["backend"]  # as in older plans
    assert cluster_from_record(record).classes["cpu"].backend == NATIVE
