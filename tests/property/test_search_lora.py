"""The search over adapters on frozen weights is exact, as that over trained weights is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.property.search_instances import Instance, instance, memory_of, with_tight_memory
from tests.property.search_space_reference import first_reason
from tests.property.test_search_exact import Coverage, check_exact
from tests.sampling import sample_of

from shardwise.model import lora_of_text, with_lora
from shardwise.strategy import StrategyTable

SEEDS = [seed for seed in range(240) if seed % 6 != 5 and seed % 40 != 7]
"""Without those whose layers are of two kinds, and without spaces that are not listed."""


def adapted(seed: int) -> Instance:
    """The instance with adapters; in two of three with as little memory as a part of its candidates need."""
    found, rng = instance(seed), random.Random(seed)
    targets = "q_proj+v_proj" if found.question.model.experts else rng.choice(("all-linear", "k_proj+o_proj"))
    adapters = lora_of_text(f"r={rng.choice((1, 4, 16))},targets={targets}")
    question = replace(found.question, model=with_lora(found.question.model, adapters))
    problem = question.problem()
    legal = [one for one in found.candidates() if first_reason(one, problem.limits) is None]
    if seed % 3 and legal:
        share = rng.choice((0.2, 0.4, 0.6, 0.8))
        question = replace(question, cluster=with_tight_memory(rng, problem, legal[:60], share))
    return replace(found, question=question)


@pytest.mark.parametrize("seed", sample_of(SEEDS, SEEDS[:24]))
def test_the_search_is_exact(seed: int) -> None:
    check_exact(adapted(seed), Coverage())


def test_adapters_change_what_fits() -> None:
    """Among the instances, memory rejects fewer candidates than with all weights trained."""
    found, adapters = instance(4), adapted(4)
    assert found.question.model.lora is None and adapters.question.model.lora is not None
    table = StrategyTable.of(
        [one for one in found.candidates() if first_reason(one, found.question.problem().limits) is None]
    )
    full, less = (memory_of(one.question.problem(), table)[0].min() for one in (found, adapters))
    assert less < full
