"""Any text that names a cluster: a shorthand, a shipped cluster or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import Device
from shardwise.cluster.named import cluster_names, named_cluster_file
from shardwise.cluster.shorthand import cluster_of_shorthand, is_shorthand
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr


def load_cluster(
    text: str, *, inter_node: str | None = None, measured: Mapping[str, Device] | None = None
) -> Cluster:
    """The cluster that `text` names: `8x8xH100-SXM` and the like, a shipped one such as `spot-mix`, or the
    path of a YAML or JSON file.

    `inter_node` (`200Gb/s` per network card, `4x200Gb/s` for four cards per node) replaces the customary
    network of a shorthand; a file says its own. `measured` devices stand in the place of the known ones of
    their names. Raises ConfigError.
    """
    is_path = os.sep in text or text.lower().endswith((".yaml", ".yml", ".json"))
    if not is_path and is_shorthand(text):
        return cluster_of_shorthand(text, inter_node=inter_node, measured=measured)
    named = None if is_path else named_cluster_file(text)
    if named is None and not is_path and not os.path.exists(text):
        names = ", ".join(cluster_names())
        allowed = f"a shorthand such as 8x8xH100-SXM, the path of a YAML file, or one of {names}"
        raise ConfigError(
            "is neither a cluster nor a file", key="cluster", found=short_repr(text), allowed=allowed
        )
    from shardwise.cluster.file import cluster_of_file  # a shorthand needs none of it

    if inter_node is not None:
        raise ConfigError(
            "is for shorthands", key="inter-node", found=short_repr(inter_node), allowed="nics in the file"
        )
    return cluster_of_file(text if named is None else str(named), measured=measured)
