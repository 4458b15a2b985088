"""Commands of the system that set up networks, and what this machine lacks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

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
