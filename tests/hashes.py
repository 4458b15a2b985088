"""Hashes of the files that CI installs, all but PyTorch's, which it takes from an index of its own:

    python -m tests.hashes > .ci/hashes.txt

pip finds the files that it would install here, so the hashes are those of this platform and Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def pinned() -> list[str]:
    """The requirements of constraints.txt without PyTorch."""
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    return [line for line in lines if "==" in line and not line.startswith("torch==")]


def found(requirements: Sequence[str]) -> list[Mapping[str, Any]]:
    """The files that pip would install for these requirements, without what they need."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--report",
            str(report),
        ]
        subprocess.run([sys.executable, "-m", "pip", *words, *requirements], check=True)
        installed: list[Mapping[str, Any]] = json.loads(report.read_text("utf-8"))["install"]
        return installed


def lines(installed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """`name==version --hash=sha256:...` of every file, by name."""
    for one in sorted(installed, key=lambda one: str(one["metadata"]["name"]).casefold()):
        named, hashes = one["metadata"], one["download_info"]["archive_info"]["hashes"]
        yield f"{named['name']}=={named['version']} --hash=sha256:{hashes['sha256']}"


if __name__ == "__main__":
    sys.stdout.write("# Written by `python -m tests.hashes` for the platform and the Python of CI.\n")
    sys.stdout.write("".join(f"{line}\n" for line in lines(found(pinned()))))
