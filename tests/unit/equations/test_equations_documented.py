"""docs/reference/equations.md lists every public function of equations/, with tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.property.equation_arguments import equations

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "equations.md"


def section(title: str) -> str:
    """The section of the page whose heading starts with `title`."""
    found = re.search(rf"^## {title}\b.*?(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return found.group() if found else ""


def first_cells(text: str) -> list[str]:
    """The code in the first cell of each table row."""
    return re.findall(r"^\| `(\w+)` \|", text, re.M)


def test_every_public_function_has_its_row() -> None:
    names = [name.split(".") for name in equations()]
    for module in {module for module, _ in names}:
        expected = sorted(name for other, name in names if other == module)
        assert sorted(first_cells(section(module))) == expected
    assert len(names) >= 30


def test_every_row_of_the_table_names_a_test_of_its_file() -> None:
    for module in {name.split(".")[0] for name in equations()}:
        source = (ROOT / "tests/unit/equations" / f"test_equations_{module}.py").read_text(encoding="utf-8")
        rows = re.findall(r"^\| `\w+` \|.*\| `(test_\w+)` \|$", section(module), re.M)
        assert len(rows) == len(first_cells(section(module)))
        for test in rows:
            assert f"def {test}(" in source


def test_every_named_test_and_file_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    everything = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for test in set(re.findall(r"`(test_\w+)`", page)):
        assert f"def {test}(" in everything, test
    for link in re.findall(r"\]\((\.\./[^)]+)\)", page):
        assert (PAGE.parent / link).exists(), link
    for name in re.findall(r"`cost/(\w+\.py)`", page):
        assert (ROOT / "src/shardwise/cost" / name).is_file(), name


def test_the_number_of_recorded_costs_is_documented() -> None:
    recorded = (ROOT / "tests/golden/prices.json").read_text(encoding="utf-8")
    count = len(re.findall(r'^   "tp=', recorded, re.M))
    assert f"Frozen prices of {count} strategies" in PAGE.read_text(encoding="utf-8")
