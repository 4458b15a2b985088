"""The inside of nodes from nvidia-smi and NCCL, speeds from nccl-tests, and files of one cluster together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.accuracy.test_nccl_tests import fabric, model_s, run_head, table

import shardwise as sw
from shardwise.cluster import facts_of_text, load_cluster
from shardwise.errors import ConfigError


def imported(tmp_path: Path, *texts: str, **options: str) -> Any:
    paths = []
    for place, text in enumerate(texts):
        path = tmp_path / f"file{place}"
        path.write_text(text)
        paths.append(str(path))
    return sw.import_cluster(paths, **options)


# nvidia-smi topo -m of a node of eight H100: a card for storage (NIC2) is near to no device.
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def matrix(links: Sequence[Sequence[str]], near: Sequence[int]) -> str:
    """The matrix of devices with these links, and of network cards each near to a device (-1: to none)."""
    devices, cards = [f"GPU{at}" for at in range(len(links))], [f"NIC{at}" for at in range(len(near))]
    lines = ["\t" + "\t".join([*devices, *cards, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for at, row in enumerate(links):
        cells = [*row, *("PXB" if card == at else "NODE" for card in near)]
        shown = [" X " if cell == "X" else cell for cell in cells]
        lines.append("	".join([f"GPU{at}", *shown, "0-55", "0", "", "N/A"]))
    for place, card in enumerate(near):
        cells = [*("PXB" if card == at else "NODE" for at in range(len(links))),
                 *(" X " if other == place else "NODE" for other in range(len(near)))]  # fmt: skip
        lines.append(f"NIC{place}\t" + "\t".join(cells))
    return "\n".join(lines) + "\n" + LEGEND


def all_to_all(count: int, link: str) -> list[list[str]]:
    return [["X" if at == other else link for other in range(count)] for at in range(count)]


def smi(product: str = "NVIDIA H100 80GB HBM3", count: int = 8, memory: int = 81559, power: str = "700.00",
        mig: str = "Disabled") -> str:  # fmt: skip
    gpu = f"""\
	<gpu id="00000000:1B:00.0">
		<product_name>{product}</product_name>
		<product_architecture>Hopper</product_architecture>
		<mig_mode>
			<current_mig>{mig}</current_mig>
			<pending_mig>{mig}</pending_mig>
		</mig_mode>
		<pci>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>5</max_link_gen>
					<current_link_gen>1</current_link_gen>
				</pcie_gen>
				<link_widths>
					<max_link_width>16x</max_link_width>
					<current_link_width>16x</current_link_width>
				</link_widths>
			</pci_gpu_link_info>
		</pci>
		<fb_memory_usage>
			<total>{memory} MiB</total>
			<reserved>551 MiB</reserved>
			<used>1 MiB</used>
		</fb_memory_usage>
		<gpu_power_readings>
			<current_power_limit>{power} W</current_power_limit>
			<default_power_limit>700.00 W</default_power_limit>
		</gpu_power_readings>
	</gpu>
"""
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"	<driver_version>550.54.15</driver_version>\n	<attached_gpus>{count}</attached_gpus>\n"
        f"{gpu * count}</nvidia_smi_log>\n"
    )


# A topology of NCCL of a cloud: eight devices, each with four cards of 100 Gb/s, and no NVLinks.
CARD = (
    '<pci busid="0000:{bus}:0{card}.0" class="0x020000" link_speed="16.0 GT/s PCIe" link_width="8"><nic>'
    '<net name="rdmap{bus}s{card}" speed="{speed}" port="1" guid="{card}" maxconn="1024" gdr="1"/>'
    "</nic></pci>"
)


def topology(speed: int = 100000, cards: int = 4, inside: str = "") -> str:
    bridges = "".join(
        f'<pci busid="0000:0{at}:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">'
        f'<pci busid="0000:{at}0:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{at}" sm="90" rank="{at}" gdr="1">{inside}</gpu></pci>'
        + "".join(CARD.format(bus=f"{at}1", card=card, speed=speed) for card in range(cards))
        + "</pci>"
        for at in range(8)
    )
    return (
        '<system version="1"><cpu numaid="0" affinity="ffff" arch="x86_64" vendor="AuthenticAMD"'
        f">{bridges}</cpu></system>"
    )


NODES = json.dumps(
    {
        "meta": {"plugin": {"data_parser": "data_parser/v0.0.43"}},
        "nodes": [{"name": f"n{at}", "gres": "gpu:h100:8", "state": ["IDLE"]} for at in range(4)],
    }
)


def test_one_node_from_nvidia_smi(tmp_path: Path) -> None:
    found = imported(tmp_path, smi())
    (node,) = found.cluster.nodes
    assert (node.device_class, node.devices) == ("H100-SXM", 8)
    # 81,559 MiB are 79.6 GiB of the catalogue's 79.2 and what the driver keeps: nothing is changed.
    assert found.cluster.classes == load_cluster("1x8xH100-SXM").classes
    assert "1 node: no file lists nodes" in found.provenance["defaults"]


def test_memory_power_and_bus_that_differ_from_the_catalogue(tmp_path: Path) -> None:
    """64 GiB instead of 80, and 500 of 700 W: peaks times (5/7)^(1/3) = 0.8939."""
    found = imported(tmp_path, smi(memory=65536, power="500.00").replace(">5</max", ">4</max"))
    (device,) = found.cluster.classes.values()
    assert device.memory_bytes == 65536 * 2**20
    known = load_cluster("1x8xH100-SXM").classes["H100-SXM"]
    ratio = device.peak_flop_per_s["bf16"] / known.peak_flop_per_s["bf16"]
    assert ratio == pytest.approx(0.8939, abs=1e-4)
    assert found.cluster.nodes[0].host_link_bytes_per_s == 25e9  # PCIe 4 of width 16
    assert any("500 W of 700 W" in line for line in found.provenance["defaults"])


def test_cards_that_serve_devices_are_counted(tmp_path: Path) -> None:
    text = matrix(all_to_all(8, "NV18"), [0, 1, -1, 2, 3, 4, 5, 6, 7])
    facts = facts_of_text(text, "topo.txt")
    assert facts.inside is not None
    assert (facts.inside.devices, facts.inside.nics) == (8, 8)
    assert facts.notes == ("network cards NIC2: no PCIe switch joins them to a device",)
    found = imported(tmp_path, NODES, text)
    node = found.cluster.nodes[0]
    assert (node.nics, node.nic_bytes_per_s) == (8, 50e9)
    # 18 NVLinks of 25 GB/s are the 450 GB/s of the catalogue: the class is unchanged.
    assert found.cluster.classes == load_cluster("4x8xH100-SXM").classes
    assert "18 NVLinks, 450 GB/s per direction" in found.provenance["given"]["links inside nodes"]
    four = imported(tmp_path, NODES, matrix(all_to_all(8, "NV18"), [0, 2, 4, 6])).cluster.nodes[0]
    assert (four.nics, four.nic_bytes_per_s) == (4, 50e9)


def test_fewer_nvlinks_and_bridged_pairs_change_the_fabric(tmp_path: Path) -> None:
    """8 links of 25 GB/s are 200 GB/s. Pairs with 4 links, as bridges have them: 100 GB/s between two, and
    the host link of 53 GB/s between pairs."""
    (device,) = imported(tmp_path, NODES, matrix(all_to_all(8, "NV8"), [])).cluster.classes.values()
    assert (device.scale_up_bytes_per_s, device.scale_up_domain) == (200e9, 8)
    pairs = [["X" if a == b else "NV4" if a // 2 == b // 2 else "SYS" for b in range(8)] for a in range(8)]
    cluster = imported(tmp_path, NODES, matrix(pairs, [])).cluster
    assert [(tier.span, tier.bytes_per_s) for tier in cluster.tiers] == [(2, 100e9), (8, 53e9), (32, 50e9)]
    (device,) = imported(tmp_path, NODES, matrix(all_to_all(8, "PHB"), [])).cluster.classes.values()
    assert (device.scale_up_name, device.scale_up_bytes_per_s) == ("PCIe", 53e9)


def test_a_topology_of_nccl_has_cards_with_their_speed(tmp_path: Path) -> None:
    found = imported(tmp_path, NODES, topology())
    node = found.cluster.nodes[0]
    assert (node.nics, node.nic_bytes_per_s) == (32, 12.5e9)  # 32 cards of 100 Gb/s
    assert found.cluster.tiers[-1].bytes_per_s == 50e9  # 32 x 12.5 / 8
    assert not any("network cards" in line for line in found.provenance["defaults"])
    switch = '<nvlink target="0000:d0:00.0" count="10" tclass="0x068000"/>' \
             '<nvlink target="0000:d1:00.0" count="8" tclass="0x068000"/>'  # fmt: skip
    inside = facts_of_text(topology(inside=switch), "t.xml").inside
    assert inside is not None and inside.nvlinks is not None
    assert inside.nvlinks[0][1] == 18 and inside.nvlinks[3][3] == 0


def test_a_topology_without_gpu_elements_counts_pci_devices() -> None:
    """As a cloud ships it for eight A100 with eight InfiniBand cards: classes of PCI devices alone."""
    pairs = "".join(
        f'<pci busid="000{at}:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>'
        f'<pci busid="010{at}:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>'
        for at in range(8)
    )
    text = f'<system version="1"><cpu numaid="0">{pairs}</cpu></system>'
    inside = facts_of_text(text, "ndv4.xml").inside
    assert inside is not None
    assert (inside.devices, inside.nics, inside.nic_bytes_per_s, inside.pcie) == (8, 8, None, (4, 16))


def test_files_of_one_cluster_are_joined(tmp_path: Path) -> None:
    """Nodes from Slurm, devices from nvidia-smi, NVLinks from topo, cards from NCCL, speeds from nccl-tests:
    80 % of the cards, as the cost model itself predicts."""
    shorthand = load_cluster("4x8xH100-SXM")
    from dataclasses import replace

    device = shorthand.classes["H100-SXM"]
    of = replace(device.efficiency.scale_out, fraction=0.8, startup_s=4e-5)
    true = replace(device, efficiency=replace(device.efficiency, scale_out=of), scale_out_latency_s=1.2e-5)
    on = fabric(load_cluster("4x8xH100-SXM", measured={"H100-SXM": true}))
    times = [(2**power, model_s(on, "all_gather", 2**power, (8, 4))) for power in range(20, 33, 3)]
    log = run_head((8,) * 4) + table("all_gather", 32, times)
    smi_log, topo = smi(), matrix(all_to_all(8, "NV18"), range(8))
    found = imported(tmp_path, NODES, smi_log, topo, topology(speed=400000, cards=1), log)
    (fitted,) = found.cluster.classes.values()
    assert fitted.efficiency.scale_out.fraction == pytest.approx(0.8, rel=2e-3)
    assert fitted.efficiency.scale_up == device.efficiency.scale_up
    assert found.cluster.nodes[0].nics == 8
    files = [line.split(": ", 1)[1] for line in found.provenance["files"]]
    assert files == [
        "scontrol show nodes --json (v0.0.43)", "nvidia-smi -q -x, driver 550.54.15", "nvidia-smi topo -m",
        "topology of NCCL, version 1", "nccl-tests, all-gather on 32 ranks",
    ]  # fmt: skip
    assert not any("network cards" in line for line in found.provenance["defaults"])
    assert "links of InfiniBand" in found.provenance["given"]


def test_output_of_nccl_tests_alone_names_hosts_and_devices(tmp_path: Path) -> None:
    log = run_head((8, 8), "NVIDIA A100-SXM4-80GB")
    log += table("all_gather", 16, [(2**power, 1e-4 + 2**power / 1e11) for power in range(20, 33, 3)])
    found = imported(tmp_path, log)
    assert [(node.name, node.devices, node.device_class) for node in found.cluster.nodes] == [
        ("node-[0-1]", 8, "A100-80G")
    ] * 2


BOMB = '<!DOCTYPE lolz [<!ENTITY lol "lol"><!ENTITY lol2 "&lol;&lol;">]><system version="1">&lol2;</system>'
OUTSIDE = '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><system version="1">&x;</system>'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "line 1: defines entities"),
        (OUTSIDE, "line 1: defines entities"),
        (smi()[:-40], r"line \d+: is not valid XML"),
        ("<html><body>404</body></html>", "is XML of another kind; found <html>"),
        ("<a>" * 100, "line 1: has too many elements"),
        ("<system version='1'/>", "has no devices"),
        (topology().replace('speed="100000"', 'speed="400000"', 3), "has network cards of several speeds"),
        (smi().replace(">8</attached", ">4</attached"), "has another number of devices than attached_gpus"),
        (smi().replace("HBM3</product", "HBM3e</product", 1), "has devices of several kinds"),
        (smi(mig="Enabled"), "slices of devices"),
        (matrix(all_to_all(4, "NV4"), [])[:60], "has not a link for every column|has no row of every device"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV4\n", "has no row of every device.*GPU1"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tfoo\tX\n", "line 3: has not a link for every column"),
    ],
)
def test_wrong_and_truncated_files_have_one_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        imported(tmp_path, text, device="H100-SXM")
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def test_files_that_describe_other_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"describes the inside of a node that no file lists.*A100"):
        imported(tmp_path, NODES, smi("NVIDIA A100-SXM4-80GB"))
    with pytest.raises(ConfigError, match=r"another number of devices than the other files; found 4"):
        imported(tmp_path, smi(), matrix(all_to_all(4, "NV18"), []))


def test_devices_that_the_site_names_in_its_own_way_are_those_of_nvidia_smi(tmp_path: Path) -> None:
    """`gpu:big:8` says nothing; nvidia-smi does. `gpu:a100` is one of two, and nvidia-smi says which."""
    found = imported(tmp_path, NODES.replace("gpu:h100:8", "gpu:big:8"), smi())
    assert set(found.cluster.classes) == {"H100-SXM"}
    a100 = NODES.replace("gpu:h100:8", "gpu:a100:8")
    found = imported(tmp_path, a100, smi("NVIDIA A100-SXM4-40GB", memory=40960))
    assert set(found.cluster.classes) == {"A100-40G"}
