"""Lower bounds as pip's constraints."""

from __future__ import annotations

from tests.oldest import constraints, lower_bounds


def test_lower_bounds_of_requirements() -> None:
    found = lower_bounds(["numpy>=1.26,<3", "typer>=0.19 , <0.29", "a-b[c]>=2.1rc1", "pinned==3", "free"])
    assert list(found) == ["numpy==1.26", "typer==0.19", "a-b==2.1rc1"]


def test_every_dependency_has_a_lower_bound() -> None:
    names = {line.partition("==")[0] for line in constraints(["core", "torch", "graph", "plot"])}
    assert names == {"numpy", "typer", "rich", "PyYAML", "torch", "safetensors", "numba", "matplotlib"}
