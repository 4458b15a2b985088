"""The command `emulate`: runs a program on every device of a cluster emulated on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from shardwise.app.cli.output import Output, print_notes
from shardwise.cluster import load_cluster, load_events
from shardwise.emulate import Emulation, run_emulation
from shardwise.errors import ConfigError
from shardwise.inputs import printable

MAX_DEVICES = 64
"""Most devices of an emulated cluster: each is a process with a network namespace."""


def ran(cluster: str, command: Sequence[str], *, cpu_share: float | None, events: str | None) -> Output:
    """Run `command` on `cluster`; the exit code is the command's."""
    if not command:
        raise ConfigError("is missing", key="COMMAND", allowed="shardwise emulate CLUSTER -- COMMAND ...")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            "is not a program",
            key="COMMAND",
            found=printable(command[0]),
            allowed="one on PATH, or the path of one",
        )
    loaded = load_cluster(cluster)
    if loaded.devices > MAX_DEVICES:
        raise ConfigError(
            "is too large for one machine", key="CLUSTER", found=f"{loaded.devices} devices",
            allowed=f"at most {MAX_DEVICES}",
        )  # fmt: skip
    if set(loaded.classes) != {"cpu"}:
        raise ConfigError("cannot be emulated", key="CLUSTER", found=", ".join(loaded.classes), allowed="cpu")
    trace = None
    if events is not None:
        trace, note = load_events(events)
        print_notes([note] if note else [])
    emulation = Emulation(cluster=loaded, command=tuple(command), cpu_share=cpu_share, events=trace)
    return Output(code=run_emulation(emulation, lambda line: print_notes([f"shardwise: {line}"])))
