"""The search over sets of named modules is exact: its answer is that of listing every candidate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.property.search_instances import LARGEST_LISTED, Instance, instance_with_modules
from tests.property.test_search_exact import Coverage, check_all, check_exact, judged

from shardwise.cost import module_costs
from shardwise.cost.bounds import subproblem
from shardwise.model import MODULES

SEEDS = range(120)


def cases(seeds: range) -> list[Instance]:
    """The instances of these seeds that have sets of modules and can be listed."""
    found = [case for seed in seeds if (case := instance_with_modules(seed)) is not None]
    return [case for case in found if case.count <= LARGEST_LISTED]


@pytest.mark.slow
def test_search_over_sets_of_modules_is_exact() -> None:
    """Under every goal; together the instances have each module in a strategy that fits."""
    modules: Counter[str] = Counter()
    for case in cases(SEEDS):
        try:
            check_exact(case, Coverage())
        except Exception as error:
            raise AssertionError(f"the instance of seed {case.seed}: {error}") from error
        fitting = judged(case.question.problem(), case.candidates()).fitting
        modules.update(name for one in fitting for name in one.recompute_modules.split("+") if name)
    assert set(modules) == set(MODULES)


@pytest.mark.slow
@pytest.mark.parametrize(("field", "factor"), [(module_costs.SECONDS, 3.0), (module_costs.RECOMPUTED, 50.0)])
def test_a_bound_of_sets_that_is_too_high_is_caught(
    field: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same check fails where the bounds of nodes count more than a set adds."""

    class Overestimated(module_costs.SelectiveRows):
        @property
        def columns(self) -> Any:
            columns = np.array(super().columns)
            columns[field] *= factor
            return columns

    monkeypatch.setattr(subproblem, "SelectiveRows", Overestimated)
    with pytest.raises(AssertionError):
        check_all(cases(SEEDS))
