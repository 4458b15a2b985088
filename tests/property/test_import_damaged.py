"""Damaged files about clusters: whatever is cut or put in, the import gives a cluster or one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.accuracy.test_nccl_tests import TWO_NODES, as_json
from tests.unit.cluster.test_import_kubernetes import NEW, listed, node
from tests.unit.cluster.test_import_nvidia import all_to_all, matrix, smi, topology
from tests.unit.cluster.test_import_slurm import BLOCKS, TREE, nodes_of_scontrol, sinfo

import shardwise as sw
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError

FILES = {
    "topology.conf": TREE,
    "topology.yaml": BLOCKS,
    "nodes.json": nodes_of_scontrol(["n1", "n2"]),
    "sinfo.json": sinfo(["IDLE"], "gpu:h100:8", 515000, ["n[1-2]"], "v0.0.41"),
    "hosts": "n[1-4] slots=8\n",
    "kubectl.json": listed(node("n1", **{NEW[0]: "a"}), node("n2", **{NEW[0]: "b"})),
    "graph.json": '{"instances": [{"id": "n1", "network_layers": ["a", "b"], "labels": {}}]}',
    "smi.xml": smi(count=2),
    "topo.txt": matrix(all_to_all(4, "NV18"), [0, 1]),
    "nccl.xml": topology(cards=1),
    "nccl.log": TWO_NODES,
    "nccl.json": json.dumps(as_json()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damaged_files_give_a_cluster_or_one_line(tmp_path: Path, name: str, data: st.DataObject) -> None:
    good = FILES[name]
    at = data.draw(st.integers(0, len(good)))
    until = data.draw(st.integers(at, min(at + 30, len(good))) | st.just(len(good)))
    put = data.draw(
        st.text(max_size=5) | st.sampled_from(["\x00", '"', "]", "-1", "1e400", "<!ENTITY a 'b'>"])
    )
    path = tmp_path / name
    path.write_text(good[:at] + put + good[until:], encoding="utf-8", errors="surrogatepass")
    found, lines = None, []
    try:
        found = sw.import_cluster(str(path), device="H100-SXM")
    except ConfigError as error:
        lines = str(error).split("\n")
    if found is None:
        assert len(lines) == 1
        return
    written = tmp_path / "c.yaml"
    written.write_text(found.written("c.yaml"))
    read = load_cluster(str(written))
    assert (read.nodes, read.tiers) == (found.cluster.nodes, found.cluster.tiers)
    assert read.assumptions == found.cluster.assumptions


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_read_undamaged(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert sw.import_cluster(str(path), device="H100-SXM").cluster.devices >= 2
