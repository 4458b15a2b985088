"""Legality on columns, compared with the rules written as sentences."""

from __future__ import annotations

import itertools

import numpy as np

from shardwise.schedule import NAMES, illegal_codes, in_flight, legal_mask
from shardwise.schedule.legality import REASONS, code_of, illegal_reason
from shardwise.strategy.strategy import SCHEDULES

V_SHAPES = ("zb_v", "dualpipe_v")


def plain_rule(name: str, pp: int, m: int, vpp: int) -> str | None:
    """The rules of docs/concepts/schedules.md."""
    if name in V_SHAPES and vpp != 2:
        return "schedule_vpp"
    if name == "interleaved_1f1b" and vpp == 1:
        return "schedule_vpp"
    if name not in (*V_SHAPES, "interleaved_1f1b") and vpp != 1:
        return "schedule_vpp"
    if pp == 1 and name not in ("1f1b", "gpipe"):
        return "schedule_needs_pipeline"
    if name == "interleaved_1f1b" and m % pp:
        return "schedule_microbatches_divisible"
    if name in V_SHAPES and m < 2 * pp:
        return "schedule_microbatches_minimum"
    return None


def test_columns_agree_with_the_plain_rules_everywhere() -> None:
    cases = list(itertools.product(range(len(NAMES)), range(1, 17), range(1, 65), range(1, 5)))
    code, pp, m, vpp = np.array(cases, dtype=np.int64).T
    found = illegal_codes(code, pp, m, vpp)
    expected = [plain_rule(NAMES[case[0]], *case[1:]) for case in cases]
    assert [REASONS[value - 1] if value else None for value in found.tolist()] == expected
    assert legal_mask(code, pp, m, vpp).tolist() == [reason is None for reason in expected]


def test_scalars_agree_with_columns() -> None:
    for name in NAMES:
        for pp, m, vpp in [(1, 1, 1), (2, 4, 2), (4, 6, 2), (3, 5, 2), (-1, 4, 1), (4, 4, 3)]:
            column = illegal_codes(*(np.array([value]) for value in (code_of(name), pp, m, vpp)))
            reason = illegal_reason(name, pp, m, vpp)
            assert (REASONS.index(reason) + 1 if reason else 0) == column[0]


def test_names_have_the_order_of_the_strategy_field() -> None:
    assert NAMES == SCHEDULES


def test_in_flight_broadcasts_over_mixed_schedules_and_ranks() -> None:
    # pp 4, m 8: 1f1b has 4, 3, 2, 1 in flight; zb_v 2 * 4 everywhere; interleaved vpp 2 has 2 * (3 - r) + 4 +
    # 1.
    code = np.array([[code_of("1f1b")], [code_of("zb_v")], [code_of("interleaved_1f1b")]])
    vpp = np.array([[1], [2], [2]])
    limits = in_flight(code, 4, 8, vpp, np.arange(4))
    assert limits.tolist() == [[4, 3, 2, 1], [8, 8, 8, 8], [11, 9, 7, 5]]
