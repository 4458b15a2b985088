"""Clusters from files of Slurm: topologies, nodes of several data parsers, hostlists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cluster import facts_of_text
from shardwise.cluster.imports.hostlist import expanded, folded
from shardwise.errors import ConfigError

Write = Callable[..., list[str]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(name=text, ...)` writes files and returns their paths; a dot in a name is written `_dot_`."""

    def call(**texts: str) -> list[str]:
        paths = []
        for name, text in texts.items():
            path = tmp_path / name.replace("_dot_", ".")
            path.write_text(text)
            paths.append(str(path))
        return paths

    return call


TREE = """\
# a fat tree of two levels
SwitchName=core Switches=leaf[1-2]
SwitchName=leaf1 Nodes=gpu[001-002] LinkSpeed=400
SwitchName=leaf2 \\
    Nodes=gpu[003-004]
"""


def nodes_of_scontrol(names: Sequence[str], **changes: object) -> str:
    """`scontrol show nodes --json` of data parser 0.0.42, without the fields that nobody reads."""
    node: Mapping[str, object] = {
        "architecture": "x86_64", "boards": 1, "cpus": 224, "features": ["ib"], "gres": "gpu:h100:8(S:0-1)",
        "real_memory": 2063937, "state": ["IDLE"], "weight": 1, "instance_type": "", "topology": "",
        "boot_time": {"set": True, "infinite": False, "number": 1720820315},
    }  # fmt: skip
    document = {
        "nodes": [{"name": name, **node, **changes} for name in names],
        "last_update": {"set": True, "infinite": False, "number": 1729506166},
        "meta": {"plugin": {"type": "", "data_parser": "data_parser/v0.0.42"}, "command": ["show", "nodes"]},
        "errors": [], "warnings": [],
    }  # fmt: skip
    return json.dumps(document)


GPUS = [f"gpu00{number}" for number in range(1, 5)]


def test_nodes_and_tree_give_the_cluster_with_a_tier_of_leaf_switches(write: Write) -> None:
    found = sw.import_cluster(write(topology_dot_conf=TREE, nodes_dot_json=nodes_of_scontrol(GPUS)))
    cluster = found.cluster
    assert [(node.name, node.device_class, node.devices) for node in cluster.nodes] == [
        ("gpu[001-004]", "H100-SXM", 8)
    ] * 4
    # NVLink within 8 devices, a leaf switch of two nodes, then all four: 16 and 32 devices.
    assert [(tier.name, tier.span, tier.is_network) for tier in cluster.tiers] == [
        ("NVLink 4", 8, False), ("leaf", 16, True), ("network", 32, True),
    ]  # fmt: skip
    default = sw.import_cluster(write(nodes_dot_json=nodes_of_scontrol(GPUS))).cluster
    assert cluster.tiers[0] == default.tiers[0]
    # Eight cards of 400 Gb/s for eight devices: 50 GB/s each, at both levels, since no file says otherwise.
    assert [tier.bytes_per_s for tier in cluster.tiers] == [450e9, 50e9, 50e9]
    assert cluster.nodes[0].host_memory_bytes == 2063937 * 2**20
    assert found.provenance["given"]["switches"].endswith("topology.conf")
    assert found.provenance["given"]["devices"].endswith("nodes.json")
    assert "network cards of a node of 8 H100-SXM: 8 x 400Gb/s" in found.provenance["defaults"]
    assert any("400Gb/s" in line for line in cluster.assumptions)


def test_the_written_file_is_the_same_cluster(write: Write, tmp_path: Path) -> None:
    found = sw.import_cluster(write(topology_dot_conf=TREE, nodes_dot_json=nodes_of_scontrol(GPUS)))
    from shardwise.cluster import load_cluster

    for name in ("c.yaml", "c.json"):
        (tmp_path / name).write_text(found.written(name))
        assert load_cluster(str(tmp_path / name)) == found.cluster


def test_nodes_follow_their_switches_whatever_their_order(write: Write) -> None:
    """Names in turn: the first and third node are below one switch."""
    tree = "SwitchName=a Nodes=n[1,3]\nSwitchName=b Nodes=n[2,4]\nSwitchName=top Switches=a,b\n"
    nodes = json.loads(nodes_of_scontrol(["n1", "n2", "n3", "n4"]))
    for node, count in zip(nodes["nodes"], (4, 8, 4, 8), strict=True):
        node["gres"] = f"gpu:h100:{count}"
    found = sw.import_cluster(write(t=tree, n=json.dumps(nodes))).cluster
    assert [(node.name, node.devices) for node in found.nodes] == [
        ("n[1,3]", 4), ("n[1,3]", 4), ("n[2,4]", 8), ("n[2,4]", 8),
    ]  # fmt: skip


def test_topology_yaml_has_its_default_tree(write: Write) -> None:
    text = """\
---
- topology: mesh
  cluster_default: False
  flat: true
- topology: tree
  cluster_default: True
  tree:
    switches:
    - switch: root
      children: s[1-2]
    - switch: s1
      nodes: gpu[001-002]
    - switch: s2
      nodes: gpu[003-004]
"""
    found = sw.import_cluster(write(topology_dot_yaml=text), device="A100-80G")
    assert [(tier.name, tier.span) for tier in found.cluster.tiers] == [
        ("NVLink 3", 8), ("leaf", 16), ("network", 32),
    ]  # fmt: skip
    assert found.provenance["given"]["devices"] == "--device"
    assert any("topology 'mesh' is not used" in line for line in found.provenance["left_out"])
    assert "8 A100-80G per node" in found.provenance["defaults"]


BLOCKS = """\
- topology: racks
  block:
    block_sizes: [2, 4]
    blocks:
    - block: b1
      nodes: node[01-02]
    - block: b2
      nodes: node[03-05]
"""


def test_blocks_are_scale_up_domains_where_devices_have_them(write: Write) -> None:
    """A block of a GB200 is a rack with one NVLink fabric: 2 nodes of 4 devices are 8. The third node of
    the larger block is left out, since all domains have one size."""
    found = sw.import_cluster(write(topology_dot_yaml=BLOCKS), device="GB200")
    assert [(tier.name, tier.span, tier.is_network) for tier in found.cluster.tiers] == [
        ("NVLink 5", 8, False), ("network", 16, True),
    ]  # fmt: skip
    assert found.cluster.devices == 16
    assert found.provenance["left_out"] == ["1 node node05: every scale-up domain is used with 2 nodes"]
    # A block of H100 nodes is no more than a switch; blocks of 16 and 24 devices are no tier.
    others = sw.import_cluster(write(topology_dot_yaml=BLOCKS), device="H100-SXM")
    assert others.cluster.devices == 40
    assert [tier.span for tier in others.cluster.tiers] == [8, 40]
    assert any("16, 24 devices are not equal" in line for line in others.provenance["left_out"])


def test_blocks_of_topology_conf(write: Write) -> None:
    text = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n"
    found = sw.import_cluster(write(topology_dot_conf=text), device="GB300")
    assert [tier.span for tier in found.cluster.tiers] == [8, 16]


def sinfo(state: object, gres: str, memory: int, names: Sequence[str], parser: str) -> str:
    entry = {
        "node": {"state": state}, "nodes": {"total": len(names), "nodes": list(names)},
        "memory": {"minimum": memory, "maximum": memory}, "gres": {"total": gres, "used": ""},
        "partition": {"name": "gpu"},
    }  # fmt: skip
    meta = {"plugins": {"data_parser": f"data_parser/{parser}"}, "command": ["sinfo", "--json"]}
    return json.dumps({"meta": meta, "sinfo": [entry, entry], "errors": []})


def test_sinfo_lists_nodes_once_for_all_partitions(write: Write) -> None:
    text = sinfo(["MIXED"], "gpu:a100:4(S:0-1),mps:20", 515000, ["n1", "n2"], "v0.0.39")
    with pytest.raises(ConfigError, match=r"may be several devices.*A100-40G or A100-80G, with device"):
        sw.import_cluster(write(sinfo_dot_json=text))
    found = sw.import_cluster(write(sinfo_dot_json=text), device="A100-40G")
    assert [(node.name, node.devices) for node in found.cluster.nodes] == [("n[1-2]", 4)] * 2
    assert found.provenance["files"][0].endswith("sinfo --json (v0.0.39)")


@pytest.mark.parametrize(
    ("changes", "devices", "memory_mib", "absent"),
    [
        # Data parser 0.0.37: states are one text, of lower case.
        ({"state": "idle", "features": ""}, 8, 2063937, None),
        ({"state": "down", "state_flags": ["NOT_RESPONDING"]}, 8, 2063937, "DOWN"),
        # Numbers as {set, infinite, number}.
        ({"real_memory": {"set": True, "infinite": False, "number": 515000}}, 8, 515000, None),
        ({"real_memory": {"set": False, "infinite": False, "number": 0}}, 8, None, None),
        ({"real_memory": 1}, 8, None, None),
        ({"state": ["IDLE", "DRAIN"]}, 8, 2063937, "DRAIN"),
        ({"gres": "gpu:nvidia_h100_80gb_hbm3:4(S:0),gpu:nvidia_h100_80gb_hbm3:4(S:1)"}, 8, 2063937, None),
        ({"gres": "gpu:2"}, 2, 2063937, None),
        ({"gres": "craynetwork:4"}, 0, 2063937, None),
        ({"gres": "gpu:a100:4,gpu:h100:2"}, 6, 2063937, "devices of several kinds"),
        ({"gres": "gpu:1g.10gb:7"}, 7, 2063937, "slices of devices (MIG)"),
    ],
)  # fmt: skip
def test_nodes_of_every_data_parser(
    changes: Mapping[str, object], devices: int, memory_mib: int | None, absent: str | None
) -> None:
    facts = facts_of_text(nodes_of_scontrol(["n1"], **changes), "nodes.json")
    (node,) = facts.nodes
    memory = None if node.host_memory_bytes is None else node.host_memory_bytes / 2**20
    assert (node.devices, memory, node.absent) == (devices, memory_mib, absent)
    assert facts.kind == "scontrol show nodes --json (v0.0.42)"


def test_nodes_name_their_switches_themselves() -> None:
    facts = facts_of_text(nodes_of_scontrol(["n1"], topology="default:core:leaf7"), "nodes.json")
    assert facts.nodes[0].switches == ("leaf7", "core")


def test_what_cannot_be_used_is_left_out_by_name(write: Write) -> None:
    document = json.loads(nodes_of_scontrol([*GPUS, "cpu1", "cpu2"]))
    document["nodes"][3]["state"] = ["DOWN", "NOT_RESPONDING"]
    for node in document["nodes"][4:]:
        node["gres"] = ""
    topology = TREE + "SwitchName=old Nodes=gone[1-9]\n"
    found = sw.import_cluster(write(n=json.dumps(document), t=topology))
    assert found.cluster.devices == 24
    assert found.provenance["left_out"] == [
        "9 nodes gone[1-9]: not in the list of nodes", "1 node gpu004: DOWN", "2 nodes cpu[1-2]: no devices",
    ]  # fmt: skip


def test_a_hostlist_with_the_devices_of_a_name(write: Write) -> None:
    found = sw.import_cluster(write(hosts="gpu[01-03,07]\n# spare\ngpu09\n"), device="H200")
    assert [node.name for node in found.cluster.nodes] == ["gpu[01-03,07,09]"] * 5
    slots = sw.import_cluster(write(hosts="n1 slots=4\nn2 slots=4\n"), device="H200").cluster
    assert [node.devices for node in slots.nodes] == [4, 4]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n7", ["n7"]),
        ("n[0-2,07]", ["n0", "n1", "n2", "n07"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[1-2],x", ["r1n1", "r1n2", "r2n1", "r2n2", "x"]),
    ],
)
def test_hostlists(text: str, names: list[str]) -> None:
    assert expanded(text) == names
    assert sorted(expanded(folded(names))) == sorted(names)


@pytest.mark.parametrize(
    "text", ["n[0-", "n[0-3", "n]", "n[3-1]", "n[a-b]", "n[1],", "", "n[0-999999999999]", "n[[1]]"]
)
def test_texts_that_are_no_hostlist(text: str) -> None:
    with pytest.raises(ConfigError):
        expanded(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SwitchName=a Nodes=n[1-\n", r"line 1: is not a hostlist"),
        ("SwitchName=a\n", r"line 1: names neither nodes nor switches"),
        ("SwitchName=a Nodes=n1 Switches=b\n", r"line 1: names both"),
        ("SwitchName=a Switches=b,c\nSwitchName=b Nodes=n1\n", r"line 1: is not defined; found 'c'"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", r"line 2: is below two switches; found 'n1'"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", r"line 2: is defined twice; found 'a'"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,c\nSwitchName=c Switches=b\n", r"is above itself"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", r"mixes trees and blocks"),
        ("SwitchName=a Nodes=n1\nRingName=r Nodes=n2\n", r"line 2: is no line of a tree"),
        ("SwitchName=a Nodes=n1\nSwitch", r"line 2: is no line of a tree"),
        ("- topology: t\n  torus3d:\n    x: 4\n", r"is of a kind that is not read; found torus3d"),
        ("- topology: t\n  tree:\n    switches:\n    - switch: a\n", r"names neither nodes nor children"),
        ("- topology: t\n  tree:\n    switches: [", r"is not valid YAML"),
        ("NodeName=n[1-4] Gres=gpu:8\n", r"line 1: is no line of a tree"),
        ("hello world\n", r"is of no known format; found 'hello world'"),
        ('{"nodes": [{"name": "n1", "gres": "gpu:h1', r"is not valid JSON"),
        ('{"jobs": []}', r"is of no known format; found keys jobs"),
        ('{"meta": {}, "nodes": []}', r"nodes: has no nodes"),
        ('{"meta": {}, "nodes": [{"gres": "gpu:8"}]}', r"nodes\[0\].name: is missing"),
        ('{"meta": {}, "nodes": [{"name": "n", "gres": "gpu:h100:x"}]}', r"nodes\[0\].gres: is not a list"),
        ("", r"is empty"),
    ],
)
def test_wrong_and_truncated_files_have_one_line(write: Write, text: str, why: str) -> None:
    (path,) = write(file=text)
    with pytest.raises(ConfigError) as caught:
        sw.import_cluster(path, device="H100-SXM")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(path) and re.search(why, message), message


def test_files_that_contradict_each_other_are_refused(write: Write) -> None:
    hosts = "".join(f"{name} slots=4\n" for name in GPUS)
    with pytest.raises(ConfigError, match=r"another number of devices of node 'gpu001'.*found 4; allowed: 8"):
        sw.import_cluster(write(n=nodes_of_scontrol(GPUS), hosts=hosts))


def test_names_with_hostile_characters_are_escaped(write: Write, tmp_path: Path) -> None:
    name = "n\x1b[31m\n- {device: T4}: &a #\u202e"
    found = sw.import_cluster(write(n=nodes_of_scontrol([name])))
    text = found.written("c.yaml")
    assert text.isascii() and "\x1b" not in text
    assert found.cluster.devices == 8
    assert found.cluster.nodes[0].name == r"n\x1b[31m\n- {device: T4}: &a #\u202e"
