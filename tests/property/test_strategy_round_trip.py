"""Every candidate of the declared space is a strategy that text, tables and `complete` leave unchanged."""

from __future__ import annotations

import random
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from tests.property.search_space_reference import SpaceTwin, keeps

from shardwise.errors import ConfigError
from shardwise.strategy import ALIASES, FIELDS, StrategyTable, complete, parse_fields, strategy_text

TWINS = st.builds(
    SpaceTwin,
    core=st.booleans(),
    devices=st.integers(1, 24),
    layers=st.integers(1, 16),
    moe=st.booleans(),
    batch=st.integers(1, 48),
)


@given(TWINS, st.integers(0, 2**32))
def test_candidates_read_back(twin: SpaceTwin, seed: int) -> None:
    strategy = twin.random_candidate(random.Random(seed))
    fields = parse_fields(strategy_text(strategy))
    whole = complete(
        fields,
        devices=twin.devices,
        layers=twin.layers,
        experts=8 if twin.moe else None,
        global_batch_size=twin.batch,
    )
    assert whole == strategy
    assert StrategyTable.of([strategy])[0] == strategy
    assert keeps(strategy, fields)


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([*FIELDS, *ALIASES, "=", ",", "1", "-", "tp"])).map("".join)
)
def test_any_text_is_fields_or_refused(text: str) -> None:
    with suppress(ConfigError):
        assert set(parse_fields(text)) <= {*FIELDS, *ALIASES}
