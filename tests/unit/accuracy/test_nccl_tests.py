"""Output of nccl-tests: curves are recovered from tables that they gave, and missing parts of a table are
requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.accuracy import LinkSample, TierCurve, link_curve
from shardwise.accuracy.calibration import LinkCurve, collective_s, table_samples, with_link_fractions
from shardwise.accuracy.calibration.nccl_tests import TESTS, bus_factor, nccl_tables
from shardwise.cluster import Cluster, load_cluster
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
    ("cluster", "sizes"), [("2x8xA100-40G", (8, 2)), ("4x8xH100-SXM", (8, 4)), ("1x4xMI300X", (4,)),
                           ("1x8xH100-SXM", (8,)), ("1x4xA100-80G", (4,))],
)  # fmt: skip
def test_a_collective_over_tiers_takes_the_predicted_time(
    cluster: str, sizes: tuple[int, ...], test: str
) -> None:
    place = load_cluster(cluster)
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
    for label in ("[1,0]<stdout>:", "0: ", "    "):
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
