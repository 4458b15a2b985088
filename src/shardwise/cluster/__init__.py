"""What a job runs on: devices, nodes, tiers and links, from a shorthand, a file or a plan's record."""

from shardwise.cluster.backend import NATIVE, Backend
from shardwise.cluster.capacity import Capacity
from shardwise.cluster.catalogue import (
    device_names,
    devices,
    efficiency_numbers,
    find_device,
    numbers_of_device,
    with_efficiency,
)
from shardwise.cluster.cluster import Cluster, Link, Node, Tier, node_runs
from shardwise.cluster.conditions import (
    Conditions,
    NodeState,
    NodeView,
    current_cluster,
    rounded_down,
    uniform_cluster,
)
from shardwise.cluster.device import Device
from shardwise.cluster.device_file import ATTENTION_KERNELS, device_of
from shardwise.cluster.efficiency import (
    MEASURED,
    AttentionCurve,
    CollectiveCurve,
    Efficiency,
    GroupedMatmulCurve,
    MatmulCurve,
    MemoryCurve,
)
from shardwise.cluster.event_convert import convert_events
from shardwise.cluster.event_file import events_text, load_events, parse_events
from shardwise.cluster.event_generate import EVENT_KINDS, generate_events
from shardwise.cluster.event_nodes import NodeEvents, events_of_nodes
from shardwise.cluster.event_words import events_from_text
from shardwise.cluster.events import (
    ClusterEvent,
    DeviceLost,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
    check_events,
    first_invalid_event,
)
from shardwise.cluster.groups import NodeGroups
from shardwise.cluster.links import link_graph, route
from shardwise.cluster.load import load_cluster
from shardwise.cluster.mesh import Mesh, MeshAxis, mesh_of, meshes_of, tier_mesh
from shardwise.cluster.named import cluster_names
from shardwise.cluster.parts import Parts, Selection
from shardwise.cluster.placement import group_members, group_members_of
from shardwise.cluster.pools import Pool, cluster_of_pools, pools_of, tier_of_pool
from shardwise.cluster.record import cluster_from_record, cluster_record
from shardwise.cluster.resize import cluster_of_nodes, multiplied, part_of, part_sizes, resized

__all__ = [
    "ATTENTION_KERNELS",
    "EVENT_KINDS",
    "MEASURED",
    "NATIVE",
    "AttentionCurve",
    "Backend",
    "Capacity",
    "Cluster",
    "ClusterEvent",
    "CollectiveCurve",
    "Conditions",
    "Device",
    "DeviceLost",
    "Efficiency",
    "EventTrace",
    "GroupedMatmulCurve",
    "Link",
    "LinkChange",
    "MatmulCurve",
    "MemoryCurve",
    "Mesh",
    "MeshAxis",
    "Node",
    "NodeEvents",
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
    "check_events",
    "cluster_from_record",
    "cluster_names",
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
    "find_device",
    "first_invalid_event",
    "generate_events",
    "group_members",
    "group_members_of",
    "link_graph",
    "load_cluster",
    "load_events",
    "mesh_of",
    "meshes_of",
    "multiplied",
    "node_runs",
    "numbers_of_device",
    "parse_events",
    "part_of",
    "part_sizes",
    "pools_of",
    "resized",
    "rounded_down",
    "route",
    "tier_mesh",
    "tier_of_pool",
    "uniform_cluster",
    "with_efficiency",
]
