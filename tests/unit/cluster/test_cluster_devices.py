"""The catalogue: every device, dense peaks, memory as the driver reports it, a source for every figure."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path

import pytest

import shardwise.cluster
from shardwise.cluster import (
    Device,
    Efficiency,
    device_names,
    devices,
    efficiency_numbers,
    find_device,
    numbers_of_device,
    with_efficiency,
)
from shardwise.errors import ConfigError
from shardwise.inputs import read_mapping
from shardwise.numbers import Number

DATA = Path(shardwise.cluster.__file__).with_name("data")
NAMES = tuple(
    [
        "V100-16G",
        "V100-32G",
        "T4",
        "A10G",
        "A30",
        "A40",
        "A16",
        "RTX-A5000",
        "RTX-A6000",
        "A100-40G",
        "A100-80G",
        "A800-80G",
        "L4",
        "L20",
        "L40",
        "L40S",
        "RTX2080Ti",
        "RTX3090",
        "RTX4090",
        "RTX5090",
        "RTX6000-Ada",
        "RTX-PRO-6000",
        "H20",
        "H100-PCIe",
        "H100-SXM",
        "H100-NVL",
        "H100-HBM2e",
        "H800",
        "H200",
        "GH200",
        "B200",
        "B300",
        "GB200",
        "GB300",
        "MI210",
        "MI250X",
        "MI300X",
        "MI325X",
        "MI355X",
        "Gaudi2",
        "Gaudi3",
        "TPU-v4",
        "TPU-v5e",
        "TPU-v5p",
        "TPU-v6e",
        "Trainium2",
        "Ascend-910B",
        "cpu",
    ]
)

# Dense 16-bit matrix peaks in TFLOP/s, from the makers' data sheets (fp16 where there is no bf16), and the
# nominal memory in gigabytes.
DENSE_16_BIT = {
    "V100-16G": (125, 16), "V100-32G": (125, 32), "T4": (65, 16), "A10G": (70, 24), "A30": (165, 24),
    "A40": (149.7, 48), "A16": (17.9, 16), "RTX-A5000": (111.1, 24), "RTX-A6000": (154.8, 48),
    "A100-40G": (312, 40), "A100-80G": (312, 80), "A800-80G": (312, 80), "L4": (121, 24),
    "L20": (119.5, 48), "L40": (181, 48), "L40S": (362, 48), "RTX2080Ti": (53.8, 11), "RTX3090": (71, 24),
    "RTX4090": (165.2, 24), "RTX5090": (209.5, 32), "RTX6000-Ada": (364.2, 48), "RTX-PRO-6000": (503.8, 96),
    "H20": (148, 96), "H100-PCIe": (756.5, 80), "H100-SXM": (989.4, 80), "H100-NVL": (835.5, 94),
    "H100-HBM2e": (989.4, 94), "H800": (989.4, 80), "H200": (989.4, 141), "GH200": (989.4, 96),
    "B200": (2250, 180), "B300": (2250, 288), "GB200": (2500, 186), "GB300": (2500, 288),
    "MI210": (181, 64), "MI250X": (191.5, 64), "MI300X": (1307.4, 192), "MI325X": (1307.4, 256),
    "MI355X": (2516.6, 288), "Gaudi2": (432, 96), "Gaudi3": (1835, 128), "TPU-v4": (275, 32),
    "TPU-v5e": (197, 16), "TPU-v5p": (459, 95), "TPU-v6e": (918, 32), "Trainium2": (667, 96),
    "Ascend-910B": (313, 64), "cpu": (0.02, 2),
}  # fmt: skip


def sparse_or_nominal(device: Device, dense_tflop: float, nominal_gb: int) -> list[str]:
    """Wrong figures of a device: peaks of structured sparsity, or capacities taken from the name."""
    found = []
    peaks = device.peak_flop_per_s
    best = peaks.get("bf16", peaks.get("fp16", 0.0))
    if best != pytest.approx(dense_tflop * 1e12, rel=0.02):
        found.append("16-bit peak")
    if "fp8" in peaks and peaks["fp8"] > 2.1 * best:
        found.append("fp8 peak")
    if device.memory_bytes in (nominal_gb * 10**9, nominal_gb * 2**30):
        found.append("nominal memory")
    if not 0.93 * nominal_gb * 10**9 < device.memory_bytes < nominal_gb * 2**30 * 1.01:
        found.append("memory")
    return found


def test_every_device_is_there() -> None:
    assert device_names() == NAMES == tuple(DENSE_16_BIT)


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_dense_and_memory_is_as_the_driver_reports(name: str) -> None:
    assert sparse_or_nominal(devices()[name], *DENSE_16_BIT[name]) == []


def test_a_sparse_peak_and_a_nominal_capacity_are_caught() -> None:
    device = devices()["H100-SXM"]
    values = {field.name: getattr(device, field.name) for field in fields(Device)}
    sparse = Device(**{**values, "peak_flop_per_s": {"bf16": 1979e12, "fp8": 3958e12}})
    assert "16-bit peak" in sparse_or_nominal(sparse, 989.4, 80)
    sparse = Device(**{**values, "peak_flop_per_s": {"bf16": 989e12, "fp8": 3958e12}})
    assert sparse_or_nominal(sparse, 989.4, 80) == ["fp8 peak"]
    for nominal in (80 * 10**9, 80 * 2**30):
        named = Device(**{**values, "memory_bytes": nominal})
        assert "nominal memory" in sparse_or_nominal(named, 989.4, 80)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    device = devices()[name]
    # Every figure of a backend has its source next to it.
    words = {"name", "vendor", "scale_up_name", "scale_out_name", "efficiency", "sources", "backend"}
    if not device.scale_up_links:  # a switch or a bus: no direct links
        words |= {"scale_up_links"}
    figures = {field.name for field in fields(Device)} - words
    assert set(device.sources) == figures
    assert all(len(source) > 10 for source in device.sources.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_efficiency_has_its_provenance_and_is_plausible(name: str) -> None:
    efficiency = devices()[name].efficiency
    expected: set[str] = set()
    optional: set[str] = set()
    for field in fields(Efficiency):
        value = getattr(efficiency, field.name)
        if field.name in ("provenance", "is_calibrated"):
            continue
        curves = {field.name: value}
        if field.name == "attention":
            curves = {f"attention.{kernel}": curve for kernel, curve in value.items()}
        for path, curve in curves.items():
            if not is_dataclass(curve):
                expected |= {path}
                continue
            for part in fields(curve):
                (expected if part.default is MISSING else optional).add(f"{path}.{part.name}")
    assert expected <= set(efficiency.provenance) <= expected | optional
    assert all(efficiency.provenance.values())
    fractions = [
        efficiency.matmul.peak_fraction,
        efficiency.memory.fraction,
        efficiency.grouped_matmul.fraction,
        *(getattr(efficiency, tier).fraction for tier in ("scale_up", "scale_out")),
        *(getattr(efficiency, tier).partial_fraction for tier in ("scale_up", "scale_out")),
        *(curve.forward_fraction for curve in efficiency.attention.values()),
    ]
    assert all(0.0 < fraction <= 1.0 for fraction in fractions)
    assert all(0 < c.backward_fraction <= c.forward_fraction for c in efficiency.attention.values())
    assert all(0.0 <= getattr(efficiency, tier).startup_s < 0.1 for tier in ("scale_up", "scale_out"))


def test_efficiency_is_calibrated_where_its_speed_was_fitted() -> None:
    for device in devices().values():
        is_fitted = device.efficiency.provenance["matmul.peak_fraction"].startswith("fitted")
        assert device.efficiency.is_calibrated == is_fitted


def test_devices_without_flash_attention_have_the_kernel_of_pytorch() -> None:
    kernels = {name: set(devices()[name].efficiency.attention) for name in ("V100-32G", "T4", "TPU-v4")}
    assert kernels == {"V100-32G": {"efficient"}, "T4": {"efficient"}, "TPU-v4": {"flash-2"}}
    assert set(devices()["A100-80G"].efficiency.attention) == {"flash-1", "flash-2", "efficient"}
    assert set(devices()["H100-SXM"].efficiency.attention) == {
        "flash-1", "flash-2", "flash-3", "cudnn", "efficient"
    }  # fmt: skip
    assert set(devices()["B200"].efficiency.attention) == {"flash-3", "cudnn", "efficient"}


def test_numbers_for_a_device_take_the_place_of_its_own() -> None:
    device = find_device("A100-80G")
    own = numbers_of_device(device, efficiency_numbers())
    assert with_efficiency(device, efficiency_numbers()) == device
    sources = {number.field: number.source for number in own}
    units = {"matmul.units": device.efficiency.provenance["matmul.units"]}
    assert sources | units == dict(device.efficiency.provenance)
    faster = [
        *(number for number in own if number.field != "matmul.peak_fraction"),
        Number(of=("ampere",), field="matmul.peak_fraction", value=1.0, source="a test"),
    ]
    changed = with_efficiency(device, faster).efficiency
    assert changed == replace(
        device.efficiency,
        matmul=replace(device.efficiency.matmul, peak_fraction=1.0),
        is_calibrated=False,
        provenance={**device.efficiency.provenance, "matmul.peak_fraction": "a test"},
    )


def test_units_are_those_of_the_data_sheets() -> None:
    units = {"V100-16G": 80, "A100-80G": 108, "H100-SXM": 132, "H20": 78}
    assert {name: devices()[name].efficiency.matmul.units for name in units} == units


def test_direct_links_are_those_of_the_nodes() -> None:
    """A V100 has six NVLinks: one to its nearest neighbour, four into its half of the node (listed link by
    link in the topology of a DGX-1). In a full mesh n - 1 of the 7 lead to the others of a group of n.
    """
    cube = {  # NVLinks between the devices of a DGX-1, as `nvidia-smi topo` lists them
        (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
        (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
    }  # fmt: skip
    for size, least in devices()["V100-32G"].scale_up_links:
        inside = [
            sum(links for pair, links in cube.items() if one in pair and set(pair) <= group)
            for group in (set(range(first, first + size)) for first in range(0, 8, size))
            for one in group
        ]
        assert min(inside) == least
    assert dict(devices()["V100-16G"].scale_up_links) == {2: 1, 4: 4, 8: 6}
    assert dict(devices()["MI300X"].scale_up_links) == {n: n - 1 for n in range(2, 9)}
    assert dict(devices()["GH200"].scale_up_links) == {2: 6, 3: 12, 4: 18}
    assert devices()["H100-SXM"].scale_up_links == ()
    for device in devices().values():
        sizes = [size for size, _ in device.scale_up_links]
        assert not sizes or sizes[-1] == device.scale_up_domain


def test_the_data_files_pass_the_strict_reader() -> None:
    for name in ("devices.json", "efficiency.json"):
        assert read_mapping(str(DATA / name)) == json.loads((DATA / name).read_text())
    documents = json.loads((DATA / "devices.json").read_text())
    cited = {source for device in documents["devices"].values() for source in device["sources"].values()}
    assert set(documents["documents"]) <= cited


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100-SXM"), ("H100-80GB", "H100-SXM"), ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("A100-SXM4-80GB", "A100-80G"), ("a100_80gb", "A100-80G"), ("tesla v100-sxm2-16gb", "V100-16G"),
        ("rtx 4090", "RTX4090"), ("CPU", "cpu"), ("H200", "H200"), ("GB200", "GB200"), ("tpuv5p", "TPU-v5p"),
    ],
)  # fmt: skip
def test_common_spellings(text: str, name: str) -> None:
    assert find_device(text).name == name


def test_no_two_devices_share_a_spelling() -> None:
    for name in NAMES:
        record = json.loads((DATA / "devices.json").read_text())["devices"][name]
        assert {find_device(spelling).name for spelling in (name, *record.get("aliases", ()))} == {name}


def test_ambiguous_and_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"ambiguous.*A100-40G or A100-80G"):
        find_device("A100")
    with pytest.raises(ConfigError, match=r"ambiguous.*V100-16G or V100-32G"):
        find_device("v100")
    with pytest.raises(ConfigError, match=r"did you mean H100-SXM\?"):
        find_device("H10O-SXM")
    with pytest.raises(ConfigError, match=r"did you mean MI300X\?"):
        find_device("MI300")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # Names as drivers, labels of Kubernetes and resources of Slurm have them.
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA-RTX-A5000", "RTX-A5000"),
        ("a6000", "RTX-A6000"),
        ("NVIDIA L40", "L40"),
        ("nvidia_l20", "L20"),
        ("NVIDIA-A16", "A16"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM"),
        ("nvidia_a100-sxm4-80gb", "A100-80G"),
        ("Tesla-V100-SXM2-32GB", "V100-32G"),
        ("AMD_Instinct_MI210", "MI210"),
        ("H100-94GB-HBM2e", "H100-HBM2e"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA-GB300", "GB300"),
        ("gb300-nvl72", "GB300"),
        ("gb200_nvl72", "GB200"),
    ],
)
def test_names_of_other_software_are_devices(text: str, name: str) -> None:
    assert find_device(text).name == name


def test_a_variant_with_other_memory_is_as_fast_as_its_memory() -> None:
    """An H100 with HBM2e moves 2.4 TB/s, with HBM3 3.35 TB/s; their processors are the same."""
    variant, known = find_device("H100-HBM2e"), find_device("H100-SXM")
    assert (variant.memory_bytes_per_s, known.memory_bytes_per_s) == (2.4e12, 3.35e12)
    assert variant.peak_flop_per_s == known.peak_flop_per_s


def test_the_vendor_alone_is_no_device() -> None:
    for text in ("NVIDIA", "AMD Instinct", "Tesla", ""):
        with pytest.raises(ConfigError):
            find_device(text)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_numbers_are_of_no_calibration(name: str) -> None:
    """`measured_on` names machines on which a user calibrated; published measurements are others'."""
    assert find_device(name).efficiency.measured_on == ()


def test_the_slowest_of_many_devices() -> None:
    """Expected maxima of samples of the standard normal distribution (Harter 1961, table 1): 1.0294 of 4,
    1.4236 of 8, 2.5076 of 100. Blom's quantile is within 2 % of them."""
    efficiency = replace(find_device("A100-80G").efficiency, speed_spread=0.1)
    assert efficiency.lag(1) == 1.0
    for count, expected in ((4, 1.0294), (8, 1.4236), (100, 2.5076)):
        assert (efficiency.lag(count) - 1.0) / 0.1 == pytest.approx(expected, rel=0.02)
    assert replace(efficiency, speed_spread=0.0).lag(1000) == 1.0
