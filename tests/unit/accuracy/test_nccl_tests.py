"""Output of nccl-tests: curves are recovered from tables that they gave, and missing parts of a table are
requested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.accuracy import LinkSample, TierCurve, link_curve
from shardwise.accuracy.calibration import LinkCurve, collective_s, table_samples, with_link_fractions
from shardwise.accuracy.calibration.nccl_tests import (
    TESTS,
    bus_factor,
    is_nccl_tests,
    nccl_tables,
    with_tables,
)
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.cost.collectives import CollectiveModel, collective_model_of
from shardwise.cost.problem import machine_of
from shardwise.errors import ConfigError
from shardwise.strategy import PROFILES

HEAD = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501
SIZES = tuple(2**power for power in range(20, 33, 3))


def run_head(hosts: Sequence[int], device: str = "NVIDIA H100 80GB HBM3") -> str:
    ranks = [(host, local) for host, count in enumerate(hosts) for local in range(count)]
    lines = [
        f"#  Rank {rank:2d} Group  0 Pid {1000 + rank} on node-{host} device {local:2d} [0x0] {device}"
        for rank, (host, local) in enumerate(ranks)
    ]
    return "\n".join(
        ["# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592", "#", "# Using devices", *lines, ""]
    )


def row(test: str, ranks: int, nbytes: int, seconds: float) -> str:
    kind = TESTS[test] or "message"
    parts = 1 if test in ("all_reduce", "sendrecv") else ranks
    redop = "sum" if "reduce" in test else "none"
    algbw = nbytes / seconds / 1e9
    times = f"{seconds * 1e6:10.6g}  {algbw:.2f}  {algbw * bus_factor(kind, ranks):.2f}      0"
    return f"{nbytes:12d}  {nbytes // 4 // parts:12d}  float  {redop}  -1  {times}  {times}\n"


def table(test: str, ranks: int, times: Sequence[tuple[int, float]]) -> str:
    rows = "".join(row(test, ranks, nbytes, seconds) for nbytes, seconds in times)
    return f"# Collective test starting: {test}_perf\n{HEAD}{rows}# Out of bounds values : 0 OK\n"


def fabric(cluster: Cluster) -> CollectiveModel:
    return collective_model_of(machine_of(cluster, "bf16", "adamw", PROFILES["fsdp2"]))


def model_s(on: CollectiveModel, test: str, nbytes: float, sizes: Sequence[int]) -> float:
    """Seconds by the cost model's fabric for a group with these members per tier."""
    columns = tuple(map(np.array, sizes))
    crossed = max(at for at, size in enumerate(sizes) if size > 1)
    seconds = {
        "all_reduce": lambda: on.all_reduce_s(nbytes, columns),
        "all_gather": lambda: on.all_gather_s(nbytes, columns),
        "reduce_scatter": lambda: on.reduce_scatter_s(nbytes, columns),
        "alltoall": lambda: on.all_to_all_s(nbytes, columns),
        "sendrecv": lambda: on.send_s(nbytes, np.array(crossed), 1),
    }[test]()
    return float(seconds)


ALL = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv")


@pytest.mark.parametrize("test", ALL)
@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [
        ("2x8xA100-40G", (8, 2)),
        ("2x8xA100-40G@4x100Gb/s", (8, 2)),
        ("4x8xH100-SXM", (8, 4)),
        ("1x4xMI300X", (4,)),
        ("1x8xH100-SXM", (8,)),
        ("1x4xA100-80G", (4,)),
    ],
)
def test_a_collective_over_tiers_takes_the_predicted_time(
    cluster: str, sizes: tuple[int, ...], test: str
) -> None:
    name, _, inter_node = cluster.partition("@")
    place = load_cluster(name, inter_node=inter_node or None)
    on = fabric(place)
    at = len(sizes) - 1
    link = LinkCurve(latency_s=on.alphas_s[at], startup_s=on.startups_s[at], bytes_per_s=on.bytes_per_s[at])
    per_node = place.nodes[0].devices
    hosts = (per_node,) * (place.devices // per_node)
    times = [(nbytes, model_s(on, test, nbytes, sizes)) for nbytes in SIZES]
    (read,) = nccl_tables(run_head(hosts) + table(test, place.devices, times), file="x.txt")
    tier, samples = table_samples("x.txt", read, place)
    assert tier == at
    for sample, (_, seconds) in zip(samples, times, strict=True):
        assert sample.has_two_trees == (test == "all_reduce" and len(hosts) == 2)
        if sample.has_two_trees and not inter_node:
            # Eight cards of 25 GB/s at 0.945 have 189 GB/s, in each direction once. The six links of a device
            # inside have 300 GB/s at 0.729, and two tensors to send: 109 GB/s, below those of the cards.
            assert seconds > collective_s(link, sample)
        else:
            assert collective_s(link, sample) == pytest.approx(seconds, rel=1e-9), sample


def test_a_mutant_that_ignores_shared_network_cards_is_caught() -> None:
    link = LinkCurve(latency_s=1e-5, startup_s=1e-5, bytes_per_s=25e9)
    sample = LinkSample(kind="all_reduce", ranks=16, nbytes=1e9, seconds=1.0, inner=8)
    # 2 * 15/16 * 1e9 / (8 * 25e9) = 9.375 ms, and 30 hops of 10 us + 10 us = 0.31 ms
    assert collective_s(link, sample) == pytest.approx(9.685e-3, rel=1e-12)
    assert collective_s(link, replace(sample, inner=1)) > 7 * 9.685e-3


def test_known_figures_of_links_are_recovered_from_a_table() -> None:
    """Between nodes: 80 % of the cards, 12 us per hop, 40 us per collective, as the fabric itself
    predicts.
    """
    place = load_cluster("4x8xA100-40G")
    device = place.classes["A100-40G"]
    of = replace(device.efficiency.scale_out, fraction=0.8, startup_s=4e-5)
    true = replace(device, scale_out_latency_s=1.2e-5,
                   efficiency=replace(device.efficiency, scale_out=of))  # fmt: skip
    on = fabric(load_cluster("4x8xA100-40G", measured={"A100-40G": true}))
    samples = []
    for test in ("all_reduce", "all_gather"):
        times = [(nbytes, model_s(on, test, nbytes, (8, 4))) for nbytes in SIZES]
        (read,) = nccl_tables(run_head((8,) * 4) + table(test, 32, times), file="x.txt")
        samples += table_samples("x.txt", read, place)[1]
    found = with_link_fractions(device, [TierCurve(tier=place.tiers[1], curve=link_curve(samples), groups=4)])
    assert found.efficiency.scale_out.fraction == pytest.approx(0.8, rel=1e-3)
    assert found.efficiency.scale_out.startup_s == pytest.approx(4e-5, rel=0.02)
    assert found.scale_out_latency_s == pytest.approx(1.2e-5, rel=0.02)
    assert found.efficiency.scale_up == device.efficiency.scale_up


RANKS = "".join(
    f"#  Rank {rank:2d} Group  0 Pid {204199 + rank} on  node{rank // 8} device {rank % 8:2d} [0000:00:00] "
    "NVIDIA H100 80GB HBM3\n"
    for rank in range(16)
)
TWO_NODES = f"""\
# all_reduce_perf
{RANKS}{HEAD}\
   268435456      67108864     float     sum      -1   2360.9  113.70  213.19      0   2359.9  113.75  213.28      0
   536870912     134217728     float     sum      -1   3817.5  140.63  263.69      0   3828.0  140.25  262.97      0
  1073741824     268435456     float     sum      -1   6759.0  158.86  297.86      0   6737.4  159.37  298.82      0
  2147483648     536870912     float     sum      -1    12646  169.81  318.40      0    12641  169.88  318.52      0
  4294967296    1073741824     float     sum      -1    24361  176.31  330.58      0    24365  176.27  330.51      0
  8589934592    2147483648     float     sum      -1    47535  180.71  338.82      0    47743  179.92  337.35      0
"""  # noqa: E501
LARGE_ONLY = f"""\
./build/sendrecv_perf -b 128M -e 1G -f 2 -g 8
{HEAD}\
   134217728      33554432     float     sum      -1   1211.2  110.81  110.81      0   1211.8  110.76  110.76    N/A
   268435456      67108864     float     sum      -1   1423.3  188.60  188.60      0   1420.2  189.01  189.01    N/A
   536870912     134217728     float     sum      -1   2785.4  192.75  192.75      0   2772.2  193.66  193.66    N/A
  1073741824     268435456     float     sum      -1   5503.4  195.10  195.10      0   5490.5  195.56  195.56    N/A
"""  # noqa: E501


def calibrated(text: str, place: Cluster, file: str = "x.log") -> tuple[Device, Mapping[str, Any]]:
    (device,) = place.classes.values()
    found, measured = with_tables(device, place, [(file, each) for each in nccl_tables(text, file=file)])
    ((_, record),) = measured.items()
    assert isinstance(record, dict)
    return found, record


def test_an_all_reduce_between_two_nodes_uses_at_most_all_of_their_cards() -> None:
    """Eight cards of 25 GB/s a node are 200 GB/s. 8 GiB in 47,535 us are 180.7 GB/s, 90 % of them: each of
    NCCL's two trees sends half of the tensor once in each direction. As a ring they would be 170 %."""
    place = load_cluster("2x8xH100-SXM", inter_node="200Gb/s")
    known = place.classes["H100-SXM"]
    found, record = calibrated(TWO_NODES, place)
    # Less 2 log2(16) hops of 4 us and 43 us of start: 8589934592 / (47535 - 75) us / 200 GB/s = 0.905.
    assert record["of_cards"] == pytest.approx(0.905, abs=5e-4)
    # The fraction of the device is without the loss by two senders, 2^-0.054.
    crowding = known.efficiency.scale_out.crowding
    assert found.efficiency.scale_out.fraction == pytest.approx(0.905 * 2.0**crowding, abs=1e-3)
    assert found.efficiency.scale_out.fraction <= 1.0
    # 256 MiB take 1.5 ms of bytes: they do not show 75 us.
    assert record["latency"] == "kept, since collectives of 256 MiB and more do not show it"
    assert found.scale_out_latency_s == known.scale_out_latency_s
    assert found.efficiency.scale_out.startup_s == known.efficiency.scale_out.startup_s


@pytest.mark.parametrize(("per_cent", "algbw"), [(170, 180.7), (140, 140.3), (103, 116.5)])
def test_bus_bandwidth_over_cards_is_no_share_of_them(per_cent: int, algbw: float) -> None:
    """busbw is size / time times 15/8 for 16 ranks: 103, 140 and 170 % of the cards are 58, 70 and 90 %."""
    place = load_cluster("2x8xH100-SXM", inter_node="200Gb/s")
    times = [(2**power, 2**power / (algbw * 1e9)) for power in range(30, 34)]
    _, record = calibrated(run_head((8, 8)) + table("all_reduce", 16, times), place)
    assert record["of_cards"] == pytest.approx(algbw / 200.0, rel=3e-3)
    assert record["of_cards"] < 1.0 < per_cent / 100


def test_messages_of_128_mib_do_not_show_the_latency() -> None:
    """1 GiB in 5503 us is 195.1 GB/s; one hop of 1.9 us and 11 us of start are 0.2 % of it."""
    place = load_cluster("1x8xA100-80G")
    known = place.classes["A100-80G"]
    found, record = calibrated(LARGE_ONLY, place)
    rate = found.efficiency.scale_up.fraction * known.scale_up_bytes_per_s
    assert rate == pytest.approx(195.1e9, rel=4e-3)
    assert found.scale_up_latency_s == known.scale_up_latency_s
    assert record["latency"] == "kept, since collectives of 128 MiB and more do not show it"
    # A message of 1 MiB in 20 us shows it: 5.4 us of bytes, 13 us of the rest.
    small = LARGE_ONLY + row("sendrecv", 8, 2**20, 2e-5)
    found, record = calibrated(small, place)
    assert "latency" not in record
    assert found.efficiency.scale_up.startup_s + found.scale_up_latency_s == pytest.approx(1.4e-5, rel=0.2)


def test_what_is_faster_than_the_cards_is_taken_as_all_of_them() -> None:
    """Four nodes, 240 GB/s by a ring over 200 GB/s of cards: a switch reduces, or the cards are others."""
    place = load_cluster("4x8xH100-SXM", inter_node="200Gb/s")
    times = [(2**power, 2**power / 180e9) for power in range(30, 34)]
    found, record = calibrated(run_head((8,) * 4) + table("all_reduce", 32, times), place)
    assert record["of_cards"] > 1.5
    assert record["faster"] == "than its cards, so taken as 100 %"
    assert found.efficiency.scale_out.fraction == 1.0


MARKDOWN = """\
## Results of all_reduce_perf

| size (B) | count (elements) | type | redop | root | time (us) | algbw (GB/s) | busbw (GB/s) | #wrong |
|---:|---:|:---|:---|---:|---:|---:|---:|---:|
| 268435456 | 67108864 | float | sum | -1 | 2360.9 | **113.70** | 213.19 | 0 |
| 536870912 | 134217728 | float | sum | -1 | 3817.5 | 140.63 | 263.69 | 0 |
| 8589934592 | 2147483648 | float | sum | -1 | 47535 | 180.71 | 338.82 | 0 |

The last row is 90 % of the cards.
"""


def test_output_in_markdown_is_read() -> None:
    quoted = "# Run\n\n```\n" + "".join(f"{line}\n" for line in TWO_NODES.splitlines()) + "```\n\nDone.\n"
    (read,) = nccl_tables(quoted, file="x.md")
    (plain,) = nccl_tables(TWO_NODES, file="x.txt")
    assert replace(read, place=plain.place) == plain and read.hosts == (8, 8)
    assert is_nccl_tests(MARKDOWN) and is_nccl_tests(quoted)
    (bars,) = nccl_tables(MARKDOWN, file="x.md")
    assert (bars.kind, bars.place, bars.times[-1]) == ("all_reduce", "line 5", (8589934592.0, 47535e-6))
    with pytest.raises(ConfigError, match=r"line 6.*another number of columns"):
        nccl_tables(MARKDOWN.replace(" 3817.5 |", ""), file="x.md")


def as_json(**changes: Any) -> dict[str, Any]:
    """Output of `all_gather_perf -J`, version 3 (nccl-tests 2.19.6), with iterations timed one by one."""
    rows = []
    for nbytes, median in ((2**20, 2e-5), (2**25, 2e-4), (2**30, 5e-3)):
        us = median * 1e6
        body = {"time": us, "alg_bw": nbytes / median / 1e9, "bus_bw": nbytes / median / 1e9 * 7 / 8}
        each = {
            "skipped_iterations": 0,
            "min_us": us * 0.98,
            "p50_us": us,
            "p95_us": us * 1.1,
            "times_us": [us],
        }
        rows.append(
            {
                "size": nbytes, "count": nbytes // 32, "type": "float", "redop": "none", "root": "    -1",
                "out_of_place": {**body, "nwrong": 0.0}, "out_of_place_per_iter": each,
                "in_place": {**body, "nwrong": None}, "actual_iterations": 20,
            }
        )  # fmt: skip
    ranks = [
        {"rank": at, "group": 0, "pid": 7, "hostname": "gpu-1", "device": at, "device_hex": "0x00",
         "device_info": "NVIDIA H100 80GB HBM3"} for at in range(8)
    ]  # fmt: skip
    document = {
        "version": 3, "start_time": "2026-07-09 16:03:21", "args": ["./build/all_gather_perf", "-g", "8"],
        "env": ["HOME=/root"], "nccl_version": 22907, "config": {"ngpus": 8, "devices": ranks},
        "results": rows, "out_of_bounds": {"count": 0, "okay": "true"}, "errors": [],
    }  # fmt: skip
    return document | changes


def test_json_of_nccl_tests_has_the_table_and_its_spread() -> None:
    text = json.dumps(as_json())
    assert is_nccl_tests(text)
    (read,) = nccl_tables(text, file="out.txt")
    assert (read.kind, read.hosts, read.hostnames) == ("all_gather", (8,), ("gpu-1",))
    assert [nbytes for nbytes, _ in read.times] == [2.0**20, 2.0**25, 2.0**30]
    assert [seconds for _, seconds in read.times] == pytest.approx([2e-5, 2e-4, 5e-3])
    assert read.spread == pytest.approx(1.1)
    found, record = calibrated(text, load_cluster("1x8xH100-SXM"))
    assert record["p95_over_median"] == pytest.approx(1.1)
    # 2^30 x 7/8 bytes in 5 ms are 187.9 GB/s of 450.
    assert found.efficiency.scale_up.fraction == pytest.approx(187.9 / 450, rel=0.02)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"results": []}, "results: has the wrong length"),
        ({"args": ["./build/broadcast_perf"]}, "results: has no measured collectives"),
        ({"version": "x"}, "version: is not a whole number"),
        ({"results": [{"size": 8, "out_of_place": {"cpu_time": 3.0}}]}, r"results\[0\]: has CPU times"),
        ({"results": [{"size": 8, "out_of_place": {"time": 3.0, "nwrong": 2.0}}]}, "has wrong results"),
        ({"results": [{"size": 8, "count": 2, "type": "float", "out_of_place":
                       {"time": 1.0, "alg_bw": 99.0, "bus_bw": 99.0}}]}, r"results\[0\].*size / time"),
    ],
)  # fmt: skip
def test_json_that_is_wrong_is_refused_with_the_place(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        nccl_tables(json.dumps(as_json(**change)), file="out.json")
    assert caught.value.file == "out.json"
    with pytest.raises(ConfigError, match="is not valid JSON"):
        nccl_tables(json.dumps(as_json())[:-20], file="out.json")


TIMES = [(nbytes, 1e-4 + nbytes / 1e11) for nbytes in SIZES]


def test_the_header_of_a_run_is_read() -> None:
    text = "srun: job 7\n" + run_head((8, 8)) + table("all_gather", 16, TIMES) + table("broadcast", 16, TIMES)
    text += "./build/alltoall_perf -g 1\n" + run_head((4,), "NVIDIA A100-SXM4-80GB")
    text += table("alltoall", 4, TIMES)
    first, second = nccl_tables(text, file="x.txt")
    assert (first.kind, first.hosts, first.device) == ("all_gather", (8, 8), "NVIDIA H100 80GB HBM3")
    assert (second.kind, second.hosts, second.device) == ("all_to_all", (4,), "NVIDIA A100-SXM4-80GB")
    assert [nbytes for nbytes, _ in first.times] == list(map(float, SIZES))
    assert [seconds for _, seconds in first.times] == pytest.approx([each for _, each in TIMES], rel=1e-5)


def test_labels_of_launchers_do_not_matter() -> None:
    text = run_head((8,)) + table("all_reduce", 8, TIMES)
    plain = nccl_tables(text, file="x.txt")
    labels = (
        "[1,0]<stdout>:", "[1, 0]<stdout>: ", "[prterun-gpu-1-77@1,0]<stdout>:", "0: ", "    ", "> ",
        "gpu-1: ",
        "[pod/nccl-launcher-x/main] ", "2026-05-01T12:00:00.123456Z ",
    )  # fmt: skip
    for label in labels:
        labelled = "\n".join(label + line for line in text.splitlines())
        assert nccl_tables(labelled, file="x.txt") == plain


def test_a_table_alone_determines_its_collective_where_it_can() -> None:
    for test in ("all_reduce", "reduce_scatter", "sendrecv"):
        text = table(test, 8, TIMES).split("\n", 1)[1]
        (read,) = nccl_tables(text, file="x.txt")
        assert (read.kind, read.hosts) == (TESTS[test], ())
    text = table("alltoall", 8, TIMES).split("\n", 1)[1]
    with pytest.raises(ConfigError, match=r"line \d+.*alltoall_perf"):
        nccl_tables(text, file="x.txt")
    (read,) = nccl_tables(text, file="nodes-2/all_gather-16.txt")
    assert (read.kind, read.ranks) == ("all_gather", 8)


def test_more_elements_than_bytes_are_refused() -> None:
    # 4 GiB are 2**30 floats, of which a rank of eight has 2**27; three times 2**30 fits no rank.
    text = table("all_gather", 8, TIMES)
    with pytest.raises(ConfigError, match=r"line \d+.*has more elements"):
        nccl_tables(text.replace(f"{2**27}  float", f"{3 * 2**30}  float"), file="x.txt")


GOOD = run_head((8,)) + table("all_reduce", 8, TIMES)
LINE = GOOD[: GOOD.index("1048576")].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ("      0  ", "      3  ", LINE, "wrong results"),
        ("  -1  ", "  -1  -1  ", LINE, "another number of columns"),
        ("  9.49  ", "  94.9  ", LINE, "other than size / time"),
        ("  16.61      0", "  9.60      0", LINE, "another busbw than all_reduce on 8 ranks"),
        ("110.486  ", "nan  ", LINE, "no number in the column time"),
        ("110.486  ", "0.00  ", LINE, "a time out of range"),
        ("110.486  ", "-3  ", LINE, "no number in the column time"),
        ("1048576  ", "9" * 40 + "  ", LINE, "no number in the column size"),
        (" Rank  3", " Rank  5", 7, "is not the next rank"),
        ("Group  0", "Group  1", 4, "several groups"),
        ("    time ", "cputime ", LINE - 2, "has CPU times"),
        ("   algbw ", "   bw ", LINE - 2, "not all columns"),
        ("      type ", "      type\x1b", LINE - 2, "not all columns"),
    ],
)
def test_a_line_that_is_wrong_is_named(old: str, new: str, line: int, why: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        nccl_tables(GOOD.replace(old, new, 2 if "tim" in new or "bw" in new else 1), file="x.txt")
    assert why in caught.value.message and caught.value.file == "x.txt"
    assert caught.value.key == f"line {line}"


def test_text_without_a_table_is_refused() -> None:
    for text in ("", "hello\n", run_head((8,)), table("broadcast", 8, TIMES)):
        with pytest.raises(ConfigError, match="no table"):
            nccl_tables(text, file="x.txt")
    with pytest.raises(ConfigError, match="no rows"):
        nccl_tables(HEAD, file="x.txt")


@pytest.mark.slow
@given(st.data())
def test_damaged_output_is_read_or_refused(data: st.DataObject) -> None:
    """Any truncation and any replaced character gives a table or a ConfigError, nothing else."""
    at = data.draw(st.integers(0, len(GOOD) - 1))
    put = data.draw(
        st.text(max_size=4) | st.sampled_from(["\n", "\x00", "# Rank 0 Pid 1 on a device 0 [] x\n"])
    )
    until = data.draw(st.integers(at, min(at + 40, len(GOOD))))
    try:
        found = nccl_tables(GOOD[:at] + put + GOOD[until:], file="x.txt")
    except ConfigError:
        return
    assert all(seconds > 0.0 for each in found for _, seconds in each.times)
