"""What CI installs has hashes, the version has one place, and the page of dependencies is up to date."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution

import pytest
import yaml
from tests.bill_of_materials import PAGE, bill, needed, page
from tests.hashes import CONSTRAINTS, lines, pinned
from tests.oldest import PYPROJECT

ROOT = PYPROJECT.parent
PROJECT = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pinned_package_but_pytorch_has_a_hash() -> None:
    hashed = {}
    for line in (ROOT / ".ci/hashes.txt").read_text("utf-8").splitlines()[1:]:
        requirement, hash_ = line.split(" --hash=sha256:")
        name, version = requirement.split("==")
        assert re.fullmatch(r"[0-9a-f]{64}", hash_)
        hashed[canonical(name)] = version
    expected = dict(line.split("==") for line in pinned())
    assert hashed == {canonical(name): version for name, version in expected.items()}
    assert len(hashed) == CONSTRAINTS.read_text("utf-8").count("==") - 1  # without torch


def test_a_report_of_pip_becomes_lines_with_hashes() -> None:
    def file(name: str, sha256: str) -> dict[str, object]:
        archive = {"archive_info": {"hashes": {"sha256": sha256}}}
        return {"metadata": {"name": name, "version": "1.0"}, "download_info": archive}

    report = [file("rich", "ab"), file("Pygments", "cd")]
    assert [*lines(report)] == ["Pygments==1.0 --hash=sha256:cd", "rich==1.0 --hash=sha256:ab"]


def test_the_version_has_one_place() -> None:
    """pyproject.toml; metadata of a citation repeat it, and nothing else does."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == PROJECT["version"]
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^__version__|shardwise\.__version__", path.read_text("utf-8"), re.M), path


def test_the_page_of_dependencies_is_that_of_the_installed_packages() -> None:
    pins = dict(line.split("==") for line in pinned())
    pins = {canonical(name): version for name, version in pins.items()}
    if any(distribution(name).version != pins[canonical(name)] for name in needed()):
        return  # `make test-oldest` has other versions, with other licences
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.bill_of_materials"


def test_the_bill_of_materials_has_every_package_that_the_wheel_needs() -> None:
    document = bill()
    names = {canonical(one["name"]) for one in document["components"]}
    direct = {canonical(re.split(r"[<>=]", text)[0]) for text in PROJECT["dependencies"]}
    assert direct < names == {canonical(name) for name in needed()}
    refs = {one["bom-ref"] for one in document["components"]}
    for one in document["dependencies"]:
        assert set(one["dependsOn"]) <= refs
    own = document["metadata"]["component"]
    assert (own["name"], own["version"]) == ("shardwise", PROJECT["version"])


@pytest.mark.parametrize("place", ["README.md", "docs/get-started.md", "CONTRIBUTING.md"])
def test_pages_name_the_oldest_python(place: str) -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {oldest}" in (ROOT / place).read_text("utf-8")
    versions = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert versions == sorted(versions, key=lambda text: int(text[2:])) and versions[0] == oldest
