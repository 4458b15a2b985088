"""What carries collectives, by the devices of a cluster."""

from __future__ import annotations

from shardwise.strategy import NATIVE, backend_of


def test_processes_of_cpus_have_gloo_and_all_else_its_own() -> None:
    gloo = backend_of(["cpu"])
    assert (gloo.name, gloo.does("reduce_scatter"), gloo.does("all_gather")) == (
        "gloo",
        "all_reduce",
        "all_gather",
    )
    assert backend_of(["H100-SXM"]) is NATIVE
    assert backend_of(["cpu", "H100-SXM"]) is NATIVE
    assert NATIVE.does("reduce_scatter") == "reduce_scatter"
