"""Lower bounds of dependencies in pyproject.toml as pip's constraints, for `make test-oldest`:

python -m tests.oldest core torch graph plot
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*>=\s*([0-9][0-9a-z.]*)")


def lower_bounds(requirements: Iterable[str]) -> Iterator[str]:
    """`name==version` for every requirement that has a lower bound."""
    for requirement in requirements:
        found = _REQUIREMENT.match(requirement)
        if found is not None:
            yield f"{found[1]}=={found[2]}"


def constraints(extras: Iterable[str]) -> list[str]:
    """The lower bounds of the dependencies and of these extras; `core` stands for the dependencies."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    known = {"core": project["dependencies"], **project["optional-dependencies"]}
    return sorted({line for extra in extras for line in lower_bounds(known[extra])})


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in constraints(sys.argv[1:])))
