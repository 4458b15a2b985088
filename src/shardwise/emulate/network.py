"""The network of an emulated cluster: namespaces, bridges and shaped interfaces (veth, tbf).

Each node is a network namespace. Each switch is a bridge in one namespace for all switches. A directed link
is the interface at its source, which sends at the link's bandwidth. The machine's own namespace is not
changed, so deleting the namespaces removes everything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shardwise.cluster import Cluster, Link, link_graph
from shardwise.errors import ConfigError
from shardwise.inputs import unknown

# System commands

TOOLS = ("ip", "tc")
"""Required tools of iproute2."""

_LACKS = (
    ("netns", "network namespaces (CONFIG_NET_NS)"),
    ("veth", "pairs of interfaces (CONFIG_VETH)"),
    ("bridge", "bridges (CONFIG_BRIDGE)"),
    ("tbf", "shaped bandwidth (CONFIG_NET_SCH_TBF)"),
)
"""A word of a command that fails, and what the kernel then lacks."""


_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Folders of these tools on systems where they are not on the path of users."""


def tool_path(tool: str) -> str:
    """Path of a tool. ConfigError if it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS])
    found = shutil.which(tool, path=path)
    if found is None:
        raise ConfigError("is not installed", key=tool, allowed="the package iproute2")
    return found


def check_system() -> None:
    """ConfigError with the first reason why this machine cannot emulate a cluster."""
    for tool in TOOLS:
        tool_path(tool)
    if os.geteuid() != 0:
        raise ConfigError(
            "needs root for network namespaces and CPU shares", key="emulate",
            found=f"user {os.geteuid()}", allowed="sudo shardwise emulate ...",
        )  # fmt: skip


def run(command: str) -> str:
    """Output of a system command. ConfigError, naming what the kernel lacks, if it fails."""
    words = command.split()
    done = _done([tool_path(words[0]), *words[1:]])
    if done.returncode:
        lacks = next((what for word, what in _LACKS if word in words), "a required feature")
        output = " ".join(done.stderr.split())[:200]
        raise ConfigError(
            f"failed: the kernel lacks {lacks}, or this user may not use it", key=command, found=output
        )
    return done.stdout


def try_all(commands: Sequence[str]) -> None:
    """Run every command, even if some fail, to remove what may be half built."""
    for command in commands:
        tool, *words = command.split()
        _done([tool_path(tool), *words])


def _done(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in its own session: Ctrl-C in a terminal would end a foreground process half-way."""
    return subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)


# The network

_NAME = re.compile(r"sw(\d+)-\w+")
_PACKET_BYTES = 9_000
"""Jumbo frames. Devices spend CPU time per packet, which a network card would do; with 1,500 bytes it was up
to half of a step."""

_BURST_BYTES = 32_768
_BURST_S = 0.001
"""Burst allowance of a link: at least `_BURST_BYTES`, and what passes in `_BURST_S` seconds, which covers the
interval of the kernel's timer."""

_MAX_SEGMENT_BYTES = 30_000
"""Largest segment that the kernel passes to a link, without headers: less than any burst allowance. A larger
segment would block a link for good once its allowance shrinks below it."""


class EmulatedNetwork:
    """Namespaces `sw<pid>-n<k>` of the nodes and `sw<pid>-s` of the switches. `build` creates them; `close`
    deletes them in any state."""

    def __init__(self, cluster: Cluster, pid: int) -> None:
        if cluster.links:
            raise ConfigError("cannot be emulated", key="links", found="a link graph", allowed="tiers")
        self._nodes = len(cluster.nodes)
        self._links = {link.name: link for link in _network_links(cluster)}
        self._prefix = f"sw{pid}"
        self._places: dict[str, tuple[str, str]] = {}

    def namespace(self, node: int) -> str:
        """Name of a node's namespace."""
        return f"{self._prefix}-n{node}"

    def address(self, node: int) -> str:
        """IP address of a node."""
        return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}"

    @property
    def _switches(self) -> str:
        return f"{self._prefix}-s"

    def build(self) -> None:
        """Create all namespaces and links. ConfigError if the kernel lacks a feature."""
        run(f"ip netns add {self._switches}")
        for node in range(self._nodes):
            run(f"ip netns add {self.namespace(node)}")
            run(f"ip -n {self.namespace(node)} link set lo up")
        bridges: dict[str, str] = {}
        for vertex in dict.fromkeys(
            end for link in self._links.values() for end in (link.source, link.target)
        ):
            if vertex[0] == "s":
                bridges[vertex] = f"b{len(bridges)}"
                run(f"ip -n {self._switches} link add {bridges[vertex]} type bridge")
                run(f"ip -n {self._switches} link set {bridges[vertex]} up")
        for number, link in enumerate(self._upward()):
            self._join(link, bridges, number)
        for name, link in self._links.items():
            self.shape(name, link.capacity.at(0.0))

    def _upward(self) -> Sequence[Link]:
        """One link of each pair of opposite links: the one that leads away from the nodes."""
        return [link for link in self._links.values() if link.source < link.target]

    def _join(self, link: Link, bridges: dict[str, str], number: int) -> None:
        """Create the two interfaces of a link and its opposite."""
        port = f"p{number}"
        if link.source[0] == "n":
            node = int(link.source[1:])
            inside, name = self.namespace(node), "eth0"
        else:
            inside, name = self._switches, f"q{number}"
        size = f"mtu {_PACKET_BYTES} gso_max_size {_MAX_SEGMENT_BYTES}"
        run(f"ip -n {self._switches} link add {port} {size} type veth peer name {name} netns {inside} {size}")
        if link.source[0] == "n":
            run(f"ip -n {inside} addr add {self.address(node)}/16 dev {name}")
        else:
            run(f"ip -n {inside} link set {name} master {bridges[link.source]}")
        run(f"ip -n {self._switches} link set {port} master {bridges[link.target]}")
        run(f"ip -n {inside} link set {name} up")
        run(f"ip -n {self._switches} link set {port} up")
        self._places[link.name] = inside, name
        self._places[f"{link.target}>{link.source}"] = self._switches, port

    def shape(self, name: str, bytes_per_s: float) -> None:
        """Set the bandwidth of a link in bytes per second. ConfigError if there is no such link."""
        if name not in self._places:
            raise unknown("is not an emulated link", name, self._places, key="link")
        namespace, interface = self._places[name]
        rate = max(8, round(8 * bytes_per_s))
        burst = max(_BURST_BYTES, round(bytes_per_s * _BURST_S))
        run(
            f"tc -n {namespace} qdisc replace dev {interface} root tbf rate {rate}bit burst {burst}b"
            " latency 200ms"
        )

    def close(self) -> None:
        """Delete all namespaces."""
        nodes = [self.namespace(node) for node in range(self._nodes)]
        try_all([f"ip netns del {name}" for name in (*nodes, self._switches)])


def _network_links(cluster: Cluster) -> list[Link]:
    """Links between nodes and switches, and between switches: those outside of nodes."""
    return [link for link in link_graph(cluster) if {link.source[0], link.target[0]} <= {"n", "s"}]


def remove_leftovers() -> None:
    """Delete the namespaces of emulations whose process has ended, as after kill -9."""
    folder = Path("/var/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    leftovers = [
        name for name in names if (match := _NAME.fullmatch(name)) and not Path(f"/proc/{match[1]}").exists()
    ]
    try_all([f"ip netns del {name}" for name in leftovers])
