"""Clusters: devices, nodes, tiers, links and events, from a shorthand, a file or a plan's record."""

from shardwise.cluster.best_runs import implausible_mfu
from shardwise.cluster.catalogue import (
    architecture_of,
    device_names,
    devices,
    efficiency_numbers,
    find_device,
    numbers_of_device,
    with_efficiency,
)
from shardwise.cluster.cluster import Capacity, Cluster, Link, Node, Tier, node_runs
from shardwise.cluster.conditions import (
    Conditions,
    NodeState,
    NodeView,
    current_cluster,
    rounded_down,
    uniform_cluster,
)
from shardwise.cluster.device import (
    MEASURED,
    NATIVE,
    AttentionCurve,
    Backend,
    CollectiveCurve,
    Device,
    Efficiency,
)
from shardwise.cluster.device_file import ATTENTION_KERNELS, device_of
from shardwise.cluster.event_file import (
    MAX_TRACE_BYTES,
    convert_events,
    events_from_text,
    events_text,
    load_events,
)
from shardwise.cluster.events import (
    EVENT_KINDS,
    DeviceLost,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
    check_events,
    events_of_nodes,
    generate_events,
)
from shardwise.cluster.file import cluster_of_fields
from shardwise.cluster.groups import NodeGroups
from shardwise.cluster.imports.facts import FileFacts, NodeFacts
from shardwise.cluster.imports.join import joined_cluster
from shardwise.cluster.imports.read import MAX_FILE_BYTES, facts_of_text
from shardwise.cluster.links import link_graph, route
from shardwise.cluster.load import cluster_names, load_cluster
from shardwise.cluster.mesh import Mesh, mesh_of, meshes_of, tier_mesh
from shardwise.cluster.parts import (
    Parts,
    Pool,
    Selection,
    cluster_of_nodes,
    cluster_of_pools,
    multiplied,
    part_of,
    part_sizes,
    pools_of,
    resized,
    tier_of_pool,
)
from shardwise.cluster.power import rated_powers
from shardwise.cluster.prices import at_price, price_lines, price_offers
from shardwise.cluster.record import cluster_from_record, cluster_record
from shardwise.cluster.tiers import group_members

__all__ = [
    "ATTENTION_KERNELS",
    "EVENT_KINDS",
    "MAX_FILE_BYTES",
    "MAX_TRACE_BYTES",
    "MEASURED",
    "NATIVE",
    "AttentionCurve",
    "Backend",
    "Capacity",
    "Cluster",
    "CollectiveCurve",
    "Conditions",
    "Device",
    "DeviceLost",
    "Efficiency",
    "EventTrace",
    "FileFacts",
    "Link",
    "LinkChange",
    "Mesh",
    "Node",
    "NodeFacts",
    "NodeGroups",
    "NodeJoined",
    "NodeLost",
    "NodeState",
    "NodeView",
    "Notice",
    "Parts",
    "Pool",
    "Selection",
    "Slowdown",
    "Tier",
    "architecture_of",
    "at_price",
    "check_events",
    "cluster_from_record",
    "cluster_names",
    "cluster_of_fields",
    "cluster_of_nodes",
    "cluster_of_pools",
    "cluster_record",
    "convert_events",
    "current_cluster",
    "device_names",
    "device_of",
    "devices",
    "efficiency_numbers",
    "events_from_text",
    "events_of_nodes",
    "events_text",
    "facts_of_text",
    "find_device",
    "generate_events",
    "group_members",
    "implausible_mfu",
    "joined_cluster",
    "link_graph",
    "load_cluster",
    "load_events",
    "mesh_of",
    "meshes_of",
    "multiplied",
    "node_runs",
    "numbers_of_device",
    "part_of",
    "part_sizes",
    "pools_of",
    "price_lines",
    "price_offers",
    "rated_powers",
    "resized",
    "rounded_down",
    "route",
    "tier_mesh",
    "tier_of_pool",
    "uniform_cluster",
    "with_efficiency",
]
