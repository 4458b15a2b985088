"""(a) The same question in other words has the same answer."""

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
    """The entries of `nodes` from the last to the first."""
    reordered = replace(question.cluster, nodes=question.cluster.nodes[::-1])
    one, other = shardwise.answer(question.words()), shardwise.answer(question.on(reordered).words())
    require_equivalent(one, other, what="entries in another order")


@relation(lambda question: is_mixed(question) and _has_equal_nodes(question))
def nodes_in_another_order(question: Question, shardwise: Commands) -> None:
    """Nodes of different entries in turn: A A B B as A B A B."""
    rng = question.rng("nodes in another order")
    singles = [replace(run, count=1) for run in question.cluster.nodes for _ in range(run.count)]
    rng.shuffle(singles)
    reordered = replace(question.cluster, nodes=tuple(singles))
    one, other = shardwise.answer(question.words()), shardwise.answer(question.on(reordered).words())
    require_equivalent(one, other, what="nodes in another order")


@relation(_has_equal_nodes)
def an_entry_in_two(question: Question, shardwise: Commands) -> None:
    """An entry of several nodes as two entries of the same."""
    cluster = question.cluster
    at = next(place for place, run in enumerate(cluster.nodes) if run.count > 1)
    run = cluster.nodes[at]
    halves = (replace(run, count=1), replace(run, count=run.count - 1))
    split = replace(cluster, nodes=(*cluster.nodes[:at], *halves, *cluster.nodes[at + 1 :]))
    one, other = shardwise.answer(question.words()), shardwise.answer(question.on(split).words())
    require_same(one, other, what="an entry in two", figures=whole)


@relation(lambda _: True)
def other_names(question: Question, shardwise: Commands) -> None:
    """Other names of the cluster, of each entry of nodes, and of each class of devices."""
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
    """A shorthand as a file with the same nodes."""
    one = shardwise.answer(question.words())
    other = shardwise.answer(question.words(cluster=("--cluster", question.cluster.file())))
    require_same(one, other, what="shorthand or file", figures=whole)


@relation(lambda question: is_uniform_plan(question) and question.cluster.has_shorthand)
def devices_or_nodes_of_them(question: Question, shardwise: Commands) -> None:
    """`5xT4` is a node of the usual four and one of the rest: `1x4xT4+1x1xT4`."""
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
    """One tier over all devices, and a switch to which each device has a link of the same bandwidth.

    A ring on the switch goes over one link up and one down a hop, each of which carries that hop alone. What
    is said of the proof is left out: links are priced as tiers, and call nothing proven.
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
    """The best result of an answer, whatever is proven of it."""
    return figures(answer)["best"] if answer.fits else None


def _links(pairs: list[tuple[str, str]], rate: float, latency_s: float) -> list[dict[str, str]]:
    same = {"bandwidth": bytes_per_s(rate), "latency": f"{latency_s!r}s"}
    return [{"from": source, "to": target, **same} for source, target in pairs]


@relation(lambda question: is_uniform_plan(question) and question.cluster.node_count > 3)
def links_in_another_order(question: Question, shardwise: Commands) -> None:
    """Nodes of two racks one rack after the other, or in turn.

    Links are priced as two tiers by a ring over the devices in their order, so that the order of nodes
    changes the price (docs/reference/formats.md); until links are priced as they are, such an answer is not
    called proven."""
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
    contiguous_view = shardwise.answer(
        question.words(cluster=racks([node * 2 // count for node in range(count)]))
    )
    racks_interleaved = shardwise.answer(question.words(cluster=racks([node % 2 for node in range(count)])))
    if (
        contiguous_view.fits
        and abs(contiguous_view.step_time_s - racks_interleaved.step_time_s)
        > 1e-9 * racks_interleaved.step_time_s
    ):
        is_proven = contiguous_view.document["is_proven"] or racks_interleaved.document["is_proven"]
        found = f"{contiguous_view.step_time_s!r} and {racks_interleaved.step_time_s!r} s, called proven"
        require(not is_proven, f"links in another order: {found}", contiguous_view, racks_interleaved)


@relation(is_plan)
def explicit_defaults(question: Question, shardwise: Commands) -> None:
    """All options at their defaults, said aloud."""
    explicit_options = {
        "optimizer": "adamw", "memory_margin": "0.05", "expert_imbalance": "1.1", "space": "default",
        "objective": "time", "top": "3", "workers": "1", "stage_dp": "1", "braid": "1",
    }  # fmt: skip
    plain = {**dict.fromkeys(explicit_options), "space": question.options.get("--space")}
    one = shardwise.answer(question.with_options(plain).words())
    job = one.document.get("job", {})
    all_options = {**explicit_options, "space": question.space, **({"dtype": job["dtype"]} if job else {})}
    other = shardwise.answer(question.with_options(all_options).words())
    require_same(one, other, what="defaults said", figures=whole)
    if one.fits:
        hashes = one.document["plan_hash"], other.document["plan_hash"]
        require(hashes[0] == hashes[1], f"defaults said: hashes {hashes}", one, other)


@relation(is_plan)
def explicit_model_defaults(question: Question, shardwise: Commands) -> None:
    """The keys of a model in plain dimensions, at their defaults (docs/reference/formats.md)."""
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
    require_same(one, other, what="defaults of a model said", figures=whole)


@relation(lambda question: not question.is_graph)
def explicit_node_figures(question: Question, shardwise: Commands) -> None:
    """Cards, speed and host memory of each node, said as they are by custom."""
    cluster = question.cluster
    bare = cluster.file()
    explicit_form = cluster.with_explicit_cards().changed(lambda run: replace(run, speed=run.speed or 1.0))
    one = shardwise.answer(question.words(cluster=("--cluster", bare)))
    other = shardwise.answer(question.words(cluster=("--cluster", explicit_form.file())))
    require_same(one, other, what="figures of nodes said", figures=whole)


@relation(lambda question: is_uniform_plan(question) and not question.cluster.tiers and has_network(question))
def explicit_tiers(question: Question, shardwise: Commands) -> None:
    """The usual tiers of alike nodes, written out."""
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
    require_equivalent(one, other, what="tiers said")
