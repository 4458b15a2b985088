"""Options of the whole suite."""

from __future__ import annotations

import os

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the exhaustive and the large random tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "in_full: a case of --full alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--full` has."""
    left_out = [] if config.getoption("--full") else [each for each in items if _is_in_full(each)]
    if left_out:
        items[:] = [each for each in items if not _is_in_full(each)]
        config.hook.pytest_deselected(items=left_out)


def _is_in_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("in_full") is not None


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether exhaustive tests run in full instead of on a sample."""
    return bool(request.config.getoption("--full"))
