"""What the wheel needs: docs/reference/dependencies.md, and a bill of materials in CycloneDX 1.6.

python -m tests.bill_of_materials                 # writes the page from the installed packages
python -m tests.bill_of_materials sbom.json       # writes the bill of materials
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, version
from pathlib import Path
from typing import Any

from tests.oldest import PYPROJECT

PAGE = PYPROJECT.parent / "docs" / "reference" / "dependencies.md"

_HEAD = """\
# Dependencies of the wheel

The packages that `pip install shardwise` installs, with the versions of `constraints.txt` and their licences.
The extras `torch`, `graph` and `plot` need more. `python -m tests.bill_of_materials` makes this page from the
metadata of the installed packages. With the name of a file it writes a bill of materials instead (CycloneDX).

| package | version | licence | needed by |
|---|---|---|---|
"""


def required_by(name: str) -> list[str]:
    """The packages that `name` needs on this machine, without those of its extras."""
    texts = distribution(name).requires or []
    return [re.split(r"[\s;<>=!~\[(]", text)[0] for text in texts if not _is_left_out(text)]


def _is_left_out(requirement: str) -> bool:
    marker = requirement.partition(";")[2]
    return "extra ==" in marker or "win32" in marker or "Windows" in marker or "python_version <" in marker


def needed() -> dict[str, list[str]]:
    """Every package that the wheel needs, by its name, with those that need it."""
    found: dict[str, list[str]] = {}
    waiting = [(name, "shardwise") for name in required_by("shardwise")]
    while waiting:
        name, by = waiting.pop(0)
        name = distribution(name).metadata["Name"]
        if name not in found:
            waiting += [(each, name) for each in required_by(name)]
        found.setdefault(name, []).append(by)
    return dict(sorted(found.items(), key=lambda item: item[0].casefold()))


def licence_of(package: Distribution) -> str:
    """The licence in the metadata of a package: its expression, else its classifier, else its first line."""
    metadata = package.metadata
    classifiers = [text for text in metadata.get_all("Classifier", []) if text.startswith("License ::")]
    texts = [
        *metadata.get_all("License-Expression", []),
        *(text.rpartition(" :: ")[2] for text in classifiers),
    ]
    texts += [text.strip().partition("\n")[0] for text in metadata.get_all("License", [])]
    return next((text for text in texts if text), "not stated")


def page() -> str:
    """The page as text."""
    rows = [
        f"| {name} | {distribution(name).version} | {licence_of(distribution(name))} | {', '.join(by)} |\n"
        for name, by in needed().items()
    ]
    return _HEAD + "".join(rows)


def bill() -> dict[str, Any]:
    """The bill of materials of the wheel."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component("shardwise", "application")},
        "components": [_component(name, "library") for name in needed()],
        "dependencies": [
            {"ref": _purl(name), "dependsOn": sorted(_purl(each) for each in required_by(name))}
            for name in ("shardwise", *needed())
        ],
    }


def _component(name: str, kind: str) -> dict[str, Any]:
    package = distribution(name)
    return {
        "type": kind,
        "bom-ref": _purl(name),
        "name": package.metadata["Name"],
        "version": package.version,
        "purl": _purl(name),
        "licenses": [{"license": {"name": licence_of(package)}}],
    }


def _purl(name: str) -> str:
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', distribution(name).metadata['Name']).lower()}@{version(name)}"


def main(arguments: Iterable[str]) -> None:
    """Writes the page, or the bill of materials into the named file."""
    names = list(arguments)
    if names:
        Path(names[0]).write_text(json.dumps(bill(), indent=1) + "\n", "utf-8")
    else:
        PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
