"""Tables of nccl-tests on the tiers of the cluster that they ran on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardwise.accuracy.calibration.links import link_curve
from shardwise.accuracy.calibration.nccl_tests import NcclTable
from shardwise.accuracy.calibration.record import TierCurve, with_link_fractions
from shardwise.accuracy.calibration.samples import LinkSample
from shardwise.cluster import Cluster, Device, Tier
from shardwise.errors import ConfigError
from shardwise.inputs import printable, short_repr

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors do not count: NCCL moves them by other protocols, and steps spend their time on larger
ones."""


def with_tables(
    device: Device, cluster: Cluster, tables: Sequence[tuple[str, NcclTable]]
) -> tuple[Device, dict[str, object]]:
    """`device` with what these collectives, each table with the file that it is from, reach on the tiers of
    `cluster`, and how far off their times it leaves them."""
    samples: dict[int, list[LinkSample]] = {}
    for path, table in tables:
        at, of = table_samples(path, table, cluster)
        samples.setdefault(at, []).extend(of)
    for is_network in (False, True):
        crossed = [cluster.tiers[at].name for at in samples if cluster.tiers[at].is_network is is_network]
        if len(crossed) > 1:
            raise ConfigError(
                "were measured on several tiers", key="--from", found=", ".join(crossed),
                allowed="one within nodes and one between them",
            )  # fmt: skip
    curves: list[TierCurve] = []
    measured: dict[str, object] = {}
    for at, of in sorted(samples.items()):
        tier, curve = cluster.tiers[at], link_curve(of)
        curves.append(TierCurve(tier=tier, curve=curve, groups=tier.span // _inner_span(cluster, at)))
        measured[f"links of {tier.name}"] = {"times": len(of), **curve.errors(of)}
    return with_link_fractions(device, curves), measured


def _inner_span(cluster: Cluster, tier: int) -> int:
    return cluster.tiers[tier - 1].span if tier else 1


def table_samples(path: str, table: NcclTable, cluster: Cluster) -> tuple[int, list[LinkSample]]:
    """The tier that the ranks of `table` cross, and its times there."""

    def wrong(message: str, found: str, allowed: str) -> ConfigError:
        return ConfigError(
            message, file=printable(path), key=f"line {table.line}", found=found, allowed=allowed
        )

    per_node = cluster.nodes[0].devices
    hosts = table.hosts or _hosts_of(table.ranks or cluster.devices, per_node)
    ranks = sum(hosts)
    if len(hosts) > 1 and set(hosts) != {per_node}:
        found = " + ".join(map(str, hosts))
        raise wrong("does not use whole nodes", f"{short_repr(found)} ranks", f"{per_node} a node")
    if ranks > cluster.devices or ranks < 2:
        raise wrong("has another number of ranks", str(ranks), f"2 to {cluster.devices}, as --cluster has")
    at = next(index for index, tier in enumerate(cluster.tiers) if tier.span >= ranks)
    tier, inner = cluster.tiers[at], _inner_span(cluster, at)
    if ranks % inner:
        raise wrong("does not fill the groups below", f"{ranks} ranks", f"a multiple of {inner}")
    sample = LinkSample(
        kind=table.kind, ranks=ranks, nbytes=0.0, seconds=0.0, inner=inner,
        share=_share(tier, 2 if table.kind == "message" else ranks // inner),
        alone=tier.flow_bytes_per_s / tier.bytes_per_s,
        reduces_in_switch=all(each.in_switch_reduction for each in cluster.tiers[: at + 1]),
    )  # fmt: skip
    return at, [
        replace(sample, nbytes=nbytes, seconds=seconds)
        for nbytes, seconds in table.times
        if nbytes >= LEAST_BYTES
    ]


def _hosts_of(ranks: int, per_node: int) -> tuple[int, ...]:
    """The ranks of each node where nodes are filled one by one."""
    whole, remainder = divmod(ranks, per_node)
    return (per_node,) * whole + ((remainder,) if remainder else ())


def _share(tier: Tier, members: int) -> float:
    shares = [share for size, share in tier.part_shares if size <= members]
    return shares[-1] if shares else 1.0
