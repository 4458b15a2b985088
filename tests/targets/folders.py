"""The environments of child processes that import software from the folders of `make test-targets`."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment_with(*folders: str) -> dict[str, str]:
    """The environment of a child process that can import what is in these folders of `.cache`."""
    installed = [ROOT / ".cache" / name for name in folders]
    for folder in installed:
        if not folder.is_dir():
            raise AssertionError(f"{folder} is missing: run these tests by `make test-targets`")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*installed, ROOT / "src", ROOT)))}
