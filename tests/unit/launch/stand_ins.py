"""Programs that stand in for launchers: they record how they were called."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """A call of a launcher: its name with its arguments, and its environment."""

    words: list[str]
    environment: dict[str, str]


def install(folder: Path, name: str, body: str) -> None:
    """Put a Python program with this name into `folder`."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)


_RECORDER = """\
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    file.write(json.dumps({"words": words, "environment": dict(os.environ)}) + "\\n")
"""

SRUN = """\
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
for host in range(2):
    subprocess.run(words, env={**os.environ, "SLURM_NODEID": str(host)}, check=True)
"""
"""Replaces srun: runs the same command on each of two hosts."""


def recorded(folder: Path, command: list[str], **environment: str) -> list[Call]:
    """The calls of torchrun and accelerate by `command`, run with the stand-ins in `folder` first on the
    path.
    """
    for name in ("torchrun", "accelerate"):
        install(folder, name, _RECORDER)
    record = folder / "record"
    record.unlink(missing_ok=True)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        command, env={**os.environ, "PATH": path, "RECORD": str(record), **environment}, check=True
    )
    return [Call(**json.loads(line)) for line in record.read_text().splitlines()]


_REPORT = """\
import json, os, sys
with open(os.environ["RANK"] + ".rank", "w") as file:
    json.dump([os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:]], file)
"""
"""Replaces a training script: every rank writes a file with what it was given."""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_nodes(folder: Path, script: str, lines: Sequence[str], **environment: str) -> dict[int, list[str]]:
    """Run the lines of bash at the same time in `folder`, one for each node, with a stand-in for the training
    script: local rank, number of ranks and arguments of the script, by rank.
    """
    (folder / script).write_text(_REPORT)
    nodes = [
        subprocess.Popen(["bash", "-c", line], cwd=folder, env={**os.environ, **environment})
        for line in lines
    ]
    assert [node.wait(timeout=300) for node in nodes] == [0] * len(nodes)
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.rank"))}


def expanded(text: str, variables: dict[str, str]) -> str:
    """`text` as Kubernetes passes it to a container: $(NAME) is a variable, and $$ is one $ anywhere
    (third_party/forked/golang/expansion of Kubernetes).
    """
    found = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return found.sub(value, text)
