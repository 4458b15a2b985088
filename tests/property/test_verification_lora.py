"""The planner's cost model of adapters on frozen weights and the checker's agree, for all software."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.property.cost_samples import Case, problem_of
from tests.property.software import SOFTWARE
from tests.property.test_verification_evaluator import (
    assert_same_columns,
    legal_strategies,
)

from shardwise.cost import Problem, bind
from shardwise.model import MODULE_SETS, lora_of_text, modules_of_layers, names_of, with_lora

ROWS, FEW_ROWS, ALL_ROWS = 60, 12, 1000

TARGETS = {
    "tiny-dense": ("r=4", "r=3,targets=all-linear", "r=2,targets=k_proj+down_proj"),
    "tiny-experts": ("r=4", "r=8,targets=k_proj+o_proj"),
    "gpt2": ("r=8", "r=8,targets=all-linear"),
}
"""Adapters of models: on some matrices of a layer or all of them, of one matrix or of joined ones."""


def adapted(case: Case, adapters: str) -> Problem:
    """The problem with these adapters."""
    problem = problem_of(case)
    return bind(with_lora(problem.model, lora_of_text(adapters)), problem.cluster, problem.job)


CASES = tuple(
    (Case(model=model, cluster="3x4xH100-SXM", batch=36, seq_len=1536, dtype=dtype), adapters)
    for (model, several), dtype in zip(TARGETS.items(), ("mxfp8", "bf16", "fp32"), strict=True)
    for adapters in several
)


@pytest.mark.parametrize(("case", "adapters"), CASES, ids=lambda value: str(value))
def test_times_and_bytes_of_many_rows(case: Case, adapters: str, full: bool) -> None:
    problem = adapted(case, adapters)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else ROWS, seed=31))
    own = modules_of_layers(kind.operators for kind in problem.model.kinds)
    sets = tuple(one for one in MODULE_SETS[1:] if set(names_of(one)) <= set(own))
    rows = legal_strategies(problem, ALL_ROWS if full else ROWS, seed=32, module_sets=sets)
    assert_same_columns(problem, rows)


@pytest.mark.parametrize("software", SOFTWARE)
@pytest.mark.parametrize(("case", "adapters"), CASES[1::2], ids=lambda value: str(value))
def test_all_software(case: Case, adapters: str, software: str, full: bool) -> None:
    problem = adapted(replace(case, software=software), adapters)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else FEW_ROWS, seed=33))
