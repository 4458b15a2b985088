"""Writes a fit by `shardwise fit` into the package's data files: `python -m benchmarks.ship_fit FIT.json`.

Values of fitted numbers and the bands change. Names, sources and assumed numbers stay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "shardwise"
DEVICES = PACKAGE / "cluster" / "data" / "efficiency.json"
SOFTWARE = PACKAGE / "strategy" / "data" / "profiles.json"


def one_per_line(items: Sequence[Any]) -> str:
    """A JSON list with one item per line, so that a new number changes one line."""
    return "[\n  " + ",\n  ".join(json.dumps(item) for item in items) + "\n ]"


def merged(own: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`own` numbers with the values of `found` for the fitted ones."""
    values = {(tuple(number["of"]), number["field"]): number["value"] for number in found}
    return [
        {**number, "value": values[tuple(number["of"]), number["field"]]}
        if number["source"].startswith("fitted")
        else number
        for number in own
    ]


def main(path: str) -> None:
    """Writes both data files."""
    fit = json.loads(Path(path).read_text("utf-8"))
    devices = json.loads(DEVICES.read_text("utf-8"))
    numbers = one_per_line(merged(devices["numbers"], fit["devices"]))
    DEVICES.write_text('{\n "numbers": ' + numbers + "\n}\n", "utf-8")
    software = json.loads(SOFTWARE.read_text("utf-8"))
    words = ",\n  ".join(
        f"{json.dumps(name)}: {json.dumps(one)}" for name, one in software["software"].items()
    )
    numbers = one_per_line(merged(software["numbers"], fit["software"]))
    SOFTWARE.write_text(
        '{\n "software": {\n  ' + words + '\n },\n "bands": ' + json.dumps(fit["bands"])
        + ',\n "numbers": ' + numbers + "\n}\n",
        "utf-8",
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
