"""(b) Better hardware, or a weaker constraint, never gives a slower plan.

Where other nodes make other pools, the gradient norm over idle devices may cost an uneven plan more; that is
left out (`idle_norm_s`).
"""

from __future__ import annotations

from dataclasses import replace

from tests.relations.clusters import ClusterData, Nodes
from tests.relations.commands import Commands, File
from tests.relations.questions import Question
from tests.relations.relation import (
    has_network,
    idle_norm_s,
    is_mixed_plan,
    is_plan,
    relation,
    require_not_slower,
)

from shardwise.cluster import find_device


def _require_not_slower(question: Question, shardwise: Commands, better: ClusterData, what: str) -> None:
    """The better cluster is not slower than the question's, both written as files."""
    own = question.cluster.with_explicit_cards()
    worse = shardwise.answer(question.words(cluster=("--cluster", own.file())))
    answer = shardwise.answer(question.on(better).words())
    require_not_slower(answer, worse, what=what, bound_s=idle_norm_s(question.on(better), answer))


@relation(has_network)
def more_bandwidth_between_nodes(question: Question, shardwise: Commands) -> None:
    """Cards of twice the bandwidth on all nodes, and network tiers."""
    cluster = question.cluster.with_explicit_cards()
    faster = cluster.changed(lambda run: replace(run, card_bytes_per_s=2.0 * (run.card_bytes_per_s or 0.0)))
    tiers = tuple(
        replace(tier, bytes_per_s=2.0 * tier.bytes_per_s) if tier.is_network and tier.bytes_per_s else tier
        for tier in cluster.tiers
    )
    _require_not_slower(question, shardwise, replace(faster, tiers=tiers), "more bandwidth between nodes")


@relation(lambda question: is_mixed_plan(question) and has_network(question))
def more_bandwidth_of_a_pool(question: Question, shardwise: Commands) -> None:
    """Cards of four times the bandwidth on the nodes of one entry."""
    cluster = question.cluster.with_explicit_cards()
    chosen = question.rng("more bandwidth of a pool").choice(cluster.nodes)
    faster = replace(chosen, card_bytes_per_s=4.0 * (chosen.card_bytes_per_s or 0.0))
    better = cluster.changed(lambda run: faster if run == chosen else run)
    _require_not_slower(question, shardwise, better, "more bandwidth of one pool")


@relation(lambda question: not question.cluster.tiers)
def more_bandwidth_inside(question: Question, shardwise: Commands) -> None:
    """Scale-up fabrics of one and a half times the bandwidth."""

    def faster(run: Nodes) -> Nodes:
        return replace(run, scale_up_bytes_per_s=1.5 * find_device(run.device).scale_up_bytes_per_s)

    better = question.cluster.with_explicit_cards().changed(faster)
    _require_not_slower(question, shardwise, better, "more bandwidth inside nodes")


@relation(lambda _: True)
def less_latency(question: Question, shardwise: Commands) -> None:
    """Half of the latency, inside nodes and between them."""

    def sooner(run: Nodes) -> Nodes:
        known = find_device(run.device)
        inside_s, between_s = known.scale_up_latency_s / 2.0, known.scale_out_latency_s / 2.0
        return replace(run, scale_up_latency_s=inside_s, scale_out_latency_s=between_s)

    cluster = question.cluster.with_explicit_cards().changed(sooner)
    tiers = tuple(replace(tier, latency_s=tier.latency_s / 2.0) for tier in cluster.tiers)
    _require_not_slower(question, shardwise, replace(cluster, tiers=tiers), "less latency")


@relation(lambda _: True)
def more_memory(question: Question, shardwise: Commands) -> None:
    """Devices with one and a half times the memory."""

    def larger(run: Nodes) -> Nodes:
        now = run.memory_bytes or find_device(run.device).memory_bytes
        return replace(run, memory_bytes=float(round(1.5 * now)))

    _require_not_slower(
        question, shardwise, question.cluster.with_explicit_cards().changed(larger), "more memory"
    )


@relation(is_mixed_plan)
def more_memory_of_a_pool(question: Question, shardwise: Commands) -> None:
    """Devices of one entry with four times the memory."""
    cluster = question.cluster.with_explicit_cards()
    chosen = question.rng("more memory of a pool").choice(cluster.nodes)
    now = chosen.memory_bytes or find_device(chosen.device).memory_bytes
    larger = replace(chosen, memory_bytes=4.0 * now)
    _require_not_slower(
        question,
        shardwise,
        cluster.changed(lambda run: larger if run == chosen else run),
        "more memory of a pool",
    )


@relation(lambda _: True)
def more_speed(question: Question, shardwise: Commands) -> None:
    """All devices are a quarter faster."""
    cluster = question.cluster.with_explicit_cards()
    better = cluster.changed(lambda run: replace(run, speed=1.25 * (run.speed or 1.0)))
    _require_not_slower(question, shardwise, better, "more speed")


@relation(is_mixed_plan)
def more_speed_of_a_pool(question: Question, shardwise: Commands) -> None:
    """The devices of one entry are twice as fast."""
    cluster = question.cluster.with_explicit_cards()
    chosen = question.rng("more speed of a pool").choice(cluster.nodes)
    faster = replace(chosen, speed=2.0 * (chosen.speed or 1.0))
    _require_not_slower(
        question,
        shardwise,
        cluster.changed(lambda run: faster if run == chosen else run),
        "more speed of a pool",
    )


@relation(lambda question: question.cluster.devices > 1 and is_plan(question))
def a_slower_node(question: Question, shardwise: Commands) -> None:
    """One node at 0.6 of its speed never makes a step shorter."""
    cluster = question.cluster.with_explicit_cards()
    chosen = question.rng("a slower node").randrange(len(cluster.nodes))
    nodes = []
    for place, run in enumerate(cluster.nodes):
        if place == chosen:
            nodes.append(replace(run, count=1, speed=0.6 * (run.speed or 1.0)))
            run = replace(run, count=run.count - 1)
        nodes += [run] if run.count else []
    slower = shardwise.answer(question.on(replace(cluster, nodes=tuple(nodes))).words())
    own = shardwise.answer(question.words(cluster=("--cluster", cluster.file())))
    require_not_slower(own, slower, what="a slower node", bound_s=idle_norm_s(question, own))


@relation(lambda question: is_plan(question) and not question.cluster.tiers)
def one_more_node(question: Question, shardwise: Commands) -> None:
    """One more node of one entry."""
    cluster = question.cluster.with_explicit_cards()
    chosen = question.rng("one more node").choice(cluster.nodes)
    more = replace(chosen, count=chosen.count + 1)
    _require_not_slower(
        question, shardwise, cluster.changed(lambda run: more if run == chosen else run), "one more node"
    )


@relation(lambda _: True)
def a_smaller_margin(question: Question, shardwise: Commands) -> None:
    """No memory margin, instead of 0.2."""
    better = shardwise.answer(question.words(memory_margin="0.0"))
    worse = shardwise.answer(question.words(memory_margin="0.2"))
    require_not_slower(better, worse, what="a smaller margin")


@relation(is_plan)
def experts_in_balance(question: Question, shardwise: Commands) -> None:
    """The busiest expert has the mean load, instead of 1.3 times as much."""
    better = shardwise.answer(question.words(expert_imbalance="1.0"))
    worse = shardwise.answer(question.words(expert_imbalance="1.3"))
    require_not_slower(better, worse, what="experts in balance")


@relation(is_plan)
def a_larger_space(question: Question, shardwise: Commands) -> None:
    """The default space contains the core space."""
    better = shardwise.answer(question.words(space=None))
    worse = shardwise.answer(question.words(space="core"))
    require_not_slower(better, worse, what="a larger space")


@relation(is_plan)
def nothing_fixed(question: Question, shardwise: Commands) -> None:
    """All values of a field, instead of a fixed one."""
    fix = question.rng("nothing fixed").choice(("tp=1", "pp=1", "recompute=none", "zero_stage=0", "vpp=1"))
    better = shardwise.answer(question.words(fix=None))
    require_not_slower(better, shardwise.answer(question.words(fix=fix)), what="nothing fixed")


@relation(is_plan)
def more_values_of_an_axis(question: Question, shardwise: Commands) -> None:
    """A space file with more values on two axes."""
    base = question.space

    def space(tp: list[int], recompute: list[str]) -> File:
        return File("space", {"base": base, "axes": {"tp": tp, "recompute": recompute}})

    more, fewer = space([1, 2, 4], ["none", "full", "selective"]), space([1, 2], ["none", "full"])
    words = question.words(space=None, fix=None)
    better, worse = (shardwise.answer((*words, "--space", file)) for file in (more, fewer))
    require_not_slower(better, worse, what="more values of an axis")


@relation(lambda question: is_mixed_plan(question) and question.space == "default")
def shared_rows(question: Question, shardwise: Commands) -> None:
    """Replicas that divide the samples of a micro-batch, and mixed-pool stages, only add plans."""
    better = shardwise.answer(question.words(fix=None, stage_dp="2", braid="2"))
    require_not_slower(better, shardwise.answer(question.words(fix=None)), what="shared rows")
