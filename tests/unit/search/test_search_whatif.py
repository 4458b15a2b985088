"""Changes of a question: the effect of each on the cluster or the job, and the errors."""

from __future__ import annotations

import pytest

from shardwise.cluster import Cluster, load_cluster
from shardwise.errors import ConfigError
from shardwise.model import load_model
from shardwise.search import Question
from shardwise.search.explanation import changed_question
from shardwise.strategy import Job

CLUSTER = load_cluster("2x8xH100-SXM")
QUESTION = Question(
    model=load_model("gpt2"), cluster=CLUSTER, job=Job(seq_len=1024, global_batch_size=64, dtype="bf16")
)


def changed(text: str, question: Question = QUESTION) -> Question:
    return changed_question(question, text)


def rates(cluster: Cluster) -> list[float]:
    return [tier.bytes_per_s for tier in cluster.tiers]


def test_a_faster_network_has_faster_network_cards() -> None:
    cluster = changed("inter_node_bandwidth=2x").cluster
    assert rates(cluster) == [rates(CLUSTER)[0], 2 * rates(CLUSTER)[1]]
    assert cluster.nodes[0].nic_bytes_per_s == 2 * CLUSTER.nodes[0].nic_bytes_per_s
    assert cluster.nodes[0] is cluster.nodes[1]


def test_an_absolute_network_is_that_of_the_option() -> None:
    """As `--inter-node 200Gb/s`: the bandwidth of a card."""
    expected = load_cluster("2x8xH100-SXM", inter_node="200Gb/s")
    cluster = changed("inter_node_bandwidth=200Gb/s").cluster
    assert rates(cluster) == pytest.approx(rates(expected))
    assert cluster.nodes[0].nic_bytes_per_s == 25e9


def test_the_fabric_inside_nodes() -> None:
    # NVLink 4 has 450 GB/s per device and direction.
    assert rates(changed("intra_node_bandwidth=900GB/s").cluster) == [900e9, rates(CLUSTER)[1]]


def test_devices_get_more_memory_and_compute() -> None:
    (before,) = CLUSTER.classes.values()
    (device,) = changed("memory=141GB,flops=0.5x").cluster.classes.values()
    assert device.memory_bytes == 141_000_000_000
    assert device.peak_flop_per_s == {name: 0.5 * peak for name, peak in before.peak_flop_per_s.items()}
    assert changed("host_memory=1TB").cluster.nodes[0].host_memory_bytes == 1e12


def test_more_and_fewer_nodes() -> None:
    assert changed("nodes=4").cluster.devices == changed("nodes=2x").cluster.devices == 32
    assert changed("nodes=3").cluster.devices == 24
    assert changed("nodes=1").cluster.devices == changed("devices=0.5x").cluster.devices == 8
    assert changed("devices=4").cluster.devices == 4
    assert changed("nodes=1x") == QUESTION


def test_the_job_changes() -> None:
    question = changed("seq_len=0.5x,global_batch_size=96")
    assert (question.job.seq_len, question.job.global_batch_size) == (512, 96)
    assert question.cluster is CLUSTER


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", "--what-if", "names no change"),
        ("bandwidth=2x", "--what-if", "is not known"),
        ("memry=2x", "--what-if", "did you mean memory?"),
        ("memory", "--what-if.memory", "needs a value"),
        ("memory=2x,memory=3x", "--what-if.memory", "given twice"),
        ("memory=2", "--what-if.memory", "has no unit"),
        ("memory=2s", "--what-if.memory", "has a unit that is not a size in bytes"),
        ("memory=-2x", "--what-if.memory", "has a unit that is not a size in bytes"),
        ("memory=0x", "--what-if.memory", "is out of range"),
        ("memory=0B", "--what-if.memory", "is out of range"),
        ("flops=200GB/s", "--what-if.flops", "has a unit that is not"),
        ("devices=9", "--what-if.devices", "not a part or multiple"),
        ("devices=0", "--what-if.devices", "not a whole number"),
        ("seq_len=0.3x", "--what-if.seq_len", "not a whole number"),
        ("nodes=two", "--what-if.nodes", "not a whole number"),
    ],
)
def test_an_impossible_change_is_refused(text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(text)
    assert caught.value.key == key
    assert message in caught.value.message


def test_one_node_has_no_network() -> None:
    alone = Question(model=QUESTION.model, cluster=load_cluster("1x8xH100-SXM"), job=QUESTION.job)
    with pytest.raises(ConfigError, match="no network"):
        changed("inter_node_bandwidth=2x", alone)
