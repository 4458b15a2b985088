"""(a) Equivalent statements of a question have the same answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.relations.clusters import ClusterData, Nodes, Tier, bytes_per_s, number
from tests.relations.commands import Answer, Commands, File, Word
from tests.relations.questions import Question
from tests.relations.relation import (
    figures,
    has_network,
    is_mixed,
    is_plan,
    is_uniform_plan,
    relation,
    require,
    require_equivalent,
    require_same,
    whole,
)

from shardwise.cluster import find_device, load_cluster


def _has_equal_nodes(question: Question) -> bool:
    return any(run.count > 1 for run in question.cluster.nodes)


@relation(is_mixed)
def entries_in_another_order(question: Question, shardwise: Commands) -> None:
    """The entries of `nodes` in reverse order."""
    reordered = replace(question.cluster, nodes=question.cluster.nodes[::-1])
    one, other = shardwise.answer(question.words()), shardwise.answer(question.on(reordered).words())
    require_equivalent(one, other, what="entries in another order")


@relation(lambda question: is_mixed(question) and _has_equal_nodes(question))
def nodes_in_another_order(question: Question, shardwise: Commands) -> None:
    """Nodes of different entries in another order: A A B B as A B A B."""
    rng = question.rng("nodes in another order")
    singles = [replace(run, count=1) for run in question.cluster.nodes for _ in range(run.count)]
    rng.shuffle(singles)
    reordered = replace(question.cluster, nodes=tuple(singles))
    one, other = shardwise.answer(question.words()), shardwise.answer(question.on(reordered).words())
    require_equivalent(one, other, what="nodes in another order")


@relation(_has_equal_nodes)
def an_entry_in_two(question: Question, shardwise: Commands) -> None:
    """An entry of several nodes, split into two equal entries."""
    cluster = question.cluster
    at = next(place for place, run in enumerate(cluster.nodes) if run.count > 1)
    run = cluster.nodes[at]
    halves = (replace(run, count=1), replace(run, count=run.count - 1))
    split = replace(cluster, nodes=(*cluster.nodes[:at], *halves, *cluster.nodes[at + 1 :]))
    one, other = shardwise.answer(question.words()), shardwise.answer(question.on(split).words())
    require_same(one, other, what="an entry in two", figures=whole)


@relation(lambda _: True)
def other_names(question: Question, shardwise: Commands) -> None:
    """Other names of the cluster, of each entry of nodes, and of each device class."""
    cluster = question.cluster.with_explicit_cards()
    document = cluster.document()
    classes: dict[str, dict[str, Any]] = {}
    for place, node in enumerate(document["nodes"]):
        own = document.get("classes", {}).get(node["device"], {"device": node["device"]})
        called = next((name for name, known in classes.items() if known == own), f"class {len(classes)}")
        classes[called] = own
        node |= {"device": called, "name": f"rack {place}"}
    renamed = {**document, "name": "another name", "classes": classes}
    one = shardwise.answer(question.words(cluster=("--cluster", cluster.file())))
    other = shardwise.answer(question.words(cluster=("--cluster", File("cluster", renamed))))
    require_same(one, other, what="other names", figures=whole)


@relation(lambda _: True)
def other_units(question: Question, shardwise: Commands) -> None:
    """Bandwidths in bytes, in gigabytes and in gigabits."""
    cluster = question.cluster.with_explicit_cards()
    one, two, three = (
        shardwise.answer(question.words(cluster=("--cluster", cluster.file(unit=unit))))
        for unit in (
            bytes_per_s,
            lambda rate: f"{number(rate)} B/s",
            lambda rate: f"{number(rate * 8 / 1e9)}Gbit/s",
        )
    )
    require_same(one, two, what="gigabytes and bytes", figures=whole)
    require_same(one, three, what="gigabytes and gigabits", figures=whole)


@relation(lambda question: question.cluster.has_shorthand)
def shorthand_or_file(question: Question, shardwise: Commands) -> None:
    """A shorthand, and a file with the same nodes."""
    one = shardwise.answer(question.words())
    other = shardwise.answer(question.words(cluster=("--cluster", question.cluster.file())))
    require_same(one, other, what="shorthand or file", figures=whole)


@relation(lambda question: is_uniform_plan(question) and question.cluster.has_shorthand)
def devices_or_nodes_of_them(question: Question, shardwise: Commands) -> None:
    """`5xT4` is a node of the default four devices and one of the rest: `1x4xT4+1x1xT4`."""
    run = question.cluster.nodes[0]
    sizes = (find_device(run.device).devices_per_node, 1)
    nodes = tuple(Nodes(device=run.device, count=1, devices=size) for size in sizes)
    whole_nodes = replace(question.cluster, nodes=nodes)
    core_question = replace(question, options={**question.options, "--space": "core"})
    network = whole_nodes.words()[2:]
    one = shardwise.answer(core_question.on(whole_nodes).words())
    counted = f"{whole_nodes.devices}x{run.device}"
    other = shardwise.answer(core_question.words(cluster=("--cluster", counted, *network)))
    require_same(one, other, what="devices or nodes of them", figures=whole)


def _is_one_fabric(question: Question) -> bool:
    cluster = question.cluster
    return (
        is_uniform_plan(question) and cluster.devices > 1 and (cluster.node_count == 1 or _is_flat(cluster))
    )


def _is_flat(cluster: ClusterData) -> bool:
    return cluster.nodes[0].devices == 1


@relation(_is_one_fabric)
def links_equal_to_tiers(question: Question, shardwise: Commands) -> None:
    """One tier over all devices, and a switch with a link of the same bandwidth to each device.

    In a ring over the switch, each hop uses one uplink and one downlink of its own. Proofs are not compared:
    links are estimated as tiers, and such answers are never proven.
    """
    devices, rate, latency_s = question.cluster.devices, 2.5e10, 4e-6
    tier = Tier(name="all", span="cluster", latency_s=latency_s, bytes_per_s=rate, is_network=False)
    tiers = replace(question.cluster.with_explicit_cards(), tiers=(tier,))
    links = replace(tiers, tiers=()).file(
        switches=["s0"], links=_links([("s0", f"d{rank}") for rank in range(devices)], rate, latency_s / 2.0)
    )
    one = shardwise.answer(question.words(cluster=("--cluster", tiers.file())))
    other = shardwise.answer(question.words(cluster=("--cluster", links)))
    require_same(one, other, what="links that form the tiers", figures=_best)


def _best(answer: Answer) -> Any:
    """The best result of an answer, without its proof."""
    return figures(answer)["best"] if answer.fits else None


def _links(pairs: list[tuple[str, str]], rate: float, latency_s: float) -> list[dict[str, str]]:
    same = {"bandwidth": bytes_per_s(rate), "latency": f"{latency_s!r}s"}
    return [{"from": source, "to": target, **same} for source, target in pairs]


@relation(lambda question: is_uniform_plan(question) and question.cluster.node_count > 3)
def links_in_another_order(question: Question, shardwise: Commands) -> None:
    """Nodes of two racks, rack by rack or interleaved.

    Racks of equally many nodes are a tier, whatever the order of the nodes. Other links are estimated by a
    ring over the devices in their order, so the order of nodes changes the estimate
    (docs/reference/formats.md). Such an answer must not be called proven.
    """
    run, count = question.cluster.nodes[0], question.cluster.node_count

    def racks(rack_of_node: list[int]) -> tuple[Word, ...]:
        node_links = [(f"s{rack}", f"n{node}") for node, rack in enumerate(rack_of_node)]
        inside = [(f"n{rank // run.devices}", f"d{rank}") for rank in range(count * run.devices)]
        links = [
            *_links(inside, 1e11, 1e-6),
            *_links(node_links, 2.5e10, 2e-6),
            *_links([("s0", "s2"), ("s1", "s2")], 5e9, 5e-6),
        ]
        return (
            "--cluster",
            question.cluster.with_explicit_cards().file(switches=["s0", "s1", "s2"], links=links),
        )

    question = replace(question, cluster=replace(question.cluster, tiers=()))
    contiguous = shardwise.answer(question.words(cluster=racks([node * 2 // count for node in range(count)])))
    interleaved = shardwise.answer(question.words(cluster=racks([node % 2 for node in range(count)])))
    if (
        contiguous.fits
        and abs(contiguous.step_time_s - interleaved.step_time_s) > 1e-9 * interleaved.step_time_s
    ):
        is_proven = contiguous.document["is_proven"] or interleaved.document["is_proven"]
        require(count % 2 == 1, "links of equal racks in another order", contiguous, interleaved)
        found = f"{contiguous.step_time_s!r} and {interleaved.step_time_s!r} s, called proven"
        require(not is_proven, f"links in another order: {found}", contiguous, interleaved)


@relation(is_plan)
def explicit_defaults(question: Question, shardwise: Commands) -> None:
    """All options given with their default values."""
    explicit_options = {
        "optimizer": "adamw", "memory_margin": "0.05", "expert_imbalance": "1.1", "space": "default",
        "objective": "time", "top": "8", "workers": "1", "stage_dp": "1", "braid": "1",
    }  # fmt: skip
    plain = {**dict.fromkeys(explicit_options), "space": question.options.get("--space")}
    one = shardwise.answer(question.with_options(plain).words())
    job = one.document.get("job", {})
    all_options = {**explicit_options, "space": question.space, **({"dtype": job["dtype"]} if job else {})}
    other = shardwise.answer(question.with_options(all_options).words())
    require_same(one, other, what="explicit defaults", figures=whole)
    if one.fits:
        hashes = one.document["plan_hash"], other.document["plan_hash"]
        require(hashes[0] == hashes[1], f"explicit defaults: hashes {hashes}", one, other)


@relation(is_plan)
def explicit_model_defaults(question: Question, shardwise: Commands) -> None:
    """The keys of a model in plain dimensions, given with their default values
    (docs/reference/formats.md)."""
    assert isinstance(question.model, File)
    own = question.model.document
    defaults = {
        "kv_heads": own["heads"], "head_dim": own["hidden"] // own["heads"], "gated": False, "bias": True,
        "norm": "layernorm", "positions": "learned", "tied": True, "dropout": 0.1,
    }  # fmt: skip
    if "experts" in own:
        defaults |= {"dense_layers": 0, "shared_ffn": 0}
    explicit_form = replace(question, model=File("model", {**defaults, **own}))
    one, other = shardwise.answer(question.words()), shardwise.answer(explicit_form.words())
    require_same(one, other, what="explicit defaults of a model", figures=whole)


@relation(lambda question: not question.is_graph)
def explicit_node_figures(question: Question, shardwise: Commands) -> None:
    """Cards, speed and host memory of each node, given with their default values."""
    cluster = question.cluster
    bare = cluster.file()
    explicit_form = cluster.with_explicit_cards().changed(lambda run: replace(run, speed=run.speed or 1.0))
    one = shardwise.answer(question.words(cluster=("--cluster", bare)))
    other = shardwise.answer(question.words(cluster=("--cluster", explicit_form.file())))
    require_same(one, other, what="explicit figures of nodes", figures=whole)


@relation(lambda question: is_uniform_plan(question) and not question.cluster.tiers and has_network(question))
def explicit_tiers(question: Question, shardwise: Commands) -> None:
    """The default tiers of equal nodes, given explicitly."""
    text = question.cluster.words()[1]
    known = load_cluster(text, inter_node=question.cluster.inter_node) if isinstance(text, str) else None
    if known is None or any(tier.in_switch_reduction or tier.part_shares for tier in known.tiers):
        return
    tiers = tuple(
        Tier(
            name=tier.name,
            span=tier.span,
            latency_s=tier.latency_s,
            bytes_per_s=None if tier.is_network else tier.bytes_per_s,
            is_network=tier.is_network,
        )
        for tier in known.tiers
    )
    one = shardwise.answer(question.words())
    written = replace(question.cluster.with_explicit_cards(), tiers=tiers)
    other = shardwise.answer(question.words(cluster=("--cluster", written.file())))
    require_equivalent(one, other, what="explicit tiers")
