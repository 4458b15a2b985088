"""Options of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# No test depends on the clock: one that is held up by others on its core has not failed.
# `derandomize` is named, since Hypothesis turns it on by itself where it sees that CI runs it.
settings.register_profile(
    "random", derandomize=False, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples on every machine and in every order of tests.
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True)
settings.load_profile("fixed")

# Hypothesis also draws constants that it finds in the modules loaded so far. Which those are depends on the
# tests that ran before in this process, and so on how many processes share the tests.
NO_CONSTANTS = Constants()
found_constants = providers._get_local_constants
providers._get_local_constants = lambda: NO_CONSTANTS if settings().derandomize else found_constants()

# Before anything loads them: threads of several workers on few cores spin while they wait for one another.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Tests that import PyTorch, which takes seconds in each process: slow as a whole, whatever their own time.
SLOW_PATHS = [
    Path(__file__).parent / name
    for name in (
        "runtime",
        "unit/graph/test_graph_dtensor.py",
        "unit/model/test_model_parameters_oracle.py",
        "unit/schedule/test_schedule_torch.py",
    )
]
LONGEST_ID = 150  # characters, so that an id is one line of a report
LONGEST_TEXT_IN_ID = 24  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the exhaustive and the large random tests")


def pytest_configure(config: pytest.Config) -> None:
    assert all(path.exists() for path in SLOW_PATHS), "a path of SLOW_PATHS was moved"
    config.addinivalue_line("markers", "in_full: a case of --full alone")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten a text in an id that nobody chose."""
    if isinstance(val, str) and len(val) > LONGEST_TEXT_IN_ID:
        return val[:LONGEST_TEXT_IN_ID].encode("unicode_escape").decode() + "..."
    if isinstance(val, bytes) and 4 * len(val) > LONGEST_TEXT_IN_ID:  # 4 characters each, if escaped
        return f"{len(val)} bytes"
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what needs PyTorch where no slow test runs."""
    return True if collection_path in SLOW_PATHS and config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs PyTorch as slow, and leave out the tests that only `--full` runs."""
    for each in items:
        if any(path in SLOW_PATHS for path in (each.path, *each.path.parents)):
            each.add_marker(pytest.mark.slow)
    left_out = [] if config.getoption("--full") else [each for each in items if _is_in_full(each)]
    if left_out:
        items[:] = [each for each in items if not _is_in_full(each)]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test with a long id, which would fill the reports."""
    # Not its own `nodeid`, to which pytest-xdist adds the name of a group.
    size = len(f"{item.parent.nodeid if item.parent else ''}::{item.name}")
    if size > LONGEST_ID:
        pytest.fail(f"this id has {size} characters, more than {LONGEST_ID}: give ids= or id=", pytrace=False)


def _is_in_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("in_full") is not None


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether exhaustive tests run in full instead of on a sample."""
    return bool(request.config.getoption("--full"))
