"""Names of devices as tables spell them."""

from __future__ import annotations

import pytest

from shardwise.accuracy.spellings import BOARD_POWER_W, device_named
from shardwise.cluster import devices, find_device
from shardwise.errors import ConfigError

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-40GB", "A100-40G"),
        ("H100-80GB", "H100-SXM"),
        ("H100", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("H100 PCIe", "H100-PCIe"),
        ("H200 141GB", "H200"),
        ("V100-SXM2-16GB", "V100-16G"),
        ("T4", "T4"),
        ("GB300", "GB300"),
        ("TPU v6e (Trillium)", "TPU-v6e"),
        ("A100-40GB (p4d.24xlarge)", "A100-40G"),
    ],
)
def test_a_known_spelling_is_the_device_itself(text: str, name: str) -> None:
    assert device_named(text) == (find_device(name), ())


@pytest.mark.parametrize(
    ("text", "name", "assumed"),
    [
        ("B200-SXM", "B200", ("gpu: 'B200-SXM' taken as B200",)),
        (
            "A100 (DGX A100)",
            "A100-80G",
            ("gpu: 'A100 (DGX A100)' taken as A100-80G, with its larger memory",),
        ),
        ("V100", "V100-32G", ("gpu: 'V100' taken as V100-32G, with its larger memory",)),
        (
            "A100 PCIe 80GB",
            "A100-80G",
            (
                "gpu: 'A100 PCIe 80GB' taken as A100-80G",
                "gpu: the PCIe form factor is not modelled; clock and links are those of A100-80G",
            ),
        ),
        ("A100 PCIe 40GB", "A100-40G", None),
    ],
)
def test_a_variant_is_its_part(text: str, name: str, assumed: tuple[str, ...] | None) -> None:
    device, notes = device_named(text)
    assert device == find_device(name)
    assert assumed is None or notes == assumed


def test_another_memory_is_applied() -> None:
    device, notes = device_named("H100-64GB")
    # A driver reports 0.985 GiB of a nominal gigabyte: 64 * 0.985 = 63.04.
    assert device.memory_bytes == pytest.approx(63.04 * GIB)
    assert device.peak_flop_per_s == find_device("H100-SXM").peak_flop_per_s
    assert notes[1] == "gpu: memory of 64 GB instead of the catalogue's"


def test_a_power_limit_lowers_the_peaks() -> None:
    device, notes = device_named("H100-SXM 500W")
    whole = find_device("H100-SXM")
    # The cube root of 500 / 700 is 0.8939.
    for dtype, peak in whole.peak_flop_per_s.items():
        assert device.peak_flop_per_s[dtype] == pytest.approx(0.8939 * peak, rel=1e-4)
    assert device.memory_bytes_per_s == whole.memory_bytes_per_s
    assert notes == ("gpu: peaks times 0.894, the cube root of 500 W of 700 W",)


def test_a_limit_that_does_not_limit_changes_nothing() -> None:
    assert device_named("H100-SXM 700W") == (find_device("H100-SXM"), ())
    assert device_named("H100-SXM (900 W)")[0] == find_device("H100-SXM")


def test_a_power_limit_of_an_unknown_board_is_listed_as_assumption() -> None:
    device, notes = device_named("TPU-v5p 200W")
    assert device == find_device("TPU-v5p")
    assert notes == ("gpu: a power limit of 200 W is not modelled for TPU-v5p",)
    assert set(BOARD_POWER_W) <= set(devices())


@pytest.mark.parametrize(
    "text", ["", "A100X", "MI300A", "L50", "GA100", "XGB200", "Quantum9", "T40", "cpuid"]
)
def test_an_unknown_device_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_named(text)
    assert caught.value.message == "is not a known device" and repr(text) == caught.value.found


@pytest.mark.parametrize("text", ["V100(12)+T4(4)", "A100 and V100", "8xH100/8xH200"])
def test_several_kinds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="several kinds of devices"):
        device_named(text)


def test_every_device_of_the_catalogue_is_found_by_its_name_within_a_text() -> None:
    for name, device in devices().items():
        assert device_named(name) == (device, ()), name
        assert device_named(f"my {name}")[0] == device, name
