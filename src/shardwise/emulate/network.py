"""The link graph of a cluster as namespaces, bridges and shaped interfaces.

Each node is a namespace; each network switch is a bridge in a namespace that all of them share. A link of the
graph, in one direction, is the interface at its source, whose packets leave at the link's bandwidth. Nothing
is put into the machine's own namespace, so deleting the namespaces takes everything away.

Commands of the system that set up networks, and what this machine lacks for them.
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

TOOLS = ("ip", "tc")

_LACKS = (
    ("netns", "network namespaces (CONFIG_NET_NS)"),
    ("veth", "pairs of interfaces (CONFIG_VETH)"),
    ("bridge", "bridges (CONFIG_BRIDGE)"),
    ("tbf", "shaped bandwidth (CONFIG_NET_SCH_TBF)"),
)
"""A word of a command that fails, and what the kernel then lacks."""


_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Where these tools lie on systems whose users do not have them on their path."""


def tool_path(tool: str) -> str:
    """Where one of the tools is; ConfigError where it is not."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS])
    found = shutil.which(tool, path=path)
    if found is None:
        raise ConfigError("is not installed", key=tool, allowed="the package iproute2")
    return found


def check_system() -> None:
    """ConfigError, by the first thing in the way, where this machine cannot emulate a cluster."""
    for tool in TOOLS:
        tool_path(tool)
    if os.geteuid() != 0:
        raise ConfigError(
            "needs root, for network namespaces and shares of processors", key="emulate",
            found=f"user {os.geteuid()}", allowed="sudo shardwise emulate ...",
        )  # fmt: skip


def run(command: str) -> str:
    """What a system command says; ConfigError, naming what the kernel lacks, where it fails."""
    words = command.split()
    done = _done([tool_path(words[0]), *words[1:]])
    if done.returncode:
        lacks = next((what for word, what in _LACKS if word in words), "what this needs")
        output = " ".join(done.stderr.split())[:200]
        raise ConfigError(
            f"failed: the kernel lacks {lacks}, or this user may not use it", key=command, found=output
        )
    return done.stdout


def try_all(commands: Sequence[str]) -> None:
    """Run every command, also where some fail: for taking down what may be half there."""
    for command in commands:
        tool, *words = command.split()
        _done([tool_path(tool), *words])


def _done(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command in a session of its own: Ctrl-C in a terminal goes to everything that is in the foreground,
    and would end it half-way."""
    return subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)


_NAME = re.compile(r"sw(\d+)-\w+")
_PACKET_BYTES = 9_000
"""Jumbo frames. Devices pay with their share of a core for what a network card would do, packet by packet:
with 1,500 bytes that was up to half of a step."""

_BURST_BYTES = 32_768
_BURST_S = 0.001
"""What a bucket holds: at high rates as much as passes between two looks of the kernel's clock."""

_MAX_SEGMENT_BYTES = 30_000
"""What the kernel hands a link in one piece, headers apart: no more than any bucket holds. A piece that waits
at a link whose bucket shrinks below it never leaves, nor does anything behind it."""


class EmulatedNetwork:
    """Namespaces `sw<pid>-n<k>` of the nodes and `sw<pid>-s` of the switches. `build` makes them, `close`
    deletes them, whatever state they are in."""

    def __init__(self, cluster: Cluster, pid: int) -> None:
        if cluster.links:
            raise ConfigError("is not emulated", key="links", found="a given link graph", allowed="tiers")
        self._nodes = len(cluster.nodes)
        self._links = {link.name: link for link in _network_links(cluster)}
        self._prefix = f"sw{pid}"
        self._places: dict[str, tuple[str, str]] = {}

    def namespace(self, node: int) -> str:
        return f"{self._prefix}-n{node}"

    def address(self, node: int) -> str:
        return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}"

    @property
    def _switches(self) -> str:
        return f"{self._prefix}-s"

    def build(self) -> None:
        """Make all namespaces and links. ConfigError where the kernel lacks something."""
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
        """Each pair of directed links once, by the one that leads away from the nodes."""
        return [link for link in self._links.values() if link.source < link.target]

    def _join(self, link: Link, bridges: dict[str, str], number: int) -> None:
        """The two interfaces of a link and of the one back."""
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
        """From now on the link lets so many bytes per second through; ConfigError for one that is not
        there."""
        if name not in self._places:
            raise ConfigError(
                "is not an emulated link", key="link", found=name, allowed=", ".join(self._places) or "none"
            )
        namespace, interface = self._places[name]
        rate = max(8, round(8 * bytes_per_s))
        burst = max(_BURST_BYTES, round(bytes_per_s * _BURST_S))
        run(
            f"tc -n {namespace} qdisc replace dev {interface} root tbf rate {rate}bit burst {burst}b"
            " latency 200ms"
        )

    def close(self) -> None:
        nodes = [self.namespace(node) for node in range(self._nodes)]
        try_all([f"ip netns del {name}" for name in (*nodes, self._switches)])


def _network_links(cluster: Cluster) -> list[Link]:
    """Links between nodes and switches, and between switches: what lies beyond a node."""
    return [link for link in link_graph(cluster) if {link.source[0], link.target[0]} <= {"n", "s"}]


def remove_leftovers() -> None:
    """Delete the namespaces of emulations whose process is gone, as after kill -9."""
    folder = Path("/var/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    leftovers = [
        name for name in names if (match := _NAME.fullmatch(name)) and not Path(f"/proc/{match[1]}").exists()
    ]
    try_all([f"ip netns del {name}" for name in leftovers])
