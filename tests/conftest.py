"""Options of the whole suite, and reproducible random tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# No test has a deadline: other processes on the core may delay it. `derandomize` is explicit, since
# Hypothesis turns it on in CI.
settings.register_profile(
    "random", derandomize=False, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples on every machine and in every order of tests.
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True)
settings.load_profile("fixed")

# Hypothesis also uses constants of the modules loaded so far. These depend on the tests that ran before in
# this process, and so on the number of pytest workers.
NO_CONSTANTS = Constants()
found_constants = providers._get_local_constants
providers._get_local_constants = lambda: NO_CONSTANTS if settings().derandomize else found_constants()

# Set before these libraries load: threads of several workers on few cores would spin while they wait.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Tests that import PyTorch, which takes seconds in each process: all of them count as slow.
SLOW_PATHS = [
    Path(__file__).parent / name
    for name in (
        "runtime",
        "unit/graph/test_graph_dtensor.py",
        "unit/model/test_model_parameters_oracle.py",
        "unit/schedule/test_schedule_torch.py",
    )
]
LONGEST_ID = 150  # characters, an id fits on one line of a report
LONGEST_TEXT_IN_ID = 24  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the exhaustive and the large random tests")


def pytest_configure(config: pytest.Config) -> None:
    assert all(path.exists() for path in SLOW_PATHS), "a path of SLOW_PATHS was moved"
    config.addinivalue_line("markers", "in_full: a case that runs with --full only")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shortens texts in generated ids."""
    if isinstance(val, str) and len(val) > LONGEST_TEXT_IN_ID:
        return val[:LONGEST_TEXT_IN_ID].encode("unicode_escape").decode() + "..."
    if isinstance(val, bytes) and 4 * len(val) > LONGEST_TEXT_IN_ID:  # 4 characters each, if escaped
        return f"{len(val)} bytes"
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import tests that need PyTorch if no slow test runs."""
    return True if collection_path in SLOW_PATHS and config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that need PyTorch as slow, and leaves out those that run with `--full` only."""
    for each in items:
        if any(path in SLOW_PATHS for path in (each.path, *each.path.parents)):
            each.add_marker(pytest.mark.slow)
    left_out = [] if config.getoption("--full") else [each for each in items if _is_in_full(each)]
    if left_out:
        items[:] = [each for each in items if not _is_in_full(each)]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails a test with a long id, which would make reports unreadable."""
    # Not the item's own `nodeid`: pytest-xdist adds the name of a group to it.
    size = len(f"{item.parent.nodeid if item.parent else ''}::{item.name}")
    if size > LONGEST_ID:
        pytest.fail(f"this id has {size} characters, more than {LONGEST_ID}: give ids= or id=", pytrace=False)


def _is_in_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("in_full") is not None


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether exhaustive tests run in full instead of on a sample."""
    return bool(request.config.getoption("--full"))
